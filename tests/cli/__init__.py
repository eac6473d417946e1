"""The command, typed: each line in this process."""

import shlex

from typer.testing import CliRunner

from st_reba_cli import app
from st_reba_cli.printing import console, notes

# A console takes its width when it is made, which another test may have done.
console.width = notes.width = 900


def typed(line: str, expect: int = 0) -> str:
    """What a command line prints, errors included, with white space of any length as one blank.

    Args:
        line: As in a shell, behind ``st-reba``.
        expect: Its exit code.
    """
    done = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "900"})
    assert done.exit_code == expect, (done.output, done.exception)
    return " ".join(done.output.split())
