"""Evaluation of word senses, as in the ReBA paper (sections 4.1.2 and A.4)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..data.columns import NAMED, Column, Schema, any_text, read_table
from ..reading.words import encode_words
from ..settings import check_choice
from .evaluator import Evaluator

_HEADER = ("问题", "选项1", "选项2", "选项3", "选项4", "答案")
_QUESTIONS = Schema("questions", tuple(Column(name, "", any_text) for name in _HEADER), NAMED, headed=True)
_CHOICES = {name: index for names in ("1234", "ABCD") for index, name in enumerate(names)}


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
        center: Whether to subtract the mean of a question's four embeddings from each, and to take the one that is
            farthest from it as the Euclidean answer, as in the authors' released code. The paper has no such step.
        **settings: As for :class:`~st_reba.evaluation.evaluator.Evaluator`: ``name``, ``batch_size``, ``write_csv``.

    Attributes:
        skipped: Sentence for each question that :meth:`from_csv` left out: its line, and the reason.

    Raises:
        ValueError: If there is no question.
    """

    metric = "euclidean_accuracy"
    file = "odd_one_out"

    def __init__(self, questions: Sequence[Question], *, center: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        if not questions:
            raise ValueError("OddOneOutEvaluator needs at least one question.")
        self.questions, self.center = list(questions), center
        self.skipped: list[str] = []

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
                with one warning, and to note them in ``skipped``.
            **kwargs: Arguments of the constructor.

        Raises:
            ValueError: If the file is malformed or not UTF-8, or a word is missing; the message names the line and the
                question.
        """
        check_choice("on_missing_word", on_missing_word, "error", "skip")
        table, questions = read_table(path, [_QUESTIONS]), []
        skipped: dict[str, str] = {}
        for number, cells in enumerate(zip(*table.values.values(), strict=True), start=1):
            where = f"line {table.places[number - 1][1]} (question {number})"
            try:
                questions.append(_question(*cells))
            except MissingWordError as error:
                if on_missing_word == "error":
                    raise MissingWordError(
                        f'{path}, {where}: {error} Correct the question, or leave such out: on_missing_word="skip".'
                    ) from None
                skipped[where] = str(error)
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
        evaluator = cls(questions, **kwargs)
        evaluator.skipped = [f"{where}: {reason}" for where, reason in skipped.items()]
        return evaluator

    def metrics_of(self, model: Any) -> dict[str, float]:
        vectors = encode_words(model, *self.inputs(), batch_size=self.batch_size)
        return self.score(vectors.reshape(len(self.questions), 4, -1))

    def inputs(self) -> tuple[list[str], list[str]]:
        """Return the 4 Q sentences, question by question, and the word of each."""
        sentences = [sentence for question in self.questions for sentence in question.sentences]
        words = [question.word for question in self.questions for _ in question.sentences]
        return sentences, words

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
            ValueError: If the embeddings have another shape, or are not finite.
        """
        vectors = np.asarray(vectors, dtype=np.float64)
        if vectors.ndim != 3 or vectors.shape[:2] != (len(self.questions), 4):
            raise ValueError(f"({len(self.questions)}, 4, D) word embeddings are scored, not {vectors.shape}.")
        if not np.isfinite(vectors).all():
            raise ValueError(
                "Some word embeddings are not finite. Half precision may have overflowed: use float32 or bfloat16."
            )
        if self.center:
            vectors = vectors - vectors.mean(axis=1, keepdims=True)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        unit = vectors / np.where(norms == 0, 1, norms)
        euclidean = np.linalg.norm(vectors, axis=-1) if self.center else summed_distances(vectors)
        answers = np.array([question.answer for question in self.questions])
        return {
            "euclidean_accuracy": _credit(euclidean, answers),
            "cosine_accuracy": _credit(summed_distances(unit, squared=True), answers),
        }

    def get_config_dict(self) -> dict[str, Any]:
        """Return settings for the model card."""
        return {"center": True} if self.center else {}


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
