"""Several layouts of a text in one pass: what they begin alike with runs once, and each is as if it stood alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..text.layout import NOT_TEXT, Layout
from . import backbone
from .attention.changes import BehindPrefix, Tree
from .run import PassChange, current, run


@dataclass(frozen=True)
class Trees:
    """E layouts of the same B texts as B trees: of the tokens that layouts of a text begin alike with, one node each.

    A node attends to what stands before it in its layouts, at the position that it has there: a layout's states are
    those of a pass over that layout alone, by rounding.

    Attributes:
        layout: (B, M) nodes, as rows of a pass: those of each text's first layout, then what each further one has
            besides.
        steps: (B, M), where in its layouts each node stands.
        shared: (B, E, M), which nodes each layout has.
        nodes: For each layout (B, N), the node of each token; 0 for padding.
    """

    layout: Layout
    steps: Tensor
    shared: Tensor
    nodes: Sequence[Tensor]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Self:
        """The trees of layouts, at least one; of a batch behind kept prefixes, of what follows these."""
        count, woven = len(layouts), Layout.interleaved(layouts)
        ids, real = (part.unflatten(0, (-1, count)) for part in (woven.input_ids, woven.attention_mask))
        # (B, E, E, N): whether two layouts have the same tokens up to this one.
        alike = ((ids[:, :, None] == ids[:, None]) & real[:, :, None] & real[:, None]).cumprod(dim=-1)
        # (B, E, N): the first layout that has the node of a token.
        first = alike.argmax(dim=2)
        new = real & (first == torch.arange(count)[:, None])
        number = new.flatten(1).cumsum(dim=1).unflatten(1, (count, -1)) - 1
        nodes = number.gather(1, first)
        length = max(1, int(number.max()) + 1)
        input_ids, steps = torch.zeros(2, len(ids), length, dtype=torch.long)
        row, _, step = new.nonzero(as_tuple=True)
        input_ids[row, number[new]], steps[row, number[new]] = ids[new], step
        # What padding is put at is cut off.
        shared = torch.zeros(len(ids), count, length + 1, dtype=torch.bool)
        shared = shared.scatter_(2, nodes.where(real, length), True)[..., :length]
        return cls(
            Layout(input_ids, shared.any(dim=1), torch.full_like(input_ids, NOT_TEXT)),
            steps,
            shared,
            [
                own[:, : part.input_ids.shape[1]]
                for own, part in zip(nodes.where(real, 0).unbind(1), layouts, strict=True)
            ],
        )

    def run(self, model: PreTrainedModel, changes: Sequence[PassChange] = (), **kwargs: Any) -> Tensor:
        """One pass over all nodes.

        Args:
            model: Set up for its masks to be replaced: :func:`~st_reba.lm.attention.setup.make_cacheable` says True.
                For one layout alone, which is no tree, any model.
            changes: As for :func:`~st_reba.lm.run.run`; hooks are given the nodes' states.
            **kwargs: As for :func:`~st_reba.lm.run.run`, without ``inputs``.

        Returns:
            (B, M, D), last hidden states, with the states of all layers side by side where they are recorded.
        """
        if len(self.nodes) == 1:
            return run(model, self.layout, changes=changes, **kwargs)
        device, before = backbone.device(model), current().before
        # Two nodes of one layout see each other, as far as they stand before; padding sees only itself, as a softmax
        # over nothing would be NaN.
        shared = self.shared.to(device).float()
        seen = (shared.mT @ shared > 0) | torch.eye(shared.shape[-1], dtype=torch.bool, device=device)
        tree = Tree(self.steps.to(device), seen)
        start = (torch.zeros(1, dtype=torch.long) if before is None else before.lengths).to(device)
        inputs: dict[str, Any] = {
            "input_ids": self.layout.input_ids.to(device),
            "position_ids": start[:, None] + tree.steps,
        }
        if before is not None:
            inputs |= backbone.keeping(model, before.cache)
        masking = BehindPrefix(start, shared.shape[-1], tree)
        return run(model, self.layout, inputs=lambda: inputs, changes=[*changes, PassChange(masking=masking)], **kwargs)

    def of_layout(self, place: int, states: Tensor) -> Tensor:
        """(B, N, D): one layout's, of the nodes' states (B, M, D); what stands in padding means nothing."""
        nodes = self.nodes[place].to(states.device, non_blocking=True)
        return states.gather(1, nodes[..., None].expand(-1, -1, states.shape[-1]))
