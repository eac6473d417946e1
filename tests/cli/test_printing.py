"""What commands print: escaped, and how far they are."""

from __future__ import annotations

import errno
import io
import time
import warnings
from typing import Annotated

import pytest
import typer
from rich.color import ColorSystem
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from st_reba_cli import printing
from st_reba_cli.command import Commands, app
from st_reba_cli.printing import EscapingConsole, Shown, printable

#: Clears the screen, colours, rings, rewrites the line, turns the direction; and the one-byte form of ESC [.
HOSTILE = "a\x1b[2J\x07\r\x9b31m\u202eb"
ESCAPED = "a\\x1b[2J\\x07\\r\\x9b31m\\u202eb"


@pytest.fixture
def screen(monkeypatch):
    """What a terminal of 80 columns would be sent by ``notes``."""
    stream = io.StringIO()
    for name in ("console", "notes"):
        console = EscapingConsole()
        console.file, console.width = stream, 80
        monkeypatch.setattr(printing, name, console)
    return stream


def test_what_is_shown_as_it_is():
    assert printable("a\tb\nc 🦩 中文 é [bold]x[/bold] :smile:") == "a\tb\nc 🦩 中文 é [bold]x[/bold] :smile:"
    assert printable(HOSTILE) == ESCAPED


def test_whatever_holds_it_is_escaped(screen):
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    for printed in (HOSTILE, Text(HOSTILE, style="red"), Text.assemble(("Error:", "red"), HOSTILE), table):
        printing.console.print(printed, soft_wrap=True)
    shown = screen.getvalue()
    assert not printing._CONTROL.search(shown)
    # Rich's Text leaves out by itself what would move the cursor.
    assert [shown.count(ESCAPED), shown.count("a\\x1b[2J\\x9b31m\\u202eb")] == [3, 3]


def test_styles_of_a_terminal_stay(screen):
    printing.console._force_terminal = True
    printing.console._color_system = ColorSystem.STANDARD
    printing.console.print(Text("x", style="red"))
    assert screen.getvalue() == "\x1b[31mx\x1b[0m\n"


def failing(error):
    """The options of the whole command, and two subcommands that raise an error."""
    command = typer.Typer(cls=Commands)

    @command.callback()
    def options(traceback: Annotated[bool, typer.Option("--traceback")] = False) -> None: ...

    @command.command()
    def fail() -> None:
        raise error

    @command.command()
    def warn() -> None:
        warnings.warn(HOSTILE, stacklevel=1)
        warnings.warn("for programmers", DeprecationWarning, stacklevel=1)

    return command


def test_errors_are_sentences_and_escaped():
    said = CliRunner().invoke(failing(ValueError(HOSTILE)), ["fail"], env={"COLUMNS": "900"})
    assert said.exit_code == 1
    assert said.stderr == "Error: a\\x1b[2J\\x9b31m\\u202eb\n"


@pytest.mark.parametrize("error", [ValueError("an error of our own"), OSError("no room"), ImportError("not there")])
def test_an_error_is_traced_where_it_is_asked_for(error):
    said = CliRunner().invoke(failing(error), ["--traceback", "fail"])
    assert said.exception is error


def test_a_disk_that_is_full_is_told():
    said = CliRunner().invoke(failing(OSError(errno.ENOSPC, "No space left on device")), ["fail"])
    assert "The disk is full ([Errno 28] No space left on device): make room" in " ".join(said.stderr.split())


def test_warnings_are_notes():
    said = CliRunner().invoke(failing(None), ["warn"], env={"COLUMNS": "900"})
    assert (said.exit_code, said.stderr) == (0, "Note: a\\x1b[2J\\x9b31m\\u202eb\n")


@pytest.mark.parametrize(
    "line", [["encode", "m", "t", f"--{HOSTILE}"], [HOSTILE], ["compare", "--batch-size", HOSTILE]]
)
def test_what_was_mistyped_is_escaped(line):
    """A shell hands on whatever names files have."""
    result = CliRunner().invoke(app, line, env={"COLUMNS": "900"})
    assert result.exit_code == 2
    assert not printing._CONTROL.search(result.output)


def test_commands_return_what_the_group_would():
    nothing = typer.Typer(cls=Commands)

    @nothing.command()
    def one() -> None:
        raise typer.Exit(7)

    @nothing.command()
    def two() -> None: ...

    assert CliRunner().invoke(nothing, ["one"]).exit_code == 7


class TestProgress:
    def run(self, screen, monkeypatch, steps=3):
        monkeypatch.setattr(Shown, "EVERY", 0.05)
        with Shown() as shown:
            bar = shown.add_task(f"Comparing {HOSTILE}", total=4000, unit="tokens")
            for _ in range(steps):
                shown.advance(bar, 1000)
                time.sleep(0.1)
        return screen.getvalue()

    def test_without_a_terminal_there_is_a_line_now_and_then(self, screen, monkeypatch):
        lines = self.run(screen, monkeypatch).splitlines()
        assert len(lines) >= 2
        assert lines[0].startswith(f"Comparing {ESCAPED}: 1,000 of 4,000 tokens")
        assert "3,000 of 4,000 tokens, " in lines[-1]
        assert " tokens/s, about 0:0" in lines[-1]
        assert " left, " in lines[-1]
        before = len(screen.getvalue())
        time.sleep(0.15)
        assert len(screen.getvalue()) == before, "it ends with the work"

    def test_on_a_terminal_there_is_a_bar_and_no_line(self, screen, monkeypatch):
        printing.notes._force_terminal = printing.notes.is_interactive = True
        shown = self.run(screen, monkeypatch)
        assert "since it began" not in shown
        assert " of 4,000" in shown

    def test_each_stage_is_counted_in_its_unit(self):
        shown = Shown()
        bar = shown.add_task("Loading", total=None, unit="")
        shown.stage(bar, "Encoding", 500, 1000, "texts")
        (task,) = shown.tasks
        assert (task.description, task.completed) == ("Encoding", 500)
        assert task.speed is None, "what an interrupted run has left is not speed"
        for done in (600, 700):
            shown.stage(bar, "Encoding", done, 1000, "texts")
            time.sleep(0.01)
        assert printing._done(task).startswith("700 of 1,000 texts, ")
        assert printing._done(task).endswith(" texts/s")
        assert "left" in printing._left(task)
        shown.stage(bar, "Hashing", 500, 1000, "MB")
        assert printing._done(task) == "500 of 1,000 MB"

    def test_nothing_is_said_of_quick_work(self, screen):
        with Shown() as shown:
            shown.add_task("Comparing", total=1, unit="texts")
        assert screen.getvalue() == ""
