"""Word sense, as the ReBA paper tests it (sections 4.1.2 and A.4)."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator

from ..words import encode_words

logger = logging.getLogger(__name__)

_HEADER = ("问题", "选项1", "选项2", "选项3", "选项4", "答案")
_LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """Four sentences that use one word, three of them in the same sense.

    Attributes:
        word: The word, as it stands in each sentence.
        sentences: The four sentences.
        answer: Index of the odd one, 0 to 3.
    """

    word: str
    sentences: tuple[str, str, str, str]
    answer: int

    def __post_init__(self) -> None:
        if len(self.sentences) != 4 or not 0 <= self.answer < 4:
            raise ValueError(f"A question has four sentences and an answer from 0 to 3, but {self!r} was given.")
        for sentence in self.sentences:
            if not self.word or self.word not in sentence:
                raise ValueError(f"The word {self.word!r} does not occur in {sentence!r}.")


class OddOneOutEvaluator(BaseEvaluator):
    """Accuracy in finding the sentence that uses a word in another sense than three others do.

    The answer is the sentence whose word embedding has the largest summed distance to the other three, Euclidean or
    cosine (1 - cosine similarity). Chance is 0.25.

    Args:
        questions: What is asked.
        name: Prefix of the metrics.
        batch_size: Sentences at a time.
        show_progress_bar: As in ``model.encode``.

    Raises:
        ValueError: If there is no question.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__()
        if not questions:
            raise ValueError("OddOneOutEvaluator needs at least one question.")
        self.questions = list(questions)
        self.name = name
        self.batch_size = batch_size
        self.show_progress_bar = show_progress_bar
        self.primary_metric = f"{name}_euclidean_accuracy" if name else "euclidean_accuracy"

    @classmethod
    def from_csv(cls, path: str | Path, **kwargs: object) -> OddOneOutEvaluator:
        """Read questions in the format of the paper's authors.

        The header is 问题,选项1,...,选项4,答案; the word stands in “ ” in the question.

        Args:
            path: A UTF-8 CSV file. The answer is 1 to 4, or A to D.
            **kwargs: For the constructor.

        Raises:
            ValueError: If the file is malformed; the message names the line.
        """
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [column for column in _HEADER if column not in (reader.fieldnames or ())]:
                raise ValueError(f"{path}: the header lacks {missing}; it must have {list(_HEADER)}.")
            questions = []
            for row in reader:
                try:
                    questions.append(_question(row))
                except ValueError as error:
                    raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
        return cls(questions, **kwargs)  # type: ignore[arg-type]

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        sentences = [sentence for question in self.questions for sentence in question.sentences]
        words = [question.word for question in self.questions for _ in question.sentences]
        vectors = encode_words(
            model, sentences, words, batch_size=self.batch_size, show_progress_bar=self.show_progress_bar
        ).reshape(len(self.questions), 4, -1)
        answers = np.array([question.answer for question in self.questions])
        metrics = {
            "euclidean_accuracy": float((odd_one(vectors) == answers).mean()),
            "cosine_accuracy": float((odd_one(_unit(vectors), squared=True) == answers).mean()),
        }
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("Odd one out on %d questions: %s", len(self.questions), metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


def odd_one(vectors: np.ndarray, squared: bool = False) -> np.ndarray:
    """Index of the vector with the largest summed distance to the others, for each row of (Q, 4, D).

    ``squared`` sums squared distances: between unit vectors, twice the cosine distance.
    """
    distances = ((vectors[:, :, None] - vectors[:, None, :]) ** 2).sum(axis=-1)
    if not squared:
        distances = np.sqrt(distances)
    return distances.sum(axis=-1).argmax(axis=-1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


def _question(row: dict[str, str | None]) -> Question:
    asked, *sentences, answer = (row[column] or "" for column in _HEADER)
    quoted = re.search("“(.+?)”", asked)
    if quoted is None:
        raise ValueError(f"the question {asked!r} has no word in “ ”.")
    answer = answer.strip().upper()
    if answer in _LETTERS and answer:
        index = _LETTERS.index(answer)
    elif answer in ("1", "2", "3", "4"):
        index = int(answer) - 1
    else:
        raise ValueError(f"the answer {answer!r} is neither 1 to 4 nor A to D.")
    first, second, third, fourth = sentences
    return Question(quoted.group(1), (first, second, third, fourth), index)
