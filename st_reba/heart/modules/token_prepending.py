"""Token prepending: a slot before the text takes the last token's state of the layer below.

Yuchen Fu et al.: Token Prepending: A Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs. ACL
2025.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from st_reba.text.templates import PREPENDED_ONE_WORD, preset

from ..lm.passes import Replace
from ..settings import check_int, first_not_none
from ..text.layout import PREPENDED, Layout
from ..text.templates import PREPEND
from .base import CausalModule, PoolOver
from .vectors import TokenVectors


class TokenPrependingModule(CausalModule):
    r"""A slot before the text is given, in the first layers, what the last token is given there.

    .. math:: h^{(l)}_{s} \leftarrow h^{(l)}_{n}, \quad l = 1, \dots, p - 1

    The first layer is given a random vector in the slot.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        prepend_layers: p, 1 or more. None: three in ten of the layers, at least 2.
        template: Text with one ``{prepend}`` before one ``{text}``. None: PromptEOL's.
        seed: Seed of the vector.
        **settings: As for :class:`CausalModule`. ``output_layer`` None: 27 of 32 layers. ``final_norm`` None: False.
    """

    config_keys = [*CausalModule.config_keys, "template", "prepend_layers", "seed"]
    equation = r"e = h_n, \quad h^{(l)}_{s} \leftarrow h^{(l)}_{n}"

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        prepend_layers: int | None = None,
        template: str | None = None,
        seed: int = 0,
        pool_over: PoolOver | None = None,
        output_layer: int | float | None = None,
        final_norm: bool | None = None,
        **settings: Any,
    ) -> None:
        known = PREPENDED_ONE_WORD if template is None else preset(template)
        if PREPEND not in known.template:
            raise ValueError(f"template={template!r}: give text with one {PREPEND} before {{text}}.")
        for name in ("rows", "normalize_text"):
            settings[name] = first_not_none(settings.get(name), getattr(known, name))
        super().__init__(
            model_name_or_path,
            template=known.template,
            pool_over=first_not_none(pool_over, known.pool_over, "all"),
            output_layer=first_not_none(output_layer, known.output_layer, 27 / 32),
            final_norm=first_not_none(final_norm, known.final_norm, False),
            **settings,
        )
        run = len(self.lm.layers)
        usual = min(run, max(2, round(0.3 * run)))
        self.prepend_layers = check_int("prepend_layers", first_not_none(prepend_layers, usual), 1, run)
        self.seed = seed
        width, generator = self.lm.embeddings.weight.shape[1], torch.Generator().manual_seed(seed)
        # Some architectures scale their embeddings, such as Gemma 3.
        scale = float(getattr(self.lm.embeddings, "embed_scale", 1))
        self._vector = scale * torch.randn(width, generator=generator, dtype=torch.float32)

    def read(self, layout: Layout) -> TokenVectors:
        is_slot = layout.copy_index == PREPENDED
        source = torch.where(is_slot, layout.ends[:, None], torch.arange(is_slot.shape[1]))

        def enter(states: Tensor) -> Tensor:
            return torch.where(is_slot.to(states.device)[..., None], self._vector.to(states), states)

        def renew(states: Tensor) -> Tensor:
            return states.gather(1, source.to(states.device)[..., None].expand_as(states))

        layers = list(self.lm.layers[1 : self.prepend_layers])
        states = self.run(layout, Replace([self.lm.embeddings], outputs=enter), Replace(layers, inputs=renew))
        return TokenVectors.pick(states, layout, self.selected(layout))
