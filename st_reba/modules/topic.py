"""Topic: the end of a prompt that asks for a text's topic, at several layers, and the mean of its last copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..lm.passes import Capture, gather_positions
from ..lm.views import depth
from ..settings import check, check_flag, first_not_none
from ..text.layout import Layout
from ..text.presets import preset
from ..text.templates import Template
from .base import CausalModule, ModelSource
from .early_late import EarlyLateModule, check_widths
from .vectors import TokenVectors

# Largest number of lower layers. A configuration that asks for more is a mistake or an attack.
_MOST = 64


class TopicModule(CausalModule):
    r"""The last token at the last layer and at lower ones, after each word of the last copy.

    .. math:: e_i = [v_{(k-1)n+i} ; v_N ; h^{(l)}_N], \quad i = 1, \dots, n

    With ``Pooling("mean")`` an embedding is the mean of the copy, followed by states of the last token N. These parts
    share a basis: :class:`st_reba.StandardizedSum`, fitted on fifty plain texts or more, adds them::

        module = TopicModule(path)
        pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")])
        model = SentenceTransformer(modules=[*pooled, StandardizedSum.fit(pooled, texts)])

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Text with one slot or more, or a name: ``"echo-topic"``, ``"topic"``, or either with ``"-zh"``.
        mean: Whether the words of the last copy are a part. None: where the template repeats the text. Without them a
            text has one vector.
        lower_layers: Layers at which the last token is read too, counted from 1, or from the top if negative, or as a
            share of the layers that run.
        **settings: As for :class:`CausalModule`. ``rows`` follows from ``mean``.
    """

    config_keys = [*CausalModule.config_keys, "template", "mean", "lower_layers"]
    method = "Topic"
    equation = r"e_i = [v_{(k-1)n+i} ; v_N ; h^{(l)}_N], \quad i = 1, \dots, n, \quad N: \text{the end of the prompt}"
    citation = (
        "The prompt begins as in Bowen Zhang, Kehua Chang, Chunping Li: Simple Techniques for Enhancing Sentence "
        "Embeddings in Generative Language Models. ICIC 2024. The repetition: Jacob Mitchell Springer, Suhas Kotha, "
        "Daniel Fried, Graham Neubig, Aditi Raghunathan: Repetition Improves Language Model Embeddings. ICLR 2025."
    )
    has_token_vectors = False
    repeats_text = True

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        template: str = "echo-topic",
        mean: bool | None = None,
        lower_layers: Sequence[float] = (0.93,),
        **settings: Any,
    ) -> None:
        copies = Template.parse(preset(template).template).copies
        self.mean = check_flag("mean", first_not_none(mean, copies > 1))
        super().__init__(model_name_or_path, template=template, **{**settings, "rows": "all" if self.mean else "last"})
        self.copies_read = range(copies - 1, copies)
        if self.mean:
            self.incompatible_poolings = EarlyLateModule.incompatible_poolings
        self.lower_layers = _counted(lower_layers, depth(self.model))
        check_widths(self, self.lower_layers)
        parts = self.mean + 1 + len(self.lower_layers)
        self.part_weights = (1 / parts,) * parts

    def read(self, layout: Layout) -> TokenVectors:
        lower = Capture([self.lm.layers[layer - 1] for layer in self.lower_layers], "after", layout.ends)
        v = self.run(layout, lower)
        return self.vectors_of(v, lower.states, layout)

    def vectors_of(self, v: Tensor, lower: Sequence[Tensor], layout: Layout) -> TokenVectors:
        """Return the vectors, given last hidden states (B, N, D) and the last token's at the lower layers, (B, D)."""
        end = gather_positions(v, layout.ends)
        if self.mean:
            return TokenVectors.pick(v, layout, self.selected(layout)).followed_by(end, *lower)
        return TokenVectors.one_each(end, layout, layout.ends).followed_by(*lower)


def _counted(layers: Sequence[float], count: int) -> list[int]:
    """Return lower layers counted from 1. A share of the layers that run is below the last."""

    def is_layer(value: object) -> bool:
        if isinstance(value, float):
            return 0 < value <= 1
        return type(value) is int and 0 < abs(value) <= count

    are_layers = isinstance(layers, (list, tuple)) and len(layers) <= _MOST and all(map(is_layer, layers))
    advice = f"give a list of at most {_MOST} layers, each from 1 to {count}, or -{count} to -1, or a share of them."
    check("lower_layers", layers, are_layers, advice)
    return [
        layer % (count + 1) if isinstance(layer, int) else max(1, min(round(layer * count), count - 1))
        for layer in layers
    ]
