"""What a comparison says: which recipe to use, how far ahead of using none it is, and how sure that is.

It is said here alone; the terminal, the report, the card and ``comparison.json`` show it as it is.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..evaluation import bootstrap
from ..evaluation.bootstrap import Estimate, Items, Resampled, items_to_tell
from ..evaluation.tasks import Measure
from ..recipes import find
from ..recipes.recipe import TF_IDF, Kind
from ..text.templates import preset
from .choice import CHOICE, Choice
from .results import LISTED, Result, best_of, has_number, rank

#: What one has without any recipe: the names of these results, and what they are.
WITHOUT = {
    replace(find("classical"), pooling=pooling).result: what
    for pooling, what in {
        "mean": "the mean of the last hidden states",
        "last": "the last token's hidden state",
    }.items()
}

#: What costs at most so much of another's time is cheaper; what lies between is within the error of timing.
_CHEAPER = 0.9
#: Differences that it takes more than so many times the items to tell are too small for labels to tell.
_TOO_MANY = 50

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NOT_RANDOM = "Nothing was run on random weights: these may score more than one expects."


@dataclass(frozen=True)
class Standing:
    """Results by the column that decides.

    Attributes:
        results: All recipes and controls.
        column: The one that decides.
        items: What makes its scores, by the results' names, for the intervals of paired differences.
        choices: What was taken of their candidates on each half, by the results' names; empty: nothing was chosen.
        choice: What choosing among all candidates scores on the other half; None: nothing was chosen.
    """

    results: Sequence[Result]
    column: Measure
    items: Resampled
    choices: Mapping[str, Choice] = field(default_factory=dict)
    choice: Estimate | None = None

    @property
    def best(self) -> Result | None:
        """The best recipe."""
        return best_of(self.results, self.column)

    @property
    def control(self) -> Result | None:
        """The best control."""
        return best_of(self.results, self.column, control=True)

    @property
    def plain(self) -> Result | None:
        """The better of what one has without a recipe."""
        return best_of([result for result in self.results if result.name in WITHOUT], self.column)

    def judged(self, lead: Result) -> Result:
        """What the best recipe is judged by: the choice among all candidates, which its own score had a part in."""
        if self.choice is None or lead is not self.best:
            return lead
        return Result(CHOICE, "", False, {self.column.name: self.choice})

    def value(self, result: Result) -> str:
        """Its score as people read it."""
        return self.column.show(result.scores[self.column.name].value)

    def score(self, result: Result) -> str:
        """The same, with its interval."""
        return self.column.show_with_interval(result.scores[self.column.name])

    def as_high(self, first: Result, second: Result) -> bool:
        """Whether the first is at least as good, by the figures that are shown."""
        if not (has_number(first, self.column) and has_number(second, self.column)):
            return has_number(first, self.column)
        return rank(first, self.column) <= rank(second, self.column) or self.value(first) == self.value(second)

    def difference(self, first: Result, second: Result) -> Estimate:
        """First less second, with the interval of the paired difference; tied if that cannot be told from 0."""
        value = first.scores[self.column.name].value - second.scores[self.column.name].value
        low, high = bootstrap.difference(self.items, first.name, second.name)
        return Estimate(value, low, high, tied=not (low > 0 or high < 0))

    def stands(self, result: Result) -> bool:
        """Whether neither a control nor what one has without a recipe keeps a recipe from being advised."""
        if not has_number(result, self.column) or (self.control and self.as_high(self.control, result)):
            return False
        return self.plain is None or not (self.as_high(self.plain, result) or self.difference(result, self.plain).tied)

    def more(self, first: Result, second: Result) -> str:
        """What would say more than these items do on which of the two is ahead."""
        ahead, unit = self.difference(first, second), self.column.unit
        if not ahead.tied:
            return f"More {unit} will hardly change that; a bigger model may."
        items = len(self.items)
        needed = items_to_tell(ahead, items)
        if needed is None or needed > _TOO_MANY * items:
            return f"More {unit}, or a bigger model, may tell which is ahead."
        about = float(f"{max(needed - items, 10):.0e}")
        return f"By the interval, about {about:,.0f} more {unit} would tell which is ahead; a bigger model may, too."


class Answer(NamedTuple):
    """Which recipe to use.

    Attributes:
        says: The one line that says it.
        use: Name of the result to use; empty where there is none.
        why: What the line rests on, one sentence each.
    """

    says: str
    use: str = ""
    why: Sequence[str] = ()


def answer(table: Standing) -> Answer:
    """What to use, in one line, and why.

    A recipe is held against every control, and against the better of the two embeddings in :data:`WITHOUT`. One that a
    control equals in the figures that are shown, or that cannot be told from what one has without a recipe, is not
    advised: then the best is that stands all of this, if there is one. Of several that cannot be told from the best the
    cheapest is, if it stands all of this as well, and is surely ahead of every control if the best is.

    The best was picked by these scores; the verdict tells what that means.

    Args:
        table: What was compared.
    """
    column, best, control, plain = table.column, table.best, table.control, table.plain
    if best is None:
        return Answer(f"There is no answer: no recipe has a number on {column.name}.{_why_none(table)}")
    scored = [result for result in table.results if has_number(result, column)]
    own = [result for result in scored if not (result.control or result.name in WITHOUT)]
    judged, which = table.judged(best), f"the best, {best.in_line},"
    if judged is not best:
        which = f"the best, chosen on one half of the {column.unit} and scored on the other,"
    has = f"{which} has {table.value(judged)}"
    if control is not None and table.as_high(control, judged):
        beaten = f"{control.in_words} ({table.value(control)})"
        none = (
            f"no recipe beats {beaten}; {has}" if table.as_high(control, best) else f"{has} and does not beat {beaten}"
        )
        return Answer(f"None: {none}.", why=[table.more(control, judged)])
    if plain is not None:
        without, have = f"the {table.value(plain)} that you have without a recipe", _have(plain)
        if best is plain:
            second = best_of(own, column)
            return Answer(
                f"None: no recipe beats {without}.", why=[have, *([table.more(plain, second)] if second else [])]
            )
        if table.as_high(plain, judged):
            place = "level with" if table.value(judged) == table.value(plain) else "behind"
            return Answer(f"None: {has}, {place} {without}.", why=[have, table.more(plain, judged)])
        ahead = table.difference(judged, plain)
        if ahead.tied:
            told = f"The difference, {column.show_with_interval(ahead)}, cannot be told from 0."
            another = best_of([result for result in own if table.stands(result)], column)
            if another is None:
                return Answer(f"None: {has}, too close to {without}.", why=[have, told, table.more(judged, plain)])
            found = _use(table, another, [another])
            more = f"The best, {best.in_line}, has {table.value(best)}, too close to {without}."
            return found._replace(why=[*found.why, more])
    tied = [result for result in table.results if result is best or (result in own and result.scores[column.name].tied)]
    return _use(table, best, tied)


def _have(plain: Result) -> str:
    return f"Without a recipe you have {WITHOUT[plain.name]}."


def _use(table: Standing, lead: Result, peers: Sequence[Result]) -> Answer:
    """Advised: the lead, or the cheapest of its peers that stand what it stands, if one is clearly cheaper.

    If the lead is surely ahead of every control, one that is not is not advised in its place.
    """
    column, plain = table.column, table.plain
    controls = [result for result in table.results if result.control and has_number(result, column)]

    def close_to(result: Result) -> list[Result]:
        return [each for each in controls if table.difference(result, each).tied]

    costs = {peer.name: peer.cost for peer in peers if peer.cost is not None}
    most = _CHEAPER * costs.get(lead.name, 0)
    standing = [peer for peer in peers if costs.get(peer.name, math.inf) <= most and table.stands(peer)]
    beside_lead = close_to(table.judged(lead))
    cheaper = [peer for peer in standing if beside_lead or not close_to(table.judged(peer))]
    advised = min(cheaper, key=lambda peer: (costs[peer.name], rank(peer, column)), default=lead)
    judged = table.judged(advised)
    # The cheaper one was found beside the lead, which the choice among all candidates is judged for.
    close = best_of([*close_to(judged), *beside_lead], column, control=True)

    against = "" if plain is None else f", against {table.value(plain)} without a recipe"
    but = "" if close is None else f", but not surely ahead of {close.in_words} ({table.value(close)})"
    how = "" if judged is advised else f", chosen on one half of the {column.unit} and scored on the other"
    why = [f"{advised.in_line}{how}: {table.score(judged)}."]
    if cheaper:
        surely = "" if cheaper == standing else " of those that are surely ahead of every control"
        why.append(
            f"{_number(len(peers)).capitalize()} recipes cannot be told apart; this one is the cheapest{surely}."
        )
    elif len(peers) > 1:
        what = "other recipe cannot" if len(peers) == 2 else "other recipes cannot"
        why.append(f"{_number(len(peers) - 1).capitalize()} {what} be told from it.")
    if advised.read_at:
        why.append(f"Each half of the data chose how to read the recipe: {advised.read_at}.")
    if plain is not None:
        ahead = table.difference(judged, plain).value
        # Decimals of a large difference are lost in its interval.
        by = column.show(ahead, 0 if abs(ahead) * column.scale >= 10 else None)
        why.append(f"{_have(plain)} The recipe is {by} above it.")
    if close is not None:
        why.append(table.more(judged, close))
    else:
        why.append("The recipe is ahead of every control." if controls else "No control was run beside the recipe.")
    return Answer(f"Use {advised.in_line}: {table.value(judged)}{against}{but}.", advised.name, why)


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _why_none(table: Standing) -> str:
    """Why no recipe has a score, as far as what each item gave tells; empty where it does not."""
    if not isinstance(table.items, Items):
        return ""
    unit = table.column.unit
    if len(table.items.labels) and np.ptp(table.items.labels) == 0:
        return f" All labels are alike: give {unit} whose labels differ."
    rows = np.stack(list(table.items.values.values()))
    proper = rows[~np.isnan(rows).any(axis=1)]
    if not len(proper):
        return " All similarities are not a number: in float16 large activations overflow, so take another --dtype."
    if not np.ptp(proper, axis=1).any():
        return f" All {unit} look the same to every recipe, as where all texts are alike: give texts that differ."
    return ""


def verdict(table: Standing, advised: str = "") -> list[str]:
    """What the numbers say and what they do not, one sentence each: the best recipe, what is tied with it, how far the
    advised one is ahead of its controls, and which recipes do not beat theirs.

    Args:
        table: What was compared.
        advised: The result's name that the answer says to use; empty if it says to use none.
    """
    column, best = table.column, table.best
    scored = {result.name: result for result in table.results if column.name in result.scores}
    own = [result for result in scored.values() if not result.control and has_number(result, column)]
    if best is None:
        return [f"No recipe has a number on {column.name}."]
    says = []
    says.append(f"Best on {column.name}: {best.name}, {table.score(best)}.")
    says += _chosen(table, best)
    if len(own) > 1 and table.choice is None:
        says.append(f"The best of {len(own)} scores is likely too high: on other texts expect less.")
    tied = sum(result.scores[column.name].tied for result in own if result is not best)
    which = "the other recipe" if len(own) == 2 else f"{tied} of the {len(own) - 1} other recipes"
    if tied:
        says.append(
            f"On this data {which} may be as good: the 95% interval of the paired difference contains 0. More "
            "labelled texts would tell more."
        )
    elif len(own) > 1:
        says.append("On this data every other recipe is surely worse.")
    held, strongest = scored.get(advised, best), table.control
    first = {strongest.name: f"the strongest control of all, {strongest.in_words}"} if strongest else {}
    against = first | {each.name: each.called for each in held.controls if each.name in scored} | first
    subject = held.in_line
    for name, called in against.items():
        control = scored[name]
        found, what = table.difference(held, control), f"{called} ({table.score(control)})"
        by, ahead = column.show_with_interval(found), table.difference(control, held)
        if control is strongest and ahead.value > 0 and not ahead.tied:
            says.append(
                f"The strongest control of all wins: {control.in_words} ({table.score(control)}) is ahead of "
                f"{held.in_line} by {column.show_with_interval(ahead)}."
            )
            continue
        if table.as_high(control, held):
            says.append(f"{subject} does not beat {what}: the difference is {by}.")
        elif found.tied:
            says.append(f"{subject} is not surely ahead of {what}: the difference, {by}, cannot be told from 0.")
        else:
            says.append(f"{subject} beats {what} by {by}.")
        subject = "It"
    return says + _beaten(table, own, scored)


def _chosen(table: Standing, best: Result) -> list[str]:
    """What choosing on one half is worth on the other: among all candidates, and among those of the best recipe."""
    if table.choice is None:
        return []
    column, unit, choice = table.column, table.column.unit, table.choices[best.name]
    says = [
        f"The best of all {table.choices[CHOICE].candidates} candidates, chosen on one half of the {unit} and scored "
        f"on the other, has {column.show_with_interval(table.choice)}, the mean of both ways round. The best recipe is "
        "judged by this score, since its own had a part in the choice."
    ]
    if choice.gain is not None and not best.read_at:
        says.append(f"Of the {choice.candidates} ways to read the best recipe, the usual one was kept.")
    elif choice.gain is not None:
        told = ", which cannot be told from 0" if choice.gain.tied else ""
        says.append(
            f"Choosing among the {choice.candidates} ways to read it ({best.read_at}) gains "
            f"{column.show_with_interval(choice.gain)}{told}."
        )
    return says


def _beaten(table: Standing, own: Sequence[Result], scored: Mapping[str, Result]) -> list[str]:
    """Which recipes are no better than a control; the bag stands behind the same filter as the recipe."""
    by_kind = [(each, {one.kind: scored[one.name] for one in each.controls if one.name in scored}) for each in own]
    filtered = " behind the same filter" if any("filtered bag" in found for _, found in by_kind) else ""
    compared: list[tuple[str, list[Kind]]] = [
        (TF_IDF, ["tf-idf"]),
        (f"the bag of input embeddings{filtered}", ["filtered bag", "bag"]),
        ("itself on random weights", ["random"]),
    ]
    says = []
    for what, kinds in compared:
        # Of several kinds the first that a recipe has.
        first = [(each, [found[kind] for kind in kinds if kind in found][:1]) for each, found in by_kind]
        below = [each.name for each, controls in first if controls and table.as_high(controls[0], each)]
        held = [each.name for each, controls in first if controls]
        some = "No recipe"
        if kinds == ["random"] and len(held) < len(own):
            says.append(f"Only the best were run on random weights, too: {'; '.join(held)}." if held else _NOT_RANDOM)
            some = "None of these"
        if held and len(below) == len(held):
            says.append(f"{some} beats {what}.")
        elif below:
            one = f"{_number(len(below)).capitalize()} of {len(held)} recipes {'does' if len(below) == 1 else 'do'}"
            names = f": {'; '.join(below)}" if len(below) <= LISTED else ""
            says.append(f"{one} not beat {what}{names}.")
    return says


def build_command(
    result: Result,
    model: str,
    fit_texts: str | None = None,
    max_seq_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    precision: str = "",
    columns: str | None = None,
    half: bool = False,
    named: Sequence[str] = (),
    separator: str | None = None,
) -> str:
    """What to type to have a recipe as a model of its own.

    Args:
        result: What it scored.
        model: As ``--model`` takes it.
        fit_texts: What a filter was fitted on; None: what ``st-reba build`` takes by itself.
        max_seq_length: Tokens of one copy of a text, at most; None: the model's own.
        prompts: What stood before a query and before a document.
        precision: Of the weights, such as ``"float32"``, on which depends what is fitted; empty: the model's own.
        columns: What the columns of ``fit_texts`` are called, as ``--columns`` takes it; None: as usual.
        half: Whether it was fitted on the texts of their first half.
        named: The options that name what is built on, such as an engine; empty: ``--model``.
        separator: Of those columns; None: what is usual.
    """
    recipe = find(result.spec)
    words = ["st-reba", "build", *(named or ("--model", model)), "--recipe", result.spec]
    if result.pooling != recipe.pooling:
        words += ["--pooling", result.pooling]
    if result.template:
        words += ["--template", result.template]
    if result.shares:
        words += ["--shares", ",".join(f"{share / min(result.shares):g}" for share in result.shares)]
    if fit_texts is not None and recipe.fitted:
        words += ["--fit-texts", fit_texts, *(["--fit-half", "1"] if half else [])]
        words += ["--columns", columns] if columns else []
        words += ["--separator", separator] if separator else []
        if recipe.row.chinese and not result.template:
            # Otherwise their script would choose.
            words += ["--prompt-language", "en"]
    if max_seq_length is not None:
        words += ["--max-seq-length", str(max_seq_length)]
    if precision:
        words += ["--dtype", precision]
    # An empty one keeps away what the template's authors put there, and what this comparison did not.
    own = dict(preset(recipe.row.settings.get("template", "")).prompts)
    for role, prompt in {**dict.fromkeys(own, ""), **(prompts or {})}.items():
        words += [f"--{role}-prompt", prompt]
    return shlex.join([*words, "--out", f"my-{recipe.row.key}"])
