"""What a loaded model is, is found once, and leaves the model as it was."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
from torch import nn
from transformers import AutoModel, Llama4TextConfig

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
from st_reba.lm.anatomy import anatomy_of, embedding_scale, reuses_cache, set_attention

from .. import backbones, oracles
from ..backbones import EACH
from ..conftest import forward_passes, pipeline, relative_error
from ..logged import logged
from ..modules.test_shared_backbone import everything_set_on, mixed_modes

#: How many passes over a few tokens each takes on a backbone that is known.
KNOWN = {
    "classical": (CausalTransformer, 0),
    "last token": (lambda backbone: CausalTransformer(backbone, rows="last"), 0),
    "residual stream": (lambda backbone: CausalTransformer(backbone, final_norm=False), 0),
    "both ways": (lambda backbone: CausalTransformer(backbone, bidirectional_layers=2), 0),
    "echo": (EchoModule, 0),
    "reba": (ReBAModule, 0),
    "kv re-routing": (lambda backbone: KVReroutingModule(backbone, template="{text}"), 0),
    "early and late": (lambda backbone: EarlyLateModule(backbone, template="{text}"), 0),
    "token prepending": (
        lambda backbone: TokenPrependingModule(backbone, template="{prepend}{text}", output_layer=-1), 0
    ),
    "prepending in blocks": (lambda backbone: HierarchicalTokenPrependingModule(backbone, output_layer=-1), 0),
    "values": (lambda backbone: ValueAggregationModule(backbone, template="{text}"), 0),
    "before the feed-forward part": (lambda backbone: CausalTransformer(backbone, readout="before_mlp"), 0),
    "refined thought": (RefinedThoughtModule, 3),
    "meta-eol": (lambda backbone: MetaEOLModule(backbone, templates=["{text} is", "{text} means"]), 0),
    # The whole one, and the short one.
    "short": (lambda backbone: CausalTransformer(backbone, output_layer=2), 2),
    "short, steered": (
        lambda backbone: ContrastivePromptingModule(
            backbone, template="{text}", auxiliary_template="not {text}", output_layer=2, contrast_layer=1
        ),
        2,
    ),
}  # fmt: skip


def test_a_model_is_run_once_when_it_is_loaded(backbone_path):
    with forward_passes() as passes:
        CausalTransformer(backbone_path())
    assert len(passes) == 1


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_known_of_a_backbone_is_known_of_its_views(kind, backbone_path):
    make, count = KNOWN[kind]
    backbone = CausalTransformer(backbone_path())
    with forward_passes() as passes:
        make(backbone)
    assert len(passes) == count
    with forward_passes() as passes:
        make(backbone)
        make(EchoModule(backbone))
    assert not passes


def test_what_a_short_model_is_is_found_when_it_is_made(backbone_path):
    short = CausalTransformer(CausalTransformer(backbone_path()), output_layer=2)
    with forward_passes() as passes:
        assert ValueAggregationModule(short)._projections.keys() == {0, 1}
        assert anatomy_of(ReBAModule(short).model).attention_layers == (0, 1)
    assert not passes
    assert RefinedThoughtModule(short)._reuses_cache


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", ["bloom", "falcon"])
def test_attention_of_its_own_is_tried_once(architecture, backbone_path):
    with forward_passes() as passes:
        backbone = CausalTransformer(backbone_path(architecture))
    assert len(passes) == 3
    with forward_passes() as passes:
        assert not anatomy_of(ReBAModule(backbone).model).calls_our_attention
    assert not passes


def test_the_final_norm_is_what_stands_in_its_place(backbone_path):
    module = CausalTransformer(backbone_path())
    assert anatomy_of(module.model).norm == ("norm",)
    module.model.norm = nn.Identity()
    vectors = pipeline(CausalTransformer(module, final_norm=False)).encode("a cat")
    assert relative_error(vectors, pipeline(CausalTransformer(module)).encode("a cat")) == 0
    module.model = backbones.backbone("gpt2")
    assert anatomy_of(module.model).norm == ("ln_f",)


def test_facts_do_not_keep_a_model(backbone_path):
    model = CausalTransformer(backbone_path()).model
    twin = copy.deepcopy(model)
    ValueAggregationModule(CausalTransformer(backbone_path()))
    assert anatomy_of(twin) is not anatomy_of(model)
    gone = [weakref.ref(part) for part in (model, twin, model.layers[0].mlp.up_proj.weight)]
    del model, twin
    gc.collect()
    assert not any(part() for part in gone)


def test_layers_above_are_let_go(backbone_path):
    whole = CausalTransformer(backbone_path())
    above, below = (weakref.ref(whole.model.layers[layer].mlp.up_proj.weight) for layer in (2, 0))
    short = CausalTransformer(whole, output_layer=1)
    del whole
    gc.collect()
    assert above() is None
    assert any(weight is below() for weight in short.model.parameters())


@pytest.mark.parametrize("architecture", EACH)
def test_what_a_model_is_on_every_architecture(architecture):
    model = mixed_modes(backbones.backbone(architecture))
    before, hooks = everything_set_on(model), hooks_on(model)
    facts = anatomy_of(model)
    assert facts.is_causal
    # Where transformers collects maps by hooks of its own, they are not asked for.
    assert facts.calls_our_attention or facts.maps_are_sound
    assert len(facts.projections) == len(facts.attention_layers) == len(facts.layers) == 3
    assert facts.norm is not None
    assert len(facts.norm) == 1
    assert facts.widths == (32, 32, 32, 32)
    assert reuses_cache(model) == facts.calls_our_attention
    assert embedding_scale(model) is not None
    kinds = [type(model.get_submodule(path)).__name__ for path in facts.feed_forward]
    assert len(kinds) == (architecture not in ("opt", "falcon", "bloom", "mpt")), kinds
    assert everything_set_on(model) == before
    assert hooks_on(model) == hooks


@pytest.mark.filterwarnings("ignore:The cache of Llama4TextModel cannot be reused")
def test_masks_in_chunks_are_not_ours_to_make(tmp_path, token_ids):
    """Tokens of Llama 4 see no further back than their chunk begins."""
    sizes = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED, **backbones.IDS}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48}
    config = Llama4TextConfig(**sizes, **experts, attention_chunk_size=4, max_position_embeddings=64)
    model = backbones.randomize(AutoModel.from_config(config).eval())
    assert not reuses_cache(model)
    module = RefinedThoughtModule(backbones.save(model, tmp_path))
    ids = [*token_ids("The dog chased the cat."), 0]
    eager = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    expected = oracles.refined_thought(eager, ids, 2)[-1]
    assert relative_error(pipeline(module, "lasttoken").encode("The dog chased the cat."), expected) < 1e-5


def hooks_on(model) -> list:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return [dict(getattr(module, kind)) for module in model.modules() for kind in kinds]


def test_nothing_is_logged_where_attention_is_set_and_all_is_afterwards():
    logger = logging.getLogger("transformers.modeling_utils")
    model = backbones.backbone("llama")

    def warns(name):
        logger.warning("set to %s", name)

    model.set_attn_implementation = warns
    with logged(logger.name) as messages:
        set_attention(model, "sdpa")
        assert not messages
        logger.warning("by the model")
    assert set(messages) == {"by the model"}
