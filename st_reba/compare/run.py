"""Which recipe for this model and these texts: every recipe beside its controls, with intervals.

Step by step: the texts are embedded once, by all recipes (:mod:`.runner`), and looked up from then on; sentence-
transformers' evaluators and mteb score them, and :mod:`st_reba.evaluation.bootstrap` says how sure that is
(:mod:`.columns`); the recipes are timed (:mod:`.timing`); the best are run once more on weights that were never trained
(:func:`finalists`); and the scores are judged (:mod:`.answer`, :mod:`.verdict`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from ..compare.sweep import RecipeSweep
from ..data.demo import DEMO_PAIRS
from ..data.tables import Data, Labelled, Retrieval, read_pairs
from ..evaluation import EmbeddingGeometryEvaluator, OddOneOutEvaluator, bootstrap
from ..evaluation.bootstrap import Estimate
from ..evaluation.store import EmbeddingStore
from ..evaluation.tasks import task_of
from ..lm.fingerprint import fingerprint_of
from ..recipes import Recipe
from ..recipes.lookup import TF_IDF_RESULT, controls_of
from ..recipes.recipe import TF_IDF
from .answer import answer
from .columns import (
    Embedded,
    Inputs,
    ScoreColumn,
    embed,
    geometry_columns,
    mteb_columns,
    task_columns,
    word_sense_column,
)
from .mteb import TaskScores, resolve_tasks, run_tasks
from .results import Comparison, Items, Result
from .runner import FINALISTS, Recipes, unit_of_cost, work
from .tf_idf import TfIdf
from .verdict import verdict

if TYPE_CHECKING:
    from mteb import AbsTask

__all__ = ["RecipeSweep", "Recipes", "compare", "compare_tasks", "work"]


def texts_of(data: Data | Sequence[str]) -> list[str]:
    """What is embedded, each once behind its prompt."""
    return [text for _, texts in _inputs(data) for text in texts]


def _inputs(data: Data | Sequence[str]) -> Inputs:
    """The same by the prompts."""
    if isinstance(data, Labelled):
        task = task_of(data)
        found: dict[str | None, dict[str, None]] = {}
        for role, texts in task.inputs():
            found.setdefault(task.prompt(role), {}).update(dict.fromkeys(texts))
        return [(prompt, list(texts)) for prompt, texts in found.items()]
    geometry = EmbeddingGeometryEvaluator(data)
    return [(None, list(dict.fromkeys([*geometry.texts, *geometry.positives])))]


def compare(
    recipes: Recipes,
    data: Data | Sequence[str],
    words: OddOneOutEvaluator | None = None,
    *,
    fit_texts: Sequence[str] | None = None,
    chosen: str = "",
    random: bool = True,
) -> Comparison:
    """Score and time every recipe.

    Args:
        recipes: On one model.
        data: Labelled pairs, triplets or a retrieval task; or plain texts, and then there are only proxies.
        words: Word-sense questions, if any are to be asked; of no recipe that has no word embeddings.
        fit_texts: Plain texts that the control without a model, tf-idf, is counted on; those of the data if None.
        chosen: Key of the recipe that was chosen before, on other data, and whose scores these are to be: what
            :mod:`st_reba.compare.search` chose. Empty: these scores choose.
        random: Whether the best recipes are run on random weights, too: see :func:`finalists`.

    Returns:
        The comparison; what only the caller knows (the names of model and data, the command) is left empty.

    Raises:
        ValueError: If there are too few texts.
    """
    inputs = _inputs(data)
    tf_idf = None
    if isinstance(data, Labelled) and recipes.with_controls:
        tf_idf = TfIdf(recipes.backbone, data.texts() if fit_texts is None else fit_texts)

    def estimated(embedded: Embedded) -> list[ScoreColumn]:
        if isinstance(data, Labelled):
            columns = task_columns(embedded, task_of(data), tf_idf)
        else:
            columns = geometry_columns(embedded, EmbeddingGeometryEvaluator(data))
        if words is not None and embedded.words:
            # After what decides, before what only adds to it.
            columns.insert(1, word_sense_column(embedded, words))
        return columns

    with ExitStack() as stores:

        def read(model: Recipes) -> Embedded:
            store = stores.enter_context(EmbeddingStore(model.embed, batch_size=model.batch_size))
            return embed(model, inputs, words, store)

        embedded = read(recipes)
        columns = estimated(embedded)
        seconds = recipes.costs(recipes.sample)
        if random:
            named = chosen or assemble(recipes, embedded.recipes, columns, seconds).use
            keys = finalists(recipes.all, columns[0], named)
            recipes.skip_random(keys, recipes.lengths, [] if words is None else word_lengths(recipes, words))
            with recipes.on_random_weights(keys) as untrained:
                embedded |= read(untrained)
            columns = estimated(embedded)
    prompts = dict(data.prompts) if isinstance(data, Retrieval) else {}
    # Other prompts are another way to embed the same items.
    items = fingerprint_of(replace(data, prompts={}) if isinstance(data, Retrieval) else data)
    found = assemble(recipes, embedded.recipes, columns, seconds, chosen=chosen, data=items)
    told = {f"{role} prompt": prompt for role, prompt in prompts.items()}
    return replace(found, prompts=prompts, settings={**found.settings, **told})


def word_lengths(recipes: Recipes, words: OddOneOutEvaluator) -> list[int]:
    """Tokens of the sentences of word-sense questions."""
    return [len(ids) for ids in recipes.backbone.token_ids(words.inputs()[0])]


def finalists(recipes: Sequence[Recipe], column: ScoreColumn, chosen: str = "") -> list[str]:
    """The results, by name, whose scores are to be held against those of random weights.

    What an answer names, the best, and what cannot be told from it; not more than :data:`FINALISTS`.

    Args:
        recipes: What was compared.
        column: What decides.
        chosen: Key of what was chosen before, or of what the answer would name; empty if there is none.
    """
    scores = {
        recipe.result: estimate
        for recipe in recipes
        if not recipe.control and (estimate := column.estimates.get(recipe.result)) and not isnan(estimate.value)
    }
    sign = -1 if column.task.greater_is_better else 1
    best = sorted(scores, key=lambda key: (key != chosen, sign * scores[key].value))
    return [key for place, key in enumerate(best) if place == 0 or scores[key].tied][:FINALISTS]


def compare_tasks(
    recipes: Recipes,
    tasks: Sequence[str | AbsTask],
    *,
    model: str,
    output: Path | None = None,
    random: bool = True,
) -> Comparison:
    """Score every recipe on tasks of mteb, with mteb's own evaluation, and time it.

    Args:
        recipes: On one model.
        tasks: As for :func:`st_reba.compare.mteb.tasks.resolve_tasks`.
        model: The model's name in mteb's results.
        output: As for :func:`st_reba.compare.mteb.run.run_tasks`.
        random: As for :func:`compare`.

    Returns:
        The comparison; where there are several tasks their mean comes first. Tasks whose data cannot be loaded are
        among ``skipped``.

    Raises:
        ValueError: If a task is unknown, or none could be run.
    """
    skipped: list[tuple[str, str]] = []

    def run(readers: Recipes, tasks: Sequence[str | AbsTask]) -> list[TaskScores]:
        return run_tasks(
            tasks,
            readers.keys,
            readers.embed,
            model=model,
            revision=readers.revisions(),
            output=output,
            batch_size=readers.batch_size,
            on_step=lambda what: readers.on_progress(what, 0),
            on_skip=lambda task, reason: skipped.append((task, reason)),
        )

    resolved = resolve_tasks(tasks)
    found = run(recipes, resolved)
    if not found:
        raise ValueError(f"No task could be run. {' '.join(reason for _, reason in skipped)}")
    columns = mteb_columns(recipes.all, found)
    # Where all results were known from an earlier run, nothing was embedded.
    seconds = recipes.costs(recipes.sample or read_pairs(DEMO_PAIRS).texts())
    everything = recipes.all
    if random:
        named = assemble(recipes, everything, columns, seconds).use
        with recipes.on_random_weights(finalists(recipes.all, columns[0], named)) as untrained:
            names = {scores.task.name for scores in found}
            beside = run(untrained, [task for task in resolved if task.metadata.name in names])
            everything = everything + untrained.all
        # A task whose data do not load once more has no controls on random weights.
        controls = {others.task.name: others.scores for others in beside}
        found = [replace(scores, scores=scores.scores | controls.get(scores.task.name, {})) for scores in found]
        columns = mteb_columns(everything, found)
    return assemble(recipes, everything, columns, seconds, skipped)


TF_IDF_SAYS = "The tf-idf of the text's tokens, with no model at all: a token counts by how few texts have it."
_NO_VECTORS = "It gives the cosine of two texts and no embedding, so it is compared where there are labels alone."


def assemble(
    recipes: Recipes,
    everything: Sequence[Recipe],
    columns: Sequence[ScoreColumn],
    seconds: Mapping[str, float],
    skipped: Sequence[tuple[str, str]] = (),
    chosen: str = "",
    data: str = "",
) -> Comparison:
    """Put columns together.

    Args:
        recipes: What was compared.
        everything: The same, and the controls on random weights.
        columns: What they scored.
        seconds: What they cost, a text, by result.
        skipped: What was left out besides recipes that cannot be run, and why.
        chosen: As for :func:`compare`.
        data: Tells the items of the first column from others.
    """
    results = []
    for recipe in everything:
        spent = seconds.get(recipe.result)
        results.append(
            Result(
                recipe=recipe.name,
                pooling=recipe.pooling,
                control=recipe.control,
                scores=_scores(columns, recipe.result),
                sentences_per_second=None if spent is None else 1 / spent,
                cost=None if spent is None else spent / seconds[unit_of_cost(recipe.pooling).result],
                same_as=recipe.same_as,
                spec=recipe.key,
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
    elif recipes.with_controls:
        skipped = [*skipped, (TF_IDF_RESULT, _NO_VECTORS)]
    first = columns[0]
    found = answer(results, first.task, first.statistic, chosen)
    return Comparison(
        model="",
        data="",
        tasks=[column.task for column in columns],
        results=results,
        verdict=verdict(results, first.task, first.statistic, chosen),
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
        answer=found.says,
        use=found.use,
        items=Items.of(first.statistic, data),
    )


def _scores(columns: Sequence[ScoreColumn], key: str) -> dict[str, Estimate]:
    """What one recipe scored, by the names of the tasks that apply to it."""
    return {column.task.name: column.estimates[key] for column in columns if key in column.estimates}
