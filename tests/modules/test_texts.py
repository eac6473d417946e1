"""How texts go in and vectors come out, whatever the method: prompts, special tokens, lengths, tokenizers, poolings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from st_reba import (
    CausalTransformer,
    EchoModule,
    MetaEOLModule,
    RefinedThoughtModule,
    encode_chunks,
)
from st_reba.settings import NO_LIMIT

from .. import backbones
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import RECIPES, TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


class Title(str):
    """A string with a class of its own, as BeautifulSoup's are."""


def test_whatever_is_a_string_is_a_text(shared):
    module, plain = EchoModule(shared()), ["the cat", "a dog"]
    encode, expected = pipeline(module).encode, pipeline(module).encode(plain)
    for kind in (np.str_, Title):
        texts = list(map(kind, plain))
        assert np.array_equal(encode(texts), expected)
        assert np.array_equal(encode([{"prompt": kind(""), "text": text} for text in texts]), expected)
        for chunks, text in zip(encode_chunks(pipeline(module), texts, chunk_tokens=64), plain, strict=True):
            assert chunks.spans == [(0, len(text))]
    column = pytest.importorskip("pandas").Series(plain, index=[7, 9])
    assert np.array_equal(encode(column.to_numpy()), expected)
    with pytest.raises(ValueError, match=r"Input 0 is a Series: .* Give a column as a list: list\(column\)\.$"):
        encode(column)


def test_one_warning_for_empty_texts(shared):
    encode = pipeline(EchoModule(shared())).encode
    with pytest.warns(UserWarning, match="A text without tokens .* zero vector") as caught:
        encode(["", "a", "", ""], batch_size=1)
    assert len([warning for warning in caught if "without tokens" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode([""])


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


def test_the_length_of_a_text(backbone_path, tmp_path):
    """As much as the model has room for, in every copy and behind a prompt; it may be set, and given for one call."""
    model = pipeline(EchoModule(backbone_path("gpt2", "bert")))
    assert model[0].preprocess([LONG])["input_ids"].shape[1] == 256
    assert np.isfinite(model.encode(LONG, prompt="a long enough prompt ")).all()
    for length, expected in ((4, 4), (10_000, 127), (None, 127)):
        model.max_seq_length = length
        assert model.max_seq_length == expected
    features = model[0].preprocess([LONG], processing_kwargs={"text": {"max_length": 3}})
    assert features["input_ids"].shape[1] == 8
    unlimited = EchoModule(backbones.save(backbones.backbone("bloom"), tmp_path, model_max_length=NO_LIMIT))
    assert unlimited.max_seq_length is None
    assert unlimited.preprocess(["a " * 700])["input_ids"].shape[1] >= 1400


def test_what_is_changed_of_a_tokenizer_is_seen_at_once(roomy_path):
    module = RefinedThoughtModule(roomy_path)
    module.tokenizer.eos_token = "c"
    assert module.lay_out(["a cat"]).input_ids[0, -1] == module.tokenizer.convert_tokens_to_ids("c")
    module.processor = backbones.tokenizer("bert", eos_token="[SEP]")
    assert module.lay_out(["a cat"]).input_ids[0].tolist() == module.tokenizer("a cat")["input_ids"]


@pytest.mark.parametrize(
    ("recipe", "pooling", "advice"),
    [
        ("thought-2", "mean", 'Use Pooling("lasttoken").'),
        ("thought-1", "mean", None),
        ("reba-2", "cls", 'Use Pooling("mean") or Pooling("lasttoken").'),
        ("reba-2", ("mean", "lasttoken"), None),
        ("echo topic", "max", 'Use Pooling("mean").'),
    ],
)
def test_a_pooling_that_a_method_is_not_made_for_is_said_once(recipe, pooling, advice, shared, tmp_path):
    """When the pipeline is complete; and again when it is loaded, whose user may be another."""
    kind, settings = RECIPES[recipe]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = pipeline(kind(shared(), **settings), pooling)
        model.encode(["the cat", "a"])
        model.save_pretrained(str(tmp_path))
        SentenceTransformer(str(tmp_path), device="cpu")
    messages = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert len(messages) == 2 * bool(advice)
    for message in messages:
        assert message.startswith(f"{kind.__name__} stands before Pooling(")
        assert message.endswith(advice)
