"""What a settings file may hold; and runs that are killed, resumed, or diverge."""

from __future__ import annotations

import json
import re
import shutil

import datasets
import pyarrow as pa
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import TrainerCallback, set_seed

from st_reba import BidirectionalLastLayer, CausalTransformer
from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, RunSettings, fitting, read_settings
from st_reba.train.fitting import DivergedError, data_digest
from st_reba.train.settings import arguments_identity, complete_arguments, make_arguments

from ..backbones import TEXTS
from ..conftest import long, pipeline
from . import StopAfter

ANCHORS, POSITIVES = ([f"{text}{again} {n}" for n in range(2) for text in TEXTS] for again in ("", " again"))
ROWS = datasets.Dataset.from_dict({"anchor": ANCHORS, "positive": POSITIVES})
# Three steps an epoch.
RUN = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 2}


def fit(loss, output, rows=ROWS, *, evaluator=None, callbacks=(), identity=None, **arguments):
    settings = RunSettings(arguments={**RUN, **arguments}, evaluation=None if evaluator is None else "pairs")
    return fitting.fit(
        loss.model, rows, loss, output, settings, evaluator=evaluator, callbacks=callbacks, identity=identity,
        progress=False,
    )  # fmt: skip


def stop(loss, output, step: int, **given) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(loss, output, callbacks=[StopAfter(step)], **given)


def checkpoints(output) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (output / "checkpoints").glob("checkpoint-*"))


class Noisy(nn.Module):
    """A loss with a weight and a generator of its own."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.inner = MultipleNegativesRankingLoss(model)
        self.weight = nn.Parameter(torch.ones(()))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, features, labels):
        noise = torch.rand((), generator=self.generator)
        return self.inner(features, labels) * (1 + noise) + (self.weight - noise) ** 2

    def get_extra_state(self):
        return self.generator.get_state()

    def set_extra_state(self, state):
        self.generator.set_state(state)


@pytest.fixture(scope="module")
def model(shallow_path):
    """Makes the same model each time, of one layer: with dropout, whole or with an adapter."""

    def make(kind: str = "whole"):
        made = pipeline(BidirectionalLastLayer(shallow_path), "lasttoken")
        # Here: what a process finds out of a backbone once, draws numbers too.
        set_seed(1)
        if kind == "adapter":
            peft = pytest.importorskip("peft")
            made.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear"))
        else:
            made[0].model.config.attention_dropout = 0.3
            for layer in made[0].model.layers:
                layer.self_attn.attention_dropout = 0.3
        return made

    return make


@pytest.fixture(scope="module")
def plain(model):
    return lambda: MultipleNegativesRankingLoss(model())


def weights(module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", ["adapter", long("whole")])
@pytest.mark.parametrize("sampler", ["no_duplicates", long("batch_sampler")])
def test_resumed_equals_uninterrupted(kind, sampler, model, tmp_path):
    """Interrupted within the second epoch, and again right after the checkpoint at its end."""
    straight, again = Noisy(model(kind)), Noisy(model(kind))
    begun = weights(straight)
    assert fit(straight, tmp_path / "straight", batch_sampler=sampler, save_steps=9).global_step == 9
    stop(Noisy(model(kind)), tmp_path / "broken", 5, batch_sampler=sampler)
    assert checkpoints(tmp_path / "broken") == [2, 4]
    stop(Noisy(model(kind)), tmp_path / "broken", 7, batch_sampler=sampler)
    assert checkpoints(tmp_path / "broken") == [4, 6]
    assert fit(again, tmp_path / "broken", batch_sampler=sampler).global_step == 9
    expected = weights(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(again).items())
    assert any(not torch.equal(weight, expected[name]) for name, weight in begun.items())


def test_a_kill_between_two_checkpoints_loses_neither(model, tmp_path, monkeypatch):
    """With room for one, the old one goes when the new one is whole, and not before."""
    atomic_file, marked = fitting.atomic_file, []

    def die_at_the_second(path):
        if path.name == "loss_state.pt":
            marked.append(path)
        if len(marked) == 2:
            raise KeyboardInterrupt
        return atomic_file(path)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "atomic_file", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            fit(Noisy(model()), tmp_path, save_total_limit=1)
    assert fitting.last_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-2"
    stop(Noisy(model()), tmp_path, 3, save_total_limit=1)
    assert checkpoints(tmp_path) == [2]


def test_which_checkpoints_are_kept(plain, tmp_path):
    """As many as there may be; the newest and the best in any case; none that a killed run left unfinished."""

    class Best(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            state.best_model_checkpoint = f"{args.output_dir}/checkpoint-4"

    (tmp_path / "2" / "checkpoints" / "checkpoint-99").mkdir(parents=True)
    for limit, kept in ((0, [2, 4, 6, 8]), (2, [4, 8])):
        fit(plain(), tmp_path / str(limit), max_steps=8, save_total_limit=limit, callbacks=[Best()])
        assert checkpoints(tmp_path / str(limit)) == kept


class Spoiled(MultipleNegativesRankingLoss):
    """Its value is NaN at the fourth step."""

    steps = 0

    def forward(self, features, labels):
        self.steps += 1
        return super().forward(features, labels) * (torch.nan if self.steps == 4 else 1)


class Steep(MultipleNegativesRankingLoss):
    """Its gradient is infinite."""

    def forward(self, features, labels):
        loss = super().forward(features, labels)
        return loss + (loss - loss.detach()).sqrt()


DIVERGING = [
    (Spoiled, "Training diverged at step 4: the loss is nan. The last good checkpoint is .*checkpoint-2.", [2]),
    (Steep, "step 1: the gradient is not finite. There is no checkpoint", []),
]


@pytest.mark.parametrize(("kind", "message", "kept"), DIVERGING)
def test_a_run_stops_before_its_weights_are_no_numbers(kind, message, kept, model, tmp_path):
    loss = kind(model())
    with pytest.raises(DivergedError, match=message):
        fit(loss, tmp_path)
    assert checkpoints(tmp_path) == kept
    assert all(weight.isfinite().all() for weight in weights(loss).values())


def test_no_checkpoint_and_no_model_holds_an_infinite_weight(plain, tmp_path):
    for given in ({"save_steps": 1}, {"save_strategy": "no", "max_steps": 1}):
        with pytest.raises(DivergedError, match="a weight is not finite after it. There is no checkpoint"):
            fit(plain(), tmp_path, learning_rate=1e300, **given)


class TestCheckpoints:
    IDENTITY = {"model": "a"}

    @pytest.fixture(scope="class")
    def stopped(self, plain, tmp_path_factory):
        output = tmp_path_factory.mktemp("stopped")
        stop(plain(), output, 5, identity=self.IDENTITY)
        return output

    ANOTHER_RUN = [
        ({"learning_rate": 1e-3}, "a run with learning_rate=0.01, but this run has learning_rate=0.001"),
        ({"gradient_accumulation_steps": 2}, "a run with gradient_accumulation_steps=1, but this run has grad"),
        ({"rows": ROWS.select(range(9))}, "a run with data="),
    ]

    @pytest.mark.parametrize(("changes", "message"), ANOTHER_RUN)
    def test_of_another_run_are_refused(self, changes, message, stopped, plain):
        with pytest.raises(ValueError, match=message):
            fit(plain(), stopped, **{"identity": self.IDENTITY, **changes})

    def test_how_often_is_written_and_evaluated_may_change(self, stopped, plain, tmp_path):
        stopped = shutil.copytree(stopped, tmp_path / "stopped")
        straight, trained = plain(), plain()
        fit(straight, tmp_path / "straight", save_steps=9)
        evaluator = EmbeddingSimilarityEvaluator(TEXTS[:3], TEXTS[1:4], [0.1, 0.5, 0.9], write_csv=False)
        changed = {"save_steps": 3, "eval_steps": 4, "logging_steps": 2, "evaluator": evaluator}
        log = fit(trained, stopped, identity=self.IDENTITY, **changed).log_history
        assert checkpoints(stopped) == [6, 9]
        assert [entry["step"] for entry in log if "eval_spearman_cosine" in entry] == [8, 9]
        assert [entry["step"] for entry in log if "loss" in entry and entry["step"] > 4] == [6, 8]
        expected = weights(straight)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(trained).items())

    def test_of_a_run_that_is_not_known_are_refused_and_no_model_is_overwritten(self, stopped, plain, tmp_path):
        output, loss = shutil.copytree(stopped, tmp_path / "stopped"), plain()
        for held in (b'{"epochs": 3', b"[]", b"\xff"):
            (output / "checkpoints" / "run.json").write_bytes(held)
            with pytest.raises(ValueError, match=r"an unknown run, without a readable run.json. Remove .* to start"):
                fit(loss, output)
        fitting.save(loss.model, output)
        with pytest.raises(ValueError, match="model exists and is not an empty directory: choose another output"):
            fit(loss, output)


class TestDigest:
    def test_rows_are_told_apart(self):
        rows = [[[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]], [[1.0], None], [[1.0], []], ["a", "bc"], ["ab", "c"]]
        made = [datasets.Dataset.from_dict({"label": labels}) for labels in rows]
        assert len({data_digest(one) for one in [*made, *made]}) == len(rows)

    def test_of_rows_wherever_they_lie(self, tmp_path):
        """In memory, on the disk, and as part of a larger table; one is not given."""
        values = [None if number == 4 else [float(number)] * 3 for number in range(2500)]
        rows = datasets.Dataset(pa.table({"label": pa.array(values, pa.list_(pa.float32()))}))
        rows.save_to_disk(str(tmp_path / "rows"))
        loaded = datasets.load_from_disk(str(tmp_path / "rows"))
        assert data_digest(rows) == data_digest(loaded)
        parts = loaded.select(range(3, 1500)), loaded.select([*range(3, 1500)]), rows.select(range(3, 1500))
        assert len({data_digest(part) for part in parts}) == 1


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


def test_a_file_that_holds_no_settings(read):
    for text, message in (
        ("\n", " has nothing: give lines such as model: org/name. Keys: arguments, evaluation, model_kwargs, "),
        ("- a\n", " has a list"),
        ("model: [\n", " is not a YAML file (while parsing a flow node expected the node content, but found '<stream"),
        ("rank: 3\n", ": the key 'model' is missing. Add a line model: VALUE."),
    ):
        with pytest.raises(ValueError, match=re.escape(f"settings.yaml{message}")):
            read(text, begun="")


REFUSED = [
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
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
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
