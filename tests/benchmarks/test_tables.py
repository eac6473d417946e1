"""Tables of README, RESULTS.md and docs are made of the CSV files, and a stale one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import blocks
import picture
import records
import tables

ROOT = Path(__file__).parents[2]
SMALL, ENGLISH = blocks.SMOLLM2, blocks.ENGLISH


def score(recipe: str, value: float, **fields: records.Value) -> records.Record:
    """A row of scores.csv, on the English test pairs unless told otherwise."""
    ends = {"low": value - 0.02, "high": value + 0.02}
    return {
        "model": SMALL, "weights": "trained", "precision": "float32", "set": ENGLISH, "metric": "Spearman",
        "recipe": recipe, "pooling": "mean", "score": value, "date": "2026-11-22", **ends, **fields,
    }  # fmt: skip


def repository(path: Path, page: str, **files: list[records.Record]) -> Path:
    """A root with one page and its results; files that are not given have no rows."""
    (path / "README.md").write_text(page, encoding="utf-8")
    for name in records.KEYS:
        records.rewrite(name, files.get(name, []), path / "results")
    return path


def marked(name: str) -> str:
    return f"Before.\n\n<!-- table: {name} -->\n<!-- end -->\n\nAfter.\n"


def run(root: Path, *arguments: str) -> int:
    return tables.main([*arguments, "--root", str(root), "--results", str(root / "results")])


def shown(path: Path, name: str, **files: list[records.Record]) -> str:
    """A page with one table, filled."""
    assert run(repository(path, marked(name), **files)) == 0
    return (path / "README.md").read_text(encoding="utf-8")


def test_no_table_of_the_repository_is_stale(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_each_table_is_on_a_page():
    texts = "".join(page.read_text(encoding="utf-8") for page in tables.pages(ROOT))
    assert [name for name in [*blocks.BLOCKS, "picture"] if f"<!-- table: {name} -->" not in texts] == []


def test_scores_of_one_precision_with_intervals_the_best_in_bold(tmp_path):
    rows = [
        score("Classical", 0.4), score("Classical", 0.512, date="2026-11-23"), score("Classical", 0.31, pooling="last"),
        score("Classical", -0.004, filter="whitened"), score("Classical", 0.99, precision="bfloat16"),
    ]  # fmt: skip
    assert shown(tmp_path, "filters", scores=rows) == (
        "Before.\n\n<!-- table: filters -->\n\n"
        f"**SmolLM2-135M-Instruct**, {ENGLISH}; float32; 2026-11-22 to 2026-11-23\n\n"
        "| behind the pooling | Classical, mean | Classical, last |\n"
        "|---|---|---|\n"
        "| as it is | **51.2** [49.2, 53.2] | 31.0 [29.0, 33.0] |\n"
        "| whitened | −0.4 [−2.4, 1.6] |  |\n"
        "\n<!-- end -->\n\nAfter.\n"
    )
    assert run(tmp_path, "--check") == 0


def test_a_method_has_its_scores_and_its_time(tmp_path):
    cost = {"table": "recipes", "model": SMALL, "contender": "Echo-2, mean", "unit": "Classical, mean", "value": 1.8}
    page = shown(tmp_path, "scores", scores=[score("Echo-2", 0.6), score("Echo-2", 0.9, pooling="last")], cost=[cost])
    assert "| Echo-2 | 60.0 [58.0, 62.0] | 1.80 |" in page


def test_claims_show_where_their_intervals_lie(tmp_path):
    claim: records.Record = {"model": SMALL, "set": ENGLISH, "precision": "float32", "first": "a", "second": "b"}
    values = {"claim 0": 0.05, "claim 1 | 2\n": 0.01, "claim 2": -0.05}
    claims = [
        {**claim, "claim": name, "difference": value, "low": value - 0.02, "high": value + 0.02}
        for name, value in values.items()
    ]
    lines = [line for line in shown(tmp_path, "claims", claims=claims).splitlines() if line.startswith("| claim ")]
    assert lines[1:] == [
        "| claim 0 | **5.0** [3.0, 7.0] |", "| claim 1 \\| 2 | 1.0 [−1.0, 3.0] = |", "| claim 2 | −5.0 [−7.0, −3.0] |"
    ]  # fmt: skip


BROKEN_MARKS = [
    (marked("no-such"), KeyError, "no-such"),
    ("<!-- table: claims -->\n\n" + marked("scores"), ValueError, "a mark is broken"),
    ("<!-- table: claims --> <!-- end -->\n", ValueError, "a mark is broken"),
]


@pytest.mark.parametrize(("page", "error", "said"), BROKEN_MARKS)
def test_marks_that_cannot_be_understood(tmp_path, page, error, said):
    with pytest.raises(error, match=said):
        run(repository(tmp_path, page))


def test_a_stale_file_is_named_and_a_picture_is_drawn_the_same_each_time(tmp_path, capsys):
    row: records.Record = {"model": SMALL, "recipe": "Echo topic", "fitted_on": blocks.USUAL_FIT, "score": 0.5}
    rows = [{**row, "set": name, "low": 0.4, "high": 0.6} for name in picture.PANELS.values()]
    page = shown(tmp_path, "picture", grid=rows)
    assert "similarity: SmolLM2 135M 50.0" in page
    drawn = tmp_path / "results" / picture.FILE
    first = drawn.read_bytes()
    assert b"Echo topic, SmolLM2 135M" in first
    drawn.unlink()
    run(tmp_path)
    assert drawn.read_bytes() == first
    records.rewrite("grid", [{**rows[0], "score": 0.55}], tmp_path / "results")
    (tmp_path / "README.md").write_text(page + marked("grid"), encoding="utf-8")
    assert run(tmp_path, "--check") == 1
    said = capsys.readouterr().err
    assert f"{picture.FILE} is stale" in said
    assert "README.md is stale" in said


@pytest.mark.parametrize("value", ["nan", 73.8])
def test_a_score_that_is_no_fraction(tmp_path, value):
    records.rewrite("scores", [score("Classical", 0.5) | {"score": value}], tmp_path)
    with pytest.raises(ValueError, match=r"scores.csv: score: a score is a fraction"):
        records.read("scores", tmp_path)


def test_rows_take_the_place_of_those_that_measured_the_same(tmp_path):
    first = {"method": "a", "set": ENGLISH}
    rows = [{**first, "seed": 10, "score": 0.1}, {**first, "method": 'b, "c"', "score": 0.2}, {**first, "seed": 9}]
    records.rewrite("freeze", rows, tmp_path)
    records.rewrite("freeze", [{**first, "seed": 10, "score": 0.4}], tmp_path)
    found = records.read("freeze", tmp_path).select("method", "seed", "score").rows()
    assert found == [("a", 9, None), ("a", 10, 0.4), ('b, "c"', None, 0.2)]
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        records.rewrite("freeze", [{"note": "more"}], tmp_path)
    assert records.read("freeze", tmp_path).height == 3
