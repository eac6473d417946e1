"""The command, typed: each line in this process."""

from typer.testing import CliRunner

from st_reba_cli import app


def typed(*words: object, expect: int = 0) -> str:
    """What a command line prints, errors included, with white space of any length as one blank.

    Args:
        *words: The line.
        expect: Its exit code.
    """
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "900"})
    assert done.exit_code == expect, (done.output, done.exception)
    return " ".join(done.output.split())
