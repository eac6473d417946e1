"""What a settings file may hold: the keys of a method, and the training arguments of sentence-transformers, whole; and
rows to train on, by their columns (how each format is read is in tests/data)."""

from __future__ import annotations

import json
import re

import datasets
import pytest

from st_reba import CausalTransformer
from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, RunSettings, fitting, read_settings
from st_reba.train.settings import arguments_identity, complete_arguments, make_arguments

METHODS = {
    BeLLMTraining: "model: m\ntriplets: t\n",
    FreezeTraining: "model: m\npairs: p\n",
    JTCSETraining: "model: m\ntexts: t\n",
}


@pytest.fixture
def read(tmp_path):
    def settings(text: str, kind=BeLLMTraining, begun: str | None = None):
        path = tmp_path / "settings.yaml"
        path.write_text((METHODS.get(kind, "") if begun is None else begun) + text, encoding="utf-8")
        return read_settings(path, kind)

    return settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", " has nothing: give lines such as model: org/name. Keys: arguments, evaluation, model_kwargs, "),
        ("- a\n", " has a list"),
        ("model: [\n", " is not a YAML file (while parsing a flow node expected the node content, but found '<stream"),
        ("rank: 3\n", ": the key 'model' is missing. Add a line model: VALUE."),
    ],
)
def test_a_file_that_holds_no_settings(text, message, read):
    with pytest.raises(ValueError, match=re.escape(f"settings.yaml{message}")):
        read(text, begun="")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnak: 3", "'rnak' is unknown. Keys: arguments, evaluation, model_kwargs, model, triplets, "),
        ("traplets: x", "The nearest is triplets."),
        ("learning_rates: 1", "The nearest is learning_rate, below arguments."),
        ("rank: true", "rank: True was given: input should be a valid integer."),
        ("bidirectional_layers: some", "was given: input should be a valid integer or input should be 'none', 'la"),
        ("model_kwargs: {quantization_config: {}}", "model_kwargs: leave out quantization_config: an adapter is merg"),
        ("arguments: {bf61: true}", "arguments: 'bf61' is unknown. The nearest is bf16."),
        ("arguments: {seed: -1}", "arguments: seed: -1 was given: input should be greater than or equal to 0."),
        ("arguments: {push_to_hub: true}", "push_to_hub cannot be given: the run sets it itself. Leave"),
        ("arguments: {eval_strategy: steps}", "eval_strategy: 'steps' was given, but there is nothing to evaluate on."),
        ("arguments: {load_best_model_at_end: true}\nevaluation: x", "metric_for_best_model: eval_spearman_cosine."),
    ],
)
def test_refusals_name_file_key_and_what_is_allowed(text, message, read):
    with pytest.raises(ValueError, match=rf"settings\.yaml: .*{re.escape(message)}"):
        read(text)


def test_what_the_libraries_refuse(shallow_path, tmp_path):
    with pytest.raises(ValueError, match="arguments: no_duplicate is not a valid"):
        make_arguments(complete_arguments({"batch_sampler": "no_duplicate"}, evaluates=False), tmp_path, progress=False)
    with pytest.raises(ValueError, match="model_kwargs: .* got an unexpected keyword argument 'dtpye'"):
        RunSettings(model_kwargs={"dtpye": "float32"}).load(CausalTransformer, shallow_path)


def test_words_and_numbers_are_those_of_yaml_1_2(read):
    read_as = read("model_kwargs: {a: no, b: yes, c: 2e-4, d: 1, e: .5, f: false}\n").model_kwargs
    assert json.dumps(read_as) == '{"a": "no", "b": "yes", "c": 0.0002, "d": 1, "e": 0.5, "f": false}'
    found = read("temperature: 1e-3\nbidirectional_layers: all\ntarget_modules: [q_proj, v_proj]\n")
    assert (found.temperature, found.bidirectional_layers, found.rank) == (1e-3, "all", 32)
    assert found.target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize("kind", METHODS)
def test_arguments_reach_the_trainer_whole(kind, read, tmp_path):
    given = {"bf16": True, "gradient_accumulation_steps": 8, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    settings = read(f"arguments: {json.dumps({**given, 'use_cpu': True, 'save_strategy': 'no'})}\n", kind)
    made = make_arguments(complete_arguments(settings.training_arguments, evaluates=False), tmp_path, progress=False)
    assert {name: getattr(made, name) for name in given} == given
    # And the method's own where nothing was said. A run notes what decides its weights, as JSON.
    assert made.per_device_train_batch_size == 64
    json.dumps([arguments_identity(settings.training_arguments), settings.identity()])


def test_steps_are_given_by_who_wants_steps():
    for given, evaluates, expected in (
        ({"save_steps": 5, "eval_steps": 3}, True, ("steps", "steps")), ({}, True, ("epoch", "epoch")),
        ({"eval_steps": 3, "save_strategy": "best"}, False, ("epoch", "no")),
    ):  # fmt: skip
        found = complete_arguments(given, evaluates=evaluates)
        assert (found["save_strategy"], found["eval_strategy"]) == expected


def test_what_decides_the_weights(read):
    """Where it is evaluated which step is the best, so does when that is."""
    free = {"logging_steps": 1, "save_steps": 3, "report_to": "none", "use_cpu": True, "hub_model_id": "a/b"}
    deciding = {"weight_decay": 0.1, "bf16": True, "seed": 3}
    by_itself = {"weight_decay": 0.0, "gradient_checkpointing": True, "max_grad_norm": 1.0}
    assert arguments_identity(free) == arguments_identity(by_itself) == {}
    assert arguments_identity({**free, **deciding}) == deciding
    best = arguments_identity({**free, "load_best_model_at_end": True})
    assert best == {"save_steps": 3, "load_best_model_at_end": True}
    settings = read("model_kwargs: {dtype: bfloat16, device_map: auto}\n")
    assert settings.identity()["model_kwargs"] == {"dtype": "bfloat16"}
    assert "triplets" not in settings.identity()


def test_rows_by_their_columns(tmp_path):
    def write(name: str, text: str):
        (tmp_path / name).write_bytes(text.encode("utf-8"))
        return tmp_path / name

    triplets = fitting.read_triplets(write("nli.csv", "id,contradiction,premise,entailment\n1,no one,a man,a person\n"))
    assert triplets.to_dict() == {"anchor": ["a man"], "positive": ["a person"], "negative": ["no one"]}
    assert fitting.read_scored_pairs(write("pairs.tsv", "a\tb\t2.5\nc\td\t0\n"))["score"][:] == [2.5, 0.0]
    read = fitting.read_conditional_pairs(write("csts.csv", "sentence1,sentence2,condition,label\none,two,where,4\n"))
    assert read[0] == {"sentence1": "one", "sentence2": "two", "condition": "where", "score": 4.0}
    assert fitting.read_sentences(write("texts.txt", "one\n\ntext\n")).to_dict() == {"sentence": ["one", "text"]}
    assert fitting.read_sentences(write("texts.csv", "text,class\none,1\n")).to_dict() == {"sentence": ["one"]}
    with pytest.raises(ValueError, match=r"r.tsv, line 2: 2 columns where 3 are expected. A row is anchor, positive,"):
        fitting.read_triplets(write("r.tsv", "a\tb\tc\na\tb\n"))


def test_a_data_set_of_the_hub(monkeypatch):
    columns = {"contradiction": ["no one", ""], "premise": ["a man", "ice"], "entailment": ["one", "water"]}
    whole = datasets.Dataset.from_dict(columns)
    splits = datasets.DatasetDict({"test": whole, "train": whole.select([0])})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: splits[split] if split else splits)
    assert [*fitting.read_triplets("org/nli")] == [{"anchor": "a man", "positive": "one", "negative": "no one"}]
    with pytest.raises(ValueError, match="org/nli, split test, row 2: negative: an empty text. A row is anchor"):
        fitting.read_triplets("org/nli::test")
    with pytest.raises(ValueError, match=r"row 1 lacks sentence2, score \(pairs\); its columns are contradiction"):
        fitting.read_scored_pairs("org/nli")
