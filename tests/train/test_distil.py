from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding
from torch.nn.functional import normalize

from st_reba import CausalTransformer
from st_reba.data.demo import demo_sentences
from st_reba.evaluation import AgreementEvaluator
from st_reba.recipes import find
from st_reba.train import distil
from st_reba.train.distil import DistilTraining, train_distil

from .stopping import stop

pytest.importorskip("peft")

#: The beginnings of texts: how long they are does not matter.
SENTENCES = [sentence[:24] for sentence in demo_sentences("en")[:44]]


@pytest.fixture
def settings(roomy_path, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    rows = [f"{first}\t{second}\t{n % 6}" for n, (first, second) in enumerate(itertools.pairwise(SENTENCES))]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows), encoding="utf-8")

    def make(**changes):
        given = {
            "model": roomy_path, "recipe": "echo-2", "texts": str(tmp_path / "texts.txt"), "held_out": 12, "rank": 2,
        }  # fmt: skip
        arguments = {"num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 1e-3}
        return DistilTraining(**{**given, **changes, "arguments": {**arguments, **changes.get("arguments", {})}})

    return make


def test_one_pass_of_the_same_model(settings, tmp_path):
    arguments = {"num_train_epochs": 8, "learning_rate": 1e-2, "save_strategy": "no", "eval_strategy": "no"}
    given = settings(arguments=arguments)
    before = distil.weights_digest(CausalTransformer(given.model))
    student = train_distil(given, tmp_path / "out", progress=False)
    assert [type(module) for module in student] == [CausalTransformer, Pooling, Dense, Normalize]
    assert "lora" not in " ".join(student.state_dict())
    loaded = SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu")
    assert np.array_equal(loaded.encode(SENTENCES), student.encode(SENTENCES))
    assert distil.weights_digest(CausalTransformer(given.model)) == before
    found = json.loads((tmp_path / "out" / "distil.json").read_text())
    assert (found["texts"], found["held_out"]) == (len(SENTENCES) - 12, 12)
    assert found["trained"] != found["at_the_start"]
    teacher = find("echo-2").model(CausalTransformer(given.model))
    texts, _ = distil.split(given)
    evaluator = AgreementEvaluator(texts, teacher.encode(texts, convert_to_tensor=True))
    assert evaluator(student)["spearman_cosines"] > 0.9


def test_a_table_of_token_vectors(settings, tmp_path):
    pairs = str(tmp_path / "pairs.tsv")
    given = settings(student="static", dimensions=8, evaluation=pairs, arguments={"learning_rate": 1e-2})
    student = train_distil(given, tmp_path / "out", progress=False)
    assert [type(module) for module in student] == [StaticEmbedding, Normalize]
    assert student.encode(SENTENCES[:2]).shape == (2, 8)
    assert "st_reba" not in (tmp_path / "out" / "model" / "modules.json").read_text()
    found = json.loads((tmp_path / "out" / "distil.json").read_text())["pairs"]
    assert found["share"][0] == pytest.approx(found["student"][0] / found["teacher"][0])
    value, low, high = found["teacher"]
    assert low <= value <= high


@pytest.mark.parametrize(
    ("student", "rate", "epochs"),
    [("classical", 2e-4, 3), ("static", 1e-2, 10), ("./static", 5e-5, 3), ("org/name", 5e-5, 3)],
)
def test_each_kind_of_student_is_trained_at_a_rate_of_its_own(student, rate, epochs):
    given = {"model": "m", "recipe": "echo-2", "texts": "t.txt", "student": student}
    usual = DistilTraining(**given).training_arguments
    assert (usual["learning_rate"], usual["num_train_epochs"]) == (rate, epochs)
    assert DistilTraining(**given, arguments={"learning_rate": 3e-3}).training_arguments["learning_rate"] == 3e-3


@pytest.mark.parametrize("student", ["classical", "another"])
def test_a_resumed_run_is_the_run_and_embeds_nothing_again(student, settings, encoder_paths, tmp_path, monkeypatch):
    """Neither where it is scored on other pairs than before: their texts are known, one by one."""
    student = encoder_paths()[0] if student == "another" else student
    given = settings(student=student, arguments={"save_steps": 1, "max_steps": 2})
    whole = train_distil(given, tmp_path / "whole", progress=False)
    stop(train_distil, given, tmp_path / "out", 1)
    monkeypatch.setattr(distil.Recipe, "model", None)
    scored = dataclasses.replace(given, evaluation=str(tmp_path / "pairs.tsv"))
    resumed = train_distil(scored, tmp_path / "out", progress=False)
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    with pytest.raises(ValueError, match="out exists and is not an empty directory|choose another output"):
        train_distil(given, tmp_path / "out", progress=False)


def test_targets_keep_as_many_dot_products_as_they_can():
    torch.manual_seed(0)
    vectors = normalize(torch.randn(40, 3) @ torch.randn(3, 9), dim=-1)
    found = distil.targets(vectors, 3)
    assert torch.allclose(found @ found.mT, vectors @ vectors.mT, atol=1e-5)
    assert not distil.targets(torch.cat([vectors, torch.zeros(1, 9)]), 3)[-1].any()


def test_directions_in_which_texts_do_not_vary_say_nothing():
    """A dimension that hardly varies, and those of fewer texts than dimensions, where there is rounding alone: dropout,
    or a token that no text has, lies there, and what it was multiplied by destroyed the student."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 6, generator=generator)
    inputs[:, 3] = 1e-9 * inputs[:, 3] - 1e-7
    found = distil.linear_map(inputs, torch.randn(200, 4, generator=generator))
    assert not found.weight[:, 3].any()
    assert found.weight.abs().max() < 1
    inputs = torch.randn(60, 59, generator=generator) @ torch.eye(59, 256)
    inputs += 2e-6 * torch.randn(60, 256, generator=generator)
    found = distil.linear_map(inputs, normalize(torch.randn(60, 8, generator=generator), dim=-1))
    assert not found.weight[:, 59:].any()
    assert found.weight[:, :59].any()


def test_a_linear_map_is_found_where_there_is_one():
    torch.manual_seed(0)
    inputs = torch.randn(300, 6) * torch.tensor([1e-3, 1, 1, 50, 1, 0]) + torch.tensor([0, 0, 900, 0, 0, 7.0])
    weight, bias = torch.randn(4, 6), torch.randn(4)
    scaled = (inputs - inputs.mean(dim=0)) / torch.tensor([1e-3, 1, 1, 50, 1, 1])
    outputs = scaled @ weight.mT + bias
    found = distil.linear_map(inputs, outputs)(inputs)
    assert ((found - outputs).square().mean() / outputs.var()).item() < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "ecko-2"}, "There is no recipe 'ecko-2'"),
        ({"student": "early-late"}, "'early-late' has something fitted around its pooling"),
        ({"student": "MiniLM"}, r"student: There is no recipe 'MiniLM'\. .* a model of the Hub as org/name\."),
        ({"student": "static", "pooling": "mean"}, "pooling: the student 'static' is no recipe"),
        ({"model_kwargs": {"quantization_config": {}}}, "a student is merged into whole weights"),
        ({"held_out": 40}, "has 44 different texts, of which 40 are held out and 16 are a batch: give at least 56, or"),
    ],
)
def test_refusals(changes, message, settings, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_distil(settings(**changes), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
