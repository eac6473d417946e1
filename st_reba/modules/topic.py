"""Topic: the end of a prompt that asks for a text's topic, at several layers, and the mean over its second copy."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..lm import backbone
from ..lm.run import StatesAt, at
from ..settings import Setting, flag
from ..text.layout import Layout
from ..text.templates import Template, preset
from .causal_module import CausalModule, PoolOver, repetitions_from
from .early_late import check_one_width
from .token_vectors import TokenVectors, last_of, picked

#: After which share of the layers the last token is read once more.
LOWER = 0.93
#: The most parts of that kind, far above what helps.
MAX_LOWER_LAYERS = 64


def _is_layer(value: object) -> bool:
    return (type(value) is int and value != 0) or (isinstance(value, float) and 0 < value <= 1)


LOWER_LAYERS: Setting[Sequence[float]] = Setting(
    "lower_layers",
    lambda value: isinstance(value, (list, tuple)) and len(value) <= MAX_LOWER_LAYERS and all(map(_is_layer, value)),
    f"give a list of at most {MAX_LOWER_LAYERS} layers, each counted from 1, or from the top if negative, or a share "
    "of the layers, such as 0.93.",
)
MEAN = flag("mean")
REPETITIONS = repetitions_from(1)


class TopicModule(CausalModule):
    r"""The last token of a prompt that asks for the topic, at several layers; and the mean over the text's last copy.

    .. math:: e_i = [v_{(k-1)n+i} ; v_N ; h^{(l)}_N], \quad i = 1, \dots, n

    with the last hidden states v of the text's k-th copy and of the layout's last token N, and the latter's residual
    stream :math:`h^{(l)}` after a lower layer l. One pass has all of them. With ``Pooling("mean")`` an embedding is the
    mean over the copy, and beside it the states of the last token. These parts share a basis:
    :class:`st_reba.StandardizedSum`, fitted on fifty plain texts or more, stands behind them::

        module = TopicModule(path)
        pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")])
        model = SentenceTransformer(modules=[*pooled, StandardizedSum.fit(pooled, texts)])

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{text}`` or more, or a name in :data:`st_reba.TEMPLATES`: ``"echo-topic"`` has two
            copies, ``"topic"`` has one, and ``"echo-topic-zh"`` and ``"topic-zh"`` are in Chinese. A name brings how
            it is read, too; see :class:`CausalTransformer`.
        mean: Whether the mean over the last copy is a part. None: where the template repeats the text. Without it a
            text has one token, and any pooling will do.
        lower_layers: After which layers the last token is read besides; of the layers that are run, each counted from
            1, or from the top if negative, or as a share of them.
        pool_over: Over what the mean is taken. ``"text"``: the last copy. ``"all"``: from there to the end of the
            layout.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``; ``final_norm`` is about the states
            of the last layer.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or its layers are not found, or the states
            of a lower layer are not as wide as the last.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "mean", "lower_layers"]
    method = "Topic"
    equation = r"e_i = [v_{(k-1)n+i} ; v_N ; h^{(l)}_N], \quad i = 1, \dots, n"
    citation = (
        "The prompt begins as in Bowen Zhang, Kehua Chang, Chunping Li: Simple Techniques for Enhancing Sentence "
        "Embeddings in Generative Language Models. ICIC 2024. The repetition: Jacob Mitchell Springer, Suhas Kotha, "
        "Daniel Fried, Graham Neubig, Aditi Raghunathan: Repetition Improves Language Model Embeddings. ICLR 2025."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = "echo-topic",
        mean: bool | None = None,
        lower_layers: Sequence[float] = (LOWER,),
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        parsed = Template.parse(template)
        self.repeats_text = REPETITIONS.check(parsed.copies) > 1
        self.mean: bool = MEAN.check(self.repeats_text if mean is None else mean)
        LOWER_LAYERS.check(lower_layers)
        super().__init__(
            model_name_or_path,
            template=parsed,
            preset=preset(template),
            pool_over=pool_over,
            rows="all" if self.mean else "last",
            **transformer_kwargs,
        )
        self.lower_layers = [self._counted(layer) for layer in lower_layers]
        check_one_width(self, self.lower_layers)
        lasts = ["v_N", *(rf"h^{{({layer})}}_N" for layer in self.lower_layers)]
        parts = len(lasts) + self.mean
        self.shares = (1 / parts,) * parts
        if self.mean:
            self.unfit_poolings = dict.fromkeys(
                sorted(set(Pooling.POOLING_MODES) - {"mean"}),
                'the first part of an embedding is the mean over the tokens. Use Pooling("mean").',
            )
            self.no_words = (
                "gives all tokens of a text the same parts behind the first (which alone is that of EchoModule with "
                "the same template)"
            )
            self.equation = rf"e_i = [v_{{(k-1)n+i}} ; {' ; '.join(lasts)}], \quad k = {self.copies}"
        else:
            self.no_words = "gives a text as a whole its vector, and its tokens none"
            self.equation = f"e = [{' ; '.join(lasts)}]"
        self.equation += r", \quad N: \text{the end of the prompt}"

    def _counted(self, layer: float) -> int:
        """A lower layer, counted from 1; a share of the layers is one below the last."""
        depth = backbone.depth(self.model)
        if isinstance(layer, float):
            return max(1, min(round(layer * depth), depth - 1))
        found = layer if layer > 0 else depth + 1 + layer
        if not 1 <= found <= depth:
            raise ValueError(
                f"lower_layers has {layer}: {type(self.model).__name__} runs {depth} layers here; give 1 to {depth}, "
                f"-{depth} to -1, or a share of them."
            )
        return found

    def get_embedding_dimension(self) -> int:
        """P * D: the parts, side by side."""
        return len(self.shares) * int(super().get_embedding_dimension())

    @property
    def copies_read(self) -> tuple[int, int]:
        return self.copies - 1, self.copies - 1

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        lower = StatesAt([self.layer(layer - 1) for layer in self.lower_layers], "after", layout.ends)
        states = self.run(layout, change=[lower.as_change()], **kwargs)
        return self.read(layout, states, lower.states())

    def read(self, layout: Layout, states: Tensor, lower: Sequence[Tensor]) -> TokenVectors:
        """What the method reads of a pass.

        Args:
            layout: B texts.
            states: (B, N, D), their last hidden states.
            lower: The last token's state after each of ``lower_layers``, (B, D).
        """
        selected = self.selected(layout) if self.mean else last_of(layout.attention_mask)
        tokens, mask, ids, _ = picked(states, layout.input_ids, selected)
        # Where accelerate has placed the layers, each may lie on a device of its own.
        lasts = [at(states, layout.ends), *(own.to(states) for own in lower)]
        parts = [last[:, None].expand_as(tokens) for last in lasts]
        return TokenVectors(torch.cat([tokens, *parts] if self.mean else parts, dim=-1), mask, ids)
