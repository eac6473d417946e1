"""Any task of the mteb package for many readings of one language model, each text embedded once."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from sentence_transformers.util import SimilarityFunction
from torch import Tensor

from ...evaluation import bootstrap
from ...evaluation.bootstrap import Estimate, Items, Kind, Splits
from ...evaluation.embedded import Embed, Embedded, TensorCache, adopted_settings
from ...evaluation.tasks import Measure
from ...files import atomic_file, is_full
from ...lm.fingerprint import fingerprint_of
from ...optional import require
from ...recipes import Recipe
from ...text.templates import PromptLanguage
from ..recipes import Recipes
from ..results import Comparison
from ..run import Scores, concluded, estimated

if TYPE_CHECKING:
    from mteb import AbsTask, ResultCache, TaskResult
    from mteb.models import ModelMeta

__all__ = [
    "TaskScore",
    "TaskScores",
    "compare_tasks",
    "language_of_tasks",
    "mteb_estimates",
    "resolve_tasks",
    "run_tasks",
    "score_items",
]

#: What the ReBA paper reports (Table 3's caption, A.3), by mteb's type of a task, in its names. See docs/evaluate.md.
PAPER_METRICS = {
    "Classification": "accuracy",
    "Clustering": "v_measure",
    "Reranking": "map_at_1000",
    "PairClassification": "cosine_accuracy",
    "STS": "cosine_pearson",
    "Retrieval": "recall_at_1000",
}

# Tasks by name


def resolve_tasks(names: Sequence[str | AbsTask]) -> list[AbsTask]:
    """The tasks of these names, each once, in their order.

    Args:
        names: Names of mteb's tasks; names of its benchmarks, which stand for all their tasks (``"C-MTEB"`` is the 31
            of ``"MTEB(cmn, v1)"``); or tasks.

    Raises:
        ImportError: If mteb is missing.
        ValueError: If there is no such task, or one that is not about texts alone; the message names what comes close.
    """
    require("mteb", "mteb", "A task of the Massive Text Embedding Benchmark")
    if not names:
        raise ValueError('No mteb task was given: name at least one, such as "STSB", or "C-MTEB" for its 31 tasks.')
    found: dict[str, AbsTask] = {}
    for name in names:
        for task in _named(name) if isinstance(name, str) else [name]:
            if task.metadata.modalities != ["text"]:
                raise ValueError(
                    f"The mteb task {task.metadata.name} is about {', '.join(task.metadata.modalities)}, and a "
                    "language model embeds texts alone: choose tasks whose modality is text."
                )
            found.setdefault(task.metadata.name, task)
    return list(found.values())


def _named(name: str) -> list[AbsTask]:
    import mteb

    try:
        return list(mteb.get_benchmark("MTEB(cmn, v1)" if name.upper() in ("C-MTEB", "CMTEB") else name).tasks)
    except KeyError:
        pass
    try:
        return [mteb.get_task(name)]
    except KeyError as error:
        # mteb tells what is near.
        near = str(error.args[0]).partition("not found. ")[2]
        told = near or "mteb.get_tasks() lists those there are; C-MTEB stands for its 31 Chinese tasks."
        raise ValueError(f"There is no mteb task {name!r}. {told}") from None


def language_of_tasks(tasks: Sequence[AbsTask]) -> PromptLanguage:
    """The language in which to ask about the texts of tasks: ``"zh"`` where all of them are Chinese alone."""
    languages = {language for task in tasks for language in task.metadata.languages}
    return "zh" if languages and languages <= {"cmn", "zho"} else "en"


# What a score is made of


@dataclass(frozen=True)
class Sample:
    """The items behind one split's score (one language's, where a task has several).

    A task's score is the mean of the scores of its samples.

    Attributes:
        split: The split's name, such as ``"test"``.
        subset: mteb's name of the language or part, such as ``"default"``.
        unit: What an item is: a pair, a text, a query or one of mteb's clusterings.
        statistic: Makes the score of the items: the mean of ``values``; their correlation with ``labels``; the accuracy
            at the best threshold, or the average precision, of the best of several similarities.
        values: One number an item, (n,), or as many as there are similarities, (n, similarities).
        labels: (n,), where the statistic needs them.
    """

    split: str
    subset: str
    unit: Literal["pair", "text", "query", "clustering"]
    statistic: Kind
    values: Any
    labels: Any = None


def score_items(samples: Mapping[str, Sequence[Sample]]) -> Splits:
    """The main score: the mean of the scores of all splits, each resampled by itself.

    Args:
        samples: By variant; each has the same splits, with the same items.
    """
    parts = []
    for alike in zip(*samples.values(), strict=True):
        values = {
            variant: np.asarray(own.values, dtype=np.float64) for variant, own in zip(samples, alike, strict=True)
        }
        first = alike[0]
        if first.statistic in ("average_precision", "best_accuracy"):
            labels = np.equal(first.labels, 1).astype(np.float64)
        else:
            labels = np.asarray(() if first.labels is None else first.labels, dtype=np.float64)
        parts.append(Items(first.statistic, values, labels))
    return Splits(parts)


#: How mteb predicts how alike two texts are: a metric's name starts with one of these, or with "max", the best of all.
_PREDICTED = ("similarity_scores", "cosine_scores", "manhattan_distances", "euclidean_distances", "dot_scores")
#: What is resampled, by what a metric's name ends with.
_STATISTICS: dict[str, Kind] = {
    "spearman": "spearman",
    "pearson": "pearson",
    "accuracy": "best_accuracy",
    "ap": "average_precision",
}
#: pytrec_eval's names of what mteb calls otherwise.
_TREC_NAMES = {"ndcg": "ndcg_cut", "map": "map_cut", "precision": "P", "hit_rate": "success"}


#: Tasks of whose predictions, which are small, the score can be made.
_WITH_PREDICTIONS = ("STS", "PairClassification", "Classification")


def _samples_from_predictions(task: Any, path: Path) -> Iterator[Sample]:
    """Samples of what mteb saved of a task; none if it saved nothing, or the main score is made of something else."""
    kind, metric = task.metadata.type, task.metadata.main_score
    by_similarity, _, name = metric.rpartition("_")
    known = metric == "accuracy" and not task.is_cross_validation if kind == "Classification" else name in _STATISTICS
    subsets = json.loads(path.read_text(encoding="utf-8")) if known and path.exists() else {}
    subsets.pop("mteb_model_meta", None)
    for subset, split, predictions in [(subset, *each) for subset, own in subsets.items() for each in own.items()]:
        data = (task.dataset if subset == "default" and subset not in task.dataset else task.dataset[subset])[split]
        if kind == "Classification":
            right = np.asarray(predictions) == np.asarray(data[task.label_column_name])
            yield Sample(split, subset, "text", "mean", right.mean(axis=0))
            continue
        columns = [each for each in _PREDICTED if each.startswith(by_similarity or "similarity")] or _PREDICTED
        closeness = [np.asarray(predictions[each]) * (-1 if "distances" in each else 1) for each in columns]
        labels = data["score" if kind == "STS" else task.label_column_name]
        # Some datasets hold all their pairs in one row.
        labels = np.asarray(labels[0] if kind != "STS" and len(data) == 1 else labels)
        values = closeness[0] if kind == "STS" else np.stack(closeness, axis=1)
        yield Sample(split, subset, "pair", _STATISTICS[name], values, labels)


# Scores


@dataclass(frozen=True)
class TaskScore:
    """What one variant reached on one task.

    Attributes:
        value: mteb's main score, the mean over splits and languages.
        paper: The ReBA paper's metric, see :data:`PAPER_METRICS`; None if mteb does not give it for this task.
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


class RecipeEncoder:
    """One variant as mteb sees an encoder: its embeddings are looked up.

    Args:
        embedded: Knows the embeddings.
        variant: Which of them to give.
        meta: What mteb calls the variant.
        like: A ``SentenceTransformer`` whose prompts, similarity and truncation it takes over, if any.
    """

    def __init__(self, embedded: Embedded, variant: str, meta: Any, like: Any = None) -> None:
        self.embedded = embedded
        self.variant = variant
        self.mteb_model_meta = meta
        self.like = like
        similarity = "cosine" if like is None else like.similarity_fn_name
        self.similarity = SimilarityFunction.to_similarity_fn(similarity)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(similarity)

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **others: Any) -> Any:
        """(B, D), from mteb's batches of B texts."""
        from mteb.models.abs_encoder import get_prompt_name

        texts = [text for batch in inputs for text in batch["text"]]
        if self.like is None:
            return self.embedded.of(self.variant, texts).numpy()
        prompts, names = self.like.prompts, [get_prompt_name(self.like.prompts, task_metadata, prompt_type)]
        # Other names of a document's prompt, as sentence-transformers knows them.
        names += ["passage", "corpus"] if prompt_type == "document" else []
        name = next((name for name in names if name in prompts), self.like.default_prompt_name)
        vectors = self.embedded.of(self.variant, texts, prompts.get(name) or None)
        return vectors[:, : self.like.truncate_dim].numpy()


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
        tasks: As for :func:`resolve_tasks`.
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
    import datasets
    import mteb
    from mteb.models import ModelMeta

    metas = {}
    for variant in variants:
        parts = [model.rstrip("/").rpartition("/")[2], *variant.split(", ")]
        name = "st_reba/" + "__".join(re.sub(r"[^\w.-]+", "-", part) for part in parts)
        told = revision if isinstance(revision, str) else revision[variant]
        if like is not None:
            told = f"{told}-{fingerprint_of(adopted_settings(like))}"
        metas[variant] = ModelMeta.create_empty({"name": name, "revision": told})
    if len({meta.name for meta in metas.values()}) < len(variants):
        raise ValueError(
            f"Some of the variants {list(variants)} would share a folder of results: give them other names."
        )

    def scores_of(task: AbsTask) -> dict[str, TaskScore]:
        """Every variant on one task; the texts' embeddings are gone with it."""
        vectors = TensorCache()

        def kept(texts: Sequence[str], prompt: str | None) -> Mapping[str, Tensor]:
            made = vectors.get([list(texts), prompt], lambda: embed(texts, prompt))
            on_texts(len(texts))
            return made

        embedded, scores = Embedded(kept, batch_size), {}
        known = _known(task, metas.values(), cache)
        loads = not (task.data_loaded or task.is_aggregate or known)
        if loads:
            _load(task)
        try:
            for variant, meta in metas.items():
                encoder = RecipeEncoder(embedded, variant, meta, like)
                scores[variant] = _evaluate(task, encoder, cache, folder, batch_size)
                on_step(f"{task.metadata.name}, {variant}")
        except OSError as error:
            if not is_full(error):
                raise
            raise OSError(
                f"{folder} cannot take the results of {task.metadata.name}: the disk is full, there or in the "
                "directory of temporary files (TMPDIR). What was whole is kept: make room, and run the same again."
            ) from error
        finally:
            if loads:
                task.unload_data()
        return scores

    with ExitStack() as stack:
        if not datasets.are_progress_bars_disabled():
            # datasets draws a bar for each step of preparing a task: on_step tells enough.
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else output
        cache = mteb.ResultCache(folder)
        found = []
        for task in resolved:
            metadata = task.metadata
            try:
                # The parts of an aggregate come first, so that mteb finds their results.
                for part in metadata.tasks if task.is_aggregate else ():  # type: ignore[attr-defined]
                    scores_of(part)
                scores = scores_of(task)
            except _NoDataError as error:
                on_skip(metadata.name, str(error))
                continue
            note = f"mteb's {metadata.type} task {metadata.name}, {' and '.join(task.eval_splits)}."
            column = Measure(metadata.name, f"{metadata.main_score} x 100", note=note)
            paper = PAPER_METRICS.get(metadata.type)
            found.append(TaskScores(column, metadata.type, metadata.main_score, paper, scores))
        return found


class _NoDataError(Exception):
    """A task's data cannot be loaded: one sentence, and what to do."""


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


def _known(task: AbsTask, metas: Collection[ModelMeta], cache: ResultCache) -> bool:
    """Whether mteb will find every variant's result.

    A result that was being written when the disk was full or the process killed is removed: it is made again.

    Raises:
        ValueError: If a result is whole, and mteb does not read it all the same: a newer one has written it.
    """
    known = True
    for meta in metas:
        try:
            result = cache.load_task_result(task.metadata.name, meta)
        except (ValueError, KeyError) as error:
            path, result = cache.get_task_result_path(task.metadata.name, meta), None
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                path.unlink()
            else:
                raise ValueError(
                    f"{path} is no result that mteb {version('mteb')} reads, and another version may have written it: "
                    "use that one, or keep the results of this one elsewhere."
                ) from error
        known = bool(known and result and result.is_mergeable(task) and not result.get_missing_evaluations(task))
    return known


def _evaluate(task: AbsTask, encoder: RecipeEncoder, cache: ResultCache, folder: Path, batch_size: int) -> TaskScore:
    """One variant on one task, and what its score is made of, which lies beside the results."""
    import mteb
    from mteb.abstasks import AbsTaskRetrieval

    watched, samples = copy.copy(task), []
    # The random state that the first variant met.
    watched.rng_state, watched.np_rng = copy.deepcopy((task.rng_state, task.np_rng))
    metric = task.metadata.main_score
    if isinstance(task, AbsTaskRetrieval):

        def note_queries(scores: Any, relevant: Any, results: Any, hf_split: str, hf_subset: str) -> Any:
            """mteb shows the scores of single queries nowhere else."""
            name, _, cut = metric.partition("_at_")
            column = f"{_TREC_NAMES.get(name, name)}_{cut}"
            values = [own[column] for _, own in sorted(scores.items()) if column in own]
            if values:
                samples.append(Sample(hf_split, hf_subset, "query", "mean", values))
            return task.task_specific_scores(scores, relevant, results, hf_split, hf_subset)

        watched.task_specific_scores = note_queries  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as predictions:
        done = mteb.evaluate(
            encoder,
            watched,
            co2_tracker=False,
            encode_kwargs={"batch_size": batch_size, "show_progress_bar": False},
            cache=cache,
            overwrite_strategy="only-missing",
            prediction_folder=predictions if task.metadata.type in _WITH_PREDICTIONS else None,
            show_progress_bar=False,
        )
        samples += _samples_from_predictions(watched, Path(predictions) / watched.prediction_file_name)
    meta = encoder.mteb_model_meta
    path = folder / "samples" / meta.model_name_as_path() / meta.revision / f"{task.metadata.name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    by_place = {(sample.split, sample.subset): sample for sample in [*(Sample(**entry) for entry in before), *samples]}
    if samples:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, "w") as stream:
            json.dump(list(map(asdict, by_place.values())), stream, default=np.ndarray.tolist)
    [result] = done.task_results
    entries = {(split, entry["hf_subset"]): entry for split, each in result.scores.items() for entry in each}
    for place, entry in entries.items():
        if metric == "v_measure" and "v_measures" in entry:
            levels = entry["v_measures"]
            values = [value for level in levels.values() for value in level] if isinstance(levels, dict) else levels
            by_place[place] = Sample(*place, "clustering", "mean", values)
    whole = all(place in by_place and len(by_place[place].values) > 1 for place in entries)
    paper = PAPER_METRICS.get(task.metadata.type)
    if paper is not None and any(paper not in entry for entry in entries.values()):
        paper = None
    return TaskScore(
        value=float(result.get_score()),
        paper=None if paper is None else float(result.get_score(getter=lambda entry: entry[paper])),
        # None at all, if one part of the score cannot be resampled.
        samples=[by_place[place] for place in entries] if whole else [],
        result=result,
    )


def mteb_estimates(
    scores: TaskScores, *, controls: Collection[str] = (), resamples: int = 1000, seed: int = 0
) -> dict[str, Estimate]:
    """Each variant's main score on a task with its 95% interval, and whether it is tied with the best.

    What is resampled depends on what mteb tells: the pairs of STS and of pair classification, the test texts of
    classification by accuracy (with the training draws as they are), the queries of retrieval and reranking; and the
    clusterings, of which mteb makes a few: such an interval says how sure their mean is, and nothing of other texts.
    The value itself is mteb's. Where a variant has nothing to resample, no variant has an interval, and none but the
    best is tied.

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


# A comparison


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
        tasks: As for :func:`resolve_tasks`.
        model: The model's name in mteb's results.
        output: As for :func:`run_tasks`.
        random: As for :func:`st_reba.compare.compare`.

    Returns:
        The comparison; where there are several tasks their mean comes first. Tasks whose data cannot be loaded are
        among ``skipped``.

    Raises:
        ValueError: If a task is unknown, or none could be run.
    """
    resolved = resolve_tasks(tasks)
    every: list[Recipe] = []
    skipped: list[tuple[str, str]] = []
    lengths: list[int] = []
    embedded: list[str] = []
    found: list[TaskScores] = []

    def score(own: Recipes) -> list[Scores]:
        def embed(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            if own is recipes:
                lengths.extend(own.lengths(texts))
                embedded.extend(texts)
            return own.embed(texts, prompt)

        names = {each.task.name for each in found}
        scored = run_tasks(
            [task for task in resolved if own is recipes or task.metadata.name in names],
            own.keys,
            embed,
            model=model,
            revision=own.revisions(),
            output=output,
            batch_size=own.batch_size,
            on_step=lambda what: own.on_progress(what, 0),
            on_skip=lambda task, reason: skipped.append((task, reason)),
        )
        every.extend(own.all)
        if own is recipes:
            found[:] = scored
        if not found:
            raise ValueError(f"No task could be run. {' '.join(reason for _, reason in skipped)}")
        # A task whose data do not load once more has no controls on random weights.
        more = {each.task.name: each.scores for each in scored}
        return _columns(every, [replace(each, scores=each.scores | more.get(each.task.name, {})) for each in found])

    # Where all results were known from an earlier run, nothing was embedded.
    return replace(concluded(recipes, score, embedded, random=random, skipped=skipped), lengths=lengths)


def _columns(every: Sequence[Recipe], found: Sequence[TaskScores]) -> list[Scores]:
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
        columns.insert(0, estimated(mean, bootstrap.mean(values), every))
    for scores in found:
        paper = {key: score.paper for key, score in scores.scores.items() if score.paper is not None}
        if scores.paper_metric != scores.metric and paper:
            note = "The metric of the ReBA paper for this type of task."
            column = Measure(f"{scores.task.name}, {scores.paper_metric}", f"{scores.paper_metric} x 100", note=note)
            columns.append(Scores(column, {key: Estimate(value, nan, nan) for key, value in paper.items()}))
    return columns
