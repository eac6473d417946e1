"""Evaluators: of the odd one out, of pairs by a trained similarity, and of pairs under a condition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from st_reba import BidirectionalLastLayer, LayerStates, LayerwiseAutoencoder, ReBAModule, encode_words
from st_reba.evaluation import (
    ConditionalSimilarityEvaluator,
    MissingWordError,
    OddOneOutEvaluator,
    PairScoreEvaluator,
    Question,
)

from ..backbones import TEXTS
from ..conftest import pipeline

HEADER = "问题,选项1,选项2,选项3,选项4,答案\n"
ROW = "以下哪句话中“打”的意思(或用法)与其他句子不同。,他打球,他打人,她打我,买一打笔,{}\n"


def write(tmp_path, text):
    path = tmp_path / "questions.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("answer", ["d", " 4 "])
def test_reads_the_authors_format(answer, tmp_path):
    """Other columns do not matter."""
    path = write(tmp_path, "," + HEADER + "0," + ROW.format(answer))
    [question] = OddOneOutEvaluator.from_csv(path).questions
    assert question == Question("打", ("他打球", "他打人", "她打我", "买一打笔"), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("问题,选项1\n", r"questions\.csv, line 1 lacks 选项2, 选项3, 选项4, 答案 .* Give the columns these names"),
        (HEADER + "“打”,打,打\n", r"questions\.csv, line 2: 3 columns where 6 are expected"),
        (
            HEADER + ROW.format("A") + "no word here,a,b,c,d,A\n",
            r"line 3 \(question 2\): the question 'no word here' has no word in “ ”",
        ),
        (
            HEADER + "“打”,打,打,他,打,A\n",
            r"line 2 \(question 1\): The word '打' does not occur in '他'\. Correct .* on_missing_word=\"skip\"",
        ),
        (
            HEADER + ROW.format("A").replace("他打球", '"他\n打球"') + ROW.format("E"),
            r"line 4 \(question 2\): the answer 'E' is neither 1 to 4 nor A to D",
        ),
    ],
)
def test_malformed_files(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OddOneOutEvaluator.from_csv(write(tmp_path, text))


def test_questions_that_lack_their_word_can_be_left_out(tmp_path):
    lacking = "“精简”,精简人员,精选人物,精简,精简,B\n“打”,打,打,打,他,A\n"
    path = write(tmp_path, HEADER + ROW.format("A") + lacking + ROW.format("B"))
    with pytest.raises(MissingWordError, match=r"line 3 \(question 2\): The word '精简' does not occur in '精选人物'"):
        OddOneOutEvaluator.from_csv(path)
    with pytest.warns(
        UserWarning, match=r"2 of 4 questions are left out, .* lacks the word: line 3 \(question 2\); line"
    ):
        evaluator = OddOneOutEvaluator.from_csv(path, on_missing_word="skip")
    assert [question.answer for question in evaluator.questions] == [0, 1]


def euclidean(a, b):
    return np.linalg.norm(a - b)


def cosine(a, b):
    return 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def naive_odd_one(vectors, distance):
    return [max(range(4), key=lambda i: sum(distance(four[i], four[j]) for j in range(4))) for four in vectors]


def asking(answers, **kwargs):
    return OddOneOutEvaluator([Question("a", ("a", "a", "a", "a"), answer) for answer in answers], **kwargs)


VECTORS = np.random.default_rng(0).normal(size=(400, 4, 3))


def test_the_answer_is_the_farthest():
    assert asking(naive_odd_one(VECTORS, euclidean)).score(VECTORS)["euclidean_accuracy"] == 1
    assert asking(naive_odd_one(VECTORS, cosine)).score(VECTORS)["cosine_accuracy"] == 1
    assert naive_odd_one(VECTORS, euclidean) != naive_odd_one(VECTORS, cosine)


def test_equals_share():
    """A model without context gives one vector to all four: chance, wherever the answer lies."""
    same = np.ones((2, 4, 3))
    pairs = np.array([[[0.0, 1], [0, 1], [1, 0], [1, 0]]] * 2)
    for answers in ([0, 0], [3, 1]):
        evaluator = asking(answers)
        for vectors in (same, np.zeros_like(same), pairs):
            assert evaluator.score(vectors) == {"euclidean_accuracy": 0.25, "cosine_accuracy": 0.25}
    odd = np.array([[[0.0, 1], [0, 1], [0, 1], [1, 0]]])
    assert asking([3]).score(odd) == {"euclidean_accuracy": 1, "cosine_accuracy": 1}


@example(np.array([[[-1.0, 1], [-1, -2], [0, 0], [0, -1]]] * 3), [0, 1, 3, 2])
@given(arrays(np.float64, (3, 4, 2), elements=st.integers(-3, 3)), st.permutations(range(4)))
def test_the_order_of_the_sentences_does_not_matter(vectors, order):
    answers = [0, 1, 2]
    moved = [order.index(answer) for answer in answers]
    for first, second in zip(
        asking(answers).correct(vectors).values(), asking(moved).correct(vectors[:, order]).values(), strict=True
    ):
        # Sums in another order round otherwise, which must not break a tie.
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: OddOneOutEvaluator.from_csv(path, on_missing_word="no"), "='no': use 'error' or 'skip'"),
        (lambda path: OddOneOutEvaluator([]), "needs at least one question"),
        (lambda path: asking([0]).score(np.full((1, 4, 3), np.nan)), "Some word embeddings are not finite"),
        (lambda path: Question("a", ("a", "a", "a"), 3), "A question has four sentences and an answer from 0 to 3"),
    ],
)
def test_refused_questions(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(write(tmp_path, HEADER + ROW.format("E")))


CATS = [("a cat ran", "the cat sat", "my cat eats", "cat is a word"), ("a cat", "1 cat", "cat", "no cat")]


def test_accuracy(backbone_path, tmp_path):
    model = pipeline(ReBAModule(backbone_path()))
    found = [naive_odd_one([encode_words(model, four, ["cat"] * 4)], euclidean)[0] for four in CATS]
    questions = [Question("cat", four, answer) for four, answer in zip(CATS, found, strict=True)]
    evaluator = OddOneOutEvaluator(questions, name="tiny")
    metrics = evaluator(model, output_path=str(tmp_path / "eval"))
    assert set(metrics) == {"tiny_euclidean_accuracy", "tiny_cosine_accuracy"}
    assert metrics[evaluator.primary_metric] == 1.0
    assert (tmp_path / "eval" / "odd_one_out_tiny_results.csv").exists()


# Pairs

LABELS = [0.1, 0.9, 0.4, 0.6, 0.3]
CONDITIONS = ["the animal", "the language of the text, at some length", "who", "the animal", "time"]
ROWS = [
    {"sentence1": text, "sentence2": TEXTS[(index + 1) % 5], "condition": condition, "score": score}
    for index, (text, condition, score) in enumerate(zip(TEXTS, CONDITIONS, [1.0, 5.0, 2.0, 3.0, 4.0], strict=True))
]


def test_a_trained_similarity(backbone_path, tmp_path):
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[LayerStates(backbone_path()), LayerwiseAutoencoder(3, 32)], device="cpu")
    evaluator = PairScoreEvaluator(TEXTS, TEXTS[::-1], LABELS, name="dev")
    metrics = evaluator(model, str(tmp_path), epoch=1, steps=7)
    first, second = (model.encode(texts, convert_to_tensor=True) for texts in (TEXTS, TEXTS[::-1]))
    for kind, values in (
        ("score", model[-1].score_pairs(first, second)),
        ("cosine", model.similarity_pairwise(first, second)),
    ):
        assert metrics[f"dev_pearson_{kind}"] == pytest.approx(pearsonr(values, LABELS).statistic, abs=1e-5)
        assert metrics[f"dev_spearman_{kind}"] == pytest.approx(spearmanr(values, LABELS).statistic, abs=1e-5)
    assert evaluator.primary_metric == "dev_pearson_score"
    assert (tmp_path / "pair_scores_dev_results.csv").exists()


def test_each_pair_is_read_under_its_condition(shared):
    """As when every text is encoded alone, with its condition as the prompt."""
    model = pipeline(BidirectionalLastLayer(shared(), template="csts"), "lasttoken")
    found = ConditionalSimilarityEvaluator.from_rows(ROWS, batch_size=3, name="dev", write_csv=False)(model)
    vectors = [
        torch.stack([
            model.encode(row[side], prompt=f"Given the context {row['condition']}, ", convert_to_tensor=True)
            for row in ROWS
        ])
        for side in ("sentence1", "sentence2")
    ]  # fmt: skip
    cosines = pairwise_cos_sim(*vectors)
    scores = [row["score"] for row in ROWS]
    assert found["dev_spearman_cosine"] == pytest.approx(spearmanr(cosines, scores)[0])
    assert found["dev_pearson_cosine"] == pytest.approx(pearsonr(cosines, scores)[0], abs=1e-4)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PairScoreEvaluator(TEXTS, TEXTS[1:], LABELS), "'second': 4, 'labels': 5}. Give one"),
        (lambda: PairScoreEvaluator(TEXTS, TEXTS, [1.0] * 5), "5 pairs with 1 different labels leave nothing to rank"),
        (lambda: ConditionalSimilarityEvaluator(["a"], ["b"], [], [1.0]), "'conditions': 0, 'scores': 1}. Give one of"),
        (lambda: ConditionalSimilarityEvaluator.from_rows([]), "0 pairs with 0 different labels leave nothing to rank"),
    ],
)
def test_refused_pairs(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_a_model_that_scores_no_pairs(shared):
    with pytest.raises(ValueError, match="The model ends in Pooling, which scores no pairs. Use a model that ends in"):
        PairScoreEvaluator(TEXTS, TEXTS, LABELS)(pipeline(LayerStates(shared())))
