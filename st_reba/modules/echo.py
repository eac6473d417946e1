"""Echo embeddings: read a text in its repetition.

Jacob Mitchell Springer, Suhas Kotha, Daniel Fried, Graham Neubig, Aditi Raghunathan: Repetition Improves Language Model
Embeddings. ICLR 2025.
"""

from __future__ import annotations

from typing import Any, Literal

from ..settings import check_choice, check_int
from ..text.templates import Template
from .base import CausalModule, ModelSource

#: Largest number of copies of a text. A configuration that asks for more is a mistake or an attack.
MAX_COPIES = 1024


class EchoModule(CausalModule):
    r"""Word i is its state in the last of k copies, :math:`v_{(k-1)n+i}`.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        repetitions: Number of copies, k >= 2. None: as many as in ``template``, or 2.
        template: Text with k slots, or a name such as ``"springer"``. None: the bare text k times.
        pool_copies: ``"last"`` reads copy k, ``"repeated"`` reads copies 2 to k.
        **settings: As for :class:`CausalModule`.
    """

    config_keys = [*CausalModule.config_keys, "repetitions", "template", "pool_copies", "rows"]
    method = "Echo"
    equation = r"e_i = v_{(k-1)n+i}, \quad i = 1, \dots, n"
    citation = (
        "Jacob Mitchell Springer, Suhas Kotha, Daniel Fried, Graham Neubig, Aditi Raghunathan: "
        "Repetition Improves Language Model Embeddings. ICLR 2025."
    )
    repeats_text = True

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        repetitions: int | None = None,
        template: str | None = None,
        pool_copies: Literal["last", "repeated"] = "last",
        **settings: Any,
    ) -> None:
        check_choice("pool_copies", pool_copies, "last", "repeated")
        copies = check_repetitions(2 if repetitions is None else repetitions, 2)
        template = "{text}" * copies if template is None else template
        copies = Template.parse(template).copies
        if copies < 2 or copies != (repetitions or copies):
            raise ValueError(
                f"template={template!r} has {copies} slots and repetitions={repetitions}: give a template with as many "
                "slots as repetitions, at least 2, or leave one of the two out. CausalTransformer reads one copy."
            )
        super().__init__(model_name_or_path, template=template, **settings)
        self.repetitions, self.pool_copies = check_repetitions(copies, 2), pool_copies
        self.copies_read = range(1 if pool_copies == "repeated" else copies - 1, copies)


def check_repetitions(repetitions: Any, least: int) -> int:
    """Return a number of copies of the text that is allowed."""
    advice = f"give a whole number from {least} to {MAX_COPIES}, the number of copies of the text, such as 2."
    return check_int("repetitions", repetitions, least, MAX_COPIES, advice)
