"""MetaEOL: read a text at the end of several prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from ..lm.prefixes import Past
from ..settings import check
from ..text.layout import NOT_TEXT, Layout
from ..text.presets import PRESET_SETS, Preset, preset
from ..text.templates import check_template_length
from .base import CausalModule, PoolOver
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
        pool_over: ``"all"``: a prompt is read at its end.
        **settings: As for :class:`CausalModule`.
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

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        templates: str | Sequence[str] | None = None,
        pool_over: PoolOver = "all",
        **settings: Any,
    ) -> None:
        check("pool_over", pool_over, pool_over == "all", 'a prompt is read at its end, after the text; use "all".')
        settings = {**settings, "pool_over": "all", "rows": "last"}
        super().__init__(model_name_or_path, template=_presets(templates), **settings)
        self.templates = [str(template) for template in self._templates]

    def read(self, layout: Layout, *further: Layout) -> TokenVectors:
        layouts = (layout, *further)
        rows, columns = len(layouts[0].input_ids), max(layout.input_ids.shape[1] for layout in layouts)
        fits = len(layouts) * rows * columns <= self.TOKENS_PER_THREAD * torch.get_num_threads()
        if fits or self.lm.device.type != "cpu":
            # Fewer, larger passes.
            read = [super().read(_join(layouts))]
        else:
            read = [super(MetaEOLModule, self).read(own) for own in layouts]

        def by_text(values: list[Tensor]) -> Tensor:
            return torch.cat(values).unflatten(0, (-1, rows)).transpose(0, 1).flatten(1, 2)

        states, masks, ids = ([own.states for own in read], [own.mask for own in read], [own.ids for own in read])
        return TokenVectors(by_text(states), by_text(masks), by_text(ids))


def _join(layouts: Sequence[Layout]) -> Layout:
    """Return P layouts of B rows as one of P * B rows, behind a past each."""
    columns = max(layout.input_ids.shape[1] for layout in layouts)

    def concatenate(parts: Iterable[Tensor], padding: int) -> Tensor:
        return torch.cat([pad(part, (0, columns - part.shape[1]), value=padding) for part in parts])

    return Layout(
        concatenate((layout.input_ids for layout in layouts), 0),
        concatenate((layout.attention_mask for layout in layouts), False),
        concatenate((layout.copy_index for layout in layouts), NOT_TEXT),
        past=_join_pasts([layout.past for layout in layouts], len(layouts[0].input_ids)),
    )


def _join_pasts(pasts: Sequence[Past | None], rows: int) -> Past | None:
    """Return the pasts of P layouts, each of them for B rows; None is one of no tokens."""
    known = next((past for past in pasts if past is not None), None)
    if known is None:
        return None
    lengths = torch.cat([torch.tensor([0]) if past is None else past.lengths for past in pasts])
    layers: list[Any] = [
        _SeveralKept([None if past is None else past.cache.layers[layer] for past in pasts])
        for layer in range(len(known.cache.layers))
    ]
    return Past(Cache(layers=layers), lengths.repeat_interleave(rows))


class _SeveralKept(DynamicLayer):
    """Keys and values of one layer's prefixes, one for each of P layouts, that a pass reads and does not extend."""

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()
        longest = max((own for own in kept if own is not None), key=lambda own: own.keys.shape[2])
        self.keys, self.values, self.is_initialized = longest.keys, longest.values, True
        self._kept, self._length = kept, int(longest.keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._behind("keys", key_states), self._behind("values", value_states)

    def _behind(self, side: str, new: Tensor) -> Tensor:
        """Return the states of each layout's prefix, padded, and the new ones, (P * B, G, M, d)."""
        (count, heads, length, size), longest = new.shape, self._length
        whole = new.new_zeros(len(self._kept), count // len(self._kept), heads, longest + length, size)
        for rows, own in zip(whole, self._kept, strict=True):
            if own is not None:
                rows[:, :, : own.keys.shape[2]] = getattr(own, side)
        whole[..., longest:, :] = new.unflatten(0, whole.shape[:2])
        return whole.flatten(0, 1)


def _presets(templates: str | Sequence[str] | None) -> Sequence[Preset]:
    if templates is None:
        return PRESET_SETS["meta-tasks"]
    if isinstance(templates, str) and templates in PRESET_SETS:
        return PRESET_SETS[templates]
    if isinstance(templates, str) or not isinstance(templates, Sequence) or not 1 <= len(templates) <= _MOST:
        given = f"{len(templates)} of them" if isinstance(templates, (list, tuple)) else repr(templates)
        raise ValueError(
            f"templates: {given} given; give a list of 1 to {_MOST} templates, each a text with one {{text}} or a "
            f"name in st_reba.TEMPLATES, or one of {sorted(PRESET_SETS)}, or None for the paper's eight."
        )
    presets = [preset(template) for template in templates]
    check_template_length([str(own.template) for own in presets])
    return presets
