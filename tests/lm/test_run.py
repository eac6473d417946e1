"""The one door: what is changed is undone, who looks on changes nothing, and a pass may end early."""

from __future__ import annotations

import threading

import pytest
import torch

from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.run import Halt, Hook, Pass, PassChange, StatesAt, current, passing, run, watching

from .. import backbones

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.fixture(scope="module")
def model():
    return backbones.backbone("llama")


def forward(model):
    return lambda: model(input_ids=IDS).last_hidden_state


def pass_of(model, **asked):
    with torch.no_grad():
        return run(model, forward(model), reader="A test", **asked)


def doubled(model, layer):
    return PassChange(hooks={model.layers[layer]: Hook(after=lambda states: 2 * states)})


class TestChanges:
    def test_act_in_one_pass(self, model):
        before = pass_of(model)
        changed = pass_of(model, change=[doubled(model, 0)])
        assert not torch.allclose(changed, before)
        assert torch.equal(pass_of(model), before)

    def test_act_one_after_the_other(self, model):
        fourfold = PassChange(hooks={model.layers[0]: Hook(after=lambda states: 4 * states)})
        twice = pass_of(model, change=[doubled(model, 0), doubled(model, 0)])
        assert torch.equal(twice, pass_of(model, change=[fourfold]))

    def test_are_undone_after_an_error(self, model):
        def fail(states):
            raise KeyError

        with pytest.raises(KeyError):
            pass_of(model, change=[PassChange(hooks={model.layers[1]: Hook(before=fail)})])
        assert current() == Pass()

    def test_nothing_is_false(self, model):
        assert not PassChange()
        assert doubled(model, 0)


class TestStates:
    @pytest.mark.parametrize("position", [None, torch.tensor([2, 0])])
    def test_are_seen_and_stay_as_they_are(self, model, position):
        hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states
        expected = pass_of(model)
        given = StatesAt(model.layers[1:], "before", position)
        gave = StatesAt(model.layers[:2], "after", position)
        assert torch.equal(pass_of(model, observe=given), expected)
        assert torch.equal(pass_of(model, observe=gave), expected)
        for seen in (given, gave):
            for states, layer in zip(seen.states(), hidden[1:3], strict=True):
                assert torch.equal(states, layer if position is None else layer[torch.arange(2), position])

    def test_are_seen_as_they_were_changed(self, model):
        plain, changed = (StatesAt([model.layers[0]], "after") for _ in range(2))
        pass_of(model, observe=plain)
        pass_of(model, observe=changed, change=[doubled(model, 0)])
        assert torch.equal(changed.states()[0], 2 * plain.states()[0])

    def test_end_a_pass_when_all_have_been_seen(self, model):
        ran = []
        note = PassChange(
            hooks={layer: Hook(before=lambda s, n=n: ran.append(n) or s) for n, layer in enumerate(model.layers)}
        )
        with pytest.raises(Halt):
            pass_of(model, change=[note], observe=StatesAt(model.layers[:2], "after", halts=True))
        assert ran == [0, 1]
        assert current() == Pass()


@pytest.mark.parametrize("asked", ["changed", "states", "attention"])
def test_checkpointing_is_refused_where_it_would_be_wrong(asked):
    model = backbones.backbone("llama").train()
    model.gradient_checkpointing_enable()
    run(model, forward(model), reader="A test")
    given = {
        "changed": {"change": [doubled(model, 0)]},
        "states": {"observe": StatesAt([model.layers[0]], "after")},
        "attention": {"observe": RunningMaximum(slice(0, 3), slice(0, 3))},
    }[asked]
    with pytest.raises(ValueError, match="Gradient checkpointing .* to train through A test\\."):
        run(model, forward(model), reader="A test", **given)


def test_a_model_that_does_not_say_how_it_repeats_a_layer():
    """The name is private, and its layers would be causal when they run again."""
    model = backbones.backbone("llama").train()
    model.gradient_checkpointing = True
    for module in model.modules():
        vars(module).pop("_gradient_checkpointing_func", None)
    masking = Bidirectional({0}, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="LlamaModel does not say how it runs a layer a second time"):
        run(model, forward(model), change=[PassChange(masking=masking)], reader="A test")


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
