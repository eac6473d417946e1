"""mteb's own command, with saved models of st_reba: ``python -m st_reba.evaluation.mteb run -m my-model -t STSB``.

Importing st_reba makes its modules known, so models on the Hub load, too. A directory is registered before mteb looks.
"""

from pathlib import Path

from ...optional import require
from . import mteb_model


def main() -> None:
    """Parse the command line as mteb does, register a model that is a directory, and run mteb's command."""
    require("mteb", "mteb", "mteb's command")
    from mteb.cli.build_cli import build_cli

    parser = build_cli()
    given = parser.parse_args()
    if not hasattr(given, "func"):
        parser.error("name a command, such as run")
    for name in ("model", "model_name"):
        if (typed := getattr(given, name, None)) and Path(typed).is_dir():
            mteb_model(typed)
    given.func(given)


main()
