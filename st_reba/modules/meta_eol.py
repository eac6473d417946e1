"""MetaEOL: one text read at the end of several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from torch import nn

from ..settings import Setting, choice
from ..text.layout import Layout
from ..text.templates import PRESET_SETS, Preset, Template, agreed, check_template_length, preset
from .causal_module import CausalModule, PoolOver

#: The most prompts, far above what helps: a configuration that asks for more is a mistake or an attack.
MAX_TEMPLATES = 64


AT_THE_END: Setting[PoolOver] = choice(
    "pool_over", "all", says='MetaEOL reads each prompt at its end, behind the text; use "all".'
)


class MetaEOLModule(CausalModule):
    r"""A text stands in P prompts, and vector p is the last hidden state of the last token of prompt p.

    .. math:: e_p = v^{(p)}_{N_p}, \quad p = 1, \dots, P

    (Lei et al., ACL 2024.) The embedding is their mean: use ``Pooling("mean")``. The B texts of a batch run as one
    batch of B * P rows; all prompts are given the same part of a text.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        templates: P texts with one ``{text}`` each, or names in :data:`st_reba.TEMPLATES`; 1 to 64. None: the paper's
            eight, :data:`st_reba.META_TASKS`. ``"ck"``: Pretended CoT and Knowledge. What the presets say alike of
            ``output_layer``, ``final_norm`` and ``normalize_text`` holds unless it is given: the paper's eight change
            the texts, and Pretended CoT and Knowledge are read after the last layer but one, without the final norm.
        pool_over: ``"all"``: a prompt is read at its end.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If there are too few or too many templates, one has another number of slots, or the longest leaves
            no room for text, or the model is not causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "templates"]
    no_words = "hands on one vector a prompt, not one a token"
    method = "MetaEOL"
    equation = r"e = \frac{1}{P} \sum_{p=1}^{P} v^{(p)}_{N_p}"
    citation = (
        "Yibin Lei, Di Wu, Tianyi Zhou, Tao Shen, Yu Cao, Chongyang Tao, Andrew Yates: Meta-Task Prompting Elicits "
        "Embeddings from Large Language Models. ACL 2024."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        templates: str | Sequence[str] | None = None,
        pool_over: PoolOver = "all",
        **transformer_kwargs: Any,
    ) -> None:
        presets = _presets(templates)
        self._templates = [self._parsed(preset.template) for preset in presets]
        self.templates = [str(template) for template in self._templates]
        self.rows_per_text = len(presets)
        super().__init__(
            model_name_or_path,
            template=self._templates[0],
            preset=agreed(presets),
            pool_over=AT_THE_END.check(pool_over),
            rows="last",
            **transformer_kwargs,
        )

    @property
    def cost(self) -> str:
        """What an embedding costs beside the classical one."""
        count = len(self.templates)
        if not self.keeps_prefixes:
            return (
                f"{count} passes, in one batch, each over the text and a prompt around it: {count} times the classical "
                "embedding of a text as long as text and prompt."
            )
        return (
            f"{count} passes, in one batch, each over the text and what stands behind it in a prompt, and once for all "
            f"texts over what stands before them: {count} times the classical embedding of a text so much longer."
        )

    def layouts(self) -> list[Template]:
        return self._templates

    def _lay_out(self, texts: Sequence[str], prompt: str | Sequence[str], asked_length: int | None) -> list[Layout]:
        return [Layout.interleaved(super()._lay_out(texts, prompt, asked_length))]

    def _handed_on(self, features: dict[str, Any], layout: Layout, **kwargs: Any) -> dict[str, Any]:
        """The features with the vectors of a text's P prompts as its tokens, which are all real: (B, P, D).

        A text without tokens has zero vectors.
        """
        found = super()._handed_on(features, layout, **kwargs)
        names = ("token_embeddings", "attention_mask", "input_ids")
        # One token a row, so that the rows of a text are its tokens now.
        return {**found, **{name: found[name].unflatten(0, (-1, len(self.templates)))[:, :, 0] for name in names}}


def _presets(templates: str | Sequence[str] | None) -> Sequence[Preset]:
    if templates is None:
        return PRESET_SETS["meta-tasks"]
    if isinstance(templates, str) and templates in PRESET_SETS:
        return PRESET_SETS[templates]
    if isinstance(templates, str) or not isinstance(templates, Sequence) or not 1 <= len(templates) <= MAX_TEMPLATES:
        given = f"{len(templates)} of them" if isinstance(templates, (list, tuple)) else repr(templates)
        raise ValueError(
            f"templates: {given} given; give a list of 1 to {MAX_TEMPLATES} templates, each a text with one {{text}} "
            f"or a name in st_reba.TEMPLATES, or one of {sorted(PRESET_SETS)}, or None for the paper's eight."
        )
    check_template_length([str(Template.parse(template)) for template in templates])
    return [preset(template) for template in templates]
