"""Which layers' states are read: of a model without its last layers, without its final norm, and all of them."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling, WordWeights
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from st_reba import (
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
)
from st_reba import ValueAggregationModule as Values
from st_reba.lm.anatomy import layer_paths, shortened
from st_reba.lm.backbone import _PER_LAYER
from st_reba.lm.run import Hook, hooked

from .. import oracles
from ..backbones import FEW, TEXTS, VOCABULARY
from ..catalogued import completed
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize("name", FEW)
def test_stops_after_a_layer_and_is_saved_without_the_others(name, shared, eager, token_ids, tmp_path):
    for layer in (1, 2):
        module = CausalTransformer(shared(name), output_layer=layer)
        assert len(layer_paths(module.model)) == layer
        model = pipeline(module, "lasttoken")
        vectors = model.encode(TEXTS[:3])
        for vector, text in zip(vectors, TEXTS[:3], strict=True):
            expected = oracles.after_each_layer(eager(name), name, token_ids(text))[layer][-1]
            assert relative_error(vector, expected) < 1e-5
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path))
    assert again[0].output_layer == again[0].model.config.num_hidden_layers == 2
    assert (again.encode(TEXTS[:3]) == vectors).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lists_that_are_as_long_as_the_model_is_deep(name, eager):
    """Those that say something of each layer are cut with the layers; the ids of end tokens are not."""
    model = copy.deepcopy(eager(name))
    model.config.eos_token_id = [5, 6, 7]
    model.config.suppress_tokens = [1, 2, 3]
    short = shortened(model, 2).config
    assert short.eos_token_id == [5, 6, 7]
    assert short.suppress_tokens == [1, 2, 3]
    if name == "gemma3":
        assert short.layer_types == model.config.layer_types[:2]
        assert len(model.config.layer_types) == 3


@pytest.mark.long
def test_every_list_of_transformers_that_grows_with_the_depth_is_known():
    """A new architecture's list that is not known would be saved too long for its model."""
    unknown = {}
    for kind in {CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}:
        # Some can have no such depth, whatever their own checks raise.
        with contextlib.suppress(Exception):
            shallow, deep = (vars(kind(num_hidden_layers=depth)) for depth in (7, 11))
            lists = [name for name, value in shallow.items() if isinstance(value, list) and "layer" not in name]
            grown = {name for name in lists if (len(shallow[name]), len(deep.get(name) or ())) == (7, 11)}
            unknown |= dict.fromkeys(grown - _PER_LAYER, kind.__name__)
    assert unknown == {}


@pytest.mark.parametrize("layer", [0, 4, -4, True, 1.0, "2"])
def test_layers_that_there_are_not(layer, shared):
    with pytest.raises(ValueError, match=r"output_layer=.*LlamaModel has 3 layers; give .* 1 to 3"):
        CausalTransformer(shared(), output_layer=layer)


def test_hooks_nest_and_end_with_their_block():
    linear = torch.nn.Linear(2, 2)
    states = torch.ones(1, 1, 2)
    plain = linear(states)
    with hooked({linear: Hook(after=lambda out: out + 1)}), hooked({linear: Hook(after=lambda out: out * 2)}):
        assert torch.equal(linear(states), (plain + 1) * 2)
    with hooked({linear: Hook(before=lambda given: given * 0)}):
        assert torch.equal(linear(input=states), linear(states * 0))
    assert torch.equal(linear(states), plain)


def test_a_short_model_that_computes_something_else_is_refused(backbone_path, monkeypatch):
    model = CausalTransformer(backbone_path()).model
    kind = type(model.layers[0])
    forward = kind.forward

    def by_the_depth(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + self.self_attn.config.num_hidden_layers

    monkeypatch.setattr(kind, "forward", by_the_depth)
    with pytest.raises(ValueError, match="cannot be shortened to 1 layers: it then computes something else"):
        shortened(model, 1)


SHOWN = {"config_kwargs": {"output_hidden_states": True}}


def weighted_layers():
    weights = torch.nn.Parameter(torch.rand(3) + 0.1)
    return WeightedLayerPooling(32, num_hidden_layers=3, layer_start=1, layer_weights=weights)


READERS = {
    "WeightedLayerPooling": lambda: [weighted_layers(), Pooling(32, "mean")],
    "WordWeights": lambda: [
        WordWeights([str(word) for word in range(VOCABULARY)], {str(word): word % 7 for word in range(VOCABULARY)}),
        Pooling(32, ("mean", "max")),
    ],
    "SpladePooling": lambda: [SpladePooling("max")],
}


def read(module, following, texts):
    features = module.preprocess(texts)
    with torch.inference_mode():
        for part in (module, *following):
            features = part.eval()(features)
    return features["sentence_embedding"]


def st_transformer(path):
    # Eager, because its sdpa drops Gemma 2's soft cap in some versions.
    module = Transformer(path, model_kwargs={"attn_implementation": "eager"}, **SHOWN).eval()
    module.tokenizer.pad_token = module.tokenizer.pad_token or module.tokenizer.eos_token
    return module


@pytest.fixture(scope="module", params=[("llama", "bytes"), ("gpt2", "bert")], ids=lambda backbone: backbone[0])
def both(request, backbone_path):
    """ST's module and ours, with all layers."""
    path = backbone_path(*request.param)
    return st_transformer(path), CausalTransformer(path, pool_over="all", **SHOWN).eval()


@pytest.mark.parametrize("reader", READERS)
def test_what_it_reads_off_transformer(reader, both):
    """One text a batch, of every length: there ST's padding, which these modules read too, does not matter."""
    following, (theirs, ours) = READERS[reader](), both
    alone = []
    for text in TEXTS:
        expected = read(theirs, following, [text])
        alone.append(read(ours, following, [text]))
        assert relative_error(alone[-1], expected) < 1e-6, text
    # What stands behind ours gives a text what it gives it alone, padding or none.
    assert relative_error(read(ours, following, TEXTS), torch.cat(alone)) < 1e-5


META_EOL = {"metaeol": (MetaEOLModule, {"templates": ["so {text} is", "{text} means"]})}
#: Of every recipe that reads hidden states of one layer, and two settings that change how many there are.
KINDS = {
    "short": (CausalTransformer, {"output_layer": 2}),
    "last": (CausalTransformer, {"rows": "last"}),
    **{
        key: (module, {**settings, "output_layer": 3})
        for key, (module, settings) in completed(META_EOL).items()
        if module.reads_hidden_states
    },
}


@pytest.fixture(scope="module")
def qwen(backbone_path):
    """A backbone of these tests' own: they change the configurations of what is made on it."""
    return CausalTransformer(backbone_path("qwen3"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_hands_on_its_layers(kind, qwen, monkeypatch):
    module_class, settings = KINDS[kind]
    module = module_class(qwen, **settings).eval()
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
        assert len(layers) == {"bag-of-input-embeddings": 1, "short": 3}.get(kind, 4)
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


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"])
@pytest.mark.parametrize(("kind", "oracle"), [(ReBAModule, oracles.algorithm_2), (EchoModule, oracles.echo)])
def test_each_layer_is_read_as_the_last_one_is(architecture, kind, oracle, backbone_path, eager, token_ids):
    """With ReBA's weights, which are those of the whole pass, and Echo's copy."""
    module = kind(backbone_path(architecture), **SHOWN).eval()
    with torch.inference_mode():
        found = module(module.preprocess(TEXTS[:2]))
    for row, text in enumerate(TEXTS[:2]):
        for layer, states in enumerate(found["all_layer_embeddings"]):
            expected = oracle(AfterLayer(eager(architecture), layer), token_ids(text), 2)
            assert relative_error(states[row][found["attention_mask"][row].bool()], expected) < 1e-5


def test_a_refined_layer_is_that_of_the_last_pass(backbone_path):
    """Of the whole passes, whose states are there to be seen."""
    module = RefinedThoughtModule(backbone_path(), iterations=3, **SHOWN).eval()
    with torch.inference_mode():
        cheap = module(module.preprocess(TEXTS))["all_layer_embeddings"]
        module._reuses_cache = False
        runs = []
        module.model.layers[1].register_forward_hook(lambda layer, args, output: runs.append(output))
        whole = module(module.preprocess(TEXTS))["all_layer_embeddings"]
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(cheap, whole, strict=True))
    assert len(runs) == 3
    # The memory takes a place in the pass, and none in what is read.
    end = len(module.token_ids(TEXTS[:1])[0])
    assert relative_error(whole[2][0, end], runs[-1][0, end + 1]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Values, r"ValueAggregationModule does not read hidden states.*= False, or use Causal"),
        (EarlyLateModule, r"EarlyLateModule does not read hidden states of one layer alone"),
        (CausalTransformer, "runs each layer a second time, .* through CausalTransformer with output_hidden_states=Tr"),
    ],
)
def test_where_layers_cannot_be_handed_on(kind, message, backbone_path):
    module = kind(backbone_path(), **SHOWN)
    if kind is CausalTransformer:
        module.train().model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=message):
        module(module.preprocess(TEXTS))


def test_a_loss_over_layers(backbone_path):
    """ST's AdaptiveLayerLoss asks for the layers itself, and reads them where its Transformer leaves them."""
    path, found = backbone_path(), []
    for module in (st_transformer(path), CausalTransformer(path, pool_over="all")):
        model = pipeline(module).train()
        features = [model.preprocess(TEXTS[:1]), model.preprocess(TEXTS[2:3])]
        inner = CosineSimilarityLoss(model)
        loss = AdaptiveLayerLoss(model, inner, n_layers_per_step=-1, kl_temperature=0)
        value = loss(features, torch.tensor([0.2]))
        value.backward()
        found.append((value.detach(), module.model.layers[0].mlp.up_proj.weight.grad))
    assert relative_error(found[1][0], found[0][0]) < 1e-5
    assert relative_error(found[1][1], found[0][1]) < 1e-4
