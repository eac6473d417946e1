"""All repetition recipes from one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from os import PathLike
from typing import TypeAlias

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..lm.anatomy import final_norm
from ..lm.backbone import depth, weighted_sum
from ..lm.run import StatesAt
from ..modules import CausalTransformer, ReBAModule
from ..modules.token_vectors import last_of, picked, without_empty
from ..recipes import every_row
from ..text.layout import Layout

#: Token vectors of some texts in one recipe, (B, n, D), and their mask, (B, n).
Reading: TypeAlias = tuple[Tensor, Tensor]


class RecipeSweep:
    r"""Classical, Echo-2 to Echo-k and ReBA-1 to ReBA-k, all from one forward pass over k copies of a text.

    Attention is causal, so the states and the attention of the first j copies are those of a pass over j copies alone:
    Echo-j is copy j of the states, and ReBA-j the sum

    .. math:: e_i^{(j)} = \sum_{c=1}^{j} \sum_{t=1}^{n} a_{i,(c-1)n+t} v_{(c-1)n+t}, \quad (c-1)n+t \geq i

    up to copy j, of the same weights. Each equals its own module (``CausalTransformer``, ``EchoModule``,
    ``ReBAModule``) in a pipeline with ST's ``Pooling``, truncation included: a text that is too long for k copies is
    read by fewer copies where those have room for more of it, in a pass of its own; and so is one that Classical
    tokenises otherwise, as a whole with a prompt or cut at a character's end.

    Args:
        backbone: The loaded model (any module of st_reba, or an ST ``Transformer``), whose weights are shared; or its
            path or Hub id.
        repetitions: k >= 1.
        poolings: Modes of ST's ``Pooling``. If "lasttoken" is the only one, :math:`e_n` alone is computed, which is
            cheaper.
        layers: Layers after which Echo is read, too, each counted from 1, through the model's final norm.

    Attributes:
        module: ReBA's module of k copies.
        recipes: The recipes' names, by number of copies: "Classical", "ReBA-1", "Echo-2", ...; after "Echo-2" and
            "ReBA-2" come "Echo-2, layer 12" and so on.
        poolings: The poolings.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or has no attention, or its positions have
            no room for k copies.
    """

    def __init__(
        self,
        backbone: str | PathLike[str] | nn.Module,
        repetitions: int = 3,
        poolings: Sequence[str] = ("mean", "lasttoken"),
        layers: Sequence[int] = (),
    ) -> None:
        allowed = Pooling.POOLING_MODES
        if isinstance(poolings, str) or not poolings or any(mode not in allowed for mode in poolings):
            raise ValueError(f"poolings={poolings!r}: give a list of one or more of {sorted(allowed)}.")
        module = ReBAModule(backbone, repetitions=repetitions)
        count = depth(module.model)
        if not all(1 <= layer <= count for layer in layers):
            raise ValueError(f"layers={list(layers)}: {type(module.model).__name__} has {count}; give 1 to {count}.")
        self.module = module
        self._modules = [*(ReBAModule(module, repetitions=copies) for copies in range(1, repetitions)), module]
        self._classical = CausalTransformer(module)
        self._dimension = module.get_embedding_dimension()
        self.layers = tuple(layers)
        self.recipes = tuple(name for copies in range(1, repetitions + 1) for name in self._names(copies))
        self.poolings = tuple(dict.fromkeys(poolings))
        self._pools = [Pooling(self._dimension, mode) for mode in self.poolings]

    def _names(self, copies: int) -> list[str]:
        """Return the names of the recipes that so many copies give."""
        below = [f"{names(copies)[0]}, layer {layer}" for layer in self.layers] if copies > 1 else []
        return [*names(copies), *below]

    @torch.inference_mode()
    def encode(
        self, texts: Sequence[str], prompt: str | None = None, batch_size: int = 32
    ) -> dict[tuple[str, str], Tensor]:
        """Return sentence embeddings under every recipe and pooling.

        Args:
            texts: T strings.
            prompt: As for ST's ``encode``: context, once, never pooled.
            batch_size: Number of texts at a time.

        Returns:
            For each (recipe, pooling), (T, D), float32, on the CPU.

        Raises:
            ValueError: If ``texts`` are not strings, ``batch_size`` is not positive, or the prompt leaves no room.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one string: give a list of texts.")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"texts[{index}] is a {type(text).__name__}: give a list of strings.")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give the texts to run at a time, 1 or more.")
        keys = [(recipe, pooling) for recipe in self.recipes for pooling in self.poolings]
        embeddings = torch.empty(len(keys), len(texts), self._dimension, dtype=torch.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for chosen, readings in self._passes([texts[index] for index in batch], prompt):
                pooled = [
                    pool({"token_embeddings": states, "attention_mask": mask.long()})["sentence_embedding"]
                    for states, mask in readings
                    for pool in self._pools
                ]
                # A pass of few copies gives the first recipes; it replaces what an earlier one truncated further.
                embeddings[: len(pooled), [batch[index] for index in chosen]] = torch.stack(pooled).float().cpu()
        return dict(zip(keys, embeddings, strict=True))

    def _passes(self, texts: Sequence[str], prompt: str | None) -> Iterator[tuple[list[int], Iterator[Reading]]]:
        """Run a batch, part by part: yield the indices of the texts of each part, and the readings of each recipe.

        A pass serves the recipes of at most as many copies. A text that is cut to fit may be cut elsewhere for fewer
        copies: it runs once more, and what those recipes read then replaces what they read before.
        """
        pending = list(range(len(texts)))
        last: int | None = -1
        for module in reversed(self._modules):
            limit = module.max_tokens(prompt)
            if not pending or limit == last:
                continue
            layout = Layout.of(module.eval().preprocess([texts[index] for index in pending], prompt=prompt))
            reader = copy.copy(module)
            reader.rows = "last" if self.poolings == ("lasttoken",) else "all"
            for part in reader.parts(layout):
                yield [pending[row] for row in part.tolist()], self._readings(reader, layout.part(part))
            lengths = zip(pending, layout.text_lengths.tolist(), strict=True)
            pending, last = [index for index, length in lengths if length == limit], limit
        yield from self._classical_passes(texts, prompt)

    def _classical_passes(
        self, texts: Sequence[str], prompt: str | None
    ) -> Iterator[tuple[list[int], Iterator[Reading]]]:
        """Run the texts whose classical layout is not the beginning of the repeated one."""
        modules = (self._classical.eval(), self._modules[0])
        layouts = [module.lay_out(texts, prompt) for module in modules]
        # (3, T, 2, N)
        both = torch.stack(list(Layout.interleaved(layouts).features().values())).unflatten(1, (-1, 2))
        chosen = (both[:, :, 0] != both[:, :, 1]).any(dim=2).any(dim=0).nonzero().flatten()
        if len(chosen) == 0:
            return
        layout = layouts[0].part(chosen)
        for part in self._classical.parts(layout):
            features = self._classical(layout.part(part).features())
            yield chosen[part].tolist(), iter([(features["token_embeddings"], features["attention_mask"].bool())])

    def _readings(self, module: ReBAModule, layout: Layout) -> Iterator[Reading]:
        """Yield what each recipe reads of one forward pass, as the recipe's own module returns it."""
        empty, norm = layout.text_lengths == 0, final_norm(module.model)
        below = StatesAt([module.layer(layer - 1) for layer in self.layers], "after")
        weights, states = module.look_back(layout, change=[below.as_change()])
        first = layout.input_ids.shape[1] - states.shape[1]
        copy_index = layout.copy_index[:, first:]
        for number in range(module.repetitions):
            reading = picked(states, layout.input_ids[:, first:], _read_of(module, copy_index == number))
            # Weights of tokens up to the end of this copy.
            own = weights * (copy_index <= number)[:, None].to(weights.device, non_blocking=True)
            read = [reading.states, weighted_sum(own, states).to(reading.states.dtype)]
            if number:
                selected = _read_of(module, layout.copy_index == number)
                every = (norm(lower).to(reading.states) for lower in below.states())
                read += [picked(lower, layout.input_ids, selected).states for lower in every]
            for found in read:
                yield without_empty(found, reading.mask, empty)


def _read_of(module: ReBAModule, copy: Tensor) -> Tensor:
    """Return the mask of the tokens of a copy that are read, (B, N)."""
    return last_of(copy) if module.rows == "last" else copy


@cache
def names(copies: int) -> tuple[str, str]:
    """Return the name of the recipe that reads the last of so many copies, and of the one that looks back from all."""
    rows = {row.module is ReBAModule: row.name for row in every_row(copies) if row.copies == copies}
    return rows[False], rows[True]
