"""All repetition recipes from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from ..hub.loading import ModelSource
from ..lm.attention.hooks import RunningMaximum
from ..lm.attention.kernels import weighted_sum
from ..lm.passes import Capture
from ..lm.views import depth
from ..modules import CausalTransformer, ReBAModule
from ..modules.vectors import TokenVectors, last_token_mask
from ..recipes import every_row
from ..settings import check_int
from ..text.layout import Layout
from ..text.presets import Rows


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
        backbone: ModelSource,
        repetitions: int = 3,
        poolings: Sequence[str] = ("mean", "lasttoken"),
        layers: Sequence[int] = (),
    ) -> None:
        rows: Rows = "last" if set(poolings) == {"lasttoken"} else "all"
        module = ReBAModule(backbone, repetitions=repetitions, rows=rows)
        count = depth(module.model)
        if not all(1 <= layer <= count for layer in layers):
            raise ValueError(f"layers={list(layers)}: {type(module.model).__name__} has {count}; give 1 to {count}.")
        self.module = module
        fewer = (ReBAModule(module, repetitions=copies, rows=rows) for copies in range(1, repetitions))
        self._rebas = [*(reba.eval() for reba in fewer), module.eval()]
        self._classical = CausalTransformer(module).eval()
        self._dimension = module.get_embedding_dimension()
        self.layers = tuple(layers)
        self.recipes = tuple(name for copies in range(1, repetitions + 1) for name in names(copies, self.layers))
        self.poolings = tuple(dict.fromkeys(poolings))
        self._pools = [Pooling(self._dimension, mode) for mode in self.poolings]

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
            ValueError: If ``batch_size`` is not positive, or the prompt leaves no room.
        """
        check_int("batch_size", batch_size, 1)
        keys = [(recipe, pooling) for recipe in self.recipes for pooling in self.poolings]
        embeddings = torch.empty(len(keys), len(texts), self._dimension, dtype=torch.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for chosen, recipes in self._passes([texts[index] for index in batch], prompt or ""):
                pooled = [pool(vectors.features())["sentence_embedding"] for vectors in recipes for pool in self._pools]
                # A pass of few copies gives the first recipes; it replaces what an earlier one truncated further.
                embeddings[: len(pooled), [batch[index] for index in chosen]] = torch.stack(pooled).float().cpu()
        return dict(zip(keys, embeddings, strict=True))

    def _passes(self, texts: Sequence[str], prompt: str) -> Iterator[tuple[list[int], Iterator[TokenVectors]]]:
        """Run a batch, part by part: yield the indices of the texts of each part, and their vectors in each recipe.

        A pass serves the recipes of at most as many copies. A text that is truncated may be truncated elsewhere for
        fewer copies: it runs once more, and these vectors replace those of the earlier pass.
        """
        pending = list(range(len(texts)))
        last: int | None = -1
        for module in reversed(self._rebas):
            limit = module.max_tokens(prompt)
            if not pending or limit == last:
                continue
            layouts = module.lay_out([texts[index] for index in pending], prompt)
            lengths = (layouts[0].copy_index == 0).sum(dim=1).tolist()
            if module.caches_prefixes:
                layouts = module.lm.behind_prefix(*layouts, least=len(module.layouter.before))
            for part in module.parts(layouts):
                yield [pending[row] for row in part.tolist()], self._vectors(module, layouts[0].part(part))
            pending, last = [index for index, length in zip(pending, lengths, strict=True) if length == limit], limit
        # Texts whose classical layout is not the beginning of the repeated one.
        rows = [_rows(module.lay_out(texts, prompt)[0]) for module in (self._classical, self._rebas[0])]
        chosen = [index for index, (row, other) in enumerate(zip(*rows, strict=True)) if row != other]
        if chosen:
            features = self._classical(self._classical.preprocess([texts[index] for index in chosen], prompt))
            mask = features["attention_mask"].bool()
            yield chosen, iter([TokenVectors(features["token_embeddings"], mask, features["input_ids"])])

    def _vectors(self, module: ReBAModule, layout: Layout) -> Iterator[TokenVectors]:
        """Yield the vectors of each recipe, from one forward pass."""
        copies, is_last = layout.copy_index, module.rows == "last"
        words = last_token_mask(copies == 0) if is_last else copies == 0
        columns = words.any(dim=0).nonzero().flatten().tolist() or [0]
        start = columns[0]
        keys = slice(start, columns[-1] + 1)
        attended = RunningMaximum(keys, slice(start, copies.shape[1]), module.lm.resolve("all", "watched"))
        below = Capture([module.lm.layers[layer - 1] for layer in self.layers])
        v = module.run(layout, attended, below)
        a = attended.symmetrised()
        for copy in range(module.repetitions):
            text = ((copies >= 0) & (copies <= copy))[:, None, start:].to(a.device)
            e = weighted_sum(a * text, v[:, start:]).to(v)
            selected = last_token_mask(copies == copy) if is_last else copies == copy
            echo = TokenVectors.pick(v, layout, selected)
            reba = TokenVectors.pick(e, layout.columns(keys), words[:, keys])
            read = [echo, echo._replace(states=reba.states)]
            for states in below.states if copy else ():
                tokens = TokenVectors.pick(states, layout, selected)
                read.append(tokens._replace(states=module.lm.final_norm(tokens.states).to(v)))
            for vectors in read:
                yield vectors.with_zeros(layout.is_empty)


def _rows(layout: Layout) -> list[list[tuple[int, int]]]:
    """Return the id and the copy of each token in each row."""
    rows = zip(layout.input_ids.tolist(), layout.copy_index.tolist(), layout.lengths.tolist(), strict=True)
    return [list(zip(ids[:length], copies[:length], strict=True)) for ids, copies, length in rows]


@cache
def names(copies: int, layers: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the recipes that so many copies give: Echo, ReBA, and Echo after each of some layers."""
    rows = {row.module is ReBAModule: row.name for row in every_row(copies) if row.copies == copies}
    return rows[False], rows[True], *(f"{rows[False]}, layer {layer}" for layer in layers if copies > 1)
