"""The one door: what is changed is undone, who looks on changes nothing, a pass may end early, and
several endings behind one text are what each alone is."""

from __future__ import annotations

import pytest
import torch

from st_reba import CausalTransformer
from st_reba.lm import anatomy
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.attention.setup import make_cacheable
from st_reba.lm.endings import behind_one_body
from st_reba.lm.prefixes import Prefixes, behind, shared_ids
from st_reba.lm.run import Halt, Hook, Pass, PassChange, StatesAt, current, passing, recording, run, watching
from st_reba.text.layout import NOT_TEXT, Layout

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, long, relative_error

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


TOLERANCE = 1e-5
#: Some begin alike, and one is what another begins with.
ENDINGS = [
    ' means in one word:"', '"', " and its main topic, said in a few words that everybody knows, is",
    " and its main word", " and its", " is:",
]  # fmt: skip
#: Longer than the windows of the architectures that have them.
PROMPT = "Of this sentence: "


def behind_each(module, body, ending):
    """The last states of an ending that alone stands behind each text, (B, D)."""
    found = []
    for ids, length in zip(body.input_ids, body.lengths, strict=True):
        row = torch.cat([ids[:length], torch.tensor(ending)])[None]
        alone = Layout(row, torch.ones_like(row, dtype=torch.bool), torch.full_like(row, NOT_TEXT))
        found.append(run(module.model, alone)[0, -1])
    return torch.stack(found)


#: Windows, and no windows.
CACHEABLE = [
    name if name in ("llama", "gemma2_softcap", "gpt2") else long(name)
    for name in backbones.ARCHITECTURES
    if name not in backbones.OWN_ATTENTION
]


@pytest.fixture
def llama(backbone_path):
    made = CausalTransformer(backbone_path())
    make_cacheable(made.model)
    return made


@pytest.mark.parametrize("architecture", CACHEABLE)
def test_each_ending_is_as_if_it_stood_alone(architecture, shared):
    """Also behind a prefix that is kept."""
    module = CausalTransformer(shared(architecture))
    assert make_cacheable(module.model)
    body, endings = module.lay_out(TEXTS, PROMPT), module.token_ids(ENDINGS)
    with torch.no_grad():
        expected = torch.stack([behind_each(module, body, ending) for ending in endings], dim=1)
        words = run(module.model, body)[body.copy_index == 0]
        kept = Prefixes.of(module.model, shared_ids(body, 1))
        for prefixes, rest in ((None, body), (kept, kept.rest_of(body))):
            with forward_passes() as passes, behind(prefixes, torch.arange(len(TEXTS))):
                texts, ends = behind_one_body(module.model, rest, endings)
            assert sum(own is module.model for own in passes) == 1
            assert ends.shape == (len(TEXTS), len(ENDINGS), 32)
            assert relative_error(ends, expected) < TOLERANCE
            # And the texts are what they are without endings.
            assert relative_error(texts[rest.copy_index == 0], words) < TOLERANCE


def test_endings_that_begin_alike_share_what_they_begin_with(llama):
    body, lengths = llama.lay_out(TEXTS), []
    llama.model.register_forward_pre_hook(
        lambda model, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        behind_one_body(llama.model, body, [[5, 6, 7], [5, 6, 8, 9], [5], [7, 6]])
    assert lengths == [body.input_ids.shape[1] + 7]


def test_all_layers_are_read_in_one_pass_and_gradients_flow(llama):
    body, endings = llama.lay_out(TEXTS), llama.token_ids(ENDINGS)
    layers = anatomy.layer_paths(llama.model)
    with torch.no_grad(), recording(llama.model, layers) as record:
        found = record.split(behind_one_body(llama.model, body, endings)[1])
        for number, ending in enumerate(endings):
            expected = record.split(behind_each(llama, body, ending))
            for own, alone in zip(found, expected, strict=True):
                assert relative_error(own[:, number], alone) < TOLERANCE
    assert len(found) == len(layers) + 1
    behind_one_body(llama.model, body, endings)[1].sum().backward()
    assert llama.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
