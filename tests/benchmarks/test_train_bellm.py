"""What BeLLM's training reaches becomes rows and a table; what was run is not run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import records  # noqa: E402
import snli  # noqa: E402
import train_bellm  # noqa: E402
from pivot import Store  # noqa: E402

from ..backbones import TEXTS  # noqa: E402
from .quick import table  # noqa: E402


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_runs_become_rows_once(preset, tmp_path, monkeypatch):
    rows = [f"{text}\t{other}\t{5 - i}\n" for i, text in enumerate(TEXTS) for other in TEXTS]
    (tmp_path / "stsb_en_test.tsv").write_text("".join(rows), encoding="utf-8")
    asked = []

    def trained(settings, work, progress):
        asked.append(settings)
        return table(settings.random_seed + 7 * (settings.bidirectional_layers == "all"))

    monkeypatch.setattr(train_bellm, "train_bellm", trained)
    monkeypatch.setattr(train_bellm, "build_bellm", lambda settings: table(100))
    monkeypatch.setattr(train_bellm.Bench, "untrained", lambda bench: bench._kept("prompt", lambda: table(101)))
    table(102).save_pretrained(str(tmp_path / "embedder"))
    arguments = [
        "--data", tmp_path, "--triplets", "triplets.tsv", "--source", "made up", "--path", "model",
        "--embedder", tmp_path / "embedder", "--out", tmp_path / "out", "--results", tmp_path / "results",
        "--preset", preset, "--readings", "every token", "--seeds", "0", "1",
    ]  # fmt: skip
    train_bellm.main([*map(str, arguments)])
    assert [settings.pool_over for settings in asked] == ["whole"] * 6
    assert {settings.loading()["dtype"] for settings in asked} == {"bfloat16"}
    assert {settings.angle_weight for settings in asked} == {float(preset == "released")}

    found = records.read("bellm", tmp_path / "results")
    # Two references; before, two seeds and their mean, with no layer turned, the last and all.
    assert len(found) == 2 + 3 * 4
    method = "BeLLM" if preset == "paper" else "BeLLM, the released command's settings"
    means = {row["turned"]: row for row in found if row["method"] == method and row["seed"] is None}
    each = [row["score"] for row in found if row["turned"] == "all" and row["seed"] is not None]
    assert means["all"]["score"] == pytest.approx(sum(each) / 2)
    assert means["all"]["low"] <= means["all"]["score"] <= means["all"]["high"]
    assert means["all"]["ahead"] == pytest.approx(means["all"]["score"] - means["none"]["score"])
    assert means["none"]["ahead"] is None
    shown = blocks.BLOCKS["bellm"].render(Store(tmp_path / "results"), tmp_path / "page.md")
    assert "| all | every token |" in shown
    train_bellm.main([*map(str, arguments)])
    assert len(asked) == 6

    # With other versions installed, what was measured before keeps those it had.
    monkeypatch.setattr(records, "versions", lambda: "later")
    train_bellm.main([*map(str, arguments)])
    later = [row for row in records.read("bellm", tmp_path / "results") if row["method"] == method]
    versions = {row["seed"]: row["versions"] for row in later}
    assert versions[0] == found[0]["versions"] != versions[None] == "later"

    # A seed more, elsewhere: what was run in another precision stays, and the mean says both.
    train_bellm.main([*map(str, arguments[:-2]), "2", "--turned", "all", "--precision", "float32"])
    assert [settings.loading()["dtype"] for settings in asked[6:]] == ["float32"]
    found = [row for row in records.read("bellm", tmp_path / "results") if row["method"] == method]
    assert {row["seed"]: row["precision"] for row in found if row["turned"] == "all"} == {
        0: "bfloat16", 1: "bfloat16", 2: "float32", None: "bfloat16 and float32"
    }  # fmt: skip
    # A difference is of the seeds that both have.
    later = {row["turned"]: row for row in found if row["seed"] is None}
    assert later["all"]["seeds"] == 3
    assert later["all"]["ahead"] == pytest.approx(means["all"]["ahead"])
    assert later["all"]["ahead_seeds"] == 2

    # Where some cosines are no longer kept: a mean of all seeds stays, and a new seed joins the rows of the others.
    for kept in (tmp_path / "out").rglob("*.npy"):
        if "seed 0" in kept.name:
            kept.unlink()
    train_bellm.main([*map(str, arguments[:-2]), "2", "--turned", "last"])
    found = [row for row in records.read("bellm", tmp_path / "results") if row["method"] == method]
    now = {row["turned"]: row for row in found if row["seed"] is None}
    assert [now["all"], now["none"]] == [later["all"], later["none"]]
    seeds = [row for row in found if row["turned"] == "last" and row["seed"] is not None]
    assert now["last"]["seeds"] == len(seeds) == 3
    for key in ("score", "low", "high"):
        assert now["last"][key] == pytest.approx(sum(row[key] for row in seeds) / 3)
    # Both have seed 1 here, and had 0 and 1 before.
    assert now["last"]["ahead_seeds"] == 2
    assert now["last"]["ahead"] == later["last"]["ahead"]


def test_triplets_of_snli(tmp_path, capsys):
    rows = [
        ("A dog runs .", "An animal moves .", "entailment"),
        ("A dog runs .", "A dog sleeps .", "contradiction"),
        ("A dog runs .", "It 's a dog , ( running ) .", "entailment"),
        ("A dog runs .", "A cat does n't run .", "contradiction"),
        ("A dog runs .", "A third one .", "entailment"),
        ("A man sings .", "He sings .", "entailment"),
        ("A boy eats .", "A boy has food .", "entailment"),
        ("A boy eats .", "The boy is asleep .", "contradiction"),
        ("A girl eats .", "A girl has food .", "neutral"),
    ]
    for name, column in zip(("s1", "s2", "labels"), zip(*rows, strict=True), strict=True):
        (tmp_path / f"{name}.dev").write_text("\n".join(column) + "\n", encoding="utf-8")
        (tmp_path / f"{name}.test").write_text("", encoding="utf-8")
    (tmp_path / "stsb_en_dev.tsv").write_text(
        "Two cats.\tThe boy is asleep!\t1.0\nCats.\tA cat.\t3.0\n", encoding="utf-8"
    )
    (tmp_path / "stsb_en_test.tsv").write_text("Two cats.\tOne cat.\t2.0\nDogs.\tA dog.\t3.0\n", encoding="utf-8")
    out = tmp_path / "snli.tsv"
    snli.main(["--snli", str(tmp_path), "--data", str(tmp_path), "--out", str(out)])
    assert [line.split("\t") for line in out.read_text(encoding="utf-8").splitlines()] == [
        ["A dog runs.", "An animal moves.", "A dog sleeps."],
        ["A dog runs.", "It's a dog, (running).", "A cat doesn't run."],
    ]
    assert "2 of 3 triplets" in capsys.readouterr().out
