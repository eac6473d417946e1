from __future__ import annotations

import numpy as np
import pytest

from st_reba import ReBAModule
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.evaluation.odd_one_out import odd_one
from st_reba.words import encode_words

from ..conftest import pipeline

HEADER = "问题,选项1,选项2,选项3,选项4,答案\n"
ROW = "以下哪句话中“打”的意思(或用法)与其他句子不同。,他打球,他打人,她打我,买一打笔,{}\n"


def write(tmp_path, text):
    path = tmp_path / "questions.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("answer", ["D", "d", "4", " 4 "])
def test_reads_the_authors_format(answer, tmp_path):
    questions = OddOneOutEvaluator.from_csv(write(tmp_path, HEADER + ROW.format(answer))).questions
    assert questions == [Question("打", ("他打球", "他打人", "她打我", "买一打笔"), 3)]


def test_other_columns_do_not_matter(tmp_path):
    path = write(tmp_path, "," + HEADER + "0," + ROW.format("A"))
    assert OddOneOutEvaluator.from_csv(path).questions[0].answer == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("问题,选项1\n", r"questions\.csv: the header lacks \['选项2', '选项3', '选项4', '答案'\]"),
        (HEADER + ROW.format("E"), r"questions\.csv, line 2: the answer 'E' is neither 1 to 4 nor A to D"),
        (HEADER + ROW.format(""), "line 2: the answer '' is neither"),
        (
            HEADER + ROW.format("A") + "no word here,a,b,c,d,A\n",
            "line 3: the question 'no word here' has no word in “ ”",
        ),
        (HEADER + "“打”,打,打,他,打,A\n", "line 2: The word '打' does not occur in '他'"),
        (HEADER, "needs at least one question"),
    ],
)
def test_malformed_files(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OddOneOutEvaluator.from_csv(write(tmp_path, text))


def naive_odd_one(vectors, distance):
    return [max(range(4), key=lambda i: sum(distance(four[i], four[j]) for j in range(4))) for four in vectors]


def test_the_answer_is_the_farthest():
    vectors = np.random.default_rng(0).normal(size=(50, 4, 6))
    expected = naive_odd_one(vectors, lambda a, b: np.linalg.norm(a - b))
    assert odd_one(vectors).tolist() == expected
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    assert odd_one(unit, squared=True).tolist() == naive_odd_one(
        vectors, lambda a, b: 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    )


def test_accuracy(backbone_path):
    sentences = [("a cat ran", "the cat sat", "my cat eats", "cat is a word"), ("a cat", "1 cat", "cat", "no cat")]
    model = pipeline(ReBAModule(backbone_path()))
    found = []
    for four in sentences:
        vectors = encode_words(model, four, ["cat"] * 4)
        found.append(naive_odd_one([vectors], lambda a, b: np.linalg.norm(a - b))[0])
    questions = [Question("cat", four, answer) for four, answer in zip(sentences, found, strict=True)]
    evaluator = OddOneOutEvaluator(questions, name="tiny")
    metrics = evaluator(model)
    assert set(metrics) == {"tiny_euclidean_accuracy", "tiny_cosine_accuracy"}
    assert metrics[evaluator.primary_metric] == 1.0
    wrong = [Question(question.word, question.sentences, (question.answer + 1) % 4) for question in questions[:1]]
    assert OddOneOutEvaluator([*wrong, questions[1]])(model)["euclidean_accuracy"] == 0.5
