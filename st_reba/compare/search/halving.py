"""Successive halving over recipes.

All candidates are scored on a few items (pairs, triplets or queries), the better third of them on three times as many,
and so on, until few are left and have seen the whole half to choose on (Jamieson and Talwalkar: Non-stochastic Best Arm
Identification and Hyperparameter Optimization, AISTATS 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ...data.tables import Labelled
from ...evaluation.tasks import Role, Task, Vectors, task_of
from ...lm.backbone import depth
from ...modules import CausalModule, EmbeddingFilter
from ...modules.moments import Moments
from ...reading.layers import LayerReader
from ...recipes import Recipe
from ...recipes.recipe import POOLINGS
from ...recipes.rows import PARTS
from .candidates import PLAIN, Candidate, candidates, end, gives_every_layer
from .splitting import LEAST_PAIRS, split

#: The share of the candidates that stays from one rung to the next is one of so many; the pairs are so many times more.
FACTOR = 3
#: How many candidates are reported in the end.
FINALISTS = 5


@dataclass(frozen=True)
class Rung:
    """One step of the halving.

    Attributes:
        candidates: How many there were.
        items: How many pairs, triplets or queries each was scored on.
    """

    candidates: int
    items: int


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        finalists: The best candidates on all items to choose on, best first.
        gain: By how much the first was ahead of :data:`.candidates.PLAIN` there, in the score that decides.
        rungs: What was tried.
        chosen_on: The half to choose on.
        held_out: The others, which the search never read.
    """

    finalists: list[Candidate]
    gain: float
    rungs: list[Rung]
    chosen_on: Labelled
    held_out: Labelled

    @property
    def chosen(self) -> str:
        """Key of the recipe that was found best on the half to choose on."""
        return self.finalists[0].recipe([]).result

    def recipes(self) -> list[Recipe]:
        """The finalists, and beside them the recipe without any choice."""
        texts = self.chosen_on.texts()
        return [each.recipe(texts) for each in dict.fromkeys([*self.finalists, PLAIN])]


def rung_sizes(items: int) -> list[int]:
    """How many items each rung has: all at last, a third of that before, and so on, but never too few."""
    sizes = [items]
    while sizes[0] // FACTOR >= LEAST_PAIRS:
        sizes.insert(0, sizes[0] // FACTOR)
    return sizes


def search(
    backbone: CausalModule,
    data: Labelled,
    *,
    every: Sequence[Candidate] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_progress: Callable[[str, int], None] = lambda what, texts: None,
) -> Found:
    """Find the best combinations on one half of the data.

    Args:
        backbone: The loaded model, whose weights are shared.
        data: Pairs, triplets or a retrieval task.
        every: What to try; :func:`st_reba.compare.search.candidates` if None. What the model cannot run is left out.
        seed: Of the split.
        batch_size: Texts at a time.
        on_progress: Called when texts have been embedded, with the way to run the model and how many.

    Raises:
        ValueError: If there are too few items, or the model can run nothing of what is to be tried.
    """
    chosen_on, held_out = split(data, seed)
    alive = list(candidates(depth(backbone.model)) if every is None else every)
    scorer = _Scorer(backbone, batch_size, on_progress)
    rungs = []
    for size in rung_sizes(len(chosen_on)):
        part = task_of(chosen_on if size == len(chosen_on) else chosen_on.head(size))
        if size < len(chosen_on) and not part.scorable:
            # All labels alike.
            continue
        scores = scorer.scores(alive, part)
        if not scores and scorer.ran:
            raise ValueError(
                f"No combination has a score on the {data.noun} to choose on: all look the same to it, or all labels "
                f"are alike. Give {data.noun} that differ."
            )
        if not scores:
            raise ValueError(f"{type(backbone.model).__name__} can run none of the recipes that are to be searched.")
        rungs.append(Rung(len(scores), size))
        alive = sorted(scores, key=scores.__getitem__, reverse=True)
        alive = alive[: max(FINALISTS, math.ceil(len(alive) / FACTOR))]
    plain = scores.get(PLAIN)
    if plain is None:
        plain = scorer.scores([PLAIN], task_of(chosen_on))[PLAIN]
    return Found(alive[:FINALISTS], scores[alive[0]] - plain, rungs, chosen_on, held_out)


@dataclass
class _Scorer:
    """Scores candidates on one model."""

    backbone: CausalModule
    batch_size: int
    on_progress: Callable[[str, int], None]
    #: Whether the model could run any combination.
    ran: bool = False

    @cached_property
    def _head(self) -> EmbeddingFilter:
        """The same for all candidates, and on a large model not cheap."""
        return EmbeddingFilter.from_language_model(self.backbone)

    def scores(self, alive: Sequence[Candidate], task: Task) -> dict[Candidate, float]:
        """The score that decides; what cannot be run, or has none, is left out."""
        prompted = [(task.prompt(role), text) for role, texts in task.inputs() for text in texts]
        # Long texts with long ones, so that little is padding.
        inputs = sorted(dict.fromkeys(prompted), key=lambda each: (each[0] or "", len(each[1])))
        row = {each: index for index, each in enumerate(inputs)}
        runs: dict[tuple[str, int | None], list[Candidate]] = {}
        for candidate in alive:
            runs.setdefault(candidate.run, []).append(candidate)
        found: dict[Candidate, float] = {}
        for group in runs.values():
            try:
                read = _reader(self.backbone, group)
            except ValueError:
                continue
            self.ran = True
            batches = []
            for prompt, same in groupby(inputs, key=lambda each: each[0]):
                texts = [text for _, text in same]
                for start in range(0, len(texts), self.batch_size):
                    batch = texts[start : start + self.batch_size]
                    batches.append(read(batch, prompt))
                    self.on_progress(group[0].row.name, len(batch))
            for candidate, vectors in zip(group, torch.cat(batches, dim=1), strict=True):
                score = self._score(candidate, vectors, row, task)
                if not math.isnan(score):
                    found[candidate] = score
        return {candidate: found[candidate] for candidate in alive if candidate in found}

    def _score(
        self, candidate: Candidate, vectors: Tensor, row: Mapping[tuple[str | None, str], int], task: Task
    ) -> float:
        """The score that decides; NaN where there is none."""
        if candidate.filter:
            try:
                module = self._filter(candidate.filter, vectors)
            except ValueError:
                return math.nan
            with torch.inference_mode():
                vectors = module({"sentence_embedding": vectors})["sentence_embedding"]

        def look_up(texts: Sequence[str], role: Role) -> Tensor:
            return vectors[[row[task.prompt(role), text] for text in texts]]

        return task.score(Vectors(look_up))

    def _filter(self, name: str, vectors: Tensor) -> nn.Module:
        if not PARTS[name].fitted:
            return self._head
        moments = Moments(vectors.shape[1])
        moments.add(vectors)
        return PARTS[name].from_moments(moments)


def _reader(backbone: CausalModule, group: Sequence[Candidate]) -> Callable[[list[str], str | None], Tensor]:
    """From B texts and their prompt to (candidates, B, D), float32, on the CPU, by one pass; filters are left to do."""
    row, every_layer = group[0].row, gives_every_layer(group[0].row)
    # All layers of the whole model, if one pass gives them, also those above the recipe's own end.
    module = row.build(backbone, layer=-1 if every_layer else group[0].layer)
    modes = tuple(POOLINGS[pooling] for pooling in row.own_poolings)
    parts = [module, Pooling(module.get_embedding_dimension(), modes)]
    model = SentenceTransformer(modules=parts, device=str(backbone.model.device))
    pooled_by = [row.own_poolings.index(candidate.pooling) for candidate in group]
    if not every_layer:

        def encode(texts: list[str], prompt: str | None) -> Tensor:
            vectors = model.encode(
                texts, prompt=prompt, batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
            )
            pooled = vectors.float().cpu().chunk(len(modes), dim=1)
            return torch.stack([pooled[pooling] for pooling in pooled_by])

        return encode
    reader = LayerReader(model)
    last = reader.count + end(row)
    layers = [last if candidate.layer is None else candidate.layer for candidate in group]

    def read(texts: list[str], prompt: str | None) -> Tensor:
        pooled = reader.embeddings(texts, prompt).float().chunk(len(modes), dim=2)
        return torch.stack([pooled[pooling][layer] for pooling, layer in zip(pooled_by, layers, strict=True)])

    return read
