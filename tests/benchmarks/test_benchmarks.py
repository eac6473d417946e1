"""What the benchmarks measure becomes rows of the files that tables are made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import numpy as np  # noqa: E402

import batches  # noqa: E402
import blocks  # noqa: E402
import corpus  # noqa: E402
import cost  # noqa: E402
import kernel  # noqa: E402
import precision  # noqa: E402
import prefixes  # noqa: E402
import records  # noqa: E402
import targets  # noqa: E402
from pivot import Store  # noqa: E402
from st_reba.data.tables import Pairs  # noqa: E402
from st_reba.lm.attention.weights import fold  # noqa: E402


def test_costs_become_rows_that_tables_show(tmp_path: Path):
    setting = cost.Setting("repetition", "a Llama", "float32", 128, 4, 3)
    spent = {"Echo-2, last": [2.0, 8.0, 3.0], "Classical, last": [1.0, 2.0, 2.0]}
    used = {
        "Echo-2, last": {"encoding": 30.0, "process": 110.0},
        "Classical, last": {"encoding": 20.0, "process": 100.0},
    }
    rows = setting.rows([("Echo-2, last", "Classical, last")], spent, used)
    where = {"date": "2026-11-22", "machine": "a machine", "versions": "torch 2.13.0"}
    records.append("cost", [{**row, **where} for row in rows], tmp_path)
    assert blocks.BLOCKS["cost-repetition"].render(Store(tmp_path), tmp_path / "page.md") == (
        "**a Llama**, a machine; float32; batches of 4; times by the clock, median of 3 interleaved rounds and memory "
        "in a process of its own, once; 2026-11-22; torch 2.13.0\n\n"
        "| ratio | n = 128 |\n|---|---|\n"
        # The median of each round's ratio, 2, 4 and 1.5; not the ratio of medians, 1.5.
        "| time: Echo-2, last / Classical, last | 2.00 |\n"
        "| peak memory of the process: Echo-2, last / Classical, last | 1.10 |"
    )
    shown = blocks.BLOCKS["speed-repetition"].render(Store(tmp_path), tmp_path / "page.md")
    # 4 x 128 tokens in a median of 3 and of 2 seconds.
    assert "| Echo-2, last | 171 |\n| Classical, last | 256 |" in shown
    assert "| Echo-2, last | 30 |\n| Classical, last | 20 |" in shown


@pytest.mark.parametrize("table", cost.TABLES)
def test_each_contender_of_a_table_can_be_made(table: str):
    assert {name for pair in cost.TABLES[table] for name in pair} <= {*cost.CONTENDERS, *cost.SWEEPS}


def test_batches_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(batches, "MODULES", {name: batches.MODULES[name] for name in ("Classical", "ReBA")})
    monkeypatch.setattr(batches, "TEXTS", ["a", "The cat sat on the mat.", "我爱自然语言处理。"])
    batches.main(["--dtypes", "float32", "--orders", "1", "--results", str(tmp_path)])
    rows = records.read("batches", tmp_path)
    assert [(row["module"], row["model"], row["precision"]) for row in rows] == [
        ("Classical", "demo LM", "float32"),
        ("ReBA", "demo LM", "float32"),
    ]
    assert all(0 <= row["distance"] < 1e-5 for row in rows)
    assert all(row["date"] and row["machine"] and "torch" in row["versions"] for row in rows)


WHERE = {"date": "2026-11-22", "machine": "a machine", "versions": "torch 2.13.0"}


def test_targets_say_what_was_asked_and_seen(tmp_path: Path):
    """The worst of a setting; nothing where nothing was measured."""
    shared = {**WHERE, "quantity": "time", "unit": "plain", "precision": "float32", "model": "a Llama"}
    rows = [
        {**shared, "table": "short", "contender": "Echo", "tokens": 12, "value": 1.2},
        {**shared, "table": "short", "contender": "ReBA", "tokens": 12, "value": 1.51},
        {**shared, "table": "short", "contender": "ReBA", "tokens": 12, "value": 1.5, "model": "another"},
        {**shared, "table": "limit", "contender": "products", "value": 0.7, "low": 0.65, "high": 0.8},
        {**shared, "table": "precision", "contender": "Echo", "value": -0.3},
    ]
    records.append("cost", rows, tmp_path)
    block = targets.Targets(
        (
            targets.Target("{contender}, {tokens} tokens", targets.measured("short", "time"), most=1.5),
            targets.Target("{contender}", targets.measured("limit", "time"), least=0.7),
            targets.Target("{contender}", targets.measured("precision", "time"), most=0.2, distance=True),
            targets.Target("never", targets.measured("passes", "time"), most=1),
        )
    )
    assert block.render(Store(tmp_path), tmp_path / "page.md").splitlines()[2:] == [
        "| ReBA, 12 tokens | at most 1.5 | 1.51 | no | a Llama, float32, a machine |",
        "| ReBA, 12 tokens | at most 1.5 | 1.50 | yes | another, float32, a machine |",
        "| products | at least 0.7 | 0.70 (0.65 to 0.80) | yes | a Llama, float32, a machine |",
        "| Echo | at most 0.2 | -0.30 | no | a Llama, float32, a machine |",
    ]
    assert targets.Targets(block.targets[3:]).render(Store(tmp_path), tmp_path / "page.md") == ""


def test_precisions_become_rows(tmp_path: Path):
    labels = np.arange(6, dtype=np.float32)
    swapped = np.array([0, 1, 2, 3, 5, 4], dtype=np.float32)
    found = {
        ("float32", "Echo"): precision.Measured([2.0, 4.0], labels),
        ("bfloat16", "Echo"): precision.Measured([1.0, 1.0], swapped),
    }
    rows = precision.rows(found, labels, tokens=60, how="6 pairs")
    where: records.Record = {**WHERE, "table": "precision", "model": "a Llama", "batch": 32}
    records.append("cost", [{**row, **where} for row in rows], tmp_path)
    shown = blocks.BLOCKS["speed-precision"].render(Store(tmp_path), tmp_path / "page.md").splitlines()
    assert shown[-2] == "| Echo | float32 | 10 |  | 100.00 |  |"
    assert shown[-1].startswith("| Echo | bfloat16 | 30 | 0.33 (0.25 to 0.50) | 94.29 | −5.71 [")


class Told:
    """A model whose vectors of a pair have the cosine that its second text tells."""

    def encode(self, texts: list[str], **settings: object) -> torch.Tensor:
        cosines = torch.tensor([float(text or 1) for text in texts])
        return torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1)


def test_cosines_stand_in_the_order_of_the_pairs(tmp_path: Path):
    labels = [0.1, 0.7, 0.3, 0.9, 0.2, 0.8, 0.4]
    pairs = Pairs([""] * 7, [str(label) for label in labels], labels)
    found = precision.measure({("float32", "Echo"): cast(Any, Told())}, pairs, parts=3)["float32", "Echo"]
    assert len(found.seconds) == 3
    assert found.cosines == pytest.approx(labels)


def test_a_corpus_is_encoded_in_turn_with_a_bare_loop(tmp_path: Path):
    corpus.main(["--texts", "70", "--results", str(tmp_path)])
    rows = {(row["quantity"], row["contender"]): row for row in records.read("cost", tmp_path)}
    own, bare = "`st-reba encode`, 70 texts", "bare loop over the model"
    speeds = [rows["tokens of text/s", name]["value"] for name in (own, bare)]
    assert rows["time", own]["value"] == pytest.approx(speeds[1] / speeds[0], rel=0.01)


def test_a_kernel_becomes_rows(tmp_path: Path):
    """Torch's operations in the kernel's place, on a CPU."""
    source = kernel.layer(4, 2, 8, 11, 2, "bfloat16", "cpu")
    where = {"table": "kernel", "model": "4 heads x 8", "precision": "bfloat16", "date": "2026-11-22"}
    for form in ("mean", "last"):
        rows = kernel.rows_of(fold, source, 5, form, "cpu", 2, 1)
        assert [(row["contender"], row["unit"]) for row in rows] == [
            (f"Triton kernel, {form}", f"torch's operations, {form}"),
            (f"Triton kernel, {form}", ""),
            (f"torch's operations, {form}", ""),
        ]
        assert all(row["value"] > 0 and row["tokens"] == 5 and row["batch"] == 2 for row in rows)
        records.append("cost", [{**row, **where} for row in rows], tmp_path)
    assert len(records.read("cost", tmp_path)) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_kernel_to_measure(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        kernel.main([])
    assert "PyTorch finds none here" in capsys.readouterr().err


def test_prefixes_become_rows_and_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = (("prompteol", "last"), ("knowledge", "last"), ("echo-2", "mean"), ("reba-2", "mean"))
    monkeypatch.setattr(prefixes, "RECIPES", few)
    (tmp_path / "stsb_en_dev.tsv").write_text("text\tother\tscore\n" + "The cat sat.\tA dog.\t1\nA man runs.\tb\t2\n")
    state = tmp_path / "state.jsonl"
    asked = ["--data", str(tmp_path), "--rounds", "2", "--state", str(state), "--results", str(tmp_path)]
    prefixes.main(asked)
    rows = records.read("cost", tmp_path)
    assert [row["contender"] for row in rows] == [
        "PromptEOL, last", "Knowledge, last", "Echo-2, mean", "ReBA-2, mean", "Knowledge, last",
        *(f"{name}; a prompt of 79 tokens" for name in ("Echo-2, mean", "ReBA-2, mean", "PromptEOL, last")),
    ]  # fmt: skip
    assert all(0 < row["low"] <= row["value"] <= row["high"] for row in rows)
    shown = blocks.BLOCKS["cost-prefixes"].render(Store(tmp_path), tmp_path / "page.md")
    assert "| time: Knowledge, last / PromptEOL, last |" in shown
    lines = state.read_text().splitlines()
    state.write_text("\n".join(lines[:-4]) + "\n")
    prefixes.main(asked)
    assert state.read_text().splitlines()[:-4] == lines[:-4]
    assert len(state.read_text().splitlines()) == len(lines) == 2 * len(rows)
