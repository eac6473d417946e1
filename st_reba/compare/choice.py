"""What is free in a recipe, and an honest score of choosing it: made on one half of the data, scored on the other.

A recipe can be read at other layers, its prompt can end in other words, and the parts of its vectors can count for
more or less: each combination is a candidate. On each half of the items the best candidate is taken, and what counts is
its score on the other half. Filters are fitted the same way, without labels: a half is embedded with the statistics of
the other half's texts. The score of a row is the mean of the two halves'; it is that of choosing, not of one candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..data.tables import Classes, Labelled
from ..evaluation.bootstrap import Estimate, Resampled, by_halves, difference
from ..evaluation.tasks import Measured, Score
from ..modules import TopicModule
from ..reading.layers import reads_one_layer
from ..recipes import Recipe
from ..recipes.recipe import Row, Wording
from ..recipes.rows import CLASSICAL
from ..text.templates import SLOT, TEMPLATES

#: The fewest pairs, triplets, queries or texts that recipes are told apart by.
LEAST_ITEMS = 30
#: The fewest texts that a filter is fitted on; where a half of the user's own has fewer, the package's are taken.
LEAST_TEXTS = 50

#: After which share of the layers a recipe is read besides its own end and the layer below.
NINE_TENTHS = 0.9

#: What the nested choice among all candidates of all rows is called, in tables and in saved comparisons.
CHOICE = "Choice of all"


# What is free


def with_candidates(recipe: Recipe, depth: int, prompts: Sequence[str] = ()) -> list[Recipe]:
    """A recipe as it is, and every other combination of layer, wording and shares.

    What one has without a recipe stays as it is, and so does what the user asked for by its layer. A recipe whose last
    layers attend both ways is read at its own end alone, as each other layer would take a pass of its own.

    Args:
        recipe: As it was asked for.
        depth: Layers of the model.
        prompts: What is tried in place of its own prompt: see :func:`wordings_of`. None given: the row's other
            wordings.

    Raises:
        ValueError: As :func:`wordings_of`.
    """
    row = recipe.row
    if recipe.layer is not None or "bidirectional_layers" in row.settings or row is CLASSICAL:
        return [recipe]
    layers: list[int | None] = [None]
    if reads_one_layer(row.module) or row.module is TopicModule:
        end = depth + 1 + row.end
        below = dict.fromkeys((end - 1, round(NINE_TENTHS * depth)))
        layers += [layer for layer in below if 0 < layer < end]
    worded = wordings_of(prompts, row) if prompts and row.reworded else row.wordings
    return [
        replace(recipe, layer=layer, wording=wording, shares=shares, candidate_of=recipe.result)
        for layer in layers
        for wording in (None, *worded)
        for shares in ((), *_shares(row.parts))
    ]


def _shares(parts: int) -> list[tuple[float, ...]]:
    """A coarse grid of what P parts count for: each in turn twice as much as each of the others."""
    weights = np.ones((parts, parts)) + np.eye(parts)
    return [tuple((own / own.sum()).tolist()) for own in weights] if parts > 1 else []


def told_of(choice: Choice) -> str:
    """What was taken, as a table's column shows it: once where both halves took the same; empty: nothing new."""
    first, second = map(in_short, choice.taken)
    return first if first == second else f"{first or 'as it is'} / {second or 'as it is'}"


def in_short(recipe: Recipe) -> str:
    """How a candidate differs from its recipe as it is, as a table's column shows it; empty if it does not."""
    layer = "" if recipe.layer is None else f"@{recipe.layer}"
    wording = "" if recipe.wording is None else recipe.wording.name
    # The part that counts twice.
    part = f"part {1 + int(np.argmax(recipe.shares))} twice" if recipe.shares else ""
    return " ".join(filter(None, (layer, wording, part)))


def wordings_of(lines: Sequence[str], row: Row) -> list[Wording]:
    """What a user wants to try in place of a row's own prompt.

    Args:
        lines: One a prompt, with ``{text}`` where the text stands. What stands before it takes the place of the row's
            own beginning; nothing there: that stands. What stands behind it is the ending, behind the last copy.
        row: Asks for one word.

    Raises:
        ValueError: If a line has no ``{text}``, or more than one.
    """
    beginning, *between, _ = str(TEMPLATES[row.settings["template"]]).split(SLOT)
    found = []
    for number, line in enumerate(lines, start=1):
        if line.count(SLOT) != 1:
            raise ValueError(
                f"Prompt {number}, {line!r}, has {line.count(SLOT)} slots: write {SLOT} once, where the text stands, "
                f'as in {SLOT}" and its topic in one word is:"'
            )
        own, ending = line.split(SLOT)
        found.append(Wording(f"prompt {number}", SLOT.join([own or beginning, *between, ending])))
    return found


# The halves


@dataclass(frozen=True)
class Halves:
    """Labelled data in two halves that share no text, but for the documents of a retrieval task.

    Of texts in classes, each half has about half of every class, so that neighbours of the half can tell it; a class of
    two or three texts is in one half as a whole.

    Attributes:
        whole: The items of the first half, then those of the second.
        parts: The two.
    """

    whole: Labelled
    parts: tuple[Labelled, Labelled]

    @classmethod
    def of(cls, data: Labelled, seed: int = 0) -> Halves:
        """Two halves of nearly one size, in random order; items that have a text in common stay together.

        The documents of a retrieval task are no items: both halves of its queries are among all of them.

        Args:
            data: At least twice :data:`LEAST_ITEMS`.
            seed: Of the shuffle.

        Raises:
            ValueError: If there are too few items, or too many of them hang together, or a half has one class alone.
        """
        if len(data) < 2 * LEAST_ITEMS:
            raise ValueError(
                f"A choice is made on one half of the {data.noun} and scored on the other: {len(data)} {data.noun} are "
                f"too few, give {2 * LEAST_ITEMS} or more."
            )
        generator = np.random.default_rng(seed)
        cut = _by_class(data, generator) if isinstance(data, Classes) else _by_text(data, generator)
        first, second = (generator.permutation(half).tolist() for half in cut)
        return cls(data.part([*first, *second]), (data.part(first), data.part(second)))

    @property
    def fit_on(self) -> list[tuple[str, ...]]:
        """For each half the texts of the other one, which filters are fitted on; empty where they are too few."""
        others = [tuple(part.texts()) for part in reversed(self.parts)]
        return others if min(map(len, others)) >= LEAST_TEXTS else []


def _by_text(data: Labelled, generator: np.random.Generator) -> tuple[list[int], list[int]]:
    """The indices of each half's items."""
    groups = _groups(data.items())
    halves: tuple[list[int], list[int]] = ([], [])
    for index in generator.permutation(len(groups)):
        min(halves, key=len).extend(groups[index])
    if min(map(len, halves)) < LEAST_ITEMS:
        raise ValueError(
            f"A choice needs two halves that share no text, but {max(map(len, groups))} of the {len(data)} "
            f"{data.noun} hang together by texts that they share. Give {data.noun} of more different texts."
        )
    return halves


def _by_class(data: Classes, generator: np.random.Generator) -> tuple[list[int], list[int]]:
    """The indices of each half's texts."""
    of_class: dict[str, list[int]] = {}
    labels = list(data.labels.values())
    for index in generator.permutation(len(labels)).tolist():
        of_class.setdefault(labels[index], []).append(index)
    halves: tuple[list[int], list[int]] = ([], [])
    # The smallest last: they even out what is left over.
    for own in sorted(of_class.values(), key=len, reverse=True):
        shorter, longer = sorted(halves, key=len)
        cut = len(own) if len(own) < 4 else (len(own) + 1) // 2
        shorter.extend(own[:cut])
        longer.extend(own[cut:])
    if any(len({labels[index] for index in half}) < 2 for half in halves):
        raise ValueError(
            "A choice needs two classes in each half, but only one class has four texts or more, so that it can be "
            "halved. Give more texts of another."
        )
    return halves


def _groups(items: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Indices of items that hang together by their texts."""
    count = len(items)
    places = {text: place for place, text in enumerate(dict.fromkeys(text for item in items for text in item), count)}
    edges = [(index, places[text]) for index, item in enumerate(items) for text in item]
    graph = coo_array((np.ones(len(edges)), tuple(np.transpose(edges))), shape=(count + len(places),) * 2)
    labels = connected_components(graph, directed=False)[1][:count]
    found: dict[int, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        found.setdefault(label, []).append(index)
    return list(found.values())


# The choice


@dataclass(frozen=True)
class Choice:
    """What was taken of some candidates.

    Attributes:
        taken: On the first half and on the second; each is scored on the other.
        candidates: How many there were.
        measured: Of what that gives for each item, (N,), what decides, by what it is.
        gain: How much more it scores than the recipe as it is; None where there was nothing to choose, or more than one
            recipe.
    """

    taken: tuple[Recipe, Recipe]
    candidates: int
    measured: Measured
    gain: Estimate | None = None


def choices_of(
    recipes: Sequence[Recipe], score: Score, measured: Mapping[str, Measured], first: int
) -> dict[str, Choice]:
    """What is taken of each recipe's candidates, by the recipe's result; and of all, by :data:`CHOICE`.

    A recipe as it is stands, unless a candidate is ahead of it by more than the standard error of their difference on
    the half that chooses. Controls are not chosen from.

    Args:
        recipes: All candidates, each recipe as it is before its others.
        score: What decides; more is better.
        measured: Of what each gives for each item, (N,), what decides, by its result.
        first: How many items the first half has.
    """
    rows: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        if not recipe.control:
            rows.setdefault(recipe.candidate_of or recipe.result, []).append(recipe)
    items = score.items(measured)
    halves = (slice(first), slice(first, None))
    parts = [items.part(half) for half in halves]
    scores = [dict(zip(part.recipes, np.nan_to_num(part.scores, nan=-np.inf), strict=True)) for part in parts]

    def highest(own: Sequence[Recipe], half: int) -> Recipe:
        return max(own, key=lambda each: scores[half][each.result])

    def best(own: Sequence[Recipe], half: int) -> Recipe:
        lead = highest(own, half)
        names = (own[0].result, lead.result)
        both = replace(parts[half], values={name: parts[half].values[name] for name in names})
        spread = np.nanstd(both.replicates[-1] - both.replicates[0]) if np.isfinite(both.scores).all() else 0
        return lead if scores[half][lead.result] - scores[half][own[0].result] > spread else own[0]

    def choice(taken: tuple[Recipe, Recipe], candidates: int) -> Choice:
        # Each half is scored by what was taken on the other.
        scored = [measured[own.result] for own in reversed(taken)]
        return Choice(taken, candidates, joined([
            {name: values[half] for name, values in own.items()} for own, half in zip(scored, halves, strict=True)
        ]))  # fmt: skip

    found = {}
    for name, own in rows.items():
        taken = choice((best(own, 0), best(own, 1)), len(own))
        if len(own) > 1:
            both = score.items({"taken": taken.measured, "as it is": measured[own[0].result]})
            taken = replace(taken, gain=gain_of(by_halves(both, first)))
        found[name] = taken
    if len(recipes) > 1 and rows:
        leads = [[own.taken[half] for own in found.values()] for half in range(2)]
        found[CHOICE] = choice((highest(leads[0], 0), highest(leads[1], 1)), sum(map(len, rows.values())))
    return found


def gain_of(items: Resampled) -> Estimate:
    """How much more the first of two scores than the second, with its interval; tied if that cannot be told from 0."""
    value = float(items.scores[0] - items.scores[1])
    low, high = difference(items, *items.recipes)
    return Estimate(value, low, high, tied=not (low > 0 or high < 0))


def joined(halves: Sequence[Measured]) -> Measured:
    """What was measured on the items of each half, one after another."""
    return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
