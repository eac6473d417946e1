"""The one door: what is changed is undone, who looks on changes nothing, and a pass may end early."""

from __future__ import annotations

import threading

import pytest
import torch

from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.run import Halt, Hook, Pass, PassChange, StatesAt, current, passing, run, watching
from st_reba.text.layout import Layout

from .. import backbones

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
LAYOUT = Layout(IDS, torch.ones_like(IDS, dtype=torch.bool), torch.zeros_like(IDS))


@pytest.fixture(scope="module")
def model():
    return backbones.backbone("llama")


def pass_of(model, **asked):
    with torch.no_grad():
        return run(model, LAYOUT, **asked)


def doubled(model, layer):
    return PassChange(hooks={model.layers[layer]: Hook(after=lambda states: 2 * states)})


class TestChanges:
    def test_act_in_one_pass(self, model):
        before = pass_of(model)
        changed = pass_of(model, changes=[doubled(model, 0)])
        assert not torch.allclose(changed, before)
        assert torch.equal(pass_of(model), before)

    def test_act_one_after_the_other(self, model):
        fourfold = PassChange(hooks={model.layers[0]: Hook(after=lambda states: 4 * states)})
        twice = pass_of(model, changes=[doubled(model, 0), doubled(model, 0)])
        assert torch.equal(twice, pass_of(model, changes=[fourfold]))

    def test_are_undone_after_an_error(self, model):
        def fail(states):
            raise KeyError

        with pytest.raises(KeyError):
            pass_of(model, changes=[PassChange(hooks={model.layers[1]: Hook(before=fail)})])
        assert current() == Pass()


class TestStates:
    @pytest.mark.parametrize("position", [None, torch.tensor([2, 0])])
    def test_are_seen_and_stay_as_they_are(self, model, position):
        hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states
        expected = pass_of(model)
        given = StatesAt(model.layers[1:], "before", position)
        gave = StatesAt(model.layers[:2], "after", position)
        assert torch.equal(pass_of(model, changes=[given.as_change(), gave.as_change()]), expected)
        for seen in (given, gave):
            for states, layer in zip(seen.states(), hidden[1:3], strict=True):
                assert torch.equal(states, layer if position is None else layer[torch.arange(2), position])

    def test_are_seen_as_they_were_changed(self, model):
        plain, changed = (StatesAt([model.layers[0]], "after") for _ in range(2))
        pass_of(model, changes=[plain.as_change()])
        pass_of(model, changes=[doubled(model, 0), changed.as_change()])
        assert torch.equal(changed.states()[0], 2 * plain.states()[0])

    def test_end_a_pass_when_all_have_been_seen(self, model):
        ran = []
        note = PassChange(
            hooks={layer: Hook(before=lambda s, n=n: ran.append(n) or s) for n, layer in enumerate(model.layers)}
        )
        with pytest.raises(Halt):
            pass_of(model, changes=[note, StatesAt(model.layers[:2], "after", halts=True).as_change()])
        assert ran == [0, 1]
        assert current() == Pass()


@pytest.mark.parametrize("asked", ["changed", "states", "attention"])
def test_checkpointing_is_refused_where_it_would_be_wrong(asked):
    model = backbones.backbone("llama").train()
    model.gradient_checkpointing_enable()
    run(model, LAYOUT)
    given = {
        "changed": {"changes": [doubled(model, 0)]},
        "states": {"changes": [StatesAt([model.layers[0]], "after").as_change()]},
        "attention": {"observe": RunningMaximum(slice(0, 3), slice(0, 3))},
    }[asked]
    with pytest.raises(ValueError, match="Gradient checkpointing .* to train through A test\\."):
        run(model, LAYOUT, reader="A test", **given)


def test_a_model_that_does_not_say_how_it_repeats_a_layer():
    """The name is private, and its layers would be causal when they run again."""
    model = backbones.backbone("llama").train()
    model.gradient_checkpointing = True
    for module in model.modules():
        vars(module).pop("_gradient_checkpointing_func", None)
    masking = Bidirectional({0}, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="LlamaModel does not say how it runs a layer a second time"):
        run(model, LAYOUT, changes=[PassChange(masking=masking)])


def test_a_pass_keeps_what_is_around_it():
    one, other = object(), object()
    with watching(one):
        with passing(current().changed_by(PassChange(masking=other))):
            assert current() == Pass(observer=one, masking=other)
        assert current() == Pass(observer=one)
    assert current() == Pass()


def test_passes_of_two_threads_do_not_meet():
    seen = []
    with watching(object()):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [Pass()]
