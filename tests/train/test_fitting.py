from __future__ import annotations

import json
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from transformers import TrainerCallback, set_seed

from st_reba import BidirectionalLastLayer, EchoModule, ReBAModule
from st_reba.train import DivergedError, RunSettings, finish, fitting
from st_reba.train.fitting import data_digest

from ..backbones import TEXTS
from ..conftest import long, pipeline
from .stopping import StopAfter

ROWS = datasets.Dataset.from_dict(
    {
        "anchor": [f"{text} {number}" for number in range(2) for text in TEXTS],
        "positive": [f"{text} again {number}" for number in range(2) for text in TEXTS],
    }
)
# Three steps an epoch.
RUN = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 2}


def fit(loss, output, rows=ROWS, *, callbacks=(), evaluator=None, identity=None, **arguments):
    return fitting.fit(
        loss.model, rows, loss, output=output, arguments={**RUN, **arguments}, callbacks=callbacks,
        evaluator=evaluator, identity=identity, progress=False,
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
    straight = Noisy(model(kind))
    begun = weights(straight)
    found = fit(straight, tmp_path / "straight", batch_sampler=sampler, save_steps=9)
    assert (found.steps, found.resumed_at) == (9, 0)

    stop(Noisy(model(kind)), tmp_path / "broken", 5, batch_sampler=sampler)
    assert checkpoints(tmp_path / "broken") == [2, 4]
    stop(Noisy(model(kind)), tmp_path / "broken", 7, batch_sampler=sampler)
    again = Noisy(model(kind))
    resumed = fit(again, tmp_path / "broken", batch_sampler=sampler)
    assert (resumed.steps, resumed.resumed_at) == (9, 6)
    expected = weights(straight)
    assert expected.keys() == weights(again).keys()
    for name, weight in weights(again).items():
        assert torch.equal(weight, expected[name]), name
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

    monkeypatch.setattr(fitting, "atomic_file", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        fit(Noisy(model()), tmp_path, save_total_limit=1)
    monkeypatch.setattr(fitting, "atomic_file", atomic_file)
    assert fitting.last_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-2"
    assert fit(Noisy(model()), tmp_path, save_total_limit=1).resumed_at == 2
    assert checkpoints(tmp_path) == [9]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(0, None, [2, 4, 6, 8]), (2, None, [6, 8]), (1, None, [8]), (2, 2, [2, 8]), (1, 4, [4, 8]), (3, 8, [4, 6, 8])],
)
def test_which_checkpoints_are_kept(limit, best, kept, plain, tmp_path):
    """As many as there may be; the newest and the best in any case; none that a killed run left unfinished."""

    class Best(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if best is not None:
                state.best_model_checkpoint = f"{args.output_dir}/checkpoint-{best}"

    (tmp_path / "checkpoints" / "checkpoint-99").mkdir(parents=True)
    fit(plain(), tmp_path, max_steps=8, save_total_limit=limit, callbacks=[Best()])
    assert checkpoints(tmp_path) == kept


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


@pytest.mark.parametrize(
    ("kind", "step", "message", "kept"),
    [
        (Spoiled, 4, "Training diverged at step 4: the loss is nan. The last good checkpoint is .*checkpoint-2.", [2]),
        (Steep, 1, "step 1: the gradient is not finite. There is no checkpoint", []),
    ],
)
def test_a_run_stops_before_its_weights_are_no_numbers(kind, step, message, kept, model, tmp_path):
    loss = kind(model())
    with pytest.raises(DivergedError, match=message) as raised:
        fit(loss, tmp_path)
    assert raised.value.step == step
    assert checkpoints(tmp_path) == kept
    assert all(weight.isfinite().all() for weight in weights(loss).values())


def test_no_checkpoint_holds_an_infinite_weight(plain, tmp_path):
    with pytest.raises(DivergedError, match="a weight is not finite after it. There is no checkpoint"):
        fit(plain(), tmp_path, learning_rate=1e300, save_steps=1)
    assert checkpoints(tmp_path) == []


class TestCheckpoints:
    IDENTITY = {"model": "a"}

    @pytest.fixture(scope="class")
    def first_run(self, plain, tmp_path_factory):
        output = tmp_path_factory.mktemp("stopped")
        stop(plain(), output, 5, identity=self.IDENTITY)
        return output

    @pytest.fixture
    def stopped(self, first_run, tmp_path):
        return shutil.copytree(first_run, tmp_path / "stopped")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"learning_rate": 1e-3}, "a run with learning_rate=0.01, but now it is learning_rate=0.001"),
            ({"per_device_train_batch_size": 2}, "per_device_train_batch_size=4, but now it is per_device_train_batch"),
            ({"gradient_accumulation_steps": 2}, "a run with gradient_accumulation_steps=1, but now it is gradient_"),
            ({"max_grad_norm": 0.5}, "a run with max_grad_norm=1.0, but now it is max_grad_norm=0.5"),
            ({"identity": {"model": "b"}}, "a run with model='a', but now it is model='b'"),
            ({"identity": {}}, "a run with model='a', but now it is model=None"),
            ({"rows": ROWS.select(range(9))}, "a run with other data"),
        ],
    )
    def test_of_another_run_are_refused(self, changes, message, stopped, plain):
        with pytest.raises(ValueError, match=message):
            fit(plain(), stopped, **{"identity": self.IDENTITY, **changes})

    def test_how_often_is_written_and_evaluated_may_change(self, stopped, plain, tmp_path):
        straight, trained = plain(), plain()
        fit(straight, tmp_path / "straight", save_steps=9)
        evaluator = EmbeddingSimilarityEvaluator(TEXTS[:3], TEXTS[1:4], [0.1, 0.5, 0.9], write_csv=False)
        changed = {"save_steps": 3, "eval_steps": 4, "logging_steps": 2, "evaluator": evaluator}
        found = fit(trained, stopped, identity=self.IDENTITY, **changed)
        assert (found.resumed_at, found.steps) == (4, 9)
        assert checkpoints(stopped) == [6, 9]
        assert [entry["step"] for entry in found.log if "eval_spearman_cosine" in entry] == [8, 9]
        assert [step for step, _ in found.losses if step > 4] == [6, 8]
        expected = weights(straight)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(trained).items())

    @pytest.mark.parametrize("held", [b'{"epochs": 3', b"[]", b"\xff"])
    def test_of_a_run_that_is_not_known_are_refused(self, held, stopped, plain):
        (stopped / "checkpoints" / "run.json").write_bytes(held)
        with pytest.raises(ValueError, match=r"its run.json does not say of which run. Remove .* to begin anew, or"):
            fit(plain(), stopped)

    def test_one_that_was_not_written_to_its_end_is_passed_over(self, stopped, plain):
        (stopped / "checkpoints" / "checkpoint-4" / "loss_state.pt").unlink()
        assert fit(plain(), stopped, identity=self.IDENTITY).resumed_at == 2

    def test_the_finished_model_is_never_overwritten(self, stopped, plain):
        with finish(stopped) as scratch:
            (scratch / "config.json").write_text(json.dumps({}))
        with pytest.raises(ValueError, match="model exists and is not an empty directory: choose another output"):
            fit(plain(), stopped)


@pytest.mark.parametrize(
    ("loss_class", "module_class"),
    [(MultipleNegativesRankingLoss, EchoModule), (CachedMultipleNegativesRankingLoss, ReBAModule)],
)
def test_sts_trainer(loss_class, module_class, backbone_path, tmp_path):
    """Gradients pass through bidirectional layers, too."""
    model = pipeline(module_class(backbone_path(), bidirectional_layers=2))
    before = weights(model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        learning_rate=1e-3, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=ROWS, loss=loss_class(model))
    trainer.train()
    assert not any(torch.equal(weight, before[name]) for name, weight in weights(model).items())
    model.save_pretrained(str(tmp_path / "trained"))
    assert "## Training Details" in (tmp_path / "trained" / "README.md").read_text()


class TestTheHub:
    """What is pushed is the finished model, when all is done."""

    def settings(self, **arguments):
        return RunSettings(arguments={"push_to_hub": True, "report_to": "none", **arguments})

    def test_pushing(self, tmp_path, monkeypatch):
        pushed = []
        monkeypatch.setattr(fitting, "push", lambda *args, **kwargs: pushed.append((args, kwargs)))
        asked = self.settings(hub_model_id="org/name", hub_private_repo=True, hub_revision="v2")
        made = fitting.begin(asked, tmp_path)
        # The trainer would make the repository before there is anything in it.
        assert (made.push_to_hub, made.hub_model_id) == (False, "org/name")
        for settings in (asked, RunSettings()):
            fitting.publish(settings, tmp_path)
        assert pushed == [((tmp_path / "model", "org/name"), {"private": True, "revision": "v2", "token": None})]
        every_save = self.settings(hub_model_id="org/name", hub_strategy="every_save")
        assert fitting.begin(every_save, tmp_path).push_to_hub

    def test_a_name_is_asked_for_first(self, tmp_path):
        for given, message in (({}, "add hub_model_id: org/name"), ({"hub_model_id": "a b"}, "a b")):
            with pytest.raises(ValueError, match=message):
                fitting.begin(self.settings(**given), tmp_path)


class TestDigest:
    @pytest.mark.parametrize(
        ("rows", "other"),
        [
            ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]),
            ([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]),
            ([[1.0], None], [[1.0], []]),
            ([[1, 2]], [[1.0, 2.0]]),
            (["a", "bc"], ["ab", "c"]),
            ([0.5, None], [0.5, 0.0]),
        ],
    )
    def test_rows_are_told_apart(self, rows, other):
        first, second = (datasets.Dataset.from_dict({"label": each}) for each in (rows, other))
        assert data_digest(first) != data_digest(second)
        assert data_digest(first) == data_digest(datasets.Dataset.from_dict({"label": rows}))

    @pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 4), pa.string(), pa.bool_()])
    def test_of_rows_wherever_they_lie(self, kind, tmp_path):
        """In memory, on the disk, and as part of a larger table; one is not given."""
        values: list = list(np.arange(10000, dtype=np.float32).reshape(2500, 4))
        if not pa.types.is_nested(kind):
            values = [None if row[0] == 16 else kind == pa.bool_() or str(row) for row in values]
        rows = datasets.Dataset(pa.table({"label": pa.array(values, kind)}))
        rows.save_to_disk(str(tmp_path / "rows"))
        loaded = datasets.load_from_disk(str(tmp_path / "rows"))
        assert data_digest(rows) == data_digest(loaded)
        parts = loaded.select(range(3, 1500)), loaded.select([*range(3, 1500)]), rows.select(range(3, 1500))
        assert len({data_digest(part) for part in parts}) == 1
        assert data_digest(rows) != data_digest(rows.select(range(2499)))
