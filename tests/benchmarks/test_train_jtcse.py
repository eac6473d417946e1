"""What further training reaches becomes rows and a table; what was run is not run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import records  # noqa: E402
import train_jtcse  # noqa: E402
from pivot import Store  # noqa: E402

from ..backbones import TEXTS  # noqa: E402
from .quick import table  # noqa: E402


def test_runs_become_rows_once(tmp_path, monkeypatch):
    rows = [f"{text}\t{other}\t{5 - i}\n" for i, text in enumerate(TEXTS) for other in TEXTS]
    for part in ("train", "dev", "test"):
        (tmp_path / f"stsb_en_{part}.tsv").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "generic_sentences_en.txt").write_text("One more.\n\nOne more.\n", encoding="utf-8")
    asked = []

    def fit(model, rows, loss, *, output, arguments, progress):
        output.mkdir(parents=True)
        asked.append((rows.column_names, len(rows), arguments["seed"], arguments["max_steps"]))

    made = {
        name: lambda path, seed, number=number: (table(7 * number + seed), torch.nn.Identity())
        for number, name in enumerate(train_jtcse.METHODS)
    }
    monkeypatch.setattr(train_jtcse, "METHODS", made)
    monkeypatch.setattr(train_jtcse, "single", lambda path, pooling="cls": table(len(pooling)))
    monkeypatch.setattr(train_jtcse, "fit", fit)
    arguments = [
        "--data", tmp_path, "--path", "encoder", "--out", tmp_path / "out", "--results", tmp_path / "results",
        "--methods", train_jtcse.SIMCSE, "JTCSE", "--seeds", "1", "2", "--max-steps", "5",
    ]  # fmt: skip
    train_jtcse.main([*map(str, arguments)])
    texts = len(TEXTS) + 1
    assert asked == [(columns, texts, seed, 5) for seed in (1, 2) for columns in (["anchor", "positive"], ["text"])]

    found = records.read("jtcse", tmp_path / "results")
    # On two parts: twice before; two methods, two seeds and their mean.
    assert len(found) == 2 * (2 + 2 * 3)
    test = [row for row in found if row["set"] == "STS-B en test"]
    means = {row["method"]: row for row in test if row["seed"] is None}
    each = [row["score"] for row in test if row["method"] == "JTCSE" and row["seed"] is not None]
    assert means["JTCSE"]["score"] == pytest.approx(sum(each) / 2)
    assert means["JTCSE"]["low"] <= means["JTCSE"]["score"] <= means["JTCSE"]["high"]
    assert means["JTCSE"]["ahead"] == pytest.approx(means["JTCSE"]["score"] - means[train_jtcse.SIMCSE]["score"])
    assert means[train_jtcse.SIMCSE]["ahead"] is None
    shown = blocks.BLOCKS["jtcse"].render(Store(tmp_path / "results"), tmp_path / "page.md")
    assert "| JTCSE | 5 |" in shown
    assert "| before, first token | 0 |" in shown
    train_jtcse.main([*map(str, arguments)])
    assert len(asked) == 4
