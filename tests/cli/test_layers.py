from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba.evaluation import DependencyEvaluator

runner = CliRunner()

FILES = ["dependency.csv", "dependency.png", "layers.csv", "layers.png"]


@pytest.fixture
def layers(backbone_path, tmp_path):
    """``layers(options, expect=0)``: the command's output, on a tiny model and the user's own texts."""
    data = tmp_path / "pairs.tsv"
    data.write_text("a cat\ta dog\t2\nthe bank\tthe river\t1\na mouse\ta mouse!\t5\n", encoding="utf-8")

    def run(*options, expect: int = 0) -> str:
        arguments = ["layers", "--model", backbone_path(), "--data", data, "--device", "cpu", *options]
        result = runner.invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
        assert result.exit_code == expect, result.output
        return re.sub(r"\s+", " ", result.output)

    return run


@pytest.mark.parametrize(
    "options",
    [("--pooling", "last", "--batch-size", 2, "--max-seq-length", 9), ("--template", "springer"),
     ("--template", 'A word for {text}:"', "--dtype", "bfloat16"), ("--template", "prompteol", "--pooling", "last"),
     ("--template", "pretended-cot", "--pooling", "last")],
)  # fmt: skip
def test_tables_and_plots(options, layers, tmp_path, undrawn):
    out = tmp_path / "deep" / "out"
    output = layers("--out", out, *options)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == FILES
    rows = list(csv.DictReader((out / "layers.csv").open(encoding="utf-8")))
    scores = [float(row["spearman_cosine"]) for row in rows]
    best = max((layer for layer, score in enumerate(scores) if score == score), key=scores.__getitem__)
    assert len(rows) == len(list(csv.DictReader((out / "dependency.csv").open(encoding="utf-8")))) == 4
    assert f"Turning point: layer {best} of 3." in output
    assert f"│ {best} │ {100 * scores[best]:.1f} │" in output
    assert re.search(r"3 pairs of .*pairs\.tsv", output)
    assert f"layers.csv, layers.png, dependency.csv and dependency.png to {out}" in output


def test_the_plot_has_the_scale_of_the_table(layers, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.setdefault(Path(path).name, figure.axes[0]))
    output = layers("--out", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "layers.csv").open(encoding="utf-8")))
    scores = [float(row["spearman_cosine"]) for row in rows]
    axes = drawn["layers.png"]
    curve, *_ = (line.get_ydata() for line in axes.lines if len(line.get_ydata()) == len(scores))
    assert list(curve) == [100 * score for score in scores]
    [best] = re.findall(r"│ ([\d.-]+) │ [\d.-]+ │ turning point", output)
    assert f"({best})" in axes.get_title(loc="left")
    assert axes.get_ylabel() == "Spearman cosine x 100"
    assert "x 100 (in layers.csv it is not multiplied)" in output


def test_in_the_current_directory_by_default(layers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers()
    assert sorted(path.name for path in (tmp_path / "st-reba-layers").iterdir()) == FILES
    assert all(path.read_bytes()[1:4] == b"PNG" for path in (tmp_path / "st-reba-layers").glob("*.png"))
    assert "st-reba-layers exists and is not an empty directory: choose another --out" in layers(expect=1)


@pytest.mark.parametrize(
    ("header", "rows", "metric"),
    [
        ("anchor\tpositive\tnegative", "a cat\ta dog\tthe bank\none\ttwo\tthe river", "Accuracy"),
        ("text1\ttext2\tlabel", "a cat\ta dog\t1\none\ttwo\t0", "Average precision"),
    ],
)
def test_every_task_that_has_labels(header, rows, metric, layers, tmp_path, undrawn):
    (tmp_path / "task.tsv").write_text(f"{header}\n{rows}\n", encoding="utf-8")
    output = layers("--data", tmp_path / "task.tsv", "--out", tmp_path / "out")
    assert f"│ Layer │ {metric} │" in output.replace("┃", "│")
    assert f"{metric[:1].lower()}{metric[1:]}, x 100" in output


def test_retrieval(backbone_path, tmp_path, undrawn):
    (tmp_path / "q.jsonl").write_text('{"_id": 1, "text": "a cat?"}\n', encoding="utf-8")
    (tmp_path / "c.tsv").write_text("_id\ttext\n7\ta cat\n8\ta dog\n9\ta bank\n", encoding="utf-8")
    (tmp_path / "r.tsv").write_text("1\t7\t1\n", encoding="utf-8")
    arguments = ["layers", "--model", backbone_path(), "--device", "cpu", "--out", tmp_path / "out"]
    task = ["--queries", tmp_path / "q.jsonl", "--corpus", tmp_path / "c.tsv", "--qrels", tmp_path / "r.tsv"]
    result = runner.invoke(cli.app, [*map(str, arguments), *map(str, task), "--query-prompt", "q: "])
    assert result.exit_code == 0, result.output
    assert "1 queries, 3 documents, 1 judged relevant." in result.output
    assert "cosine_ndcg@10" in (tmp_path / "out" / "layers.csv").read_text(encoding="utf-8")


def test_a_plot_that_fails_leaves_nothing(layers, tmp_path, monkeypatch):
    def fail(self, path):
        raise OSError("no space left on device")

    monkeypatch.setattr(DependencyEvaluator, "draw", fail)
    assert "no space left on device" in layers("--out", tmp_path / "out", expect=1)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]


def test_without_matplotlib_it_says_so_at_once(layers, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "Drawing needs matplotlib" in layers("--out", tmp_path / "out", expect=1)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]


def test_a_layer_whose_score_is_no_number_is_a_dash_and_no_warning(layers, tmp_path, recwarn, undrawn):
    """The input embedding of a prompt's end is one for all texts, so nothing correlates with it."""
    output = layers("--out", tmp_path / "out", "--template", "prompteol", "--pooling", "last")
    assert "│ 0 │ - │" in output
    assert not [warning for warning in recwarn if "constant" in str(warning.message)]
