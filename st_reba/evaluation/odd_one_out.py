"""Word sense, as the ReBA paper tests it (sections 4.1.2 and A.4)."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sentence_transformers.base import BaseModel

from ..reading.words import encode_words
from .evaluator import Evaluator

_HEADER = ("问题", "选项1", "选项2", "选项3", "选项4", "答案")
_CHOICES = {name: index for names in ("1234", "ABCD") for index, name in enumerate(names)}


class MissingWordError(ValueError):
    """A sentence of a question lacks its word."""


@dataclass(frozen=True)
class Question:
    """Four sentences that use one word, three of them in the same sense.

    Attributes:
        word: The word, as it stands in each sentence.
        sentences: The four sentences.
        answer: Index of the odd one, 0 to 3.

    Raises:
        MissingWordError: If a sentence lacks the word.
        ValueError: If there are not four sentences, or the answer is none of them.
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
    cosine (1 - cosine similarity). Where m sentences are equally far, as all four are to a model without context, the
    question counts 1 / m if the answer is among them. So chance is 0.25, wherever the answers lie.

    The metrics are ``euclidean_accuracy``, the primary one, and ``cosine_accuracy``.

    Args:
        questions: What is asked.
        center: Take the mean of a question's four embeddings off each before they are compared, and let the Euclidean
            answer be the one farthest from that mean, as in the authors' released code. The paper has no such step.
        name: Prefix of the metrics.
        batch_size: Sentences at a time.
        show_progress_bar: As in ``model.encode``.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.

    Raises:
        ValueError: If there is no question.
    """

    metric = "euclidean_accuracy"
    file = "odd_one_out"

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        center: bool = False,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, write_csv=write_csv)
        if not questions:
            raise ValueError("OddOneOutEvaluator needs at least one question.")
        self.questions = list(questions)
        self.center = center
        self.show_progress_bar = show_progress_bar
        #: What :meth:`from_csv` left out, a sentence for each question that says which and why.
        self.skipped: list[str] = []

    @classmethod
    def from_csv(
        cls, path: str | Path, *, on_missing_word: Literal["error", "skip"] = "error", **kwargs: Any
    ) -> OddOneOutEvaluator:
        """Read questions in the format of the paper's authors.

        The header is 问题,选项1,...,选项4,答案; the word stands in “ ” in the question.

        Of the authors' two files, WSD_v1.csv has four questions in 862 with a sentence that lacks the word: it has
        another word in its place (精选 where 精简 is asked about), and is the right answer in all four. The authors'
        code takes the first token of that sentence for the word, which gives the answer away.

        Args:
            path: A UTF-8 CSV file. The answer is 1 to 4, or A to D.
            on_missing_word: What to do about a question with a sentence that lacks the word. ``"skip"`` leaves it out,
                gives one warning, and notes it in ``skipped``.
            **kwargs: For the constructor.

        Raises:
            ValueError: If the file is malformed or not UTF-8, or a word is missing; the message names the line and the
                question.
        """
        if on_missing_word not in ("error", "skip"):
            raise ValueError(
                f'on_missing_word={on_missing_word!r}: use "error", or "skip" to leave such questions out.'
            )
        questions, skipped = [], []
        for where, row in _rows(path):
            try:
                questions.append(_question(row))
            except MissingWordError as error:
                if on_missing_word == "error":
                    raise MissingWordError(
                        f'{path}, {where}: {error} Correct the question, or leave such out: on_missing_word="skip".'
                    ) from None
                skipped.append((where, str(error)))
            except ValueError as error:
                raise ValueError(f"{path}, {where}: {error}") from None
        if skipped:
            warnings.warn(
                f"{path}: {len(skipped)} of {len(skipped) + len(questions)} questions are left out, because a sentence "
                f"lacks the word: {'; '.join(where for where, _ in skipped)}.",
                stacklevel=2,
            )
        if not questions:
            raise ValueError(f"{path}: no question is left to ask.")
        evaluator = cls(questions, **kwargs)
        evaluator.skipped = [f"{where}: {reason}" for where, reason in skipped]
        return evaluator

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model.

        Args:
            model: See :func:`st_reba.encode_words`.
            output_path: Where to append to ``odd_one_out[_<name>]_results.csv``.
            epoch: As in ST.
            steps: As in ST.
        """
        sentences, words = self.inputs()
        vectors = encode_words(
            model, sentences, words, batch_size=self.batch_size, show_progress_bar=self.show_progress_bar
        )
        metrics = self.score(vectors.reshape(len(self.questions), 4, -1))
        return self.noted(model, metrics, output_path, epoch, steps)

    def inputs(self) -> tuple[list[str], list[str]]:
        """The 4 Q sentences, question by question, and the word of each."""
        sentences = [sentence for question in self.questions for sentence in question.sentences]
        words = [question.word for question in self.questions for _ in question.sentences]
        return sentences, words

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        """The accuracies that given word embeddings have: (Q, 4, D), of :meth:`inputs` in their order."""
        return {metric: float(correct.mean()) for metric, correct in self.correct(vectors).items()}

    def correct(self, vectors: np.ndarray) -> dict[str, np.ndarray]:
        """How far each question is answered right by given word embeddings: what bootstraps and error analyses need.

        Args:
            vectors: (Q, 4, D), the word embeddings of :meth:`inputs` in their order.

        Returns:
            For each metric (Q,): 1 or 0, or 1 / m where the answer is one of m sentences that are equally far.

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
        answers = np.array([question.answer for question in self.questions])
        if self.center:
            vectors = vectors - vectors.mean(axis=1, keepdims=True)
        euclidean = np.linalg.norm(vectors, axis=-1) if self.center else summed_distances(vectors)
        return {
            "euclidean_accuracy": _credit(euclidean, answers),
            "cosine_accuracy": _credit(summed_distances(_unit(vectors), squared=True), answers),
        }

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {"center": True} if self.center else {}


def summed_distances(vectors: np.ndarray, squared: bool = False) -> np.ndarray:
    """(Q, 4): the summed distance of each vector to the others of its question, for (Q, 4, D).

    ``squared`` sums squared distances: between unit vectors, twice the cosine distance.
    """
    sums = np.zeros(vectors.shape[:2], dtype=vectors.dtype)
    for first, second in combinations(range(vectors.shape[1]), 2):
        distances = ((vectors[:, first] - vectors[:, second]) ** 2).sum(axis=-1)
        if not squared:
            distances = np.sqrt(distances)
        sums[:, first] += distances
        sums[:, second] += distances
    return sums


def _credit(distances: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """(Q,): 1 where the answer is the farthest, shared among equals.

    What differs by rounding alone is equal: sums in another order would choose another.
    """
    farthest = np.isclose(distances, distances.max(axis=1, keepdims=True), rtol=1e-9, atol=1e-12)
    return farthest[np.arange(len(answers)), answers] / farthest.sum(axis=1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


def _rows(path: str | Path) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Each row of a file and what to call it."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
    reader = csv.DictReader(StringIO(text, newline=""))
    if missing := [column for column in _HEADER if column not in (reader.fieldnames or ())]:
        raise ValueError(f"{path}: the header lacks {missing}; it must have {list(_HEADER)}.")
    try:
        for number, row in enumerate(reader, start=1):
            yield f"line {reader.line_num} (question {number})", row
    except csv.Error as error:
        raise ValueError(f"{path}, after line {reader.line_num}: {error}. A quotation mark may be missing.") from None


def _question(row: dict[str, str | None]) -> Question:
    asked, *sentences, answer = (row[column] or "" for column in _HEADER)
    quoted = re.search("“(.+?)”", asked)
    if quoted is None:
        raise ValueError(f"the question {asked!r} has no word in “ ”.")
    index = _CHOICES.get(answer.strip().upper())
    if index is None:
        raise ValueError(f"the answer {answer!r} is neither 1 to 4 nor A to D.")
    first, second, third, fourth = sentences
    return Question(quoted.group(1), (first, second, third, fourth), index)
