"""Any task of the mteb package for many readings of one language model, each text embedded once."""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...data.demo import DEMO_PAIRS
from ...data.tables import read_pairs
from ...evaluation import bootstrap
from ...evaluation.bootstrap import Estimate, Splits
from ...evaluation.embedded import Embed, Embedded, TensorCache, adopted_settings, stand_in
from ...evaluation.tasks import Measure
from ...files import is_full
from ...lm.fingerprint import fingerprint_of
from ...recipes import Recipe
from ..answer import answer
from ..cost import seconds_of
from ..recipes import Recipes
from ..results import Comparison
from ..run import Scores, assemble, estimated, finalists, standing
from .samples import (
    Sample,
    complete_samples,
    has_predictions,
    query_sample,
    read_samples,
    samples_from_predictions,
    score_items,
    write_samples,
)
from .tasks import PAPER_METRICS, resolve_tasks

if TYPE_CHECKING:
    from mteb import AbsTask, SentenceTransformerEncoderWrapper, TaskResult


@dataclass(frozen=True)
class TaskScore:
    """What one variant reached on one task.

    Attributes:
        value: mteb's main score, the mean over splits and languages.
        paper: The ReBA paper's metric, see :data:`.tasks.PAPER_METRICS`; None if mteb does not give it
            for this task.
        samples: The items the main score is made of; empty where there is nothing to resample.
        result: mteb's own result, as it lies in the results folder.
    """

    value: float
    paper: float | None
    samples: list[Sample]
    result: TaskResult


@dataclass(frozen=True)
class TaskScores:
    """What every variant reached on one task.

    Attributes:
        task: The task, as a column of a table.
        type: mteb's type, such as ``"STS"``.
        metric: mteb's name of the main score, such as ``"cosine_spearman"``.
        paper_metric: mteb's name of the ReBA paper's metric; None if the paper has no such type of task.
        scores: By variant, in their order.
    """

    task: Measure
    type: str
    metric: str
    paper_metric: str | None
    scores: dict[str, TaskScore]

    @property
    def items(self) -> Splits | None:
        """What makes the main score; None where some variant has nothing to resample."""
        samples = {variant: score.samples for variant, score in self.scores.items()}
        return score_items(samples) if all(samples.values()) else None


# Texts that are embedded in one go; and those of them, at most, that stand for all where recipes are timed.
_TOGETHER = 1024
_SAMPLE = 64


def run_tasks(
    tasks: Sequence[str | AbsTask],
    variants: Sequence[str],
    embed: Embed,
    *,
    model: str,
    revision: str | Mapping[str, str],
    like: Any = None,
    output: Path | None = None,
    batch_size: int = 32,
    on_step: Callable[[str], None] = lambda step: None,
    on_texts: Callable[[int], None] = lambda texts: None,
    on_skip: Callable[[str, str], None] = lambda task, reason: None,
) -> list[TaskScores]:
    """Evaluate every variant on every task with ``mteb.evaluate``.

    A task's texts are embedded once, in all variants, when the first variant asks for them, and forgotten with the
    task. Meanwhile they lie in temporary files, n x D numbers a variant (``TMPDIR`` says where): 100,000 texts, as in
    the largest corpora of C-MTEB, are 1.6 GB a variant of a 7B model in float32.

    Every variant meets the same random draws (training examples, clusterings), those of a plain ``mteb.evaluate``.

    Args:
        tasks: As for :func:`st_reba.compare.mteb.tasks.resolve_tasks`.
        variants: Their names, such as ``"ReBA-2, mean"``.
        embed: Embeds texts in all of them.
        model: The language model's name.
        revision: Tells apart all that a vector depends on besides the text, for all variants or for each by its name:
            what :meth:`st_reba.compare.Recipes.revisions` gives. Kept results of another revision are not taken.
        like: A ``SentenceTransformer`` whose prompts, similarity and truncation every variant takes over, if any. They
            are added to the revision.
        output: Where results are kept, or None to keep none. ``results/<model>/<revision>/<task>.json`` is in mteb's
            own format and layout (``mteb.ResultCache(output)`` reads it), with a model such as
            ``st_reba/demo-lm__ReBA-2__mean`` for each variant; ``samples/`` beside it holds the items of the scores.
            What is there already is not run again, unless mteb holds it to be out of date (its overwrite strategy
            ``"only-missing"``), and needs neither the task's data nor the model.
        batch_size: Texts at a time.
        on_step: Called when a variant has been scored on a task, with the names of both.
        on_texts: Called with the number of texts whenever some have been embedded.
        on_skip: Called with a task whose data cannot be loaded, and what to do about it; the others run.

    Returns:
        One entry a task, in their order, without those that were left out.

    Raises:
        ImportError: If mteb is missing.
        ValueError: If a task is unknown, or two variants would share a folder.
    """
    resolved = resolve_tasks(tasks)
    names = _model_names(model, variants)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else output
        store = Embedded(embed, _TOGETHER)
        stack.enter_context(_without_bars())
        revisions = {variant: revision if isinstance(revision, str) else revision[variant] for variant in variants}
        models = {variant: _encoder(store, variant, names[variant], revisions[variant], like) for variant in variants}
        run = _Run(store, models, folder, batch_size, on_step, on_texts)
        scores = []
        for task in resolved:
            try:
                scores.append(run.scores(task))
            except _NoDataError as error:
                on_skip(task.metadata.name, str(error))
        return scores


def _model_names(model: str, variants: Sequence[str]) -> dict[str, str]:
    """mteb's name of each variant: an organisation, a slash, and what is fit to name a folder."""
    names = {}
    for variant in variants:
        parts = [model.rstrip("/").rpartition("/")[2], *variant.split(", ")]
        names[variant] = "st_reba/" + "__".join(re.sub(r"[^\w.-]+", "-", part) for part in parts)
    if len(set(names.values())) < len(variants):
        raise ValueError(
            f"Some of the variants {list(variants)} would share a folder of results: give them other names."
        )
    return names


def _encoder(store: Embedded, variant: str, name: str, revision: str, like: Any) -> SentenceTransformerEncoderWrapper:
    """A variant as mteb sees any SentenceTransformer."""
    import mteb

    if like is not None:
        revision = f"{revision}-{fingerprint_of(adopted_settings(like))}"
    with _without_remarks():
        encoder = mteb.SentenceTransformerEncoderWrapper(stand_in(store, variant, like=like))
        meta = encoder.mteb_model_meta.model_copy(update={"name": name, "revision": revision})
        encoder.mteb_model_meta = meta
    return encoder


@contextmanager
def _without_remarks() -> Iterator[None]:
    """mteb remarks that it finds no tokenizer in a model; a stand-in has none."""
    logger = logging.getLogger("mteb")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_bars() -> Iterator[None]:
    """datasets draws a bar for each step of preparing a task: ``on_step`` tells enough."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


class _NoDataError(Exception):
    """A task's data cannot be loaded: one sentence, and what to do."""


class _Run:
    """Evaluates one task after another."""

    def __init__(
        self,
        store: Embedded,
        models: dict[str, SentenceTransformerEncoderWrapper],
        folder: Path,
        batch_size: int,
        on_step: Callable[[str], None],
        on_texts: Callable[[int], None],
    ) -> None:
        import mteb

        self.store = store
        self.embed, store.embed = store.embed, self._embed
        self.vectors = TensorCache()
        self.on_texts = on_texts
        self.models = models
        self.folder = folder
        self.cache = mteb.ResultCache(folder)
        self.batch_size = batch_size
        self.on_step = on_step

    def scores(self, task: AbsTask) -> TaskScores:
        """Every variant on one task; the parts of an aggregate come first, so that mteb finds their results."""
        if task.is_aggregate:
            for part in task.metadata.tasks:  # type: ignore[attr-defined]
                self._evaluate_all(part)
        results = self._evaluate_all(task)
        metadata = task.metadata
        paper = PAPER_METRICS.get(metadata.type)
        return TaskScores(
            task=Measure(
                name=metadata.name,
                metric=f"{metadata.main_score} x 100",
                note=f"mteb's {metadata.type} task {metadata.name}, {' and '.join(task.eval_splits)}.",
            ),
            type=metadata.type,
            metric=metadata.main_score,
            paper_metric=paper,
            scores={
                variant: TaskScore(
                    value=float(result.get_score()),
                    paper=_mean(result, paper),
                    samples=complete_samples(task, result, read_samples(self._samples_path(task, variant))),
                    result=result,
                )
                for variant, result in results.items()
            },
        )

    def _evaluate_all(self, task: AbsTask) -> dict[str, TaskResult]:
        self._drop_unreadable(task)
        loads = not (task.data_loaded or task.is_aggregate or self._done(task))
        if loads:
            _load(task)
        results = {}
        try:
            for variant in self.models:
                results[variant] = self._evaluate(task, variant)
                self.on_step(f"{task.metadata.name}, {variant}")
        except OSError as error:
            if not is_full(error):
                raise
            raise OSError(
                f"{self.folder} cannot take the results of {task.metadata.name}: the disk is full, there or in the "
                "directory of temporary files (TMPDIR). What was whole is kept: make room, and run the same again."
            ) from error
        finally:
            self.store.forget()
            self.vectors = TensorCache()
            if loads:
                task.unload_data()
        return results

    def _embed(self, texts: Sequence[str], prompt: str | None) -> Mapping[str, Tensor]:
        found = self.vectors.get([list(texts), prompt], lambda: self.embed(texts, prompt))
        self.on_texts(len(texts))
        return found

    def _done(self, task: AbsTask) -> bool:
        """Whether mteb will find every variant's result."""
        for model in self.models.values():
            known = self.cache.load_task_result(task.metadata.name, model.mteb_model_meta)
            if known is None or not known.is_mergeable(task) or known.get_missing_evaluations(task):
                return False
        return True

    def _drop_unreadable(self, task: AbsTask) -> None:
        """Remove results that were being written when the disk was full or the process killed: they are made again.

        Raises:
            ValueError: If one is whole, and mteb does not read it all the same: a newer one has written it.
        """
        for model in self.models.values():
            meta = model.mteb_model_meta
            try:
                self.cache.load_task_result(task.metadata.name, meta)
            except (ValueError, KeyError) as error:
                path = self.cache.get_task_result_path(task.metadata.name, meta)
                if _is_json(path):
                    raise ValueError(
                        f"{path} is no result that mteb {version('mteb')} reads, and another version may have written "
                        "it: use that one, or keep the results of this one elsewhere."
                    ) from error
                path.unlink()

    def _evaluate(self, task: AbsTask, variant: str) -> TaskResult:
        import mteb

        watched, samples = _watched(task)
        with tempfile.TemporaryDirectory() as predictions:
            found = mteb.evaluate(
                self.models[variant],
                watched,
                co2_tracker=False,
                encode_kwargs={"batch_size": self.batch_size, "show_progress_bar": False},
                cache=self.cache,
                overwrite_strategy="only-missing",
                prediction_folder=predictions if has_predictions(task) else None,
                show_progress_bar=False,
            )
            samples += samples_from_predictions(watched, Path(predictions))
        if samples:
            path = self._samples_path(task, variant)
            new = {(sample.split, sample.subset) for sample in samples}
            samples += [sample for sample in read_samples(path) if (sample.split, sample.subset) not in new]
            write_samples(samples, path)
        return found.task_results[0]

    def _samples_path(self, task: AbsTask, variant: str) -> Path:
        meta = self.models[variant].mteb_model_meta
        return self.folder / "samples" / meta.model_name_as_path() / str(meta.revision) / f"{task.metadata.name}.json"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _load(task: AbsTask) -> None:
    name = task.metadata.name
    try:
        task.load_data()
    # What can go wrong is up to the Hub, the network, and the code of the task.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise _NoDataError(
            f"The data of the mteb task {name} cannot be loaded ({reason}): fetch it once where the Hub can be "
            f"reached, with python -c \"import mteb; mteb.get_task('{name}').load_data()\", or leave the task out."
        ) from error


def _watched(task: AbsTask) -> tuple[AbsTask, list[Sample]]:
    """The same task for one more variant: with the random state of its first, and noting the scores of queries."""
    from mteb.abstasks import AbsTaskRetrieval

    watched = copy.copy(task)
    watched.rng_state, watched.np_rng = copy.deepcopy((task.rng_state, task.np_rng))
    samples: list[Sample] = []
    if isinstance(task, AbsTaskRetrieval):

        def noting(scores: Any, relevant: Any, results: Any, hf_split: str, hf_subset: str) -> Any:
            if sample := query_sample(hf_split, hf_subset, scores, task.metadata.main_score):
                samples.append(sample)
            return task.task_specific_scores(scores, relevant, results, hf_split, hf_subset)

        watched.task_specific_scores = noting  # type: ignore[attr-defined]
    return watched, samples


def _mean(result: TaskResult, metric: str | None) -> float | None:
    """The mean of one of a result's metrics over splits and languages, as mteb takes that of the main score."""
    if metric is None or any(metric not in entry for entries in result.scores.values() for entry in entries):
        return None
    return float(result.get_score(getter=lambda entry: entry[metric]))


def mteb_estimates(
    scores: TaskScores, *, controls: Collection[str] = (), resamples: int = 1000, seed: int = 0
) -> dict[str, Estimate]:
    """Each variant's main score on a task with its 95% interval, and whether it is tied with the best.

    What is resampled depends on what mteb tells: the pairs of STS and of pair classification, the test texts of
    classification (with the training draws as they are), the queries of retrieval and reranking; else, the clusterings
    or training draws, of which mteb makes a few: such an interval says how sure their mean is, and nothing of other
    texts. The value itself is mteb's. Where a variant has nothing to resample, no variant has an interval, and none but
    the best is tied.

    Args:
        scores: What every variant reached.
        controls: Variants that are there to be beaten.
        resamples: How many.
        seed: Of the generator.
    """
    values = {variant: score.value for variant, score in scores.scores.items()}
    if (items := scores.items) is None:
        best = max((variant for variant in values if variant not in controls), key=values.__getitem__, default=None)
        return {variant: Estimate(value, nan, nan, variant == best) for variant, value in values.items()}
    found = bootstrap.estimate(items, controls=controls, resamples=resamples, seed=seed)
    return {variant: replace(found[variant], value=value) for variant, value in values.items()}


def mteb_columns(every: Sequence[Recipe], found: Sequence[TaskScores]) -> list[Scores]:
    """mteb's main scores, after their mean where there are several; and the ReBA paper's metric where it is another.

    The mean's interval resamples the tasks: it says how the mean would vary with other tasks of the same kind.
    """
    controls = {recipe.result for recipe in every if recipe.control}
    columns = [
        Scores(scores.task, mteb_estimates(scores, controls=controls & scores.scores.keys()), scores.items)
        for scores in found
    ]
    if len(columns) > 1:
        # A control whose data did not load for one of the tasks has no mean.
        values = {
            recipe.result: [column.estimates[recipe.result].value for column in columns]
            for recipe in every
            if all(recipe.result in column.estimates for column in columns)
        }
        note = f"The mean of the main scores of {len(columns)} tasks; the interval resamples the tasks."
        mean = Measure("Mean of tasks", "main score x 100", note=note, unit="tasks")
        columns.insert(0, estimated(mean, bootstrap.mean(values), controls))
    for scores in found:
        paper = {key: score.paper for key, score in scores.scores.items() if score.paper is not None}
        if scores.paper_metric != scores.metric and paper:
            name = f"{scores.task.name}, {scores.paper_metric}"
            note = "The metric of the ReBA paper for this type of task."
            column = Measure(name, f"{scores.paper_metric} x 100", note=note)
            columns.append(Scores(column, {key: Estimate(value, nan, nan) for key, value in paper.items()}))
    return columns


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
        output: As for :func:`run_tasks`.
        random: As for :func:`st_reba.compare.compare`.

    Returns:
        The comparison; where there are several tasks their mean comes first. Tasks whose data cannot be loaded are
        among ``skipped``.

    Raises:
        ValueError: If a task is unknown, or none could be run.
    """
    skipped: list[tuple[str, str]] = []
    lengths: list[int] = []
    sample: list[str] = []

    def run(own: Recipes, tasks: Sequence[AbsTask]) -> list[TaskScores]:
        def embed(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            if own is recipes:
                lengths.extend(own.lengths(texts))
                # Evenly, as the longest come first.
                sample.extend(texts[:: -(-len(texts) // _SAMPLE)])
            return own.embed(texts, prompt)

        return run_tasks(
            tasks,
            own.keys,
            embed,
            model=model,
            revision=own.revisions(),
            output=output,
            batch_size=own.batch_size,
            on_step=lambda what: own.on_progress(what, 0),
            on_skip=lambda task, reason: skipped.append((task, reason)),
        )

    resolved = resolve_tasks(tasks)
    found = run(recipes, resolved)
    if not found:
        raise ValueError(f"No task could be run. {' '.join(reason for _, reason in skipped)}")
    every = recipes.all
    scores = mteb_columns(every, found)
    # Where all results were known from an earlier run, nothing was embedded.
    seconds = seconds_of(recipes, sample or read_pairs(DEMO_PAIRS).texts())
    if random:
        named = answer(standing(every, scores, seconds))[1]
        with recipes.on_random_weights(finalists(every, scores[0], named)) as untrained:
            names = {own.task.name for own in found}
            beside = run(untrained, [task for task in resolved if task.metadata.name in names])
            every = every + untrained.all
        # A task whose data do not load once more has no controls on random weights.
        controls = {others.task.name: others.scores for others in beside}
        found = [replace(own, scores=own.scores | controls.get(own.task.name, {})) for own in found]
        scores = mteb_columns(every, found)
    return replace(assemble(recipes, standing(every, scores, seconds), scores, skipped), lengths=lengths)
