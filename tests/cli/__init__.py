"""The command, typed: each line in this process."""

import shlex

from typer.testing import CliRunner

from st_reba_cli import app


def run(line: str) -> tuple[int, str]:
    """The exit code of a command line behind ``st-reba``, and what it prints, errors included."""
    done = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "900"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def typed(line: str, expect: int = 0) -> str:
    """What a command line prints, errors included, with white space of any length as one blank.

    Args:
        line: As in a shell, behind ``st-reba``.
        expect: Its exit code.
    """
    code, output = run(line)
    assert code == expect, output
    return " ".join(output.split())
