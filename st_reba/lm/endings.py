"""Several endings behind one text: each is read as if it alone stood there, and the text runs once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..text.layout import Layout
from . import backbone
from .attention.changes import BehindPrefix, Tree
from .run import PassChange, current, run


def behind_one_body(
    model: PreTrainedModel, body: Layout, endings: Sequence[Sequence[int]], **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run a model over texts, each with several endings, in one pass.

    An ending attends to what stands before the text, to the text, and to itself, at the positions that it would have
    if no other ending stood there: a row of the pass is a tree. Endings that begin alike share the nodes of what they
    begin with. What is given here equals a pass for each ending, by rounding; the text costs as much as once. In a
    block of :func:`~st_reba.lm.run.recording` it has the states of all layers side by side.

    Args:
        model: Set up for its masks to be replaced: :func:`~st_reba.lm.attention.setup.make_cacheable` says True.
        body: B texts, with what stands before each and not what stands behind; of a batch behind kept prefixes, what
            follows these.
        endings: The token ids of each of E endings, of one token or more.
        **kwargs: As for :func:`~st_reba.lm.run.run`, without ``inputs``.

    Returns:
        Last hidden states: of the bodies (B, N, D), and of each ending's last token (B, E, D).
    """
    nodes, ends = _planted(endings)
    device, (rows, length), count = backbone.device(model), body.input_ids.shape, len(nodes)
    of_itself = torch.eye(length + count, dtype=torch.bool)
    for node, (parent, _) in enumerate(nodes, start=length):
        if parent >= 0:
            of_itself[node] |= of_itself[length + parent]
    # Padding stands between a body and its endings, and is seen by none of them: only by itself, as a softmax over
    # nothing would be NaN.
    real = torch.cat([body.attention_mask, torch.zeros(rows, count, dtype=torch.bool)], dim=1)
    behind = body.lengths[:, None] + of_itself[length:].sum(dim=1) - 1
    steps = torch.cat([torch.arange(length).expand(rows, -1), behind], dim=1)
    tree = Tree(steps.to(device), (real[:, None, :] | of_itself).to(device))
    before = current().before
    start = (torch.zeros(1, dtype=torch.long) if before is None else before.lengths).to(device)
    ids = torch.tensor([token for _, token in nodes])
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([body.input_ids, ids.expand(rows, -1)], dim=1).to(device),
        "position_ids": start[:, None] + tree.steps,
    }
    if before is not None:
        inputs |= {"past_key_values": before.cache, "use_cache": True}
    changes = [*kwargs.pop("changes", ()), PassChange(masking=BehindPrefix(start, length + count, tree))]
    states = run(model, body, inputs=lambda: inputs, changes=changes, **kwargs)
    return states[:, :length], states[:, torch.tensor(ends) + length]


def _planted(endings: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """The nodes of a tree of endings, each its parent, -1 for the body, and its token; and each ending's last node."""
    nodes: dict[tuple[int, int], int] = {}
    ends = []
    for ending in endings:
        node = -1
        for token in ending:
            node = nodes.setdefault((node, token), len(nodes))
        ends.append(node)
    return list(nodes), ends
