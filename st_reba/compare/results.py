"""What a comparison found: plain data, for whoever shows it (the terminal, a report, a model card)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ..evaluation.bootstrap import Estimate
from ..evaluation.tasks import Measure
from ..files import atomic_file
from ..recipes import Control
from ..version import __version__

#: Stands beside what cannot be told from the best, wherever scores are shown.
TIED = "\N{ALMOST EQUAL TO}"

#: More names than this are a count.
LISTED = 3


def listed(names: Iterable[str], what: str) -> str:
    """Up to three names, or else how many there are of what."""
    found = list(names)
    return "; ".join(found) if len(found) <= LISTED else f"{len(found)} {what}"


def measured(value: float) -> str:
    """A time, a speed or a cost to two significant digits: what follows varies from run to run."""
    if not value > 0 or math.isinf(value):
        return f"{value:g}"
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def _nan_for_null(value: object) -> object:
    """What :meth:`Comparison.save` has written null for."""
    return math.nan if value is None else value


def _nan_in(score: object) -> object:
    """The same for the numbers of a score."""
    if not isinstance(score, dict):
        return score
    return {name: value if name == "corrected" else _nan_for_null(value) for name, value in score.items()}


@dataclass(frozen=True)
class Result:
    """What one recipe gave.

    Attributes:
        recipe: Its name, such as ``"ReBA-2"``.
        pooling: How token vectors became one, such as ``"mean"``.
        control: Whether it is there to be beaten.
        scores: Estimates by task name; a task that does not apply to the recipe is missing.
        sentences_per_second: How many of the timed texts it embeds a second, run alone: of the processor's time on a
            CPU, as the cost is, else (and on Windows) by the clock; None if it was not timed.
        cost: Time as a multiple of the classical embedding's under the same pooling; None if it was not timed.
        same_as: Other recipes whose embeddings have the same direction under this pooling, by definition: the result is
            theirs, too.
        spec: The recipe as ``st-reba build --recipe`` takes it; empty if it is none.
        says: What the recipe does, in a sentence; empty if nothing is known of it.
        called: What to call it in a sentence about other recipes, as a control; empty: its name.
        controls: What it is to be held against.
        read_at: The layer, the words and the weights that were chosen on all items; empty: the recipe as it is.
        template: The prompt that was chosen there; empty: the recipe's own.
        shares: How much each part of the vectors counts, as was chosen there; empty: as the recipe has it.
        chosen: How many halves chose each setting, by what ``read_at`` calls it.
    """

    recipe: str
    pooling: str
    control: bool
    scores: dict[str, Annotated[Estimate, BeforeValidator(_nan_in)]]
    sentences_per_second: float | None = None
    cost: float | None = None
    same_as: tuple[str, ...] = ()
    spec: str = ""
    says: str = ""
    called: str = ""
    controls: tuple[Control, ...] = ()
    read_at: str = ""
    template: str = ""
    shares: tuple[float, ...] = ()
    chosen: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Recipe and pooling."""
        return ", ".join(filter(None, (self.recipe, self.pooling)))

    @property
    def in_line(self) -> str:
        """The same as the answer has it: the pooling in brackets."""
        pooling = "last token" if self.pooling == "last" else self.pooling
        return f"{self.recipe} ({pooling})" if pooling else self.recipe

    @property
    def label(self) -> str:
        """The recipe as a table's row shows it: with those that it stands for."""
        return " = ".join([self.recipe, *self.same_as])

    @property
    def in_words(self) -> str:
        """What to call it in a sentence."""
        return self.called or self.name


# Which results are better than which


def has_number(result: Result, task: Measure) -> bool:
    """Whether a result has a score on a task, and one that is not NaN."""
    return task.name in result.scores and not math.isnan(result.scores[task.name].value)


def rank(result: Result, task: Measure) -> float:
    """A key that sorts the best first and those without a number last."""
    if not has_number(result, task):
        return math.inf
    return -result.scores[task.name].value


def best_of(results: Iterable[Result], task: Measure, *, control: bool = False) -> Result | None:
    """The best recipe, or the best control, on a task; the earliest of equals, None if none has a number there."""
    scored = [result for result in results if result.control is control and has_number(result, task)]
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
        return cls(
            drawn_from,
            {name: [float(str(value)) for value in np.asarray(own, dtype=np.float32)] for name, own in drawn.items()},
        )


@dataclass(frozen=True)
class Comparison:
    """Every recipe on one model and one set of data.

    Attributes:
        model: As the user named it; a file by its name.
        data: What it was measured on, in words.
        tasks: The columns; the first one decides which recipe is best.
        results: The rows, controls among them.
        verdict: What the answer rests on, and what else the numbers say, one sentence each: the best recipe, whether it
            beats the controls, what is tied with it.
        skipped: Recipes that this model cannot run, and why.
        lengths: Tokens of each text, for a histogram.
        settings: What was set, by name.
        versions: Of the packages that matter, by name.
        command: The command that made it, as typed.
        date: Of the day, ISO 8601.
        answer: Which recipe to use, its score, and the score without a recipe, in one line: what to show first.
        use: Name of the result that the answer says to use; empty where it says to use none.
        build: The command that builds that one; empty where there is none.
        replicates: Of the first task; None in a comparison of 0.8.
        prompts: What stood before a ``"query"`` and before a ``"document"``; none where there are no roles.
    """

    #: For :meth:`load`: fields of older versions are ignored.
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
        """Write all of it as JSON, the answer first; where there is no number, there is null.

        Raises:
            OSError: If it cannot be written.
        """
        with atomic_file(path, "w") as file:
            json.dump(self.as_json(), file, ensure_ascii=False, indent=1)

    def as_json(self) -> dict[str, Any]:
        """All of it, the answer first, as JSON has it; where there is no number, there is None."""
        # pydantic writes null for NaN.
        told = json.loads(_schema().dump_json(self))
        return {"answer": self.answer, "build": self.build, **told}

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: If it is no comparison, or one of a version that has other fields.
            OSError: If it cannot be read.
        """
        try:
            return _schema().validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(
                f"{path} is no comparison that st_reba {__version__} reads ({_first_fault(error)}): give the "
                "comparison.json of a report, written by this version, or run the comparison again."
            ) from None

    def choice(self) -> Result:
        """The recipe to use: what the answer names, or else the best here.

        Raises:
            ValueError: If no recipe has a number on the first task, or the one to use is not among the results.
        """
        if not self.use:
            return self.best()
        found = next((result for result in self.results if result.name == self.use), None)
        if found is None:
            raise ValueError(f"{self.use}, which is to be used, is not among the results.")
        return found

    @property
    def on_random_weights(self) -> dict[str, Result]:
        """What was run on random weights, by the name of the result that it is the control of."""
        named = {result.name: result for result in self.results}
        return {
            result.name: named[control.name]
            for result in self.results
            for control in result.controls
            if control.kind == "random" and control.name in named
        }

    def best(self) -> Result:
        """The recipe, not a control, with the best score on the first task; the earliest of equals.

        Raises:
            ValueError: If no recipe has a number there.
        """
        task = self.tasks[0]
        found = best_of(self.results, task)
        if found is None:
            raise ValueError(f"No recipe has a number for {task.name!r}, the task that decides which is best.")
        return found


# The table


@dataclass(frozen=True)
class Cell:
    """One score as tables show it.

    Attributes:
        score: With its interval.
        best: Whether no recipe of its column is better; never for a control.
        tied: Whether it cannot be told from the best; never for a control, nor for the best.
        random: The same on random weights; None where it was not run on them.
    """

    score: Estimate
    best: bool
    tied: bool
    random: Estimate | None


@dataclass(frozen=True)
class TableRow:
    """One result as tables show it.

    Attributes:
        result: What the row is of.
        cells: One for each task; None where the task does not apply.
    """

    result: Result
    cells: list[Cell | None]


def rows(comparison: Comparison, results: Iterable[Result] | None = None) -> list[TableRow]:
    """A comparison as a table: the terminal, the page, the card and the CSV only lay it out.

    Args:
        comparison: What was found.
        results: Those to show, in their order. None: all of them, the best on the first task first and controls last;
            what was run on random weights stands beside its recipe.
    """
    random = comparison.on_random_weights
    if results is None:
        beside = {result.name for result in random.values()}
        shown = [result for result in comparison.results if result.name not in beside]
        results = sorted(shown, key=lambda result: (result.control, rank(result, comparison.tasks[0])))
    best = {task.name: best_of(comparison.results, task) for task in comparison.tasks}

    def cell(result: Result, task: Measure) -> Cell | None:
        score = result.scores.get(task.name)
        if score is None:
            return None
        leads = best[task.name]
        own = not result.control and leads is not None and has_number(result, task)
        is_best = own and leads is not None and score.value == leads.scores[task.name].value
        untrained = random[result.name].scores.get(task.name) if result.name in random else None
        return Cell(score, is_best, own and score.tied and not is_best, untrained)

    return [TableRow(result, [cell(result, task) for task in comparison.tasks]) for result in results]


# Saved comparisons


@cache
def _schema() -> TypeAdapter[Comparison]:
    """What a saved comparison looks like: its fields and their types."""
    return TypeAdapter(Comparison)


def _first_fault(error: ValidationError) -> str:
    """The first thing that is wrong in a file, after the key where it is."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"]))
    what = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "unexpected_keyword_argument":
        what = "this version knows no such field"
    return f"{where}: {what[0].lower()}{what[1:]}" if where else what
