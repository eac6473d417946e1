"""What benchmarks/real_models.py keeps and scores, on a tiny model and a few pairs of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModelForCausalLM

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.data.demo import DEMO_PAIRS

from .. import backbones

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAIRS = 24


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import real_models

        yield real_models
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sets")
    lines = DEMO_PAIRS.read_text(encoding="utf-8").splitlines()
    for number, part in enumerate(("train", "dev", "test")):
        own = lines[number * PAIRS : (number + 1) * PAIRS]
        (directory / f"stsb_en_{part}.tsv").write_text("\n".join(own) + "\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def options(data, tmp_path_factory) -> argparse.Namespace:
    return argparse.Namespace(
        data=data, out=tmp_path_factory.mktemp("kept"), lists=["stsb-en-dev", "stsb-en-test", "fit-en"], what=["en"],
        passes=["repeated", "PromptEOL", "Bag of input embeddings", "Early and late"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """A language model with its head, and room for prompts."""
    config = backbones.config("llama")
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    model = backbones.randomize(AutoModelForCausalLM.from_config(config).eval())
    return Path(backbones.save(model, directory, model_max_length=512))


@pytest.fixture(scope="module")
def measured(benchmark, options, model_path):
    model = benchmark.RealModel("A tiny model", ("none",), ("en",), "none", "")
    found = benchmark.Measured(model, model_path, "float32", random=False)
    benchmark.embed(found, options)
    return found


@pytest.fixture(scope="module")
def kept(benchmark, measured, options):
    return benchmark.Kept(measured.directory(options.out))


@pytest.mark.parametrize(
    ("key", "build"),
    [
        (("Classical", "mean"), CausalTransformer),
        (("Echo-2", "last"), EchoModule),
        (("ReBA-2", "mean"), ReBAModule),
        (("ReBA-2, normalised", "mean"), lambda path, **kwargs: ReBAModule(path, normalize_weights=True, **kwargs)),
    ],
)
def test_kept_vectors_are_those_of_the_modules(benchmark, options, kept, key, build, model_path):
    texts = benchmark.LISTS["stsb-en-test"].read(options.data)
    source = kept.sources(["stsb-en-test"])[key]
    module = build(str(model_path), model_kwargs={"dtype": "float32"})
    pooling = Pooling(module.get_embedding_dimension(), {"mean": "mean", "last": "lasttoken"}[key[1]])
    expected = SentenceTransformer(modules=[module, pooling], device="cpu").encode(texts)
    found = kept.vectors("stsb-en-test", source, source.own_end())
    # Kept in half precision.
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_what_directories_and_columns_are_called(benchmark):
    """What was kept and written under these names is found again, whatever the catalogue comes to call its rows."""
    assert list(benchmark.PASSES) == [
        "repeated", "Bag of input embeddings", "PromptEOL", "PromptEOL, English", "Early and late",
        "Echo, Springer's prompt", "Pretended CoT", "Knowledge", "Bidirectional", "Echo-2, bidirectional",
        "ReBA-2, bidirectional", "Bidirectional, prompt", "RT-1", "RT-2", "RT-4", "RT-8", "KV re-routing",
        "Token prepending", "Token prepending, blocks", "Value aggregation", "Contrastive prompting", "CK", "MetaEOL",
        "three copies",
    ]  # fmt: skip


def test_a_run_that_was_stopped_goes_on(benchmark, measured, options, monkeypatch):
    monkeypatch.setattr(benchmark, "keep", lambda *given: pytest.fail("it was there"))
    benchmark.embed(measured, options)


@pytest.fixture(scope="module")
def written(benchmark, measured, options):
    """What is written, in order; all is asked for."""
    found = []
    asked = argparse.Namespace(**{**vars(options), "what": list(benchmark.WHAT)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(benchmark.records, "rewrite", lambda name, rows: found.append((name, list(rows))))
        benchmark.score(measured, measured.backbone, asked)
    return found


@pytest.fixture(scope="module")
def rows(written):
    return dict(written)["scores"], dict(written)["claims"]


def test_a_model_is_scored_in_the_languages_that_it_reads(written):
    assert [name for name, _ in written] == ["scores", "claims"]
    assert all("STS-B en" in row["set"] for _, rows in written for row in rows)


def test_scores_have_the_columns_of_the_results(benchmark, rows):
    names = set(benchmark.records.COLUMNS["scores"])
    assert all(set(row) <= names for row in rows[0])
    layers = {row["layer"] for row in rows[0] if row.get("recipe") == "Echo-2"}
    assert layers == {None, *range(4)}


def test_intervals_stand_where_a_layer_was_not_chosen_on_the_test_part(rows):
    test = [row for row in rows[0] if row["set"] == "STS-B en test" and row["recipe"] == "Classical"]
    sure = {(row["pooling"], row["filter"], row["layer"]) for row in test if "low" in row}
    own_ends = {each for each in sure if each[2] is None}
    assert len(own_ends) >= 2
    for pooling, filtered, _ in own_ends:
        assert len({each for each in sure if each[:2] == (pooling, filtered)}) <= 2


def test_a_claim_is_the_difference_of_two_scores(benchmark, rows):
    scores, claims = rows
    claim = next(row for row in claims if row["claim"] == "Echo lifts the mean")
    ends = {
        row["recipe"]: row["score"]
        for row in scores
        if (row["set"], row["pooling"], row.get("layer"), row["filter"]) == ("STS-B en test", "mean", None, "")
    }
    assert claim["difference"] == pytest.approx(ends["Echo-2"] - ends["Classical"])
    assert claim["low"] <= claim["difference"] <= claim["high"]


def test_vectors_beyond_half_precision_are_kept_to_its_precision(benchmark, tmp_path):
    vectors = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)).numpy()
    vectors *= np.array([1e-9, 1.0, 1e9], dtype=np.float32)[:, None]
    kept = benchmark.Vectors(tmp_path / "pass")
    kept.put(5, [4, 2, 0], {"a": vectors[[4, 2, 0]]})
    assert not kept.done
    kept.put(5, [1, 3], {"a": vectors[[1, 3]]})
    kept.finish({})
    assert kept.done
    assert kept.layers("a") == 3
    for layer in range(3):
        np.testing.assert_allclose(
            kept.read("a", layer), vectors[:, layer], rtol=1e-3, atol=1e-4 * 10 ** (9 * layer - 9)
        )
