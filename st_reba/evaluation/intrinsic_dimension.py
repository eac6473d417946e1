"""How many dimensions the states of a layer really have, and the layers where they have the fewest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..lm import backbone
from ..lm.anatomy import anatomy_of
from ..lm.run import StatesAt, run
from ..modules import CausalTransformer
from ..modules.changes import middle_third
from ..text.layout import Layout

#: Fewer points say nothing about a dimension.
LEAST_POINTS = 10

# Points whose neighbours are looked for at a time.
_BLOCK = 256


def two_nn(points: Tensor, discard: float = 0.1) -> float:
    r"""The intrinsic dimension of a cloud of points, from the two nearest neighbours of each.

    .. math:: F(\mu) = 1 - \mu^{-d}, \quad \mu = r_2 / r_1

    where :math:`r_1, r_2` are a point's distances to them: d is the slope of a line through the origin, fitted to
    :math:`-\log(1 - F)` over :math:`\log \mu` (Facco, d'Errico, Rodriguez, Laio: "Estimating the intrinsic dimension of
    datasets by a minimal neighborhood information", Scientific Reports 7, 2017).

    Args:
        points: (M, D). Points that occur more than once count once.
        discard: The share of the points with the largest ratios that is left out, as in the paper.

    Raises:
        ValueError: If there are fewer than 10 different points, or ``discard`` is not a share.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"discard={discard!r}: give a share of the points, 0 or more and less than 1.")
    points = torch.unique(points.detach().double().cpu(), dim=0)
    if len(points) < LEAST_POINTS:
        raise ValueError(f"{len(points)} different points: give at least {LEAST_POINTS}, better a few hundred.")
    # Not by the product, in which near points would lose their distance.
    exact = "donot_use_mm_for_euclid_dist"
    blocks = [torch.cdist(block, points, compute_mode=exact) for block in points.split(_BLOCK)]
    nearest = torch.cat([block.topk(3, largest=False).values for block in blocks])
    ratio = (nearest[:, 2] / nearest[:, 1]).log().sort().values
    # At the last, F is 1.
    kept = min(int(len(ratio) * (1 - discard)), len(ratio) - 1)
    share = torch.arange(1, len(ratio) + 1, dtype=ratio.dtype) / len(ratio)
    x, y = ratio[:kept], -torch.log1p(-share[:kept])
    return float((x @ y) / (x @ x))


@torch.inference_mode()
def layer_dimensions(module: CausalTransformer, texts: Sequence[str], batch_size: int = 32) -> list[float]:
    """The intrinsic dimension of what each layer reads at the last token.

    A layer's keys and values are made of what it reads. The first layer reads the input embedding of the template's
    last token, which is the same for all texts where positions are not added to it: then it has no dimension.

    Args:
        module: Whose template the texts are put in; a ``CausalTransformer`` or one of its kind.
        texts: Plain texts; a few hundred, better a thousand.
        batch_size: Texts at a time.

    Returns:
        One for each layer, the first first; NaN where fewer than 10 states differ.

    Raises:
        ValueError: If there are fewer than 10 different texts, or the model's layers are not found.
    """
    texts = list(dict.fromkeys(text for text in texts if text.strip()))
    if len(texts) < LEAST_POINTS:
        raise ValueError(f"{len(texts)} different texts: give at least {LEAST_POINTS}, better a few hundred.")
    module.eval()
    layers = [module.model.get_submodule(path) for path in anatomy_of(module.model).layers]
    if not layers:
        raise ValueError(f"The layers of {type(module.model).__name__} were not found. Give KVReroutingModule its own.")
    found = []
    for start in range(0, len(texts), batch_size):
        layout = Layout.of(module.preprocess(texts[start : start + batch_size]))
        seen = StatesAt(layers, "before", layout.ends)
        run(module.model, layout, changes=[seen.as_change()])
        found.append(torch.stack(seen.states()).cpu())
    return [
        two_nn(states) if len(torch.unique(states, dim=0)) >= LEAST_POINTS else math.nan
        for states in torch.cat(found, dim=1)
    ]


def select_layers(
    module: CausalTransformer, texts: Sequence[str], *, count: int | None = None, batch_size: int = 32
) -> list[int]:
    """Consecutive layers around the one whose last-token states have the lowest intrinsic dimension.

    Tang and Yang's way to find the layers of :class:`st_reba.KVReroutingModule`: there a text is compressed most.

    Args:
        module: As for :func:`layer_dimensions`: a ``CausalTransformer`` with the template that is to be used.
        texts: As for :func:`layer_dimensions`.
        count: How many layers. None: a third of them, as many as by default.
        batch_size: Texts at a time.

    Returns:
        Their indices, in order.

    Raises:
        ValueError: If there are too few texts, or not so many layers, or no layer's dimension is a number.
    """
    depth = backbone.depth(module.model)
    count = len(middle_third(depth)) if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= depth:
        raise ValueError(f"count={count!r}: {type(module.model).__name__} has {depth} layers; give 1 to {depth}.")
    dimensions = layer_dimensions(module, texts, batch_size)
    if np.isnan(dimensions).all():
        raise ValueError(
            "The last token's state is the same for all texts in every layer, so no dimension can be told. "
            "Use other texts, or a model with more than one layer."
        )
    start = int(np.nanargmin(dimensions)) - count // 2
    start = min(max(start, 0), depth - count)
    return list(range(start, start + count))
