"""Tables of README, RESULTS.md and docs are what the CSV files say, and a stale one is found."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import records  # noqa: E402
import tables  # noqa: E402
from pivot import ANY, Column, Each, Row, Store, Table  # noqa: E402

SMALL = blocks.SMOLLM2
ENGLISH = blocks.ENGLISH


def score(recipe: str, value: float | None, **fields: records.Value) -> dict[str, records.Value]:
    """A row of scores.csv, on the English test pairs unless told otherwise."""
    row: dict[str, records.Value] = {
        "model": SMALL, "weights": "trained", "precision": "float32", "set": ENGLISH, "metric": "Spearman",
        "recipe": recipe, "pooling": "mean", "score": value, "date": "2026-11-22", "versions": "torch 2.13.0",
    }  # fmt: skip
    if value is not None:
        row |= {"low": value - 0.02, "high": value + 0.02}
    return row | fields


def repository(path: Path, page: str, **files: Sequence[Mapping[str, records.Value]]) -> Path:
    """A root with one page and its results; files that are not given have no rows."""
    (path / "README.md").write_text(page, encoding="utf-8")
    for name in records.COLUMNS:
        records.append(name, files.get(name, []), path / "results")
    return path


def run(root: Path, *arguments: str) -> int:
    return tables.main([*arguments, "--root", str(root), "--results", str(root / "results")])


def page_of(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def marked(name: str) -> str:
    return f"Before.\n\n<!-- table: {name} -->\n<!-- end -->\n\nAfter.\n"


class TestRepository:
    def test_no_table_is_stale(self, capsys: pytest.CaptureFixture[str]):
        assert tables.main(["--check"]) == 0, capsys.readouterr().err

    def test_each_table_stands_somewhere(self):
        texts = "".join(page.read_text(encoding="utf-8") for page in tables.pages(ROOT))
        assert [name for name in blocks.BLOCKS if f"<!-- table: {name} -->" not in texts] == []


class TestFilling:
    def test_scores_with_intervals_the_best_in_bold(self, tmp_path: Path):
        rows = [
            score("Classical", 0.512),
            score("Classical", 0.31, weights="random"),
            score("Classical", -0.004, filter="whitened"),
            score("Echo-2", 0.6, beyond_overlap=0.2, beyond_low=0.15, beyond_high=0.25),
            score("", 0.82, model="all-MiniLM-L6-v2"),
        ]
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=rows)
        assert run(root) == 0
        assert page_of(root) == (
            "Before.\n\n<!-- table: recipes-stsb-en -->\n\n"
            "**SmolLM2-135M-Instruct**; float32; 2026-11-22\n\n"
            "| recipe | pooling | as it is | random weights | beyond overlap | whitened |\n"
            "|---|---|---|---|---|---|\n"
            "| Classical | mean | 51.2 [49.2, 53.2] | 31.0 |  | −0.4 [−2.4, 1.6] |\n"
            "| Echo-2 | mean | **60.0** [58.0, 62.0] |  | 20.0 [15.0, 25.0] |  |\n"
            "| all-MiniLM-L6-v2, for reference |  | 82.0 [80.0, 84.0] |  |  |  |\n"
            "\n<!-- end -->\n\nAfter.\n"
        )

    def test_a_second_run_changes_nothing(self, tmp_path: Path):
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=[score("Classical", 0.5)])
        run(root)
        first = page_of(root)
        assert run(root) == 0
        assert page_of(root) == first
        assert run(root, "--check") == 0

    def test_without_rows_there_is_no_table(self, tmp_path: Path):
        root = repository(tmp_path, marked("claims"))
        assert run(root) == 0
        assert page_of(root) == marked("claims")

    def test_each_model_has_a_table(self, tmp_path: Path):
        rows = [score("Classical", 0.5), score("Classical", 0.6, model="Gemma 3 270M")]
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=rows)
        run(root)
        assert page_of(root).index("**SmolLM2-135M-Instruct**") < page_of(root).index("**Gemma 3 270M**")

    def test_one_precision_for_all_rows_of_a_model(self, tmp_path: Path):
        rows = [
            score("Classical", 0.5, precision="bfloat16"),
            score("Echo-2", 0.6, precision="bfloat16"),
            score("Echo-2", 0.7),
        ]
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=rows)
        run(root)
        assert "**SmolLM2-135M-Instruct**; bfloat16" in page_of(root)
        assert "70.0" not in page_of(root)

    def test_the_layer_is_chosen_on_the_development_part(self, tmp_path: Path):
        rows = [
            score("Echo-2", value, set=set_, layer=layer)
            for set_, values in (("STS-B en dev", (0.1, 0.3, 0.2)), (ENGLISH, (0.7, 0.5, 0.8)))
            for layer, value in enumerate(values)
        ]
        rows.append(score("Echo-2", 0.4))
        root = repository(tmp_path, marked("layers-stsb-en"), scores=rows)
        run(root)
        assert "| Echo-2 | mean | 40.0 [38.0, 42.0] | 50.0 [48.0, 52.0] (layer 1) |" in page_of(root)

    def test_the_first_screen_is_of_one_model_on_parts_that_nothing_was_chosen_on(self, tmp_path: Path):
        row = {
            "model": SMALL, "precision": "bfloat16", "set": ENGLISH, "metric": "Spearman", "score": 0.8, "low": 0.78,
            "high": 0.82, "texts": 584, "date": "2026-11-24", "versions": "torch 2.13.0",
        }  # fmt: skip
        beside = {"against": "tf-idf", "ahead": 0.2, "ahead_low": 0.1, "ahead_high": 0.3}
        rows = [
            {**row, "recipe": "echo-topic", "against": ""},
            {**row, "recipe": "echo-topic", **beside},
            {**row, "recipe": "tf-idf", "against": "", "score": 0.6, "low": 0.58, "high": 0.62},
            {**row, "recipe": "echo-topic", "against": "", "model": blocks.GEMMA, "score": 0.9},
        ]
        root = repository(tmp_path, marked("first-screen"), held_out=rows)
        run(root)
        assert "| Echo topic, ours | 80.0 [78.0, 82.0] |" in page_of(root)
        assert "| tf-idf, without a model | 60.0 [58.0, 62.0] |" in page_of(root)

    def test_early_and_late_beside_the_bag_behind_the_same(self, tmp_path: Path):
        rows = [
            score("Early and late", 0.7, filter="partwise whitened"),
            score("Bag of input embeddings", 0.6, filter="partwise whitened"),
            score("Bag of input embeddings", 0.8),
            score("PromptEOL", 0.5, pooling="last"),
            score("PromptEOL", 0.9, pooling="last", layer=3),
            score("PromptEOL", 0.4, pooling="last", set="TNews", metric="accuracy"),
        ]
        root = repository(tmp_path, marked("early-late"), scores=rows)
        run(root)
        assert "| recipe | STS-B en test | TNews |" in page_of(root)
        assert "| Early and late | **70.0** [68.0, 72.0] |  |" in page_of(root)
        assert "| PromptEOL, last | 50.0 [48.0, 52.0] | 40.0 [38.0, 42.0] |" in page_of(root)
        assert "| bag of input embeddings, whitened alike | 60.0 [58.0, 62.0] |  |" in page_of(root)

    def test_claims_say_what_intervals_do(self, tmp_path: Path):
        claims = [
            {"claim": f"claim {index}", "model": SMALL, "set": ENGLISH, "precision": "float32", "first": "a",
             "second": "b", "difference": value, "low": value - 0.02, "high": value + 0.02}
            for index, value in enumerate((0.05, 0.01, -0.05))
        ]  # fmt: skip
        root = repository(tmp_path, marked("claims"), claims=claims)
        run(root)
        assert "| claim 0 | a − b | **5.0** [3.0, 7.0] |" in page_of(root)
        assert "| claim 1 | a − b | 1.0 [−1.0, 3.0] = |" in page_of(root)
        assert "| claim 2 | a − b | −5.0 [−7.0, −3.0] |" in page_of(root)

    def test_of_rows_that_measure_the_same_the_last_counts(self, tmp_path: Path):
        rows = [score("Classical", 0.4), score("Echo-2", 0.1), score("Classical", 0.5, date="2026-11-23")]
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=rows)
        run(root)
        assert "50.0" in page_of(root)
        assert "40.0" not in page_of(root)
        assert "2026-11-22 to 2026-11-23" in page_of(root)

    def test_a_range_without_a_value(self, tmp_path: Path):
        cost = [
            {"table": "chunked", "quantity": "time", "contender": "a", "unit": "b", "tokens": tokens, **values}
            for tokens, values in ((1024, {"low": 1.17, "high": 1.2}), (512, {"value": 2, "low": 1.5, "high": 2.5}))
        ]
        root = repository(tmp_path, marked("cost-chunked"), cost=cost)
        run(root)
        assert "| ratio | n = 512 | n = 1,024 |" in page_of(root)
        assert "| time: a / b | 2.00 (1.50 to 2.50) | 1.17 to 1.20 |" in page_of(root)

    def test_what_stands_in_a_cell_stays_in_it(self, tmp_path: Path):
        store = Store(repository(tmp_path, "", scores=[score("a | b\nc", 0.5)]) / "results")
        table = Table("scores", rows=Each(("recipe",)), columns=(Column("x | y"),), split=("model",))
        assert table.render(store, tmp_path / "README.md").splitlines()[2:] == [
            r"| recipe | x \| y |", "|---|---|", r"| a \| b c | 50.0 [48.0, 52.0] |",
        ]  # fmt: skip

    def test_a_row_that_is_missing_is_an_empty_cell(self, tmp_path: Path):
        rows = [score("Classical", 0.5), score("Echo-2", None), score("Echo-2", 0.3, layer=2)]
        store = Store(repository(tmp_path, "", scores=rows) / "results")
        table = Table(
            "scores",
            rows=(Row("A", {"recipe": "Classical"}), Row("B", {"recipe": "Echo-2"})),
            columns=(Column("own end", {"layer": None}), Column("best", {"layer": ANY})),
            split=("model",),
        )
        assert table.render(store, tmp_path / "README.md").splitlines()[4:] == [
            "| A | 50.0 [48.0, 52.0] | **50.0** [48.0, 52.0] (own end) |",
            "| B |  | 30.0 [28.0, 32.0] (layer 2) |",
        ]


class TestStaleness:
    @pytest.mark.parametrize("change", ["the page", "the results"])
    def test_a_stale_table_is_named_and_nothing_is_written(
        self, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
    ):
        root = repository(tmp_path, marked("recipes-stsb-en"), scores=[score("Classical", 0.5)])
        run(root)
        if change == "the page":
            (root / "README.md").write_text(page_of(root).replace("50.0", "52.0"), encoding="utf-8")
        else:
            records.append("scores", [score("Classical", 0.6)], root / "results")
        before = page_of(root)
        capsys.readouterr()
        assert run(root, "--check") == 1
        assert "README.md: recipes-stsb-en is stale" in capsys.readouterr().err
        assert page_of(root) == before

    @pytest.mark.parametrize(
        ("page", "said"),
        [
            (marked("no-such"), "there is no table 'no-such'"),
            ("<!-- table: claims -->\n\n" + marked("titles"), "the table 'claims' has no <!-- end -->"),
            ("<!-- table: claims -->\n", "a mark is broken"),
            ("<!-- table: claims --> <!-- end -->\n", "a mark is broken"),
        ],
    )
    def test_marks_that_cannot_be_understood(
        self, tmp_path: Path, page: str, said: str, capsys: pytest.CaptureFixture[str]
    ):
        root = repository(tmp_path, page)
        assert run(root) == 1
        assert said in capsys.readouterr().err
        assert page_of(root) == page


class TestPicture:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        rows = [
            score(recipe, 0.3 + layer / 50, pooling=pooling, layer=layer)
            for recipe, pooling in (("Classical", "mean"), ("Classical", "last"), ("PromptEOL", "last"))
            for layer in range(5)
        ]
        bag = score("Bag of input embeddings", 0.4)
        return repository(tmp_path, marked("layers-picture"), scores=[*rows, bag])

    def test_it_is_drawn_the_same_each_time(self, root: Path):
        picture = root / "results" / "layers.svg"
        assert run(root) == 0
        assert f"![Spearman correlation by layer: {SMALL}, {ENGLISH}](results/layers.svg)" in page_of(root)
        first = picture.read_bytes()
        for text in ("Classical, mean", "PromptEOL", "Bag of input embeddings", f"{SMALL}, {ENGLISH}"):
            assert text.encode() in first
        assert b"Echo-2" not in first
        picture.unlink()
        run(root)
        assert picture.read_bytes() == first

    def test_it_is_stale_when_what_it_shows_has_changed(self, root: Path, capsys: pytest.CaptureFixture[str]):
        run(root)
        records.append("scores", [score("Echo-2", 0.9, set="STS-B en dev")], root / "results")
        assert run(root, "--check") == 0
        records.append("scores", [score("Classical", 0.9, layer=3)], root / "results")
        assert run(root, "--check") == 1
        assert "layers.svg is stale" in capsys.readouterr().err


class TestRecords:
    def test_a_file_that_is_missing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        root = repository(tmp_path, marked("claims"))
        (root / "results" / "claims.csv").unlink()
        assert run(root, "--check") == 1
        assert "claims.csv is not there" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"score": "high"}, "line 2: score is 'high', which is no number"),
            ({"score": "nan"}, "line 2: score is 'nan', which is no number"),
            ({"layer": "2.5"}, "line 2: layer is '2.5', which is no whole number"),
            ({"score": "73.8"}, "scores are fractions"),
            ({"weights": "fresh"}, "weights is 'fresh'; it is one of trained, random"),
        ],
    )
    def test_a_field_that_its_column_does_not_hold(self, tmp_path: Path, fields: dict[str, str], said: str):
        records.append("scores", [score("Classical", 0.5) | fields], tmp_path)
        with pytest.raises(records.RecordsError, match=said):
            records.read("scores", tmp_path)

    def test_columns_that_are_missing_and_columns_that_are_more(self, tmp_path: Path):
        path = records.append("scores", [score("Classical", 0.5)], tmp_path)
        header, row = path.read_text(encoding="utf-8").splitlines()
        path.write_text(f"{header},note\n{row},kept\n", encoding="utf-8")
        assert records.read("scores", tmp_path)[0]["score"] == 0.5
        with pytest.raises(records.RecordsError, match="has the columns .*note"):
            records.append("scores", [score("Echo-2", 0.5)], tmp_path)
        path.write_text(f"{header.replace('score,', '')}\n{row}\n", encoding="utf-8")
        with pytest.raises(records.RecordsError, match="has no column score"):
            records.read("scores", tmp_path)
        path.write_text(f"{header}\n{row},more\n", encoding="utf-8")
        with pytest.raises(records.RecordsError, match="line 2 has 19 fields, not 18"):
            records.read("scores", tmp_path)

    def test_what_is_written_is_read(self, tmp_path: Path):
        row = score('a, "b"', 0.5, layer=3, texts=1379)
        records.append("scores", [row], tmp_path)
        (read,) = records.read("scores", tmp_path)
        assert {name: read[name] for name in row} == row
        assert read["beyond_overlap"] is None
        assert read["filter"] == ""
