"""Echo embeddings: the text is said twice, and read in its repetition."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal

from torch import nn

from ..settings import Setting, choice, optional
from ..text.templates import Template
from .causal_module import CausalModule, PoolOver, Rows, repetitions_from

PoolCopies = Literal["last", "repeated"]

REPETITIONS = repetitions_from(2)
POOL_COPIES: Setting[PoolCopies] = choice("pool_copies", "last", "repeated")


class EchoModule(CausalModule):
    r"""Echo-k: the text stands k times, and word i is its state in the last copy, :math:`v_{(k-1)n+i}`.

    (Table 1 of the ReBA paper; Springer et al., "Repetition Improves Language Model Embeddings".)

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        repetitions: k >= 2, how often the text stands in the input. None: as often as in ``template``, or 2.
        template: Text with k slots ``{text}``, or ``"springer"``. None: the bare text k times.
        pool_copies: ``"last"`` reads copy k; ``"repeated"`` copies 2 to k, (k-1)n tokens (Table 1's mean pooling,
            divided by (k-1)n).
        pool_over: ``"text"`` or ``"all"``; see :class:`CausalModule`.
        rows: ``"all"`` hands on every token that is read. ``"last"`` computes and hands on the last alone, (B, 1, D).
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If k < 2, the template has another number of slots than k, or the model is not causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "repetitions", "template", "pool_copies", "rows"]
    repeats_text = True
    method = "Echo"
    equation = r"e_i = v_{(k-1)n+i}, \quad i = 1, \dots, n"
    citation = (
        "Jacob Mitchell Springer, Suhas Kotha, Daniel Fried, Graham Neubig, Aditi Raghunathan: "
        "Repetition Improves Language Model Embeddings. ICLR 2025."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        repetitions: int | None = None,
        template: str | None = None,
        pool_copies: PoolCopies = "last",
        pool_over: PoolOver = "text",
        rows: Rows = "all",
        **transformer_kwargs: Any,
    ) -> None:
        self.pool_copies = POOL_COPIES.check(pool_copies)
        optional(REPETITIONS).check(repetitions)
        parsed = Template.repeat(repetitions or 2) if template is None else Template.parse(template)
        if parsed.copies != (repetitions or parsed.copies) or parsed.copies < 2:
            remedy = (
                "Repeat {text} in it, or read it once with CausalTransformer."
                if repetitions is None
                else "Leave one of the two out."
            )
            raise ValueError(
                f"The template {template!r} has {parsed.copies} slots and repetitions={repetitions}: Echo needs a "
                f"template with as many slots as repetitions, at least 2. {remedy}"
            )
        self.repetitions = REPETITIONS.check(parsed.copies)
        super().__init__(model_name_or_path, template=parsed, pool_over=pool_over, rows=rows, **transformer_kwargs)

    @property
    def no_chunks(self) -> str:
        if self.pool_copies == "repeated" and self.copies > 2:
            return 'reads a token in several copies, pool_copies="repeated": use pool_copies="last".'
        return super().no_chunks

    @property
    def copies_read(self) -> tuple[int, int]:
        last = self.repetitions - 1
        return (1 if self.pool_copies == "repeated" else last), last
