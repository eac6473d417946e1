"""Token prepending: a slot before the text takes the last token's state of the layer below."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..hub.loading import backbone_of
from ..hub.saved_files import ON_THE_HUB
from ..lm.attention.kernels import without_autocast
from ..lm.passes import Replace, gather_positions
from ..lm.views import depth
from ..settings import check, check_int, first_not_none
from ..text.layout import PREPENDED, Layout
from ..text.presets import PREPENDED_ONE_WORD, Preset
from ..text.templates import PREPEND, TEXT
from .base import CausalModule
from .contrastive import stop_early
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
    FILE: ClassVar[str] = "token_prepending.safetensors"

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        prepend_layers: int | None = None,
        template: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        preset = PREPENDED_ONE_WORD if template is None else Preset(template)
        has_slot = PREPEND in str(preset.template).partition(TEXT)[0]
        check("template", template, has_slot, f"give text with one {PREPEND} before {TEXT}.")
        check_int("seed", seed, 0, 2**63 - 1)
        super().__init__(model_name_or_path, template=stop_early(preset), **settings)
        run = depth(self.model)
        usual = min(run, max(2, round(0.3 * run)))
        advice = f"give a number of layers from 1 to {run}, or None for three in ten."
        self.prepend_layers = check_int("prepend_layers", first_not_none(prepend_layers, usual), 1, run, advice)
        self.seed = seed
        width, generator = cast(Tensor, self.lm.embeddings.weight).shape[1], torch.Generator().manual_seed(seed)
        #: Vector in the slot, before the architecture scales it or adds positions, (D,).
        self.initial_state = torch.randn(width, generator=generator, dtype=torch.float32)
        self._scale = _scale_of(self.lm.embeddings)

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
    def load(cls, model_name_or_path: str | PathLike[str], subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        _load_vector(module, fspath(model_name_or_path), subfolder, kwargs)
        return module

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        super().save(output_path, *args, **kwargs)
        save_file({"initial_state": self.initial_state}, Path(output_path, self.FILE), metadata={"format": "pt"})


def _load_vector(module: TokenPrependingModule, name: str, subfolder: str, where: Mapping[str, Any]) -> None:
    """Replace the vector of a module by the saved one, if there is one."""
    place = name if subfolder else backbone_of(name)
    file = module.load_file_path(
        place, module.FILE, subfolder=subfolder, **{key: where[key] for key in ON_THE_HUB if key in where}
    )
    if file is None:
        return
    state, own = load_file(file).get("initial_state"), module.initial_state
    if state is None or state.shape != own.shape:
        raise ValueError(
            f'{file} does not have {len(own)} values under "initial_state", as many as the model\'s input embeddings. '
            "They are of two models; save the model again."
        )
    check_magnitudes({"initial_state": state}, type(module).__name__)
    own.copy_(state)


def _scale_of(embeddings: nn.Module) -> float:
    """Return the factor by which input embeddings multiply their table, as in Gemma."""
    table = cast(Tensor, embeddings.weight)
    if table.device.type != "meta":
        with torch.inference_mode(), without_autocast(table.device):
            rows = table[:8].double()
            found = embeddings(torch.arange(len(rows), device=table.device)).double()
            scale = float((rows * found).sum() / rows.square().sum())
        if torch.allclose(found, rows * scale, rtol=1e-2, atol=1e-3 * float(found.abs().max())):
            return scale
    raise ValueError(
        f"{type(embeddings).__name__} does more than to multiply a table of input embeddings, so no vector can be put "
        "between them. Load the model without device_map, or use another model."
    )
