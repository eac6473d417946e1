"""The answer of a comparison: the recipe with the best score, and what it is surely ahead of.

It is made here alone; the terminal, the report, the card and ``comparison.json`` show it as it is.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..evaluation.bootstrap import Estimate, Replicated
from ..evaluation.tasks import Measure
from ..recipes import find
from ..text.presets import preset
from .recipes import classical
from .results import Result, best_of
from .splits import SPLITS, Splits

#: Embeddings that need no recipe: the names of their results, and what they are.
WITHOUT = {
    classical("mean").result: "the mean of the last hidden states",
    classical("last").result: "the last token's hidden state",
}

#: Default of ``--margin``: a cheaper recipe is as good where it is surely less than this behind.
MARGIN = 0.01

# What costs more than this share of another's time is not cheaper: timings are not more precise.
_CHEAPER = 0.9


@dataclass(frozen=True)
class Answer:
    """The recipe with the best score.

    Attributes:
        best: Its result.
        score: Its score, corrected for being the best of many, with the interval of its row.
        plain: The better of the embeddings without a recipe; None where none was compared.
        plain_leads: Whether ``plain`` scores no less.
        ahead: Whether it is surely ahead of each of these.
        controls: Number of controls.
        others: Controls that it is not surely ahead of, the best first.
        cheaper: The cheapest recipe that is clearly cheaper and surely less than ``margin`` behind; None for none.
        margin: In the metric's own unit.
        least: The smallest difference to ``plain`` that these data can tell; NaN where none can be told.
    """

    best: Result
    score: Estimate
    plain: Result | None
    plain_leads: bool
    ahead: bool
    controls: int
    others: Sequence[Result]
    cheaper: Result | None
    margin: float
    least: float

    @property
    def use(self) -> str:
        """Name of the result to use; empty where none is surely ahead."""
        return self.best.name if self.ahead else ""


def answer_of(
    results: Iterable[Result], column: Measure, replicated: Replicated, margin: float = MARGIN
) -> Answer | None:
    """Return the answer; None where no recipe has a score.

    Args:
        results: Recipes and controls.
        column: The score that decides.
        replicated: The same scores on bootstrap replicates.
        margin: Largest difference, in the metric's own unit, at which a cheaper recipe is as good.
    """
    scored = [result for result in results if result.name in replicated]
    ranked = sorted(scored, key=lambda result: -result.scores[column.name].value)
    best = next((result for result in ranked if result.name == replicated.best), None)
    if best is None:
        return None
    plain = [result for result in ranked if result.name in WITHOUT]
    controls = [result for result in ranked if result.control]

    def is_cheaper(result: Result) -> bool:
        if result.control or result.name in WITHOUT or result.cost is None or best.cost is None:
            return False
        return result.cost <= _CHEAPER * best.cost and replicated.within(result.name, margin)

    return Answer(
        best=best,
        score=best.scores[column.name],
        plain=plain[0] if plain else None,
        plain_leads=bool(plain) and best_of(scored, column) is plain[0],
        ahead=bool(plain) and all(replicated.ahead(best.name, result.name) for result in plain),
        controls=len(controls),
        others=[result for result in controls if not replicated.ahead(best.name, result.name)],
        cheaper=min(filter(is_cheaper, ranked), key=lambda result: result.cost or 0.0, default=None),
        margin=margin,
        least=replicated.least(best.name, plain[0].name) if plain and replicated.sure else math.nan,
    )


def _in_brackets(result: Result) -> str:
    """Return the name of a recipe with the pooling in brackets."""
    return f"{result.recipe} ({'last token' if result.pooling == 'last' else result.pooling})"


def headline(answer: Answer, column: Measure) -> str:
    """Return the answer in one line."""
    best, score = _in_brackets(answer.best), column.show(answer.score.best_guess)
    if answer.plain is None:
        return f"The best is {best}: {score}. Nothing without a recipe was compared."
    plain = column.show(answer.plain.scores[column.name].value)
    if answer.plain_leads:
        kept = f"Keep {_in_brackets(answer.plain)}, which needs no recipe: {plain}."
        return f"{kept} The best recipe, {best}, has {score}."
    if not answer.ahead:
        return f"None is surely ahead of the {plain} that you have without a recipe: the best, {best}, has {score}."
    but = ""
    if answer.others:
        control = answer.others[0]
        value = column.show(control.scores[column.name].value)
        but = f', but not surely ahead of the control "{control.recipe}" ({value})'
    return f"Use {best}: {score}, against {plain} without a recipe{but}."


def reasons(answer: Answer, column: Measure, splits: Splits, recipes: int) -> list[str]:
    """Return what the answer rests on, one sentence each.

    Args:
        answer: The answer.
        column: The score that decides.
        splits: Of the data.
        recipes: Number of recipes of which it is the best.
    """
    best, score = _in_brackets(answer.best), answer.score
    guess, value = column.show(score.best_guess), column.show(score.value)
    shown = f"{guess} {column.show_interval(score)}".rstrip()
    before = "" if guess == value else f", {value} before the correction for being the best of {recipes} recipes"
    sentences = [f"{best}: {shown}{before}."]
    if splits.chooses:
        sentences.append(
            f"The score is the mean over {SPLITS} splits: one half of the {column.unit} chooses the settings, the "
            "other is scored. What is built is chosen on all of them."
        )
    if answer.plain is not None:
        ahead = column.show(score.best_guess - answer.plain.scores[column.name].value)
        by = f" The recipe is {ahead} above it." if answer.ahead else ""
        sentences.append(f"Without a recipe you have {WITHOUT[answer.plain.name]}.{by}")
    if not answer.controls:
        sentences.append("No control was run beside it.")
    elif not answer.others:
        sentences.append("It is surely ahead of every control.")
    else:
        first, *more = [control.recipe for control in answer.others]
        nor = f", nor of {len(more)} other control{'s' * (len(more) > 1)}" if more else ""
        sentences.append(f'It is not surely ahead of the control "{first}"{nor}.')
    if answer.cheaper is not None and answer.cheaper.cost and answer.best.cost:
        share = 100 * answer.cheaper.cost / answer.best.cost
        sentences.append(
            f"{_in_brackets(answer.cheaper)} is as good: it takes {share:.0f}% of the time and is surely less than "
            f"{column.show(answer.margin)} behind."
        )
    items = f"{len(splits.data)} {column.unit}"
    if not math.isnan(score.low):
        sentences.append("Intervals are 95% for all rows at once.")
    elif splits.sure:
        sentences.append(f"There are no intervals: {items} are too few, or too few of one kind.")
    if answer.least > 0:
        end = ", before the correction" if before else ""
        sentences.append(f"These {items} can tell differences of {column.show(answer.least)} or more{end}.")
    return sentences


def build_command(
    result: Result,
    model: Mapping[str, object],
    fit_texts: Mapping[str, object] | None = None,
    prompts: Mapping[str, str] | None = None,
) -> str:
    """Return the command that builds a recipe.

    Args:
        result: Result of the recipe.
        model: Options that name and run the model, ``--model`` first; those whose value is None are left out.
        fit_texts: Options that name the texts to fit on, ``--fit-texts`` first; likewise. None: none.
        prompts: Prompts of queries and documents.
    """
    recipe, texts, weights = find(result.spec), fit_texts or {}, result.part_weights
    fits = recipe.fitted and texts.get("--fit-texts") is not None
    # The presets of a template are kept away by empty prompts.
    roles = dict.fromkeys(dict(preset(recipe.row.settings.get("template", "")).prompts), "") | dict(prompts or {})
    options = {
        **model,
        "--recipe": result.spec,
        "--pooling": None if result.pooling == recipe.pooling else result.pooling,
        "--template": result.template or None,
        "--shares": ",".join(f"{weight / min(weights):g}" for weight in weights) or None,
        **(texts if fits else {}),
        # Else the script of the texts would choose.
        "--prompt-language": "en" if fits and recipe.row.chinese and not result.template else None,
        **{f"--{role}-prompt": prompt for role, prompt in roles.items()},
        "--out": f"my-{recipe.row.key}",
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return shlex.join(["st-reba", "build", *words])
