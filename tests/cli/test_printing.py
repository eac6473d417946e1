"""What commands print: escaped, nothing of it markup; a comparison on any terminal; and how far they are."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import tomllib
import warnings
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

import st_reba
import st_reba_cli as cli
from st_reba.compare import report as page
from st_reba.compare.results import TIED
from st_reba.data.sources import ALL, COMPRESSIONS, KINDS, files_here
from st_reba_cli import Commands, app, options, printing
from st_reba_cli.options import option
from st_reba_cli.printing import EscapingConsole, Shown, printable
from st_reba_cli.show import show

from ..compare import samples
from ..conftest import raising
from . import typed

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


def test_whatever_holds_it_is_escaped(screen):
    plain = "a\tb\nc 🦩 中文 é [bold]x[/bold] :smile:"
    assert (printable(plain), printable(HOSTILE)) == (plain, ESCAPED)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    for printed in (HOSTILE, Text(HOSTILE, style="red"), Text.assemble(("Error:", "red"), HOSTILE), table):
        printing.console.print(printed, soft_wrap=True)
    shown = screen.getvalue()
    assert not printing._CONTROL.search(shown)
    # Rich's Text leaves out by itself what would move the cursor.
    assert [shown.count(ESCAPED), shown.count("a\\x1b[2J\\x9b31m\\u202eb")] == [3, 3]


def ending(error: Exception | None, *words: str):
    """What a subcommand gives that raises an error, or warns."""
    command = typer.Typer(cls=Commands)

    @command.callback()
    def main(traceback: Annotated[bool, option("", "--traceback")] = False) -> None: ...

    @command.command()
    def fail() -> None:
        if error is not None:
            raise error
        warnings.warn(HOSTILE, stacklevel=1)
        warnings.warn("for programmers", DeprecationWarning, stacklevel=1)

    @command.command()
    def other() -> None: ...

    return CliRunner().invoke(command, [*words, "fail"], env={"COLUMNS": "900"})


def test_errors_are_sentences_and_warnings_are_notes():
    for error in (ValueError(HOSTILE), OSError(HOSTILE), ImportError(HOSTILE)):
        said = ending(error)
        assert (said.exit_code, said.stderr) == (1, "Error: a\\x1b[2J\\x9b31m\\u202eb\n")
        assert ending(error, "--traceback").exception is error
    said = ending(None)
    assert (said.exit_code, said.stderr) == (0, "Note: a\\x1b[2J\\x9b31m\\u202eb\n")
    assert ending(typer.Exit(7)).exit_code == 7
    # A shell hands on whatever names files have.
    for line in (["push", f"--{HOSTILE}"], [HOSTILE], ["compare", "--batch-size", HOSTILE]):
        mistyped = CliRunner().invoke(app, line, env={"COLUMNS": "900"})
        assert (mistyped.exit_code, printing._CONTROL.search(mistyped.output)) == (2, None)


@pytest.mark.parametrize("terminal", [False, True])
def test_how_far_it_is(terminal, screen, monkeypatch):
    """In a log there is a line now and then; and work that an interrupted run has left is no speed."""
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    with Shown(f"Comparing {HOSTILE}", "tokens", 4000) as shown:
        assert ESCAPED in str(shown._bar)
        shown.more(1000, HOSTILE)
        assert str(shown._bar).startswith(f"{ESCAPED}:  25%")
        shown.stage("Encoding", 500, 1000, "texts")
        assert (shown._bar.n, shown._bar.initial, shown._bar.mininterval) == (500, 500, 0.25 if terminal else 10)
        shown.stage("Encoding", 700, 1000, "texts")
        assert "Encoding:  70%" in str(shown._bar)
    assert screen.getvalue() == "", "nothing is said of quick work"


def shown(comparison, width: int) -> str:
    stream = io.StringIO()
    to = Console(file=stream, width=width, no_color=True, markup=False, emoji=False, highlight=False)
    show(comparison, ["--recipes all compares every recipe."], to)
    return stream.getvalue()


@pytest.mark.parametrize(("sample", "width"), [(samples.real, 80), (samples.demo, 120)])
def test_every_line_fits_and_every_number_is_whole(sample, width):
    comparison = sample()
    lines = shown(comparison, width).splitlines()
    free = {comparison.answer, comparison.build}
    assert all(len(line) <= width for line in lines if line not in free)
    text = "\n".join(lines)
    assert "…" not in text
    assert "\x1b" not in text
    for result in comparison.results:
        if not result.recipe.startswith("Random weights"):
            score = result.scores[comparison.tasks[0].name]
            assert comparison.tasks[0].show(score.value) in text
    # Of more than three names there is a count.
    assert all(line.count(";") <= 3 for line in lines)


def test_a_comparison_without_colours():
    """The answer, then what to type, then the best with both its scores; ties are marked, and who was left out."""
    comparison = samples.real()
    lines = shown(comparison, 120).splitlines()
    about = "a small model on 400 pairs of pairs.tsv (bfloat16, cpu)"
    assert lines[:5] == [comparison.answer, "", comparison.build, "", about]
    rows = [line for line in lines if line.startswith(("→", "Knowledge", "Value", "PromptEOL", "partwise"))]
    names = ["→ Early and late", "partwise whitened", "Knowledge", "Value aggregation", "PromptEOL"]
    assert [row.split("  ")[0].split(",")[0] for row in rows] == names
    assert [row.split()[-3] for row in rows[:2]] == ["72.5", "71.7"]
    assert "[67, 76]" in rows[1]
    assert [TIED in row for row in rows] == [False, False, True, True, False]
    # Random weights are a column of the first task alone.
    assert rows[3].split()[-3:] == ["12.2", "20", "1.6x"]
    assert rows[4].split()[-3:] == ["@27", "17", "1.9x"]
    assert "Left out RT-2, last; RT-4, last; RT-8, last: no cache" in " ".join(" ".join(lines).split())
    many = dataclasses.replace(comparison, skipped=[(f"RT-{passes}, last", "no cache") for passes in range(4)])
    assert "Left out 4 recipes: no cache" in shown(many, 120)


# Read as markup, the first is lost, the second closes what was never opened, the third becomes a sign.
ODD = "[report] a/[/red] :warning: b"


def test_nothing_that_a_user_gave_is_markup(desk):
    Path(ODD).mkdir(parents=True)
    pairs, report = Path("pairs.tsv").rename(f"{ODD}/[data].tsv"), f"{ODD}/report"
    on = "--model shallow --device cpu --dtype float32"
    output = typed(f"compare {on} --data '{pairs}' --recipes classical --out '{report}' --save-best '{ODD}/best'")
    assert "20 pairs of [data].tsv" in output
    line = "Load it with: import st_reba; from sentence_transformers import SentenceTransformer; SentenceTransformer"
    assert f'to {ODD}/best. {line}("{ODD}/best")' in output
    assert f"Report: {report}/report.html" in output
    assert f"{ODD}/best exists and is not an empty" in typed(f"build --model lm --out '{ODD}/best'", expect=1)


def test_a_line_that_loads_is_python_whatever_the_path_has():
    """A path of Windows has backslashes."""
    path = 'new\\table "1" 表'
    call = printing.loading_line("SentenceTransformer", path).rpartition("; ")[2]
    assert eval(call, {"SentenceTransformer": str}) == path


#: What a full disk says, and what safetensors says of one.
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_TOO = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


FULL_DISKS = [
    # Its scores have been shown, nothing is left of it, and the best recipe is written.
    ((page, "write_csv"), FULL, "another place: 'report'", {"best", "report.partial"}),
    ((SentenceTransformer, "save_pretrained"), FULL_TOO, "another place: 'best'", {"report"}),
    (("st_reba.evaluation.embedded.save",), FULL, "No space left on device, and nothing is left", set()),
]


@pytest.mark.parametrize(("place", "error", "said", "left"), FULL_DISKS)
def test_a_full_disk(place, error, said, left, desk, monkeypatch):
    before = {path.name for path in desk.iterdir()}
    monkeypatch.setattr(*place, raising(error))
    out = "--save-best best --out report" if left else "--save-best best"
    assert said in typed(f"compare --model shallow --device cpu --data pairs.tsv --recipes classical {out}", expect=1)
    assert {path.name for path in desk.iterdir()} == before | left


def test_what_is_refused_at_once_is_refused_later_in_the_same_words(desk):
    """Where nothing is imported yet the standard library alone says it; st_reba has the last word."""
    for name in ("no.tsv", "no.JSONL", "no.gz", "no*.tsv", "/no", "a/b/c"):
        with pytest.raises(FileNotFoundError) as at_once:
            options.check_source(name)
        with pytest.raises(FileNotFoundError, match=re.escape(str(at_once.value))):
            files_here(name, ALL)
    for name in ("org/name", "name:subset:split", "s3://a/no.tsv"):
        assert options.check_source(name) == name
        assert files_here(name, ALL) is None
    assert {*options._TABLES} == {*KINDS, *COMPRESSIONS}


def test_an_install_hint_names_the_extra():
    """Every extra that ``require`` names brings the package that is written beside it."""
    pyproject = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras, named = tomllib.loads(pyproject)["project"]["optional-dependencies"], set()
    for path in [*Path(st_reba.__file__).parent.rglob("*.py"), *Path(cli.__file__).parent.rglob("*.py")]:
        for package, extra in re.findall(r'require\((?:"([\w.]+)"|\w+), "(\w+)"', path.read_text(encoding="utf-8")):
            assert package.partition(".")[0] in " ".join(extras[extra]), path
            named.add(extra)
    assert named >= {"ray", "mteb", "gguf", "train", "serve"}
