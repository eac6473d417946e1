"""Hierarchical token prepending: every block of a long text hands on, layer by layer, what its end knew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from sentence_transformers.base.modules import Transformer

from ..settings import flag, whole
from ..text.templates import Blocks, Template
from .causal_module import PoolOver
from .changes import Prepend, PrependBlocks
from .token_prepending import TokenPrependingModule

BLOCK_LENGTH = whole("block_length", 1, says="give the tokens of a block, 1 or more.")
WHOLE_SENTENCES = flag("whole_sentences")


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

    def __init__(
        self,
        model_name_or_path: str | Transformer,
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

    @property
    def cost(self) -> str:
        return (
            "One pass over the text and two slots a block, up to the output layer: about as much as the classical "
            "embedding."
        )

    def layouts(self) -> list[Template]:
        return [replace(self._template, blocks=Blocks(self.block_length, self.whole_sentences))]
