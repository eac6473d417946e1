"""A search over recipes: template, repetition, change, output layer, pooling and filter, by successive halving.

The choice is made on one half of the data and reported on the other. There, all candidates are scored on a few items
(pairs, triplets, queries or texts), the better third of them on three times as many, and so on, until few are left and
have seen the whole half to choose on (Jamieson and Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter
Optimization, AISTATS 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..data.tables import Labelled
from ..evaluation.tasks import Role, Task, Vectors, task_of
from ..lm.backbone import depth
from ..modules import CausalModule, EmbeddingFilter
from ..modules.moments import Moments
from ..recipes import Recipe, Row, every_row, find
from ..recipes.lookup import changed
from ..recipes.rows import FILTERS, PARTS
from .choice import LEAST_ITEMS, Halves
from .cost import FINALISTS as RANDOM_FINALISTS
from .cost import Forecast, memory, speed
from .recipes import RecipePass, passes_of, reading
from .results import Comparison

#: The share of the candidates that stays from one rung to the next is one of so many; the items are so many times more.
FACTOR = 3
#: How many candidates are reported in the end.
FINALISTS = 5

#: The recipe without any choice: what a search has to beat.
PLAIN = replace(find("classical"), pooling="mean")


def searched() -> list[Row]:
    """Every way to run the model that a search tries: rows as they are, and each under each change."""
    plain = [row for row in every_row() if row.searched]
    return [*plain, *(each for row in plain for each in changed(row))]


def candidates(layers: int, every: Sequence[Row] | None = None) -> list[Recipe]:
    """Every combination, on a model of so many layers; what has a filter is still to be fitted.

    It is read after each eighth of the layers from a quarter of them on, after the last but one, and at its end: the
    turning points that papers report lie there. A row under a change is read at its end alone, as any other layer would
    take a pass of its own.
    """
    chosen = sorted({round(layers * eighth / 8) for eighth in range(2, 8)} | {layers - 1})
    return [
        Recipe(row, pooling, (), PARTS[name] if name else None, layer)
        for row in (searched() if every is None else every)
        for layer in [*(layer for layer in chosen if 0 < layer < layers + 1 + row.end and not row.unchanged), None]
        for pooling in row.own_poolings
        for name in ("", *FILTERS)
    ]


@dataclass(frozen=True)
class Rung:
    """One step of the halving.

    Attributes:
        candidates: How many there were.
        items: How many pairs, triplets, queries or texts each was scored on.
    """

    candidates: int
    items: int


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        finalists: The best candidates on all items to choose on, best first.
        gain: By how much the first was ahead of :data:`PLAIN` there, in the score that decides.
        rungs: What was tried.
        chosen_on: The half to choose on.
        held_out: The others, which the search never read.
    """

    finalists: list[Recipe]
    gain: float
    rungs: list[Rung]
    chosen_on: Labelled
    held_out: Labelled

    @property
    def chosen(self) -> str:
        """Key of the recipe that was found best on the half to choose on."""
        return self.finalists[0].result

    def recipes(self) -> list[Recipe]:
        """The finalists, to be fitted on the half to choose on, and beside them the recipe without any choice."""
        texts = tuple(self.chosen_on.texts())
        return [replace(each, fit_texts=texts) for each in dict.fromkeys([*self.finalists, PLAIN])]


def rung_sizes(items: int) -> list[int]:
    """How many items each rung has: all at last, a third of that before, and so on, but never too few."""
    sizes = [items]
    while sizes[0] // FACTOR >= LEAST_ITEMS:
        sizes.insert(0, sizes[0] // FACTOR)
    return sizes


def search(
    backbone: CausalModule,
    data: Labelled,
    *,
    every: Sequence[Recipe] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_progress: Callable[[str, int], None] = lambda what, texts: None,
) -> Found:
    """Find the best combinations on one half of the data.

    Args:
        backbone: The loaded model, whose weights are shared.
        data: Pairs, triplets, a retrieval task or texts in classes.
        every: What to try; :func:`candidates` if None. What the model cannot run is left out.
        seed: Of the split.
        batch_size: Texts at a time.
        on_progress: Called when texts have been embedded, with the way to run the model and how many.

    Raises:
        ValueError: If there are too few items, or the model can run nothing of what is to be tried.
    """
    chosen_on, held_out = Halves.of(data, seed).parts
    tried = list(candidates(depth(backbone.model)) if every is None else every)
    passes, _ = passes_of(backbone, tried)
    if not passes:
        raise ValueError(f"{type(backbone.model).__name__} can run none of the recipes that are to be searched.")
    heads: list[nn.Module] = []

    def scores_of(alive: Sequence[Recipe], task: Task) -> dict[Recipe, float]:
        """The score that decides, in the order of the candidates; what has none is left out."""
        found: dict[Recipe, float] = {}
        kept = set(alive)
        for run in passes:
            if own := [recipe for recipe in run.recipes if recipe in kept]:
                found |= _scores(run, own, task, heads, batch_size, on_progress)
        return {recipe: found[recipe] for recipe in alive if recipe in found and not math.isnan(found[recipe])}

    rungs, alive = [], tried
    for size in rung_sizes(len(chosen_on)):
        task = task_of(chosen_on if size == len(chosen_on) else chosen_on.head(size))
        if size < len(chosen_on) and not task.scorable:
            # All labels alike.
            continue
        scores = scores_of(alive, task)
        if not scores:
            raise ValueError(
                f"No combination has a score on the {data.noun} to choose on: all look the same to it, or all labels "
                f"are alike. Give {data.noun} that differ."
            )
        rungs.append(Rung(len(scores), size))
        alive = sorted(scores, key=scores.__getitem__, reverse=True)
        alive = alive[: max(FINALISTS, math.ceil(len(alive) / FACTOR))]
    if PLAIN not in scores:
        passes, _ = passes_of(backbone, [PLAIN])
        scores |= scores_of([PLAIN], task_of(chosen_on))
    return Found(alive[:FINALISTS], scores[alive[0]] - scores[PLAIN], rungs, chosen_on, held_out)


def forecast(
    backbone: CausalModule,
    data: Labelled,
    every: Sequence[Recipe],
    *,
    seed: int = 0,
    batch_size: int = 32,
    random: bool = True,
) -> Forecast:
    """What a search will take at most, after a moment of measuring: every rung as if no candidate's pass were left out.

    Args:
        backbone: The loaded model.
        data: As for :func:`search`.
        every: What is tried.
        seed: Of the split.
        batch_size: Texts at a time.
        random: Whether the best are run on random weights as well.

    Raises:
        ValueError: If there are too few items.
    """
    chosen_on, held_out = Halves.of(data, seed).parts
    passes, _ = passes_of(backbone, every)
    rungs = [chosen_on.head(size).texts() for size in rung_sizes(len(chosen_on))]
    found = sum(run.tokens(texts) for run in passes for texts in rungs)
    dearest = sorted((run.tokens(held_out.texts()) for run in passes), reverse=True)[:FINALISTS]
    # Those on the other half, and the recipe without any choice.
    found += sum(dearest) + (sum(dearest[:RANDOM_FINALISTS]) if random else 0)
    lengths = [len(ids) for ids in backbone.token_ids(data.texts())]
    measured = speed(backbone, list(zip(lengths, data.texts(), strict=True)), batch_size)
    copies = max(recipe.copies or 1 for recipe in every)
    weights, peak = memory(backbone, max(lengths), batch_size, copies, random)
    return Forecast(len(every), len(lengths), found, measured, weights, peak, at_most=True)


def _scores(
    run: RecipePass,
    recipes: Sequence[Recipe],
    task: Task,
    heads: list[nn.Module],
    batch_size: int,
    on_progress: Callable[[str, int], None],
) -> dict[Recipe, float]:
    """What recipes of one pass score; filters are fitted on all that the task embeds. NaN where there is no score."""
    places: dict[tuple[str | None, str], int] = {}
    parts = []
    for role, texts in task.inputs():
        prompt = task.prompt(role)
        # Long texts with long ones, so that little is padding.
        new = sorted((text for text in texts if (prompt, text) not in places), key=len)
        places |= {(prompt, text): place for place, text in enumerate(new, start=len(places))}
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            parts.append(run.encode(batch, prompt, batch_size))
            on_progress(run.recipes[0].row.name, len(batch))
    found = {}
    for recipe in recipes:
        vectors, module = torch.cat([part[reading(recipe)] for part in parts]), None
        try:
            if recipe.filter is not None and recipe.filter.fitted:
                moments = Moments(vectors.shape[1])
                moments.add(vectors)
                module = recipe.filter.from_moments(moments)
            elif recipe.filter is not None:
                if not heads:
                    # The same for all, and on a large model not cheap.
                    heads.append(EmbeddingFilter.from_language_model(run.module))
                module = heads[0]
        except ValueError:
            found[recipe] = math.nan
            continue
        if module is not None:
            with torch.inference_mode():
                vectors = module({"sentence_embedding": vectors})["sentence_embedding"]

        def look_up(texts: Sequence[str], role: Role, vectors: Tensor = vectors) -> Tensor:
            return vectors[[places[task.prompt(role), text] for text in texts]]

        found[recipe] = task.score(Vectors(look_up))
    return found


def with_selection(found: Found, comparison: Comparison) -> Comparison:
    """The comparison of a search's finalists on the pairs that were held out, with a word on how they were chosen.

    The best of many scores is too high: a search chooses luck, too. What it gained over the recipe without any choice
    on the pairs it chose on, less what that choice gains on the others, is about how much of it was luck.

    Args:
        found: What the search found.
        comparison: Of ``found.recipes()`` on ``found.held_out``, with ``found.chosen`` as what was chosen before.
    """
    column, chosen, noun = comparison.tasks[0], found.chosen, found.held_out.noun
    scores = {each.name: each.scores[column.name].value for each in comparison.results if column.name in each.scores}
    steps = ", then ".join(f"{rung.candidates} recipes on {rung.items} {noun}" for rung in found.rungs)
    says = [
        f"The search scored {steps}, and chose {chosen}. The scores shown are of {len(found.held_out)} other {noun}, "
        + ("which it never read." if noun in ("queries", "texts") else "whose texts it never read."),
    ]
    if found.finalists[0] == PLAIN:
        says.append("It found nothing better than the recipe without any choice.")
    else:
        held = scores[chosen] - scores[PLAIN.result]
        says.append(
            f"Where it was chosen it was ahead of {PLAIN.result} by {column.show(found.gain)}, on the {noun} held out "
            f"by {column.show(held)}: {column.show(found.gain - held)} of the gain was selection. With few {noun} that "
            "difference is itself uncertain; the intervals say by how much."
        )
    return replace(
        comparison,
        chosen=chosen,
        verdict=[*says, *comparison.verdict],
        settings={
            **comparison.settings,
            "searched": f"{found.rungs[0].candidates} recipes, on {len(found.chosen_on)} {noun}",
            "shown": f"{len(found.held_out)} {noun} that were held out",
        },
    )
