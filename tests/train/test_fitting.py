from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import TrainerCallback, set_seed

from st_reba import BidirectionalLastLayer
from st_reba.train import DivergedError, RunSettings, finish, fitting

from ..backbones import TEXTS
from ..conftest import first, pipeline
from .shorthand import whole
from .stopping import StopAfter

ROWS = Dataset.from_dict(
    {
        "anchor": [f"{text} {number}" for number in range(2) for text in TEXTS],
        "positive": [f"{text} again {number}" for number in range(2) for text in TEXTS],
    }
)
# Three steps an epoch.
RUN = {"epochs": 3, "batch_size": 4, "learning_rate": 1e-2, "checkpoint_steps": 2, "progress": False}


def fit(*args, **settings):
    return fitting.fit(*args, **whole(**settings))


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


def weights(module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", first(["adapter", "whole"], 1))
@pytest.mark.parametrize("no_duplicates", first([True, False], 1))
def test_resumed_equals_uninterrupted(kind, no_duplicates, model, tmp_path):
    """Interrupted within the second epoch, and again right after the checkpoint at its end."""
    sampler = "no_duplicates" if no_duplicates else "batch_sampler"
    settings = {**RUN, "arguments": {"batch_sampler": sampler}}
    first = Noisy(model(kind))
    begun = weights(first)
    once = {**settings, "checkpoint_steps": 9}
    straight = fit(first.model, ROWS, first, output=tmp_path / "straight", **once)
    assert (straight.steps, straight.resumed_at) == (9, 0)

    for stop, resumed_at in ((5, 0), (7, 4)):
        again = Noisy(model(kind))
        with pytest.raises(KeyboardInterrupt):
            fit(again.model, ROWS, again, output=tmp_path / "broken", callbacks=[StopAfter(stop)], **settings)
        kept = tmp_path / "broken" / "checkpoints" / f"checkpoint-{resumed_at}"
        assert resumed_at == 0 or kept.is_dir()
    again = Noisy(model(kind))
    resumed = fit(again.model, ROWS, again, output=tmp_path / "broken", **settings)
    assert (resumed.steps, resumed.resumed_at) == (9, 6)
    expected = weights(first)
    assert expected.keys() == weights(again).keys()
    for name, weight in weights(again).items():
        assert torch.equal(weight, expected[name]), name
    assert any(not torch.equal(weight, expected[name]) for name, weight in begun.items())


def test_a_kill_between_two_checkpoints_loses_neither(model, tmp_path, monkeypatch):
    """With room for one, the old one goes when the new one is whole, and not before."""
    settings = {**RUN, "arguments": {"save_total_limit": 1}}
    atomic_file, marked = fitting.atomic_file, []

    def die_at_the_second(path):
        if path.name == "loss_state.pt":
            marked.append(path)
        if len(marked) == 2:
            raise KeyboardInterrupt
        return atomic_file(path)

    monkeypatch.setattr(fitting, "atomic_file", die_at_the_second)
    begun = Noisy(model())
    with pytest.raises(KeyboardInterrupt):
        fit(begun.model, ROWS, begun, output=tmp_path, **settings)
    monkeypatch.setattr(fitting, "atomic_file", atomic_file)
    assert fitting.last_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-2"
    again = Noisy(model())
    assert fit(again.model, ROWS, again, output=tmp_path, **settings).resumed_at == 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")] == ["checkpoint-9"]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 4, 6, 8, 9]),
        (2, None, [6, 8]),
        (1, None, [8]),
        (2, 2, [2, 8]),
        (1, 4, [4, 8]),
        (3, 8, [4, 6, 8]),
    ],
)
def test_which_checkpoints_are_kept(limit, best, kept, tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "loss_state.pt").touch()
    # One that a killed run did not write to its end.
    (tmp_path / "checkpoint-9").mkdir()
    fitting.remove_older(tmp_path, limit, None if best is None else tmp_path / f"checkpoint-{best}")
    assert sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir()) == kept


def test_each_epoch_has_an_order_of_its_own(model, tmp_path):
    orders: list[list[list[int]]] = []

    class Noting(TrainerCallback):
        def on_epoch_begin(self, args, state, control, train_dataloader, **kwargs):
            sampler = train_dataloader.batch_sampler
            while hasattr(sampler, "batch_sampler"):
                sampler = sampler.batch_sampler
            orders.append(list(sampler))

    trained = model()
    settings = {**RUN, "epochs": 2, "arguments": {"batch_sampler": "no_duplicates"}}
    loss = MultipleNegativesRankingLoss(trained)
    fit(trained, ROWS, loss, output=tmp_path, callbacks=[Noting()], **settings)
    assert len(orders) == 2
    assert orders[0] != orders[1]


def test_the_log_goes_on(model, tmp_path):
    evaluator = EmbeddingSimilarityEvaluator(TEXTS[:3], TEXTS[1:4], [0.1, 0.5, 0.9], write_csv=False)
    trained = model()
    found = fit(
        trained,
        ROWS,
        MultipleNegativesRankingLoss(trained),
        output=tmp_path,
        evaluator=evaluator,
        logging_steps=1,
        **RUN,
    )
    assert [step for step, _ in found.losses] == list(range(1, 10))
    assert [entry["step"] for entry in found.log if "eval_spearman_cosine" in entry] == [3, 6, 9]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-8",
        "checkpoint-9",
    ]


class TestDivergence:
    def test_nan_stops_before_it_reaches_the_weights(self, model, tmp_path):
        class Spoiled(MultipleNegativesRankingLoss):
            steps = 0

            def forward(self, features, labels):
                self.steps += 1
                return super().forward(features, labels) * (torch.nan if self.steps == 4 else 1)

        trained = model()
        with pytest.raises(DivergedError) as raised:
            fit(trained, ROWS, Spoiled(trained), output=tmp_path, **RUN)
        kept = tmp_path / "checkpoints" / "checkpoint-2"
        assert (raised.value.step, raised.value.checkpoint) == (4, kept)
        assert f"Training diverged at step 4: the loss is nan. The last good checkpoint is {kept}." in str(raised.value)
        assert all(weight.isfinite().all() for weight in weights(trained).values())

    def test_a_gradient_that_is_not_finite(self, model, tmp_path):
        class Steep(MultipleNegativesRankingLoss):
            def forward(self, features, labels):
                loss = super().forward(features, labels)
                return loss + (loss - loss.detach()).sqrt()

        trained = model()
        with pytest.raises(DivergedError, match="step 1: the gradient is not finite. There is no checkpoint"):
            fit(trained, ROWS, Steep(trained), output=tmp_path, **RUN)
        assert all(weight.isfinite().all() for weight in weights(trained).values())

    def test_no_checkpoint_holds_an_infinite_weight(self, model, tmp_path):
        trained = model()
        with pytest.raises(DivergedError, match="a weight is not finite after it. There is no checkpoint"):
            fit(
                trained, ROWS, MultipleNegativesRankingLoss(trained), output=tmp_path,
                **{**RUN, "learning_rate": 1e300, "checkpoint_steps": 1},
            )  # fmt: skip
        assert not list((tmp_path / "checkpoints").glob("checkpoint-*"))


class TestCheckpoints:
    @pytest.fixture(scope="class")
    def first_run(self, model, tmp_path_factory):
        trained, output = model(), tmp_path_factory.mktemp("stopped")
        with pytest.raises(KeyboardInterrupt):
            fit(
                trained, ROWS, MultipleNegativesRankingLoss(trained), output=output, callbacks=[StopAfter(5)],
                identity={"model": "a"}, **RUN,
            )  # fmt: skip
        return output

    @pytest.fixture
    def stopped(self, first_run, tmp_path):
        return shutil.copytree(first_run, tmp_path / "stopped")

    def resume(self, trained, output, **changes):
        settings = {**RUN, "identity": {"model": "a"}, **changes}
        return fit(trained, ROWS, MultipleNegativesRankingLoss(trained), output=output, **settings)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"learning_rate": 1e-3}, "a run with learning_rate=0.01, but now it is learning_rate=0.001"),
            (
                {"batch_size": 2},
                "a run with 4 rows that the loss sees at once: per_device_train_batch_size, on all dev",
            ),
            (
                {"arguments": {"gradient_accumulation_steps": 2}},
                "a run with 4 rows of a step: .* now it is 8 rows of a",
            ),
            ({"arguments": {"max_grad_norm": 0.5}}, "a run with max_grad_norm=1.0, but now it is max_grad_norm=0.5"),
            ({"identity": {"model": "b"}}, "a run with model='a', but now it is model='b'"),
            ({"identity": {}}, "a run with model='a', but now it is model=None"),
        ],
    )
    def test_of_another_run_are_refused(self, changes, message, stopped, model):
        with pytest.raises(ValueError, match=message):
            self.resume(model(), stopped, **changes)

    def test_of_other_data_are_refused(self, stopped, model):
        trained = model()
        with pytest.raises(ValueError, match="a run with other data"):
            fit(
                trained, ROWS.select(range(9)), MultipleNegativesRankingLoss(trained), output=stopped,
                identity={"model": "a"}, **RUN,
            )  # fmt: skip

    def test_how_often_is_written_and_evaluated_may_change(self, stopped, model, tmp_path):
        straight = model()
        once = {**RUN, "checkpoint_steps": 9}
        fit(straight, ROWS, MultipleNegativesRankingLoss(straight), output=tmp_path / "straight", **once)
        trained = model()
        found = self.resume(
            trained,
            stopped,
            checkpoint_steps=3,
            evaluator=EmbeddingSimilarityEvaluator(TEXTS[:3], TEXTS[1:4], [0.1, 0.5, 0.9], write_csv=False),
            evaluation_steps=4,
            logging_steps=2,
        )
        assert (found.resumed_at, found.steps) == (4, 9)
        assert sorted(path.name for path in (stopped / "checkpoints").glob("checkpoint-*")) == [
            "checkpoint-6",
            "checkpoint-9",
        ]
        assert [entry["step"] for entry in found.log if "eval_spearman_cosine" in entry] == [8, 9]
        assert [step for step, _ in found.losses if step > 4] == [6, 8]
        expected = weights(straight)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(trained).items())

    @pytest.mark.parametrize("held", [None, b"", b'{"epochs": 3', b"[]", b"\xff"])
    def test_of_a_run_that_is_not_known_are_refused(self, held, stopped, model):
        noted = stopped / "checkpoints" / "run.json"
        noted.unlink()
        if held is not None:
            noted.write_bytes(held)
        with pytest.raises(ValueError, match=r"its run.json does not say of which run. Remove .* to begin anew, or"):
            self.resume(model(), stopped)

    def test_which_run_it_is_is_written_whole_or_not_at_all(self, model, tmp_path, monkeypatch):
        """Seen from a machine that fails before the bytes are on the disk."""
        noted = tmp_path / "checkpoints" / "run.json"

        def fails(descriptor):
            raise OSError("the machine failed")

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="the machine failed"):
            self.resume(model(), tmp_path)
        assert list(noted.parent.iterdir()) == []

    def test_one_that_was_not_written_to_its_end_is_passed_over(self, stopped, model):
        (stopped / "checkpoints" / "checkpoint-4" / "loss_state.pt").unlink()
        assert self.resume(model(), stopped).resumed_at == 2

    def test_the_finished_model_is_never_overwritten(self, stopped, model):
        with finish(stopped) as scratch:
            (scratch / "config.json").write_text(json.dumps({}))
        with pytest.raises(ValueError, match="model exists and is not an empty directory: choose another output"):
            self.resume(model(), stopped)


class TestTheHub:
    """What is pushed is the finished model, when all is done."""

    @pytest.fixture
    def settings(self):
        def make(**arguments):
            return RunSettings(arguments={"push_to_hub": True, "report_to": "none", **arguments})

        return make

    def test_pushing(self, settings, tmp_path, monkeypatch):
        pushed = []
        monkeypatch.setattr(fitting, "push", lambda *args, **kwargs: pushed.append((args, kwargs)))
        asked = settings(hub_model_id="org/name", hub_private_repo=True, hub_revision="v2")
        made = fitting.begin(asked, tmp_path)
        # The trainer would make the repository before there is anything in it.
        assert (made.push_to_hub, made.hub_model_id) == (False, "org/name")
        fitting.publish(asked, tmp_path)
        told = {"private": True, "revision": "v2", "token": None}
        assert pushed == [((tmp_path / "model", "org/name"), told)]
        fitting.publish(RunSettings(), tmp_path)
        assert len(pushed) == 1
        assert fitting.begin(settings(hub_model_id="org/name", hub_strategy="every_save"), tmp_path).push_to_hub

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [({}, "push_to_hub needs a name: add hub_model_id: org/name"), ({"hub_model_id": "a b"}, "a b")],
    )
    def test_a_name_is_asked_for_first(self, arguments, message, settings, tmp_path):
        with pytest.raises(ValueError, match=message):
            fitting.begin(settings(**arguments), tmp_path)
