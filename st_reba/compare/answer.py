"""The first line of a comparison: which recipe to use, how far ahead of using none it is, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..catalogue import find
from ..evaluation.bootstrap import Statistic
from .ranking import best_of, difference, has_number, rank
from .results import Result, Task

#: What one has without any recipe: the names of these results, and what they are.
WITHOUT = {
    replace(find("classical"), pooling=pooling).key: what
    for pooling, what in {"mean": "the mean of the last hidden states", "last": "the last token's hidden state"}.items()
}


def answer(results: Sequence[Result], task: Task, statistic: Statistic | None, chosen: str = "") -> str:
    """One sentence or two: what to use.

    The recipe is held against the better of the two embeddings in :data:`WITHOUT`. Both were picked by these scores,
    unless the recipe was chosen before; the verdict tells what that means.

    Args:
        results: All recipes and controls.
        task: The one that decides.
        statistic: Its scores by the results' names, for the interval of the paired difference; None if nothing can be
            resampled.
        chosen: The result's name that was chosen before, on other data; empty if none was.
    """
    best = best_of(results, task)
    if best is None:
        return f"There is no answer: no recipe has a number on {task.name}."
    if task.proxy:
        return (
            "Without labels there is no answer: proxies do not say which recipe is best. A few hundred labelled pairs "
            "would."
        )
    lead = next((result for result in results if result.name == chosen and has_number(result, task)), best)
    score = f"{task.show(lead.scores[task.name].value)} on {task.name} ({task.metric})"
    control = best_of(results, task, control=True)
    if control is not None and rank(control, task) <= rank(lead, task):
        return (
            f"No recipe to use: {lead.name} has {score}, and a control has {_value(control, task)}: "
            f"{control.in_words}. What the model adds to it does not show on these texts."
        )
    plain = best_of([result for result in results if result.name in WITHOUT], task)
    if plain is None:
        return f"Use {lead.name}: {score}."
    without = f"what you have without a recipe, {WITHOUT[plain.name]} ({_value(plain, task)})"
    if lead is plain:
        return f"Use {lead.name}, {WITHOUT[lead.name]}, which is no recipe: {score}, and nothing is ahead of it."
    ahead = difference(*((lead, plain) if task.greater_is_better else (plain, lead)), task, statistic)
    shown = f"{task.show(ahead.value)} {task.show_interval(ahead)}".rstrip()
    if not ahead.tied and ahead.value > 0:
        return f"Use {lead.name}: {score}, {shown} ahead of {without}."
    told = ", and cannot be told from it on these texts" if ahead.tied else ""
    return f"No need for a recipe: {lead.name} has {score}, {shown} ahead of {without}{told}."


def _value(result: Result, task: Task) -> str:
    return task.show(result.scores[task.name].value)
