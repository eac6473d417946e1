from __future__ import annotations

import pytest

from st_reba.data import DEMO_PAIRS, DEMO_QUESTIONS, read_pairs
from st_reba.evaluation import OddOneOutEvaluator


def is_chinese(text):
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def test_demo_pairs():
    pairs = read_pairs(DEMO_PAIRS)
    assert len(pairs) >= 120
    assert len(pairs.texts()) == 2 * len(pairs)
    assert min(pairs.scores) >= 0
    assert max(pairs.scores) <= 5
    assert len(set(map(round, pairs.scores))) == 6
    chinese = sum(is_chinese(text) for text in pairs.first)
    assert chinese == len(pairs) - chinese


def test_demo_questions():
    questions = OddOneOutEvaluator.from_csv(DEMO_QUESTIONS).questions
    assert len(questions) == 40
    assert sum(is_chinese(question.word) for question in questions) == 20
    answers = [question.answer for question in questions]
    assert [answers.count(answer) for answer in range(4)] == [10] * 4


def test_reading(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeff一\t二\t5\r\n\r\nthree\tfour\t1.5\n".encode())
    pairs = read_pairs(path)
    assert (pairs.first, pairs.second, pairs.scores) == (["一", "three"], ["二", "four"], [5.0, 1.5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\t1\na\tb\n", r"pairs\.tsv, line 2: 2 fields, but a line is two texts and a score, separated by tabs"),
        (b"a\tb\t1\tx\n", "line 1: 4 fields"),
        (b"a\tb\t1\nc\t \t2\n", "line 2: an empty text"),
        (b"first\tsecond\tscore\n", "line 1: the score 'score' is not a number. A header line must be removed"),
        (b"a\tb\tnan\n", "line 1: the score 'nan' is not a number"),
        (b"a\tb\t1\n\nc\t\xff\t2\n", "line 3: not UTF-8"),
        (b"a\tb\t1\nc\td\t1\n", "2 pairs with 1 different scores leave nothing to rank"),
        (b"", "0 pairs"),
    ],
)
def test_malformed_files(content, message, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_pairs(path)
