"""Token prepending: a slot before the text knows, layer by layer, what its end knew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...lm import backbone
from ...lm.anatomy import embedding_scale, layer_paths
from ...lm.run import Hook, PassChange
from ...text.layout import PREPENDED, Layout
from ...text.templates import PREPEND, Template
from .change import Change, Fitted


@dataclass(frozen=True)
class Prepend(Change):
    r"""A slot before the text takes, in the first layers, the state that the layout's last token had a layer below.

    .. math:: h^{(l)}_{s} \leftarrow h^{(l)}_{n}, \quad l = 1, \dots, p - 1

    (Fu et al., "Token Prepending".) What layer 0 is given in the slot is one vector, drawn from N(0, 1) and saved. The
    slot stands where the template has ``{prepend}``, else right before the text. It is never handed on.

    Attributes:
        prepend_layers: p, from 1 to the layers that are run; 1 never replaces the slot's own state. None: three in ten
            of them, 2 at least (8 of 27).
        seed: Of the vector.
    """

    prepend_layers: int | None = None
    seed: int = 0
    key: ClassVar[str] = "prepend"

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r}: give a whole number, 0 or more, below 2**63.")
        if self.prepend_layers is not None and type(self.prepend_layers) is not int:
            raise ValueError(
                f"prepend_layers={self.prepend_layers!r}: give a number of layers, or None for three in ten."
            )

    def resolved(self, model: PreTrainedModel, whole_depth: int) -> Self:
        depth = backbone.depth(model)
        if self.prepend_layers is None:
            return replace(self, prepend_layers=min(depth, max(2, round(0.3 * depth))))
        if not 1 <= self.prepend_layers <= depth:
            raise ValueError(
                f"prepend_layers={self.prepend_layers}: {depth} layers of {type(model).__name__} are run; use 1 to "
                f"{depth}."
            )
        return self

    def laid_out(self, template: Template) -> Template:
        before, *others = template.literals
        return template if PREPEND in before else Template((before + PREPEND, *others))

    def fitted(self, model: PreTrainedModel) -> Slots:
        return Slots(model, cast(int, self.prepend_layers), self.seed)


@dataclass(frozen=True)
class PrependBlocks(Prepend):
    r"""The same where a text has several blocks with slots: each takes the state of its own block's last token.

    .. math:: h^{(l)}_{s_b} \leftarrow h^{(l)}_{n_b}, \quad b = 1, \dots, m, \quad l = 1, \dots, p - 1

    (Ding et al., "Hierarchical Token Prepending".) Where nothing cuts the text into blocks, it is one.
    """

    key: ClassVar[str] = "prepend-blocks"

    def fitted(self, model: PreTrainedModel) -> Slots:
        return _BlockSlots(model, cast(int, self.prepend_layers), self.seed)


class Slots(Fitted):
    """The slots of one model.

    Attributes:
        initial_state: (E,): what enters a slot, before the architecture scales it or adds positions.
    """

    FILE = "token_prepending.safetensors"
    initial_state: Tensor

    def __init__(self, model: PreTrainedModel, layers: int, seed: int) -> None:
        super().__init__()
        self.layers = layers
        self._paths = layer_paths(model)
        self._scale = _scale(model)
        table = _table(model.get_input_embeddings())
        drawn = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        self.register_buffer("initial_state", drawn.to(table.device))

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        slots = layout.copy_index <= PREPENDED
        source = self.sources(layout)

        def enter(states: Tensor) -> Tensor:
            vector = (self.initial_state * self._scale).to(states)
            return torch.where(slots.to(states.device)[..., None], vector, states)

        def renew(states: Tensor) -> Tensor:
            index = source.to(states.device)[..., None].expand_as(states)
            return states.gather(1, index)

        embeddings = model.get_input_embeddings()
        layers = [model.get_submodule(path) for path in self._paths[1 : self.layers]]
        return PassChange(hooks={embeddings: Hook(after=enter), **dict.fromkeys(layers, Hook(before=renew))})

    def sources(self, layout: Layout) -> Tensor:
        """(B, N): whose state each position takes: a slot its row's last token's, any other position its own."""
        position = torch.arange(layout.input_ids.shape[1], device=layout.input_ids.device)
        last = layout.attention_mask.sum(dim=1, keepdim=True) - 1
        return torch.where(layout.copy_index <= PREPENDED, last, position)


class _BlockSlots(Slots):
    def sources(self, layout: Layout) -> Tensor:
        """(B, N): whose state each position takes: a slot that of its block's last token, any other its own."""
        copy_index = layout.copy_index
        position = torch.arange(copy_index.shape[1], device=copy_index.device).expand_as(copy_index)
        is_text = copy_index >= 0
        # A block ends where something else follows: the next block's slot, or what comes after the text.
        ends = is_text & ~torch.cat([is_text[:, 1:], torch.zeros_like(is_text[:, :1])], dim=1)
        block = (ends.cumsum(dim=1) - 1).masked_fill(~ends, copy_index.shape[1])
        table = torch.zeros_like(copy_index[:, :1]).expand(-1, copy_index.shape[1] + 1).scatter(1, block, position)
        slots = copy_index <= PREPENDED
        return torch.where(slots, table.gather(1, (PREPENDED - copy_index).clamp(min=0)), position)


def _table(embeddings: nn.Module) -> Tensor:
    return cast(Tensor, embeddings.weight)


def _scale(model: PreTrainedModel) -> float:
    """What an architecture multiplies the entries of its table of input embeddings with, within that module.

    Raises:
        ValueError: If the table cannot be read, or more is done to it.
    """
    scale = embedding_scale(model)
    if scale is None:
        raise ValueError(
            f"What {type(model.get_input_embeddings()).__name__} makes of the table of input embeddings could not be "
            "found out, so no vector can be entered beside them. Load the model without device_map, or use another "
            "model."
        )
    return scale
