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
    if no other ending stood there: a row of the pass is a tree. What is given here equals a pass for each ending, by
    rounding; the text costs as much as once.

    Args:
        model: Set up for its masks to be replaced: :func:`~st_reba.lm.attention.setup.make_cacheable` says True.
        body: B texts, with what stands before each and not what stands behind; of a batch behind kept prefixes, what
            follows these.
        endings: The token ids of each of E endings, of one token or more.
        **kwargs: As for :func:`~st_reba.lm.run.run`, without ``inputs``.

    Returns:
        Last hidden states: of the bodies (B, N, D), and of each ending's last token (B, E, D).
    """
    device, (rows, length) = backbone.device(model), body.input_ids.shape
    lengths = torch.tensor([len(ending) for ending in endings])
    ids = torch.tensor([token for ending in endings for token in ending])
    offsets = torch.cat([torch.arange(len(ending)) for ending in endings])
    branches = torch.arange(1, len(endings) + 1).repeat_interleave(lengths)
    # Padding stands between a body and its endings, and is seen by none of them.
    steps = torch.cat([torch.arange(length).expand(rows, -1), body.lengths[:, None] + offsets], dim=1)
    of_body = torch.where(body.attention_mask, 0, -1)
    tree = Tree(*(part.to(device) for part in (steps, torch.cat([of_body, branches.expand(rows, -1)], dim=1))))
    before = current().before
    start = (torch.zeros(1, dtype=torch.long) if before is None else before.lengths).to(device)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([body.input_ids, ids.expand(rows, -1)], dim=1).to(device),
        "position_ids": start[:, None] + tree.steps,
    }
    if before is not None:
        inputs |= {"past_key_values": before.cache, "use_cache": True}
    masking = BehindPrefix(start, length + len(ids), tree)
    changes = [*kwargs.pop("changes", ()), PassChange(masking=masking)]
    states = run(model, body, inputs=lambda: inputs, changes=changes, **kwargs)
    return states[:, :length], states[:, length + lengths.cumsum(0) - 1]
