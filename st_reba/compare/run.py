"""Comparison of recipes on one model and labelled texts, step by step from top to bottom of :func:`compare`.

Every text is embedded once by all recipes (:mod:`.recipes`). Each recipe is scored by settings that other items chose
(:mod:`.splits`). The recipes are timed (:mod:`.cost`), the best are run once more on weights that were never trained,
and the answer says what is surely ahead of what (:mod:`.answer`).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from typing import Any

import numpy as np

from ..data.tables import Labelled, Retrieval
from ..evaluation import OddOneOutEvaluator, bootstrap
from ..evaluation.bootstrap import Array, Estimate, Replicated
from ..evaluation.rankings import TfIdf
from ..evaluation.tasks import Measure, Vectors, task_of
from ..fingerprint import fingerprint_of
from ..hub.loading import ModelSource
from ..lm.views import depth
from ..modules import CausalModule, CausalTransformer
from ..recipes import Recipe, asked_for
from ..recipes.lookup import TF_IDF_RESULT, bags_of_input_embeddings, in_language
from ..recipes.recipe import TF_IDF
from ..text.presets import language_of
from .answer import MARGIN, WITHOUT, answer_of, headline, reasons
from .cost import FINALISTS, seconds_of
from .recipes import Recipes, classical, grouped, in_short, listed_of, with_candidates
from .results import Comparison, Control, Result, SavedReplicates
from .splits import CrossFit, CrossFitted, Splits

ABOUT_TF_IDF = "The tf-idf of the text's tokens, with no model at all: a token counts by how few texts have it."


def compare(
    recipes: Recipes | ModelSource,
    data: Labelled | Splits,
    words: OddOneOutEvaluator | None = None,
    *,
    tokenizer: Any = None,
    fit_texts: Sequence[str] | None = None,
    random: bool = True,
    margin: float = MARGIN,
) -> Comparison:
    """Score and time every recipe.

    Args:
        recipes: Recipes on one model, as :func:`prepared` makes them; or the model, its path or a loaded one, on which
            the few recipes are compared that ``st-reba compare`` compares by default.
        data: Labelled pairs, triplets, a retrieval task or texts in classes; or their splits.
        words: Word-sense questions, if any are to be asked; of no recipe that has no word embeddings.
        tokenizer: Tokenizer of a loaded language model.
        fit_texts: Plain texts that the control without a model, tf-idf, is counted on; those of the data if None.
        random: Whether the best recipes are run on random weights, too.
        margin: Largest difference, in the metric's own unit, at which a cheaper recipe is as good.

    Returns:
        The comparison; what only the caller knows (the names of model and data, the command) is left empty.

    Raises:
        ValueError: If the texts have no labels, or no recipe can run.
    """
    splits = data if isinstance(data, Splits) else Splits.of(data)
    if not isinstance(recipes, Recipes):
        settings: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
        if isinstance(recipes, str | PathLike):
            settings["model_kwargs"] = {"dtype": "auto"}
        backbone = CausalTransformer(recipes, **settings)
        few = in_language(asked_for(["few"]), language_of(texts_of(splits.data)) or "en")
        recipes = prepared(backbone, few, splits)
    elif tokenizer is not None:
        raise ValueError("tokenizer goes with a loaded language model, and Recipes have one: leave it out.")
    table = _Table(recipes, splits)
    if recipes.with_controls:
        table.add_tf_idf(splits.data.texts() if fit_texts is None else fit_texts)
    table.add(recipes)
    senses = {} if words is None else _senses(recipes, words)
    built = {name: candidates[table.rows[name].built] for name, candidates in table.recipes.items()}
    spent = seconds_of(recipes, table.texts, list(built.values()))
    seconds = spent | {name: spent[recipe.result] for name, recipe in built.items() if recipe.result in spent}
    if random and (last := table.finalists()):
        with recipes.on_random_weights([built[name].result for name in last]) as untrained:
            table.add(untrained)
            senses |= {} if words is None else _senses(untrained, words)
    return _comparison(table, seconds, senses, margin)


def prepared(
    backbone: CausalModule, recipes: Sequence[Recipe], splits: Splits, *, fits_own: bool = True, **settings: Any
) -> Recipes:
    """Return recipes with their candidates, filters to be fitted on what chooses, and the embeddings without a recipe.

    Args:
        backbone: The loaded model.
        recipes: Recipes as they are asked for.
        splits: Of the data.
        fits_own: Whether filters are fitted on the data's own texts, where these are enough.
        **settings: As for :class:`.recipes.Recipes`.
    """
    plain = [classical(pooling) for pooling in ("mean", "last")]
    every = list({recipe.result: recipe for recipe in [*plain, *recipes]}.values())
    if splits.chooses:
        layers = depth(backbone.model)
        every = [candidate for recipe in every for candidate in with_candidates(recipe, layers)]
    return Recipes(backbone, every, fit_on=splits.fit_on if fits_own else (), **settings)


def texts_of(data: Labelled) -> list[str]:
    """Return the texts to embed, each once behind its prompt."""
    task = task_of(data)
    inputs = dict.fromkeys((task.prompt(role), text) for role, texts in task.inputs() for text in texts)
    return [text for _, text in inputs]


class _Table:
    """Rows of a comparison as they are filled.

    Args:
        recipes: The first recipes to be added.
        splits: Of the data.

    Attributes:
        rows: Cross-fitted scores, by result.
        recipes: Candidates of each recipe, the recipe as it is first, by result.
        texts: All texts to embed.
    """

    def __init__(self, recipes: Recipes, splits: Splits) -> None:
        self.first, self.splits = recipes, splits
        self.task = splits.tasks[-1]
        self.score = self.task.scores[0]
        self.fit = CrossFit(splits, self.score.kind, self.score.labels)
        self.texts = texts_of(splits.data)
        self.rows: dict[str, CrossFitted] = {}
        self.recipes: dict[str, list[Recipe]] = {}

    def add_tf_idf(self, texts: Sequence[str]) -> None:
        """Add the control without a model, counted on texts."""
        ranker = TfIdf(self.first.backbone, texts)
        measured = [task.measure(ranker)[self.score.of] for task in self.splits.tasks]
        self.rows[TF_IDF_RESULT] = self.fit.row(lambda _, half: measured[half][None], fitted=False)

    def add(self, recipes: Recipes) -> None:
        """Embed the texts with some recipes, and score these."""
        for role, texts in self.task.inputs():
            recipes.add(texts, self.task.prompt(role))

        def measured(recipe: Recipe, fitted: int, half: int) -> Array:
            task = self.splits.tasks[half]
            vectors = Vectors.of(
                task.inputs(), lambda texts, role: recipes.matrix(recipe, texts, task.prompt(role), fitted)
            )
            return task.measure(vectors)[self.score.of]

        def values(candidates: Sequence[Recipe], fitted: int, half: int) -> Array:
            return np.stack([measured(recipe, fitted, half) for recipe in candidates])

        for candidates in grouped(recipes.all, lambda recipe: recipe.candidate_of or recipe.result):
            name = candidates[0].result
            fitted = len(recipes.fit_on) > 1 and any(recipe.fitted and not recipe.fit_texts for recipe in candidates)
            self.recipes[name] = candidates
            self.rows[name] = self.fit.row(partial(values, candidates), len(candidates), fitted=fitted)

    def replicated(self, plain: Collection[str] = ()) -> Replicated:
        """Return scores and replicates of all rows; the best is looked for among the recipes and rows of ``plain``."""
        recipes = {name for name, candidates in self.recipes.items() if not candidates[0].control}
        own = recipes - (WITHOUT.keys() - plain)
        scores = {name: row.score for name, row in self.rows.items()}
        drawn = {name: row.drawn for name, row in self.rows.items()}
        return Replicated(scores, drawn, self.score.kind, len(self.splits.data), own, self.splits.sure)

    def estimates(self, replicated: Replicated) -> dict[str, Estimate]:
        """Return the score and the interval of each row, of :meth:`replicated`; ties are with the best row."""
        estimates = {name: Estimate(np.nan, np.nan, np.nan) for name in self.rows} | replicated.estimates()
        if (every := self.replicated(WITHOUT)).best in WITHOUT:
            tied = {name: estimate.tied for name, estimate in every.estimates().items()}
        else:
            tied = {name: not replicated.ahead(every.best or "", name) for name in WITHOUT if name in replicated}
        estimates |= {name: replace(estimates[name], tied=is_tied) for name, is_tied in tied.items()}
        if not self.score.has_interval:
            estimates = {name: replace(estimate, low=np.nan, high=np.nan) for name, estimate in estimates.items()}
        return estimates

    def finalists(self) -> list[str]:
        """Return the recipes to run on random weights: the best and those tied with it, at most ``FINALISTS``."""
        replicated = self.replicated()
        names = [replicated.names[place] for place in replicated.own]
        return sorted(filter(replicated.tied, names), key=lambda name: -self.rows[name].score)[:FINALISTS]


def _comparison(table: _Table, seconds: Mapping[str, float], senses: Mapping[str, Array], margin: float) -> Comparison:
    recipes, splits, column = table.first, table.splits, table.score.column
    replicated = table.replicated()
    columns = [(column, table.estimates(replicated))]
    if senses:
        controls = [name for name in senses if table.recipes[name][0].control]
        columns.append((_word_sense(senses), bootstrap.estimate(bootstrap.mean(senses), controls=controls)))
    scores = {
        name: {task.name: estimates[name] for task, estimates in columns if name in estimates} for name in table.rows
    }
    results = [_result(table, name, scores[name], seconds) for name in table.recipes]
    if TF_IDF_RESULT in table.rows:
        results.insert(0, Result(TF_IDF, "mean", True, scores[TF_IDF_RESULT], description=ABOUT_TF_IDF))
    answer = answer_of(results, column, replicated, margin)
    if answer is None:
        line, why = f"There is no answer: {_why_none(table)}", []
    else:
        line, why = headline(answer, column), reasons(answer, column, splits, len(replicated.own))
    return Comparison(
        model="",
        data="",
        tasks=[task for task, _ in columns],
        results=results,
        verdict=[*why, *splits.notes],
        skipped=recipes.skipped,
        lengths=recipes.lengths(sorted(table.texts, key=len, reverse=True)),
        settings=_settings(table),
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("st_reba", "sentence-transformers", "transformers", "torch")},
        },
        date=time.strftime("%Y-%m-%d"),
        answer=line,
        use="" if answer is None else answer.use,
        replicates=SavedReplicates.of(_drawn_from(splits), {name: row.drawn for name, row in table.rows.items()}),
        prompts=dict(table.task.prompts),
    )


def _result(table: _Table, name: str, scores: dict[str, Estimate], seconds: Mapping[str, float]) -> Result:
    recipe, row = table.recipes[name][0], table.rows[name]
    built, spent = table.recipes[name][row.built], seconds.get(name)
    unit = seconds.get(classical(recipe.pooling).result)
    end = depth(table.first.backbone.model) + 1 + recipe.row.end
    by_layer = {
        str(candidate.layer or end): score
        for candidate, score in zip(table.recipes[name], row.every, strict=False)
        if (candidate.wording, candidate.part_weights) == (built.wording, built.part_weights) and np.isfinite(score)
    }
    halves = Counter(in_short(table.recipes[name][place]) or "as it is" for place in row.chosen)
    return Result(
        recipe=recipe.name,
        pooling=recipe.pooling,
        control=recipe.control,
        scores=scores,
        sentences_per_second=None if spent is None else 1 / spent,
        cost=None if spent is None or unit is None else spent / unit,
        spec=built.key,
        description=built.description,
        controls=controls_of(built),
        read_at=in_short(built),
        template="" if built.wording is None else built.wording.template,
        part_weights=built.part_weights,
        chosen=dict(halves.most_common()) if len(table.recipes[name]) > 1 else {},
        by_layer=by_layer if len(by_layer) > 1 else {},
    )


def controls_of(recipe: Recipe) -> tuple[Control, ...]:
    """Return the controls of a recipe. The bag with the same filter is one of them."""
    if recipe.random:
        return ()
    itself = Control("random", recipe.on_random_weights().result)
    if recipe.bag:
        return (itself,)
    plain, *filtered = [bag.result for bag in bags_of_input_embeddings([recipe])]
    bags = (Control("bag", plain), *(Control("filtered bag", name) for name in filtered))
    return (Control("tf-idf", TF_IDF_RESULT), *bags, itself)


def _settings(table: _Table) -> dict[str, str]:
    recipes, splits = table.first, table.splits
    values = {
        **recipes.settings,
        "intervals": f"95%, simultaneous, {bootstrap.REPLICATES} bootstrap replicates",
        **{f"{role} prompt": prompt for role, prompt in table.task.prompts.items()},
    }
    if splits.chooses:
        half = f"one half of {len(splits.data)} {splits.data.noun}"
        values["settings"] = f"chosen on {half}, scored on the other, in turn"
    if fitted := [recipe for recipe in recipes.all if recipe.fitted]:
        given = any(recipe.fit_texts for recipe in fitted if not recipe.weighs_tokens)
        default = "the choosing half's texts" if len(recipes.fit_on) > 1 else "sentences of the package"
        values["filters fitted on"] = "texts that were given" if given else default
    return values


def _drawn_from(splits: Splits) -> str:
    """Return a fingerprint of the items and splits that replicates are drawn from."""
    # Other prompts are another way to embed the same items.
    data = replace(splits.data, prompts={}) if isinstance(splits.data, Retrieval) else splits.data
    return fingerprint_of([data, [half.tolist() for half in splits.halves], bootstrap.REPLICATES])


def _why_none(table: _Table) -> str:
    """Return why there is no answer, as a clause and what to do."""
    if all(name in WITHOUT or candidates[0].control for name, candidates in table.recipes.items()):
        return "nothing but the embeddings that need no recipe was compared. Give --recipes that has more."
    labels, unit = table.fit.labels, table.task.unit
    what = f"no recipe has a score on {table.score.column.name}."
    if labels is not None and np.ptp(labels) == 0:
        return f"{what} All labels are alike: give {unit} whose labels differ."
    return f"{what} Similarities are not numbers, or the same for all: give texts that differ, or take another --dtype."


def _senses(recipes: Recipes, words: OddOneOutEvaluator) -> dict[str, Array]:
    """Return whether each word-sense question is answered right, (Q,), by the results that have word embeddings."""
    shape = (len(words.questions), 4, -1)
    right = {
        name: words.correct(vectors.numpy().reshape(shape))["euclidean_accuracy"]
        for name, vectors in recipes.words(*words.inputs()).items()
    }
    listed = listed_of(recipes.all)
    return {recipe.result: right[recipe.name] for recipe in listed if recipe.words and recipe.name in right}


def _word_sense(senses: Mapping[str, Any]) -> Measure:
    questions = len(next(iter(senses.values())))
    asked = f"Odd one out: which of four sentences uses a word in another sense, {questions} questions"
    note = f"{asked}, Euclidean distance; the same under every pooling."
    return Measure("Word sense", "accuracy x 100", chance=0.25, note=note, unit="questions")
