"""The first line of a comparison: which recipe to use, how far ahead of using none it is, and how sure that is.

It is made here alone; the terminal, the report, the card and ``comparison.json`` show it as it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..evaluation.bootstrap import Estimate, Statistic, items_to_tell
from ..recipes import find
from ..text.templates import preset
from .results import Measure, Result, as_high, best_of, difference, has_number, rank

#: What one has without any recipe: the names of these results, and what they are.
WITHOUT = {
    replace(find("classical"), pooling=pooling).result: what
    for pooling, what in {"mean": "the mean of the last hidden states", "last": "the last token's hidden state"}.items()
}


#: What costs at most so much of another's time is cheaper; what lies between is within the error of timing.
_CHEAPER = 0.9
#: Differences that it takes more than so many times the items to tell are too small for labels to tell.
_TOO_MANY = 50

_IN_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Answer:
    """What a comparison comes to.

    Attributes:
        says: In a sentence or two.
        use: Name of the result to use; empty where it is none of them.
    """

    says: str
    use: str = ""


def answer(results: Sequence[Result], task: Measure, statistic: Statistic | None, chosen: str = "") -> Answer:
    """What to use, by the task that decides.

    A recipe is held against every control, and against the better of the two embeddings in :data:`WITHOUT`. One that a
    control equals in the figures that are shown, or that cannot be told from what one has without a recipe, is not
    advised: then the best is that stands all of this, if there is one. Of several that cannot be told from the best the
    cheapest is, if it stands all of this as well.

    The best was picked by these scores, unless it was chosen before; the verdict tells what that means.

    Args:
        results: All recipes and controls.
        task: The one that decides.
        statistic: Its scores by the results' names, for the interval of the paired difference; None if nothing can be
            resampled.
        chosen: The result's name that was chosen before, on other data; empty if none was.
    """
    best = best_of(results, task)
    if best is None:
        return Answer(f"There is no answer: no recipe has a number on {task.name}.{_why_none(task, statistic)}")
    if task.proxy:
        return Answer(
            "Without labels there is no answer: proxies do not say which recipe is best. A few hundred labelled pairs "
            "would."
        )
    held = _Held(results, task, statistic)
    lead = next((result for result in results if result.name == chosen and has_number(result, task)), best)
    refused = held.against_controls(lead) or held.against_nothing(lead)
    if refused is None:
        return held.use(lead, choose=not chosen)
    return (None if chosen else held.another(best)) or refused


@dataclass(frozen=True)
class _Held:
    """Recipes held against each other and against what one has without them."""

    results: Sequence[Result]
    task: Measure
    statistic: Statistic | None

    def against_controls(self, lead: Result) -> Answer | None:
        """Refused where a control scores as high."""
        control, best = best_of(self.results, self.task, control=True), best_of(self.results, self.task)
        if control is None or best is None or not as_high(control, lead, self.task):
            return None
        if not as_high(control, best, self.task):
            return Answer(
                f"None: {self._leading(lead)} has {self._value(lead)} and does not beat {control.in_words} "
                f"({self._value(control)}). {self._more(control, lead)}"
            )
        return Answer(
            f"None: no recipe beats {control.in_words} ({self._value(control)}); {self._leading(lead)} has "
            f"{self._value(lead)}. {self._more(control, lead)}"
        )

    def against_nothing(self, lead: Result) -> Answer | None:
        """Refused where what one has without a recipe is ahead, or cannot be told from it."""
        plain = self._plain
        if plain is None:
            return None
        have = f"what you have, {WITHOUT[plain.name]} ({self._value(plain)})"
        best = best_of(self.results, self.task)
        if lead is plain and lead is best:
            others = [result for result in self.results if result.name not in WITHOUT]
            second = best_of(others, self.task)
            more = "" if second is None else f" {self._more(plain, second)}"
            return Answer(f"None: no recipe is ahead of {have}.{more}")
        if lead is plain:
            return Answer(f"None: {self._leading(lead)} is {have}.")
        if as_high(plain, lead, self.task):
            level = self._value(lead) == self._value(plain)
            place = "level with" if level else "behind"
            return Answer(
                f"None: {self._leading(lead)} has {self._value(lead)}, {place} {have}. {self._more(plain, lead)}"
            )
        if self._ahead(lead, plain).tied:
            return Answer(
                f"None: {self._leading(lead)} has {self._value(lead)}, and cannot be told from {have}. "
                f"{self._more(lead, plain)}"
            )
        return None

    def another(self, best: Result) -> Answer | None:
        """Advised in place of the best, which is refused: the next that every control is behind, and that is told from
        what one has without a recipe."""
        control, plain = best_of(self.results, self.task, control=True), self._plain
        fit = [
            result
            for result in self.results
            if plain is not None
            and not result.control
            and result.name not in WITHOUT
            and self._stands(result, control, plain)
        ]
        advised = best_of(fit, self.task)
        if advised is None or plain is None:
            return None
        use = self.use(advised, choose=False)
        more = f"{self._leading(best)} has {self._value(best)}, and cannot be told from what you have."
        return replace(use, says=f"{use.says} {more[0].upper()}{more[1:]}")

    def _stands(self, result: Result, control: Result | None, plain: Result | None) -> bool:
        """Whether neither a control nor what one has without a recipe keeps it from being advised."""
        return (
            has_number(result, self.task)
            and (control is None or not as_high(control, result, self.task))
            and (plain is None or (self._told_ahead(result, plain) and not as_high(plain, result, self.task)))
        )

    def use(self, lead: Result, choose: bool) -> Answer:
        """Advised, or a cheaper one that cannot be told from it."""
        peers = self._peers(lead) if choose else [lead]
        advised = self._cheapest(lead, peers)
        estimate = advised.scores[self.task.name]
        score = f"{self.task.show(estimate.value)} {self.task.show_interval(estimate)}".rstrip()
        if advised is not lead:
            says = f"{_number(len(peers)).capitalize()} recipes cannot be told apart; use the cheapest, "
        else:
            says = "Use "
        clauses = [f"{says}{advised.read}: {score}"]
        if (plain := self._plain) is not None:
            by = self._by(self._ahead(advised, plain))
            side = "above" if self.task.greater_is_better else "below"
            clauses.append(f"{by} {side} what you have ({WITHOUT[plain.name]})")
        equals, more = self._controls(advised)
        clauses.append(equals)
        others = len(peers) - 1
        if advised is lead and others:
            what = "other recipe" if others == 1 else "other recipes"
            more = f" {_number(others).capitalize()} {what} cannot be told from it.{more}"
        return Answer(f"{', '.join(clauses)}.{more}", advised.name)

    def _controls(self, lead: Result) -> tuple[str, str]:
        """Whether it is ahead of all of them; and what would tell, if it is not."""
        controls = [result for result in self.results if result.control and has_number(result, self.task)]
        if not controls:
            return "and no control was run beside it", ""
        close = best_of([each for each in controls if self._ahead(lead, each).tied], self.task, control=True)
        if close is None:
            return "ahead of every control", ""
        by = f"not surely ahead of {close.in_words} ({self._value(close)})"
        return by, f" {self._more(lead, close)}"

    def _peers(self, lead: Result) -> list[Result]:
        """What cannot be told from it, itself included, and what one has without a recipe left out."""
        return [
            result
            for result in self.results
            if result is lead
            or (not result.control and result.name not in WITHOUT and has_number(result, self.task)
                and result.scores[self.task.name].tied)
        ]  # fmt: skip

    def _cheapest(self, lead: Result, peers: Sequence[Result]) -> Result:
        """Of those that stand what the lead stands; the lead where none is clearly cheaper."""
        control = best_of(self.results, self.task, control=True)
        fit = [
            peer
            for peer in peers
            if peer.cost is not None
            and lead.cost is not None
            and peer.cost <= _CHEAPER * lead.cost
            and self._stands(peer, control, self._plain)
        ]
        return min(fit, key=lambda peer: (peer.cost, rank(peer, self.task)), default=lead)

    def _more(self, first: Result, second: Result) -> str:
        """What would say more than these items do on which of the two is ahead."""
        ahead = self._ahead(first, second)
        if not ahead.tied:
            return f"More {self.task.unit} will hardly change that; a bigger model may."
        items = 0 if self.statistic is None else self.statistic.items
        needed = items_to_tell(ahead, items)
        if needed is None or needed > _TOO_MANY * items:
            return f"A bigger model, or more {self.task.unit}, will say more."
        about = float(f"{max(needed - items, 10):.0e}")
        return (
            f"A bigger model, or more {self.task.unit} (by the interval about {about:,.0f} more would do), will say "
            "more."
        )

    @property
    def _plain(self) -> Result | None:
        return best_of([result for result in self.results if result.name in WITHOUT], self.task)

    def _told_ahead(self, first: Result, second: Result) -> bool:
        ahead = self._ahead(first, second)
        return ahead.value > 0 and not ahead.tied

    def _ahead(self, first: Result, second: Result) -> Estimate:
        """How far the first is ahead, whichever way is up."""
        if not self.task.greater_is_better:
            first, second = second, first
        return difference(first, second, self.task, self.statistic)

    def _by(self, ahead: Estimate) -> str:
        """A difference; its decimals are lost in its interval where it is large."""
        return self.task.show(ahead.value, 0 if abs(ahead.value) * self.task.scale >= 10 else None)

    def _leading(self, lead: Result) -> str:
        best = best_of(self.results, self.task)
        return f"the best, {lead.read}," if lead is best else f"{lead.read}, which was chosen,"

    def _value(self, result: Result) -> str:
        return self.task.show(result.scores[self.task.name].value)


def _why_none(task: Measure, statistic: Statistic | None) -> str:
    """Why no recipe has a score, as far as what each item gave tells; empty where it does not."""
    made = None if statistic is None else statistic.made_from
    if made is None:
        return ""
    if made.labels is not None and np.ptp(made.labels) == 0:
        return f" All labels are alike: give {task.unit} whose labels differ."
    proper = made.rows[~np.isnan(made.rows).any(axis=1)]
    if not len(proper):
        return " All similarities are not a number: in float16 large activations overflow, so take another --dtype."
    if not np.ptp(proper, axis=1).any():
        return f" All {task.unit} look the same to every recipe, as where all texts are alike: give texts that differ."
    return ""


def _number(count: int) -> str:
    return _IN_WORDS[count] if count < len(_IN_WORDS) else str(count)


def build_command(
    result: Result,
    model: str,
    fit_texts: str | None = None,
    max_seq_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    precision: str = "",
) -> str:
    """What to type to have a recipe as a model of its own.

    Args:
        result: What it scored.
        model: As ``--model`` takes it.
        fit_texts: What a filter was fitted on; None: what ``st-reba build`` takes by itself.
        max_seq_length: Tokens of one copy of a text, at most; None: the model's own.
        prompts: What stood before a query and before a document.
        precision: Of the weights, such as ``"float32"``, on which depends what is fitted; empty: the model's own.
    """
    recipe = find(result.spec)
    words = ["st-reba", "build", "--model", model, "--recipe", result.spec]
    if result.pooling != recipe.pooling:
        words += ["--pooling", result.pooling]
    if fit_texts is not None and recipe.fitted:
        words += ["--fit-texts", fit_texts]
        if recipe.row.chinese:
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
    return shlex.join([*words, "--out", "my-model"])
