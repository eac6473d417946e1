"""The layout of a batch that is laid out in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from st_reba.text.layout import Layout
from st_reba.text.layouts import lay_out
from st_reba.text.templates import Template


def laid_out(
    template: str | Template, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **settings: Any
) -> Layout:
    parsed = Template.parse(template) if isinstance(template, str) else template
    [layout] = lay_out([parsed], tokenizer, texts, **settings)
    return layout
