from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoTokenizer, BertConfig

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.evaluation import DependencyEvaluator
from st_reba.evaluation.dependency import average_ranks, sentence_correlations

from .. import backbones
from ..backbones import TEXTS
from ..conftest import paired, pipeline

LONG = [text for text in TEXTS if len(text) > 1]


def naive(states, pivot=-1) -> float:
    """(n, D) to the mean Spearman correlation of one token with each of the others, by SciPy."""
    states = np.asarray(states, dtype=np.float64)
    pivot %= len(states)
    return np.mean([spearmanr(states[pivot], state).statistic for j, state in enumerate(states) if j != pivot])


def quartiles(values):
    first, median, third = np.percentile(values, [25, 50, 75])
    return {"mean": np.mean(values), "first_quartile": first, "median": median, "third_quartile": third}


def hidden_states(model, ids, norm):
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return [norm(states)[0] for states in output.hidden_states[:-1]] + [output.last_hidden_state[0]]


def test_ranks_are_scipys():
    values = torch.randn(3, 4, 200).bfloat16().float()
    assert len(values[0, 0].unique()) < 200
    assert np.array_equal(average_ranks(values), rankdata(values, axis=-1) - 1)


@pytest.mark.parametrize("pivot", ["last", "first"])
def test_correlations_with_padding_on_either_side(pivot):
    states = torch.randn(4, 5, 40)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    found = sentence_correlations(states, mask, pivot)
    expected = [naive(states[i][mask[i]], -1 if pivot == "last" else 0) for i in range(3)]
    assert found[:3].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[3].isnan()


@pytest.mark.parametrize(("name", "batch_size"), paired(["llama", "gpt2", "gemma2_softcap"], [1, 3]))
def test_every_layer(name, batch_size, backbone_path, eager, token_ids):
    evaluator = DependencyEvaluator(TEXTS, layers="all", batch_size=batch_size, on_step=(steps := []).append)
    metrics = evaluator(pipeline(CausalTransformer(backbone_path(name))))
    norm = eager(name).ln_f if name == "gpt2" else eager(name).norm
    texts = [hidden_states(eager(name), token_ids(text), norm) for text in LONG]
    expected = {
        f"layer_{layer}_{key}": value
        for layer in range(4)
        for key, value in quartiles([naive(states[layer]) for states in texts]).items()
    }
    assert metrics == pytest.approx(expected, abs=1e-4)
    assert evaluator.primary_metric == "layer_3_mean"
    # "a" is one token: there is nothing to correlate it with.
    assert evaluator.correlations.shape == (4, len(LONG))
    assert sum(steps) == len(TEXTS)


def test_the_last_layer_is_the_default(shared):
    model = pipeline(EchoModule(shared()))
    all_layers = DependencyEvaluator(TEXTS, layers="all")(model)
    evaluator = DependencyEvaluator(TEXTS, name="tiny")
    metrics = evaluator(model)
    assert evaluator.primary_metric == "tiny_mean"
    assert metrics == pytest.approx(
        {f"tiny_{key}": all_layers[f"layer_3_{key}"] for key in ("mean", "first_quartile", "median", "third_quartile")}
    )
    assert model.model_card_data.eval_results_dict[evaluator] == metrics


def test_a_prompts_end_is_the_pivot(backbone_path, eager, token_ids):
    module = CausalTransformer(backbone_path(), template='In a word: {text}:"', pool_over="all")
    before, text, after = (token_ids(part) for part in ("In a word: ", TEXTS[0], ':"'))
    states = hidden_states(eager(), before + text + after, eager().norm)[-1]
    found = DependencyEvaluator(TEXTS[:1])(pipeline(module))["mean"]
    assert found == pytest.approx(naive(states[len(before) :]), abs=1e-5)


def test_of_words_that_look_back(shared):
    """Any first module that hands on tokens can be read at the last layer."""
    model = pipeline(ReBAModule(shared()))
    words = model.encode(LONG, output_value="token_embeddings")
    assert DependencyEvaluator(LONG)(model)["mean"] == pytest.approx(np.mean([*map(naive, words)]), abs=1e-5)


def test_a_bert_and_its_first_token(tmp_path):
    """The paper's other arm: an encoder, pivot CLS."""
    torch.manual_seed(0)
    config = BertConfig(**backbones.SIZE, intermediate_size=48)
    path = backbones.save(backbones.randomize(AutoModel.from_config(config).eval()), tmp_path, "bert")
    transformer = Transformer(path)
    model = SentenceTransformer(modules=[transformer, Pooling(32, "cls")], device="cpu")
    backbone, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        states = [backbone(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    expected = np.mean([naive(tokens, 0) for tokens in states])
    assert DependencyEvaluator(TEXTS, pivot="first")(model)["mean"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="first module is Transformer, .* Use a model with CausalTransformer"):
        DependencyEvaluator(TEXTS, layers="all")(model)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_csv_and_plot(layers, backbone_path, tmp_path):
    evaluator = DependencyEvaluator(TEXTS, layers=layers, name="tiny")
    metrics = evaluator(pipeline(CausalTransformer(backbone_path())), str(tmp_path / "results"))
    (path,) = (tmp_path / "results").iterdir()
    assert path.name == "dependency_tiny_results.csv"
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [row["layer"] for row in rows] == (["last"] if layers == "last" else ["0", "1", "2", "3"])
    assert {row["sentences"] for row in rows} == {str(len(LONG))}
    assert float(rows[-1]["mean"]) == metrics[evaluator.primary_metric]
    evaluator.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sentences": []}, "needs at least one sentence"),
        ({"pivot": "cls"}, 'pivot=\'cls\': use "last" .* or "first"'),
        ({"layers": 3}, 'layers=3: use "last" .* or "all"'),
        ({"batch_size": 0}, "batch_size=0: give the sentences to read at a time"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DependencyEvaluator(**{"sentences": TEXTS, **settings})


def test_errors(backbone_path, tmp_path):
    evaluator = DependencyEvaluator(["a", ""])
    for act in (lambda: evaluator.draw(tmp_path / "a.png"), lambda: evaluator.write_csv(tmp_path / "a.csv")):
        with pytest.raises(RuntimeError, match="Nothing has been evaluated yet"):
            act()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="None of the 2 sentences has two tokens in what CausalTransformer hands on"):
        evaluator(pipeline(CausalTransformer(backbone_path())))
    with pytest.raises(ValueError, match='rows="all"|hands on every token'):
        DependencyEvaluator(TEXTS)(pipeline(ReBAModule(backbone_path(), rows="last"), "lasttoken"))
