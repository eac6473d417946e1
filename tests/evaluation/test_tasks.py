"""Tasks: their scores are those of sentence-transformers and scikit-learn."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation
from sentence_transformers.util import cos_sim

from st_reba.data.demo import demo_retrieval
from st_reba.data.tables import Classes, Pairs, Retrieval, Triplets, read_data
from st_reba.evaluation.embedded import Embedded, TensorCache, stand_in
from st_reba.evaluation.evaluators import Evaluator
from st_reba.evaluation.tasks import Measure, Vectors, task_of

WORDS = [f"text {number}" for number in range(60)]


WIDTHS = {"narrow": 3, "wide": 12}


def vector(variant: str, text: str, prompt: str | None) -> torch.Tensor:
    """The same each time."""
    seed = sum(ord(character) * (place + 1) for place, character in enumerate(f"{variant}|{text}|{prompt}"))
    return torch.randn(WIDTHS[variant], generator=torch.Generator().manual_seed(seed)).bfloat16()


def vectors(variant, texts, prompt=None):
    return torch.stack([vector(variant, text, prompt) for text in texts])


class Embedder:
    def __init__(self):
        self.asked: list[tuple[str | None, str]] = []

    def __call__(self, texts, prompt):
        self.asked += [(prompt, text) for text in texts]
        return {variant: vectors(variant, texts, prompt) for variant in WIDTHS}


def check(data, evaluator, metrics):
    """The task's scores are those of ST's evaluator."""
    task = task_of(data)
    model = stand_in(Embedded(Embedder()), "wide")
    model.prompts = dict(task.prompts)
    found, own = evaluator(model), task(model)
    assert list(own) == metrics
    assert task.primary_metric == metrics[0]
    for metric in metrics:
        assert own[metric] == pytest.approx(found[metric], abs=1e-6)
    return task


def test_graded_pairs():
    data = Pairs(WORDS[:20], WORDS[20:40], [float(number % 6) for number in range(20)])
    evaluator = evaluation.EmbeddingSimilarityEvaluator(data.first, data.second, data.scores, main_similarity="cosine")
    check(data, evaluator, ["spearman_cosine", "pearson_cosine"])


@pytest.mark.parametrize("labels", [(0.0, 1.0), (1.0, 5.0)])
def test_two_classes(labels):
    data = Pairs(WORDS[:30], WORDS[30:60], [labels[number % 3 == 0] for number in range(30)])
    classes = [number % 3 == 0 for number in range(30)]
    cosine = {"similarity_fn_names": ["cosine"]}
    evaluator = evaluation.BinaryClassificationEvaluator(data.first, data.second, classes, **cosine)
    task = check(data, evaluator, ["cosine_ap"])
    assert task.scores[0].column.chance == pytest.approx(1 / 3)


def test_triplets():
    data = Triplets(WORDS[:20], WORDS[20:40], WORDS[40:])
    evaluator = evaluation.TripletEvaluator(data.anchors, data.positives, data.negatives)
    task = check(data, evaluator, ["cosine_accuracy"])
    alike = task.measure(similar(dict.fromkeys(WORDS, torch.ones(3))))
    assert set(alike["correct"]) == {0.5}, "ties count half"


@pytest.mark.parametrize("prompts", [{}, {"query": "find: "}, {"query": "q: ", "document": "d: "}])
def test_retrieval(prompts):
    data = read_data(demo_retrieval("zh"))
    data = Retrieval(data.queries, data.documents, data.relevant, prompts)
    relevant = {query: set(documents) for query, documents in data.relevant.items()}
    measured = {"precision_recall_at_k": [100], "score_functions": {"cosine": cos_sim}}
    evaluator = evaluation.InformationRetrievalEvaluator(data.queries, data.documents, relevant, **measured)
    check(data, evaluator, ["cosine_ndcg@10", "cosine_recall@100"])


@pytest.mark.parametrize(("value", "shown"), [(0.3125, "31.2"), (-0.05, "−5.0"), (-1e-17, "0.0"), (math.nan, "n/a")])
def test_a_value_as_people_read_it(value, shown):
    assert Measure("STS", "Spearman x 100").show(value) == shown


# Texts in classes


def texts_in(labels):
    return Classes({f"text {place}": label for place, label in enumerate(labels)})


def vectors_of(data, seed=0):
    """Of each text one that lies near those of its class."""
    draw, centres = np.random.default_rng(seed), {}
    for label in data.labels.values():
        centres.setdefault(label, draw.normal(size=6))
    # Of any length: only the direction counts.
    return {
        text: torch.tensor((centres[label] + draw.normal(size=6)) * draw.uniform(0.1, 9), dtype=torch.float32)
        for text, label in data.labels.items()
    }


def similar(vectors):
    return Vectors(lambda texts, role: torch.stack([vectors[text] for text in texts]))


def votes(labels, cosines, count):
    """Whether each text gets its own class by the vote of its nearest others."""
    right = []
    for text, label in labels.items():
        others = sorted(labels.keys() - {text}, key=lambda other: -cosines[text, other])[:count]
        # Of equals it gives the first that it met.
        [(voted, _)] = Counter(labels[other] for other in others).most_common(1)
        right.append(voted == label)
    return np.array(right)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("abcde"), min_size=4, max_size=24), st.integers(0, 9), st.sampled_from([None, 5]))
def test_the_nearest_vote(labels, seed, neighbours):
    """The shares' mean is the accuracy; a share has a third of what others lose by leaving the text out.

    With fewer texts than neighbours, too, classes of one text, and as many votes for one class as for another.
    """
    data = texts_in(labels)
    task, vectors = task_of(data, neighbours=neighbours), vectors_of(data, seed)
    assume(len(set(labels)) > 1 and len(set(labels)) < len(labels))
    cosines = {
        (text, other): float(torch.cosine_similarity(vectors[text], vectors[other], dim=0))
        for text in vectors for other in vectors
    }  # fmt: skip
    sizes = Counter(labels).values()
    count = neighbours or min(max(min(sizes) - 1, 1), 5)
    whole = votes(data.labels, cosines, count)
    others = [
        votes({text: label for text, label in data.labels.items() if text != out}, cosines, count).sum()
        - np.delete(whole, place).sum()
        for place, out in enumerate(data.labels)
    ]
    shares = task.measure(similar(vectors))["right"]
    assert shares.mean() == pytest.approx(whole.mean())
    assert shares == pytest.approx(whole - (others - np.mean(others)) / 3, abs=1e-9)
    assert task.scores[0].column.chance == max(sizes) / len(labels)


@pytest.mark.parametrize("labels", ["aaaa", "abcd"])
def test_labels_that_leave_nothing_to_score(labels):
    task = task_of(texts_in(labels))
    assert all(np.isnan(own).all() and len(own) for own in task.measure(similar(vectors_of(task.data))).values())


def test_shares_of_the_nearest_vote_spread_as_samples_do():
    """Five classes of ten texts, drawn 200 times."""
    draw, data = np.random.default_rng(0), texts_in([f"class {number % 5}" for number in range(50)])
    centres, task = draw.normal(size=(5, 8)), task_of(data)
    drawn = [torch.from_numpy(centres[task.classes] + draw.normal(size=(50, 8))) for _ in range(200)]
    measured = [task.measure(Vectors(lambda texts, role, own=own: own))["right"] for own in drawn]
    shares = np.stack(measured)
    spread = shares.std(axis=1).mean() / np.sqrt(50)
    assert 0.9 < spread / shares.mean(axis=1).std() < 1.2


def test_a_recipe_without_numbers_has_no_score_and_one_that_tells_nothing_apart_a_low_one(recwarn):
    data = texts_in("ab" * 10 + "c")
    task = task_of(data)
    vectors = (dict.fromkeys(data.labels, torch.full((3,), value)) for value in (1.0, math.nan))
    [alike, broken] = (task.measure(similar(own)) for own in vectors)
    assert {name: own.shape for name, own in alike.items()} == {name: own.shape for name, own in broken.items()}
    assert all(np.isnan(own).all() for own in broken.values())
    assert not recwarn.list


# Texts that are embedded once, tensors that are computed once, and the table of an evaluation


some_texts = st.lists(st.text("ab 我", max_size=3), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.sampled_from([None, "query: "]), some_texts), max_size=8))
def test_each_text_is_embedded_once(calls):
    embedder = Embedder()
    store = Embedded(embedder)
    for variant, prompt, texts in calls:
        # In its own type.
        assert torch.equal(store.of(variant, texts, prompt), vectors(variant, texts, prompt))
        assert store.has(texts, prompt)
    assert len(embedder.asked) == len(set(embedder.asked))


def test_batches_are_of_neighbours_in_length_and_one_that_fails_leaves_nothing_behind():
    asked, failing = [], [True]

    def embed(texts, prompt):
        if failing:
            failing.pop()
            raise ZeroDivisionError
        asked.append(texts)
        return Embedder()(texts, prompt)

    store = Embedded(embed, 2)
    texts = ["a", "abc", "ab", "abcde", "abcd", "abc"]
    with pytest.raises(ZeroDivisionError):
        store.add(texts)
    store.add(texts)
    assert asked == [["abcde", "abcd"], ["abc", "ab"], ["a"]]
    assert torch.equal(store.of("wide", texts), vectors("wide", texts))
    with pytest.raises(KeyError, match="echo"):
        store.of("echo", ["a"])


def test_a_stand_in_encodes_as_st_does():
    embedder = Embedder()
    settings = {"prompts": {"query": "ask: ", "document": "read: "}, "similarity_fn_name": "dot", "truncate_dim": 8}
    like = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu", **settings)
    texts = ["a long text", "b", "a longer text still"]
    store = Embedded(embedder)
    wide, narrow = (stand_in(store, variant, like=like) for variant in ("wide", "narrow"))
    assert np.allclose(wide.encode_query(texts, batch_size=2), vectors("wide", texts, "ask: ")[:, :8].float())
    assert [text for _, text in embedder.asked] == [texts[2], texts[0], texts[1]], "longest first, as ST batches them"
    assert np.allclose(np.linalg.norm(narrow.encode_document(texts, normalize_embeddings=True), axis=1), 1, atol=0.01)
    assert {prompt for prompt, _ in embedder.asked} == {"ask: ", "read: "}
    assert wide.similarity_fn_name == "dot"


def test_what_depends_on_something_else_is_computed(tmp_path):
    kept, made = TensorCache(tmp_path / "deep" / "kept"), []

    def compute():
        made.append(1)
        return {"a": torch.full((2, 3), len(made)).t()}

    for key, value in (("model", 1), ("model", 1), ("another", 2)):
        assert kept.get([key, ["text"]], compute)["a"].tolist() == [[value, value]] * 3
    for path in kept.directory.glob("*.safetensors"):
        path.write_bytes(b"\x08\0\0\0")
    assert kept.get(["model", ["text"]], compute)["a"][0, 0] == 3
    temporary = TensorCache()
    directory = temporary.directory
    found = temporary.get("a", lambda: {"a": torch.arange(6).reshape(3, 2).mT})["a"]
    assert list(directory.glob("*.safetensors"))
    del temporary
    assert not directory.exists()
    assert found.tolist() == [[0, 2, 4], [1, 3, 5]]


class Half(Evaluator):
    metric = "half"
    file = "halves"
    value = 0.5

    def metrics_of(self, model):
        self.value += 0.25
        return {"half": self.value}


def test_one_line_an_evaluation(tmp_path):
    model = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    evaluator = Half(name="zh")
    evaluator(model, str(tmp_path / "eval"), 1)
    assert evaluator(model, str(tmp_path / "eval"), 2, 10) == {evaluator.primary_metric: 1.0}
    lines = (tmp_path / "eval" / "halves_zh_results.csv").read_text().splitlines()
    assert lines == ["epoch,steps,half", "1,-1,0.75", "2,10,1.0"]
    Half(write_csv=False)(model, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
