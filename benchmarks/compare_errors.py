"""Error rates of ``st-reba compare``: rows of ``benchmarks/results/compare_errors.csv``.

The truth of simulated data is known. The package's own functions split them, choose, score, resample and answer. Each
run has its own seed and is kept, and a stopped script is resumed::

    python benchmarks/compare_errors.py --cells ahead bias --runs 40
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

import records
from runs import options, parser
from st_reba.compare.answer import WITHOUT, Answer, answer_of
from st_reba.compare.results import Result
from st_reba.compare.splits import CrossFit, CrossFitted, Splits
from st_reba.data.tables import Classes, Labelled, Pairs, Triplets
from st_reba.evaluation.bootstrap import Replicated
from st_reba.evaluation.tasks import Task, Vectors, task_of

Array = NDArray[np.float64]
Generator = np.random.Generator
#: Quantities of one run by name.
Run = dict[str, float]
SPEARMAN, PRECISION, ACCURACY, NEIGHBOURS = "Spearman", "average precision", "accuracy", "neighbours' accuracy"
#: Quantities of an answer.
PLAIN, CONTROLS = "said to be ahead of what is there without a recipe", "said to be ahead of every control"
COVERED, BIAS, BEFORE = "interval covers the truth", "bias of the score", "bias before the correction"
APART, ANSWER = "equal recipes told apart", "an answer is given"
#: Promised bounds: the least and the largest value.
PROMISED: dict[str, tuple[float | None, float | None]] = {
    PLAIN: (None, 0.05), CONTROLS: (None, 0.05), COVERED: (0.93, None), BIAS: (-0.02, 0.02), APART: (None, 0.06),
    ANSWER: (1.0, None),
}  # fmt: skip
#: Points by which a recipe is truly ahead of all others.
POINTS = (3, 5, 8)

# Standard deviations of the noise of all rows, of a recipe's candidates, and of a candidate alone.
_SHARED, _RECIPE, _CANDIDATE = 0.8, 0.45, 0.3
_ALONE = float(np.hypot(_RECIPE, _CANDIDATE))
# Difference of strength from rows that must not be mistaken for a recipe.
_WEAKER = 0.5
_DIMENSIONS, _CLASSES = 8, 5
# Strength of equal recipes.
_STRENGTH = {SPEARMAN: 1.0, PRECISION: 2.0, ACCURACY: 0.4, NEIGHBOURS: 1.0}
# Strengths whose true scores are computed, the size of a population, and the number of samples for a mean.
_STRENGTHS = np.linspace(-0.5, 4.5, 51)
_POPULATION, _SAMPLES = 200_000, 400


# Data and values


@dataclass(frozen=True)
class World:
    """Simulated items and recipes.

    Attributes:
        metric: Metric of the score.
        items: n.
        recipes: R.
        candidates: C; 1: nothing is chosen.
        positives: Number of pairs that are alike.
        strength: Factor of the truth in the recipes' values.
        spread: Standard deviation of the strengths of recipes, and of the candidates of one.
        weaker: Difference of strength to the row without a recipe and the best control.
        anchors: Number of different first texts of the pairs; 0: as many as pairs.
        copies: Number of copies of each pair.
    """

    metric: str = SPEARMAN
    items: int = 200
    recipes: int = 10
    candidates: int = 10
    positives: int = 0
    strength: float = 1.0
    spread: float = 0.0
    weaker: float = 0.0
    anchors: int = 0
    copies: int = 1

    @property
    def name(self) -> str:
        """Digest of all attributes."""
        return f"{zlib.crc32(json.dumps(asdict(self)).encode()):08x}"


@dataclass(frozen=True)
class Rows:
    """Values of all rows.

    Attributes:
        data: The items.
        truth: True values, (n,).
        values: By row, (C, n); for texts in classes vectors, (C, n, D).
        strengths: By recipe, (C,).
    """

    data: Labelled
    truth: Array
    values: Mapping[str, Array]
    strengths: Mapping[str, Array]


def simulated(world: World, draw: Generator) -> Rows:
    """Return items, and the values of recipes, of the rows without one and of controls."""
    truth, shape = truth_of(world, world.items, draw), (world.recipes, world.candidates)
    strengths = world.strength + world.spread * (draw.normal(size=(world.recipes, 1)) + draw.normal(size=shape))
    # The first row without a recipe and the first control are the best ones.
    fixed = world.strength - world.weaker - np.array([0, _WEAKER, 0, _WEAKER, _WEAKER])
    shared = _SHARED * noise(world, (), draw)
    of_recipe = shared + _RECIPE * noise(world, (world.recipes, 1), draw)
    recipes = values_of(world, strengths, truth, of_recipe + _CANDIDATE * noise(world, shape, draw))
    others = values_of(world, fixed, truth, shared + _ALONE * noise(world, fixed.shape, draw))
    names = [f"recipe {number}" for number in range(world.recipes)]
    beside = [*WITHOUT, *(f"control {number}" for number in range(3))]
    values = dict(zip([*names, *beside], [*recipes, *others[:, None]], strict=True))
    return Rows(data_of(world, truth), truth, values, dict(zip(names, strengths, strict=True)))


def truth_of(world: World, n: int, draw: Generator) -> Array:
    """Return the true values of n items, (n,)."""
    if world.metric == PRECISION:
        return np.asarray(draw.permutation(n) < round(n * world.positives / world.items), dtype=np.float64)
    if world.metric == NEIGHBOURS:
        return np.arange(n, dtype=np.float64) % _CLASSES
    return np.ones(n) if world.metric == ACCURACY else draw.normal(size=n)


def noise(world: World, shape: tuple[int, ...], draw: Generator) -> Array:
    """Return noise of items, (..., n) or (..., n, D); pairs with the same first text have half of it in common."""
    own = draw.normal(size=(*shape, world.items, *([_DIMENSIONS] if world.metric == NEIGHBOURS else [])))
    if not world.anchors:
        return own
    common = draw.normal(size=(*shape, world.anchors))
    return np.asarray((own + common[..., anchor_of(world)]) / np.sqrt(2))


def values_of(world: World, strengths: Array, truth: Array, noises: Array) -> Array:
    """Return values, (..., n) or (..., n, D), of strengths (...)."""
    if world.metric == NEIGHBOURS:
        centres = np.random.default_rng(0).normal(size=(_CLASSES, _DIMENSIONS))
        return np.asarray(strengths[..., None, None] * centres[truth.astype(int)] + noises)
    values = strengths[..., None] * truth + noises
    return np.asarray(values > 0, dtype=np.float64) if world.metric == ACCURACY else values


def anchor_of(world: World) -> NDArray[np.int64]:
    """Return the number of the first text of each pair, (n,)."""
    return np.arange(world.items) * (world.anchors or world.items) // world.items


def data_of(world: World, truth: Array) -> Labelled:
    """Return items, whose texts are in alphabetical order: :meth:`Splits.of` leaves it as it is."""
    first, second, third = ([f"{side} {number:05d}" for number in range(len(truth))] for side in "abc")
    if world.metric == ACCURACY:
        return Triplets(first, second, third)
    if world.metric == NEIGHBOURS:
        return Classes(dict(zip(first, map(str, truth), strict=True)))
    if world.anchors:
        first = [f"a {number:05d}" for number in anchor_of(world)]
    grades = np.round(np.clip(2.5 + 1.2 * truth, 0, 5) * 5) / 5
    scores = (truth if world.metric == PRECISION else grades).tolist()
    again = world.copies
    return Pairs(first * again, second * again, scores * again, two_classes=world.metric == PRECISION)


# Scores and answers of the package


class Compared:
    """Rows that are scored as ``compare`` scores them.

    Args:
        world: World of the data.
        rows: Values of all rows.

    Attributes:
        rows: Scores by row.
    """

    def __init__(self, world: World, rows: Rows) -> None:
        self.splits = Splits.of(rows.data, choose=world.candidates > 1)
        self._parts = [*self.splits.halves, np.arange(len(self.splits.data))]
        self.score = self.splits.tasks[-1].scores[0]
        self.fit = CrossFit(self.splits, self.score.kind, self.score.labels)
        self.rows: dict[str, CrossFitted] = {}
        for name, values in rows.values.items():
            self.add(name, values)

    def add(self, name: str, values: Array) -> None:
        """Score one row, of values (C, n) or (C, n, D); without a choice, of the first candidate."""
        values = values if self.splits.chooses else values[:1]

        @cache
        def measured(part: int) -> Array:
            return np.stack([measured_by(self.splits.tasks[part], own) for own in values[:, self._parts[part]]])

        self.rows[name] = self.fit.row(lambda choosing, part: measured(part), len(values), fitted=False)

    @property
    def replicated(self) -> Replicated:
        scores = {name: row.score for name, row in self.rows.items()}
        drawn = {name: row.drawn for name, row in self.rows.items()}
        own = {name for name in self.rows if name.startswith("recipe")}
        return Replicated(scores, drawn, self.score.kind, len(self.splits.data), own, self.splits.sure)

    def answer(self) -> Answer | None:
        replicated, column, results = self.replicated, self.score.column, []
        for name, own in replicated.estimates().items():
            recipe, _, pooling = name.partition(", ")
            results.append(Result(recipe, pooling, name.startswith("control"), {column.name: own}))
        return answer_of(results, column, replicated)


def measured_by(task: Task, values: Array) -> Array:
    """Return the values of a task, (n,), from values (n,) or vectors (n, D)."""
    if values.ndim == 1:
        return values
    vectors = torch.from_numpy(values)
    return task.measure(Vectors(lambda texts, role: vectors))[task.scores[0].of]


# Truth


def score_of(world: World, strength: float) -> float:
    """Return the true score of a strength.

    It is that of the population; of average precision and neighbours, whose scores depend on the number of items, the
    mean over samples of the size that is scored.
    """
    return float(np.interp(strength, _STRENGTHS, _true_scores(_items_of(world))))


def strength_of(world: World, score: float) -> float:
    """Return the strength that has a true score."""
    return float(np.interp(score, _true_scores(_items_of(world)), _STRENGTHS))


def _items_of(world: World) -> World:
    """Return the same items without recipes."""
    return World(world.metric, world.items, 0, world.candidates, world.positives)


@cache
def _true_scores(world: World) -> Array:
    """Return the true score of each of :data:`_STRENGTHS`."""
    sampled, draw = world.metric in (PRECISION, NEIGHBOURS), np.random.default_rng(0)
    size = world.items // (2 if world.candidates > 1 else 1) if sampled else _POPULATION
    sample = replace(world, items=size, positives=round(world.positives * size / world.items))
    found = []
    for _ in range(_SAMPLES if sampled else 1):
        truth = truth_of(sample, size, draw)
        noises = np.hypot(_SHARED, _ALONE) * noise(sample, (), draw)
        task = task_of(data_of(sample, truth))
        score = task.scores[0]
        measured = {
            str(strength): {score.of: measured_by(task, values_of(sample, strength, truth, noises))}
            for strength in _STRENGTHS
        }
        found.append(score.items(measured).scores)
    return np.asarray(np.mean(found, axis=0))


# Runs


def answered(world: World, draw: Generator) -> Run:
    """Return the quantities of one answer."""
    rows = simulated(world, draw)
    made = Compared(world, rows)
    answer, replicated = made.answer(), made.replicated
    if answer is None:
        return {ANSWER: 0.0}
    best, score = answer.best.name, answer.score
    true = score_of(world, rows.strengths[best][made.rows[best].built])
    return {
        ANSWER: float(np.isfinite(score.value)),
        PLAIN: float(answer.ahead),
        CONTROLS: float(not answer.others),
        COVERED: float(score.low <= true <= score.high),
        BIAS: score.best_guess - true,
        BEFORE: score.value - true,
        APART: float(not all(replicated.tied(name) for name in rows.strengths)),
    }


def ahead_by(points: int) -> str:
    return f"named where {points} points ahead"


def stronger(world: World, draw: Generator) -> Run:
    """Return whether a recipe is named that is truly ahead of all others, by how many points it is."""
    rows = simulated(world, draw)
    made, found = Compared(world, rows), {}
    for points in POINTS:
        strength = strength_of(world, score_of(world, world.strength) + points / 100)
        made.add("recipe 0", rows.values["recipe 0"] + (strength - world.strength) * rows.truth)
        answer = made.answer()
        found[ahead_by(points)] = float(answer is not None and answer.use == "recipe 0")
    return found


@dataclass(frozen=True)
class Cell:
    """Runs of one world.

    Attributes:
        name: Name for ``--cells``; several cells may share it.
        world: World that is simulated.
        quantities: Quantities to record.
        case: Difference of the recipes or items from others of the same size.
        run: Function from a world and random numbers to the quantities of one run.
        runs: Number of runs.
    """

    name: str
    world: World
    quantities: Sequence[str]
    case: str = "equal"
    run: Callable[[World, Generator], Run] = answered
    runs: int = 500

    def complete(self, runs: int, directory: Path) -> list[Run]:
        """Return the first runs; make and keep those that are missing."""
        file = directory / f"{self.run.__name__}-{self.world.name}.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        with file.open("a", buffering=1) as kept:
            for number in range(len(found), runs):
                found.append(self.run(self.world, np.random.default_rng([int(self.world.name, 16), number])))
                kept.write(json.dumps(found[-1]) + "\n")
        return found[:runs]

    def rows(self, runs: Sequence[Run]) -> Iterator[records.Record]:
        """Yield a row for each quantity: its mean, with a 95% interval."""
        for quantity in self.quantities:
            values = np.array([run[quantity] for run in runs if quantity in run])
            mean, spread = values.mean(), norm.ppf(0.975) * values.std() / np.sqrt(len(values))
            least, largest = PROMISED.get(quantity, (None, None))
            yield {
                "quantity": quantity, "metric": self.world.metric, "items": self.world.items,
                "recipes": self.world.recipes, "candidates": self.world.candidates, "case": self.case,
                "runs": len(values), "value": round(float(mean), 4), "low": round(float(mean - spread), 4),
                "high": round(float(mean + spread), 4), "at_least": least, "at_most": largest,
            }  # fmt: skip


def equal(metric: str, items: int, recipes: int = 10, candidates: int = 10) -> World:
    """Return a world in which all recipes, the row without one and the best control are equal."""
    positives = {40: 16, 60: 20, 200: 50}[items] if metric == PRECISION else 0
    return World(metric, items, recipes, candidates, positives, _STRENGTH[metric])


def differing(world: World) -> World:
    """Return the same with recipes and candidates of different strengths, ahead of all other rows."""
    return replace(world, spread=_STRENGTH[world.metric] / 10, weaker=_STRENGTH[world.metric] / 2)


def cells() -> Iterator[Cell]:
    """Yield all cells in the order in which they run."""
    choosing, as_they_are, metrics = (10, 10), (51, 1), (SPEARMAN, PRECISION, ACCURACY)
    for metric, items, size in product(metrics, (40, 60, 200), (choosing, as_they_are)):
        yield Cell("ahead", equal(metric, items, *size), (PLAIN, CONTROLS), runs=1000)
    for world in (equal(metric, 200) for metric in metrics):
        yield Cell("bias", world, (BIAS, BEFORE))
        yield Cell("bias", differing(world), (BIAS, BEFORE), "differing")
    shared, copied = replace(equal(SPEARMAN, 200), anchors=40), replace(equal(SPEARMAN, 20), copies=10)
    yield Cell("apart", shared, (APART,), "40 first texts, 5 pairs each")
    yield Cell("apart", copied, (APART,), "20 pairs, 10 copies each")
    for metric, sizes in {SPEARMAN: (60, 200), PRECISION: (60, 200), NEIGHBOURS: (100, 200)}.items():
        for items, size in product(sizes, ((10, 2) if metric == NEIGHBOURS else choosing, as_they_are)):
            world = replace(equal(metric, items, *size), positives=20 if metric == PRECISION else 0)
            yield Cell("covered", world, (COVERED,))
            if size != as_they_are:
                yield Cell("covered", differing(world), (COVERED,), "differing")
    for items, alike in ((60, 2), (60, 5), (200, 6), (200, 16)):
        world = replace(equal(PRECISION, items), positives=alike)
        yield Cell("answer", world, (ANSWER,), f"{alike} pairs alike")
    for items in (100, 300, 1000):
        yield Cell("power", equal(SPEARMAN, items), tuple(map(ahead_by, POINTS)), "one ahead", stronger)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/compare-errors", data=False, threads=1)
    every = list(cells())
    names = list(dict.fromkeys(cell.name for cell in every))
    made.add_argument("--cells", nargs="+", choices=names, default=names, help="those to run")
    made.add_argument("--runs", type=int, help="of each cell; default: 1,000 of false answers, 500 of most others")
    given = options(made, arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for cell in every:
        if cell.name in given.cells:
            rows = list(cell.rows(cell.complete(given.runs or cell.runs, given.out)))
            about = {"machine": records.machine("cpu", given.threads), **records.today()}
            records.rewrite("compare_errors", [{**row, **about} for row in rows], given.results)
            print(*(tuple(row.values()) for row in rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
