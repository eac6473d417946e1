"""What a terminal, a narrow one, one without colours and a pipe show of a comparison."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from st_reba.compare.results import TIED
from st_reba_cli.show import show, with_command

from ..compare import samples


def shown(comparison, width: int, terminal: bool = True) -> str:
    shown_on = io.StringIO()
    console = Console(
        file=shown_on, width=width, force_terminal=terminal, no_color=True, markup=False, emoji=False,
        highlight=False,
    )  # fmt: skip
    show(comparison, ["--recipes all compares every recipe."], console)
    return shown_on.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("sample", [samples.real, samples.demo, samples.cmteb, samples.proxies])
def test_every_line_fits_and_every_number_is_whole(sample, width):
    comparison = sample()
    lines = shown(comparison, width, terminal=False).splitlines()
    free = {comparison.answer, comparison.build}
    assert all(len(line) <= width for line in lines if line not in free)
    text = "\n".join(lines)
    assert "…" not in text
    for result in comparison.results:
        if not result.recipe.startswith("Random weights"):
            score = result.scores[comparison.tasks[0].name]
            assert comparison.tasks[0].show(score.value) in text
    assert "\x1b" not in text


def test_the_answer_then_what_to_type():
    comparison = samples.real()
    lines = shown(comparison, 80, terminal=False).splitlines()
    assert lines[:4] == [comparison.answer, "", comparison.build, ""]
    assert lines[4] == "a small model on 400 pairs of pairs.tsv (bfloat16, cpu)"
    in_terminal = re.sub(r"\x1b\[\d*m", "", shown(comparison, 80)).splitlines()
    # A terminal breaks it between words.
    assert all(len(line) <= 80 for line in in_terminal[:3])
    assert " ".join(" ".join(in_terminal[:3]).split()) == comparison.answer


def test_the_best_stands_first_and_ties_are_marked_without_colours():
    lines = shown(samples.real(), 120, terminal=False).splitlines()
    rows = [line for line in lines if "[" in line and line.startswith(("Early", "Knowledge", "Value", "PromptEOL"))]
    assert [row.split(",")[0].split("  ")[0] for row in rows] == [
        "Early and late", "Knowledge", "Value aggregation", "PromptEOL",
    ]  # fmt: skip
    assert [TIED in row for row in rows] == [False, True, True, False]
    assert f"{TIED}: cannot be told from the best." in " ".join(lines)


def test_random_weights_are_a_column():
    text = shown(samples.real(), 120, terminal=False)
    assert "Random weights, " not in text
    row = next(line for line in text.splitlines() if line.startswith("Value aggregation"))
    assert row.split()[-3:] == ["12.2", "20", "1.6x"]


def test_what_was_left_out_is_told_by_the_reason():
    text = " ".join(shown(samples.real(), 120, terminal=False).split())
    assert "Left out RT-2, last; RT-4, last; RT-8, last: no cache" in text
    many = dataclasses.replace(samples.real(), skipped=[(f"RT-{passes}, last", "no cache") for passes in range(4)])
    assert "Left out 4 recipes: no cache" in " ".join(shown(many, 120, terminal=False).split())


def test_no_list_under_the_table_is_long():
    """Of more than three names there is a count."""
    for line in shown(samples.demo(), 120, terminal=False).splitlines():
        assert line.count(";") <= 3


def test_what_only_the_command_line_knows(tmp_path):
    found = dataclasses.replace(samples.real(), build="")
    spec = {"Value aggregation": "value-aggregation"}
    results = [dataclasses.replace(result, spec=spec.get(result.recipe, "")) for result in found.results]
    found = dataclasses.replace(found, results=results)
    made = with_command(found, "st-reba compare", "org/model", "pairs", max_seq_length=64)
    expected = (
        "st-reba build --model org/model --recipe value-aggregation --max-seq-length 64 --dtype bfloat16 --out my-model"
    )
    assert (made.model, made.data, made.build) == ("org/model", "pairs", expected)
    assert made.command.split()[0] == "st-reba"
    assert with_command(dataclasses.replace(found, use=""), "", "m", "pairs").build == ""
    fitted = [dataclasses.replace(result, spec=result.spec and "early-late") for result in results]
    assert with_command(dataclasses.replace(found, results=fitted), "", "m", "pairs", fitted_on_data=True).build == ""
