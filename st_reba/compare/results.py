"""Results of a comparison: plain data that the terminal, a report and a model card show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ..evaluation.bootstrap import Array, Estimate, half_widths
from ..evaluation.tasks import Measure
from ..files import atomic_file
from ..version import __version__

#: Mark of a score that cannot be told from the best.
TIED = "\N{ALMOST EQUAL TO}"

#: More names than this are a count.
LISTED = 3


def listed(names: Iterable[str], what: str) -> str:
    """Return up to three names, or their number."""
    entries = list(names)
    return "; ".join(entries) if len(entries) <= LISTED else f"{len(entries)} {what}"


def measured(value: float) -> str:
    """Return a time, a speed or a cost to two significant digits; further ones vary from run to run."""
    if not value > 0 or math.isinf(value):
        return f"{value:g}"
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def _nan_for_null(value: object) -> object:
    """Return NaN for the null that :meth:`Comparison.save` writes for it."""
    return math.nan if value is None else value


def _nan_in(score: object) -> object:
    """Return a score with NaN for null; no score has no ``corrected``."""
    if not isinstance(score, dict):
        return score
    return {name: value if name == "corrected" else _nan_for_null(value) for name, value in score.items()}


@dataclass(frozen=True)
class Control:
    """Control that a recipe is compared with.

    Attributes:
        kind: Its kind.
        name: Name of its result.
    """

    kind: Literal["tf-idf", "bag", "filtered bag", "random"]
    name: str


@dataclass(frozen=True)
class Result:
    """Result of one recipe or control.

    Attributes:
        recipe: Name of the recipe, such as ``"ReBA-2"``.
        pooling: Pooling of the token vectors, such as ``"mean"``.
        control: Whether it is a control.
        scores: Estimates by task name; a task that does not apply to the recipe is missing.
        sentences_per_second: Texts that it embeds a second, run alone; in processor time on a CPU, else (and on
            Windows) by the clock. None if it was not timed.
        cost: Time as a multiple of the classical embedding's under the same pooling; None if it was not timed.
        spec: Recipe as ``st-reba build --recipe`` takes it; empty if there is none.
        description: Sentence that describes the recipe; may be empty.
        controls: Controls of this recipe.
        read_at: Settings that all items choose: layer, words, weights of parts; empty: the recipe as it is.
        template: Prompt that all items choose; empty: the recipe's own.
        part_weights: Weights of parts that all items choose; empty: the recipe's own.
        chosen: Number of halves that chose each setting, by its name in ``read_at``.
        by_layer: Score on all items after each layer that was tried, by its number, with the words and weights of
            ``read_at``; empty where one layer was tried.
    """

    recipe: str
    pooling: str
    control: bool
    scores: dict[str, Annotated[Estimate, BeforeValidator(_nan_in)]]
    sentences_per_second: float | None = None
    cost: float | None = None
    spec: str = ""
    description: Annotated[str, Field(alias="says")] = ""
    controls: tuple[Control, ...] = ()
    read_at: str = ""
    template: str = ""
    part_weights: Annotated[tuple[float, ...], Field(alias="shares")] = ()
    chosen: dict[str, int] = field(default_factory=dict)
    by_layer: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Recipe and pooling."""
        return ", ".join(filter(None, (self.recipe, self.pooling)))


def has_number(result: Result, task: Measure) -> bool:
    """Return whether a result has a score on a task that is not NaN."""
    return task.name in result.scores and not math.isnan(result.scores[task.name].value)


def rank(result: Result, task: Measure) -> float:
    """Return a key that sorts the best first and results without a number last."""
    return -result.scores[task.name].value if has_number(result, task) else math.inf


def best_of(results: Iterable[Result], task: Measure) -> Result | None:
    """Return the best recipe on a task; the earliest of equals, None if none has a number."""
    scored = [result for result in results if not result.control and has_number(result, task)]
    return min(scored, key=lambda result: rank(result, task), default=None)


# A whole comparison


@dataclass(frozen=True)
class SavedReplicates:
    """Bootstrap replicates of the score that decides, which pair two comparisons of the same items.

    Attributes:
        drawn_from: Fingerprint of the items, the splits and the seeds.
        scores: (B,) by result, as precise as float32.
    """

    drawn_from: str
    scores: dict[str, list[Annotated[float, BeforeValidator(_nan_for_null)]]]

    @classmethod
    def of(cls, drawn_from: str, drawn: Mapping[str, Any]) -> SavedReplicates:
        """Return replicates with the fewest digits that are the same in float32."""
        digits = {name: map(str, np.asarray(values, dtype=np.float32)) for name, values in drawn.items()}
        return cls(drawn_from, {name: list(map(float, numbers)) for name, numbers in digits.items()})


@dataclass(frozen=True)
class Comparison:
    """All recipes on one model and one set of data.

    Attributes:
        model: Name of the model as it was given; of a file, the file's name.
        data: Description of the data.
        tasks: Columns of the table; the first one decides which recipe is best.
        results: Rows of the table, controls among them.
        verdict: Sentences that say what the answer rests on.
        skipped: Names of recipes that could not run, each with the reason.
        lengths: Number of tokens of each text.
        settings: Values by name.
        versions: Versions of packages by name.
        command: Command that made the comparison, as typed.
        date: Day, ISO 8601.
        answer: Recipe to use, its score, and the score without a recipe, in one line.
        use: Name of the result to use; empty for none.
        build: Command that builds that recipe; empty for none.
        replicates: Bootstrap replicates of the first task; None in a comparison of 0.8.
        prompts: Prompts of the roles ``"query"`` and ``"document"``.
    """

    #: Lets :meth:`load` ignore the fields of older versions.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    model: str
    data: str
    tasks: Annotated[list[Measure], Field(min_length=1)]
    results: list[Result]
    verdict: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    answer: str = ""
    use: str = ""
    build: str = ""
    replicates: SavedReplicates | None = None
    prompts: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write JSON, the answer first; NaN becomes null.

        Raises:
            OSError: If it cannot be written.
        """
        with atomic_file(path, "w") as file:
            json.dump(self.as_json(), file, ensure_ascii=False, indent=1)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object, the answer first; NaN becomes None."""
        # pydantic writes null for NaN.
        return {"answer": self.answer, "build": self.build, **json.loads(_schema().dump_json(self, by_alias=True))}

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Read a comparison that :meth:`save` of this version or of 0.8 wrote.

        Raises:
            ValueError: If it is no such comparison.
            OSError: If it cannot be read.
        """
        try:
            return _schema().validate_json(path.read_bytes())
        except ValidationError as error:
            problem = f"{path} is no comparison that st_reba {__version__} reads ({_first_fault(error)})."
            raise ValueError(f"{problem} Give the comparison.json of a report, or run the comparison again.") from None

    def choice(self) -> Result:
        """Return the recipe to use, or else the best.

        Raises:
            ValueError: If no recipe has a score on the first task.
        """
        return next((result for result in self.results if result.name == self.use), None) or self.best()

    @property
    def on_random_weights(self) -> dict[str, Result]:
        """Controls on random weights, by the name of the result whose control they are."""
        named = {result.name: result for result in self.results}
        return {
            result.name: named[control.name]
            for result in self.results
            for control in result.controls
            if control.kind == "random" and control.name in named
        }

    def best(self) -> Result:
        """Return the recipe with the best score on the first task; the earliest of equals.

        Raises:
            ValueError: If no recipe has a score there.
        """
        best = best_of(self.results, self.tasks[0])
        if best is None:
            raise ValueError(f"No recipe has a score on {self.tasks[0].name!r}, which decides which is best.")
        return best


# The table


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        score: Score and interval.
        best: Whether no recipe of its column is better; never for a control.
        tied: Whether it cannot be told from the best; never for a control, nor for the best.
        random: Score on random weights; None where there is none.
    """

    score: Estimate
    best: bool
    tied: bool
    random: Estimate | None


@dataclass(frozen=True)
class TableRow:
    """One row of the table.

    Attributes:
        result: Result that the row shows.
        cells: One for each task; None where the task does not apply.
    """

    result: Result
    cells: list[Cell | None]


def rows(comparison: Comparison, results: Iterable[Result] | None = None) -> list[TableRow]:
    """Return the rows that the terminal, the report, the card and the CSV lay out.

    Args:
        comparison: The comparison.
        results: Results to show, in this order. None: all, the best on the first task first and controls last; a
            control on random weights has no row, but a cell in its recipe's row.
    """
    random = comparison.on_random_weights
    if results is None:
        hidden = {result.name for result in random.values()}
        kept = [result for result in comparison.results if result.name not in hidden]
        results = sorted(kept, key=lambda result: (result.control, rank(result, comparison.tasks[0])))
    recipes = [result for result in comparison.results if not result.control]
    best = {task.name: min((rank(result, task) for result in recipes), default=math.inf) for task in comparison.tasks}

    def cell(result: Result, task: Measure) -> Cell | None:
        score = result.scores.get(task.name)
        if score is None:
            return None
        competes = not result.control and has_number(result, task)
        is_best = competes and rank(result, task) == best[task.name]
        untrained = random[result.name].scores.get(task.name) if result.name in random else None
        return Cell(score, is_best, competes and score.tied and not is_best, untrained)

    return [TableRow(result, [cell(result, task) for task in comparison.tasks]) for result in results]


# Saved comparisons


@cache
def _schema() -> TypeAdapter[Comparison]:
    """Return the fields of a saved comparison and their types."""
    return TypeAdapter(Comparison)


def _first_fault(error: ValidationError) -> str:
    """Return the first fault of a file, behind its key."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    key = ".".join(map(str, fault["loc"]))
    what = fault["msg"].removeprefix("Value error, ")
    what = f"{what[0].lower()}{what[1:]}"
    return f"{key}: {what}" if key else what


# Whether a new model, prompt or version changed anything


@dataclass(frozen=True)
class Difference:
    """Scores of one recipe in two comparisons.

    Attributes:
        name: Name of the result in both.
        old: Score in the older comparison.
        new: Score in the newer one.
        difference: The new score less the old one, with its interval; tied if that contains 0.
    """

    name: str
    old: Estimate
    new: Estimate
    difference: Estimate


@dataclass(frozen=True)
class SideBySide:
    """Differences between two comparisons.

    Attributes:
        task: Task that decides in the newer one.
        changes: Differences of all recipes and controls that both have, in the newer one's order.
        sentences: Sentences: whether anything changed, how the intervals were made, and both answers.
    """

    task: Measure
    changes: list[Difference]
    sentences: list[str]


def check_same_metric(new: Measure, old: Measure) -> None:
    """Check that two comparisons are scored by the same metric.

    Raises:
        ValueError: If they are not.
    """
    if (new.name, new.metric) != (old.name, old.metric):
        raise ValueError(
            f"The new comparison is by {new.name} ({new.metric}), the old one by {old.name} ({old.metric}): compare on "
            "the same kind of data."
        )


def side_by_side(new: Comparison, old: Comparison) -> SideBySide:
    """Compare a comparison with an older one.

    Differences are paired, with simultaneous intervals, if both comparisons have replicates of the same items.
    Otherwise the two are independent samples, and half-widths of their intervals add up by their squares, each on its
    side (Zou and Donner, 2008):

    .. math:: d - \\sqrt{(x - l_x)^2 + (u_y - y)^2}, \\quad d + \\sqrt{(u_x - x)^2 + (y - l_y)^2}, \\quad d = x - y

    Args:
        new: The newer comparison.
        old: The older one.

    Raises:
        ValueError: If they were scored by different metrics, or have no result in common.
    """
    task = new.tasks[0]
    check_same_metric(task, old.tasks[0])
    former = {result.name: result for result in old.results if has_number(result, task)}
    both = [
        (result, former[result.name]) for result in new.results if result.name in former and has_number(result, task)
    ]
    if not both:
        raise ValueError(
            f"The two comparisons have no recipe in common: the old one has {', '.join(former) or 'none'}."
        )
    drawn = _paired_replicates(new, old, [result.name for result, _ in both])
    below, above = _independent_widths(both, task) if drawn is None else [half_widths(drawn)] * 2
    changes = []
    for (now, then), less, more in zip(both, below, above, strict=True):
        after, earlier = now.scores[task.name], then.scores[task.name]
        value = after.value - earlier.value
        low, high = float(value - less), float(value + more)
        # Nothing is told apart without an interval.
        changed = Estimate(value, low, high, tied=not (low > 0 or high < 0))
        changes.append(Difference(now.name, earlier, after, changed))
    return SideBySide(task, changes, _sentences(new, old, task, changes, drawn is not None))


def _paired_replicates(new: Comparison, old: Comparison, names: Sequence[str]) -> Array | None:
    """Return the differences of both comparisons' replicates, (M, B); None if they are not of the same items."""
    now, then = new.replicates, old.replicates
    if now is None or then is None or now.drawn_from != then.drawn_from:
        return None
    if not set(names) <= now.scores.keys() & then.scores.keys():
        return None
    return np.array([np.subtract(now.scores[name], then.scores[name]) for name in names])


def _independent_widths(both: Sequence[tuple[Result, Result]], task: Measure) -> Array:
    """Return the widths of the intervals of differences below and above these, (2, M)."""

    def widths(pair: tuple[Result, Result]) -> tuple[float, float]:
        # An interval is around the corrected score, where there is one.
        now, then = (result.scores[task.name] for result in pair)
        return (
            math.hypot(now.best_guess - now.low, then.high - then.best_guess),
            math.hypot(now.high - now.best_guess, then.best_guess - then.low),
        )

    return np.transpose([widths(pair) for pair in both])


def _sentences(
    new: Comparison, old: Comparison, task: Measure, changes: Sequence[Difference], paired: bool
) -> list[str]:
    changed = [change for change in changes if not change.difference.tied]
    results = f"{len(changes)} result{'' if len(changes) == 1 else 's'}"
    largest = max(changed or changes, key=lambda change: abs(change.difference.value))
    sign = "+" if largest.difference.value > 0 else ""
    by = f"{largest.name} by {sign}{task.show_with_interval(largest.difference)}"
    if changed:
        first = f"{len(changed)} of {results} changed beyond the interval, most of all {by}."
    else:
        first = f"Nothing changed beyond the interval, of {results}; most of all {by}."
    if paired:
        how = f"The intervals are paired: both comparisons are of the same {task.unit}."
    elif new.replicates is None or old.replicates is None:
        how = "The intervals are not paired: one comparison has no replicates."
    else:
        how = f"The intervals are not paired: the {task.unit} or their splits differ, which may be what changed."
    now, then = (comparison.use or "none" for comparison in (new, old))
    return [first, how, f"To use: {now}, as before." if now == then else f"To use: {now}; before: {then}."]
