"""MetaEOL: read a text at the end of several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..lm.prefixes import Past, read_only_cache
from ..settings import check
from ..text.layout import NOT_TEXT, Layout
from ..text.presets import PRESET_SETS, Preset, preset
from ..text.templates import check_template_length
from .base import CausalModule, ModelSource
from .vectors import TokenVectors

# Largest number of prompts. A configuration that asks for more is a mistake or an attack.
_MOST = 64


class MetaEOLModule(CausalModule):
    r"""Vector p is the last hidden state of prompt p.

    .. math:: e_p = v^{(p)}_{N_p}, \quad p = 1, \dots, P

    The embedding is their mean: use ``Pooling("mean")``. All prompts get the same part of a text.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        templates: Texts with one slot each, or names, 1 to 64; or ``"ck"`` for Pretended CoT and Knowledge. None: the
            paper's eight. Settings that the templates' authors share are used unless they are given.
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"all"``: a prompt is read at its end.
    """

    config_keys = [*CausalModule.config_keys, "templates"]
    method = "MetaEOL"
    equation = r"e = \frac{1}{P} \sum_{p=1}^{P} v^{(p)}_{N_p}"
    citation = (
        "Yibin Lei, Di Wu, Tianyi Zhou, Tao Shen, Yu Cao, Chongyang Tao, Andrew Yates: Meta-Task Prompting Elicits "
        "Embeddings from Large Language Models. ACL 2024."
    )
    cost = "A pass over the text and what follows it for each prompt; the words before the text run once for all texts."
    has_token_vectors = False
    fixed = {"pool_over": "all", "rows": "last"}

    def __init__(
        self, model_name_or_path: ModelSource, *, templates: str | Sequence[str] | None = None, **settings: Any
    ) -> None:
        super().__init__(model_name_or_path, template=_presets(templates), **settings)
        self.templates = [str(template) for template in self._templates]

    def read(self, layout: Layout, *further: Layout) -> TokenVectors:
        layouts = (layout, *further)
        rows, columns = len(layout.input_ids), max(each.input_ids.shape[1] for each in layouts)
        fits = len(layouts) * rows * columns <= self.TOKENS_PER_THREAD * torch.get_num_threads()
        # Fewer, larger passes.
        passes = [_join(layouts)] if fits or self.lm.device.type != "cpu" else layouts
        vectors = [super(MetaEOLModule, self).read(each) for each in passes]

        def by_text(name: str) -> Tensor:
            values = torch.cat([getattr(of_pass, name) for of_pass in vectors])
            return values.unflatten(0, (-1, rows)).transpose(0, 1).flatten(1, 2)

        return TokenVectors(by_text("states"), by_text("mask"), by_text("ids"))


def _join(layouts: Sequence[Layout]) -> Layout:
    """Return P layouts of B rows as one of P * B rows, behind a past each."""
    columns = max(layout.input_ids.shape[1] for layout in layouts)

    def padded(name: str, padding: int) -> Tensor:
        parts = [getattr(layout, name) for layout in layouts]
        return torch.cat([pad(part, (0, columns - part.shape[1]), value=padding) for part in parts])

    past = _join_pasts([layout.past for layout in layouts], len(layouts[0].input_ids))
    ids, mask, copies = padded("input_ids", 0), padded("attention_mask", False), padded("copy_index", NOT_TEXT)
    return Layout(ids, mask, copies, past=past)


def _join_pasts(pasts: Sequence[Past | None], rows: int) -> Past | None:
    """Return the pasts of P layouts, each of them for B rows; None is one of no tokens."""
    known = next((past for past in pasts if past is not None), None)
    if known is None:
        return None
    lengths = torch.cat([torch.tensor([0]) if past is None else past.lengths for past in pasts])

    def padded(layer: int, side: str) -> Tensor:
        nothing = getattr(known.cache.layers[layer], side)[:, :, :0]
        parts = [nothing if past is None else getattr(past.cache.layers[layer], side) for past in pasts]
        return torch.cat([pad(part, (0, 0, 0, int(lengths.max()) - part.shape[2])) for part in parts])

    layers = range(len(known.cache.layers))
    cache = read_only_cache((padded(layer, "keys"), padded(layer, "values")) for layer in layers)
    return Past(cache, lengths.repeat_interleave(rows))


def _presets(templates: str | Sequence[str] | None) -> Sequence[Preset]:
    if templates is None or (isinstance(templates, str) and templates in PRESET_SETS):
        return PRESET_SETS[templates or "meta-tasks"]
    sets = f"one of {sorted(PRESET_SETS)}, or None for the paper's eight."
    advice = f"give a list of 1 to {_MOST} templates, each a text with one {{text}} or a name in st_reba.TEMPLATES"
    is_list = isinstance(templates, (list, tuple)) and 1 <= len(templates) <= _MOST
    check("templates", templates, is_list, f"{advice}, or {sets}")
    presets = [preset(template) for template in templates]
    check_template_length([str(item.template) for item in presets])
    return presets
