"""Settings that several modules have, checked alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeVar, cast

from transformers import PreTrainedModel

from ..hub.saved_files import is_inside
from ..lm import backbone
from ..lm.attention.setup import require_interface
from ..settings import Setting, choice, flag, whole
from ..text.templates import PoolOver, Rows

_Value = TypeVar("_Value")

#: The most copies any module takes, far above what helps: a configuration that asks for more is a mistake or an attack.
MAX_COPIES = 1024

#: Where tokenizers and ST keep "no limit".
NO_LIMIT = int(1e30)

# The settings of all modules, and those that several of them have.
POOL_OVER: Setting[PoolOver] = choice("pool_over", "text", "all", "whole")
FINAL_NORM = flag("final_norm")
READOUT: Setting[Literal["layer", "before_mlp"]] = choice("readout", "layer", "before_mlp")
NORMALIZE_TEXT = flag("normalize_text")
DETERMINISTIC = flag("deterministic")
ROWS: Setting[Rows] = choice("rows", "all", "last", says='use "all" for every token, or "last" for the last alone.')


def repetitions_from(least: int) -> Setting[int]:
    """How often a text stands in the input, which is checked before a template of them is made."""
    return whole(
        "repetitions",
        least,
        MAX_COPIES,
        f"give a whole number from {least} to {MAX_COPIES}, how often the text stands in the input. 2 is the usual "
        "choice.",
    )


def chosen(given: _Value | None, preset: _Value | None, usual: _Value) -> _Value:
    """The first of these that says something."""
    return given if given is not None else usual if preset is None else preset


def check_length(length: object, name: str) -> None:
    """Refuse what is not a number of tokens: a whole number from 1, or None or transformers' huge one for no limit."""
    is_whole = type(length) is int or (isinstance(length, float) and length >= NO_LIMIT)
    if length is not None and not (is_whole and cast(float, length) >= 1):
        raise ValueError(f"{name}={length!r}: give a number of tokens, 1 or more, or None for no limit.")


def check_layers(layers: Literal["all"] | Sequence[int]) -> Literal["all"] | list[int]:
    """Refuse what is neither all layers nor a list of indices, before a model is there to have them."""
    if layers == "all":
        return "all"
    valid = not isinstance(layers, str) and isinstance(layers, Sequence) and len(layers) > 0
    if not valid or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(f'layers={layers!r}: use "all" or a list of layer indices, such as [-1].')
    return list(layers)


def resolve_layers(
    layers: Literal["all"] | list[int], model: PreTrainedModel, attending: Collection[int]
) -> frozenset[int]:
    """The indices that are meant, of the layers that have attention; negative ones count from the top.

    Raises:
        ValueError: If there is no such layer, or it has no attention.
    """
    if layers == "all":
        return frozenset(attending)
    depth = backbone.depth(model)
    for layer in layers:
        if not -depth <= layer < depth:
            raise ValueError(
                f"layers={layers}: the model has {depth} layers, so {layer} is out of range; "
                f"use {-depth} to {depth - 1}."
            )
    chosen = frozenset(layer % depth for layer in layers)
    if missing := sorted(chosen - set(attending)):
        raise ValueError(
            f"layers={layers}: layers {missing} of {type(model).__name__} have no attention; "
            f"those with attention are {sorted(attending)}."
        )
    return chosen


def watched_last_layer(model: PreTrainedModel, instead: str) -> int:
    """The last layer's index, where its attention can be watched.

    Args:
        model: The model, which is set up for it.
        instead: What to use where it cannot be watched.

    Raises:
        ValueError: If it cannot be watched.
    """
    last = backbone.depth(model) - 1
    refusal = f"The attention of {type(model).__name__}'s last layer cannot be watched"
    require_interface(model, [last], refusal, f"Use {instead}")
    return last


def check_inside(subfolder: str) -> str:
    """Refuse a module's path that leads out of its model, by the rules of any system (later STs do so, too)."""
    if not is_inside(subfolder):
        raise ValueError(
            f"modules.json has the path {subfolder!r}: a module lies inside its model, so give a relative path "
            'without "..", or "" for the model\'s own directory.'
        )
    return subfolder


def check_transformer_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse what would make another model of a backbone than one whose hidden states and attention can be read."""
    if (backend := kwargs.get("backend", "torch")) != "torch":
        raise ValueError(f'backend={backend!r}: st_reba reads hidden states and attention; use backend="torch".')
    if (task := kwargs.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise ValueError(f'transformer_task={task!r}: st_reba embeds text; use "feature-extraction".')
    for name in ("query_length", "document_length"):
        check_length(kwargs.get(name), name)
    if kwargs.get("query_expansion") is not None:
        raise ValueError(
            "query_expansion: a causal language model was not trained to fill in masked tokens, so st_reba adds none "
            "to a query. Leave it out."
        )
