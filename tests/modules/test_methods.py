"""Every method: equal to its definition and an archive, independent of its batch, the same saved, threaded, trained."""

from __future__ import annotations

import copy
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import GPT2Config, GPT2Model, masking_utils

import st_reba
from st_reba import modules

from .. import backbones, oracles
from ..backbones import ARCHITECTURES, OWN_ATTENTION, TEXTS
from ..conftest import LONG, long, pipeline, relative_error, reloaded
from ..fixtures import golden
from .methods import EACH_MODULE, FURTHER, ORACLES, RECIPES, TOLERANCE, TOLERANCES, Naive, expected, read

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")

#: Of architectures; in each, one like Llama, whose heads share keys; one with windows; and one with learned positions
#: or attention of its own.
THIRDS = (("llama", "gemma2_softcap", "bloom"), ("qwen2", "mistral_window", "gpt2"), ("qwen3", "gemma3", "falcon"))
#: Of several lengths: Chinese, a long one, and one token.
FEW = TEXTS[1:4]


def made(recipe, backbone, **more):
    kind, given = RECIPES[recipe]
    return kind(backbone, **{**given, **more})


def refused_with_its_own_attention(recipe) -> bool:
    """Whether the method watches or changes the attention of each layer."""
    kind, given = RECIPES[recipe]
    watches = kind is st_reba.RefinedThoughtModule and given["iterations"] > 1
    turns = given.get("bidirectional_layers") or kind in (st_reba.BidirectionalLastLayer, st_reba.NoSinkModule)
    always = kind in (st_reba.KVReroutingModule, st_reba.AttentionPoolingModule, st_reba.ReBAModule)
    return bool(watches or turns or always)


# Methods take turns in the architectures; ReBA, which looks at each of its maps, takes all.
@pytest.mark.parametrize(
    ("recipe", "architecture"),
    [
        (recipe, architecture)
        if recipe == "reba-2" or architecture in THIRDS[number % 3]
        else long(recipe, architecture)
        for number, recipe in enumerate(RECIPES)
        for architecture in ARCHITECTURES
    ],
)
def test_oracle(recipe, architecture, shared, eager, token_ids):
    if architecture in OWN_ATTENTION and refused_with_its_own_attention(recipe):
        with pytest.raises(ValueError, match=r"cannot be (watched|re-routed|made to attend both ways)"):
            made(recipe, shared(architecture))
        return
    module = made(recipe, shared(architecture))
    naive = Naive(eager(architecture), token_ids, architecture)
    *together, nothing = read(module, [*FEW, ""])
    assert len(nothing)
    assert not nothing.any()
    with torch.no_grad():
        for text, states in zip(FEW, together, strict=True):
            assert relative_error(states, expected(naive, *RECIPES[recipe], text)) < TOLERANCE, text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_backbones_attend_far_from_uniformly(architecture, eager, token_ids):
    """Otherwise the oracles could not tell one attention from another."""
    with torch.no_grad():
        _, maps = oracles.run(eager(architecture), token_ids(TEXTS[2]) * 2)
    ratio = torch.stack([layer.max(dim=-1).values[:, -1] * (layer[0, -1] > 0).sum() for layer in maps])
    assert ratio.mean() > 2


@pytest.mark.parametrize("recipe", [
    "classical", "prompteol", "echo-3 repeated", "reba-2", "reba-3 last", "metaeol", "token prepending",
    "value aggregation", "early and late", "echo topic", "layer states", "contrastive prompting",
])  # fmt: skip
def test_the_layers_that_run_and_those_that_attend_both_ways_are_settings_of_any(recipe, shared, eager, token_ids):
    module = made(recipe, shared(), bidirectional_layers=1, output_layer=2)
    naive = Naive(oracles.shortened(eager(), 2), token_ids)
    with torch.no_grad(), oracles.both_ways(naive.model, 1):
        for text, states in zip(FEW, read(module, FEW), strict=True):
            assert relative_error(states, expected(naive, *RECIPES[recipe], text)) < TOLERANCE, text


def test_each_class_has_an_oracle():
    assert {kind for kind, _ in RECIPES.values()} == ORACLES.keys()


@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_gradients_are_those_of_the_definition(recipe, backbone_path, eager, token_ids):
    module = made(recipe, backbone_path()).train()
    features = module(module.preprocess(TEXTS[2:3]))
    found = features["layer_states"] if isinstance(module, st_reba.LayerStates) else features["token_embeddings"]
    own = dict(module.model.named_parameters())
    # Something else for each value: the sum of what a norm gives has no gradient.
    slopes = torch.linspace(-1, 1, found[0].numel()).view_as(found[0])
    gradients = torch.autograd.grad((found[0] * slopes).sum(), list(own.values()), allow_unused=True)
    assert any(gradient is not None and gradient.norm() > 0 for gradient in gradients)
    if isinstance(module, st_reba.TokenPrependingModule):
        return  # its oracle computes with a copy of the weights
    reference = dict(eager().named_parameters())
    states = expected(Naive(eager(), token_ids), *RECIPES[recipe], TEXTS[2])
    wanted = torch.autograd.grad((states * slopes).sum(), [reference[name] for name in own], allow_unused=True)
    for name, gradient, other in zip(own, gradients, wanted, strict=True):
        if other is None or not other.any():
            assert gradient is None or not gradient.any(), name
        else:
            assert relative_error(gradient, other) < 1e-4, name


words = st.sampled_from(
    ["", " ", "\t\n", "a", "cat", "我", "自然语言", "e\u0301", "👩‍👩‍👧", "🥊", "ß", "ﷺ", "\u200b", "\x00", "<|end|>",
     "{text}", "{0}"]
)  # fmt: skip
anything = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(words, max_size=12).map(" ".join),
    # Longer than what any of the modules reads.
    st.sampled_from(["x" * 1_200, "汉字" * 300, "a b " * 300]),
)
POOLINGS = ("mean", "lasttoken", "max", "cls", "weightedmean", "mean_sqrt_len_tokens")


@pytest.fixture(scope="module")
def model(shared):
    """``model(recipe, kind, pooling)``; pipelines share the module, which takes time to make."""
    modules = {}

    def get(recipe, kind="bytes", pooling="mean"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (recipe, kind) not in modules:
                modules[recipe, kind] = made(recipe, shared("llama", kind))
                modules[recipe, kind]._warned_empty = True
            return pipeline(modules[recipe, kind], pooling)

    return get


@pytest.mark.parametrize("kind", ["bytes", long("bert"), long("sentencepiece")])
@pytest.mark.parametrize("recipe", EACH_MODULE)
@settings(max_examples=30 if LONG else 2)
@given(batch=st.lists(anything, min_size=1, max_size=4 if LONG else 3), data=st.data())
def test_a_batch_is_its_texts(recipe, kind, model, batch, data):
    encode = model(recipe, kind, data.draw(st.sampled_from(POOLINGS))).encode
    together = encode(batch, batch_size=len(batch))
    assert np.isfinite(together).all()
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = encode([batch[index] for index in order], batch_size=data.draw(st.integers(1, 5)))
    alone = encode(batch, batch_size=1)
    allowed = TOLERANCES.get(recipe, TOLERANCE) * np.linalg.norm(alone, axis=1).clip(min=1e-6)
    assert (np.linalg.norm(together - alone, axis=1) < allowed).all()
    assert (np.linalg.norm(shuffled - alone[order], axis=1) < allowed[order]).all()
    assert not encode([""]).any()


#: As ST's trainer gives them; ``encode`` sorts.
UNSORTED = ["A cat, and a dog that sleeps.", "Cat", "The cat sat on the old mat again.", "A dog", "", "Cats sleep."]


@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_parts_of_a_batch_give_the_same(recipe, model, monkeypatch):
    whole = model(recipe)
    alone = np.stack([whole.encode(text) for text in UNSORTED])
    kind, rows = type(whole[0]), []
    original = kind.read

    def counted(self, layout, *further):
        rows.append(len(layout.input_ids))
        return original(self, layout, *further)

    monkeypatch.setattr(kind, "read", counted)
    for budget in ("TOKENS_PER_THREAD", "PASS_BYTES") if kind is st_reba.ReBAModule else ("TOKENS_PER_THREAD",):
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(kind, budget, 1)
            embeddings = whole(whole.preprocess(UNSORTED))["sentence_embedding"]
        assert relative_error(embeddings.numpy(), alone) < TOLERANCE
        assert rows == [1] * len(UNSORTED)
        rows.clear()


@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_padding_of_sentence_transformers_is_no_text(recipe, model):
    """A loss joins columns of texts, padded with zeros; 0 is the first copy of a text, too."""
    whole = model(recipe)
    features = whole.preprocess(UNSORTED)
    wider = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in features.items()}
    with torch.no_grad():
        found, expected = (whole(own)["sentence_embedding"].numpy() for own in (wider, features))
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_bfloat16_is_near(recipe, backbone_path, shared):
    architecture = "gemma2_softcap" if "reba" in recipe else "llama"
    half = pipeline(made(recipe, backbone_path(architecture), model_kwargs={"dtype": "bfloat16"}))
    vectors = half.encode(FEW, convert_to_tensor=True)
    assert half.dtype == vectors.dtype == torch.bfloat16
    wanted = pipeline(made(recipe, shared(architecture))).encode(FEW, convert_to_tensor=True)
    assert (1 - torch.cosine_similarity(vectors.float(), wanted)).max() < 1e-2


def test_threads(shared):
    """All methods at once on one backbone, and some on others, each in two threads."""
    others = [("reba-2", "gpt2"), ("thought-4", "qwen3"), ("kv re-routing", "gemma3"), ("token prepending", "bloom")]
    names = [*((recipe, "llama") for recipe in RECIPES if recipe not in FURTHER), *others]
    models = [pipeline(made(recipe, shared(architecture))) for recipe, architecture in names]
    alone = [model.encode(TEXTS) for model in models]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(model.encode, TEXTS) for _ in range(2) for model in models]
    for number, job in enumerate(jobs):
        assert np.array_equal(job.result(), alone[number % len(models)]), names[number % len(models)]


@pytest.mark.parametrize("kind", ["bytes", long("bert")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_and_loaded(recipe, kind, shared, tmp_path):
    module = made(recipe, shared("llama", kind))
    model = pipeline(module, "mean", Dense(module.get_embedding_dimension(), 8), Normalize())
    loaded = reloaded(model, tmp_path)
    assert type(loaded[0]) is type(module)
    assert loaded[0].get_config_dict() == module.get_config_dict()
    assert loaded.max_seq_length == model.max_seq_length
    assert np.array_equal(loaded.encode(FEW), model.encode(FEW))
    # By its extra_repr, ST's merge tells whether two modules are alike.
    own = [name for name in module.config_keys if name not in Transformer.config_keys]
    assert loaded[0].extra_repr() == ", ".join(f"{name}={getattr(module, name)!r}" for name in own)
    again = tmp_path / "again"
    loaded.save_pretrained(str(again), create_model_card=False)
    for path in (path for path in again.rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(again)).read_bytes(), path.name


@pytest.mark.parametrize("case", [*EACH_MODULE, "one by one"])
def test_nothing_but_the_layout_is_asked_for(case, shared, monkeypatch):
    """An accelerator works on until the CPU asks it for a number: once a batch, for the layout.

    The meta device stands in for an accelerator: its tensors have shapes and no values, so whatever else asks for a
    value fails.
    """
    # transformers itself asks once a pass, before the first layer, whether positions are of several texts in a row.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    kind, settings = {**RECIPES, "one by one": (st_reba.CausalTransformer, {"deterministic": True})}[case]
    module = copy.deepcopy(kind(shared(), **settings)).eval()
    pool = Pooling(module.get_embedding_dimension(), "lasttoken")
    with torch.no_grad():
        expected = pool(module(module.preprocess(UNSORTED)))
        module.to("meta")
        found = pool(module(module.preprocess(UNSORTED)))
    for name in ("token_embeddings", "attention_mask", "input_ids", "sentence_embedding"):
        assert found[name].is_meta
        assert found[name].shape == expected[name].shape
    assert found.keys() == expected.keys()


class TestDeterministic:
    """deterministic=True: the same to the bit, whatever the batch."""

    TEXTS = ("a", "The cat sat on the mat.", "我爱自然语言处理。", "", "one two three four five six " * 3, "x" * 20)

    @pytest.fixture(scope="class")
    def trained(self, demo_path):
        """``trained[dtype]``: trained weights, which round as all do."""
        return {
            dtype: st_reba.CausalTransformer(demo_path, model_kwargs={"dtype": dtype})
            for dtype in ("float32", "bfloat16")
        }

    def whatever_its_batch(self, model):
        alone = torch.cat([model.encode([text], convert_to_tensor=True) for text in self.TEXTS])
        order = torch.tensor([4, 2, 0, 5, 3, 1])
        shuffled = model.encode([self.TEXTS[place] for place in order], batch_size=4, convert_to_tensor=True)
        return shuffled.equal(alone[order])

    SAME_BITS = [
        ("bidirectional", "bfloat16"), ("contrastive prompting", "bfloat16"),
        ("thought-4", "float32"), ("metaeol", "bfloat16"), ("echo-2", "bfloat16"), ("reba-2", "bfloat16"),
    ]  # fmt: skip

    @pytest.mark.parametrize(("recipe", "dtype"), SAME_BITS)
    def test_every_batch_gives_the_same_bits(self, recipe, dtype, trained):
        module = made(recipe, trained[dtype], deterministic=True)
        assert self.whatever_its_batch(pipeline(module, "mean", Normalize()))

    @pytest.mark.parametrize("kind", [st_reba.WhiteningTransform, st_reba.PartwiseWhitening])
    def test_what_stands_behind_keeps_to_it(self, kind, trained):
        model = pipeline(st_reba.CausalTransformer(trained["bfloat16"], deterministic=True))
        fitted = kind.fit(model, [f"{word} and {other}" for word in "abcd" for other in "efg"])
        assert self.whatever_its_batch(SentenceTransformer(modules=[*model, fitted], device="cpu"))

    def test_without_it_batches_round(self, trained):
        """So that the tests above can fail."""
        assert not all(self.whatever_its_batch(pipeline(st_reba.CausalTransformer(kept))) for kept in trained.values())


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A backbone of as many layers as the papers' models have."""
    model = GPT2Model(GPT2Config(vocab_size=384, n_embd=8, n_layer=32, n_head=1, n_positions=256)).eval()
    return st_reba.CausalTransformer(backbones.save(model, tmp_path_factory.mktemp("deep")))


USUAL = [
    # The paper's layers 5 and 7 of 32, counted from 1, and its strengths; never above what is run.
    (st_reba.ContrastivePromptingModule, {}, 32, {"contrast_layer": 4, "scale": 2.0, "output_layer": 27}),
    (st_reba.ContrastivePromptingModule, {"template": "knowledge"}, 32, {"contrast_layer": 6, "output_layer": 31}),
    (st_reba.ContrastivePromptingModule, {}, 1, {"contrast_layer": 0, "output_layer": 1, "final_norm": False}),
    (st_reba.TokenPrependingModule, {}, 32, {"prepend_layers": 8, "output_layer": 27, "final_norm": False}),
    # The middle third; half of the layers, and half of these.
    (st_reba.KVReroutingModule, {}, 8, {"layers": [2, 3, 4, 5]}),
    (st_reba.NoSinkModule, {}, 8, {"bidirectional_layers": 4, "layers": [6, 7]}),
    # An eighth of the way up the whole model, wherever it stops.
    (st_reba.EarlyLateModule, {"output_layer": 15}, 30, {"early_layer": 4, "output_layer": 15}),
    # A share of the layers that are run, and below the last.
    (st_reba.TopicModule, {"output_layer": 10}, 30, {"lower_layers": [9]}),
]


@pytest.mark.parametrize(("kind", "settings", "layers", "usual"), USUAL)
def test_what_is_usual(kind, settings, layers, usual, deep):
    module = kind(st_reba.CausalTransformer(deep, output_layer=layers), **settings)
    assert {name: getattr(module, name) for name in usual} == usual


@pytest.fixture(scope="module")
def archive():
    with np.load(golden.ARCHIVE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    @functools.cache
    def backbone(architecture):
        return st_reba.CausalTransformer(golden.save(tmp_path_factory.mktemp(architecture), architecture))

    return backbone


#: Each on Llama; the others take turns.
GOLDEN = [
    (case, name) if name in ("llama", golden.ARCHITECTURES[1 + number % 3]) else long(case, name)
    for number, case in enumerate(golden.known_cases())
    for name in golden.ARCHITECTURES
]


@pytest.mark.parametrize(("case", "architecture"), GOLDEN, ids=lambda value: getattr(value, "name", value))
def test_golden(case, architecture, archive, loaded):
    module = getattr(modules, case.module)(loaded(architecture), **case.settings)
    for call in case.calls:
        for key, values in golden.found(case, module, call):
            if not key.endswith("vectors"):
                expected = archive[key]
                if key.endswith("counts"):
                    # An empty text has one zero vector or several.
                    values, expected = values[1:], expected[1:]
                assert np.array_equal(values, expected), key
                continue
            expected = archive[f"{architecture}/{key}"]
            worst = np.abs(values - expected)[~np.isnan(expected)].max()
            assert worst <= case.tolerance(expected), f"{key}: {worst:.1e}"
