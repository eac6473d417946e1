"""benchmarks/held_out.py and benchmarks/tried.py: how texts are told apart, what is averaged, and what is read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import StandardizedSum, TopicModule

from .. import backbones

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import held_out  # noqa: E402
import records  # noqa: E402
import tried  # noqa: E402
import wordings  # noqa: E402
from real.endings import CHOSEN, USUAL  # noqa: E402
from real.labelled import Task  # noqa: E402

DRAW = np.random.default_rng(0)
#: Two classes, far from each other, and how they look in a folder of labelled sets.
CLASSES = [f"class {number % 2}" for number in range(44)]
VECTORS = np.stack([DRAW.normal(3 if each == "class 0" else -3, 1, size=8) for each in CLASSES])


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "FIT_TEXTS", 4)
    folder = tmp_path / "labelled" / "banking" / "origin_data"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        lines = "".join(f"a {part} text {number}\t{each}\n" for number, each in enumerate(CLASSES))
        (folder / f"{part}.tsv").write_text(f"text\tlabel\n{lines}")
        pairs = "".join(f"{part} {number}\tother {number}\t{number % 5}\n" for number in range(8))
        (tmp_path / f"stsb_en_{part}.tsv").write_text(pairs)
    return argparse.Namespace(
        data=tmp_path, labelled=tmp_path / "labelled", pairs=6, texts=40, sets=["Banking77", "TNews"], train=10
    )


def test_sets_of_a_language_have_texts_to_fit_on_and_labelled_ones(options):
    pairs, labelled = held_out.sets("en", options)
    assert (len(pairs.task.pairs), len(pairs.fit), pairs.train) == (6, 4, None)
    assert (labelled.task.name, len(labelled.task.texts), len(labelled.fit)) == ("Banking77 test", 40, 4)
    assert sorted(labelled.train.classes) == ["class 0"] * 10 + ["class 1"] * 10
    assert not set(labelled.train.texts) & set(labelled.task.texts)


def test_what_lies_apart_is_told_apart(options):
    *_, own = held_out.sets("en", options)
    texts = {
        name: np.stack([VECTORS[int(label[-1])] for label in task.classes])
        for name, task in (("task", own.task), ("train", own.train))
    }
    found = dict(held_out.scores(own, {"own": texts["task"]}, {"own": texts["train"]}))
    assert set(found) == {held_out.NEAREST, held_out.LOGISTIC, held_out.CLUSTERS}
    for statistic in found.values():
        assert statistic.scores == pytest.approx([1.0])


def test_clusters_have_no_interval():
    clusters = held_out.v_measures({"own": np.array([[0, 1] * 22, [1, 0] * 22]), "other": np.zeros((1, 44))}, CLASSES)
    assert clusters.scores == pytest.approx([1.0, 0.0])
    alone, ahead, _ = held_out.beside(clusters.recipes, clusters.scores, clusters.replicates, {}, ["other"])
    assert (alone["score"], ahead["ahead"]) == (1.0, 1.0)
    assert not {"low", "ahead_low"} & {*alone, *ahead}


def test_rows_have_means_over_sets(tmp_path):
    sets = ["STS-B en test", *(f"{name} test" for name in ("Banking77", "StackOverflow", "TREC", "HWU64"))]
    found = {
        (name, held_out.SPEARMAN if place == 0 else held_out.NEAREST): held_out.bootstrap.mean(
            {"echo-topic": np.full(9, 0.1 * place), "tf-idf": DRAW.random(9)}
        )
        for place, name in enumerate(sets)
    }
    about = {"model": "a model", "precision": "float32", "date": "2026-11-25", "versions": ""}
    rows = list(held_out.rows(found, dict.fromkeys(sets, 9), about, ["tf-idf"]))
    records.append("held_out", rows, tmp_path)
    alone = {row["set"]: row for row in records.read("held_out", tmp_path) if row["recipe"] == "echo-topic"}
    assert alone["mean of STS-B en test, Banking77 test, StackOverflow test"]["score"] == pytest.approx(0.1)
    assert alone["mean of 4 labelled sets"]["score"] == pytest.approx(0.25)
    assert alone["mean of 4 labelled sets"]["texts"] == 36
    beside = next(row for row in rows if row["against"] == "tf-idf" and row["set"] == "TREC test")
    assert beside["ahead_low"] < beside["ahead"] < beside["ahead_high"]


def test_beginnings_are_scored_from_what_is_kept(tmp_path, monkeypatch):
    path = backbones.save(backbones.backbone("llama"), tmp_path / "model")
    monkeypatch.setattr(wordings, "layouts", lambda language: [USUAL[language], '"{text}" and "{text}'])
    tasks = [
        Task("pairs", ["a b", "b c", "c d"], ((0, 1, 4.0), (1, 2, 2.0), (0, 2, 1.0))),
        Task("classes", ["one", "two", "three", "four"], classes=("x", "x", "y", "y")),
    ]
    rows = [list(wordings.beginnings("a model", "en", tasks, Path(path), tmp_path)) for _ in range(2)]
    assert rows[0] == rows[1]
    assert [(row["layout"], row["task"]) for row in rows[0]][1:3] == [
        (USUAL["en"], "classes"),
        ('"{text}" and "{text}', "pairs"),
    ]
    records.append("beginnings", rows[0], tmp_path)
    assert len(records.read("beginnings", tmp_path)) == 4


def test_a_reader_reads_what_echo_topic_does(tmp_path):
    path = backbones.save(backbones.backbone("llama"), tmp_path / "model")
    texts = ["a fox sees a river", "rain", "the fox is fast"]
    found = [tried.Reader(Path(path), "en", texts).read(text) for text in texts]
    module = TopicModule(str(path))
    pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device="cpu")
    parts = pooled.encode(texts).reshape(len(texts), 3, -1)
    for own, whole in zip(found, parts, strict=True):
        # The reader runs in bfloat16.
        assert np.allclose(own["means"][-1], whole[0], atol=0.1)
        assert np.allclose(own["last"][-1], whole[1], atol=0.1)
    assert module.template.endswith(CHOSEN["en"])


def test_a_sum_is_the_packages():
    parts = {name: DRAW.normal(2, 3, size=(30, 4)) for name in tried.SUM}
    fitted = held_out.torch.from_numpy(np.concatenate(list(parts.values()), axis=1))
    mean, scale = fitted.mean(dim=0).reshape(3, 4), 1 / fitted.std(dim=0, unbiased=False).reshape(3, 4)
    expected = StandardizedSum(mean, scale, (1 / 3,) * 3)({"sentence_embedding": fitted})["sentence_embedding"]
    assert np.allclose(tried.added(parts, parts, tried.SUM) / 3, expected)
    whitened = tried.added({"mean": parts["mean"]}, parts, {"mean": 1.0}, power=1.0)
    assert torch.linalg.norm(torch.from_numpy(whitened), dim=1).numpy() == pytest.approx(np.ones(30))
