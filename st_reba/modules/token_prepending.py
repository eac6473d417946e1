"""Token prepending: a slot before the text takes the last token's state of the layer below."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..lm.attention.kernels import without_autocast
from ..lm.passes import Replace, gather_positions
from ..lm.views import depth
from ..settings import check, check_int, first_not_none
from ..text.layout import PREPENDED, Layout
from ..text.presets import PREPENDED_ONE_WORD, Preset
from ..text.templates import PREPEND, TEXT
from .base import CausalModule, ModelSource
from .stored import check_magnitudes
from .vectors import TokenVectors, fill


class TokenPrependingModule(CausalModule):
    r"""A slot before the text is given, in the first layers, what the last token is given there.

    .. math:: h^{(l)}_{s} \leftarrow h^{(l)}_{n}, \quad l = 1, \dots, p - 1

    with the input :math:`h^{(l)}` of layer l, from 0. Layer 0 is given one vector for all texts in the slot, drawn from
    N(0, 1) and saved with the model.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        prepend_layers: p, from 1 to the layers that run. None: three in ten of them, 2 at least.
        template: Text with one ``{prepend}`` before one ``{text}``. None: PromptEOL's question.
        seed: Seed of the vector.
        initial_state: Vector in the slot, (D,), before the architecture scales it or adds positions. None: drawn.
        **settings: As for :class:`CausalModule`. ``output_layer`` None: 27 of 32 layers. ``final_norm`` None: False.
    """

    config_keys = [*CausalModule.config_keys, "template", "prepend_layers", "seed", "rows"]
    method = "Token prepending"
    equation = r"e = h_n, \quad \text{where layer } l < p \text{ is given } h^{(l)}_s \leftarrow h^{(l)}_n"
    citation = (
        "Yuchen Fu, Zifeng Cheng, Zhiwei Jiang, Zhonghui Wang, Yafeng Yin, Zhengliang Li, Qing Gu: Token Prepending: A "
        "Training-Free Approach for Eliciting Better Sentence Embeddings from LLMs. ACL 2025."
    )
    cost = "One pass over the text, up to the output layer: no more than the classical embedding."
    prepends = True
    defaults = {"pool_over": "all", "output_layer": 27 / 32, "final_norm": False}
    FILE: ClassVar[str] = "token_prepending.safetensors"

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        prepend_layers: int | None = None,
        template: str | None = None,
        seed: int = 0,
        initial_state: Tensor | None = None,
        **settings: Any,
    ) -> None:
        preset = PREPENDED_ONE_WORD if template is None else Preset(template)
        has_slot = PREPEND in str(preset.template).partition(TEXT)[0]
        check("template", template, has_slot, f"give text with one {PREPEND} before {TEXT}.")
        check_int("seed", seed, 0, 2**63 - 1)
        super().__init__(model_name_or_path, template=preset, **settings)
        count = depth(self.model)
        default = min(count, max(2, round(0.3 * count)))
        advice = f"give a number of layers from 1 to {count}, or None for three in ten."
        self.prepend_layers = check_int("prepend_layers", first_not_none(prepend_layers, default), 1, count, advice)
        self.seed = seed
        width = cast(Tensor, self.lm.embeddings.weight).shape[1]
        drawn = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        self.initial_state: Tensor = first_not_none(initial_state, drawn)
        advice = f"give {width} values, as many as the model's input embeddings, or save the model again."
        shape = tuple(self.initial_state.shape)
        check("shape of initial_state", shape, shape == (width,), advice)
        check_magnitudes({"initial_state": self.initial_state}, type(self).__name__)
        self._scale = _scale_of(self.lm.embeddings, type(self.model).__name__)
        self.lm.check_takes_embeddings()

    def read(self, layout: Layout) -> TokenVectors:
        is_slot = layout.copy_index == PREPENDED

        def enter(states: Tensor) -> Tensor:
            return fill(states, is_slot, self._scale * self.initial_state)

        def renew(states: Tensor) -> Tensor:
            return fill(states, is_slot, gather_positions(states, layout.ends)[:, None])

        layers = self.lm.layers[1 : self.prepend_layers]
        states = self.run(layout, Replace([self.lm.embeddings], outputs=enter), Replace(layers, inputs=renew))
        return TokenVectors.pick(states, layout, self.selected(layout))

    @classmethod
    def load_config(cls, model_name_or_path: str, *args: Any, **where: Any) -> dict[str, Any]:
        config = super().load_config(model_name_or_path, *args, **where)
        file = cls.load_file_path(model_name_or_path, cls.FILE, *args, **where)
        if file is not None:
            config["initial_state"] = load_file(file).get("initial_state", torch.empty(0))
        return config

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        super().save(output_path, *args, **kwargs)
        save_file({"initial_state": self.initial_state}, Path(output_path, self.FILE), metadata={"format": "pt"})


def _scale_of(embeddings: nn.Module, model: str) -> float:
    """Return the factor by which the input embeddings of a model multiply their table, as in Gemma."""
    table = cast(Tensor, embeddings.weight)
    if table.device.type != "meta":
        with torch.inference_mode(), without_autocast(table.device):
            rows = table[:8].double()
            found = embeddings(torch.arange(len(rows), device=table.device)).double()
            scale = float((rows * found).sum() / rows.square().sum())
        if torch.allclose(found, rows * scale, rtol=1e-2, atol=1e-3 * float(found.abs().max())):
            return scale
    raise ValueError(
        f"The {type(embeddings).__name__} of {model} does more than to multiply a table of input embeddings, so no "
        "vector can be put between them. Load the model without device_map, or use another model."
    )
