from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sentence_transformers.util import pairwise_cos_sim

from st_reba import BidirectionalLastLayer, CausalTransformer, EchoModule, RefinedThoughtModule, in_context
from st_reba.evaluation import ConditionalSimilarityEvaluator

from ..backbones import TEXTS
from ..conftest import pipeline

CONDITIONS = ["the animal", "the language of the text, at some length", "who", "the animal", "time"]
ROWS = [
    {"sentence1": text, "sentence2": TEXTS[(index + 1) % 5], "condition": condition, "score": score}
    for index, (text, condition, score) in enumerate(zip(TEXTS, CONDITIONS, [1.0, 5.0, 2.0, 3.0, 4.0], strict=True))
]


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
    assert ConditionalSimilarityEvaluator.from_rows(ROWS).main_similarity.value == "cosine"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: BidirectionalLastLayer(path, template="csts"),
        lambda path: CausalTransformer(path, pool_over="all"),
        lambda path: EchoModule(path, pool_over="all", pool_copies="repeated", repetitions=2),
        lambda path: RefinedThoughtModule(path, iterations=3),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "bert"])
def test_a_prompt_of_its_own_is_a_prompt(make, kind, shared):
    """In one batch with others, with none, and behind one for all."""
    model = pipeline(make(shared(kind=kind)))
    inputs = [in_context(text, condition) for text, condition in zip(TEXTS, CONDITIONS, strict=True)]
    together = model.encode([*inputs, TEXTS[0]], prompt="All: ", convert_to_tensor=True)
    alone = [model.encode(given["text"], prompt="All: " + given["prompt"], convert_to_tensor=True) for given in inputs]
    alone.append(model.encode(TEXTS[0], prompt="All: ", convert_to_tensor=True))
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], ["b"], [], [1.0]), r"have \[1, 1, 0, 1\] items: give one of each for every row"),
        ((["a", "b"], ["c", "d"], ["e", "f"], [1.0, 1.0]), "2 rows with 1 different scores leave nothing to rank"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConditionalSimilarityEvaluator(*arguments)


def test_no_rows():
    with pytest.raises(ValueError, match="0 rows with 0 different scores"):
        ConditionalSimilarityEvaluator.from_rows([])
