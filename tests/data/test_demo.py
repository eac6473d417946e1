"""The package's own texts: pairs, questions and a small retrieval set, in two languages."""

from __future__ import annotations

import re

import pytest

from st_reba.data.demo import (
    DEMO_PAIRS,
    DEMO_QUESTIONS,
    demo_pairs,
    demo_questions,
    demo_retrieval,
    demo_sentences,
)
from st_reba.data.tables import read_data, read_pairs
from st_reba.evaluation import OddOneOutEvaluator

#: Words of an English text, characters of a Chinese one.
SENTENCES, DOCUMENTS, QUERIES = (
    {"en": (5, 15), "zh": (5, 25)}, {"en": (20, 90), "zh": (30, 160)}, {"en": (3, 15), "zh": (5, 20)},
)  # fmt: skip


def check_texts(texts, language, lengths):
    low, high = lengths[language]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert low <= (len(text) if language == "zh" else len(text.split())) <= high, text
        assert any("\u4e00" <= character <= "\u9fff" for character in text) == (language == "zh"), text
        assert text == text.strip()


@pytest.fixture(params=["en", "zh"])
def language(request):
    return request.param


def test_pairs(language):
    """200 of them, spread over the whole scale."""
    pairs = read_pairs(demo_pairs(language))
    check_texts(pairs.texts(), language, SENTENCES)
    assert all(text[-1] in ".?。？" for text in pairs.texts())
    assert (len(pairs), len(pairs.texts())) == (200, 400)
    assert set(pairs.scores) == {half / 2 for half in range(11)}
    shares = [sum(low < score <= low + 1 for score in pairs.scores) / 200 for low in range(5)]
    assert all(0.15 <= share <= 0.2 for share in shares)
    # Also in a few of them.
    assert all(len(set(map(round, pairs.scores[start : start + 40]))) == 6 for start in range(0, 200, 40))


def test_questions(language):
    questions = OddOneOutEvaluator.from_csv(demo_questions(language)).questions
    assert len(questions) == (40 if language == "en" else 20)
    answers = [question.answer for question in questions]
    assert [answers.count(answer) for answer in range(4)] == [len(questions) // 4] * 4
    assert len({question.word for question in questions}) == len(questions)
    sentences = [sentence for question in questions for sentence in question.sentences]
    assert len(set(sentences)) == len(sentences)
    for question in questions if language == "en" else []:
        for sentence in question.sentences:
            assert re.findall(rf"\w*{question.word}\w*", sentence.lower()) == [question.word]


def test_english_is_what_stands_for_them():
    assert (demo_pairs("en"), demo_questions("en")) == (DEMO_PAIRS, DEMO_QUESTIONS)
    assert demo_sentences() == [*demo_sentences("en"), *demo_sentences("zh")]
    assert (len(demo_sentences("en")), len(demo_sentences("zh"))) == (160, 80)


def test_retrieval(language):
    found = read_data(demo_retrieval(language))
    assert (len(found.documents), len(found.queries)) == (300, 60)
    check_texts([*found.documents.values()], language, DOCUMENTS)
    check_texts([*found.queries.values()], language, QUERIES)
    assert sum(query[-1] in "?？" for query in found.queries.values()) == 30
    assert all(1 <= len(names) <= 6 for names in found.relevant.values())
