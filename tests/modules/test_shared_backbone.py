"""A module that is given a loaded backbone leaves it as it was: when it works, and when it refuses."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import (
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    IdfWeights,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    ValueAggregationModule,
)
from st_reba.hub import compat
from st_reba.lm.anatomy import anatomy_of
from st_reba.lm.attention import function
from st_reba.lm.backbone import view

from ..backbones import TEXTS, third
from ..conftest import paired, pipeline

MODULES = {
    "classical": CausalTransformer,
    "last token": lambda backbone: CausalTransformer(backbone, rows="last"),
    "short": lambda backbone: CausalTransformer(backbone, output_layer=1),
    "both ways": lambda backbone: CausalTransformer(backbone, bidirectional_layers=1),
    "echo": EchoModule,
    "reba": ReBAModule,
    "refined thought": RefinedThoughtModule,
    "kv re-routing": KVReroutingModule,
    "meta-eol": lambda backbone: MetaEOLModule(backbone, templates=["{text} is", "{text} means"]),
    "value aggregation": ValueAggregationModule,
    "contrastive prompting": lambda backbone: ContrastivePromptingModule(backbone, contrast_layer=1),
    "early and late": EarlyLateModule,
    "token prepending": HierarchicalTokenPrependingModule,
    "layer states": LayerStates,
}

REFUSED = {
    "layers": lambda backbone: ReBAModule(backbone, layers=[99]),
    "both ways": lambda backbone: CausalTransformer(backbone, bidirectional_layers=99),
    "output layer": lambda backbone: CausalTransformer(backbone, output_layer=99),
    "re-routed layers": lambda backbone: KVReroutingModule(backbone, layers=[99]),
    "prepended layers": lambda backbone: HierarchicalTokenPrependingModule(backbone, prepend_layers=99),
    "contrast layer": lambda backbone: ContrastivePromptingModule(backbone, contrast_layer=99),
    "early layer": lambda backbone: EarlyLateModule(backbone, early_layer=99),
    "value layers": lambda backbone: ValueAggregationModule(backbone, layers=[99]),
    "chunks": lambda backbone: ReBAModule(backbone, chunk_length=255),
}


#: Modules whose settings others do not have, or read otherwise.
SETTLED = {
    "last": lambda path: CausalTransformer(path, rows="last"),
    "reba": lambda path: ReBAModule(path, repetitions=3, layers=[-1], rows="last", normalize_weights=True),
    "echo": lambda path: EchoModule(path, pool_copies="repeated", pool_over="all", deterministic=True),
    "prompt": lambda path: CausalTransformer(path, template="prompteol", final_norm=False, normalize_text=True),
    "values": lambda path: ValueAggregationModule(path, layers=[0]),
    "iterations": lambda path: RefinedThoughtModule(path, iterations=3),
}


@pytest.mark.parametrize(("kind", "settled"), paired(MODULES, SETTLED))
def test_a_module_takes_no_setting_from_the_one_that_it_shares(kind, settled, backbone_path):
    of_transformer, of_module = (MODULES[kind](make(backbone_path())) for make in (Transformer, SETTLED[settled]))
    # The view of the backbone, what is looked up when it is first asked for, where the weights came from, and what is
    # not read: batches are padded.
    differ = {"_modules", "_places", "_unpad_inputs", "checkpoint", "lacking"}
    attributes = [vars(module).keys() - differ for module in (of_transformer, of_module)]
    assert attributes[0] == attributes[1]
    assert of_transformer.get_config_dict() == of_module.get_config_dict()
    vectors = [pipeline(module).encode(TEXTS) for module in (of_transformer, of_module)]
    assert np.allclose(*vectors, atol=1e-6)


def test_what_reads_every_token_beside_a_module_of_one(backbone_path):
    """Weights of tokens and late interaction ask for it."""
    last = CausalTransformer(backbone_path(), rows="last")
    module = EarlyLateModule(last)
    assert module.rows == "all"
    assert IdfWeights.fit(module, TEXTS).vocabulary_size
    assert not hasattr(CausalTransformer(ReBAModule(backbone_path())), "repetitions")


def test_the_list_of_what_is_shared_is_what_sts_transformer_sets(backbone_path):
    """Those that no backbone of this machine has it set are in its source alone."""
    listed = {*compat.SET_BY_TRANSFORMER}
    assert vars(Transformer(backbone_path())).keys() - vars(torch.nn.Module()).keys() <= listed
    source = inspect.getsource(Transformer)
    named = {name for name in re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", source) if not hasattr(Transformer, name)}
    assert named - {"model"} <= listed
    if compat.PLACEMENT_IS_KEPT:
        assert listed - named <= {"track_media_counts"}, "only versions before 6.2 set this"


def test_each_module_has_its_own_length(backbone_path):
    first = CausalTransformer(backbone_path(), max_seq_length=40)
    second = ReBAModule(first)
    assert second.max_seq_length == 40
    second.max_seq_length = 5
    assert (first.max_seq_length, second.max_seq_length) == (40, 5)
    first.max_seq_length = 7
    assert (first.max_seq_length, second.max_seq_length) == (7, 5)
    long = "one two three four five six seven eight nine ten"
    assert [int(module.lay_out([long]).text_lengths[0]) for module in (first, second)] == [7, 5]


def everything_set_on(model) -> dict:
    """All that a constructor could have left: configuration, modes, parts."""
    modules = dict(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "attention": [part.config._attn_implementation for part in modules.values() if hasattr(part, "config")],
        "modes": {name: part.training for name, part in modules.items()},
        "parts": {name: id(part) for name, part in modules.items()},
        "weights": {name: id(weight) for name, weight in model.named_parameters()},
    }


def mixed_modes(model):
    """A model in training with a layer that its user froze by ``eval()``."""
    model.train()
    list(model.modules())[-1].eval()
    next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))[1].eval()
    return model


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize(("kind", "architecture"), paired(MODULES, ["llama", "gemma2_softcap", "falcon"]))
def test_a_module_leaves_the_backbone_as_it_was(kind, architecture, backbone_path):
    backbone = Transformer(backbone_path(architecture))
    mixed_modes(backbone.model)
    before = everything_set_on(backbone.model)
    with contextlib.suppress(ValueError):  # what Falcon's own attention does not allow
        MODULES[kind](backbone)
    assert everything_set_on(backbone.model) == before


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize(("reason", "architecture"), paired(REFUSED, ["llama", "falcon"]))
def test_a_refused_module_leaves_the_backbone_as_it_was(reason, architecture, backbone_path):
    backbone = Transformer(backbone_path(architecture))
    before, vectors = everything_set_on(backbone.model), pipeline_of(backbone).encode(TEXTS)
    with pytest.raises(ValueError, match="layer|chunk|attention"):
        REFUSED[reason](backbone)
    before["modes"] = dict.fromkeys(before["modes"], False)  # as encode leaves them
    assert everything_set_on(backbone.model) == before
    assert np.array_equal(pipeline_of(backbone).encode(TEXTS), vectors)


def pipeline_of(backbone):
    if backbone.tokenizer.pad_token is None:
        backbone.tokenizer.pad_token = backbone.tokenizer.eos_token
    return SentenceTransformer(modules=[backbone, Pooling(32, "mean")], device="cpu")


@pytest.mark.parametrize("chosen", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [CausalTransformer, EchoModule])
def test_classical_and_echo_keep_the_choice_of_attention(kind, chosen, backbone_path):
    """Beside a module that does not, whichever is made first."""
    first = kind(backbone_path(), model_kwargs={"attn_implementation": chosen})
    reba = ReBAModule(first)
    second = kind(ReBAModule(first))
    assert reba.model.config._attn_implementation == function.ATTENTION
    assert first.model.config._attn_implementation == chosen
    third = kind(first)
    assert third.model.config._attn_implementation == chosen
    assert second.model.config._attn_implementation == function.ATTENTION, "it was given a backbone that attends so"


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", third(2))
def test_a_view_computes_the_same_with_the_same_weights(architecture, backbone_path):
    model = CausalTransformer(backbone_path(architecture)).model
    twin = view(model)
    assert twin is not model
    assert twin.config is not model.config
    assert dict(twin.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(weight is other for weight, other in zip(twin.parameters(), model.parameters(), strict=True))
    assert all(one is other for one, other in zip(twin.buffers(), model.buffers(), strict=True))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        assert torch.equal(twin(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state)


def test_what_a_view_is_told_the_model_does_not_hear(backbone_path):
    model = CausalTransformer(backbone_path()).model
    twin = view(model)
    twin.set_attn_implementation("eager")
    assert {part.config._attn_implementation for part in twin.modules() if hasattr(part, "config")} == {"eager"}
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {"sdpa"}


def test_a_forward_that_is_the_models_alone_has_no_view(backbone_path):
    """A copy would run what it is a copy of."""
    shared = CausalTransformer(backbone_path())
    compiled = torch.compile(copy.deepcopy(shared.model), backend="eager")
    del compiled.st_reba_anatomies
    assert view(compiled) is compiled
    assert anatomy_of(compiled).layers == ("layers.0", "layers.1", "layers.2")
    forward = shared.model.forward
    shared.model.forward = lambda **kwargs: forward(**kwargs)
    assert EchoModule(shared).model is shared.model
    with pytest.raises(ValueError, match="its forward is not its class's own: torch.compile leaves it so. Compile"):
        CausalTransformer(shared, output_layer=1)


def test_an_adapter_is_seen_by_modules_made_after_it(backbone_path):
    peft = pytest.importorskip("peft")
    classical = CausalTransformer(backbone_path())
    before = ReBAModule(classical)
    vectors = pipeline(before).encode(TEXTS)
    classical.model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    assert np.array_equal(pipeline(before).encode(TEXTS), vectors)
    assert not np.allclose(pipeline(ReBAModule(classical)).encode(TEXTS), vectors, atol=1e-3)


def test_what_moves_or_casts_the_weights_of_one_does_so_for_all(backbone_path):
    classical = CausalTransformer(backbone_path())
    echo = EchoModule(classical)
    classical.model.to(torch.float64)
    assert {weight.dtype for weight in (*echo.model.parameters(), *echo.model.buffers())} == {torch.float64}
    assert all(one is other for one, other in zip(classical.model.parameters(), echo.model.parameters(), strict=True))


class Quantized(torch.nn.Linear):
    """As bitsandbytes has it: the first pass takes the scale off the weight, and keeps it beside it."""

    def forward(self, states):
        if hasattr(self.weight, "scale"):
            self.state.scale = self.weight.scale
            del self.weight.scale
        return super().forward(states) * self.state.scale


def test_what_a_quantised_module_keeps_is_in_one_place(backbone_path):
    backbone = Transformer(backbone_path())
    expected = pipeline(EchoModule(Transformer(backbone_path()))).encode(TEXTS)
    part = backbone.model.layers[0].mlp.up_proj
    part.__class__ = Quantized
    part.weight.data /= 4
    part.weight.scale, part.state = 4, SimpleNamespace()
    for _ in range(2):
        assert np.allclose(pipeline(EchoModule(backbone)).encode(TEXTS), expected, atol=1e-6)
    assert part.state.scale == 4


def test_a_hook_whose_owner_cannot_be_copied(backbone_path):
    """It is called for the views that are made after it."""

    class Watch:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), 0

        def __call__(self, module, args, output):
            self.seen += 1

        note = __call__

    backbone = Transformer(backbone_path())
    watches = Watch(), Watch()
    backbone.model.layers[0].register_forward_hook(watches[0])
    backbone.model.layers[0].register_forward_hook(watches[1].note)
    module = EchoModule(backbone)
    before = [watch.seen for watch in watches]
    pipeline(module).encode(TEXTS[:1])
    assert [watch.seen for watch in watches] == [seen + 1 for seen in before]


@pytest.mark.skipif(not compat.PLACEMENT_IS_KEPT, reason="sentence-transformers before 6.2 moves a placed model")
def test_a_backbone_that_accelerate_has_placed(backbone_path, tmp_path):
    """Its modules' forwards are replaced one by one; the view's are its own."""
    pytest.importorskip("accelerate")
    parts = dict.fromkeys(("embed_tokens", "layers", "norm"), "disk")
    placed = {"device_map": {**parts, "rotary_emb": "cpu"}, "offload_folder": str(tmp_path)}
    classical = CausalTransformer(backbone_path(), model_kwargs={**placed, "attn_implementation": "eager"})
    reba = ReBAModule(classical)
    assert classical.model.config._attn_implementation == "eager"
    assert reba.model.config._attn_implementation == function.ATTENTION
    assert np.array_equal(pipeline(reba).encode(TEXTS), pipeline(ReBAModule(backbone_path())).encode(TEXTS))


def test_a_peft_model_is_left_as_it_was(backbone_path):
    peft = pytest.importorskip("peft")
    shared = Transformer(backbone_path())
    shared.model = peft.get_peft_model(shared.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    before = everything_set_on(shared.model)
    reba = ReBAModule(shared)
    assert everything_set_on(shared.model) == before
    assert reba.model.config._attn_implementation == function.ATTENTION
