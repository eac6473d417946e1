"""What the modules of sentence-transformers read off ours, and off its own ``Transformer``, is the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import pkgutil

import numpy as np
import pytest
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, losses  # type: ignore[attr-defined]
from sentence_transformers.base.modules import Dense, Module, Transformer
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    WeightedLayerPooling,
    WordWeights,
)
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

from st_reba import (
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)

from .. import oracles
from ..backbones import TEXTS, VOCABULARY, third
from ..conftest import long, paired, pipeline, relative_error

#: Modules that begin a pipeline, or read what no text encoder hands on.
NOT_READERS = {
    "BoW", "CLIPModel", "StaticEmbedding", "WordEmbeddings", "SparseStaticEmbedding", "MLMTransformer", "Transformer",
    "InputModule", "Module", "Router", "Asym", "LogitScore", "BaseTokenPooling", "LambdaTokenPooling",
}  # fmt: skip


def weighted_layers(count=3, start=1):
    weights = torch.nn.Parameter(torch.rand(count + 1 - start) + 0.1)
    return WeightedLayerPooling(32, num_hidden_layers=count, layer_start=start, layer_weights=weights)


def convolution():
    return CNN(32, out_channels=8, kernel_sizes=[1, 3])


READERS = {
    "WeightedLayerPooling": lambda: [weighted_layers(), Pooling(32, "mean")],
    "CNN": lambda: [convolution(), Pooling(16, "mean")],
    "Dense": lambda: [Dense(32, 8, module_input_name="token_embeddings"), Pooling(8, "mean"), Dense(8, 4)],
    "WordWeights": lambda: [
        WordWeights([str(word) for word in range(VOCABULARY)], {str(word): word % 7 for word in range(VOCABULARY)}),
        Pooling(32, ("mean", "max")),
    ],
    "Normalize": lambda: [Pooling(32, "mean"), Normalize()],
    "LayerNorm": lambda: [Pooling(32, "mean"), LayerNorm(32)],
    "Dropout": lambda: [Pooling(32, "mean"), Dropout(0.5)],
    "SparseAutoEncoder": lambda: [Pooling(32, "mean"), SparseAutoEncoder(32, 64, k=4)],
    "SpladePooling": lambda: [SpladePooling("max")],
    "Pooling": lambda: [Pooling(32, tuple(Pooling.POOLING_MODES))],
}


def read(module, following, texts):
    features = module.preprocess(texts)
    with torch.inference_mode():
        for part in (module, *following):
            features = part.eval()(features)
    return features["sentence_embedding"]


def st_transformer(path, **config):
    # Eager, because its sdpa drops Gemma 2's soft cap in some versions.
    module = Transformer(path, config_kwargs=config, model_kwargs={"attn_implementation": "eager"}).eval()
    module.tokenizer.pad_token = module.tokenizer.pad_token or module.tokenizer.eos_token
    return module


def test_every_module_is_known():
    """A new module of sentence-transformers is to be looked at: does it read what ours hand on?"""
    found = set()
    for family in ("base", "sentence_transformer", "sparse_encoder", "multi_vector_encoder", "cross_encoder"):
        name = f"{sentence_transformers.__name__}.{family}.modules"
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError:  # a family that this version does not have
            continue
        for file in pkgutil.iter_modules(package.__path__, f"{name}."):
            for class_name, value in inspect.getmembers(importlib.import_module(file.name), inspect.isclass):
                if issubclass(value, Module) and value.__module__ == file.name:
                    found.add(class_name)
    multi_vector = {"MultiVectorMask", "HierarchicalTokenPooling"}
    assert found <= {*READERS, *NOT_READERS, *multi_vector, "LSTM"}


@pytest.fixture(scope="module")
def both(backbone_path):
    """``both(architecture, tokenizer_kind)``: ST's module and ours, with all layers, made once."""

    @functools.cache
    def made(*backbone):
        path = backbone_path(*backbone)
        ours = CausalTransformer(path, pool_over="all", config_kwargs={"output_hidden_states": True})
        return st_transformer(path, output_hidden_states=True), ours.eval()

    return made


@pytest.mark.parametrize(("reader", "backbone"), paired(READERS, [("llama", "bytes"), ("gpt2", "bert")]))
def test_what_it_reads_off_transformer(reader, backbone, both):
    """One text a batch, of every length: there ST's padding, which these modules read too, does not matter."""
    following = READERS[reader]()
    theirs, ours = both(*backbone)
    alone = []
    for text in TEXTS:
        expected = read(theirs, following, [text])
        alone.append(read(ours, following, [text]))
        assert relative_error(alone[-1], expected) < 1e-6, text
    # What stands behind ours gives a text what it gives it alone, padding or none.
    assert relative_error(read(ours, following, TEXTS), torch.cat(alone)) < 1e-5


def test_a_multi_vector_encoder(backbone_path):
    modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    path = backbone_path("gpt2", "bert")
    theirs, ours = st_transformer(path), CausalTransformer(path, pool_over="all").eval()
    mask = modules.MultiVectorMask(["the", "cat"])
    mask.resolve_with_tokenizer(ours.tokenizer)
    for text in TEXTS:
        found, expected = [], []
        for module, features in ((ours, found), (theirs, expected)):
            with torch.inference_mode():
                masked = mask(module(module.preprocess([text])))
                features += [masked["attention_mask"].float(), masked["token_embeddings"]]
                normal = Normalize("token_embeddings") if _normalizes_tokens() else torch.nn.Identity()
                pooled = modules.HierarchicalTokenPooling(pool_factor=2)(normal(masked), task="document")
                features += [pooled["attention_mask"].float(), pooled["token_embeddings"]]
        assert all(relative_error(one, other) < 1e-5 for one, other in zip(found, expected, strict=True))


def _normalizes_tokens():
    return "module_input_name" in inspect.signature(Normalize).parameters


def test_lstm_wants_lengths_that_no_transformer_gives(backbone_path):
    for module in (st_transformer(backbone_path()), CausalTransformer(backbone_path())):
        with pytest.raises(KeyError, match="sentence_lengths"):
            read(module, [LSTM(32, 8)], TEXTS[:1])


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", third(1))
def test_the_layers_are_those_of_transformer(architecture, backbone_path):
    """The same, in the same order, on every architecture; and no hooks are left that cannot be pickled."""
    path = backbone_path(architecture)
    theirs = st_transformer(path, output_hidden_states=True)
    ours = CausalTransformer(path, config_kwargs={"output_hidden_states": True}).eval()
    for text in TEXTS:
        with torch.inference_mode():
            expected = theirs(theirs.preprocess([text]))["all_layer_embeddings"]
            found = ours(ours.preprocess([text]))["all_layer_embeddings"]
        assert isinstance(found, tuple)
        assert len(found) == len(expected) == 4
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < 1e-6
    model = pipeline(ours)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).encode(TEXTS), model.encode(TEXTS))


MODULES = {
    "classical": CausalTransformer,
    "prompt": lambda path: CausalTransformer(path, template='In a word: {text}:"', pool_over="all"),
    "last": lambda path: CausalTransformer(path, rows="last"),
    "short": lambda path: CausalTransformer(path, output_layer=2),
    "both ways": lambda path: CausalTransformer(path, bidirectional_layers=2),
    "bag": InputEmbeddings,
    "echo": EchoModule,
    "repeated": lambda path: EchoModule(path, repetitions=3, pool_copies="repeated"),
    "reba": ReBAModule,
    "reba, last": lambda path: ReBAModule(path, rows="last"),
    "reba, normalized": lambda path: ReBAModule(path, normalize_weights=True),
    "reba, chunks": lambda path: ReBAModule(path, chunk_length=5),
    "refined thought": lambda path: RefinedThoughtModule(path, iterations=3),
    "kv re-routing": KVReroutingModule,
    "meta-eol": lambda path: MetaEOLModule(path, templates=["so {text} is", "{text} means"]),
    "token prepending": lambda path: TokenPrependingModule(path, output_layer=3),
    "contrastive prompting": lambda path: ContrastivePromptingModule(path, contrast_layer=1, final_norm=True),
    "layer states": LayerStates,
}


@pytest.fixture(scope="module")
def qwen(backbone_path):
    """A backbone of these tests' own: they change the configurations of what is made on it."""
    return CausalTransformer(backbone_path("qwen3"))


#: Others stand for these: a prompt is read as a text is, and one row as all are.
FURTHER = ("prompt", "repeated", "reba, normalized", "reba, last")


@pytest.mark.parametrize("kind", [long(kind) if kind in FURTHER else kind for kind in MODULES])
def test_every_module_hands_on_its_layers(kind, qwen, monkeypatch):
    module = MODULES[kind](qwen).eval()
    texts = [*TEXTS[:2], "a", ""]
    module._warned_empty = True
    with torch.inference_mode():
        expected = module(module.preprocess(texts))
        assert "all_layer_embeddings" not in expected
        module.model.config.output_hidden_states = True
        features = module.preprocess(texts)
        found = module(features)
        assert found is features, "as ST's Transformer does"
        layers = found.pop("all_layer_embeddings")
        assert found.keys() == expected.keys()
        assert all(relative_error(found[name].float(), expected[name].float()) < 1e-6 for name in found)
        assert torch.equal(layers[-1], found["token_embeddings"])
        assert len(layers) == {"bag": 1, "short": 3}.get(kind, 4)
        for layer in layers:
            assert layer.shape == layers[-1].shape
            assert not layer[-1].any(), "nothing of an empty text"
            assert not layer[found["attention_mask"] == 0].any(), "nothing of padding"
        # A batch that is run in parts is the same batch.
        monkeypatch.setattr(type(module), "CPU_TOKENS", 1)
        again = module(module.preprocess(texts))["all_layer_embeddings"]
        assert all(relative_error(one, other) < 1e-5 for one, other in zip(again, layers, strict=True))
    assert pickle.loads(pickle.dumps(module)).model.config.output_hidden_states


class AfterLayer:
    """A model as its oracle sees it whose last hidden states are those of an earlier layer, and whose maps are all."""

    def __init__(self, model, layer):
        self.model = model
        self.layer = layer

    def __call__(self, **kwargs):
        output = self.model(**kwargs, output_hidden_states=True)
        output.last_hidden_state = output.hidden_states[self.layer]
        return output


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "bloom"])
def test_each_layer_is_read_as_the_last_one_is(architecture, backbone_path, eager, token_ids):
    """With ReBA's weights, which are those of the whole pass, and Echo's copy."""
    for kind, oracle in ((ReBAModule, oracles.algorithm_2), (EchoModule, oracles.echo)):
        module = kind(backbone_path(architecture), config_kwargs={"output_hidden_states": True}).eval()
        with torch.inference_mode():
            found = module(module.preprocess(TEXTS[:2]))
        for row, text in enumerate(TEXTS[:2]):
            for layer, states in enumerate(found["all_layer_embeddings"]):
                expected = oracle(AfterLayer(eager(architecture), layer), token_ids(text), 2)
                assert relative_error(states[row][found["attention_mask"][row].bool()], expected) < 1e-5


def test_a_refined_layer_is_that_of_the_last_pass(backbone_path):
    """The cheap passes and the whole ones, whose states are there to be seen."""
    module = RefinedThoughtModule(backbone_path(), iterations=3, config_kwargs={"output_hidden_states": True}).eval()
    with torch.inference_mode():
        cheap = module(module.preprocess(TEXTS))["all_layer_embeddings"]
        module._reuses_cache = False
        whole = module(module.preprocess(TEXTS))["all_layer_embeddings"]
        module.model.config.output_hidden_states = False
        runs = []
        hook = module.model.layers[1].register_forward_hook(lambda layer, args, output: runs.append(output))
        module(module.preprocess(TEXTS[:1]))
        hook.remove()
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(cheap, whole, strict=True))
    end = runs[-1].shape[1] - 1
    # The memory takes a place in the pass, and none in what is read.
    assert relative_error(whole[2][0, end - 1], runs[-1][0, end]) < 1e-5


def test_a_method_that_reads_no_hidden_states_says_so(backbone_path):
    module = ValueAggregationModule(backbone_path(), config_kwargs={"output_hidden_states": True})
    with pytest.raises(ValueError, match=r"ValueAggregationModule does not read hidden states.*= False, or use Causal"):
        pipeline(module).encode(TEXTS)


def test_a_method_that_reads_two_layers_says_so(backbone_path):
    module = EarlyLateModule(backbone_path(), config_kwargs={"output_hidden_states": True})
    with pytest.raises(ValueError, match=r"EarlyLateModule does not read hidden states of one layer alone"):
        pipeline(module).encode(TEXTS)


def test_layers_are_not_recorded_where_they_run_twice(backbone_path):
    module = CausalTransformer(backbone_path(), config_kwargs={"output_hidden_states": True}).train()
    module.model.gradient_checkpointing_enable()
    with pytest.raises(
        ValueError, match="runs each layer a second time, .* through CausalTransformer with output_hidden_states=True"
    ):
        module(module.preprocess(TEXTS))


@pytest.mark.parametrize("kind", [CausalTransformer, EchoModule])
def test_a_loss_over_layers(kind, backbone_path):
    """ST's AdaptiveLayerLoss asks for the layers itself, and reads them where its Transformer leaves them."""
    model = pipeline(kind(backbone_path()))
    model.train()
    features = [model.preprocess(TEXTS[:2]), model.preprocess(TEXTS[2:4])]
    labels = torch.tensor([0.2, 0.9])
    loss = losses.AdaptiveLayerLoss(model, losses.CosineSimilarityLoss(model), n_layers_per_step=-1, kl_temperature=0)
    found = loss([dict(column) for column in features], labels)
    found.backward()
    assert model[0].model.layers[0].mlp.up_proj.weight.grad.norm() > 0
    model[0].model.config.output_hidden_states = True
    total = 0.0
    with torch.no_grad():
        read = [model[0](dict(column)) for column in features]
        *earlier, last = zip(*(column["all_layer_embeddings"] for column in read), strict=True)
        # Early versions of the loss weigh layer i by 1 / (1 + i).
        uniform = "layer_weighting" in inspect.signature(losses.AdaptiveLayerLoss).parameters
        weights = [1 / len(earlier) / (1 if uniform else 1 + index) for index in range(len(earlier))]
        for layer, weight in ((last, 1.0), *zip(earlier, weights, strict=True)):
            pooled = [
                model[1]({**column, "token_embeddings": states})["sentence_embedding"]
                for column, states in zip(read, layer, strict=True)
            ]
            total += weight * (torch.cosine_similarity(*pooled) - labels).square().mean()
    assert relative_error(found.detach(), total) < 1e-5


def test_it_survives_saving(backbone_path, tmp_path):
    first = EchoModule(backbone_path(), config_kwargs={"output_hidden_states": True})
    model = SentenceTransformer(modules=[first, weighted_layers(), Pooling(32, "mean")], device="cpu")
    model.save_pretrained(str(tmp_path))
    vectors = model.encode(TEXTS)
    assert np.array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), vectors)
    assert relative_error(vectors, pipeline(EchoModule(backbone_path())).encode(TEXTS)) > 0.01
