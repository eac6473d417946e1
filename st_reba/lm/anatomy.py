"""What a loaded language model is: facts that are found by running it on a few tokens, each at most once.

Nothing is known by name: what the modules of a model took and gave says what they are. What is found is kept for as
long as the model's input embeddings live, and shared by all views of one backbone; where weights or parts of it have
been replaced, it is found anew.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import backbone
from .attention.changes import AfterPrefix
from .attention.function import NAME
from .build import Build
from .context import entered
from .dry_run import TOKENS, close, dry_run, gives_the_same, output_on
from .prefixes import Prefixes
from .sketch import Sketch, output_projections, states_of

_Value = TypeVar("_Value")


class _Facts:
    """What has been found of a backbone so far.

    Attributes:
        build: What it was made of when it was found.
        found: The facts, by their names.
        whole: Those of the model that this one is the first layers of; what is true of all its layers is true here.
    """

    def __init__(self, build: Build, whole: _Facts | None = None) -> None:
        self.build = build
        self.found: dict[str, Any] = {}
        self.whole = whole


# By the input embeddings, which all views of a backbone share; then one for each number of layers.
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[type, int], _Facts]] = weakref.WeakKeyDictionary()
# Two threads that tried one backbone out at once would each see the other's modes and attention.
_finding = threading.RLock()


class Anatomy:
    """What a loaded language model is.

    Args:
        model: A language model, or a view of one. Each fact is found when it is first asked for.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._facts = _facts_of(model)

    def _once(self, name: str, find: Callable[[], _Value]) -> _Value:
        with _finding:
            if name not in self._facts.found:
                self._facts.found[name] = find()
            return cast(_Value, self._facts.found[name])

    def _of_the_whole(self, name: str) -> Any:
        """What has been found of the model that this one is the first layers of; None if nothing has, or it is none."""
        return None if self._facts.whole is None else self._facts.whole.found.get(name)

    @property
    def sketch(self) -> Sketch:
        """What one dry run shows."""
        return self._once("sketch", lambda: Sketch.of(self.model))

    @property
    def is_causal(self) -> bool:
        """Whether a token's state knows nothing of later tokens."""
        # The two texts share their first token and differ in the second.
        first, other = self.sketch.states[:, 0]
        return close(first, other)

    @property
    def calls_our_attention(self) -> bool:
        """Whether the layers that have attention call our attention function, and what it gives is what they expect.

        A name in the configuration is not yet a call of the function: BLOOM and Falcon have code of their own.
        """
        sketch = self.sketch
        if not sketch.unknown:
            return bool(sketch.calling)
        return self._once("honoured", lambda: close(sketch.states, self._own_states))

    @property
    def _own_states(self) -> Tensor:
        """Those under an attention of transformers' own."""
        own = "eager" if self.model.config._attn_implementation == NAME else None
        return self._once("own states", lambda: cast(Tensor, output_on(self.model, own).last_hidden_state))

    @property
    def map_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose attention maps the model hands out itself, in eager attention."""
        return self._maps[0]

    @property
    def maps_are_sound(self) -> bool:
        """Whether it computes the same states when it hands out its maps."""
        return self._maps[1]

    @property
    def _maps(self) -> tuple[tuple[int, ...], bool]:
        def find() -> tuple[tuple[int, ...], bool]:
            output = output_on(self.model, "eager", output_attentions=True)
            maps = output.get("attentions") or ()
            layers = tuple(index for index, weights in enumerate(maps) if weights is not None)
            return layers, bool(layers) and close(output.last_hidden_state, self._own_states)

        return self._once("maps", find)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have attention, in whatever code."""
        return self.sketch.calling or self.map_layers

    @property
    def output_projections(self) -> Mapping[int, str]:
        """Paths of the output projection of each layer that has attention; those that are not found are missing."""
        found = self._of_the_whole("projections")
        if found is None:
            found = self._once(
                "projections", lambda: output_projections(self.model, self.sketch, self.attention_layers)
            )
        return {layer: path for layer, path in found.items() if layer in self.attention_layers}

    @property
    def reuses_cache(self) -> bool:
        """Whether new tokens behind cached prefixes of unequal lengths give what they give in the whole text.

        They are given as input embeddings, at positions and with a mask of our own.
        """
        found = self._of_the_whole("cache")
        return self._once("cache", self._try_cache) if found is None else bool(found)

    def _try_cache(self) -> bool:
        if not self.calls_our_attention or len(self.sketch.calling) < backbone.depth(self.model):
            return False
        ids = torch.tensor(TOKENS, device=backbone.device(self.model))
        lengths, new = torch.tensor([2, 1], device=ids.device), 2
        expected = self.sketch.states
        position_ids = lengths[:, None] + torch.arange(new, device=ids.device)
        row = torch.arange(len(ids), device=ids.device)

        def behind() -> tuple[Tensor, Tensor]:
            prefixes = Prefixes.computed(self.model, ids[:, : int(lengths.max())], lengths)
            with entered(masking=AfterPrefix(lengths, new)):
                output = self.model(
                    inputs_embeds=self.model.get_input_embeddings()(ids.gather(1, position_ids)),
                    position_ids=position_ids,
                    past_key_values=prefixes.cache(row),
                    use_cache=True,
                    return_dict=True,
                    **backbone.without_hidden_states(self.model),
                )
            return output.last_hidden_state, expected.gather(
                1, position_ids.to(expected.device)[..., None].expand(-1, -1, expected.shape[2])
            )

        return gives_the_same(self.model, behind, NAME)

    def position_wise(self, layer: int) -> tuple[str, ...]:
        """Paths of the parts of a layer that look at one position at a time: its feed-forward part, in most models."""

        def alone(path: str) -> bool:
            given, gave = self.sketch.parts[layer][path]
            part = self.model.get_submodule(path)
            return gives_the_same(self.model, lambda: (states_of(part(given)), gave))

        return self._once(f"position-wise {layer}", lambda: tuple(filter(alone, self.sketch.parts[layer])))

    @property
    def embedding_scale(self) -> float | None:
        """What the input embeddings multiply the entries of their table with; None if that cannot be said."""
        return self._once("embedding scale", lambda: _embedding_scale(self.model))


def stops_after(short: PreTrainedModel, layers: int, whole: PreTrainedModel) -> bool:
    """Whether a model that shares another's weights computes what that one does in its first layers and its norm.

    What is known of the whole is then known of the short one.
    """
    anatomy = Anatomy(whole)
    sketch = anatomy.sketch
    with _finding:
        kept = _kept(short)
        if kept is not None and kept.whole is anatomy._facts:
            return True
        with dry_run(short):
            expected = sketch.gave[layers - 1]
            for path in sketch.norm or ():
                expected = whole.get_submodule(path)(expected)
        states = output_on(short, NAME).last_hidden_state
        if not close(states, expected):
            return False
        facts = _keep(short, whole=anatomy._facts)
        facts.found["sketch"] = sketch.of_the_first(layers, states)
        return True


def _facts_of(model: PreTrainedModel) -> _Facts:
    with _finding:
        kept = _kept(model)
        return _keep(model) if kept is None else kept


def _kept(model: PreTrainedModel) -> _Facts | None:
    """What is known of a model as it is now."""
    facts = _known.get(_shared_part(model), {}).get(_kind(model))
    return facts if facts is not None and facts.build.is_that_of(model) else None


def _keep(model: PreTrainedModel, whole: _Facts | None = None) -> _Facts:
    """Room for what is found of a model, in place of what was known of one of its kind that is no more."""
    facts = _Facts(Build(model), whole)
    _known.setdefault(_shared_part(model), {})[_kind(model)] = facts
    return facts


def _shared_part(model: PreTrainedModel) -> nn.Module:
    """What all views of a backbone have in common."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return model


def _kind(model: PreTrainedModel) -> tuple[type, int]:
    return type(model), backbone.depth(model)


def _embedding_scale(model: PreTrainedModel) -> float | None:
    embeddings = model.get_input_embeddings()
    table = cast(Tensor, embeddings.weight)
    if table.device.type == "meta":
        return None
    with dry_run(model):
        ids = torch.arange(min(8, len(table)), device=table.device)
        rows, gave = table[ids].double(), embeddings(ids)
        scale = float((rows * gave.double()).sum() / rows.square().sum().clamp(min=torch.finfo(rows.dtype).tiny))
        return scale if close(gave, (rows * scale).to(gave.dtype)) else None
