from __future__ import annotations

import shutil

import datasets
import pyarrow as pa
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import TrainerCallback, set_seed

from st_reba import BidirectionalLastLayer
from st_reba.train import DivergedError, RunSettings, fitting
from st_reba.train.fitting import data_digest

from ..backbones import TEXTS
from ..conftest import long, pipeline
from . import StopAfter

ROWS = datasets.Dataset.from_dict(
    {
        "anchor": [f"{text} {number}" for number in range(2) for text in TEXTS],
        "positive": [f"{text} again {number}" for number in range(2) for text in TEXTS],
    }
)
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


@pytest.mark.parametrize(
    ("kind", "message", "kept"),
    [
        (Spoiled, "Training diverged at step 4: the loss is nan. The last good checkpoint is .*checkpoint-2.", [2]),
        (Steep, "step 1: the gradient is not finite. There is no checkpoint", []),
    ],
)
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

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"learning_rate": 1e-3}, "a run with learning_rate=0.01, but this run has learning_rate=0.001"),
            ({"gradient_accumulation_steps": 2}, "a run with gradient_accumulation_steps=1, but this run has grad"),
            ({"rows": ROWS.select(range(9))}, "a run with data="),
        ],
    )
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
