"""Which recipe for this model and these texts: every recipe beside its controls, with intervals.

Step by step, from top to bottom of :func:`compare`: every text is embedded once by all recipes (:mod:`.recipes`); a
task says what that gives for each item (:mod:`st_reba.evaluation.tasks`), and the bootstrap how sure the scores are;
the recipes are timed (:mod:`.cost`); the best are run once more on weights that were never trained; and the scores are
judged (:mod:`.answer`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import nn

from ..data.tables import Labelled, Retrieval
from ..evaluation import OddOneOutEvaluator, bootstrap
from ..evaluation.bootstrap import Estimate, Resampled, by_halves
from ..evaluation.tasks import Measure, Measured, Vectors, task_of
from ..lm.backbone import depth, vocabulary_size
from ..lm.fingerprint import fingerprint_of
from ..modules import CausalModule, CausalTransformer
from ..recipes import Recipe, asked_for
from ..recipes.lookup import TF_IDF_RESULT, controls_of, in_language
from ..recipes.recipe import TF_IDF
from ..text.templates import language_of
from .answer import Standing, answer, verdict
from .choice import CHOICE, Choice, Halves, choices_of, joined, told_of, with_candidates
from .cost import FINALISTS, seconds_of, unit_of_cost
from .recipes import Recipes, listed_of
from .results import Comparison, Result, SavedItems, has_number, rank

TF_IDF_SAYS = "The tf-idf of the text's tokens, with no model at all: a token counts by how few texts have it."


@dataclass(frozen=True)
class Scores:
    """One column of the table.

    Attributes:
        column: What is scored.
        estimates: By the results' names; a recipe that the column does not apply to is missing.
        items: What makes the scores.
    """

    column: Measure
    estimates: dict[str, Estimate]
    items: Resampled


def compare(
    recipes: Recipes | str | PathLike[str] | nn.Module,
    data: Labelled,
    words: OddOneOutEvaluator | None = None,
    *,
    tokenizer: Any = None,
    fit_texts: Sequence[str] | None = None,
    random: bool = True,
    halves: Halves | None = None,
) -> Comparison:
    """Score and time every recipe.

    Args:
        recipes: On one model; or the model, its path or one that is loaded, on which those of :func:`usual` are
            compared, as ``st-reba compare`` does.
        data: Labelled pairs, triplets, a retrieval task or texts in classes.
        words: Word-sense questions, if any are to be asked; of no recipe that has no word embeddings.
        tokenizer: That of a loaded language model.
        fit_texts: Plain texts that the control without a model, tf-idf, is counted on; those of the data if None.
        random: Whether the best recipes are run on random weights, too: see :func:`finalists`.
        halves: Of the data, where recipes have candidates (:func:`.choice.with_candidates`): each half is scored by
            what was chosen on the other, and with filters that were fitted on the other's texts, where the recipes were
            given these as their ``fit_on``. None: every recipe is scored as it is, on all items at once.

    Returns:
        The comparison; what only the caller knows (the names of model and data, the command) is left empty.

    Raises:
        ValueError: If the texts have no labels.
    """
    if not isinstance(recipes, Recipes):
        recipes, halves = usual(recipes, data, texts_of(data), tokenizer)
    elif tokenizer is not None:
        raise ValueError("tokenizer goes with a loaded language model, and Recipes have one: leave it out.")
    parts = [data] if halves is None else halves.parts
    task, inputs, tf_idf = task_of(data if halves is None else halves.whole), inputs_of(data), None
    tasks = [task_of(part) for part in parts]
    first = 0 if halves is None else len(parts[0])
    if recipes.with_controls:
        tf_idf = TfIdf(recipes.backbone, data.texts() if fit_texts is None else fit_texts)
    every: list[Recipe] = []
    measured: dict[str, Measured] = {}
    senses: dict[str, Any] = {}
    choices: dict[str, Choice] = {}

    def score(own: Recipes) -> list[Scores]:
        for prompt, texts in inputs:
            own.add(texts, prompt)

        def vectors(key: str, half: int) -> Vectors:
            return Vectors(lambda texts, role: own.vectors(key, texts, task.prompt(role), half))

        every.extend(listed_of(own.all))
        # By the result, what gives its vectors of each half.
        givers = {recipe.result: [recipe.result] * len(tasks) for recipe in listed_of(own.all)}
        if halves is not None:
            deciding = {
                key: joined([each.deciding(vectors(key, half)) for half, each in enumerate(tasks)]) for key in own.keys
            }
            taken = choices_of(own.all, task.scores[0], deciding, first)
            choices.update(taken)
            givers |= {name: [recipe.result for recipe in reversed(choice.taken)] for name, choice in taken.items()}
        for name, keys in givers.items():
            measured[name] = joined([each.measure(vectors(keys[half], half)) for half, each in enumerate(tasks)])
        senses.update({} if words is None else _senses(own, words))
        overlap = None
        if tf_idf is not None:
            overlap = {TF_IDF_RESULT: joined([each.measure(tf_idf) for each in tasks])}
        columns = task.columns(measured, overlap, 0 if tf_idf is None else tf_idf.texts)
        halved = [(column, by_halves(items, first)) for column, items in columns]
        if senses:
            # After what decides, before what only adds to it.
            halved.insert(1, (_word_sense(senses), bootstrap.mean(senses)))
        return [estimated(column, items, every) for column, items in halved]

    scores, shown, texts = score(recipes), listed_of(recipes.all), texts_of(data)
    taken = {recipe.result: taken_of(choices, recipe) for recipe in shown}
    spent = seconds_of(recipes, texts, list(taken.values()))
    seconds = spent | {name: spent[own.result] for name, own in taken.items()}
    table = standing(shown, scores, seconds, choices)
    if random:
        last = finalists(table, answer(table).use)
        with recipes.on_random_weights([taken[name].result for name in last]) as untrained:
            scores = score(untrained)
            table = standing([*shown, *untrained.all], scores, seconds, choices)
    found = answer(table)
    told = {f"{role} prompt": prompt for role, prompt in task.prompts.items()}
    if halves is not None:
        told |= {"chosen": f"on one half of {len(data)} {halves.whole.noun}, scored on the other, in turn"}
    if fitted := [recipe for recipe in recipes.all if recipe.fitted]:
        given = any(recipe.fit_texts for recipe in fitted if not recipe.weighs_tokens)
        own = "the other half's texts" if len(recipes.fit_on) > 1 else "sentences of the package"
        told |= {"filters fitted on": "texts that were given" if given else own}
    # Other prompts are another way to embed the same items.
    items = fingerprint_of(replace(data, prompts={}) if isinstance(data, Retrieval) else data)
    return Comparison(
        model="",
        data="",
        tasks=[each.column for each in scores],
        results=list(table.results),
        verdict=[*found.why, *verdict(table, found.use)],
        skipped=recipes.skipped,
        lengths=[length for _, own in inputs for length in recipes.lengths(sorted(own, key=len, reverse=True))],
        settings={
            **recipes.told,
            "intervals": f"95%, {bootstrap.RESAMPLES} paired bootstrap resamples, seed 0",
            **told,
        },
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("st_reba", "sentence-transformers", "transformers", "torch")},
        },
        date=time.strftime("%Y-%m-%d"),
        answer=found.says,
        use=found.use,
        items=SavedItems.of(table.items, items, first),
        prompts=dict(task.prompts),
        judged=table.choice,
    )


def texts_of(data: Labelled) -> list[str]:
    """What is embedded, each once behind its prompt."""
    return [text for _, texts in inputs_of(data) for text in texts]


def inputs_of(data: Labelled) -> list[tuple[str | None, list[str]]]:
    """What is embedded, each once, by the prompt that stands before it."""
    task = task_of(data)
    found: dict[str | None, dict[str, None]] = {}
    for role, texts in task.inputs():
        found.setdefault(task.prompt(role), {}).update(dict.fromkeys(texts))
    return [(prompt, list(texts)) for prompt, texts in found.items()]


def _senses(recipes: Recipes, words: OddOneOutEvaluator) -> dict[str, Any]:
    """For each word-sense question, (Q,), whether it is answered right, by the results that have word embeddings."""
    shape = (len(words.questions), 4, -1)
    right = {
        name: words.correct(vectors.numpy().reshape(shape))["euclidean_accuracy"]
        for name, vectors in recipes.words(*words.inputs()).items()
    }
    return {recipe.result: right[recipe.name] for recipe in recipes.all if recipe.words and recipe.name in right}


def _word_sense(senses: Mapping[str, Any]) -> Measure:
    questions = len(next(iter(senses.values())))
    note = (
        f"Odd one out: which of four sentences uses a word in another sense, {questions} questions, Euclidean "
        "distance; the same under every pooling."
    )
    return Measure("Word sense", "accuracy x 100", chance=0.25, note=note, unit="questions")


def estimated(column: Measure, items: Resampled, every: Sequence[Recipe]) -> Scores:
    """A column's scores with their intervals."""
    # The choice of all is no recipe that others could be tied with.
    beside = {TF_IDF_RESULT, CHOICE, *(recipe.result for recipe in every if recipe.control)} & {*items.recipes}
    return Scores(column, bootstrap.estimate(items, controls=beside), items)


def finalists(table: Standing, advised: str = "") -> list[str]:
    """The results, by name, whose scores are to be held against those of random weights.

    What an answer names, the best, and what cannot be told from it; not more than :data:`.cost.FINALISTS`.

    Args:
        table: What was compared.
        advised: Name of what the answer would name; empty if there is none.
    """
    own = [result for result in table.results if not result.control and has_number(result, table.column)]
    own.sort(key=lambda result: (result.name != advised, rank(result, table.column)))
    ahead = [result for result in own if result is own[0] or result.scores[table.column.name].tied]
    return [result.name for result in ahead[:FINALISTS]]


def standing(
    every: Sequence[Recipe],
    scores: Sequence[Scores],
    seconds: Mapping[str, float],
    choices: Mapping[str, Choice] = MappingProxyType({}),
) -> Standing:
    """Every result, by the column that decides.

    Args:
        every: What was compared, controls on random weights among them.
        scores: What they scored.
        seconds: What they cost, a text, by result.
        choices: What was taken of their candidates, by result.
    """
    by_result = {
        key: {each.column.name: each.estimates[key] for each in scores if key in each.estimates}
        for key in [TF_IDF_RESULT, *(recipe.result for recipe in every)]
    }
    results = [
        Result(
            recipe=recipe.name,
            pooling=recipe.pooling,
            control=recipe.control,
            scores=by_result[recipe.result],
            sentences_per_second=None if (spent := seconds.get(recipe.result)) is None else 1 / spent,
            cost=None if spent is None else spent / seconds[unit_of_cost(recipe.pooling).result],
            same_as=recipe.same_as,
            spec=taken.key,
            says=taken.says,
            called=recipe.called,
            controls=controls_of(taken),
            read_at=told_of(choices[recipe.result]) if recipe.result in choices else "",
            template="" if taken.wording is None else taken.wording.template,
            shares=taken.shares,
        )
        for recipe in every
        for taken in [taken_of(choices, recipe)]
    ]
    if own := by_result[TF_IDF_RESULT]:
        called = "tf-idf, without any model"
        results.insert(0, Result(TF_IDF, "mean", True, own, says=TF_IDF_SAYS, called=called))
    return Standing(results, scores[0].column, scores[0].items, choices, scores[0].estimates.get(CHOICE))


def taken_of(choices: Mapping[str, Choice], recipe: Recipe) -> Recipe:
    """The candidate of a recipe that is timed, held against random weights, and built: that of the first half, which
    the second half scored."""
    return choices[recipe.result].taken[0] if recipe.result in choices else recipe


def usual(
    model: str | PathLike[str] | nn.Module, data: Labelled, texts: Sequence[str], tokenizer: Any = None
) -> tuple[Recipes, Halves | None]:
    """The few recipes, asking in the language of the texts; beside labels each with its candidates.

    Args:
        model: As for :class:`st_reba.CausalTransformer`.
        data: What they are compared on.
        texts: Those of the data.
        tokenizer: That of a loaded language model.

    Returns:
        The recipes; and the halves of the data, on one of which is chosen what is scored on the other. None where there
        are too few labels.

    Raises:
        ValueError: As for :class:`st_reba.CausalTransformer`.
    """
    given: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
    if isinstance(model, str | PathLike):
        given["model_kwargs"] = {"dtype": "auto"}
    backbone = model if isinstance(model, CausalModule) else CausalTransformer(model, **given)
    recipes = in_language(asked_for(["few"]), language_of(texts) or "en")
    try:
        halves = Halves.of(data)
    except ValueError:
        # Too few to choose on one half.
        return Recipes(backbone, recipes), None
    recipes = [each for recipe in recipes for each in with_candidates(recipe, depth(backbone.model))]
    return Recipes(backbone, recipes, fit_on=halves.fit_on), halves


# Texts of the same tokens are equals in a ranking, whatever rounding makes of them.
_DIGITS = 12


class TfIdf:
    r"""Cosines of tf-idf vectors of token ids: a :class:`~st_reba.evaluation.tasks.Similarity`.

    .. math:: x_w = tf(w) \, idf(w), \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    tf(w) is how often the text has the token w: plain counts, and the smooth idf, as scikit-learn has them. The vectors
    have as many dimensions as the vocabulary has tokens, nearly all of them 0, and are kept sparse.

    Args:
        backbone: Says what the tokens of a text are; its language model is not run.
        texts: Plain texts that df and N are counted on.

    Attributes:
        texts: N.
    """

    def __init__(self, backbone: CausalModule, texts: Sequence[str]) -> None:
        self.texts = len(texts)
        self._token_ids, tokens = backbone.token_ids, range(vocabulary_size(backbone.model))
        self._vectorizer = TfidfVectorizer(analyzer=list, vocabulary=tokens, lowercase=False)
        # Texts without tokens do not count; where there are no others, all tokens count alike.
        self._vectorizer.fit([ids for ids in self._token_ids(texts) if ids] or [[]])

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """For each query the documents of the highest cosine, at most so many: their indices and cosines."""
        asked, there = (self._vectorizer.transform(self._token_ids(texts)) for texts in (queries, documents))
        there = there.T.tocsc()
        found = []
        for row in range(asked.shape[0]):
            scores = np.round((asked[row] @ there).toarray().ravel(), _DIGITS)
            # Of equals those that stand first.
            best = np.argsort(-scores, kind="stable")[:count]
            found.append([(int(index), float(scores[index])) for index in best])
        return found

    def unit_vectors(self, texts: Sequence[str]) -> Any:
        """Of each text one of length one, or 0 where it has no tokens: (B, D), sparse, of the tokens that occur."""
        vectors = self._vectorizer.transform(self._token_ids(texts))
        return vectors[:, vectors.getnnz(axis=0) > 0]

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Of each text with the one in its place among the others, (B,); 0 where one has no tokens."""
        sides = [self._vectorizer.transform(self._token_ids(texts)) for texts in (first, second)]
        return np.round(np.asarray(sides[0].multiply(sides[1]).sum(axis=1)).ravel(), _DIGITS)
