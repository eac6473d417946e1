"""What commands print: escaped, nothing of it markup; a comparison on any terminal; and how far they are."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import sys
import time
import tomllib
import warnings
from pathlib import Path
from typing import Annotated

import pytest
import torch
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
from st_reba_cli import Commands, app, load, options, printing
from st_reba_cli.options import option
from st_reba_cli.printing import EscapingConsole, Shown, printable
from st_reba_cli.show import show, with_command

from ..compare import samples
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
    full = ending(OSError(errno.ENOSPC, "No space left on device")).stderr
    assert "The disk is full ([Errno 28] No space left on device): make room" in full
    said = ending(None)
    assert (said.exit_code, said.stderr) == (0, "Note: a\\x1b[2J\\x9b31m\\u202eb\n")
    assert ending(typer.Exit(7)).exit_code == 7
    # A shell hands on whatever names files have.
    for line in (["push", f"--{HOSTILE}"], [HOSTILE], ["compare", "--batch-size", HOSTILE]):
        mistyped = CliRunner().invoke(app, line, env={"COLUMNS": "900"})
        assert (mistyped.exit_code, printing._CONTROL.search(mistyped.output)) == (2, None)


class TestProgress:
    def run(self, screen, monkeypatch):
        monkeypatch.setattr(Shown, "EVERY", 0.05)
        with Shown(f"Comparing {HOSTILE}", "tokens", 4000) as shown:
            for _ in range(3):
                shown.more(1000)
                time.sleep(0.1)
        return screen.getvalue()

    def test_without_a_terminal_there_is_a_line_now_and_then(self, screen, monkeypatch):
        lines = self.run(screen, monkeypatch).splitlines()
        assert lines[0].startswith(f"Comparing {ESCAPED}: ")
        assert re.search(r"3,000 of 4,000 tokens, .* tokens/s, about 0:0\d left, \d s since it began", lines[-1])
        before = len(screen.getvalue())
        time.sleep(0.15)
        assert len(screen.getvalue()) == before, "it ends with the work"

    def test_on_a_terminal_there_is_a_bar_and_no_line(self, screen, monkeypatch):
        printing.notes._force_terminal = printing.notes.is_interactive = True
        shown = self.run(screen, monkeypatch)
        assert "since it began" not in shown
        assert " of 4,000" in shown

    def test_each_stage_is_counted_in_its_unit(self, screen):
        with Shown("Loading", "") as shown:
            shown.stage("Encoding", 500, 1000, "texts")
            (task,) = shown.tasks
            assert task.speed is None, "what an interrupted run has left is not speed"
            for done in (600, 700):
                shown.stage("Encoding", done, 1000, "texts")
                time.sleep(0.01)
            assert re.fullmatch(r"700 of 1,000 texts, [\d,]+ texts/s, about 0:\d\d left", printing._told(task))
            shown.stage("Hashing", 500, 1000, "MB")
            assert printing._told(task) == "500 of 1,000 MB"
        assert screen.getvalue() == "", "nothing is said of quick work"


def shown(comparison, width: int, terminal: bool = False) -> str:
    stream = io.StringIO()
    to = Console(
        file=stream, width=width, force_terminal=terminal, no_color=True, markup=False, emoji=False, highlight=False
    )
    show(comparison, ["--recipes all compares every recipe."], to)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("sample", [samples.real, samples.demo])
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
    """The answer, then what to type, then the best first; ties are marked, and what was left out is told."""
    comparison = samples.real()
    lines = shown(comparison, 120).splitlines()
    about = "a small model on 400 pairs of pairs.tsv (bfloat16, cpu)"
    assert lines[:5] == [comparison.answer, "", comparison.build, "", about]
    # A terminal breaks it between words.
    in_terminal = re.sub(r"\x1b\[\d*m", "", shown(comparison, 80, terminal=True)).splitlines()
    assert " ".join(" ".join(in_terminal[:3]).split()) == comparison.answer
    rows = [line for line in lines if "[" in line and line.startswith(("Early", "Knowledge", "→", "PromptEOL"))]
    # What is advised is marked.
    names = ["Early and late", "Knowledge", "→ Value aggregation", "PromptEOL"]
    assert [row.split(",")[0].split("  ")[0] for row in rows] == names
    assert [TIED in row for row in rows] == [False, True, True, False]
    # Random weights are a column of the first task alone.
    assert rows[2].split()[-3:] == ["12.2", "20", "1.6x"]
    assert "Left out RT-2, last; RT-4, last; RT-8, last: no cache" in " ".join(" ".join(lines).split())
    many = dataclasses.replace(comparison, skipped=[(f"RT-{passes}, last", "no cache") for passes in range(4)])
    assert "Left out 4 recipes: no cache" in shown(many, 120)


def test_what_only_the_command_line_knows():
    found = dataclasses.replace(samples.real(), build="")
    spec = {"Value aggregation": "value-aggregation"}
    results = [dataclasses.replace(result, spec=spec.get(result.recipe, "")) for result in found.results]
    found = dataclasses.replace(found, results=results)
    made = with_command(found, "st-reba compare", "org/model", "pairs", max_seq_length=64)
    assert (made.model, made.data, made.command) == ("org/model", "pairs", "st-reba compare")
    assert made.build == (
        "st-reba build --model org/model --recipe value-aggregation --max-seq-length 64 --dtype bfloat16 "
        "--out my-value-aggregation"
    )
    elsewhere = with_command(found, "", "m.gguf", "pairs", named=["--model", "m.gguf", "--engine", "llama.cpp"])
    assert elsewhere.build.startswith("st-reba build --model m.gguf --engine llama.cpp --recipe ")
    assert "--dtype" not in elsewhere.build
    assert with_command(dataclasses.replace(found, use=""), "", "m", "pairs").build == ""
    fitted = [dataclasses.replace(result, spec=result.spec and "early-late") for result in results]
    assert with_command(dataclasses.replace(found, results=fitted), "", "m", "pairs", unbuilt=True).build == ""


# Read as markup, the first is lost, the second closes what was never opened, the third becomes a sign.
ODD = "[report] a/[/red] :warning: b"


def test_nothing_that_a_user_gave_is_markup(desk):
    Path(ODD).mkdir(parents=True)
    pairs, report = Path("pairs.tsv").rename(f"{ODD}/[data].tsv"), f"{ODD}/report"
    on = "--model shallow --device cpu --dtype float32"
    output = typed(f"compare {on} --data '{pairs}' --recipes classical --out '{report}' --save-best '{ODD}/best'")
    assert "20 pairs of [data].tsv" in output
    assert f'to {ODD}/best. Load it with: import st_reba; SentenceTransformer("{ODD}/best")' in output
    assert f"Report: {report}/report.html" in output
    output = typed(f"build --model lm --out '{ODD}/model'")
    assert f'Wrote {ODD}/model. Load it with: import st_reba; SentenceTransformer("{ODD}/model")' in output
    assert f"{ODD}/model exists and is not an empty" in typed(f"build --model lm --out '{ODD}/model'", expect=1)
    assert f"vectors to {ODD}/a.npy" in typed(f"encode '{ODD}/best' texts.txt --device cpu --out '{ODD}/a.npy'")


#: What a full disk says, and what safetensors says of one.
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_TOO = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("place", "error", "said", "left"),
    [
        # Its scores have been shown, nothing is left of it, and the best recipe is written.
        ((page, "write_csv"), FULL, "report could not be written: there is no", {"best", "report.partial"}),
        ((SentenceTransformer, "save_pretrained"), FULL_TOO, "best could not be written: there is no", {"report"}),
        (("st_reba.evaluation.embedded.save",), FULL, "the disk is full. Embeddings lie there while", set()),
    ],
)
def test_a_full_disk(place, error, said, left, desk, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    before = {path.name for path in desk.iterdir()}
    monkeypatch.setattr(*place, fail)
    out = "--save-best best --out report" if left else "--save-best best"
    assert said in typed(f"compare --model shallow --device cpu --data pairs.tsv --recipes classical {out}", expect=1)
    assert {path.name for path in desk.iterdir()} == before | left


def test_results_need_neither_matplotlib_nor_jinja(desk, monkeypatch):
    """And what draws the page is installed later: nothing is compared anew."""
    with monkeypatch.context() as hidden:
        for name in ("matplotlib", "matplotlib.figure", "jinja2"):
            hidden.setitem(sys.modules, name, None)
        said = typed(
            "compare --model shallow --device cpu --data pairs.tsv --recipes classical --no-controls --out out"
        )
    assert {path.name for path in Path("out").iterdir()} == {"results.csv", "comparison.json"}
    assert said.startswith("--out will be results.csv and comparison.json, without a page.")
    assert 'pip install "st-reba[report]", and then st-reba compare --saved out/comparison.json --out out-page' in said
    assert "Report: out-page/report.html" in typed("compare --saved out/comparison.json --out out-page")
    assert "charset" in Path("out-page/report.html").read_text(encoding="utf-8")
    assert Path("out-page/comparison.json").read_bytes() == Path("out/comparison.json").read_bytes()


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
    assert {*options.known_names().templates} == st_reba.TEMPLATES.keys()


def test_the_stand_in_is_made_once_and_alike_everywhere(tmp_path, monkeypatch):
    made, state = [], torch.random.get_rng_state()
    for name in ("first", "second"):
        monkeypatch.setattr(load, "cached_assets_path", lambda *names, name=name: tmp_path / name)
        (tmp_path / name).mkdir()
        weights = load.stand_in() / "model.safetensors"
        made.append(weights.read_bytes())
        written = weights.stat().st_mtime_ns
        assert (load.stand_in() / "model.safetensors").stat().st_mtime_ns == written
    assert made[0] == made[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_install_hint_names_the_extra():
    """Every extra that ``require`` names brings the package that is written beside it."""
    pyproject = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras, named = tomllib.loads(pyproject)["project"]["optional-dependencies"], set()
    for path in [*Path(st_reba.__file__).parent.rglob("*.py"), *Path(cli.__file__).parent.rglob("*.py")]:
        for package, extra in re.findall(r'require\((?:"([\w.]+)"|\w+), "(\w+)"', path.read_text(encoding="utf-8")):
            assert package.partition(".")[0] in " ".join(extras[extra]), path
            named.add(extra)
    assert named >= {"report", "ray", "mteb", "gguf", "train", "serve"}
