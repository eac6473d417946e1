"""What FREEZE reaches becomes rows, tables and a curve; what was run is not run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import records  # noqa: E402
import train_freeze  # noqa: E402
from pivot import Store  # noqa: E402

from ..backbones import DEMO_MODEL  # noqa: E402

WORDS = ["a dog", "a cat", "the dog barks", "the cat sleeps", "rain", "snow falls", "we eat", "they sing loudly"]


def test_runs_become_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pairs = [(one, other, 5 - abs(i - j) / 2) for i, one in enumerate(WORDS) for j, other in enumerate(WORDS[i:], i)]
    for part in ("train", "dev", "test"):
        lines = (f"{one}\t{other}\t{score}\n" for one, other, score in pairs)
        (tmp_path / f"stsb_en_{part}.tsv").write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(train_freeze, "EPOCHS", 1)
    monkeypatch.setattr(train_freeze, "STEPS", 1)
    monkeypatch.setattr(train_freeze, "PARTS", {"labels": ((blocks.WHITENED,), (20,), (0, 1))})
    arguments = ["--data", tmp_path, "--path", DEMO_MODEL, "--out", tmp_path / "out", "--results", tmp_path / "results"]
    train_freeze.main([*map(str, arguments), "--precision", "float32"])
    rows = records.read("freeze", tmp_path / "results")
    # Two seeds and their mean; two sets, readings and metrics.
    assert len(rows) == 3 * 2 * 2 * 2
    means = [row for row in rows if row["seed"] is None and row["set"] == "STS-B en test"]
    for row in means:
        low, score, high = (row[name] for name in ("low", "score", "high"))
        assert low <= score <= high
        assert (row["ahead"] is not None) == (row["metric"] == "Spearman")
        same = {name: row[name] for name in ("set", "reading", "metric")}
        runs = [each for each in rows if each["seed"] is not None and same.items() <= each.items()]
        assert score == pytest.approx(sum(float(each["score"] or 0) for each in runs) / 2)
    shown = blocks.BLOCKS["freeze-few"].render(Store(tmp_path / "results"), tmp_path / "page.md")
    assert f"| {blocks.WHITENED} | 20 |" in shown
    monkeypatch.setattr(train_freeze, "train_freeze", None)
    train_freeze.main([*map(str, arguments), "--precision", "float32"])


def test_layers_are_those_of_the_model():
    assert train_freeze.layers_of("four", 18) == (4, 9, 14, 18)
    assert train_freeze.layers_of("upper three", 30) == (24, 27, 30)
    assert train_freeze.layers_of("last", 5) == (5,)
