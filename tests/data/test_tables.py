from __future__ import annotations

import re

import pytest

from st_reba.data.demo import DEMO_PAIRS, DEMO_QUESTIONS, demo_pairs, demo_questions, demo_sentences
from st_reba.data.tables import Pairs, read_data, read_pairs, read_texts
from st_reba.evaluation import OddOneOutEvaluator


def is_chinese(text):
    return any("\u4e00" <= character <= "\u9fff" for character in text)


@pytest.fixture(params=["en", "zh"])
def language(request):
    return request.param


class TestDemoTexts:
    def test_pairs_are_in_one_language_and_no_text_stands_twice(self, language):
        pairs = read_pairs(demo_pairs(language))
        texts = pairs.texts()
        assert len(pairs) == 200
        assert len(texts) == 400
        assert all(is_chinese(text) == (language == "zh") for text in texts)
        assert all(text == text.strip() and text[-1] in ".?。？" for text in texts)

    def test_pairs_are_spread_over_the_whole_scale(self, language):
        scores = read_pairs(demo_pairs(language)).scores
        assert set(scores) == {half / 2 for half in range(11)}
        shares = [sum(low < score <= low + 1 for score in scores) / len(scores) for low in range(5)]
        assert all(0.15 <= share <= 0.2 for share in shares)
        # Also in a few of them.
        assert all(len(set(map(round, scores[start : start + 40]))) == 6 for start in range(0, 200, 40))

    def test_sentences_are_ordinary_ones(self, language):
        sizes = [
            len(text) if language == "zh" else len(text.split()) for text in read_pairs(demo_pairs(language)).texts()
        ]
        assert min(sizes) >= 5
        assert max(sizes) <= (25 if language == "zh" else 15)

    def test_words_do_not_give_the_scores_away(self, language):
        """Some pairs of few words in common mean the same, and some of most words in common do not."""
        pairs = read_pairs(demo_pairs(language))
        overlaps = [overlap(*both, language) for both in zip(pairs.first, pairs.second, strict=True)]
        alike = [overlap for overlap, score in zip(overlaps, pairs.scores, strict=True) if score >= 4.5]
        unlike = [overlap for overlap, score in zip(overlaps, pairs.scores, strict=True) if score <= 2.5]
        assert sum(overlap < 0.4 for overlap in alike) >= 10
        assert sum(overlap > 0.5 for overlap in unlike) >= 10

    def test_questions(self, language):
        questions = OddOneOutEvaluator.from_csv(demo_questions(language)).questions
        assert len(questions) == (40 if language == "en" else 20)
        assert all(is_chinese(question.word) == (language == "zh") for question in questions)
        answers = [question.answer for question in questions]
        assert [answers.count(answer) for answer in range(4)] == [len(questions) // 4] * 4
        sentences = [sentence for question in questions for sentence in question.sentences]
        assert len(set(sentences)) == len(sentences)
        assert len({question.word for question in questions}) == len(questions)

    def test_a_word_of_an_english_question_stands_once_in_each_sentence(self):
        for question in OddOneOutEvaluator.from_csv(demo_questions("en")).questions:
            for sentence in question.sentences:
                assert re.findall(rf"\w*{question.word}\w*", sentence.lower()) == [question.word]

    def test_english_is_what_stands_for_them(self):
        assert (demo_pairs("en"), demo_questions("en")) == (DEMO_PAIRS, DEMO_QUESTIONS)
        assert demo_sentences() == [*demo_sentences("en"), *demo_sentences("zh")]
        assert (len(demo_sentences("en")), len(demo_sentences("zh"))) == (160, 80)


def overlap(first: str, second: str, language: str) -> float:
    """Words, or characters, that two texts share, as a part of all that they have."""
    one, other = (
        set(text) if language == "zh" else set(re.findall(r"[\w']+", text.lower())) for text in (first, second)
    )
    return len(one & other) / len(one | other)


def test_reading(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeff一\t二\t5\r\n\r\nthree\tfour\t1.5\n".encode())
    pairs = read_pairs(path)
    assert (pairs.first, pairs.second, pairs.scores) == (["一", "three"], ["二", "four"], [5.0, 1.5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a\tb\t1\na\tb\n",
            r"pairs\.tsv, line 2: 2 columns where 3 are expected\. A row is sentence1,",
        ),
        (b"a\tb\t1\tx\n", "line 1: 4 columns where 3 are expected"),
        (b"a\tb\t1\nc\t \t2\n", "line 2: sentence2: an empty text"),
        (b"first\tsecond\tscore\n", "line 1: score: 'score' is not a number.*If this line names the columns, say"),
        (b"a\tb\tnan\n", "line 1: score: 'nan' is not a number"),
        (b"a\tb\t1\n\nc\t\xff\t2\n", "line 3: not UTF-8"),
        (b"a\tb\t1\nc\td\t1\n", "2 pairs with 1 different scores leave nothing to rank"),
        (b"", "holds no rows"),
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
        (
            b"a\nb\tc\nd\n",
            r"texts\.txt, line 2: has a tab, but line 1 has none\. Plain texts stand one a line",
        ),
        (b"a\n\nb\nc \xff\n", r"texts\.txt, line 4: not UTF-8"),
        (b"a\na\nb\n", r"texts\.txt: 2 different texts; at least 3 are needed"),
        (b"", "texts.txt holds no rows. A row is text."),
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
        ("\na\nb\nc\td\t1\n", "data, line 4: has a tab, but line 2 has none. Plain texts stand one a line, without"),
        ("a\tb\t1\nc\n", "data, line 2: 1 columns where 3 are expected"),
        (
            "a\tnews\nb\tsport\n",
            "data, line 1: 2 columns, and no header that names them. Rows are sentence1",
        ),
        ("", "data holds no rows. A row is sentence1"),
    ],
)
def test_neither_pairs_nor_texts(content, message, tmp_path):
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_data(path)


@pytest.mark.parametrize("read", [read_data, read_pairs, read_texts])
def test_a_directory(read, tmp_path):
    with pytest.raises(ValueError, match=r"is a directory without a table in it \(nothing\): give a file"):
        read(tmp_path)
