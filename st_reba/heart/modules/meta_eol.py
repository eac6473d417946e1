"""MetaEOL: read a text at the end of several prompts.

Yibin Lei, Di Wu, Tianyi Zhou, Tao Shen, Yu Cao, Chongyang Tao, Andrew Yates: Meta-Task Prompting Elicits Embeddings
from Large Language Models. ACL 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer

from st_reba.text.templates import META_TASKS

from ..settings import first_not_none
from ..text.layout import Layout
from .base import CausalModule
from .vectors import TokenVectors


class MetaEOLModule(CausalModule):
    r"""Vector p is the last hidden state of prompt p.

    .. math:: e_p = v^{(p)}_{N_p}, \quad p = 1, \dots, P

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        templates: Texts with one slot each, or names, 1 to 64. None: the paper's eight.
        **settings: As for :class:`CausalModule`.
    """

    config_keys = [*CausalModule.config_keys, "templates"]
    equation = r"e = \frac{1}{P} \sum_{p=1}^{P} v^{(p)}_{N_p}"
    has_token_vectors = False

    def __init__(
        self, model_name_or_path: str | Transformer, *, templates: Sequence[str] | None = None, **settings: Any
    ) -> None:
        if templates is None:
            settings["normalize_text"] = first_not_none(settings.get("normalize_text"), True)
        elif isinstance(templates, str) or not 1 <= len(templates) <= 64:
            raise ValueError(f"templates={templates!r}: give a list of 1 to 64 templates, or None for the paper's.")
        settings = {**settings, "pool_over": "all", "rows": "last"}
        super().__init__(model_name_or_path, template=META_TASKS if templates is None else templates, **settings)
        self.templates = [str(template) for template in self.layouter.templates]

    def read(self, *layouts: Layout) -> TokenVectors:
        vectors = [super(MetaEOLModule, self).read(layout) for layout in layouts]
        return TokenVectors(*(torch.cat(parts, dim=1) for parts in zip(*vectors, strict=True)))
