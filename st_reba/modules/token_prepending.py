"""Token prepending: let slots before the text know, layer by layer, what its end, or the end of each block, knew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ..settings import flag, whole
from ..text.templates import PREPEND, PREPENDED_ONE_WORD, SLOT, Blocks, Preset, Template
from .causal_module import CausalModule, PoolOver, Rows
from .changes import Prepend, PrependBlocks

BLOCK_LENGTH = whole("block_length", 1, says="give the tokens of a block, 1 or more.")
WHOLE_SENTENCES = flag("whole_sentences")


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

    #: What is changed.
    PREPENDING: ClassVar[type[Prepend]] = Prepend
    cost = "One pass over the text, up to the output layer: no more than the classical embedding."

    def __init__(
        self,
        model_name_or_path: str | nn.Module,
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
        self.own_changes = [self.PREPENDING(prepend_layers, seed)]
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


class HierarchicalTokenPrependingModule(TokenPrependingModule):
    r"""Token prepending for long texts: two slots for each block of the text, read with mean pooling.

    The text is cut into blocks. At the front stand slots :math:`s_1, \dots, s_m`, one for each, and right before block
    b another, :math:`t_b`:

    .. math:: h^{(l)}_{s_b}, h^{(l)}_{t_b} \leftarrow h^{(l)}_{n_b}, \quad b = 1, \dots, m, \quad l = 1, \dots, p - 1

    where :math:`n_b` is the last token of block b and :math:`h^{(l)}` what layer l (from 0) is given. So every token
    sees through the slots at the front what all blocks come to. Layer 0 is given one saved vector in all slots.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        block_length: Tokens of a block, at least 1. The default of 32 is this package's choice, not the paper's.
        whole_sentences: Whether a block goes on to the end of the sentence that its last token stands in. False: blocks
            are of that length.
        template: Text with one ``{prepend}``, where the slots at the front stand, before one ``{text}``.
        **transformer_kwargs: As for :class:`TokenPrependingModule`. ``pool_over=None`` is ``"text"``: the tokens of the
            text, for mean pooling; ``rows=None`` is ``"all"``.

    Raises:
        ValueError: As :class:`TokenPrependingModule` does; or if sentences cannot be found among the tokens.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*TokenPrependingModule.config_keys, BLOCK_LENGTH.name, WHOLE_SENTENCES.name]
    PREPENDING: ClassVar[type[Prepend]] = PrependBlocks
    method = "Hierarchical token prepending"
    equation = (
        r"e_i = h_i, \quad \text{where layer } l < p \text{ is given } "
        r"h^{(l)}_{s_b}, h^{(l)}_{t_b} \leftarrow h^{(l)}_{n_b} \text{ for each block } b"
    )
    citation = (
        "Xueying Ding, Xingyue Huang, Mingxuan Ju, Liam Collins, Yozen Liu, Leman Akoglu, Neil Shah, Tong Zhao: "
        "Hierarchical Token Prepending: Enhancing Information Flow in Decoder-based LLM Embeddings. ACL 2026, "
        "arXiv:2511.14868."
    )
    cost = (
        "One pass over the text and two slots a block, up to the output layer: about as much as the classical "
        "embedding."
    )

    def __init__(
        self,
        model_name_or_path: str | nn.Module,
        *,
        block_length: int = 32,
        whole_sentences: bool = True,
        template: str = "{prepend}{text}",
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        self.block_length = BLOCK_LENGTH.check(block_length)
        self.whole_sentences = WHOLE_SENTENCES.check(whole_sentences)
        super().__init__(
            model_name_or_path,
            template=template,
            pool_over="text" if pool_over is None else pool_over,
            **transformer_kwargs,
        )

    def layouts(self) -> list[Template]:
        return [replace(self._template, blocks=Blocks(self.block_length, self.whole_sentences))]
