"""Tables of README, RESULTS.md and docs are what the CSV files say, and a stale one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import blocks
import picture
import records
import tables

ROOT = Path(__file__).parents[2]
SMALL, ENGLISH = blocks.SMOLLM2, blocks.ENGLISH
RECIPES = "recipes-stsb-en"


def score(recipe: str, value: float | None, **fields: records.Value) -> records.Record:
    """A row of scores.csv, on the English test pairs unless told otherwise."""
    ends = {} if value is None else {"low": value - 0.02, "high": value + 0.02}
    return {
        "model": SMALL, "weights": "trained", "precision": "float32", "set": ENGLISH, "metric": "Spearman",
        "recipe": recipe, "pooling": "mean", "score": value, "date": "2026-11-22", **ends, **fields,
    }  # fmt: skip


def repository(path: Path, page: str, **files: list[records.Record]) -> Path:
    """A root with one page and its results; files that are not given have no rows."""
    (path / "README.md").write_text(page, encoding="utf-8")
    for name in records.KEYS:
        records.append(name, files.get(name, []), path / "results")
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


def test_each_table_stands_somewhere():
    texts = "".join(page.read_text(encoding="utf-8") for page in tables.pages(ROOT))
    assert [name for name in [*blocks.BLOCKS, *picture.PICTURES] if f"<!-- table: {name} -->" not in texts] == []


def test_scores_of_one_precision_with_intervals_the_best_in_bold(tmp_path):
    rows = [
        score("Classical", 0.4), score("Classical", 0.512, date="2026-11-23"),
        score("Classical", -0.004, filter="whitened"), score("Classical", 0.31, weights="random"),
        score("Classical", 0.99, precision="bfloat16"),
        score("Echo | 2\n", 0.6, beyond_overlap=0.2, beyond_low=0.15, beyond_high=0.25),
        score("", 0.82, model="all-MiniLM-L6-v2"), score("Echo-2", 0.2, model=blocks.GEMMA),
    ]  # fmt: skip
    assert shown(tmp_path, RECIPES, scores=rows) == (
        f"Before.\n\n<!-- table: {RECIPES} -->\n\n"
        "**SmolLM2-135M-Instruct**; float32; 2026-11-22 to 2026-11-23\n\n"
        "| recipe | pooling | as it is | random weights | beyond overlap | whitened |\n"
        "|---|---|---|---|---|---|\n"
        "| Classical | mean | 51.2 [49.2, 53.2] | 31.0 |  | −0.4 [−2.4, 1.6] |\n"
        "| Echo \\| 2 | mean | **60.0** [58.0, 62.0] |  | 20.0 [15.0, 25.0] |  |\n"
        "| all-MiniLM-L6-v2, for reference |  | 82.0 [80.0, 84.0] |  |  |  |\n\n"
        "**Gemma 3 270M**; float32; 2026-11-22\n\n| recipe | pooling | as it is |\n|---|---|---|\n"
        "| Echo-2 | mean | 20.0 [18.0, 22.0] |\n"
        "| all-MiniLM-L6-v2, for reference |  | 82.0 [80.0, 84.0] |\n"
        "\n<!-- end -->\n\nAfter.\n"
    )
    assert run(tmp_path, "--check") == 0


def test_the_layer_is_chosen_on_the_development_part(tmp_path):
    parts = {"STS-B en dev": (0.1, 0.3, 0.2), ENGLISH: (0.7, 0.5, 0.8)}
    rows = [
        score("Echo-2", value, set=part, layer=layer) for part, own in parts.items() for layer, value in enumerate(own)
    ]
    page = shown(tmp_path, "layers-stsb-en", scores=[*rows, score("Echo-2", 0.4)])
    assert "| Echo-2 | mean | 40.0 [38.0, 42.0] | 50.0 [48.0, 52.0] (layer 1) |" in page


def test_claims_say_what_intervals_do(tmp_path):
    claim: records.Record = {"model": SMALL, "set": ENGLISH, "precision": "float32", "first": "a", "second": "b"}
    values = {"claim 0": 0.05, "claim 1": 0.01, "claim 2": -0.05}
    claims = [
        {**claim, "claim": name, "difference": value, "low": value - 0.02, "high": value + 0.02}
        for name, value in values.items()
    ]
    lines = shown(tmp_path, "claims", claims=claims).splitlines()
    cells = [line.split("|")[3].strip() for line in lines if line.startswith("| claim ")][1:]
    assert cells == ["**5.0** [3.0, 7.0]", "1.0 [−1.0, 3.0] =", "−5.0 [−7.0, −3.0]"]


def test_costs_and_what_was_asked_for(tmp_path):
    row: records.Record = {
        "table": "passes",
        "quantity": "time",
        "contender": "RT-8, last",
        "unit": "b",
        "model": "a Llama",
        "batch": 1,
    }
    rows = [
        {**row, "tokens": 1024, "low": 1.17, "high": 1.2},
        {**row, "tokens": 512, "value": 2, "low": 1.5, "high": 2.5},
    ]
    page = shown(tmp_path, "cost-passes", cost=rows)
    assert "| ratio | n = 512 | n = 1,024 |" in page
    assert "| time: RT-8, last / b, batch 1 | 2.00 (1.50 to 2.50) | 1.17 to 1.20 |" in page
    asked = blocks.targets(blocks.Results(tmp_path / "results"), tmp_path)
    assert asked.splitlines()[2:] == [
        "| RT-8, last / b, n = 512 | at most 1.1 | 2.00 (1.50 to 2.50) | no | a Llama |"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (marked("no-such"), "there is no table 'no-such'"),
        ("<!-- table: claims -->\n\n" + marked("titles"), "the table 'claims' has no <!-- end -->"),
        ("<!-- table: claims --> <!-- end -->\n", "a mark is broken"),
    ],
)
def test_marks_that_cannot_be_understood(tmp_path, page, said, capsys):
    assert run(repository(tmp_path, page)) == 1
    assert said in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page


def test_what_is_stale_is_named_and_a_picture_is_drawn_the_same_each_time(tmp_path, capsys):
    rows = [score("Classical", 0.3 + layer / 50, layer=layer) for layer in range(5)]
    page = shown(tmp_path, "layers-picture", scores=[*rows, score(blocks.BAG, 0.4)])
    assert f"![Spearman correlation by layer: {SMALL}, {ENGLISH}](results/layers.svg)" in page
    drawn = tmp_path / "results" / "layers.svg"
    first = drawn.read_bytes()
    assert b"Classical, mean" in first
    drawn.unlink()
    run(tmp_path)
    assert drawn.read_bytes() == first
    records.append("scores", [score("Classical", 0.9, layer=3)], tmp_path / "results")
    (tmp_path / "README.md").write_text(page + marked(RECIPES), encoding="utf-8")
    capsys.readouterr()
    assert run(tmp_path, "--check") == 1
    said = capsys.readouterr().err
    assert "layers.svg is stale" in said
    assert f"README.md: {RECIPES} is stale" in said
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page + marked(RECIPES)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"score": "high"}, "score"),
        ({"score": "nan"}, "score"),
        ({"layer": "2.5"}, "layer"),
        ({"score": 73.8}, "a fraction"),
    ],
)
def test_a_field_that_its_column_does_not_hold(tmp_path, fields, said):
    records.append("scores", [score("Classical", 0.5) | fields], tmp_path)
    with pytest.raises(records.RecordsError, match=rf"scores.csv.*{said}"):
        records.read("scores", tmp_path)


def test_rows_take_the_place_of_those_that_measured_the_same(tmp_path):
    records.append("scores", [score("b", 0.1, layer=10), score('a, "b"', 0.2), score("b", 0.3, layer=9)], tmp_path)
    records.rewrite("scores", [score("b", 0.4, layer=10)], tmp_path)
    rows = records.read("scores", tmp_path).select("recipe", "layer", "score", "filter", "texts").rows()
    assert rows == [('a, "b"', None, 0.2, "", None), ("b", 9, 0.3, "", None), ("b", 10, 0.4, "", None)]
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        records.rewrite("scores", [{"note": "more"}], tmp_path)
    assert records.read("scores", tmp_path).height == 3
