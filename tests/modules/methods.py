"""The methods that the tests of modules run over, and what each gives by its definition.

A row is a class and its settings. ``ORACLES`` has a function for each class: it is given the same settings as keywords,
and returns what the module hands on of one text, (n, D), by the papers' algorithms. Those that other tests have, too,
are in ``tests/oracles.py``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import st_reba
from st_reba import modules
from st_reba.modules import CausalModule
from st_reba.recipes import every_row
from st_reba.text.presets import TEMPLATES, normalized, preset

from .. import oracles
from ..conftest import long

TWICE = 'This : "{text}" can be rewritten as : "{text}" and its topic in one word is:"'

#: What a modules.json may name.
PUBLIC_MODULES: list[type[Any]] = [getattr(modules, name) for name in modules.SAVED]

#: Each class, and each setting off its default; the first recipe of a module that has none here is added below.
RECIPES: dict[str, tuple[type[CausalModule], dict[str, Any]]] = {
    "classical": (st_reba.CausalTransformer, {}),
    "prompted": (st_reba.CausalTransformer, {"template": 'The word for "{text}" is:', "pool_over": "all"}),
    "prompteol": (
        st_reba.CausalTransformer,
        {"template": "prompteol", "pool_over": "all", "rows": "last", "normalize_text": True},
    ),
    "short": (st_reba.CausalTransformer, {"output_layer": 2, "final_norm": False}),
    "bag": (st_reba.InputEmbeddings, {"template": "of: {text}"}),
    "layer states": (st_reba.LayerStates, {"pool_over": "all", "template": "so: {text}!"}),
    "echo-2": (st_reba.EchoModule, {}),
    "echo-3 repeated": (st_reba.EchoModule, {"repetitions": 3, "pool_copies": "repeated"}),
    "springer": (st_reba.EchoModule, {"template": "springer", "pool_over": "all"}),
    "bidirectional": (st_reba.BidirectionalLastLayer, {}),
    "bidirectional, whole": (
        st_reba.BidirectionalLastLayer,
        {"bidirectional_layers": 2, "template": "representative-word-paper", "pool_over": "whole"},
    ),
    "reba-1": (st_reba.ReBAModule, {"repetitions": 1}),
    "reba-2": (st_reba.ReBAModule, {}),
    "reba-3 last": (st_reba.ReBAModule, {"repetitions": 3, "rows": "last"}),
    "reba-2 bidirectional": (st_reba.ReBAModule, {"bidirectional_layers": 2}),
    "reba-2 normalised": (st_reba.ReBAModule, {"layers": [0, -1], "normalize_weights": True}),
    "no sink, prompted": (
        st_reba.NoSinkModule, {"bidirectional_layers": 2, "layers": [0, -1], "template": "of: {text}!"},
    ),
    "thought-1": (st_reba.RefinedThoughtModule, {"iterations": 1}),
    "thought-2": (st_reba.RefinedThoughtModule, {"iterations": 2}),
    "thought-4": (st_reba.RefinedThoughtModule, {"iterations": 4}),
    "metaeol": (st_reba.MetaEOLModule, {"templates": ["prompteol", "{text}", "promptsum-zh"]}),
    "reverse": (st_reba.ReverseEOLModule, {}),
    "reverse, parts": (st_reba.ReverseEOLModule, {"template": "so: {text}!", "average": False}),
    "kv re-routing": (st_reba.KVReroutingModule, {"layers": [0, 2], "prefix_bias": 1.0}),
    "kv re-routing, words": (
        st_reba.KVReroutingModule,
        {"pool_over": "text", "hybrid": False, "bidirectional_layers": 1, "prefix_bias": -2.0},
    ),
    "kv re-routing, last": (st_reba.KVReroutingModule, {"hybrid": False, "rows": "last"}),
    "token prepending": (st_reba.TokenPrependingModule, {"prepend_layers": 2, "seed": 5}),
    "token prepending, all": (
        st_reba.TokenPrependingModule,
        {"prepend_layers": 2, "output_layer": 2, "rows": "all", "final_norm": True, "template": "{prepend}{text}."},
    ),
    "value aggregation": (st_reba.ValueAggregationModule, {}),
    "value aggregation, text": (
        st_reba.ValueAggregationModule,
        {"layers": [-1, 0], "template": "{text}!", "pool_over": "text"},
    ),
    "contrastive prompting": (st_reba.ContrastivePromptingModule, {"contrast_layer": 1}),
    "contrastive prompting, norm": (
        st_reba.ContrastivePromptingModule,
        {"contrast_layer": 0, "scale": "norm", "auxiliary_template": "irrelevant: {text}", "output_layer": 2,
         "final_norm": True},
    ),
    "early and late": (st_reba.EarlyLateModule, {}),
    "early and late, one layer": (st_reba.EarlyLateModule, {"early_layer": 3, "bidirectional_layers": 1}),
    "early and late, short": (
        st_reba.EarlyLateModule,
        {"early_layer": 2, "output_layer": 2, "final_norm": False, "template": "{text} means:"},
    ),
    "echo topic": (st_reba.TopicModule, {"template": TWICE, "lower_layers": [-2, 0.4], "pool_over": "all"}),
    "topic, last": (st_reba.TopicModule, {"template": "so: {text}!", "lower_layers": [1]}),
    "topic, a mean": (st_reba.TopicModule, {"template": "so: {text}!", "lower_layers": [], "mean": True}),
}  # fmt: skip
for row in every_row():
    if row.module not in {module for module, _ in RECIPES.values()}:
        RECIPES[row.key] = row.module, dict(row.settings)

#: Settings of a module of which another stands for them where each takes its time.
FURTHER = (
    "prompted", "prompteol", "short", "echo-3 repeated", "springer", "bidirectional, whole", "no sink, prompted",
    "reba-1", "reba-2 bidirectional", "reba-2 normalised",
    "thought-1", "thought-2", "kv re-routing, words", "kv re-routing, last",
    "token prepending, all", "value aggregation, text", "contrastive prompting, norm", "early and late, one layer",
    "early and late, short", "topic, last", "topic, a mean",
)  # fmt: skip
EACH_MODULE = [long(recipe) if recipe in FURTHER else recipe for recipe in RECIPES]

#: Relative. What a batch changes is rounding, and on these random weights every further pass of refined thought
#: multiplies it: 5e-6 was seen after two passes, 4e-5 after four.
TOLERANCES = {"thought-4": 1e-4}
TOLERANCE = 1e-5


def read(module, texts, **kwargs) -> list[torch.Tensor]:
    """What a module hands on of each text, (n, D), in one batch."""
    with torch.no_grad():
        features = module.eval()(module.preprocess(texts, **kwargs))
    if isinstance(module, st_reba.LayerStates):
        return list(features["layer_states"])
    states, mask = features["token_embeddings"], features["attention_mask"]
    assert features["input_ids"].shape == mask.shape == states.shape[:2]
    assert not states[mask == 0].any()
    return [own[real.bool()] for own, real in zip(states, mask, strict=True)]


@dataclass(frozen=True)
class Naive:
    """A plain eager model, and how a text becomes ids; the slot that stands before it, if any."""

    model: Any
    token_ids: Any
    architecture: str = "llama"
    slot: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        return self.model.config.num_hidden_layers

    def ids(self, template: str, text: str) -> tuple[list[int], slice]:
        """The ids of a template of one copy, a string that a slot splits; and where the text is among them."""
        before, behind = TEMPLATES.get(template, template).split("{text}")
        head, mark, between = before.partition("{prepend}")
        front = [*self.token_ids(head), *self.slot]
        start = len(front) + len(self.token_ids(between))
        rest = between + text + behind
        ids = [*front, *self.token_ids(rest)] if mark or self.slot else self.token_ids(head + rest)
        return ids, slice(start, start + len(self.token_ids(text)))

    def copies(self, template: str, text: str) -> tuple[list[int], list[slice]]:
        """The ids of a template whose pieces are tokenised on their own, and where each copy of the text is."""
        own, (first, *literals) = self.token_ids(text), TEMPLATES.get(template, template).split("{text}")
        ids, places = self.token_ids(first), []
        for literal in literals:
            places.append(slice(len(ids), len(ids) + len(own)))
            ids += [*own, *self.token_ids(literal)]
        return ids, places

    def after(self, ids: list[int], layer: int | None = None, final_norm: bool = False) -> torch.Tensor:
        """(N, D): the states after a layer, counted from 1, or after the last, and after the final norm."""
        layer = self.depth if layer in (None, -1) else layer
        if final_norm and layer == self.depth:
            return oracles.run(self.model, ids)[0]
        states = oracles.seen(self.model, oracles.layer_name(self.architecture, layer - 1), ids, "after")
        return oracles.final_norm(self.architecture, self.model)(states) if final_norm else states


def classical(naive, text, template="{text}", pool_over="text", rows="all", output_layer=None, final_norm=True):
    ids, own = naive.ids(template, text)
    read = {"text": own, "all": slice(own.start if template != "{text}" else 0, None), "whole": slice(None)}[pool_over]
    states = naive.after(ids, output_layer, final_norm)[read]
    return states[-1:] if rows == "last" else states


def bag(naive, text, template="{text}"):
    ids, own = naive.ids(template, text)
    return naive.model.get_input_embeddings()(torch.tensor(ids[own]))


def layer_states(naive, text, template="{text}", pool_over="text"):
    ids, own = naive.ids(template, text)
    return oracles.layer_states(naive.model, naive.architecture, ids[: own.stop] if pool_over == "text" else ids)


def echo(naive, text, repetitions=2, template=None, pool_copies="last", pool_over="text", rows="all"):
    ids, copies = naive.copies(template or "{text}" * repetitions, text)
    states = naive.after(ids, final_norm=True)
    if pool_over == "all":
        return states[copies[-1].start :]
    states = torch.cat([states[copy] for copy in (copies[1:] if pool_copies == "repeated" else copies[-1:])])
    return states[-1:] if rows == "last" else states


def reba(naive, text, repetitions=2, layers=None, rows="all", normalize_weights=False):
    ids = naive.token_ids(text)
    settings = {"layers": layers, "normalize": normalize_weights}
    words = oracles.algorithm_2(naive.model, ids, repetitions, **settings)
    return words[-1:] if rows == "last" else words


def no_sink(naive, text, template="{text}", layers=(-1,)):
    with oracles.sink_hidden(naive.model, [layer % naive.depth for layer in layers]):
        return classical(naive, text, template)


def thought(naive, text, iterations=2):
    return oracles.refined_thought(naive.model, [*naive.token_ids(text), 0], iterations)


def meta_eol(naive, text, templates):
    return torch.stack([oracles.run(naive.model, naive.ids(template, text)[0])[0][-1] for template in templates])


def in_reverse(naive, text):
    """Words in reverse order; of Chinese, the characters that tokens begin and end with."""
    if "我" not in text:
        return " ".join(text.split()[::-1])
    whole = naive.token_ids(text)
    cuts = [end for end in range(len(text) + 1) if naive.token_ids(text[:end]) + naive.token_ids(text[end:]) == whole]
    return "".join(text[first:last] for first, last in reversed([*itertools.pairwise(cuts)]))


def reverse_eol(naive, text, template="prompteol", average=True):
    change = normalized if template == "prompteol" else str
    both = [classical(naive, change(own), template, "all", "last") for own in (text, in_reverse(naive, text))]
    return (both[0] + both[1]) / 2 if average else torch.cat(both, dim=1)


@contextlib.contextmanager
def keys_rerouted(model, layers, bias=0.0):
    """KV-Embedding: in these layers of an eager model, K~ = [k_n; K] and V~ = [v_n; V], written out.

    The architecture's own eager attention is given the longer keys and values, and its mask one more column.
    """
    attention = next(module for module in model.modules() if hasattr(module, "layer_idx"))
    code: Any = sys.modules[type(attention).__module__]
    original = code.eager_attention_forward

    def eager_attention_forward(module, query, key, value, attention_mask, *args, **kwargs):
        if module.layer_idx in layers:
            key = torch.cat([key[:, :, -1:], key], dim=2)
            value = torch.cat([value[:, :, -1:], value], dim=2)
            column = torch.full_like(attention_mask[..., :1], bias)
            attention_mask = torch.cat([column, attention_mask], dim=-1)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    code.eager_attention_forward = eager_attention_forward
    try:
        yield
    finally:
        code.eager_attention_forward = original


def rerouted(naive, text, template="compress", layers=(1,), prefix_bias=0.0, pool_over="all", hybrid=True, rows="all"):
    ids, own = naive.ids(template, text)
    with keys_rerouted(naive.model, layers, prefix_bias):
        states = naive.after(ids, final_norm=True)[own.start : own.stop if pool_over == "text" else None]
    if hybrid:
        return torch.stack([states.mean(dim=0), states[-1]])
    return states[-1:] if rows == "last" else states


def with_slot(model, vector):
    """A copy of a model with one more word, whose input embedding is ``vector``; and its id."""
    model = copy.deepcopy(model)
    table = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        model.resize_token_embeddings(len(table) + 1, mean_resizing=False)
        model.get_input_embeddings().weight[-1] = vector
    return model, len(table)


@contextlib.contextmanager
def states_prepended(model, architecture, slot, layers):
    """Token prepending: before layers 1 .. ``layers`` - 1, that of the token ``slot`` becomes the last one's."""
    places: list[int] = []

    def find(ids):
        # Refined thought embeds the last token on its own.
        places[:] = (ids[0] == slot).nonzero().flatten().tolist() or places
        return ids

    def renew(states):
        states = states.clone()
        states[0, places] = states[0, -1].clone()
        return states

    embeddings = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    with contextlib.ExitStack() as stack:
        stack.enter_context(oracles.changed(model, embeddings, before=find))
        for layer in range(1, layers):
            stack.enter_context(oracles.changed(model, oracles.layer_name(architecture, layer), before=renew))
        yield


def prepended(naive, text, template=None, prepend_layers=2, seed=0, pool_over="all", rows=None, **settings):
    if template is None:
        template, text, rows = 'This sentence : {prepend} "{text}" means in one word:"', normalized(text), "last"
    width = naive.model.get_input_embeddings().weight.shape[1]
    model, slot = with_slot(naive.model, torch.randn(width, generator=torch.Generator().manual_seed(seed)))
    own = replace(naive, model=model, slot=(slot,))
    settings = {"final_norm": False, "rows": rows, **settings}
    with states_prepended(model, naive.architecture, slot, prepend_layers):
        return classical(own, text, template, pool_over, **settings)


def steered(model, architecture, auxiliary, layer, scale):
    """A block in which the last token of all that runs is steered away from that of ``auxiliary``."""
    name = oracles.projection_name(architecture, layer)
    irrelevant = oracles.seen(model, name, auxiliary, "before")[-1]

    def steer(states):
        value = states[0, -1]
        difference = value - irrelevant
        if difference.norm() < 1e-5 * value.norm():  # of what a short window holds, both prompts say the same
            difference = torch.zeros_like(difference)
            return torch.cat([states[:, :-1], difference[None, None]], dim=1)
        factor = value.norm() / difference.norm() if scale == "norm" else scale
        return torch.cat([states[:, :-1], (factor * difference)[None, None]], dim=1)

    return oracles.changed(model, name, before=steer)


def contrasted(naive, text, template="prompteol", auxiliary_template=None, contrast_layer=0, scale=2.0,
               output_layer=None, final_norm=False):  # fmt: skip
    if auxiliary_template is None:
        auxiliary_template = 'The irrelevant information of this sentence : "{text}" means in one word:"'
    text = normalized(text) if preset(template).normalize_text else text
    other, _ = naive.ids(auxiliary_template, text)
    with steered(naive.model, naive.architecture, other, contrast_layer, scale):
        return classical(naive, text, template, "all", "last", output_layer, final_norm)


def values(naive, text, template="prompteol", layers="all", pool_over="all"):
    ids, own = naive.ids(template, normalized(text) if preset(template).normalize_text else text)
    ids = ids[: own.stop] if pool_over == "text" else ids
    layers = range(naive.depth) if layers == "all" else [layer % naive.depth for layer in layers]
    return oracles.value_aggregation(naive.model, naive.architecture, ids, layers)[None]


def early_late(naive, text, template="prompteol", early_layer=1, output_layer=None, final_norm=True,
               normalize_text=False):  # fmt: skip
    ids, own = naive.ids(template, normalized(text) if normalize_text or template == "prompteol" else text)
    late = naive.after(ids, output_layer, final_norm)[-1]
    return torch.stack([torch.cat([word, late]) for word in naive.after(ids, early_layer)[own]])


def topic(naive, text, template="echo-topic", lower_layers=(0.93,), mean=None, pool_over="text"):
    text = normalized(text) if preset(template).normalize_text else text
    several = TEMPLATES.get(template, template).count("{text}") > 1
    ids, places = naive.copies(template, text) if several else naive.ids(template, text)
    copy, states = places[-1] if several else places, naive.after(ids, final_norm=True)
    lasts = [states[-1]]
    for layer in lower_layers:
        share = isinstance(layer, float)
        counted = min(round(layer * naive.depth), naive.depth - 1) if share else layer % (naive.depth + 1)
        lasts.append(naive.after(ids, counted)[-1])
    if not (several if mean is None else mean):
        return torch.cat(lasts)[None]
    words = states[copy.start : copy.stop if pool_over == "text" else None]
    return torch.stack([torch.cat([word, *lasts]) for word in words])


def attention_pooled(naive, text):
    states, maps = oracles.run(naive.model, naive.token_ids(text))
    weights = maps[-1][:, -1].mean(dim=0)
    return (weights @ states / weights.sum())[None]


ORACLES: dict[type, Any] = {
    st_reba.CausalTransformer: classical,
    st_reba.InputEmbeddings: bag,
    st_reba.LayerStates: layer_states,
    st_reba.EchoModule: echo,
    st_reba.BidirectionalLastLayer: functools.partial(classical, template="representative-word", pool_over="all"),
    st_reba.NoSinkModule: no_sink,
    st_reba.ReBAModule: reba,
    st_reba.RefinedThoughtModule: thought,
    st_reba.MetaEOLModule: meta_eol,
    st_reba.ReverseEOLModule: reverse_eol,
    st_reba.KVReroutingModule: rerouted,
    st_reba.TokenPrependingModule: prepended,
    st_reba.ContrastivePromptingModule: contrasted,
    st_reba.ValueAggregationModule: values,
    st_reba.EarlyLateModule: early_late,
    st_reba.TopicModule: topic,
    st_reba.AttentionPoolingModule: attention_pooled,
}


def expected(naive: Naive, kind: type, settings: dict[str, Any], text: str) -> torch.Tensor:
    """What a module of this class and these settings hands on of a text, (n, D)."""
    settings = dict(settings)
    if kind is st_reba.CausalTransformer and settings.pop("normalize_text", False):
        text = normalized(text)
    turned = settings.pop("bidirectional_layers", int(kind in (st_reba.BidirectionalLastLayer, st_reba.NoSinkModule)))
    with oracles.both_ways(naive.model, turned) if turned else contextlib.nullcontext():
        return ORACLES[kind](naive, text, **settings)
