"""Keys and values of tokens that precede a layout: a template's words and the prompt, run once for all texts."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .attention.kernels import autocast_dtype
from .passes import AttentionCall, Hook, active_pass
from .views import device_of


@dataclass(frozen=True)
class Past:
    """Tokens that a layout continues.

    Attributes:
        cache: Their keys and values.
        lengths: (B,) or (1,) for all rows, number of tokens; those behind it in the cache are padding.
    """

    cache: Cache
    lengths: Tensor

    def inputs(self, model: PreTrainedModel, new: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward for ``new`` tokens behind these."""
        positions = self.lengths.to(device)[:, None] + torch.arange(new, device=device)
        return {"position_ids": positions, **cache_arguments(model, self.cache)}


@dataclass(eq=False)
class PastMask(Hook):
    """Mask of new tokens behind a past of unequal lengths: the past, and new tokens up to the query.

    Attributes:
        lengths: As in :class:`Past`.
    """

    lengths: Tensor
    _masks: dict[Hashable, Tensor] = field(default_factory=dict, init=False)

    layers = None

    def before_attention(self, call: AttentionCall) -> None:
        new, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
        kind = (keys, call.window, device)
        if kind not in self._masks:
            lengths = self.lengths.to(device)[:, None, None]
            slot, step = torch.arange(keys - new, device=device), torch.arange(new, device=device)
            in_past = (slot < lengths).expand(-1, new, -1)
            among_new = (step[:, None] >= step).expand(len(in_past), -1, -1)
            if call.window is not None:
                in_past = in_past & (lengths + step[:, None] - slot < call.window)
                among_new = among_new & (step[:, None] - step < call.window)
            self._masks[kind] = torch.cat([in_past, among_new], dim=-1)[:, None]
        call.mask, call.causal = self._masks[kind], False


class _Kept(DynamicLayer):
    """Keys and values of one layer's prefixes, (R, G, P, d), that a pass of B * R rows reads and does not extend."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._kept = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = len(key_states) // len(self._kept[0])
        keys, values = (states[:, None].expand(-1, rows, -1, -1, -1).flatten(0, 1) for states in self._kept)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


class PrefixCache:
    """Prefixes that were run last. A copy of it, and what is pickled of it, is empty.

    They are dropped when a weight is replaced or written to. Writing to ``weight.data`` is not noticed.
    """

    #: Number of prefixes that are kept.
    MOST = 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, Past] = {}
        self._weights: Hashable = None

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[()]]:
        return PrefixCache, ()

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all prefixes."""
        with self._lock:
            self._kept.clear()

    def get(self, model: PreTrainedModel, prefixes: Sequence[tuple[int, ...]]) -> list[Past]:
        """Return the keys and values of prefixes, run where they are not kept."""
        dtype = autocast_dtype(device_of(model))
        with self._lock:
            weights = tuple(map(_version, chain(model.parameters(), model.buffers())))
            if weights != self._weights:
                self._kept.clear()
                self._weights = weights
            pasts = []
            for ids in prefixes:
                key = ids, dtype
                pasts.append(self._kept.pop(key) if key in self._kept else run_prefix(model, ids))
                self._kept[key] = pasts[-1]
            for oldest in [*self._kept][: -self.MOST]:
                del self._kept[oldest]
        return pasts


def _version(weight: Tensor) -> Hashable:
    """Return a value that changes when a weight is replaced or written to in place."""
    # A tensor made of others, such as a quantised one, has no memory of its own.
    place = id(weight) if hasattr(weight, "__tensor_flatten__") else weight.data_ptr()
    return place, 0 if weight.is_inference() else weight._version, weight.dtype, weight.device


def run_prefix(model: PreTrainedModel, ids: Sequence[int]) -> Past:
    """Run a causal model over tokens, and return their keys and values for any number of rows."""
    cache = DynamicCache()
    with active_pass(()):
        ids_there = torch.tensor([ids], device=device_of(model))
        model(input_ids=ids_there, output_hidden_states=False, **cache_arguments(model, cache))
    return Past(read_only_cache((keys, values) for keys, values, *_ in cache), torch.tensor([len(ids)]))


def read_only_cache(layers: Iterable[tuple[Tensor, Tensor]]) -> Cache:
    """Return a cache of keys and values, (R, G, P, d) for each layer, that passes of a multiple of R rows can read."""
    return Cache(layers=[_Kept(keys, values) for keys, values in layers])


def cache_arguments(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Return the arguments by which a model reads from a cache and adds to it."""
    # transformers calls it "cache" from 5.24 on.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}
