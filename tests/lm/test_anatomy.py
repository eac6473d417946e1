"""What a loaded model is, is found once."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from st_reba import (
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.lm import anatomy, build
from st_reba.lm.anatomy import Anatomy
from st_reba.lm.attention import function
from st_reba.lm.decoder import shortened, view
from st_reba.lm.dry_run import CANNOT_RUN, dry_run, given_instead, noting_calls, output_on

from .. import backbones
from ..backbones import EACH
from ..conftest import forward_passes, pipeline, relative_error
from ..logged import logged
from ..modules.test_shared_backbone import everything_set_on, mixed_modes

KNOWN = {
    "classical": CausalTransformer,
    "last token": lambda backbone: CausalTransformer(backbone, rows="last"),
    "residual stream": lambda backbone: CausalTransformer(backbone, final_norm=False),
    "both ways": lambda backbone: CausalTransformer(backbone, bidirectional_layers=2),
    "echo": EchoModule,
    "reba": ReBAModule,
    "kv re-routing": lambda backbone: KVReroutingModule(backbone, template="{text}"),
    "early and late": lambda backbone: EarlyLateModule(backbone, template="{text}"),
    "token prepending": lambda backbone: TokenPrependingModule(backbone, template="{prepend}{text}", output_layer=-1),
    "prepending in blocks": lambda backbone: HierarchicalTokenPrependingModule(backbone, output_layer=-1),
}

#: How many more passes each takes on a backbone of which one dry run is known.
ONCE = {
    "values": (lambda backbone: ValueAggregationModule(backbone, template="{text}"), 1),
    "refined thought": (RefinedThoughtModule, 2),
    "meta-eol": (lambda backbone: MetaEOLModule(backbone, templates=["{text} is", "{text} means"]), 2),
    "short": (lambda backbone: CausalTransformer(backbone, output_layer=2), 1),
    "short, steered": (
        lambda backbone: ContrastivePromptingModule(
            backbone, template="{text}", auxiliary_template="not {text}", output_layer=2, contrast_layer=1
        ),
        2,
    ),
}


def test_a_model_is_run_once_when_it_is_loaded(backbone_path):
    with forward_passes() as passes:
        CausalTransformer(backbone_path())
    assert len(passes) == 1


@pytest.mark.parametrize("kind", KNOWN)
def test_a_known_backbone_is_not_run_again(kind, backbone_path):
    backbone = CausalTransformer(backbone_path())
    with forward_passes() as passes:
        KNOWN[kind](backbone)
        KNOWN[kind](KNOWN[kind](backbone))
    assert not passes


@pytest.mark.parametrize("kind", ONCE)
def test_each_further_fact_is_found_once(kind, backbone_path):
    make, count = ONCE[kind]
    backbone = CausalTransformer(backbone_path())
    with forward_passes() as passes:
        make(backbone)
    assert len(passes) == count
    with forward_passes() as passes:
        make(backbone)
        make(EchoModule(backbone))
    assert not passes


def test_what_is_known_of_all_layers_is_known_of_the_first(backbone_path):
    backbone = CausalTransformer(backbone_path())
    ValueAggregationModule(backbone)
    RefinedThoughtModule(backbone)
    short = CausalTransformer(backbone, output_layer=2)
    with forward_passes() as passes:
        assert ValueAggregationModule(short)._projections.paths.keys() == {0, 1}
        assert RefinedThoughtModule(short)._reuses_cache
        assert ReBAModule(short)._route.layers == (0, 1)
    assert not passes


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", ["bloom", "falcon"])
def test_attention_of_its_own_is_tried_once(architecture, backbone_path):
    backbone = CausalTransformer(backbone_path(architecture))
    with forward_passes() as passes:
        ReBAModule(backbone)
    assert len(passes) == 2
    with forward_passes() as passes:
        assert not ReBAModule(backbone)._route.through_function
    assert not passes


def replaced_weight(model):
    layer = model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def written_weight(model):
    model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})


def replaced_module(model):
    model.layers[1].self_attn.o_proj = nn.Linear(32, 32)


def other_kind(model):
    model.norm = nn.Identity()


def adapted(model):
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))


def cast(model):
    model.to(torch.bfloat16)


def other_forward(model):
    forward = model.layers[0].mlp.forward
    model.layers[0].mlp.forward = lambda states: forward(states)


def other_settings(model):
    model.config.rms_norm_eps = 1e-3


def other_settings_within(model):
    model.config.rope_parameters["rope_theta"] = 5e5


@pytest.mark.parametrize(
    "change",
    [
        replaced_weight,
        written_weight,
        replaced_module,
        other_kind,
        adapted,
        cast,
        other_forward,
        other_settings,
        other_settings_within,
    ],
)
def test_what_was_changed_is_looked_at_again(change, backbone_path):
    backbone = CausalTransformer(backbone_path())
    before = Anatomy(backbone.model).sketch
    assert Anatomy(view(backbone.model)).sketch is before
    change(backbone.model)
    after = Anatomy(backbone.model).sketch
    assert after is not before
    assert Anatomy(backbone.model).sketch is after


def test_facts_are_those_of_the_weights_that_are_there(backbone_path):
    """Not those of the weights that were there: a norm that is none, then a projection under another name."""
    module = CausalTransformer(backbone_path())
    assert Anatomy(module.model).sketch.norm == ("norm",)
    module.model.norm = nn.Identity()
    vectors = pipeline(CausalTransformer(module, final_norm=False)).encode("a cat")
    assert relative_error(vectors, pipeline(CausalTransformer(module)).encode("a cat")) == 0
    module.model = backbones.backbone("gpt2")
    assert Anatomy(module.model).sketch.norm == ("ln_f",)


def test_facts_do_not_keep_a_model(backbone_path):
    known = len(anatomy._known)
    model = CausalTransformer(backbone_path()).model
    twin = copy.deepcopy(model)
    ValueAggregationModule(CausalTransformer(backbone_path()))
    Anatomy(twin).sketch  # noqa: B018
    gone = [weakref.ref(part) for part in (model, twin, model.layers[0].mlp.up_proj.weight)]
    del model, twin
    gc.collect()
    assert not any(part() for part in gone)
    assert len(anatomy._known) <= known


def test_layers_above_are_let_go(backbone_path):
    whole = CausalTransformer(backbone_path())
    above, below = (weakref.ref(whole.model.layers[layer]) for layer in (2, 0))
    short = CausalTransformer(whole, output_layer=1)
    del whole
    gc.collect()
    assert above() is None
    assert below() is None or below() in short.model.modules()


@pytest.mark.parametrize("architecture", EACH)
def test_a_dry_run_leaves_attention_and_hooks_as_they_were(architecture):
    model = mixed_modes(backbones.backbone(architecture))
    before, hooks = everything_set_on(model), hooks_on(model)
    facts = Anatomy(model)
    assert facts.is_causal
    # Where transformers collects maps by hooks of its own, they are not asked for.
    assert facts.calls_our_attention or facts.maps_are_sound
    assert len(facts.output_projections) == len(facts.attention_layers) == 3
    assert facts.reuses_cache == facts.calls_our_attention
    assert facts.embedding_scale is not None
    assert facts.position_wise(2) is not None
    assert everything_set_on(model) == before
    assert hooks_on(model) == hooks


def hooks_on(model) -> list:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return [dict(getattr(module, kind)) for module in model.modules() for kind in kinds]


def test_a_dry_run_that_fails_leaves_them_too(backbone_path):
    model = mixed_modes(CausalTransformer(backbone_path()).model)
    before, hooks = everything_set_on(model), hooks_on(model)
    broken = dict.fromkeys([model.layers[1]], lambda states: states[..., :5])
    with pytest.raises(CANNOT_RUN), noting_calls(model), given_instead(broken):
        output_on(model, function.NAME)
    assert everything_set_on(model) == before
    assert hooks_on(model) == hooks


def test_a_configuration_of_parts_is_restored_part_by_part(backbone_path):
    model = backbones.backbone("llama")
    model.layers[0].self_attn.config = copy.deepcopy(model.config)
    model.layers[0].self_attn.config._attn_implementation = "eager"
    with dry_run(model, function.NAME):
        assert model.config._attn_implementation == function.NAME
    assert model.config._attn_implementation == "sdpa"
    assert model.layers[0].self_attn.config._attn_implementation == "eager"


def test_nothing_is_logged_where_attention_is_set_and_all_is_afterwards():
    logger = logging.getLogger("transformers.modeling_utils")
    model = backbones.backbone("llama")

    def warns(name):
        logger.warning("set to %s", name)

    model.set_attn_implementation = warns
    with logged(logger.name) as messages, dry_run(model, function.NAME):
        assert not messages
        logger.warning("by the model")
    assert set(messages) == {"by the model"}


def test_states_of_one_shape_are_read_at_once(monkeypatch):
    """On a GPU each reading waits for it."""
    read, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda states: read.append(states) or cpu(states))
    model = backbones.backbone("llama")
    found = Anatomy(model).sketch.calls
    assert len({call.gave for call in found} - {None}) > 20
    widths = {model.config.hidden_size, model.config.intermediate_size, model.config.hidden_size // 2}
    assert len(read) <= len(widths) + 1


def test_calls_in_other_threads_are_not_noted(backbone_path):
    model = backbones.backbone("llama")
    with noting_calls(model) as calls:
        other = threading.Thread(target=output_on, args=(model,))
        other.start()
        other.join()
        assert not calls
        output_on(model)
    assert calls[-1].module is model


def test_a_short_model_that_computes_something_else_is_refused(backbone_path, monkeypatch):
    model = CausalTransformer(backbone_path()).model
    kind = type(model.layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) + 1)
    with pytest.raises(ValueError, match="cannot be shortened to 1 layers: it then computes something else"):
        shortened(model, 1)


def test_configurations_whose_layers_differ_are_told_apart():
    def config(width):
        return LlamaConfig(num_hidden_layers=2, per_layer_config={0: {"intermediate_size": width}})

    if not hasattr(PreTrainedConfig, "per_layer_config"):
        pytest.skip("in this version of transformers all layers are alike")
    assert vars(config(48))["_heterogeneity_spec"] is not None
    assert build._settings(config(48)) == build._settings(config(48))
    assert build._settings(config(48)) != build._settings(config(64))
