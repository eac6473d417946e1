"""Every causal architecture of the installed transformers: the recipes that are right, and those that are refused.

    python benchmarks/architectures.py [ARCHITECTURE ...]

Each architecture is built tiny, with random weights, from the default values of its configuration. Each recipe is
compared with the same computed by the model's own forward, eagerly and one text at a time, by tests/oracles.py or
here. The batch of a text, and a cached prefix, must change nothing. What cannot be right must raise one ValueError with
a sentence that names the class. Rows replace those of the same architecture in results/architectures.csv. Without
names, architectures that have rows of this version of transformers are left out.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

import records
from runs import options, parser

sys.path.insert(0, str(records.ROOT))
from st_reba import CausalTransformer, modules
from st_reba.lm.views import set_attention
from st_reba.recipes import every_row
from st_reba.text.layout import PREPENDED, Layout
from tests import backbones, oracles

# Tiny configurations

DEPTH = 4
#: Names of settings for numbers of layers.
LAYERS = r"num_hidden_layers|n_layers?|num_layers|layers|(num_)?(encoder|decoder)_layers|depth|num_blocks"
#: Names of settings for numbers of positions.
POSITIONS = r"max_position_embeddings|n_positions|max_seq_len|context_length|n_ctx|max_(source|target)_positions"
#: Largest sizes by names of settings: the first pattern that fits.
SIZES: Sequence[tuple[str, int | None]] = (
    (r".*vocab_size.*|n_tokens", backbones.VOCABULARY),
    # Scores of few heads are often equal.
    (r"index_n_heads", 16),
    (r".*n_?groups", 1),
    (r"kv_n_heads|num_kv_heads|.*num_key_value_heads|num_query_groups|linear_num_key_heads|n_mamba_heads", 2),
    (r".*(num|n|attention|key|value)_heads?|heads", 4),
    (r"mamba_headdim|mamba_d_head", 16),
    (r".*(head_dim|head_size|d_head|head_hidden_dim).*|d_kv|dim_head|kv_channels|.*hidden_size_per_layer_input", 8),
    (r"rotary_dim", 4),
    (r".*intermediate_size.*|.*ffn.*(dim|size)|n_inner|d_ff|dff|dim_ff|d_inner|mlp_dim|share_expert_dim", 48),
    (r"n_routed_experts|.*num_(local_|routed_)?experts|n_experts|zero_expert_num", 4),
    (r"num_experts_per_tok.*|moe_top_?k|top_k_experts|experts_per_token|num_selected_experts|moe_k", 2),
    (r"n_shared_experts|.*num_shared_experts|n_group|num_expert_group|topk_group|num_dense_layers", 1),
    (r"first_k_dense_replace|num_kv_shared_layers|attn_layer_offset", 1),
    (r"attn_layer_period|global_attn_every_n_layers|layer_group_size", 2),
    (r".*_rank", 16),
    (r".*state_size|.*d_state|index_topk", 8),
    (r"index_kpool", 2),
    (r".*chunk_size.*|.*chunk_length", 16),
    (r"sliding_window|attention_window_size|.*_window|window_size", 16),
    (r"codebook_size|num_position_embeddings|.*ima?ge?_size", 64),
    (r"keep_window_size|.*kernel.*|patch_size|.*expand|model_max_length|.*expand_size", None),
    (r"d_model|n_embd|dim|width|lru_width|mamba_d_ssm|.*(hidden|embd|_dim|channels?|size)", 32),
)
#: Settings that may have no default.
WITHOUT_DEFAULT = {
    "head_dim": 8, "num_key_value_heads": 4, "pad_token_id": 320, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "sliding_window": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 8, "indexer_compress_ratio": 2, "default_language": "en_XX", "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_HYBRID = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16,
}  # fmt: skip
_ROPE, _SLIDING = {"rope_type": "default", "rope_theta": 1e4}, ["sliding_attention", "full_attention"]
_SHARING = {"num_kv_shared_layers": 2, "layer_types": _SLIDING * 2}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
#: Settings that other settings of an architecture ask for, by the type of its configuration.
OWN: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _SHARING),
    **dict.fromkeys((
        "cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text",
        "qwen2_5_omni_text",
    ), _SECTIONS),
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_SLIDING, _ROPE)},
    "chameleon": {"vocabulary_map": {"<image>": 330}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "dots3_note_text": {f"swa_{name}": value for name, value in _LATENT.items()},
    "glm4v_moe_text": {
        "head_dim": 16, "rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_vl_text": {**_SECTIONS, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "reformer": {"is_decoder": True, "axial_pos_shape": (32, 32), "axial_pos_embds_dim": (16, 16)},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2, "max_inference_chunksize": 16384},
    "zamba": _HYBRID,
    "zamba2": {**_HYBRID, "n_mamba_heads": 4},
}  # fmt: skip


def names() -> list[str]:
    """Return the types of configurations of all causal architectures, multimodal ones included."""
    multimodal = {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *sorted(multimodal - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})]


def tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same class and kinds of layers with small sizes."""
    values: dict[str, Any] = {}
    depth = getattr(config, "num_hidden_layers", None)
    layers = _layers_of_each_kind(config, depth) if isinstance(depth, int) and depth > DEPTH else ()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            values[name] = tiny(value)
        elif isinstance(value, (list, tuple)) and layers and len(value) == depth:
            of_layers = [value[index] for index in layers]
            values[name] = [48 if type(own) is int and own > 100 else own for own in of_layers]
        elif value is None and name in WITHOUT_DEFAULT:
            values[name] = WITHOUT_DEFAULT[name]
        elif type(value) is int and not name.startswith("_"):
            values |= _small(name, value, 330 + len(values) % 50)
    values.pop("qk_head_dim", None)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = 4
    return type(config)(**{**values, **OWN.get(config.model_type, {})})


def _small(name: str, value: int, free: int) -> dict[str, int]:
    """Return the small value of a setting; ``free`` is a token id that no text has."""
    if re.fullmatch(r"(?!num_).*(_id|_token|_index)", name):
        special = {"pad_token_id": value if 0 <= value < 3 else 320, "bos_token_id": 0, "eos_token_id": 0}
        return {name: special.get(name, free)}
    for pattern, size in ((LAYERS, DEPTH), (POSITIONS, 1024)):
        if re.fullmatch(pattern, name):
            return {name: size}
    small = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    return {name: min(small, value)} if small is not None and value > 0 else {}


def _layers_of_each_kind(config: PreTrainedConfig, depth: int) -> list[int]:
    """Return the indices of the layers that stay: the first of each kind, and the first others."""
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == depth and all(isinstance(own, str) for own in value)
    ]
    first = {kind: index for index, kind in reversed([*enumerate(zip(*lists, strict=True))])}
    chosen = sorted(first.values())[:DEPTH]
    return sorted([*chosen, *(index for index in range(depth) if index not in chosen)][:DEPTH])


def build(name: str) -> PreTrainedModel:
    """Return a tiny model with random weights and with its head."""
    config = tiny(CONFIG_MAPPING[name]())
    torch.manual_seed(0)
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = AutoModelForCausalLM.from_config(config)
    else:
        kind = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name]
        model = getattr(transformers, kind[0] if isinstance(kind, tuple) else kind)(config)
    return backbones.randomize(model.eval().float())


# Each recipe by the model's own forward

TEXTS = (
    "The dog chased the cat; the cat chased the mouse, and nobody chased the dog.", "a",
    "I love natural language processing.",
)  # fmt: skip
#: Largest distance between two results that are the same, as a share of their length.
TOLERANCE = 1e-4

Change = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Own:
    """A model's own forward, on one text at a time. It is called as tests/oracles.py calls an eager model.

    Args:
        model: Model with its head.
        part: Class of the part that reads text.

    Attributes:
        change: Change of the keys, values and mask of each layer's attention; None: none.
        maps: Attention maps of the last forward.
        callers: Modules that called the attention function in it, by layer.
    """

    model: Any
    change: Change | None = None
    maps: list[Tensor]
    callers: dict[int, nn.Module]

    def __init__(self, model: PreTrainedModel, part: type[nn.Module]) -> None:
        self.whole = copy.deepcopy(model)
        set_attention(self.whole, "eager")
        self.model = next(module for module in self.whole.modules() if type(module) is part)
        config: Any = self.model.config.get_text_config(decoder=True)
        config.use_cache = False
        self.depth = int(config.num_hidden_layers)
        self.layers = self._layers()

    def __call__(self, **inputs: Any) -> Any:
        inputs.pop("output_attentions", None)
        self.maps, self.callers = [], {}
        with mock.patch.object(AttentionInterface, "get_interface", self._interface):
            states = self.model(**inputs).last_hidden_state
        return SimpleNamespace(last_hidden_state=states, attentions=self.maps)

    def _interface(self, name: str, default: Any) -> Any:
        return partial(self._attend, default) if name == "eager" else AttentionInterface().get(name, default)

    def _attend(
        self, eager: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend by the architecture's own eager function."""
        self.callers[module.layer_idx] = module
        if self.change is not None:
            key, value, attention_mask = self.change(module.layer_idx, key, value, attention_mask)
        output, weights = eager(module, query, key, value, attention_mask, **kwargs)
        share = torch.ones(())
        if kwargs.get("s_aux") is not None:
            seen = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            # A sink may be applied to the output alone.
            share = ((output.transpose(1, 2) * seen).sum(-1) / seen.square().sum(-1))[..., None]
        self.maps.append(weights * share)
        return output, weights

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def _layers(self) -> nn.ModuleList:
        """Return the outermost list that is as long as the model is deep, and runs."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        called: list[nn.Module] = []
        with contextlib.ExitStack() as stack:
            for module in (module for module in lists if len(module) == self.depth):
                note = module[0].register_forward_hook(lambda *_, own=module: called.append(own))
                stack.enter_context(note)
            self.last([5, 6, 7])
        return next((module for module in lists if any(module is own for own in called)), nn.ModuleList())

    def last(self, ids: Sequence[int]) -> Tensor:
        """Return last hidden states, (N, D)."""
        return self(input_ids=torch.tensor([ids])).last_hidden_state[0]

    def whole_model_gives(self, ids: Sequence[int]) -> list[Tensor]:
        """Return the input of the head and the whole model's last hidden states, (N, D) each, as far as they exist."""
        head, seen = self.whole.get_output_embeddings(), list[Tensor]()
        with contextlib.ExitStack() as stack:
            if head is not None:
                note = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
                stack.enter_context(note)
            output = self.whole(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return [*seen, *(states[0] for states in (getattr(output, "hidden_states", None) or ())[-1:])]

    def after(self, ids: Sequence[int], layer: int) -> Tensor:
        """Return the states after a layer, counted from 1, (N, D); after the last, before the final norm."""
        return self.output(self.layers[layer - 1], ids)

    def output(self, module: nn.Module, ids: Sequence[int]) -> Tensor:
        """Return what a module gives, (N, D)."""
        seen: list[Tensor] = []
        with _changed(module, lambda states: seen.append(states[0]) or states):  # type: ignore[func-returns-value]
            self.last(ids)
        return seen[-1]

    def shortened(self, count: int) -> Own:
        """Return the same without the layers above."""
        short = copy.copy(self)
        short.model = copy.deepcopy(self.model)
        short.layers, short.depth = short._layers(), count
        del short.layers[count:]
        short.model.config.get_text_config(decoder=True).num_hidden_layers = count
        return short


def _changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Change the first output of a module, in a ``with`` block."""

    def hook(_: nn.Module, inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return module.register_forward_hook(hook)


class Text(NamedTuple):
    """One text as a module lays it out.

    Attributes:
        ids: Token ids.
        copies: Copy of the text that each token belongs to, or a negative number.
    """

    ids: list[int]
    copies: Tensor

    @classmethod
    def of(cls, layout: Layout) -> Text:
        return cls(layout.input_ids[0].tolist(), layout.copy_index[0])

    def positions(self, copy_read: int = 0) -> Tensor:
        """Return the positions of a copy's tokens."""
        return (self.copies == copy_read).nonzero().flatten()


#: Return what a module gives for a text, (n, D), given the model's own forward, the module and the text's layouts.
Standard = Callable[..., Tensor]


def words(own: Own, module: Any, text: Text) -> Tensor:
    return own.last(text.ids)[text.positions(module.copies_read[-1])]


def ends(own: Own, module: Any, *texts: Text) -> Tensor:
    return torch.stack([own.last(text.ids)[-1] for text in texts])


def layer_ends(own: Own, module: Any, *texts: Text) -> Tensor:
    return torch.stack([own.after(text.ids, module.output_layer)[-1] for text in texts])


def layer_words(own: Own, module: Any, text: Text) -> Tensor:
    return own.after(text.ids, module.output_layer)[text.positions()]


def short_words(own: Own, module: Any, text: Text) -> Tensor:
    return own.shortened(module.output_layer).last(text.ids)[text.positions()]


def all_layers(own: Own, module: Any, text: Text) -> Tensor:
    return torch.stack([own.after(text.ids, layer)[-1] for layer in range(1, own.depth + 1)])


def topic(own: Own, module: Any, text: Text) -> Tensor:
    lower = [own.after(text.ids, layer)[-1] for layer in module.lower_layers]
    return torch.cat([own.last(text.ids)[-1], *lower])[None]


def early_late(own: Own, module: Any, text: Text) -> Tensor:
    early = own.after(text.ids, module.early_layer)[text.positions()]
    return torch.cat([early, own.last(text.ids)[-1:].expand(len(early), -1)], dim=-1)


def reba(own: Own, module: Any, text: Text) -> Tensor:
    return oracles.algorithm_2(own, [text.ids[position] for position in text.positions()], module.repetitions)


def thought(own: Own, module: Any, text: Text) -> Tensor:
    return oracles.refined_thought(own, text.ids, module.iterations)


def attention_pooled(own: Own, module: Any, text: Text) -> Tensor:
    states, maps = oracles.run(own, text.ids)
    weights = maps[-1][:, -1].mean(dim=0)
    return (weights @ states / weights.sum())[None]


def both_ways(own: Own, module: Any, text: Text) -> Tensor:
    top, sinkless = range(own.depth - module.bidirectional_layers, own.depth), getattr(module, "layers", ())

    def change(layer: int, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.finfo(mask.dtype).min
        if layer in top:
            seen = mask > hidden / 2
            mask = torch.zeros_like(mask).masked_fill(~(seen | seen.mT), hidden)
        if layer in sinkless:
            mask = mask.clone()
            mask[..., 1:, 0] = hidden
        return key, value, mask

    with mock.patch.object(own, "change", change):
        return words(own, module, text)


def rerouted(own: Own, module: Any, text: Text) -> Tensor:
    def change(layer: int, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if layer in module.layers:
            key, value = (torch.cat([states[:, :, -1:], states], dim=2) for states in (key, value))
            mask = torch.cat([torch.zeros_like(mask[..., :1]), mask], dim=-1)
        return key, value, mask

    with mock.patch.object(own, "change", change):
        states = own.last(text.ids)[int(text.positions()[0]) :]
    return torch.stack([states.mean(dim=0), states[-1]])


def _attention(own: Own, module: Any, layer: int) -> nn.Module:
    """Return the module that gives the output of a layer's attention."""
    own.last([5, 6, 7])
    # Attention of the model's own may return more than its output projection does.
    if layer in own.callers:
        return own.callers[layer]
    projection = module.lm.projection(layer)
    return own.model.get_submodule(next(name for name, part in module.model.named_modules() if part is projection))


def values(own: Own, module: Any, text: Text) -> Tensor:
    outputs = [own.output(_attention(own, module, layer), text.ids)[-1] for layer in module.lm.projected_layers]
    return torch.stack(outputs).mean(dim=0)[None]


def contrasted(own: Own, module: Any, text: Text, other: Text) -> Tensor:
    """Steer the output of the output projection, which is linear, without its bias."""
    attention = _attention(own, module, module.contrast_layer)
    bias = getattr(module.lm.projection(module.contrast_layer), "bias", None)
    irrelevant = own.output(attention, other.ids)[-1]

    def steer(states: Tensor) -> Tensor:
        steered = module.scale * (states[:, -1:] - irrelevant) + (0 if bias is None else bias)
        return torch.cat([states[:, :-1], steered], dim=1)

    with _changed(attention, steer):
        return layer_ends(own, module, text)


def prepended(own: Own, module: Any, text: Text) -> Tensor:
    slot = (text.copies == PREPENDED)[:, None]
    table = own.get_input_embeddings().weight
    # A word whose row of the table is the vector.
    unused = backbones.VOCABULARY - 1
    ids = [unused if is_slot else token for token, is_slot in zip(text.ids, slot, strict=True)]
    row = table[unused].clone()
    with contextlib.ExitStack() as stack:
        for layer in own.layers[: module.prepend_layers - 1]:
            stack.enter_context(_changed(layer, lambda states: torch.where(slot, states[:, -1:], states)))
        table[unused] = module.initial_state
        try:
            return layer_ends(own, module, Text(ids, text.copies))
        finally:
            table[unused] = row


ROWS = {row.key: row for row in every_row()}
_SHORT = {"output_layer": 2}
#: The ends of the usual prompts look alike through a short window.
_CONTRAST = {"auxiliary_template": "irrelevant: {text}"}
#: Recipes that differ in kind, and two settings of the classical one: class, settings, standard.
RECIPES: Mapping[str, tuple[type[modules.CausalModule], dict[str, Any], Standard]] = {
    **{
        key: (ROWS[key].module, ROWS[key].arguments(pooling), standard)
        for key, pooling, standard in (
            ("classical", "mean", words), ("prompteol", "last", ends), ("pretended-cot", "last", layer_ends),
            ("ck", "mean", layer_ends), ("metaeol", "mean", ends), ("echo-2", "mean", words),
            ("reba-2", "mean", reba), ("rt-2", "last", thought), ("attention-pooling", "last", attention_pooled),
            ("bidirectional", "mean", both_ways), ("no-sink", "mean", both_ways), ("kv-rerouting", "mean", rerouted),
            ("value-aggregation", "last", values), ("token-prepending", "last", prepended), ("topic", "last", topic),
            ("early-late", "mean", early_late),
        )
    },
    "contrastive-prompting": (modules.ContrastivePromptingModule, _CONTRAST, contrasted),
    "classical@2": (CausalTransformer, _SHORT, short_words),
    "classical@2, final_norm=False": (CausalTransformer, {**_SHORT, "final_norm": False}, layer_words),
    "layer-states": (modules.LayerStates, {}, all_layers),
}  # fmt: skip

# Records


class Verdict(NamedTuple):
    """Result of a recipe.

    Attributes:
        verdict: ``"right"``, ``"refused"``, ``"not built"`` or ``"fault"``.
        sentence: Why.
    """

    verdict: str
    sentence: str = ""


def surveyed(name: str, recipes: Iterable[str] = RECIPES) -> dict[str, Verdict]:
    """Return the verdicts of recipes on an architecture; ``"all"`` is a verdict that they share."""
    try:
        model = build(name)
    # transformers' own, for a default configuration that describes no model or needs another package.
    except Exception as error:
        return {"all": Verdict("not built", _in_a_line(error))}
    known = {type(part).__name__ for part in model.modules() if isinstance(part, PreTrainedModel)}
    with torch.no_grad():
        try:
            source = CausalTransformer(model, tokenizer=backbones.tokenizer(model_max_length=1024))
        except Exception as error:
            return {"all": _refusal(error, known)}
        try:
            own = Own(model, type(source.model))
            fault = _reads_another_part(own, source)
        except Exception as error:
            fault = f"its own forward: {_in_a_line(error)}"
        if fault:
            return {"all": Verdict("fault", fault)}
        return {key: _verdict(key, own, source, known) for key in recipes}


def _refusal(error: Exception, known: set[str]) -> Verdict:
    """Return whether an error is a sentence that names a class of the model."""
    sentence = _in_a_line(error)
    is_sentence = type(error) is ValueError and any(name in sentence for name in known)
    return Verdict("refused", str(error)) if is_sentence else Verdict("fault", sentence)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _reads_another_part(own: Own, source: CausalTransformer) -> str:
    """Return an error if last hidden states are neither those of the head nor of the whole model; empty: none."""
    ids = Text.of(source.lay_out(TEXTS[:1])[0]).ids
    try:
        candidates = own.whole_model_gives(ids)
    except Exception:  # a model that does not run without images, whose part for text does
        return ""
    last = own.last(ids)
    # Some heads read a multiple of it.
    apart = [
        1 - float(torch.cosine_similarity(own, last, dim=-1).min()) for own in candidates if own.shape == last.shape
    ]
    if not apart or min(apart) < TOLERANCE:
        return ""
    return f"last hidden states are {min(apart):.1e} from those of the whole model"


def _verdict(key: str, own: Own, source: CausalTransformer, known: set[str]) -> Verdict:
    kind, settings, standard = RECIPES[key]
    try:
        module = kind(source, **settings).eval()
        batch = _vectors(module, TEXTS)
        alone = [_vectors(module, [text])[0] for text in TEXTS]
        uncached = kind(source, **{**settings, "prefix_caching": False}) if module.caches_prefixes else module
        whole = _vectors(uncached.eval(), TEXTS)
    except Exception as error:
        return _refusal(error, known)
    faults = []
    for vectors, text, others in zip(batch, TEXTS, zip(alone, whole, strict=True), strict=True):
        try:
            expected = standard(own, module, *(Text.of(layout) for layout in module.lay_out([text])))
        except Exception as error:
            return Verdict("fault", f"by definition: {_in_a_line(error)}")
        for what, other in (("alone", others[0]), ("without a cached prefix", others[1]), ("by definition", expected)):
            if vectors.shape != other.shape:
                faults.append(f"{tuple(vectors.shape)}, and {what} {tuple(other.shape)}")
            # NaN is no distance.
            elif not (apart := float((vectors - other).norm() / other.norm())) < TOLERANCE:
                faults.append(f"{apart:.1e} from the vectors {what}")
    return Verdict("fault", "; ".join(faults)) if faults else Verdict("right")


def _vectors(module: modules.CausalModule, texts: Sequence[str]) -> list[Tensor]:
    """Return what a module gives for each text, (n, D)."""
    features = module(module.preprocess(texts))
    if isinstance(module, modules.LayerStates):
        return list(features["layer_states"])
    pairs = zip(features["token_embeddings"], features["attention_mask"].bool(), strict=True)
    return [states[mask] for states, mask in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="types of configurations; default: all")
    given, release = options(made, arguments), version("transformers")
    done = set(records.read("architectures").filter(transformers=release)["architecture"])
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name in given.names or [name for name in names() if name not in done]:
        found = surveyed(name)
        rows = [
            {"architecture": name, "recipe": key, "transformers": release, **own._asdict()}
            for key, own in found.items()
        ]
        records.rewrite("architectures", rows, given.results, instead_of={"architecture": name})
        faults = [f"{key}: {own.sentence}" for key, own in found.items() if own.verdict == "fault"]
        print("\n  ".join([name, *faults]), flush=True)


if __name__ == "__main__":
    main()
