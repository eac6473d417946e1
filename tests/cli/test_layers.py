"""``st-reba layers``."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from . import typed

ON = "layers --model lm --data pairs.tsv --device cpu --dtype float32 --out deep/out"

pytestmark = pytest.mark.usefixtures("desk")


@pytest.mark.parametrize(
    "options", ["--pooling last --batch-size 2 --max-seq-length 9", "--template springer", "--template prompteol"]
)
def test_tables_and_plots(options, monkeypatch):
    """The plot has the scale of the table; in layers.csv scores are not multiplied."""
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.setdefault(Path(path).name, figure.axes[0]))
    output = typed(f"{ON} {options}")
    rows, tokens = (
        [*csv.DictReader(Path(f"deep/out/{name}.csv").read_text().splitlines())] for name in ("layers", "dependency")
    )
    scores = [float(row["spearman_cosine"]) for row in rows]
    best = max((layer for layer, score in enumerate(scores) if score == score), key=scores.__getitem__)
    assert len(rows) == len(tokens) == 4
    assert f"Turning point: layer {best} of 3." in output
    assert f"│ {best} │ {100 * scores[best]:.1f} │" in output
    assert "20 pairs of pairs.tsv" in output
    assert "layers.csv, layers.png, dependency.csv and dependency.png to deep/out" in output
    axes = drawn["layers.png"]
    assert any([*line.get_ydata()] == [100 * score for score in scores] for line in axes.lines)
    assert axes.get_ylabel() == "Spearman cosine x 100"


@pytest.mark.parametrize(
    ("header", "rows", "metric"),
    [
        ("anchor\tpositive\tnegative", "a cat\ta dog\tthe bank\none\ttwo\tthe river", "Accuracy"),
        ("text1\ttext2\tlabel", "a cat\ta dog\t1\none\ttwo\t0", "Average precision"),
    ],
)
def test_every_task_that_has_labels(header, rows, metric):
    Path("pairs.tsv").write_text(f"{header}\n{rows}\n", encoding="utf-8")
    output = typed(ON)
    assert f"│ Layer │ {metric} │" in output.replace("┃", "│")
    assert f"{metric[:1].lower()}{metric[1:]}, x 100" in output


def test_retrieval():
    task = "--queries q.jsonl --corpus c.csv --qrels r.tsv --query-prompt 'q: '"
    assert "6 queries, 9 documents, 6 judged relevant." in typed(f"layers --model lm --device cpu --out out {task}")
    assert "cosine_ndcg@10" in Path("out/layers.csv").read_text(encoding="utf-8")


def test_a_layer_whose_score_is_no_number_is_a_dash_and_no_warning(recwarn):
    """The input embedding of a prompt's end is one for all texts, so nothing correlates with it."""
    output = typed(f"{ON} --template prompteol --pooling last")
    assert re.search("│ 0 │ - │", output)
    assert not [warning for warning in recwarn if "constant" in str(warning.message)]
