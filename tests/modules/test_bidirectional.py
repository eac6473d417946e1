from __future__ import annotations

import pytest
import torch

from st_reba import TEMPLATES, BidirectionalLastLayer, CausalTransformer, EchoModule, ReBAModule, RefinedThoughtModule
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.run import Pass, passing

from .. import oracles
from ..backbones import ARCHITECTURES, DEMO_MODEL, OWN_ATTENTION, TEXTS, third
from ..conftest import long, paired, pipeline, relative_error

ARCHITECTURES = tuple(name for name in ARCHITECTURES if name not in OWN_ATTENTION)
TOLERANCE = 1e-5


@pytest.mark.parametrize(("architecture", "count"), paired(third(0, ARCHITECTURES), [1, 2]))
class TestOracle:
    def assert_words(self, module, expected):
        words = pipeline(module).encode(TEXTS, output_value="token_embeddings", batch_size=len(TEXTS))
        for text, value in zip(TEXTS, words, strict=True):
            assert relative_error(value, expected(text)) < TOLERANCE, text

    def test_classical(self, architecture, count, shared, eager, token_ids):
        module = CausalTransformer(shared(architecture), bidirectional_layers=count)
        with oracles.both_ways(eager(architecture), count):
            self.assert_words(module, lambda text: oracles.classical(eager(architecture), token_ids(text)))

    def test_echo(self, architecture, count, shared, eager, token_ids):
        module = EchoModule(shared(architecture), bidirectional_layers=count)
        with oracles.both_ways(eager(architecture), count):
            self.assert_words(module, lambda text: oracles.echo(eager(architecture), token_ids(text), 2))

    def test_reba(self, architecture, count, shared, eager, token_ids):
        """Here the maps of the last layers are not triangular, and symmetrising counts both halves."""
        with oracles.both_ways(eager(architecture), count):
            words = {text: oracles.algorithm_2(eager(architecture), token_ids(text), 2) for text in TEXTS}
        module = shared(architecture)
        self.assert_words(ReBAModule(module, bidirectional_layers=count), words.get)
        vectors = pipeline(ReBAModule(module, bidirectional_layers=count, rows="last")).encode(TEXTS, batch_size=5)
        for text, vector in zip(TEXTS, vectors, strict=True):
            assert relative_error(vector, words[text][-1]) < TOLERANCE


@pytest.mark.parametrize(("architecture", "count"), paired(third(1, ARCHITECTURES), [1, 2, 0]))
def test_causality(architecture, count, shared):
    """The last token reaches the first token's state in the last layer if and only if that layer attends both ways,
    and never before the first layer that does."""
    module = CausalTransformer(shared(architecture), bidirectional_layers=count)
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 10]])
    turned = range(3 - count, 3)
    with torch.no_grad(), passing(Pass(masking=Bidirectional(turned, torch.ones(2, 5, dtype=torch.bool)))):
        states = module.model(input_ids=ids, output_hidden_states=True).hidden_states
    changed = [not torch.allclose(layer[0, 0], layer[1, 0], atol=1e-5) for layer in states]
    assert changed == [False] * (4 - count) + [True] * count


@pytest.mark.parametrize(
    ("module_class", "dtype"),
    paired(
        [BidirectionalLastLayer, ReBAModule, *map(long, [EchoModule, RefinedThoughtModule])], ["bfloat16", "float16"]
    ),
)
def test_a_small_effect_in_half_precision_is_an_effect(module_class, dtype):
    """In the demo model, one bidirectional layer moves the first token by less than bfloat16's rounding might."""
    module = module_class(str(DEMO_MODEL), bidirectional_layers=1, model_kwargs={"dtype": dtype})
    assert module.bidirectional_layers == 1


def test_the_prompt_is_read_to_its_end(shared):
    model = pipeline(BidirectionalLastLayer(shared()), "lasttoken")
    item = model.encode("the cat", output_value=None)
    tokenizer = model.tokenizer
    front, behind = TEMPLATES["representative-word"].split("{text}")
    # The blank before the text stands in its first token, as in the whole string.
    assert front.endswith(" ")
    whole = tokenizer(f"{front}the cat{behind}")["input_ids"]
    assert item["input_ids"].tolist() == whole[len(tokenizer(front[:-1])["input_ids"]) :]


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
def test_the_whole_layout(kind, backbone_path):
    """The ``avg`` of the authors' training command: every token of the input, what stands before the text too."""
    path = backbone_path("llama", kind)
    module = BidirectionalLastLayer(path, pool_over="whole")
    features = module.preprocess(["the cat"], prompt="query: ")
    given = module(dict(features))
    assert given["input_ids"].tolist() == features["input_ids"].tolist()
    words = pipeline(module).encode(["the cat", "a"], output_value="token_embeddings")
    for value, vector in zip(words, pipeline(module).encode(["the cat", "a"]), strict=True):
        assert relative_error(vector, value.mean(dim=0)) < TOLERANCE


@pytest.mark.parametrize("module_class", [CausalTransformer, EchoModule])
def test_the_whole_layout_is_what_sts_transformer_reads(module_class, shared, eager, token_ids):
    module = module_class(shared(), pool_over="whole")
    vectors = pipeline(module).encode(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        states, _ = oracles.run(eager(), token_ids(text) * module.copies)
        assert relative_error(vector, states.mean(dim=0)) < TOLERANCE


def test_presets():
    assert TEMPLATES["representative-word"] == 'The representative word for sentence {text} is:"'
    assert TEMPLATES["representative-word-paper"] == 'The representative word for {text} is:"'


def test_conditional_similarity(shared):
    """The condition travels as the prompt."""
    model = pipeline(BidirectionalLastLayer(shared(), template="csts"), "lasttoken")
    one, other = (model.encode("the cat sat", prompt=f"Given the context {what}, ") for what in ("colour", "place"))
    assert relative_error(one, other) > 1e-3


@pytest.mark.parametrize("architecture", OWN_ATTENTION)
def test_architectures_that_cannot(architecture, shared):
    with pytest.raises(ValueError, match="bidirectional_layers=1: the last layers of .* cannot be made to attend both"):
        BidirectionalLastLayer(shared(architecture))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "bidirectional_layers=0: give 1 or more, or use CausalTransformer"),
        (-1, "bidirectional_layers=-1: give the number of last layers"),
        (1.0, "bidirectional_layers=1.0: give the number of last layers"),
        (4, "bidirectional_layers=4: LlamaModel has 3 layers; use 0 to 3"),
    ],
)
def test_wrong_counts(count, message, shared):
    with pytest.raises(ValueError, match=message):
        BidirectionalLastLayer(shared(), bidirectional_layers=count)


def test_a_shared_backbone_stays_causal_for_others(backbone_path):
    classical = CausalTransformer(backbone_path())
    before = pipeline(classical).encode(TEXTS)
    both = BidirectionalLastLayer(classical)
    assert relative_error(pipeline(classical).encode(TEXTS), before) < 1e-6
    alone = pipeline(BidirectionalLastLayer(backbone_path())).encode(TEXTS)
    assert relative_error(pipeline(both).encode(TEXTS), alone) < 1e-6
