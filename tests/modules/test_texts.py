"""How texts go in and vectors come out, whatever the method: prompts, special tokens, lengths, tokenizers, poolings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import (
    CausalTransformer,
    EchoModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
)
from st_reba.settings import NO_LIMIT

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import EACH_MODULE, RECIPES, TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


@pytest.mark.parametrize("variant", [{"padding_side": "right"}, {"padding_side": "left", "pad_token": "<|end|>"}])
def test_padding_side_and_pad_token_do_not_matter(variant, tmp_path, shared):
    backbone = CausalTransformer(backbones.save(backbones.backbone("llama"), tmp_path, **variant))
    for recipe in ("echo-2", "reba-2", "thought-2", "early and late"):
        kind, settings = RECIPES[recipe]
        found, expected = (pipeline(kind(own, **settings)).encode(TEXTS) for own in (backbone, shared()))
        assert np.array_equal(found, expected), recipe


def test_one_warning_for_empty_texts(shared):
    encode = pipeline(EchoModule(shared())).encode
    with pytest.warns(UserWarning, match="A text without tokens .* zero vector") as caught:
        encode(["", "a", "", ""], batch_size=1)
    assert len([warning for warning in caught if "without tokens" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode([""])


@pytest.mark.parametrize(("kind", "before", "after"), [("bert", [2], [3]), ("sentencepiece", [1], [])])
@pytest.mark.parametrize("prompt", ["", "the fox: "])
def test_prompt_and_special_tokens_stand_once_around_all_copies(kind, before, after, prompt, shared, eager):
    """They are context, never pooled."""
    backbone, model = shared("llama", kind), eager()
    methods = {
        ReBAModule(backbone): lambda *ids: oracles.algorithm_2(model, ids[0], 2, *ids[1:]),
        EchoModule(backbone): lambda *ids: oracles.echo(model, ids[0], 2, *ids[1:]),
    }
    for module, oracle in methods.items():
        found = pipeline(module).encode(TEXTS[:3], output_value="token_embeddings", prompt=prompt, batch_size=3)
        ids = [module.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, *TEXTS[:3])]
        for own, states in zip(ids[1:], found, strict=True):
            assert relative_error(states, oracle(own, before + ids[0], after).detach()) < TOLERANCE


def test_pool_over_all_begins_at_the_copy_that_is_read(shared):
    backbone = shared("llama", "bert")
    own, literal = (backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "fox"))
    repeated = {"template": "{text}{text}fox{text}", "pool_copies": "repeated"}
    cases = [
        (CausalTransformer, {}, None, [2, *own, 3]),
        (CausalTransformer, {}, "fox ", [*own, 3]),
        (CausalTransformer, {"template": "fox {text} fox"}, None, [*own, *literal, 3]),
        (EchoModule, repeated, None, [*own, *literal, *own, 3]),
    ]
    for kind, settings, prompt, expected in cases:
        module = kind(backbone, pool_over="all", **settings)
        assert pipeline(module).encode("the cat", prompt=prompt, output_value=None)["input_ids"].tolist() == expected


@pytest.mark.parametrize("recipe", ["reba-2", "metaeol"])
def test_a_batch_with_prompts_of_their_own(recipe, shared):
    """Methods that read the same stretch of all texts take prompts of one length; MetaEOL takes any."""
    kind, settings = RECIPES[recipe]
    encode = pipeline(kind(shared(), **settings)).encode
    alike = [{"prompt": f"{prompt} ", "text": text} for prompt, text in zip(("cat", "dog"), TEXTS, strict=False)]
    longer = [alike[0], {"prompt": "the dog and the cat: ", "text": TEXTS[1]}]
    for texts in (alike, longer):
        if texts is longer and kind is not MetaEOLModule:
            with pytest.raises(ValueError, match="prompts of different lengths, and the same stretch of all of them"):
                encode(texts)
        else:
            assert relative_error(encode(texts), np.concatenate([encode([each]) for each in texts])) < TOLERANCE


LONG = "word " * 3_000


class TestLength:
    @pytest.mark.parametrize(
        ("kind", "settings", "tokens", "length", "width"),
        [
            (EchoModule, {"repetitions": 3}, "bytes", 85, 255),
            (EchoModule, {}, "bert", 127, 256),
            (EchoModule, {"max_seq_length": 5}, "bytes", 5, 10),
            (RefinedThoughtModule, {"iterations": 1}, "bytes", 255, 256),
            (RefinedThoughtModule, {"iterations": 3}, "bytes", 254, 255),
        ],
    )
    def test_a_text_fills_the_room_of_one_copy_and_no_more(self, kind, settings, tokens, length, width, backbone_path):
        """Behind a prompt, it is cut shorter."""
        model = pipeline(kind(backbone_path("gpt2", tokens), **settings), "lasttoken")
        assert model.max_seq_length == length
        assert model[0].preprocess([LONG])["input_ids"].shape[1] == width
        assert np.isfinite(model.encode(LONG, prompt="a long enough prompt ")).all()

    def test_it_may_be_set_and_given_for_one_call(self, backbone_path):
        model = pipeline(EchoModule(backbone_path()))
        for length, expected in ((4, 4), (10_000, 128), (None, 128)):
            model.max_seq_length = length
            assert model.max_seq_length == expected
        features = model[0].preprocess([LONG], processing_kwargs={"text": {"max_length": 3}})
        assert features["input_ids"].shape[1] == 6

    def test_no_limit(self, tmp_path):
        path = backbones.save(backbones.backbone("bloom"), tmp_path, model_max_length=NO_LIMIT)
        module = EchoModule(path)
        assert module.max_seq_length is None
        assert module.preprocess(["a " * 700])["input_ids"].shape[1] >= 1400


class TestTokenizer:
    """A batch of texts is tokenised in a few calls, and what a tokenizer adds is asked for anew each time."""

    @pytest.mark.parametrize("recipe", EACH_MODULE)
    def test_few_calls(self, recipe, roomy_path, monkeypatch):
        kind, settings = RECIPES[recipe]
        module, tokenizer, seen = kind(roomy_path, **settings), type(backbones.tokenizer()), []
        original = tokenizer.__call__
        monkeypatch.setattr(
            tokenizer, "__call__", lambda self, text, **kw: seen.append(text) or original(self, text, **kw)
        )
        for prompt in (None, "query: "):
            for texts in (TEXTS, ["", *TEXTS] * 8, ["one", "word " * 1_500]):
                seen.clear()
                features = module.preprocess(texts, prompt=prompt)
                # Two for special tokens, and one each for what stands around texts, the texts, and the two together;
                # one for what splits a string at a slot.
                assert len(seen) <= 6
        seen.clear()
        with torch.inference_mode():
            module(features)
        assert not any("word" in string for strings in seen for string in strings)

    def test_what_is_changed_of_it_is_seen_at_once(self, roomy_path):
        module = RefinedThoughtModule(roomy_path)
        assert module.lay_out(["a cat"]).input_ids[0, -1] == 0
        module.tokenizer.eos_token = "c"
        assert module.lay_out(["a cat"]).input_ids[0, -1] == module.tokenizer.convert_tokens_to_ids("c")
        module.processor = backbones.tokenizer("bert", eos_token="[SEP]")
        assert module.lay_out(["a cat"]).input_ids[0].tolist() == module.tokenizer("a cat")["input_ids"]


def warned(make, *args, **kwargs) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        make(*args, **kwargs)
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


class TestPoolings:
    """A pooling that a method is not made for is said when the pipeline is complete."""

    @pytest.mark.parametrize(
        ("recipe", "pooling", "advice"),
        [
            ("thought-2", "mean", 'Use Pooling("lasttoken").'),
            ("thought-2", "lasttoken", None),
            ("thought-1", "mean", None),
            ("reba-2", "cls", 'Use Pooling("mean") or Pooling("lasttoken").'),
            ("reba-2", ("mean", "lasttoken"), None),
            ("echo topic", "max", 'Use Pooling("mean").'),
            ("classical", "weightedmean", None),
        ],
    )
    def test_what_does_not_fit_and_what_does(self, recipe, pooling, advice, shared, tmp_path):
        kind, settings = RECIPES[recipe]
        module = kind(shared(), **settings)
        messages = warned(pipeline, module, pooling)
        assert len(messages) == bool(advice)
        for message in messages:
            assert message.startswith(f"{kind.__name__} stands before Pooling(")
            assert message.endswith(advice)
            # Once: not with every text, and for the saved model again, whose user may be another.
            with warnings.catch_warnings(action="ignore"):
                model = pipeline(module, pooling)
            model.save_pretrained(str(tmp_path))
            assert not warned(model.encode, ["the cat", "a"])
            assert warned(SentenceTransformer, str(tmp_path)) == messages

    def test_wherever_the_pooling_stands(self, shared):
        parts = [ReBAModule(shared()), Normalize(), Pooling(32, "cls")]
        assert len(warned(SentenceTransformer, modules=parts)) == 1
