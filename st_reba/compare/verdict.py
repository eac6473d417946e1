"""What a comparison says, and what it does not, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ..evaluation.bootstrap import Statistic
from ..recipes.recipe import TF_IDF, Kind
from .results import Measure, Result, as_high, best_of, difference, has_number, listed

_BAG_IN_WORDS = "the bag of input embeddings"
_NOT_RANDOM = "Nothing was run on random weights, which may reach more than one expects."


def verdict(results: Sequence[Result], task: Measure, statistic: Statistic | None, chosen: str = "") -> list[str]:
    """The best recipe, what is tied with it, and which recipes do not beat their controls.

    Where a recipe was chosen before, on other data, it stands in the best one's place: to call the best of these scores
    the result would be to choose again.

    Args:
        results: All recipes and controls.
        task: The one that decides.
        statistic: Its scores by the results' names, for paired differences; None if nothing can be resampled.
        chosen: The result's name that was chosen before; empty if none was.

    Returns:
        Sentences.
    """
    scored = {result.name: result for result in results if task.name in result.scores}
    own = [result for result in scored.values() if not result.control and has_number(result, task)]
    best = best_of(own, task)
    if best is None:
        return [f"No recipe has a number on {task.name}."]
    says = []
    if task.proxy:
        says.append(
            "There are no labels here, so these are proxies: they say how embeddings lie in space, nothing about "
            "meaning. Do not choose a recipe by them alone."
        )
    lead = scored.get(chosen, best)
    if chosen:
        says.append(f"Chosen before these scores were known: {lead.name}, {_shown(lead, task)} on {task.name}.")
        says.append(_after_the_fact(best, lead, task, statistic))
    else:
        says.append(f"{'Lowest' if task.proxy else 'Best'} on {task.name}: {best.name}, {_shown(best, task)}.")
        says.append(_selected(own, task))
        says.append(_tied(own, best, task))
    strongest = best_of(results, task, control=True)
    if strongest is not None:
        says.append(_against_the_strongest(lead, strongest, task, statistic))
    for control, what in _controls(lead, scored):
        if control is not strongest:
            says.append(_against(lead, control, what, task, statistic))
    says += _beaten(own, scored, task)
    return [sentence for sentence in says if sentence]


def _shown(result: Result, task: Measure) -> str:
    estimate = result.scores[task.name]
    return f"{task.show(estimate.value)} {task.show_interval(estimate)}".rstrip()


def _selected(own: Sequence[Result], task: Measure) -> str:
    if task.proxy or len(own) == 1:
        return ""
    return f"A score that chose among {len(own)} recipes is likely too high: on other texts expect less."


def _after_the_fact(best: Result, lead: Result, task: Measure, statistic: Statistic | None) -> str:
    """What is ahead of the choice on the very scores that the choice may not look at."""
    if best is lead:
        return ""
    ahead = difference(best, lead, task, statistic)
    shown = f"{task.show(ahead.value)} {task.show_interval(ahead)}".rstrip()
    told = ", which cannot be told from 0" if ahead.tied else ""
    return (
        f"{best.name} is ahead of it here by {shown}{told}. It was not chosen: to take it now would be to choose by "
        "these scores."
    )


def _tied(own: Sequence[Result], best: Result, task: Measure) -> str:
    others = [result for result in own if result is not best]
    tied = sum(result.scores[task.name].tied for result in others)
    if not tied:
        return "Every other recipe is told apart from it on this data." if others else ""
    which = "the other recipe" if len(others) == 1 else f"{tied} of the {len(others)} other recipes"
    return (
        f"On this data, {which} cannot be told from it: the 95% interval of the paired difference holds 0. More "
        "labelled texts would tell more."
    )


def _controls(best: Result, scored: dict[str, Result]) -> list[tuple[Result, str]]:
    """The controls of one recipe, and what to call them."""
    return [(scored[control.name], control.called) for control in best.controls if control.name in scored]


def _against_the_strongest(lead: Result, control: Result, task: Measure, statistic: Statistic | None) -> str:
    """What scores best of all controls, behind any filter: where it wins, the model adds nothing that shows."""
    name = control.in_words
    ahead = difference(*((control, lead) if task.greater_is_better else (lead, control)), task, statistic)
    if ahead.value > 0 and not ahead.tied:
        by = f"{task.show(ahead.value)} {task.show_interval(ahead)}".rstrip()
        return f"The strongest control of all wins: {name} ({_shown(control, task)}) is ahead of it by {by}."
    return _against(lead, control, f"the strongest control of all, {name}", task, statistic)


def _against(best: Result, control: Result, what: str, task: Measure, statistic: Statistic | None) -> str:
    found = difference(best, control, task, statistic)
    shown = f"{task.show(found.value)} {task.show_interval(found)}".rstrip()
    if as_high(control, best, task):
        return f"It does not beat {what} ({_shown(control, task)}): the difference is {shown}."
    if not found.tied:
        return f"It beats {what} ({_shown(control, task)}) by {shown}."
    return (
        f"It is not surely ahead of {what} ({_shown(control, task)}): the difference, {shown}, cannot be told from 0."
    )


def _control(result: Result, scored: dict[str, Result], *kinds: Kind) -> Result | None:
    """Its control of the first of these kinds that it has."""
    named = {control.kind: scored[control.name] for control in result.controls if control.name in scored}
    return next((named[kind] for kind in kinds if kind in named), None)


def _beaten(own: Sequence[Result], scored: dict[str, Result], task: Measure) -> list[str]:
    """Which recipes are no better than a control; the bag stands behind the same filter as the recipe."""
    bag = {result.name: _control(result, scored, "filtered bag", "bag") for result in own}
    filtered = any(_control(result, scored, "filtered bag") is not None for result in own)
    of_bag = f"{_BAG_IN_WORDS} behind the same filter" if filtered else _BAG_IN_WORDS
    random = {result.name: _control(result, scored, "random") for result in own}
    tf_idf = {result.name: _control(result, scored, "tf-idf") for result in own}
    says = []
    for controls, what in ((tf_idf, TF_IDF), (bag, of_bag), (random, "themselves on random weights")):
        with_control = [(result, control) for result in own if (control := controls[result.name]) is not None]
        below = [result.name for result, control in with_control if as_high(control, result, task)]
        some = "No recipe"
        if controls is random and len(with_control) < len(own):
            names = "; ".join(result.name for result, _ in with_control)
            says.append(f"Run on random weights were the best alone: {names}." if names else _NOT_RANDOM)
            some = "None of these"
        if with_control and len(below) == len(with_control):
            says.append(f"{some} beats {what.replace('themselves', 'itself')}.")
        elif below:
            says.append(f"Not ahead of {what}: {listed(below, f'of {len(with_control)} recipes')}.")
    return says
