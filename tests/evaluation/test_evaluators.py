"""Evaluators: of the odd one out, of pairs by a trained similarity, and of pairs under a condition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator, SequentialEvaluator
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import pairwise_cos_sim
from transformers import AutoModel, AutoTokenizer

import st_reba
from st_reba.evaluation import ConditionalSimilarityEvaluator, OddOneOutEvaluator, PairScoreEvaluator
from st_reba.evaluation.evaluators import MissingWordError, Question
from st_reba.evaluation.layers import DependencyEvaluator, LayerReader, TurningPointEvaluator, sentence_correlations

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import forward_passes, pipeline, relative_error

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


MALFORMED_FILES = [
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
]


@pytest.mark.parametrize(("text", "message"), MALFORMED_FILES)
def test_malformed_files(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OddOneOutEvaluator.from_csv(write(tmp_path, text))


def test_questions_that_lack_their_word_can_be_left_out(tmp_path):
    lacking = "“精简”,精简人员,精选人物,精简,精简,B\n“打”,打,打,打,他,A\n"
    path = write(tmp_path, HEADER + ROW.format("A") + lacking + ROW.format("B"))
    with pytest.raises(MissingWordError, match=r"line 3 \(question 2\): The word '精简' does not occur in '精选人物'"):
        OddOneOutEvaluator.from_csv(path)
    said = r"2 of 4 questions are left out, .* lacks the word: line 3 \(question 2\); line"
    with pytest.warns(UserWarning, match=said):
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


CATS = [("a cat ran", "the cat sat", "my cat eats", "cat is a word"), ("a cat", "1 cat", "cat", "no cat")]


def test_accuracy(backbone_path, tmp_path):
    model = pipeline(st_reba.ReBAModule(backbone_path()))
    found = [naive_odd_one([st_reba.encode_words(model, four, ["cat"] * 4)], euclidean)[0] for four in CATS]
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
    model = SentenceTransformer(
        modules=[st_reba.LayerStates(backbone_path()), st_reba.LayerwiseAutoencoder(3, 32)], device="cpu"
    )
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
    model = pipeline(st_reba.BidirectionalLastLayer(shared(), template="csts"), "lasttoken")
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


def test_a_model_that_scores_no_pairs(shared):
    with pytest.raises(ValueError, match="The model ends in Pooling, which scores no pairs. Use a model that ends in"):
        PairScoreEvaluator(TEXTS, TEXTS, LABELS)(pipeline(st_reba.LayerStates(shared())))


# BeLLM's: the score after each layer, and how much a sentence's tokens share there

PAIRS = [*zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True), (TEXTS[0], TEXTS[2]), (TEXTS[1], TEXTS[3])]
FIRST, SECOND = ([pair[side] for pair in PAIRS] for side in (0, 1))
GRADES = [0.1, 0.9, 0.4, 0.3, 0.8, 0.2, 0.7]


def similarity(**kwargs):
    return EmbeddingSimilarityEvaluator(FIRST, SECOND, GRADES, **{"main_similarity": "cosine", **kwargs})


@pytest.fixture
def model(backbone_path):
    return pipeline(st_reba.CausalTransformer(backbone_path()))


def test_the_score_after_each_layer(model, backbone_path, tmp_path):
    """As of a model that ends there; what that embeds has its own tests."""
    evaluator = TurningPointEvaluator(similarity(name="sts"))
    with forward_passes() as passes:
        metrics = evaluator(model, str(tmp_path), epoch=1, steps=20)
    assert len(passes) == 1, "each text passes once"
    assert list(metrics) == [*(f"sts_layer_{layer}_spearman_cosine" for layer in range(4)), "sts_turning_point"]
    for layer in (1, 2, 3):
        ends_there = pipeline(st_reba.CausalTransformer(backbone_path(), output_layer=layer))
        expected = similarity()(ends_there)["spearman_cosine"]
        assert metrics[f"sts_layer_{layer}_spearman_cosine"] == pytest.approx(expected, abs=1e-6)
    assert metrics["sts_turning_point"] == np.argmax(evaluator.scores)
    assert evaluator.primary_metric == "sts_layer_3_spearman_cosine"
    assert list(model.model_card_data.eval_results_dict) == [evaluator]
    assert (tmp_path / "turning_point_sts_results.csv").read_text().startswith("epoch,steps,layer_0_")


def test_any_evaluator(model):
    """The last layer's score is what the evaluator gives the model itself, prompts and similarity included."""
    model.prompts, model.similarity_fn_name = {"query": "ask: ", "document": "read: "}, "euclidean"
    documents = dict(zip("abcde", TEXTS, strict=True))
    retrieval = InformationRetrievalEvaluator(
        {"q1": "the bank", "q2": "a dog"}, documents, {"q1": {"a"}, "q2": {"c"}}, write_csv=False
    )
    wrapped = SequentialEvaluator([similarity(name="one"), retrieval])
    evaluator = TurningPointEvaluator(wrapped)
    metrics = evaluator(model)
    assert metrics[evaluator.primary_metric] == pytest.approx(wrapped(model)[wrapped.primary_metric], abs=1e-5)
    assert len(metrics) == 5


class Scores(BaseEvaluator):
    """Gives what it is told, a score a layer."""

    def __init__(self, scores, greater_is_better=True):
        super().__init__()
        self.scores, self.greater_is_better = scores, greater_is_better

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        return self.scores.pop(0)


def test_the_best_layer(model):
    """The lowest of equals."""
    for scores, greater, best in (([2, 1, 3, 4], False, 1), ([1, 2, 2, 1], True, 1), ([math.nan, 1, 0, 2], True, 3)):
        evaluator = TurningPointEvaluator(Scores(list(scores), greater))
        metrics = evaluator(model)
        assert evaluator.greater_is_better is greater
        assert metrics["turning_point"] == best
        assert evaluator.primary_metric == "layer_3_score"


def test_errors(model, shared):
    words = OddOneOutEvaluator([Question("a", ("a b", "a c", "a d", "a e"), 0)])
    last_row = pipeline(st_reba.ReBAModule(shared(), rows="last"), "lasttoken")
    for evaluator, evaluated, message in (
        (TurningPointEvaluator(Scores([math.nan] * 4)), model, r"Scores gives no number \(NaN\) after any layer"),
        (TurningPointEvaluator(Scores([{"a": 1.0}])), model, r"Scores has the primary metric None and returns"),
        (TurningPointEvaluator(words), model, "words need a module of st_reba"),
        (DependencyEvaluator(["a", ""]), model, "None of the 2 sentences has two tokens in what CausalTransformer"),
        (DependencyEvaluator(TEXTS), last_row, 'rows="all"|returns every token'),
    ):
        with pytest.raises(ValueError, match=message):
            evaluator(evaluated)


LONG = [text for text in TEXTS if len(text) > 1]


def naive(states, pivot=-1) -> float:
    """(n, D) to the mean Spearman correlation of one token with each of the others, by SciPy."""
    states = np.asarray(states, dtype=np.float64)
    pivot %= len(states)
    return np.mean([spearmanr(states[pivot], state).statistic for j, state in enumerate(states) if j != pivot])


@pytest.mark.parametrize("pivot", ["last", "first"])
def test_correlations_with_padding_on_either_side(pivot):
    # bfloat16 has many equals.
    states = torch.randn(4, 5, 200).bfloat16().float()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    found = sentence_correlations(states, mask, pivot)
    expected = [naive(states[i][mask[i]], -1 if pivot == "last" else 0) for i in range(3)]
    assert found[:3].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[3].isnan()


def test_the_dependency_of_every_layer(model, tmp_path):
    evaluator = DependencyEvaluator(TEXTS, layers="all", batch_size=3, name="tiny")
    metrics = evaluator(model, str(tmp_path))
    read = [LayerReader(model).features([text]) for text in LONG]
    for layer, texts in enumerate(zip(*read, strict=True)):
        values = [naive(features["token_embeddings"][0]) for features in texts]
        assert metrics[f"tiny_layer_{layer}_mean"] == pytest.approx(np.mean(values), abs=1e-4)
        for name, percent in (("first_quartile", 25), ("median", 50), ("third_quartile", 75)):
            assert metrics[f"tiny_layer_{layer}_{name}"] == pytest.approx(np.percentile(values, percent), abs=1e-4)
    assert evaluator.primary_metric == "tiny_layer_3_mean"
    assert evaluator.correlations.shape == (4, len(LONG)), "one token has nothing to be correlated with"
    assert (tmp_path / "dependency_tiny_results.csv").exists()


def test_a_bert_and_its_first_token(encoder_paths):
    """The paper's other arm: an encoder, pivot CLS."""
    path, _ = encoder_paths()
    model = SentenceTransformer(modules=[Transformer(path), Pooling(32, "cls")], device="cpu")
    backbone, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        states = [backbone(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    expected = np.mean([naive(tokens, 0) for tokens in states])
    assert DependencyEvaluator(TEXTS, pivot="first")(model)["mean"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "falcon"])
def test_every_layer_on_every_architecture(name, shared, eager, token_ids):
    """In one pass."""
    model = pipeline(st_reba.CausalTransformer(shared(name)))
    reader = LayerReader(model)
    with forward_passes() as passes:
        embeddings = reader.embeddings(TEXTS)
    assert (reader.count, len(passes)) == (4, 1)
    for index, text in enumerate(TEXTS):
        layers = oracles.after_each_layer(eager(name), name, token_ids(text))
        assert relative_error(embeddings[:, index], torch.stack([states.mean(0) for states in layers])) < 1e-5
    assert relative_error(embeddings[-1], model.encode(TEXTS)) < 1e-5


BEHIND_THE_LAST = [
    ({"word_embed_proj_dim": 16}, lambda model, states: model.project_out(model.final_layer_norm(states))),
    ({"do_layer_norm_before": False}, lambda model, states: states),
]


@pytest.mark.parametrize(("settings", "norm"), BEHIND_THE_LAST)
def test_what_stands_behind_the_last_layer(settings, norm, tmp_path, token_ids):
    """A norm and a projection (two steps), or nothing at all: OPT has them all."""
    backbone = backbones.backbone("opt", **settings)
    model = pipeline(st_reba.CausalTransformer(backbones.save(backbone, tmp_path)), "lasttoken")
    embeddings = LayerReader(model).embeddings(TEXTS[:1])
    with torch.inference_mode():
        states = oracles.layer_states(backbone, "opt", token_ids(TEXTS[0]))
        expected = norm(backbone.decoder, states[:, None])
    assert relative_error(embeddings[1:], expected) < 1e-5


@pytest.mark.parametrize("kind", [st_reba.EchoModule, st_reba.BidirectionalLastLayer, st_reba.KVReroutingModule])
def test_the_last_features_are_the_modules_own(kind, shared, monkeypatch):
    """And batches do not matter."""
    model = pipeline(kind(shared()))
    before = model.encode(TEXTS)
    reader = LayerReader(model)
    *earlier, last = reader.features(TEXTS)
    with torch.inference_mode():
        expected = model[0](model.preprocess(TEXTS))
    assert len(earlier) == 3
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], value) for name, value in expected.items())
    alone = torch.cat([reader.embeddings([text]) for text in [*TEXTS, ""]], dim=1)
    # A module may run a batch in parts: each layer's states must find their own.
    monkeypatch.setattr(kind, "TOKENS_PER_THREAD", 1)
    assert relative_error(reader.embeddings([*TEXTS, ""]), alone) < 1e-5
    monkeypatch.undo()
    assert np.array_equal(model.encode(TEXTS), before), "no hook is left"


def test_what_cannot_be_read(shared, backbone_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ReBAModule, whose embedding depends on .* Use a model with Causal"):
        LayerReader(pipeline(st_reba.ReBAModule(shared())))
    backbone = Transformer(backbone_path())
    kind, forward = type(backbone.model), type(backbone.model).forward

    def scaled(self, **kwargs):
        output = forward(self, **kwargs)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    with pytest.raises(ValueError, match="LlamaModel changes its last layer's states in a way that could not be f"):
        LayerReader(pipeline(st_reba.CausalTransformer(backbone)))


REFUSED = [
    (lambda path: OddOneOutEvaluator.from_csv(path, on_missing_word="no"), "='no': use 'error' or 'skip'"),
    (lambda _: OddOneOutEvaluator([]), "needs at least one question"),
    (lambda _: asking([0]).score(np.full((1, 4, 3), np.nan)), "Some word embeddings are not finite"),
    (lambda _: Question("a", ("a", "a", "a"), 3), "A question has four sentences and an answer from 0 to 3"),
    (lambda _: PairScoreEvaluator(TEXTS, TEXTS[1:], LABELS), "'second': 4, 'labels': 5}. Give one"),
    (lambda _: PairScoreEvaluator(TEXTS, TEXTS, [1.0] * 5), "5 pairs with 1 different labels leave nothing to rank"),
    (lambda _: ConditionalSimilarityEvaluator(["a"], ["b"], [], [1.0]), "'conditions': 0, 'scores': 1}. Give one of"),
    (lambda _: ConditionalSimilarityEvaluator.from_rows([]), "0 pairs with 0 different labels leave nothing to rank"),
    (lambda _: DependencyEvaluator([]), "give at least one sentence"),
    (lambda _: DependencyEvaluator(TEXTS, pivot="cls"), "pivot='cls': use 'last' or 'first'"),
    (lambda _: DependencyEvaluator(TEXTS, layers=3), "layers=3: use 'last' or 'all'"),
    (lambda _: DependencyEvaluator(TEXTS, batch_size=0), "batch_size=0: give a whole number of 1 or more"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(write(tmp_path, HEADER + ROW.format("E")))
