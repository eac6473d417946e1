"""Evaluators of word senses, as in the ReBA paper (sections 4.1.2 and A.4), and of pairs of texts.

Each notes its metrics for the model card, and appends them to a CSV file that grows during training.
"""

from __future__ import annotations

import csv
import logging
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.util import pairwise_cos_sim

from ..data.columns import NAMED, Column, Schema, any_text, read_table
from ..files import atomic_file
from ..reading.words import encode_words
from ..settings import check_choice
from ..text.presets import in_context
from .bootstrap import pearson, spearman

logger = logging.getLogger(__name__)

_HEADER = ("问题", "选项1", "选项2", "选项3", "选项4", "答案")
_QUESTIONS = Schema("questions", tuple(Column(name, "", any_text) for name in _HEADER), NAMED, headed=True)
_CHOICES = {name: index for names in ("1234", "ABCD") for index, name in enumerate(names)}


class Evaluator(BaseEvaluator):
    """Evaluator of sentence-transformers that appends its metrics to ``<file>[_<name>]_results.csv``.

    Args:
        name: Prefix of the metrics.
        batch_size: Number of texts at a time.
        write_csv: Whether to write the file if an evaluation has an ``output_path``.
    """

    #: Primary metric, without the prefix; empty if it depends on the model.
    metric: str = ""
    #: Beginning of the file's name.
    file: ClassVar[str]

    def __init__(self, *, name: str = "", batch_size: int = 32, write_csv: bool = True) -> None:
        super().__init__()
        self.name, self.batch_size, self.write_csv = name, batch_size, write_csv
        if self.metric:
            self.primary_metric = f"{name}_{self.metric}" if name else self.metric

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics with their prefix; log them, and note them for the model card.

        Args:
            model: Model to evaluate.
            output_path: Directory of the file; it is made if there is none.
            epoch: As for sentence-transformers.
            steps: As for sentence-transformers.
        """
        metrics = self.metrics_of(model)
        if output_path is not None and self.write_csv:
            path = Path(output_path) / ("_".join(filter(None, [self.file, self.name, "results"])) + ".csv")
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes().decode() if path.exists() else ""
            with atomic_file(path, "w") as file:
                file.write(before)
                header = [] if before else [["epoch", "steps", *metrics]]
                csv.writer(file).writerows([*header, [epoch, steps, *metrics.values()]])
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("%s: %s", type(self).__name__, metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    @abstractmethod
    def metrics_of(self, model: Any) -> dict[str, float]:
        """Return the metrics without their prefix."""


class MissingWordError(ValueError):
    """Error for a question with a sentence that lacks the word."""


@dataclass(frozen=True)
class Question:
    """Four sentences that use one word, three of them in the same sense.

    Attributes:
        word: The word, as it occurs in each sentence.
        sentences: The four sentences.
        answer: Index of the odd one, 0 to 3.

    Raises:
        MissingWordError: If a sentence lacks the word.
        ValueError: If there are not four sentences, or the answer is not 0 to 3.
    """

    word: str
    sentences: tuple[str, str, str, str]
    answer: int

    def __post_init__(self) -> None:
        if len(self.sentences) != 4 or not 0 <= self.answer < 4:
            raise ValueError(f"A question has four sentences and an answer from 0 to 3, but {self!r} was given.")
        for sentence in self.sentences:
            if not self.word or self.word not in sentence:
                raise MissingWordError(f"The word {self.word!r} does not occur in {sentence!r}.")


class OddOneOutEvaluator(Evaluator):
    """Accuracy in finding the sentence that uses a word in another sense than three others do.

    The answer is the sentence whose word embedding has the largest summed distance to the other three, Euclidean or
    cosine (1 - cosine similarity). If m sentences are equally far, as all four are for a model without context, the
    question counts 1 / m if the answer is among them. Chance is 0.25 for any answers.

    The metrics are ``euclidean_accuracy``, the primary one, and ``cosine_accuracy``.

    Args:
        questions: The questions.
        **settings: As for :class:`Evaluator`: ``name``, ``batch_size``, ``write_csv``.

    Raises:
        ValueError: If there is no question.
    """

    metric = "euclidean_accuracy"
    file = "odd_one_out"

    def __init__(self, questions: Sequence[Question], **settings: Any) -> None:
        super().__init__(**settings)
        if not questions:
            raise ValueError("OddOneOutEvaluator needs at least one question.")
        self.questions = list(questions)

    @classmethod
    def from_csv(
        cls, path: str | Path, *, on_missing_word: Literal["error", "skip"] = "error", **kwargs: Any
    ) -> OddOneOutEvaluator:
        """Read questions in the format of the paper's authors.

        The header is 问题,选项1,...,选项4,答案; the word is in “ ” in the question.

        In the authors' WSD_v1.csv, four of 862 questions have a sentence that lacks the word: it has another word
        (精选 instead of 精简), and is the right answer in all four. The authors' code takes the first token of that
        sentence for the word, which gives the answer away.

        Args:
            path: A table, such as a CSV file: see :func:`st_reba.data.columns.read_table`. The answer is 1 to 4, or A
                to D.
            on_missing_word: ``"error"``, or ``"skip"`` to leave out questions with a sentence that lacks the word,
                with one warning.
            **kwargs: Arguments of the constructor.

        Raises:
            ValueError: If the file is malformed or not UTF-8, or a word is missing; the message names the line and the
                question.
        """
        check_choice("on_missing_word", on_missing_word, "error", "skip")
        table, questions, skipped = read_table(path, [_QUESTIONS]), list[Question](), list[str]()
        for number, cells in enumerate(zip(*table.values.values(), strict=True), start=1):
            where = f"line {table.places[number - 1][1]} (question {number})"
            try:
                questions.append(_question(*cells))
            except MissingWordError as error:
                if on_missing_word == "error":
                    raise MissingWordError(
                        f'{path}, {where}: {error} Correct the question, or leave such out: on_missing_word="skip".'
                    ) from None
                skipped.append(where)
            except ValueError as error:
                raise ValueError(f"{path}, {where}: {error}") from None
        if skipped:
            warnings.warn(
                f"{path}: {len(skipped)} of {len(skipped) + len(questions)} questions are left out, because a sentence "
                f"lacks the word: {'; '.join(skipped)}.",
                stacklevel=2,
            )
        if not questions:
            raise ValueError(f"{path}: no question is left to ask.")
        return cls(questions, **kwargs)

    def metrics_of(self, model: Any) -> dict[str, float]:
        vectors = encode_words(model, *self.inputs(), batch_size=self.batch_size)
        return self.score(vectors.reshape(len(self.questions), 4, -1))

    def inputs(self) -> tuple[list[str], list[str]]:
        """Return the 4 Q sentences, question by question, and the word of each."""
        sentences = [sentence for question in self.questions for sentence in question.sentences]
        return sentences, [question.word for question in self.questions for _ in question.sentences]

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        """Return the accuracies of word embeddings, (Q, 4, D), of :meth:`inputs` in their order."""
        return {metric: float(correct.mean()) for metric, correct in self.correct(vectors).items()}

    def correct(self, vectors: np.ndarray) -> dict[str, np.ndarray]:
        """Return whether word embeddings answer each question correctly.

        Args:
            vectors: (Q, 4, D), the word embeddings of :meth:`inputs` in their order.

        Returns:
            For each metric (Q,): 1 or 0, or 1 / m if the answer is one of m sentences that are equally far.

        Raises:
            ValueError: If the embeddings are not finite.
        """
        vectors = np.asarray(vectors, dtype=np.float64)
        if not np.isfinite(vectors).all():
            raise ValueError(
                "Some word embeddings are not finite. Half precision may have overflowed: use float32 or bfloat16."
            )
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        unit = vectors / np.where(norms == 0, 1, norms)
        answers = np.array([question.answer for question in self.questions])
        return {
            "euclidean_accuracy": _credit(summed_distances(vectors), answers),
            "cosine_accuracy": _credit(summed_distances(unit, squared=True), answers),
        }


def summed_distances(vectors: np.ndarray, squared: bool = False) -> np.ndarray:
    """Return the summed distance of each vector to the others of its question, (Q, 4), for (Q, 4, D).

    ``squared`` sums squared distances: between unit vectors, twice the cosine distance.
    """
    squares = ((vectors[:, :, None] - vectors[:, None]) ** 2).sum(axis=-1)
    return np.asarray((squares if squared else np.sqrt(squares)).sum(axis=1))


def _credit(distances: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return 1 for each question whose answer is the farthest sentence, (Q,), shared among equals.

    Distances that differ by rounding alone are equal: sums in another order would choose another sentence.
    """
    farthest = np.isclose(distances, distances.max(axis=1, keepdims=True), rtol=1e-9, atol=1e-12)
    return farthest[np.arange(len(answers)), answers] / farthest.sum(axis=1)


def _question(asked: str, first: str, second: str, third: str, fourth: str, answer: str) -> Question:
    quoted = re.search("“(.+?)”", asked)
    if quoted is None:
        raise ValueError(f"the question {asked!r} has no word in “ ”.")
    index = _CHOICES.get(answer.strip().upper())
    if index is None:
        raise ValueError(f"the answer {answer!r} is neither 1 to 4 nor A to D.")
    return Question(quoted.group(1), (first, second, third, fourth), index)


class PairScoreEvaluator(Evaluator):
    """Correlation of labels with the similarities that a model's last module computes, and with cosines.

    For models that end in :class:`st_reba.modules.LayerwiseAutoencoder`: ``encode`` and then ``score_pairs``. The
    metrics are ``pearson_score``, the primary one, ``spearman_score``, ``pearson_cosine`` and ``spearman_cosine``.

    Args:
        first: N texts.
        second: N texts, the other of each pair.
        labels: N similarities, on any scale.
        **settings: As for :class:`Evaluator`: ``name``, ``batch_size``, ``write_csv``.

    Raises:
        ValueError: If the three are not equally long, or all labels are equal.
    """

    metric = "pearson_score"
    file = "pair_scores"

    def __init__(self, first: Sequence[str], second: Sequence[str], labels: Sequence[float], **settings: Any) -> None:
        super().__init__(**settings)
        _check_pairs(labels, first=first, second=second, labels=labels)
        self.first, self.second, self.labels = list(first), list(second), np.asarray(labels, dtype=np.float64)

    def metrics_of(self, model: Any) -> dict[str, float]:
        similarities = self.similarities(model)
        return {
            f"{name}_{kind}": float(statistic({"": values}, self.labels).scores[0])
            for name, statistic in (("pearson", pearson), ("spearman", spearman))
            for kind, values in similarities.items()
        }

    def similarities(self, model: Any) -> dict[str, np.ndarray]:
        """Return the ``score`` that the model computes for each pair, and the ``cosine`` of its embeddings.

        Raises:
            ValueError: If the model's last module scores no pairs.
        """
        if not hasattr(model[-1], "score_pairs"):
            raise ValueError(
                f"The model ends in {type(model[-1]).__name__}, which scores no pairs. Use a model that ends in "
                "LayerwiseAutoencoder, or ST's EmbeddingSimilarityEvaluator."
            )
        first, second = (
            model.encode(texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
            for texts in (self.first, self.second)
        )
        cosines = pairwise_cos_sim(first, second).float().cpu().numpy()
        return {"score": model[-1].score_pairs(first, second).numpy(), "cosine": cosines}


class ConditionalSimilarityEvaluator(EmbeddingSimilarityEvaluator):
    """Correlation of people's scores with the cosine similarity of two sentences, each read under a condition.

    The condition is in a prompt of each sentence's own (:func:`st_reba.in_context`): the model's module should have the
    template ``csts``. The metrics are ``spearman_cosine``, the primary one and the paper's, and ``pearson_cosine``.

    Args:
        sentences1: n sentences.
        sentences2: n sentences, the other of each pair.
        conditions: n conditions, such as "the number of people".
        scores: n similarities under the condition, 1 to 5 in C-STS.
        **kwargs: As for ST's ``EmbeddingSimilarityEvaluator``.

    Raises:
        ValueError: If the four are not equally long, or all scores are equal.
    """

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        conditions: Sequence[str],
        scores: Sequence[float],
        **kwargs: Any,
    ) -> None:
        _check_pairs(scores, sentences1=sentences1, sentences2=sentences2, conditions=conditions, scores=scores)
        kwargs.setdefault("main_similarity", "cosine")
        first: list[Any] = list(map(in_context, sentences1, conditions))
        second: list[Any] = list(map(in_context, sentences2, conditions))
        super().__init__(first, second, list(scores), **kwargs)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], **kwargs: Any) -> ConditionalSimilarityEvaluator:
        """Return the evaluator of rows, as :func:`st_reba.train.read_conditional_pairs` returns them."""
        table = list(rows)
        names = ("sentence1", "sentence2", "condition", "score")
        return cls(*([row[name] for row in table] for name in names), **kwargs)


def _check_pairs(labels: Sequence[float], /, **columns: Sequence[Any]) -> None:
    """Raise if the columns of some pairs are not equally long, or all labels are equal."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"These numbers of items were given: {lengths}. Give one of each for every pair.")
    if len(set(labels)) < 2:
        raise ValueError(f"{len(labels)} pairs with {len(set(labels))} different labels leave nothing to rank.")
