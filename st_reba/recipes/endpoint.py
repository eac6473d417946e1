"""Recipes over a server: what of a row can be had where the server gives states of tokens, or one vector a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from .. import modules
from ..modules import EndpointTransformer
from ..text.templates import PRESETS, SLOT
from . import rows
from .lookup import every_row
from .recipe import SERVER, Recipe, Row

#: What is tried by default where a text has one vector: each as it is, and behind each filter.
_OF_VECTORS = ("classical", "prompteol", "topic")
#: What is tried where its tokens have states.
_OF_STATES = ("classical", "echo-2", "prompteol", "topic", "echo-topic")
#: The filters that are fitted on plain texts; the other one needs the language model's head.
_FILTERS = tuple(part for name in rows.FILTERS if (part := rows.PARTS[name]).fitted)
_STANDARDISED = rows.PARTS["standardised"]


def row_on(row: Row, endpoint: EndpointTransformer) -> Row:
    """A row as a server's vectors, or states after its last layer, give it.

    Of Topic and Echo topic the part that is read some layers below is left out.

    Raises:
        ValueError: If it reads what the server does not show.
    """
    template = str(row.settings.get("template", SLOT * int(row.settings.get("repetitions", 1))))
    settings: dict[str, Any] = {"template": template}
    parts = 1
    known: tuple[type[Any], ...] = (modules.CausalTransformer, modules.TopicModule)
    if endpoint.gives_states:
        known = (*known, modules.EchoModule)
        if row.module is modules.TopicModule and row.repetitions > 1:
            settings, parts = {**settings, "with_end": True}, 2
    if row.module not in known or row.settings.keys() - {"template", "repetitions"} or row.end != -1:
        shows = "the states after its last layer" if endpoint.gives_states else "one vector a text"
        can = ", ".join(_OF_STATES if endpoint.gives_states else _OF_VECTORS)
        raise ValueError(f"{row.key}: {endpoint.url} gives {shows}, and this reads more. Give one of {can}.")
    if not endpoint.gives_states and row.repetitions > 1:
        raise ValueError(
            f"{row.key}: {endpoint.url} gives one vector a text, and this is read in one copy of several. Give one of "
            f"{', '.join(_OF_VECTORS)}."
        )
    own = row.own_template
    if endpoint.gives_states and row.module is modules.TopicModule and parts == 1:
        own = PRESETS["prompteol"].settings()
    if not endpoint.gives_states:
        own = {name: value for name, value in own.items() if name == "normalize_text"}
    # It is built as the others are, on one that is there; what is asked of its class besides, nobody asks of this row.
    module = cast(type[modules.CausalModule], EndpointTransformer)
    return replace(
        row, module=module, settings=settings, settings_if_last={}, own_template=own, parts=parts,
        poolings=row.poolings if endpoint.gives_states else (SERVER,), copies=None, words=False, same_if_last="",
    )  # fmt: skip


def on_endpoint(recipe: Recipe, endpoint: EndpointTransformer) -> Recipe:
    """A recipe as a server gives it; one that is over a server already as it is.

    Raises:
        ValueError: As :func:`row_on`, or if it is read after a layer, or what stands around its pooling reads more.
    """
    if issubclass(recipe.row.module, EndpointTransformer):
        return recipe
    row = row_on(recipe.row, endpoint)
    part = recipe.part
    if recipe.layer is not None or (part is not None and (part.weighs_tokens or not part.fitted)):
        what = f"layer {recipe.layer}" if part is None or recipe.layer is not None else part.name
        raise ValueError(
            f"{recipe.key}: {endpoint.url} shows no layers, no head and no weights of tokens, so there is no {what}. "
            "Leave it out."
        )
    pooling = recipe.pooling if recipe.pooling in row.poolings else row.poolings[0]
    return replace(recipe, row=row, pooling=pooling)


def recipes_on(endpoint: EndpointTransformer, fit_texts: Sequence[str] = ()) -> list[Recipe]:
    """The recipes to try over a server, with the rows' own prompts in English, not yet :func:`on_endpoint`."""
    texts = tuple(fit_texts)
    by_key = {row.key: row for row in every_row()}
    keys = _OF_STATES if endpoint.gives_states else _OF_VECTORS
    found = []
    for row in map(by_key.__getitem__, keys):
        poolings = row.poolings if endpoint.gives_states else row.poolings[:1]
        behind = [None, *_FILTERS] if not endpoint.gives_states or row.key == "classical" else [None]
        # A standardised sum of one part is that part standardised.
        around = dict.fromkeys(part for part in (row.around, *behind) if row.around is None or part != _STANDARDISED)
        found += [Recipe(row, pooling, texts, part) for pooling in poolings for part in around]
    return found
