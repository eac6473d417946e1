"""Token prepending: let a slot before the text know, layer by layer, what its end knew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...lm import backbone
from ...lm.anatomy import Anatomy
from ...lm.decoder import layer_places
from ...lm.hooks import Tap, listen, tapping
from ...text.layout import NOT_TEXT, PREPENDED, Layout
from ...text.templates import PREPENDED_ONE_WORD, Preset, Template
from ..base import PoolOver, Reading, Rows, check_rows, chosen
from ..stored import check_magnitudes
from .early_exit import EarlyExitModule

if TYPE_CHECKING:
    from typing_extensions import Self

#: The file beside the configuration that the slot's first vector is saved in, and its name there.
STATE_FILE = "token_prepending.safetensors"
_STATE = "initial_state"


class TokenPrependingModule(EarlyExitModule):
    r"""A slot before the text takes, in the first layers, the last token's state of the layer below.

    .. math:: h^{(l)}_{s} \leftarrow h^{(l)}_{n}, \quad l = 1, \dots, p - 1

    :math:`h^{(l)}` is what layer l (from 0) is given, s the slot, n the last token, and p ``prepend_layers``: so the
    text sees, through the slot, what comes after it. What layer 0 is given in the slot is one vector for all texts,
    drawn from N(0, 1) where the model's input embeddings come from, as the authors' code does with a new entry of the
    vocabulary, and saved with the model.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        prepend_layers: p, from 1 to the layers that are run; 1 never replaces the slot's own state. None: three in ten
            of them, 2 at least (8 of 27).
        template: Text with one ``{prepend}`` before one ``{text}``. None: PromptEOL's question, read as its authors do:
            the last token of everything, of texts that are changed as :func:`st_reba.text.templates.normalized` does.
        output_layer: After which layer to stop, counted from 1, or from the top if negative. None: 27 of 32 layers, in
            proportion; -1: all.
        final_norm: Whether the states that are read go through the model's final norm. None: False, as in the paper:
            they are those of the residual stream.
        seed: Of the vector.
        pool_over: ``"text"``, ``"all"`` or ``"whole"``; see :class:`CausalModule`. Slots are never handed on. None:
            ``"all"``.
        rows: ``"all"`` hands on every token that is read. ``"last"`` computes and hands on the last alone, (B, 1, D).
            None: ``"last"`` of the default template, ``"all"`` of any other.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or cannot stop after ``output_layer``, or
            its input embeddings cannot be looked at.
    """

    config_keys = [*EarlyExitModule.config_keys, "prepend_layers", "seed", "rows"]
    method = "Token prepending"
    equation = r"e = h_n, \quad \text{where layer } l < p \text{ is given } h^{(l)}_s \leftarrow h^{(l)}_n"
    citation = (
        "Yuchen Fu, Zifeng Cheng, Zhiwei Jiang, Zhonghui Wang, Yafeng Yin, Zhengliang Li, Qing Gu: Token Prepending: A "
        "Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs. ACL 2025."
    )

    #: (E,): what enters the slot, before the architecture scales it or adds positions; saved with the model.
    initial_state: Tensor

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        prepend_layers: int | None = None,
        template: str | None = None,
        output_layer: int | None = None,
        final_norm: bool | None = None,
        seed: int = 0,
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        known = PREPENDED_ONE_WORD if template is None else Preset(template)
        handed_on: Rows = chosen(rows, known.rows, "all")
        check_rows(handed_on)
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed!r}: give a whole number, 0 or more, below 2**63.")
        if prepend_layers is not None and type(prepend_layers) is not int:
            raise ValueError(f"prepend_layers={prepend_layers!r}: give a number of layers, or None for three in ten.")
        super().__init__(
            model_name_or_path,
            template=Template.parse(known.template, prepends=True),
            preset=known,
            pool_over=pool_over,
            output_layer=output_layer,
            final_norm=final_norm,
            **transformer_kwargs,
        )
        self._layers = layer_places(self.model)
        self.prepend_layers = self._resolve(prepend_layers)
        self.seed = seed
        self._embedding_scale = _scale(self.model)
        table = _table(self.model.get_input_embeddings())
        drawn = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        self.register_buffer(_STATE, drawn.to(table.device))
        self._set_rows(handed_on)

    def _resolve(self, prepend_layers: int | None) -> int:
        depth = backbone.depth(self.model)
        if prepend_layers is None:
            return min(depth, max(2, round(0.3 * depth)))
        if not 1 <= prepend_layers <= depth:
            raise ValueError(
                f"prepend_layers={prepend_layers}: {depth} layers of {type(self.model).__name__} are run; use 1 to "
                f"{depth}."
            )
        return prepend_layers

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        with tapping(self._prepending(layout)):
            return self._read_tokens(layout, 0, 0, **kwargs)

    def _prepending(self, layout: Layout) -> dict[nn.Module, Tap]:
        slots = layout.copy_index <= PREPENDED
        source = self._sources(layout)

        def enter(states: Tensor) -> Tensor:
            vector = (self.initial_state * self._embedding_scale).to(states)
            return torch.where(slots.to(states.device)[..., None], vector, states)

        def renew(states: Tensor) -> Tensor:
            index = source.to(states.device)[..., None].expand_as(states)
            return states.gather(1, index)

        embeddings = self.model.get_input_embeddings()
        listen([embeddings])
        layers = [self._layer_places().at(self.model, layer) for layer in range(1, self.prepend_layers)]
        return {embeddings: Tap(after=enter), **dict.fromkeys(layers, Tap(before=renew))}

    def _sources(self, layout: Layout) -> Tensor:
        """(B, N): whose state each position takes: a slot its row's last token's, any other position its own."""
        position = torch.arange(layout.input_ids.shape[1], device=layout.input_ids.device)
        last = layout.attention_mask.sum(dim=1, keepdim=True) - 1
        return torch.where(layout.copy_index <= PREPENDED, last, position)

    def _select(self, layout: Layout, first_copy: int, last_copy: int) -> Tensor:
        return super()._select(layout, first_copy, last_copy) & (layout.copy_index >= NOT_TEXT)

    # On disk

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and the vector that enters the slot."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        state = self.initial_state.detach().cpu().contiguous()
        save_file({_STATE: state}, str(Path(output_path) / STATE_FILE), metadata={"format": "pt"})

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module; of a backbone alone, whose slot has no vector yet, it is drawn.

        Raises:
            ValueError: If a setting is out of range, or the vector is not one of this model's.
        """
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        where = dict(zip(("token", "cache_folder", "revision", "local_files_only"), args, strict=False))
        where |= {name: kwargs[name] for name in kwargs.keys() & _WHERE}
        path = cls.load_file_path(model_name_or_path, STATE_FILE, subfolder=subfolder, **where)
        if path is not None:
            module._take_state(load_file(path).get(_STATE), path)
        return module

    def _take_state(self, state: Tensor | None, path: str) -> None:
        if state is None or state.shape != self.initial_state.shape:
            given = "nothing" if state is None else f"a tensor of shape {tuple(state.shape)}"
            raise ValueError(
                f'{path} has {given} under "{_STATE}", and the model\'s input embeddings have '
                f"{len(self.initial_state)} values. They are of two models; save the model again."
            )
        check_magnitudes({_STATE: state}, type(self).__name__)
        self.initial_state = state.to(self.initial_state.device)


_WHERE = {"token", "cache_folder", "revision", "local_files_only"}


def _table(embeddings: nn.Module) -> Tensor:
    return cast(Tensor, embeddings.weight)


def _scale(model: PreTrainedModel) -> float:
    """What an architecture multiplies the entries of its table of input embeddings with, within that module.

    Raises:
        ValueError: If the table cannot be read, or more is done to it.
    """
    scale = Anatomy(model).embedding_scale
    if scale is None:
        raise ValueError(
            f"What {type(model.get_input_embeddings()).__name__} makes of the table of input embeddings could not be "
            "found out, so no vector can be entered beside them. Load the model without device_map, or use another "
            "model."
        )
    return scale
