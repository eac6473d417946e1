"""Which recipe for this model and these texts: every recipe beside its controls, with intervals.

The texts are embedded once, by all recipes: those that repeat the text come out of one pass (:class:`RecipeSweep`).
Scores are those of sentence-transformers' evaluators and of mteb; :mod:`st_reba.evaluation.bootstrap` says how sure
they are.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..catalogue import TF_IDF, TF_IDF_RESULT, controls_of
from ..data.demo import DEMO_PAIRS
from ..data.tables import Pairs, read_pairs
from ..evaluation import EmbeddingGeometryEvaluator, OddOneOutEvaluator, bootstrap
from ..evaluation.bootstrap import Estimate
from ..readers.store import EmbeddingStore
from ..readers.sweep import RecipeSweep
from .answer import answer
from .columns import Column, geometry_columns, mteb_columns, similarity_columns, word_sense_column
from .mteb import run_tasks
from .results import Comparison, Result
from .runner import TIMED_ROUNDS, Recipes, timed_batches, unit_of_cost
from .verdict import verdict

if TYPE_CHECKING:
    from mteb import AbsTask

__all__ = ["RecipeSweep", "Recipes", "compare", "compare_tasks", "work"]


def work(data: Pairs | Sequence[str], words: OddOneOutEvaluator | None = None, batch_size: int = 32) -> int:
    """How many texts :func:`compare` will report the progress of."""
    if isinstance(data, Pairs):
        texts = data.texts()
    else:
        geometry = EmbeddingGeometryEvaluator(data)
        texts = list(dict.fromkeys([*geometry.texts, *geometry.positives]))
    asked = 0 if words is None else 4 * len(words.questions)
    return len(texts) + asked + TIMED_ROUNDS * sum(map(len, timed_batches(texts, batch_size)))


def compare(
    recipes: Recipes,
    data: Pairs | Sequence[str],
    words: OddOneOutEvaluator | None = None,
    *,
    fit_texts: Sequence[str] | None = None,
    chosen: str = "",
) -> Comparison:
    """Score and time every recipe.

    Args:
        recipes: On one model.
        data: Labelled sentence pairs; or plain texts, and then there are only proxies.
        words: Word-sense questions, if any are to be asked.
        fit_texts: Plain texts that the control without a model, tf-idf, is counted on; those of the pairs if None.
        chosen: Key of the recipe that was chosen before, on other data, and whose scores these are to be: what
            :mod:`st_reba.compare.search` chose. Empty: these scores choose.

    Returns:
        The comparison; what only the caller knows (the names of model and data, the command) is left empty.

    Raises:
        ValueError: If there are too few texts.
    """
    with EmbeddingStore(recipes.embed, batch_size=recipes.batch_size) as store:
        if isinstance(data, Pairs):
            columns = similarity_columns(recipes, store, data, fit_texts)
        else:
            columns = geometry_columns(recipes, store, EmbeddingGeometryEvaluator(data))
    if words is not None:
        # After what decides, before what only adds to it.
        columns.insert(1, word_sense_column(recipes, words))
    return assemble(recipes, columns, chosen=chosen)


def compare_tasks(
    recipes: Recipes, tasks: Sequence[str | AbsTask], *, model: str, output: Path | None = None
) -> Comparison:
    """Score every recipe on tasks of mteb, with mteb's own evaluation, and time it.

    Args:
        recipes: On one model.
        tasks: As for :func:`st_reba.compare.mteb.tasks.resolve_tasks`.
        model: The model's name in mteb's results.
        output: As for :func:`st_reba.compare.mteb.run.run_tasks`.

    Returns:
        The comparison; where there are several tasks their mean comes first. Tasks whose data cannot be loaded are
        among ``skipped``.

    Raises:
        ValueError: If a task is unknown, or none could be run.
    """
    skipped: list[tuple[str, str]] = []
    found = run_tasks(
        tasks,
        [recipe.key for recipe in recipes.all],
        recipes.embed,
        model=model,
        revision=recipes.revisions(),
        output=output,
        batch_size=recipes.batch_size,
        on_step=lambda what: recipes.on_progress(what, 0),
        on_skip=lambda task, reason: skipped.append((task, reason)),
    )
    if not found:
        raise ValueError(f"No task could be run. {' '.join(reason for _, reason in skipped)}")
    return assemble(recipes, mteb_columns(recipes, found), skipped)


TF_IDF_SAYS = "The tf-idf of the text's tokens, with no model at all: a token counts by how few texts have it."
_NO_VECTORS = "It gives the cosine of two texts and no embedding, so it is compared on labelled pairs alone."


def assemble(
    recipes: Recipes, columns: Sequence[Column], skipped: Sequence[tuple[str, str]] = (), chosen: str = ""
) -> Comparison:
    """Put columns together, with what the recipes cost on some of the texts that were embedded for them."""
    # Where all results were known from an earlier run, nothing was embedded.
    seconds = recipes.costs(recipes.sample or read_pairs(DEMO_PAIRS).texts())
    results = []
    for recipe in recipes.all:
        spent = seconds.get(recipe.key)
        results.append(
            Result(
                recipe=recipe.name,
                pooling=recipe.pooling,
                control=recipe.control,
                scores=_scores(columns, recipe.key),
                sentences_per_second=None if spent is None else 1 / spent,
                cost=None if spent is None else spent / seconds[unit_of_cost(recipe.pooling).key],
                same_as=recipe.same_as,
                spec=recipe.spec,
                says=recipe.says,
                called=recipe.called,
                controls=controls_of(recipe),
            )
        )
    tf_idf = Result(
        TF_IDF, "mean", True, _scores(columns, TF_IDF_RESULT), says=TF_IDF_SAYS, called="tf-idf, without any model"
    )
    if tf_idf.scores:
        results.insert(0, tf_idf)
    else:
        skipped = [*skipped, (TF_IDF_RESULT, _NO_VECTORS)]
    return Comparison(
        model="",
        data="",
        tasks=[column.task for column in columns],
        results=results,
        verdict=verdict(results, columns[0].task, columns[0].statistic, chosen),
        skipped=[*recipes.skipped, *skipped],
        lengths=recipes.lengths,
        settings={
            "batch size": str(recipes.batch_size),
            "device": str(recipes.backbone.model.device),
            "precision": str(recipes.backbone.model.dtype).removeprefix("torch."),
            "tokens of one copy, at most": str(recipes.backbone.max_seq_length or "no limit"),
            "intervals": f"95%, {bootstrap.RESAMPLES} paired bootstrap resamples, seed 0",
        },
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("st_reba", "sentence-transformers", "transformers", "torch")},
        },
        date=time.strftime("%Y-%m-%d"),
        chosen=chosen,
        answer=answer(results, columns[0].task, columns[0].statistic, chosen),
    )


def _scores(columns: Sequence[Column], key: str) -> dict[str, Estimate]:
    """What one recipe scored, by the names of the tasks that apply to it."""
    return {column.task.name: column.estimates[key] for column in columns if key in column.estimates}
