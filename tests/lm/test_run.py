"""The one door: what is changed is undone, who looks on changes nothing, and a pass or a model may end early."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from st_reba import CausalTransformer
from st_reba.lm.anatomy import layer_paths, shortened
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.backbone import _PER_LAYER
from st_reba.lm.run import Halt, Hook, Pass, PassChange, StatesAt, current, passing, run
from st_reba.text.layout import Layout

from .. import backbones
from ..backbones import FEW, TEXTS
from ..conftest import pipeline

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
    with passing(Pass(observer=one)):
        with passing(current().changed_by(PassChange(masking=other))):
            assert current() == Pass(observer=one, masking=other)
        assert current() == Pass(observer=one)
    assert current() == Pass()


@pytest.mark.parametrize("name", FEW)
def test_a_short_model_is_saved_without_the_layers_above(name, shared, tmp_path):
    model = pipeline(CausalTransformer(shared(name), output_layer=2))
    assert len(layer_paths(model[0].model)) == 2
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path))
    assert again[0].output_layer == again[0].model.config.num_hidden_layers == 2
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lists_that_are_as_long_as_the_model_is_deep(name, eager):
    """Those that say something of each layer are cut with the layers; the ids of end tokens are not."""
    model = copy.deepcopy(eager(name))
    model.config.eos_token_id = [5, 6, 7]
    model.config.suppress_tokens = [1, 2, 3]
    short = shortened(model, 2).config
    assert short.eos_token_id == [5, 6, 7]
    assert short.suppress_tokens == [1, 2, 3]
    if name == "gemma3":
        assert short.layer_types == model.config.layer_types[:2]
        assert len(model.config.layer_types) == 3


@pytest.mark.long
def test_every_list_of_transformers_that_grows_with_the_depth_is_known():
    """A new architecture's list that is not known would be saved too long for its model."""
    unknown = {}
    for kind in {CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}:
        # Some can have no such depth, whatever their own checks raise.
        with contextlib.suppress(Exception):
            shallow, deep = (vars(kind(num_hidden_layers=depth)) for depth in (7, 11))
            lists = [name for name, value in shallow.items() if isinstance(value, list) and "layer" not in name]
            grown = {name for name in lists if (len(shallow[name]), len(deep.get(name) or ())) == (7, 11)}
            unknown |= dict.fromkeys(grown - _PER_LAYER, kind.__name__)
    assert unknown == {}


@pytest.mark.parametrize("layer", [0, 4, -4, True, 1.0, "2"])
def test_layers_that_there_are_not(layer, shared):
    with pytest.raises(ValueError, match=r"output_layer=.*LlamaModel has 3 layers; give .* 1 to 3"):
        CausalTransformer(shared(), output_layer=layer)


def test_a_short_model_that_computes_something_else_is_refused(backbone_path, monkeypatch):
    model = CausalTransformer(backbone_path()).model
    kind = type(model.layers[0])
    forward = kind.forward

    def by_the_depth(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + self.self_attn.config.num_hidden_layers

    monkeypatch.setattr(kind, "forward", by_the_depth)
    with pytest.raises(ValueError, match="cannot be shortened to 1 layers: it then computes something else"):
        shortened(model, 1)
