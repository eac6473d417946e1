"""The training arguments of sentence-transformers, whole, in a settings file."""

from __future__ import annotations

import json
import sys

import pytest

from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, RunSettings, read_settings
from st_reba.train.settings import complete, identity, made

METHODS = {
    BeLLMTraining: "model: m\ntriplets: t\n",
    FreezeTraining: "model: m\npairs: p\n",
    JTCSETraining: "model: m\ntexts: t\n",
}


@pytest.fixture
def read(tmp_path):
    def settings(text: str, kind=BeLLMTraining):
        path = tmp_path / "settings.yaml"
        path.write_text(METHODS[kind] + text, encoding="utf-8")
        return read_settings(path, kind)

    return settings


@pytest.mark.parametrize("kind", METHODS)
def test_they_reach_the_trainer_whole(kind, read, tmp_path):
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
    # And the method's own where nothing was said.
    assert given.per_device_train_batch_size == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arguments: {bf61: true}", "'bf61' is no training argument of sentence-transformers. The nearest is bf16."),
        ("arguments: {gradient_acumulation_steps: 2}", "The nearest is gradient_accumulation_steps."),
        ("arguments: {bf16: 1}", "bf16: 1 was given: input should be a valid boolean."),
        ("arguments: {learning_rate: fast}", "learning_rate: 'fast' was given: input should be a valid number."),
        ("arguments: {per_device_train_batch_size: 0}", "was given: input should be at least 1."),
        ("arguments: {gradient_checkpointing_kwargs: 3}", "3 was given: input should be a valid dictionary or"),
        ("arguments: {output_dir: x}", "output_dir cannot be given: the output directory of the run is where"),
        ("arguments: {eval_strategy: steps}", "eval_strategy: 'steps' was given, but there is nothing to evaluate on"),
        ("arguments: {load_best_model_at_end: true}\nevaluation: x", "metric_for_best_model: eval_spearman_cosine"),
        ("arguments: fast", "arguments: 'fast' was given: input should be a valid dictionary."),
        ("learning_rates: 1", "The nearest is learning_rate, an argument of sentence-transformers: write it below arg"),
        ("epochs: 3", "The nearest is num_train_epochs, an argument of sentence-transformers: write it below arg"),
        ("batch_size: 3", "The nearest is per_device_train_batch_size, an argument of sentence-transformers"),
        ("bf16: true", "It is an argument of sentence-transformers: write it below arguments."),
        ("traplets: x", "The nearest is triplets."),
        ("preset: published", "preset: 'published' was given, but it must be 'released', or left out."),
    ],
)  # fmt: skip
def test_refusals(text, message, read):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read(text)
    assert message in str(raised.value)
    assert "settings.yaml: " in str(raised.value)


@pytest.mark.parametrize("given", [{"lr_scheduler_type": "cosin"}, {"batch_sampler": "no_duplicate"}])
def test_a_word_that_is_none_of_sentence_transformers(given, tmp_path):
    [[_name, word]] = given.items()
    with pytest.raises(ValueError, match=f"arguments: {word} is not a valid"):
        made(complete(RunSettings(arguments=given).training_arguments, evaluates=False), tmp_path, progress=False)


def test_two_that_do_not_go_together(tmp_path):
    arguments = complete({"bf16": True, "fp16": True, "use_cpu": True}, evaluates=False)
    with pytest.raises(ValueError, match="arguments: At most one of fp16 and bf16 can be True"):
        made(arguments, tmp_path, progress=False)


def test_steps_are_given_by_who_wants_steps():
    given = complete({"save_steps": 5, "eval_steps": 3}, evaluates=True)
    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    given = complete({}, evaluates=True)
    assert (given["save_strategy"], given["eval_strategy"]) == ("epoch", "epoch")
    assert complete({"eval_steps": 3}, evaluates=False)["eval_strategy"] == "no"


def test_the_released_command(read):
    """Its settings are one word; what is given besides is in place of them."""
    settings = read("preset: released\nrank: 8\narguments: {num_train_epochs: 1}\n")
    assert (settings.rank, settings.alpha, settings.pool_over) == (8, 128, "whole")
    assert (settings.contrastive_weight, settings.angle_weight, settings.max_seq_length) == (20, 1, 60)
    arguments = settings.training_arguments
    assert (arguments["num_train_epochs"], arguments["gradient_accumulation_steps"]) == (1, 32)
    assert (arguments["per_device_train_batch_size"], arguments["warmup_steps"]) == (256, 80)
    assert settings == BeLLMTraining.of_preset(
        "released", model="m", triplets="t", rank=8, arguments={"num_train_epochs": 1}
    )


def test_what_decides_the_weights():
    """Where it is evaluated which step is the best, so does when that is."""
    free = {"logging_steps": 1, "save_steps": 3, "report_to": "none", "use_cpu": True, "hub_model_id": "a/b"}
    deciding = {"weight_decay": 0.1, "bf16": True, "seed": 3}
    by_itself = {"weight_decay": 0.0, "gradient_checkpointing": True, "max_grad_norm": 1.0}
    assert identity(free) == {}
    assert identity({**free, **deciding}) == deciding
    assert identity(by_itself) == {}
    best = identity({**free, "load_best_model_at_end": True})
    assert best == {"save_steps": 3, "load_best_model_at_end": True}


@pytest.mark.parametrize("kind", METHODS)
def test_an_argument_is_data_for_json(kind):
    """A run notes what decides its weights."""
    given = {"model": "m", "triplets": "t", "pairs": "p", "texts": "t"}
    settings = kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__})
    json.dumps([identity(settings.training_arguments), settings.identity()])


def test_model_kwargs(read):
    settings = read("model_kwargs: {dtype: bfloat16, device_map: auto}\n")
    assert settings.loading() == {"dtype": "bfloat16", "device_map": "auto"}
    assert settings.identity()["model_kwargs"] == {"dtype": "bfloat16"}
    assert RunSettings().loading() == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("quantization", "error", "message"),
    [
        ("{bits: 4}", ValueError, "model_kwargs: quantization_config: .*quant_method.* Such as"),
        ("{load_in_4bit: true}", ImportError, "needs bitsandbytes: pip install"),
        ("{quant_method: few}", ValueError, "model_kwargs: quantization_config: Unknown quantization type"),
        ("{quant_method: bitsandbytes, load_in_8bit: true}", ImportError, "needs bitsandbytes: pip install"),
        ("{quant_method: torchao, quant_type: Int8WeightOnlyConfig}", ImportError, "needs torchao: pip install"),
    ],
)  # fmt: skip
def test_quantisation_in_words(quantization, error, message, read, monkeypatch):
    for package in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error, match=message):
        read(f"model_kwargs: {{quantization_config: {quantization}}}\n").loading()
