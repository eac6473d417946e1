from __future__ import annotations

import pytest

from st_reba.data import DEMO_PAIRS, DEMO_QUESTIONS, Pairs, read_data, read_pairs, read_texts
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


def test_reading_plain_texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeff一个句子。\r\n\r\n  two words \n \nthree\nthree".encode())
    assert read_texts(path) == ["一个句子。", "two words", "three", "three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\tc\nd\n", r"texts\.txt, line 2: has a tab\. Plain texts stand one a line, without tabs"),
        (b"a\n\nb\nc \xff\n", r"texts\.txt, line 4: not UTF-8"),
        (b"a\na\nb\n", r"texts\.txt: 2 different texts, one a line; at least 3 are needed"),
        (b"", "0 different texts"),
        ("a\nb\nc\n".encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_malformed_texts(content, message, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_texts(path)


def test_pairs_or_texts(tmp_path):
    path = tmp_path / "data"
    path.write_text("\na\tb\t1\nc\td\t2\n")
    assert read_data(path) == read_pairs(path) == Pairs(["a", "c"], ["b", "d"], [1.0, 2.0])
    path.write_text("\na\nb\nc, d\n")
    assert read_data(path) == read_texts(path) == ["a", "b", "c, d"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n\nb\nc\td\t1\n", "data, line 4: has tabs, but line 1 has none. Give plain texts, one a line and without"),
        ("a\tb\t1\nc\n", "data, line 2: 1 fields, but a line is two texts and a score, separated by tabs"),
        ("a\tnews\nb\tsport\n", "data, line 1: 2 fields"),
        ("", "data: 0 different texts"),
    ],
)
def test_neither_pairs_nor_texts(content, message, tmp_path):
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_data(path)


@pytest.mark.parametrize("read", [read_data, read_pairs, read_texts])
def test_a_directory(read, tmp_path):
    with pytest.raises(ValueError, match="is a directory: give a file"):
        read(tmp_path)
