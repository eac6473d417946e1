"""What stands before the texts of a batch, run once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..text.layout import Layout
from . import backbone


@dataclass(frozen=True)
class Prefixes:
    """Keys and values of P prefixes, as a causal model computed them: they do not depend on what follows.

    Attributes:
        lengths: (P,) tokens of each prefix, in the CPU's memory.
        kept: For each layer, (P, G, N, d) each; what stands behind a prefix means nothing.
    """

    lengths: Tensor
    kept: DynamicCache

    @classmethod
    def of(cls, model: PreTrainedModel, layout: Layout, count: int, **kwargs: Any) -> Prefixes | None:
        """Run a model over what stands before the texts of a batch.

        Args:
            model: Causal.
            layout: B * P rows, those of a text together. Row p of a text begins as row p of all others, up to a token
                or more before it: which tokens stand right before a text may depend on it.
            count: P.
            **kwargs: For the model's forward.

        Returns:
            None where nothing stands before any text, or there is no text.
        """
        # An empty text does not say where it stands, and nothing is read of it.
        real = (layout.text_lengths > 0).unflatten(0, (-1, count))[:, 0]
        if not real.any():
            return None
        starts = layout.text_starts.unflatten(0, (-1, count))[real]
        ids = layout.input_ids[:, : int(starts.max())].unflatten(0, (-1, count))[real]
        alike = (ids == ids[:1]).all(dim=0).long().cumprod(dim=1).sum(dim=1)
        lengths = torch.minimum(alike, starts.amin(dim=0))
        if not lengths.any():
            return None
        kept = DynamicCache()
        # What is shorter than the longest ends in other tokens, which none of its own sees.
        input_ids = ids[0, :, : int(lengths.max())].to(backbone.device(model))
        asked = {"past_key_values": kept, "use_cache": True, "output_hidden_states": False}
        model(**{**kwargs, "input_ids": input_ids, **asked})
        return cls(lengths, kept)

    def rest_of(self, layout: Layout) -> Layout:
        """The same rows without their prefixes, at the front again."""
        start = self.lengths.repeat(len(layout.input_ids) // len(self.lengths))
        lengths = (layout.lengths - start).clamp(min=0)
        place = torch.arange(max(1, int(lengths.max())))
        mask = place < lengths[:, None]
        taken = (start[:, None] + place).clamp(max=layout.input_ids.shape[1] - 1)
        ids, copy_index = (part.gather(1, taken) for part in (layout.input_ids, layout.copy_index))
        return Layout(ids * mask, mask, copy_index, seen=layout.seen)

    def cache(self, prefixes: Tensor) -> DynamicCache:
        """For a pass over B rows, behind these prefixes, (B,), which stay as they are."""
        # Each layer may lie on a device of its own.
        return DynamicCache(
            [
                tuple(part[prefixes.to(part.device, non_blocking=True)] for part in (keys, values))
                for keys, values, *_ in self.kept
            ]
        )
