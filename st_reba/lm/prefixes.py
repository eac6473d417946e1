"""What stands before the texts of a batch: keys and values of a prompt's own words are computed once, and kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..text.layout import NOT_TEXT, Layout
from . import backbone
from .run import Before, Pass, current, passing

#: The token ids of P prefixes, one for each of the prompts that a text stands in.
Ids = tuple[tuple[int, ...], ...]


class _Kept(DynamicLayer):
    """One layer's keys and values of P prefixes, each (P, G, N, d).

    A pass is given them before its own, which are not kept: several passes may read them at a time, and a batch takes
    the memory of one layer.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.kept, self.rows = (keys, values), rows
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Those of each row's prefix, (B, G, N, d), and then its own."""
        keys, values = self.kept
        if len(keys) > 1:
            rows = self.rows.to(keys.device, non_blocking=True)
            keys, values = keys[rows], values[rows]
        keys, values = (kept.expand(len(key_states), -1, -1, -1) for kept in (keys, values))
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of P prefixes, as a causal model computed them: they do not depend on what follows.

    Attributes:
        lengths: (P,) tokens of each prefix, in the CPU's memory.
        layers: Keys and values of each layer, (P, G, N, d) each; what stands behind a prefix means nothing.
    """

    lengths: Tensor
    layers: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: PreTrainedModel, ids: Ids) -> Prefixes:
        """Run a causal model over them."""
        lengths = torch.tensor([len(prefix) for prefix in ids])
        longest = int(lengths.max())
        # What is shorter than the longest ends in tokens that none of its own sees.
        padded = torch.tensor([[*prefix, *(longest - len(prefix)) * [0]] for prefix in ids])
        cache = DynamicCache()
        with passing(Pass()):
            ids_here = padded.to(backbone.device(model))
            model(input_ids=ids_here, output_hidden_states=False, **backbone.keeping(model, cache))
        return cls(lengths, [(keys, values) for keys, values, *_ in cache])

    def rest_of(self, layout: Layout) -> Layout:
        """The same rows without their prefixes, at the front again."""
        start = self.lengths.repeat(len(layout.input_ids) // len(self.lengths))
        lengths = (layout.lengths - start).clamp(min=0)
        place = torch.arange(max(1, int(lengths.max())))
        mask = place < lengths[:, None]
        taken = (start[:, None] + place).clamp(max=layout.input_ids.shape[1] - 1)
        ids, copy_index = (part.gather(1, taken) for part in (layout.input_ids, layout.copy_index))
        return Layout(ids * mask, mask, copy_index, seen=layout.seen)

    def before(self, rows: Tensor) -> Before:
        """What stands before these rows of a layout, (B,), in a pass: every P-th row has the same prefix."""
        chosen = rows % len(self.lengths)
        lengths = self.lengths if len(self.lengths) == 1 else self.lengths[chosen]
        return Before(lengths, Cache([_Kept(*layer, chosen) for layer in self.layers]))


def behind(prefixes: Prefixes | None, rows: Tensor) -> contextlib.AbstractContextManager[None]:
    """In this block, in this thread, passes read these rows of a layout, (B,), which begin behind their prefixes."""
    if prefixes is None:
        return contextlib.nullcontext()
    return passing(replace(current(), before=prefixes.before(rows)))


def shared_ids(layout: Layout, count: int) -> Ids | None:
    """The tokens that stand before all texts of a batch, and before the slots of token prepending.

    Args:
        layout: B * P rows, those of a text together. Row p of a text begins as row p of all others, up to a token or
            more before it: which tokens stand right before a text may depend on it.
        count: P.

    Returns:
        For each of P rows; None where nothing stands before any text, or there is no text.
    """
    # An empty text does not say where it stands, and nothing is read of it.
    real = (layout.text_lengths > 0).unflatten(0, (-1, count))[:, 0]
    if not real.any():
        return None
    starts = (layout.copy_index != NOT_TEXT).int().argmax(dim=1).unflatten(0, (-1, count))[real]
    ids = layout.input_ids[:, : int(starts.max())].unflatten(0, (-1, count))[real]
    alike = (ids == ids[:1]).all(dim=0).long().cumprod(dim=1).sum(dim=1)
    lengths = torch.minimum(alike, starts.amin(dim=0)).tolist()
    if not any(lengths):
        return None
    return tuple(tuple(row[:length]) for row, length in zip(ids[0].tolist(), lengths, strict=True))


class KeptPrefixes:
    """The prefixes that one model was given last. A copy of it, and what is pickled of it, has none.

    They are dropped when a weight is another or has other values. What is written past autograd, into a weight's
    ``data``, is not noticed.
    """

    #: How many are kept: of a prompt, there may be one or two, see :func:`shared_ids`.
    MOST = 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Hashable, Prefixes] = {}
        self._weights: Hashable = None

    def __reduce__(self) -> tuple[type[KeptPrefixes], tuple[()]]:
        return KeptPrefixes, ()

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Drop them all."""
        with self._lock:
            self._found.clear()

    def get(self, model: PreTrainedModel, ids: Ids) -> Prefixes:
        """Those of these tokens; computed, if they are not kept."""
        key = ids, backbone.autocast_dtype(backbone.device(model))
        with self._lock:
            weights = tuple(map(_values_of, chain(model.parameters(), model.buffers())))
            if weights != self._weights:
                self._found.clear()
                self._weights = weights
            # Those that were asked for last stand last.
            found = self._found.pop(key) if key in self._found else Prefixes.of(model, ids)
            self._found[key] = found
            for oldest in [*self._found][: -self.MOST]:
                del self._found[oldest]
        return found


def _values_of(weight: Tensor) -> Hashable:
    """Another for other values, as far as torch tells: it counts what is written in place."""
    # A tensor made of others, as quantised ones are, has no memory of its own.
    place = id(weight) if hasattr(weight, "__tensor_flatten__") else weight.data_ptr()
    return place, 0 if weight.is_inference() else weight._version, weight.dtype, weight.device
