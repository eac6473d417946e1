"""Token prepending: a slot before the text knows, layer by layer, what its end knew."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..text.templates import PREPEND, PREPENDED_ONE_WORD, SLOT, Preset
from .causal_module import CausalModule, PoolOver, Rows
from .changes import Prepend
from .checkpoints import ON_THE_HUB, backbone_of
from .stored import check_magnitudes


def stopping_early(known: Preset) -> Preset:
    """A preset, and where it has none the papers' settings: 27 of 32 layers, no final norm, to the layout's end."""
    return replace(
        known,
        pool_over=known.pool_over or "all",
        output_layer=known.output_layer or 27 / 32,
        final_norm=bool(known.final_norm),
    )


class TokenPrependingModule(CausalModule):
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
        seed: The seed of the vector that layer 0 is given in the slot.
        pool_over: ``"text"``, ``"all"`` or ``"whole"``; see :class:`CausalModule`. Slots are never handed on. None:
            ``"all"``.
        rows: ``"all"`` hands on every token that is read. ``"last"`` computes and hands on the last alone, (B, 1, D).
            None: ``"last"`` of the default template, ``"all"`` of any other.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or cannot stop after ``output_layer``, or
            its input embeddings cannot be looked at.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "prepend_layers", "seed", "rows"]
    method = "Token prepending"
    equation = r"e = h_n, \quad \text{where layer } l < p \text{ is given } h^{(l)}_s \leftarrow h^{(l)}_n"
    citation = (
        "Yuchen Fu, Zifeng Cheng, Zhiwei Jiang, Zhonghui Wang, Yafeng Yin, Zhengliang Li, Qing Gu: Token Prepending: A "
        "Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs. ACL 2025."
    )
    #: Name of the file that the vector is saved in.
    FILE: ClassVar[str] = "token_prepending.safetensors"
    cost = "One pass over the text, up to the output layer: no more than the classical embedding."

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        prepend_layers: int | None = None,
        template: str | None = None,
        seed: int = 0,
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        known = PREPENDED_ONE_WORD if template is None else Preset(template)
        parsed = self._parsed(known.template)
        if PREPEND not in parsed.literals[0]:
            raise ValueError(
                f"The template {known.template!r} must have one {PREPEND}, and have it before {SLOT}: there the slot "
                "stands."
            )
        self.seed = seed
        self.changes = [Prepend(prepend_layers, seed)]
        super().__init__(
            model_name_or_path,
            template=parsed,
            preset=stopping_early(known),
            pool_over=pool_over,
            rows=rows,
            **transformer_kwargs,
        )
        self.prepend_layers = self.change(Prepend).prepend_layers

    @property
    def initial_state(self) -> Tensor:
        """(E,): what enters the slot, before the architecture scales it or adds positions; saved with the model."""
        return cast(Tensor, self.change(Prepend).initial_state)

    @classmethod
    def load(cls, model_name_or_path: str | PathLike[str], subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as :class:`CausalModule` does, with the vector that was saved.

        Raises:
            ValueError: As for any module, or if the vector is of another model.
        """
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        where = {name: kwargs[name] for name in ON_THE_HUB if name in kwargs}
        place = fspath(model_name_or_path) if subfolder else backbone_of(model_name_or_path)
        path = cls.load_file_path(place, cls.FILE, subfolder=subfolder, **where)
        if path is None:
            return module
        state, own = load_file(path).get("initial_state"), module.initial_state
        if state is None or state.shape != own.shape:
            what = "nothing" if state is None else f"a tensor of shape {tuple(state.shape)}"
            raise ValueError(
                f'{path} has {what} under "initial_state", and the model\'s input embeddings have {len(own)} values. '
                "They are of two models; save the model again."
            )
        check_magnitudes({"initial_state": state}, cls.__name__)
        own.copy_(state)
        return module

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        super().save(output_path, *args, **kwargs)
        state = self.initial_state.detach().cpu().contiguous()
        save_file({"initial_state": state}, str(Path(output_path) / self.FILE), metadata={"format": "pt"})
