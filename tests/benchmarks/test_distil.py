"""What a student reaches becomes rows and a table, once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import distil  # noqa: E402
import records  # noqa: E402
from pivot import Store  # noqa: E402
from st_reba.data.demo import demo_pairs, demo_sentences  # noqa: E402

pytest.importorskip("peft")


def test_students_become_rows_once(roomy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "generic_sentences_en.txt").write_text("\n".join(demo_sentences("en")[:60]), encoding="utf-8")
    lines = demo_pairs("en").read_text(encoding="utf-8").splitlines()[:30]
    for part in ("dev", "test"):
        (tmp_path / f"stsb_en_{part}.tsv").write_text("\n".join(lines), encoding="utf-8")
    arguments = [
        "--data", tmp_path, "--path", roomy_path, "--out", tmp_path / "out", "--results", tmp_path / "results",
        "--held-out", "20", "--precision", "float32", "--corpora", "generic sentences",
        "--students", "one plain pass, linear map alone",
    ]  # fmt: skip
    distil.main(list(map(str, arguments)))
    rows = records.read("distil", tmp_path / "results")
    assert len(rows) == 4
    teacher, student = (
        next(row for row in rows if row["set"] == "STS-B en test" and row["student"].startswith(name))
        for name in ("the teacher", "one plain pass")
    )
    assert student["share"] == pytest.approx(student["score"] / teacher["score"])
    assert student["texts"] == 40
    shown = blocks.BLOCKS["distil"].render(Store(tmp_path / "results"), tmp_path / "page.md")
    assert "| one plain pass, linear map alone | 32 |" in shown
    monkeypatch.setattr(distil, "measure", None)
    distil.main(list(map(str, arguments)))
