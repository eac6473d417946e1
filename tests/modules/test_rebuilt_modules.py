"""Modules of the rebuilt package give what those of the old one give. It goes with the old."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import modules as new
from st_reba import modules as old
from st_reba.modules.attention_reranking import attention_reranker as new_reranker
from st_reba.modules.attention_reranking import attention_reranker as old_reranker
from st_reba.modules.multi_vector import multi_vector_encoder as new_multi_vector
from st_reba.modules.multi_vector import multi_vector_encoder as old_multi_vector

from ..backbones import TEXTS
from ..conftest import relative_error
from .methods import language_model

FIT = [f"{number}: {text} {other}" for number, text in enumerate(TEXTS) for other in TEXTS]
FEW = [*TEXTS[:4], "", "To be, or not to be?"]
ARCHITECTURES = ["llama", "gemma3", "gpt2", "mixtral_experts"]

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


def read(module, prompt=None):
    with torch.inference_mode():
        return module.eval()(module.preprocess(FEW, prompt=prompt))


def pooled(module, *others):
    parts = [module, *others, Pooling(module.get_embedding_dimension(), "mean")]
    return SentenceTransformer(modules=parts, device="cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("InputEmbeddings", {}),
        ("InputEmbeddings", {"template": "of: {text}!", "pool_over": "all"}),
        ("NoSinkModule", {}),
        ("NoSinkModule", {"bidirectional_layers": 2, "layers": [0, -1], "template": "of: {text}!"}),
        ("LayerStates", {}),
        ("LayerStates", {"template": "prompteol"}),
        ("LayerStates", {"pool_over": "all", "template": "so: {text}!", "rows": "last"}),
    ],
)
def test_vectors_of_tokens(name, settings, architecture, backbone_path):
    path = backbone_path(architecture)
    before, after = (getattr(package, name)(path, **settings) for package in (old, new))
    for prompt in (None, "Query: "):
        expected, found = read(before, prompt), read(after, prompt)
        for key in ("layer_states", "token_embeddings"):
            if key in expected:
                assert relative_error(found[key], expected[key]) < 1e-5
        assert torch.equal(found["attention_mask"], expected["attention_mask"])
        real = expected["attention_mask"].bool()
        assert torch.equal(found["input_ids"][real], expected["input_ids"][real])


@pytest.mark.parametrize("architecture", ["llama", "gemma2_softcap", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layers": [-2], "rotations": 3},
        {"heads": [[1, 3], [0, 2]], "together": False},
        {"layers": "all", "block_tokens": 40, "max_seq_length": 12},
    ],
)
def test_reranking(settings, architecture, backbone_path, tmp_path):
    path = backbone_path(architecture)
    before = old_reranker(old.AttentionRerankModule(path, **settings), device="cpu")
    after = new_reranker(new.AttentionRerankModule(path, **settings), device="cpu")
    pairs = [(query, text) for text in TEXTS for query in ("Who chased the dog?", "river")]
    expected = before.predict(pairs, prompt="Task. ")
    assert relative_error(after.predict(pairs, prompt="Task. "), expected) < 1e-5
    assert after[0].layers == before[0].layers
    ranked = after.rank("Who chased the dog?", TEXTS, batch_size=2)
    assert [one["corpus_id"] for one in ranked] == [
        one["corpus_id"] for one in before.rank("Who chased the dog?", TEXTS, batch_size=2)
    ]
    after.save_pretrained(str(tmp_path))
    again = new.AttentionReranker(str(tmp_path), device="cpu")
    assert relative_error(again.predict(pairs, prompt="Task. "), expected) < 1e-5


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("gemma2_softcap", True), ("gpt2", True)])
@pytest.mark.parametrize("settings", [{}, {"expansion": 5}, {"top_k": 3, "stop_words": ["love"]}])
def test_promptreps(settings, architecture, tied, tmp_path):
    language_model(tmp_path / "lm", architecture, tie_word_embeddings=tied)
    before, after = (package.PromptRepsModule(str(tmp_path / "lm"), **settings) for package in (old, new))
    expected = SparseEncoder(modules=[before], device="cpu").encode(FEW, prompt="Query: ").to_dense()
    encoder = SparseEncoder(modules=[after], device="cpu")
    assert relative_error(encoder.encode(FEW, prompt="Query: ").to_dense(), expected) < 1e-5
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = SparseEncoder(str(tmp_path / "saved"), device="cpu")
    assert isinstance(again[0], new.PromptRepsModule)
    assert relative_error(again.encode(FEW, prompt="Query: ").to_dense(), expected) < 1e-5


@pytest.mark.parametrize(("name", "dimension"), [("CausalTransformer", None), ("ReBAModule", 8), ("EchoModule", 4)])
def test_multi_vector(name, dimension, backbone_path):
    found = []
    for package, make in ((old, old_multi_vector), (new, new_multi_vector)):
        module = getattr(package, name)(backbone_path())
        model = make(module, dimension=dimension, fit_texts=FIT, prompts={"query": "Query: ", "document": ""})
        assert isinstance(model, MultiVectorEncoder)
        found.append(torch.cat([*model.encode_document(TEXTS), *model.encode_query(TEXTS)]))
    assert relative_error(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("name", ["CausalTransformer", "EchoModule", "ReBAModule"])
def test_idf_weights(name, backbone_path):
    found = []
    for package in (old, new):
        module = getattr(package, name)(backbone_path(), deterministic=True)
        weights = package.IdfWeights.fit(module, ["", *FIT], chunk_size=7)
        found.append((weights.weights, torch.from_numpy(pooled(module, weights).encode(FEW))))
    assert torch.equal(found[0][0], found[1][0])
    assert relative_error(found[1][1], found[0][1]) < 1e-5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Centering", {}),
        ("Standardization", {}),
        ("WhiteningTransform", {}),
        ("WhiteningTransform", {"dimension": 5, "shrinkage": 0}),
        ("AllButTheTop", {}),
        ("AllButTheTop", {"removed": 3}),
        ("PartwiseWhitening", {"shares": [0.25, 0.75]}),
        ("PartwiseWhitening", {"shrinkage": 0.5}),
        ("StandardizedSum", {}),
    ],
)
@pytest.mark.parametrize("first", ["CausalTransformer", "EarlyLateModule"])
def test_filters_that_are_fitted(name, settings, first, backbone_path, tmp_path):
    found = []
    for package in (old, new):
        model = pooled(getattr(package, first)(backbone_path("gpt2")))
        fitted = getattr(package, name).fit(model, FIT, chunk_size=9, **settings)
        vectors = model.encode(FEW, convert_to_tensor=True)
        found.append((fitted, fitted({"sentence_embedding": vectors})["sentence_embedding"]))
    assert relative_error(found[1][1] @ found[1][1].T, found[0][1] @ found[0][1].T) < 1e-4
    assert found[0][0].get_config_dict() == found[1][0].get_config_dict()
    found[0][0].save(str(tmp_path))
    again = getattr(new, name).load(str(tmp_path))
    assert torch.equal(
        again({"sentence_embedding": vectors})["sentence_embedding"],
        found[0][0]({"sentence_embedding": vectors})["sentence_embedding"],
    )


@pytest.mark.parametrize("choice", [{}, {"keep": (1, 3)}, {"skip_first": 4}])
def test_the_filter_of_the_head(choice, backbone_path):
    found = []
    for package in (old, new):
        model = pooled(package.CausalTransformer(backbone_path("gpt2")))
        found += [package.EmbeddingFilter.from_language_model(model, **choice)]
        found += [package.EmbeddingFilter.from_language_model(backbone_path("gpt2"), **choice)]
    assert all(torch.equal(own.directions, found[0].directions) and own.keep == found[0].keep for own in found)


@pytest.mark.parametrize(("family", "cross_every"), [("bert", 2), ("roberta", 0)])
def test_towers(family, cross_every, encoder_paths, tmp_path):
    before, after = (package.TwinTower(*encoder_paths(family), cross_every=cross_every) for package in (old, new))
    with torch.no_grad():
        outputs = [
            module.eval()(module.preprocess(TEXTS), tower_outputs=True, cross_stream=True) for module in (before, after)
        ]
    for key in ("token_embeddings", "cls_states", "pooler_outputs", "cross_states"):
        assert (key in outputs[0]) == (key in outputs[1])
        assert key not in outputs[0] or torch.equal(outputs[0][key], outputs[1][key])
    model = SentenceTransformer(modules=[after, Pooling(32, "cls")], device="cpu")
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert isinstance(again[0], new.TwinTower)
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()


@pytest.mark.parametrize("settings", [{}, {"layers": [1, 3], "bottlenecks": [4, 5]}, {"encoders": False}])
def test_autoencoders(settings, tmp_path):
    before = old.LayerwiseAutoencoder(3, 32, **settings)
    before.save(str(tmp_path))
    after = new.LayerwiseAutoencoder.load(str(tmp_path))
    states = torch.randn(2, 6, 3, 32)
    assert torch.equal(after.embed(states[0]), before.embed(states[0]))
    pairs = (before.embed(states[0]), before.embed(states[1]))
    assert torch.equal(after.score_pairs(*pairs), before.score_pairs(*pairs))
    if settings.get("encoders", True):
        before.whiten(states.flatten(0, 1))
        after.whiten(states.flatten(0, 1))
        assert torch.equal(after.embed(states[0]), before.embed(states[0]))
