"""A language model that reads layouts: states of a pass, chosen and handed on as the vectors of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..lm import backbone
from ..lm.anatomy import layer_paths, without_final_norm
from ..lm.run import recording
from ..text.layout import NOT_TEXT, Layout
from ..text.templates import PoolOver, Rows
from .language_model import LanguageModel
from .readout import ONE_BY_ONE, Reading, blank, by_length, compact, even_slices, joined, last_of


class LayoutReader(LanguageModel):
    """What becomes of a layout: a subclass overrides :meth:`_read`, or what it is made of."""

    #: Tokens a thread runs at a time on a CPU.
    CPU_TOKENS: ClassVar[int] = 1024

    #: Whether vectors are a linear function of one layer's states, so that those of each layer can be read alike. False
    #: where weights depend on the states, or something else is read.
    READS_HIDDEN_STATES: ClassVar[bool] = True

    #: Which tokens are handed on.
    pool_over: PoolOver

    #: Whether every token that is read is handed on, or the last alone.
    rows: Rows = "all"

    #: Whether each text runs alone, so that not even rounding depends on the others.
    deterministic: bool

    @property
    def layouts_a_text(self) -> int:
        """How many rows of a layout a text has."""
        return 1

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the backbone over layouts and hand on the states that the method reads.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: For the backbone's forward.

        Returns:
            The features with ``token_embeddings`` (B, n, D), and ``attention_mask`` and ``input_ids`` (B, n) to match.
            A text without tokens has one zero vector. Where the backbone's configuration has ``output_hidden_states``,
            as for ST's ``WeightedLayerPooling``, ``all_layer_embeddings``, too: see :meth:`forward_all_layers`.
        """
        if not getattr(self.model.config, "output_hidden_states", False):
            return self._handed_on(features, Layout.of(features), **kwargs)
        found = self.forward_all_layers(features, **kwargs)
        # In place, as ST's Transformer does: what asks for the layers reads them there.
        features.clear()
        features.update(found)
        return features

    def forward_all_layers(
        self, features: dict[str, Any], *, norm: Callable[[Tensor], Tensor] = lambda states: states, **kwargs: Any
    ) -> dict[str, Any]:
        """As :meth:`forward`, with the same reading of every layer's states.

        Args:
            features: What :meth:`preprocess` returned.
            norm: What is done to the states of every layer but the last before they are read.
            **kwargs: For the backbone's forward.

        Returns:
            What :meth:`forward` does, and ``all_layer_embeddings``: L + 1 times (B, n, D), first what enters the first
            layer, then what each layer leaves in the residual stream, and last ``token_embeddings`` themselves.

        Raises:
            ValueError: If the method reads something else than hidden states, or a state inside its last layer, or the
                layers are not found, or would run a second time for their gradients.
        """
        self.check_all_layers()
        with recording(self.model, layer_paths(self.model), norm) as record:
            found = self._handed_on(features, Layout.of(features), **kwargs)
        layers = record.split(found["token_embeddings"])
        return {**found, "token_embeddings": layers[-1], "all_layer_embeddings": layers}

    def check_all_layers(self) -> None:
        """Refuse to read every layer's states where they would not be read alike.

        Raises:
            ValueError: If the method reads something else than hidden states, or a state inside its last layer.
        """
        if self.readout == "before_mlp":
            raise ValueError(
                f'{type(self).__name__} with readout="before_mlp" reads a state inside its last layer, and the other '
                'layers would be read behind their feed-forward parts. Use readout="layer" to read every layer.'
            )
        if not self.READS_HIDDEN_STATES:
            raise ValueError(
                f"The configuration has output_hidden_states=True, and {type(self).__name__} does not read hidden "
                "states of one layer alone, so it has none of each to hand on. Set "
                "model[0].model.config.output_hidden_states = False, or use CausalTransformer."
            )

    def _read_all(self, layout: Layout, **kwargs: Any) -> list[Reading]:
        """What the method reads, part by part, of states that went through the final norm, or did not."""
        readings = []
        with contextlib.nullcontext() if self.final_norm else without_final_norm(self.model):
            for together in self._one_by_one(layout) if self.deterministic else [layout]:
                readings += self._readings(replace(together, seen=self._seen(together, **kwargs)), **kwargs)
        return readings

    def _one_by_one(self, layout: Layout) -> Iterator[Layout]:
        """The layouts of each text, as long as they are in a batch of their own."""
        for text in range(len(layout.input_ids) // self.layouts_a_text):
            own = slice(text * self.layouts_a_text, (text + 1) * self.layouts_a_text)
            companions = {key: other.part(slice(text, text + 1)) for key, other in layout.companions.items()}
            yield replace(layout.part(own), companions=companions)

    def _seen(self, layout: Layout, **kwargs: Any) -> dict[str, Tensor]:
        """What is seen of the companions of changes, for each row of the layout."""
        found = {}
        for change in self.changes:
            if change.companion is not None:
                companion = layout.companions[change.key]
                texts = len(companion.input_ids)
                parts = even_slices(texts, LayoutReader._part_size(self, layout))
                seen = torch.cat([self.read_companion(change, companion.part(part), **kwargs) for part in parts])
                found[change.key] = seen.repeat_interleave(len(layout.input_ids) // texts, dim=0)
        return found

    def _handed_on(self, features: dict[str, Any], layout: Layout, **kwargs: Any) -> dict[str, Any]:
        """The features with what is read of a batch in place of its layout."""
        states, mask, ids, extra = joined(self._read_all(layout, **kwargs))
        states, mask = blank(states, mask, layout.text_lengths == 0)
        rest = {name: value for name, value in features.items() if name not in layout.features()}
        if self.deterministic:
            rest[ONE_BY_ONE] = True
        return {**rest, **extra, "token_embeddings": states, "attention_mask": mask.long(), "input_ids": ids}

    def _readings(self, layout: Layout, **kwargs: Any) -> list[Reading]:
        """What the method reads, part by part, of which each has texts of nearly one length."""
        parts = self.parts(layout)
        order = by_length(layout.lengths) if len(parts) > 1 else None
        if order is None:
            return [self._read(layout.part(part), **kwargs) for part in parts]
        return [joined([self._read(layout.part(order[part]), **kwargs) for part in parts]).rows(order.argsort())]

    def parts(self, layout: Layout) -> list[slice]:
        """The texts of a batch that run together; the result does not depend on it."""
        return even_slices(len(layout.input_ids), self._part_size(layout))

    def _part_size(self, layout: Layout) -> int:
        """How many texts of a batch may run at a time.

        On an accelerator, the batch that was asked for. On a CPU, about as many tokens as its caches hold the
        activations of: larger batches are slower, and padded further.
        """
        batch, length = layout.input_ids.shape
        if backbone.device(self.model).type != "cpu":
            return batch
        return max(1, self.CPU_TOKENS * torch.get_num_threads() // length)

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        """The method."""
        raise NotImplementedError

    def _leading(self) -> int:
        """How many special tokens stand before everything else in a layout."""
        raise NotImplementedError

    def _set_rows(self, rows: Rows) -> None:
        """Which of the tokens that ``pool_over`` names are handed on: all of them, or the last."""
        self.rows = rows

    @property
    def copies_read(self) -> tuple[int, int]:
        """The first and the last of the copies of a text whose tokens are read."""
        return 0, 0

    def tokens_read(self, layout: Layout) -> Tensor:
        """(B, N): the tokens that are handed on where ``rows`` is ``"all"``."""
        return self._select(layout, *self.copies_read)

    def _read_tokens(self, layout: Layout, **kwargs: Any) -> Reading:
        """The last hidden states of the tokens that ``pool_over`` and ``rows`` name."""
        selected = self.tokens_read(layout)
        if self.rows == "last":
            selected = last_of(selected)
        states = self.run(layout, **kwargs)
        return compact(states, layout.input_ids, selected)

    def _select(self, layout: Layout, first_copy: int, last_copy: int) -> Tensor:
        """(B, N): the tokens that ``pool_over`` names, when copies ``first_copy`` to ``last_copy`` are read."""
        if self.pool_over == "whole":
            # The slots of token prepending hold no token.
            return layout.attention_mask & (layout.copy_index >= NOT_TEXT)
        copies = (layout.copy_index >= first_copy) & (layout.copy_index <= last_copy)
        if self.pool_over == "text":
            return copies
        reached = copies.cummax(dim=1).values
        if first_copy == 0:
            reached = reached | (layout.text_starts == self._leading())[:, None]
        return reached & layout.attention_mask & (layout.copy_index >= NOT_TEXT)
