"""ReverseEOL: a prompt's end behind a text, and behind the text in reverse order."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..settings import check_flag
from ..text.layout import Layout
from ..text.tokens import Span
from .base import CausalModule, ModelSource
from .vectors import TokenVectors

# Beginnings of the names of letters of scripts that write no blanks between words.
_WITHOUT_BLANKS = ("CJK ", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")


class ReverseEOLModule(CausalModule):
    r"""The mean of the last hidden states of a prompt around a text and around the text in reverse order.

    .. math:: e = (v_N + v'_{N'}) / 2

    A causal model reads the first words of a text before it knows the last ones; in reverse it knows them. Words are
    reversed; tokens are, where a text's script writes no blanks between words. Without ``average`` the two states are
    parts, which :class:`st_reba.StandardizedSum` adds after it has standardised each::

        module = ReverseEOLModule(path, average=False)
        pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "lasttoken")])
        model = SentenceTransformer(modules=[*pooled, StandardizedSum.fit(pooled, texts)])

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Text with one slot, or a name.
        average: Whether the embedding is the mean of the two states. If not, one follows the other.
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"all"``: a prompt is read at its end.
    """

    config_keys = [*CausalModule.config_keys, "template", "average"]
    method = "ReverseEOL"
    equation = r"e = \frac{1}{2} (v_N + v'_{N'}), \quad v' \text{: of the text in reverse order}"
    citation = (
        "Ailiang Lin, Zhuoyun Li, Yusong Wang, Keyu Mao, Kotaro Funakoshi, Manabu Okumura: ReverseEOL: Improving "
        "Training-free Text Embeddings via Text Reversal in Decoder-only LLMs. arXiv:2606.05858, 2026."
    )
    cost = "Two passes over the text and what follows it; the words before the text run once for all texts."
    has_token_vectors = False
    fixed = {"pool_over": "all", "rows": "last"}

    def __init__(
        self, model_name_or_path: ModelSource, *, template: str = "prompteol", average: bool = True, **settings: Any
    ) -> None:
        super().__init__(model_name_or_path, template=template, **settings)
        self.average = check_flag("average", average)
        self.part_weights = (1.0,) if average else (0.5, 0.5)

    def lay_out(self, inputs: Sequence[Any], prompt: str = "", length: int | None = None) -> list[Layout]:
        [layout] = super().lay_out(inputs, prompt, length)
        pairs = [self.split_input(given, prompt, index) for index, given in enumerate(inputs)]
        turned = [
            {"prompt": own, "text": in_reverse(text, spans)}
            for (own, text), spans in zip(pairs, layout.spans, strict=True)
        ]
        return [layout, *super().lay_out(turned, "", length)]

    def read(self, layout: Layout, turned: Layout) -> TokenVectors:  # type: ignore[override]
        forward, reverse = super().read(layout), super().read(turned)
        if self.average:
            return forward._replace(states=(forward.states + reverse.states) / 2)
        return forward._replace(states=torch.cat([forward.states, reverse.states], dim=-1))


def in_reverse(text: str, spans: Sequence[Span] | None) -> str:
    """Return the words of a text in reverse order, or its tokens if its script writes no blanks between words.

    Args:
        text: The text.
        spans: Characters that each of its tokens holds, without those that are cut off; None if they are not known. A
            character that several tokens share is kept whole.
    """
    if spans:
        text = text[: spans[-1][1]]
    start = spans[0][0] if spans else 0
    letters = [letter for letter in text[start:] if letter.isalpha()]
    if 2 * sum(unicodedata.name(letter, "").startswith(_WITHOUT_BLANKS) for letter in letters) <= len(letters):
        # A blank text has no words.
        return " ".join(reversed(text[start:].split())) or text
    if spans is None:
        return text[::-1]
    ends = [start, *(end for (_, end), (following, _) in pairwise(spans) if following >= end), len(text)]
    return "".join(text[first:last] for first, last in reversed([*pairwise(ends)]))
