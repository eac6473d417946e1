"""What a settings file may hold: the keys of a method, and the training arguments of sentence-transformers, whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from st_reba import CausalTransformer
from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, RunSettings, Settings, read_settings, setting
from st_reba.train.settings import complete, identity, made


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    model: str
    rank: int = setting(32, least=1)
    rate: float = setting(2e-4, above=0, below=1)
    layers: int | Literal["none", "all"] = 1
    modules: tuple[str, ...] | Literal["all-linear"] | None = None


METHODS = {
    BeLLMTraining: "model: m\ntriplets: t\n",
    FreezeTraining: "model: m\npairs: p\n",
    JTCSETraining: "model: m\ntexts: t\n",
}


@pytest.fixture
def read(tmp_path):
    def settings(text: str, kind=BeLLMTraining):
        path = tmp_path / "settings.yaml"
        path.write_text(METHODS.get(kind, "") + text, encoding="utf-8")
        return read_settings(path, kind)

    return settings


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Example, "", "holds nothing, but it must hold lines such as model: org/name. Keys: model, rank,"),
        (Example, "- a\n", "holds a list"),
        (Example, "model: [\n", "settings.yaml, line 2: this is not YAML (expected the node content, but found '<str"),
        (Example, "model: m\nrnak: 3\n", "the key 'rnak' is unknown. Keys: model, rank, rate, layers, modules. The n"),
        (Example, "rank: 3\n", "the key 'model' is missing. Add a line model: VALUE."),
        (Example, "model: m\nrank: 0\n", "rank: 0 was given: input should be greater than or equal to 1."),
        (Example, "model: m\nrate: .nan\n", "rate: nan was given: input should be a finite number."),
        (Example, "model: m\nlayers: some\n", "layers: 'some' was given: input should be a valid integer or input sh"),
        (BeLLMTraining, "arguments: {bf61: true}", "'bf61' is no training argument of sentence-transformers. The near"),
        (BeLLMTraining, "arguments: {bf16: 1}", "bf16: 1 was given: input should be a valid boolean."),
        (BeLLMTraining, "arguments: {output_dir: x}", "output_dir cannot be given: the output directory of the run is"),
        (BeLLMTraining, "arguments: {eval_strategy: steps}", "eval_strategy: 'steps' was given, but there is nothing"),
        (BeLLMTraining, "arguments: {load_best_model_at_end: true}\nevaluation: x", "metric_for_best_model: eval_spea"),
        (BeLLMTraining, "learning_rates: 1", "The nearest is learning_rate, to be written below arguments."),
        (BeLLMTraining, "traplets: x", "The nearest is triplets."),
        (BeLLMTraining, "preset: published", "preset: 'published' was given, but it must be 'released', or left out."),
    ],
)  # fmt: skip
def test_refusals_name_file_key_and_what_is_allowed(kind, text, message, read):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read(text, kind)
    assert "settings.yaml" in str(raised.value)
    assert message in str(raised.value)


def test_what_sentence_transformers_refuses(tmp_path):
    with pytest.raises(ValueError, match="arguments: no_duplicate is not a valid"):
        made(complete({"batch_sampler": "no_duplicate"}, evaluates=False), tmp_path, progress=False)


@pytest.mark.parametrize(
    ("word", "value"), [("no", "no"), ("yes", "yes"), ("2e-4", 2e-4), ("1", 1), (".5", 0.5), ("false", False)]
)
def test_words_and_numbers_are_those_of_yaml_1_2(word, value, read):
    found = read(f"model_kwargs: {{a: {word}}}\n", RunSettings).model_kwargs["a"]
    assert (found, type(found)) == (value, type(value))
    found = read("model: m\nrate: 1e-3\nlayers: all\nmodules: [q_proj, v_proj]\n", Example)
    assert found == Example(model="m", rank=32, rate=1e-3, layers="all", modules=("q_proj", "v_proj"))


@pytest.mark.parametrize("kind", METHODS)
def test_arguments_reach_the_trainer_whole(kind, read, tmp_path):
    """Precision, accumulation, checkpointing, a schedule: what the papers' own case needs."""
    settings = read(
        "arguments:\n  bf16: true\n  use_cpu: true\n  gradient_accumulation_steps: 8\n  gradient_checkpointing: true\n"
        "  lr_scheduler_type: cosine\n  warmup_steps: 0.1\n  max_grad_norm: 0.5\n  optim: adafactor\n"
        "  learning_rate: 3e-5\n  save_strategy: no\n  report_to: none\n",
        kind,
    )
    given = made(complete(settings.training_arguments, evaluates=False), tmp_path, progress=False)
    assert (given.bf16, given.gradient_accumulation_steps, given.gradient_checkpointing) == (True, 8, True)
    assert (given.lr_scheduler_type, given.warmup_steps, given.max_grad_norm) == ("cosine", 0.1, 0.5)
    assert (given.optim, given.learning_rate, given.save_strategy, given.report_to) == ("adafactor", 3e-5, "no", [])
    # And the method's own where nothing was said. A run notes what decides its weights, as JSON.
    assert given.per_device_train_batch_size == 64
    json.dumps([identity(settings.training_arguments), settings.identity()])


def test_steps_are_given_by_who_wants_steps():
    given = complete({"save_steps": 5, "eval_steps": 3}, evaluates=True)
    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    given = complete({}, evaluates=True)
    assert (given["save_strategy"], given["eval_strategy"]) == ("epoch", "epoch")
    assert complete({"eval_steps": 3}, evaluates=False)["eval_strategy"] == "no"
    whole = JTCSETraining(model="m", texts="t", evaluation="e", arguments={"eval_strategy": "epoch"})
    assert "eval_steps" not in whole.training_arguments


def test_the_released_command(read):
    """Its settings are one word; what is given besides is in place of them."""
    settings = read("preset: released\nrank: 8\narguments: {num_train_epochs: 1}\n")
    assert (settings.rank, settings.alpha, settings.pool_over) == (8, 128, "whole")
    assert (settings.contrastive_weight, settings.angle_weight, settings.max_seq_length) == (20, 1, 60)
    given = {"model": "m", "triplets": "t", "rank": 8, "arguments": {"num_train_epochs": 1}}
    assert settings == BeLLMTraining.of_preset("released", **given)


def test_what_decides_the_weights():
    """Where it is evaluated which step is the best, so does when that is."""
    free = {"logging_steps": 1, "save_steps": 3, "report_to": "none", "use_cpu": True, "hub_model_id": "a/b"}
    deciding = {"weight_decay": 0.1, "bf16": True, "seed": 3}
    by_itself = {"weight_decay": 0.0, "gradient_checkpointing": True, "max_grad_norm": 1.0}
    assert identity(free) == identity(by_itself) == {}
    assert identity({**free, **deciding}) == deciding
    best = identity({**free, "load_best_model_at_end": True})
    assert best == {"save_steps": 3, "load_best_model_at_end": True}


def test_model_kwargs(read):
    settings = read("model_kwargs: {dtype: bfloat16, device_map: auto}\n")
    assert settings.loading() == {"dtype": "bfloat16", "device_map": "auto"}
    assert settings.identity()["model_kwargs"] == {"dtype": "bfloat16"}
    assert RunSettings().loading() == {"dtype": "float32"}


def test_quantisation_in_words_is_read_by_transformers(read, shallow_path):
    settings = read("model_kwargs: {quantization_config: {quant_method: few}}\n")
    with pytest.raises(ValueError, match="Unknown quantization type, got few"):
        settings.load(CausalTransformer, shallow_path)
