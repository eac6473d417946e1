"""What the scripts measure becomes rows; what was run is not run again; what is kept is what the modules give."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import AutoModelForCausalLM, AutoTokenizer

import cost
import held_out
import real_models
import records
import retrieval
import runs
import train_bellm
import wordings
from real.contenders import CONTENDERS
from real.endings import Ending
from real.models import MODELS, ModelError, RealModel
from real.sets import COLLECTIONS, Sets, Task
from st_reba import EchoModule, ReBAModule

from .. import backbones
from ..backbones import TEXTS


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Pairs, and a collection."""
    directory = tmp_path_factory.mktemp("sets")
    pairs = [f"{text}\t{other}\t{5 - place}\n" for place, text in enumerate(TEXTS) for other in TEXTS]
    for part in ("train", "dev", "test"):
        (directory / f"stsb_en_{part}.tsv").write_text("".join(pairs), encoding="utf-8")
    folder = directory / "retrieval" / "cranfield"
    folder.mkdir(parents=True)
    texts = [f"{first} {second}" for first in TEXTS for second in TEXTS]
    documents = [json.dumps({"_id": str(number), "title": "", "text": text}) for number, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(documents), encoding="utf-8")
    for part in ("dev", "test"):
        queries = [json.dumps({"_id": str(number), "text": TEXTS[number]}) for number in range(3)]
        (folder / f"queries-{part}.jsonl").write_text("\n".join(queries), encoding="utf-8")
        judged = "".join(f"{number}\t{6 * number}\t1\n" for number in range(3))
        (folder / f"qrels-{part}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """A language model with its head, and room for prompts."""
    config = backbones.config("llama")
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    model = backbones.randomize(AutoModelForCausalLM.from_config(config).eval().float())
    path = backbones.save(model, tmp_path_factory.mktemp("model"), model_max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # A reranker's answers.
    tokenizer.add_tokens([" A", " B"])
    tokenizer.save_pretrained(path)
    return Path(path)


def test_contenders_take_turns_and_their_ratios_are_of_a_round():
    order: list[tuple[str, int]] = []
    contenders = {name: lambda number, name=name: order.append((name, number)) for name in "ab"}
    runs.interleaved(contenders, range(2))
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    # The median of each round's ratio, 2, 4 and 1.5; not the ratio of medians.
    assert runs.ratio([2, 8, 3], [1, 2, 2]) == {"value": 2, "low": 1.5, "high": 4}
    used = {"a": {"encoding": 30, "process": 110}, "b": {"encoding": 20, "process": 100}}
    rows = cost.rows([("a", "b")], {"a": [2, 8, 3], "b": [1, 2, 2]}, used, 512, ("timed", "apart"))
    found = {(row["quantity"], row["contender"]): row["value"] for row in rows}
    assert found["time", "a"] == 2
    assert found["peak memory of the process", "a"] == 1.1
    assert found["tokens of text/s", "b"] == 256
    used = {name for ratios in cost.TABLES.values() for pair in ratios for name in pair}
    recipes = {f"{name}, {pooling}" for name, row in runs.ROWS.items() for pooling in row.poolings}
    assert used <= {*cost.MODULES, cost.ONE_PASS, cost.ONE_BY_ONE, *recipes}


def test_a_model_in_parts_is_joined_and_must_be_the_one_that_was_measured(tmp_path):
    whole = b"GGUF" + bytes(range(100))
    for number, own in (("02", whole[50:]), ("01", whole[:50])):
        (tmp_path / "some" / number).mkdir(parents=True)
        (tmp_path / "some" / number / f"part{number}.bin").write_bytes(own)
    with pytest.raises(ModelError, match="clear pip's cache and fetch them again"):
        RealModel("a model", ("some==1",), ("en",), "**/part*.bin", "0" * 64, "a.gguf")._join(tmp_path / "some")
    model = RealModel("a", ("some==1",), ("en",), "**/part*.bin", hashlib.sha256(whole).hexdigest(), "a.gguf")
    model._join(tmp_path / "some")
    assert model.located(tmp_path).read_bytes() == whole


@pytest.fixture(scope="module")
def given(data, tmp_path_factory) -> argparse.Namespace:
    out = tmp_path_factory.mktemp("kept")
    return argparse.Namespace(
        data=data, out=out, results=out, some=None, lists=["stsb-en-dev", "stsb-en-test", "fit-en"],
        what=list(real_models.WHAT),
        passes=["repeated", "PromptEOL", "Bag of input embeddings", "Early and late"],
    )  # fmt: skip


def test_recipes_are_kept_scored_and_claimed(given, model_path, monkeypatch):
    model = real_models.RealModel("A tiny model", ("none",), ("en",), "none", "")
    measured = real_models.Measured(model, model_path, "float32", random=False)
    real_models.embed(measured, given)
    with monkeypatch.context() as patched:
        patched.setattr(real_models.kept, "kept", lambda *given: pytest.fail("it was there"))
        real_models.embed(measured, given)
    kept = real_models.kept.Kept(measured.directory(given.out))
    for key, kind in ((("Echo-2", "last"), EchoModule), (("ReBA-2", "mean"), ReBAModule)):
        source = kept.sources(["stsb-en-test"])[key]
        module = kind(str(model_path), model_kwargs={"dtype": "float32"})
        texts = real_models.LISTS["stsb-en-test"].read(Sets(given.data))
        expected = runs.pooled(module, key[1]).encode(texts)
        found = kept.vectors("stsb-en-test", source, source.own_end())
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    real_models.score(measured, measured.backbone, given)
    rows = records.read("scores", given.results).filter(set="STS-B en test", pooling="mean", filter="")
    ends = {row["recipe"]: row["score"] for row in rows.to_dicts() if row["layer"] is None}
    assert set(rows.filter(recipe="Echo-2")["layer"]) == {None, *range(4)}
    [claim] = records.read("claims", given.results).filter(claim="Echo lifts the mean").to_dicts()
    assert claim["difference"] == pytest.approx(ends["Echo-2"] - ends["Classical"])
    assert claim["low"] <= claim["difference"] <= claim["high"]


def test_retrieval_is_kept_scored_and_reranked(data, model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 10)
    monkeypatch.setattr(retrieval, "bm25", lambda queries, documents, language, count: [[(0, 1.0), (1, 0.5)]] * 3)
    options = argparse.Namespace(
        data=data, out=tmp_path, precision="float32", max_tokens=64, results=tmp_path,
        contenders=["Classical, mean", "PromptReps, sparse"],
    )  # fmt: skip
    measured = retrieval.Measured(MODELS["SmolLM2-135M-Instruct"], model_path, COLLECTIONS["Cranfield"], options)
    retrieval.embed(measured)
    lost = measured.block(CONTENDERS["Classical, mean"], "documents", 1)
    others = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz") if path != lost}
    lost.unlink()
    # A run that was stopped goes on, and texts that were sorted by length stand as they were.
    retrieval.embed(measured)
    assert {path: path.stat().st_mtime_ns for path in others} == others
    contender = CONTENDERS["Classical, mean"]
    kept = contender.joined(measured.blocks(contender, "documents"))
    assert np.allclose(kept.vectors, measured.made(contender).encode(measured.texts("documents")), atol=1e-4)
    retrieval.rerank(measured)
    retrieval.score(measured)
    rows = records.read("retrieval", tmp_path)
    assert all(0 <= row["low"] <= row["score"] <= row["high"] <= 1 for row in rows.to_dicts())
    recipes = set(rows.filter(set="Cranfield test")["recipe"])
    assert {"Classical", "PromptReps, sparse", "BM25", "tf-idf"} <= recipes
    assert {recipe.partition(":")[0] for recipe in recipes} >= {"Hybrid", "Reranked"}


def test_a_search_for_wordings_goes_on_with_the_same_endings(model_path, tmp_path):
    tried = [Ending(words) for words in ('" means in one word:"', '" is:"')]
    tasks = [
        Task("pairs", ["a b", "b c", "c d"], ((0, 1, 4.0), (1, 2, 2.0), (0, 2, 1.0))),
        Task("texts", ["one", "two"], classes=("x", "y")),
    ]
    search = wordings.Search("SmolLM2-135M-Instruct", "en", 2, "second", tmp_path)
    search.run(tried, tasks, model_path)
    (search.directory / "pairs" / "0001.npz").unlink()
    left = {file: file.stat().st_mtime_ns for file in search.directory.rglob("*.npz")}
    search.run(tried, tasks, model_path)
    assert {file: file.stat().st_mtime_ns for file in left} == left
    with pytest.raises(SystemExit, match="holds states of other endings"):
        search.run(tried[:1], tasks, model_path)
    rows = list(wordings.score(search, tasks))
    records.rewrite("wordings", rows, tmp_path)
    assert records.read("wordings", tmp_path).height == len(tried) * len(tasks) * len(wordings.READOUTS)


def test_held_out_sets_have_means_and_clusters_no_interval():
    draw, names = np.random.default_rng(0), ["Banking77", "StackOverflow", "TREC", "HWU64"]
    sets = ["STS-B en test", *(f"{name} test" for name in names)]
    found = {
        (name, held_out.NEAREST if place else held_out.SPEARMAN): held_out.Scores.of(
            held_out.bootstrap.mean({"echo-topic": np.full(9, 0.1 * place), "tf-idf": draw.random(9)})
        )
        for place, name in enumerate(sets)
    }
    labels = ["x", "y"] * 5
    clusters = held_out.v_measures({"echo-topic": np.array([[0, 1] * 5]), "tf-idf": np.zeros((1, 10))}, labels)
    found["TREC test", held_out.CLUSTERS] = clusters
    rows = list(held_out.rows(found, ["echo-topic", "tf-idf"], dict.fromkeys(sets, 9), {}, ["tf-idf"]))
    alone = {(row["set"], row["metric"]): row for row in rows if (row["recipe"], row["against"]) == ("echo-topic", "")}
    mean = alone["mean of STS-B en test, Banking77 test, StackOverflow test", "mean"]
    assert mean["score"] == pytest.approx(0.1)
    assert alone["mean of 4 labelled sets", held_out.NEAREST]["texts"] == 36
    assert alone["TREC test", held_out.CLUSTERS]["score"] == 1
    assert "low" not in alone["TREC test", held_out.CLUSTERS]


def quick(seed: int) -> SentenceTransformer:
    """A model that takes no time, where a script would train one; another for each seed."""
    words = backbones.tokenizer()
    weights = torch.randn(len(words), 8, generator=torch.Generator().manual_seed(seed))
    table = StaticEmbedding(words.backend_tokenizer, embedding_weights=weights)
    return SentenceTransformer(modules=[table], device="cpu")


def test_trainings_become_rows_once_and_means_are_of_the_seeds_that_both_have(data, tmp_path, monkeypatch):
    asked = []

    def trained(settings, work, progress):
        asked.append(settings.loading()["dtype"])
        return quick(settings.random_seed + 7 * (settings.bidirectional_layers == "all"))

    monkeypatch.setattr(train_bellm, "train_bellm", trained)
    monkeypatch.setattr(train_bellm, "build_bellm", lambda settings: quick(100))
    monkeypatch.setattr(train_bellm, "untrained", lambda path, precision: quick(101))
    quick(102).save_pretrained(str(tmp_path / "embedder"))
    arguments = [
        "--data", data, "--triplets", "triplets.tsv", "--source", "made up", "--path", "model", "--out", tmp_path,
        "--embedder", tmp_path / "embedder", "--results", tmp_path, "--readings", "every token", "--seeds",
    ]  # fmt: skip
    for _ in range(2):
        train_bellm.main([*map(str, arguments), "0", "1"])
        assert asked == ["bfloat16"] * 6
    # Two references; before, two seeds and their mean, with no layer turned, the last and all.
    assert records.read("bellm", tmp_path).height == 2 + 3 * 4
    # A seed more of one of them.
    train_bellm.main([*map(str, arguments), "2", "--turned", "all"])
    assert len(asked) == 7
    rows = records.read("bellm", tmp_path).filter(method="BeLLM", turned="all")
    [mean] = rows.filter(rows["seed"].is_null()).to_dicts()
    assert mean["score"] == pytest.approx(rows.filter(rows["seed"].is_not_null())["score"].mean())
    assert (mean["seeds"], mean["ahead_seeds"]) == (3, 2)
    assert mean["low"] <= mean["score"] <= mean["high"]
