"""Vectors of words within their sentences and of chunks, pooled from one pass; and texts in terms of a prompt."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import AutoModel, AutoTokenizer

import st_reba
from st_reba import CausalTransformer, EchoModule, ReBAModule, encode_chunks, encode_words
from st_reba.export.plain import save_plain
from st_reba.reading import words
from st_reba.reading.chunks import _cut
from st_reba.reading.words import token_offsets, untruncated_offsets
from st_reba.text.presets import normalized

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error, reloaded
from ..devices import FIRST, SeveralDevices, put


def test_a_word_is_the_mean_of_its_tokens(backbone_path, eager, token_ids, monkeypatch):
    """However many are read at a time."""
    sentences = ["the quick brown fox jumps", "我爱自然语言处理。", "bank bank river money", "Deich 🥊 groß"]
    asked = ["brown", "自然", "bank", "🥊"]
    model = pipeline(ReBAModule(backbone_path()))
    vectors = encode_words(model, sentences, asked, batch_size=3)
    for sentence, word, vector in zip(sentences, asked, vectors, strict=True):
        offsets = model[0].tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        first = sentence.index(word)
        own = [i for i, (a, b) in enumerate(offsets) if a < first + len(word) and b > first]
        expected = oracles.algorithm_2(eager(), token_ids(sentence), 2)[torch.tensor(own)].mean(0)
        assert relative_error(vector, expected) < 1e-5
    monkeypatch.setattr(words, "_BATCHES", 1)
    assert relative_error(encode_words(model, sentences, asked, batch_size=1), vectors) < 1e-5
    monkeypatch.setattr(words, "_tokens_of_word", lambda *_: ([1], 3))
    with pytest.raises(ValueError, match="returns 14 vectors for 3 tokens of a sentence"):
        encode_words(model, sentences[:1], ["brown"])


def test_words_of_texts_that_are_normalised(backbone_path):
    """A character keeps its place, and the mark that is added belongs to no word."""
    sentences = ['a "cat" and a dog', "我爱猫吗？", "the dog", "他说：“你好”"]
    asked = ["cat", "猫", "dog", "你好"]
    module, plain = (CausalTransformer(backbone_path("llama", "bert"), normalize_text=each) for each in (True, False))
    expected = encode_words(pipeline(plain), [normalized(sentence) for sentence in sentences], asked)
    assert relative_error(encode_words(pipeline(module), sentences, asked), expected) < 1e-6


MISSING_WORDS = [
    (["a cat"], ["dog"], "The word 'dog' does not occur in 'a cat'"),
    (["cat " * 200 + "dog"], ["dog"], "'dog' was truncated: .* longer than max_seq_length"),
    (["a", "b"], ["a"], "2 sentences and 1 words: give sentences with one word each"),
]


@pytest.mark.parametrize(("sentences", "asked", "message"), MISSING_WORDS)
def test_words_that_are_not_there(sentences, asked, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(EchoModule(shared())), sentences, asked)


TEXT = TEXTS[2]
#: Recipes whose tokens know their text, and the classical one.
READERS = {
    "classical": (CausalTransformer, {}),
    "prompt": (CausalTransformer, {"template": "sentence {text} in a word:", "bidirectional_layers": 1}),
    "echo": (EchoModule, {"pool_copies": "repeated"}),
    "reba": (ReBAModule, {}),
    "prepending": (st_reba.TokenPrependingModule, {"template": "{prepend}{text}", "pool_over": "text"}),
}
#: A chunk that no text is longer than.
WHOLE = 200


@pytest.mark.parametrize("reader", READERS)
def test_a_chunk_is_the_mean_of_its_tokens_in_one_pass(reader, shared):
    kind, arguments = READERS[reader]
    model = pipeline(kind(shared(), **arguments))
    tokens = model.encode(TEXT, output_value="token_embeddings").numpy()
    offsets = token_offsets(model[0], TEXT)
    [found] = encode_chunks(model, [TEXT], chunk_tokens=7, overlap=2)
    for (start, end), vector in zip(found.spans, found.vectors, strict=True):
        own = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
        assert relative_error(vector, tokens[own].mean(0)) < 1e-5


def whole(model, texts, **settings):
    """The vectors of texts of one chunk each."""
    return np.concatenate([each.vectors for each in encode_chunks(model, texts, chunk_tokens=WHOLE, **settings)])


def test_the_one_chunk_of_a_whole_text_is_what_encode_gives(shared):
    """Whatever stands behind the pooling, and whichever tokens are pooled."""
    pooled = pipeline(ReBAModule(shared()), "weightedmean")
    behind = [st_reba.Centering.fit(pooled, TEXTS), Normalize()]
    for model in (
        pipeline(pooled[0], "weightedmean", *behind),
        pipeline(CausalTransformer(shared()), "lasttoken"),
        pipeline(st_reba.KVReroutingModule(shared(), pool_over="text")),
    ):
        assert relative_error(whole(model, TEXTS, batch_size=2), model.encode(TEXTS)) < 1e-5
    # The module itself is as it was.
    assert model.encode([TEXT], output_value="token_embeddings")[0].shape[0] == 2
    kept = {"truncate_dim": 5, "normalize_embeddings": True}
    assert relative_error(whole(model, [TEXT], **kept)[0], model.encode(TEXT, **kept)) < 1e-5
    assert encode_chunks(model, [], chunk_tokens=4) == []


@pytest.mark.parametrize(("kind", "pool_over"), [("sentencepiece", "all"), ("bert", "all"), ("greedy", "text")])
def test_special_tokens_and_prompts(kind, pool_over, shared):
    model = pipeline(CausalTransformer(shared("llama", kind), pool_over=pool_over))
    model.prompts = {"document": "A text: "}
    for name in (None, "document"):
        assert relative_error(whole(model, TEXTS, prompt_name=name), model.encode(TEXTS, prompt_name=name)) < 1e-5
    # Those around the text belong to the chunks at its ends.
    states = model.encode(TEXT, output_value="token_embeddings", prompt="").numpy()
    [found] = encode_chunks(model, [TEXT], chunk_tokens=9, prompt="")
    leading = len(states) - len(token_offsets(model[0], TEXT)) > 0
    assert relative_error(found.vectors[0], states[: 9 + leading].mean(0)) < 1e-5


@given(
    texts=st.lists(st.sampled_from([*TEXTS, "", "a b c " * 30]), min_size=1, max_size=5),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_chunks_of_so_many_tokens_cover_a_text_whatever_its_batch(texts, length, data, shared):
    overlap = data.draw(st.integers(0, length - 1))
    model = pipeline(ReBAModule(shared()))
    found = encode_chunks(model, texts, chunk_tokens=length, overlap=overlap, batch_size=3)
    for text, each in zip(texts, found, strict=True):
        [alone] = encode_chunks(model, [text], chunk_tokens=length, overlap=overlap)
        assert each.spans == alone.spans == sorted(each.spans)
        assert np.allclose(each.vectors, alone.vectors, atol=1e-5)
        assert set().union(*(range(*span) for span in each.spans)) == set(range(len(text)))


CUTS = [
    ([1] * 10, 4, 1, [(0, 4), (3, 7), (6, 10)]),
    ([], 3, 1, []),
    # A character of several tokens is not divided; behind a short chunk, the overlap would begin before the text.
    ([1, 3, 1], 2, 0, [(0, 1), (1, 4), (4, 5)]),
    ([1, 3, 1], 4, 3, [(0, 4), (1, 5)]),
    ([1, 1, 1, 3], 3, 2, [(0, 3), (3, 6)]),
]


@pytest.mark.parametrize(("tokens", "length", "overlap", "chunks"), CUTS)
def test_tokens_are_counted_and_shared(tokens, length, overlap, chunks):
    own = [(character, character + 1) for character, count in enumerate(tokens) for _ in range(count)]
    assert _cut(own, length, overlap) == chunks


def test_each_chunk_of_a_long_text_is_read_in_a_window(backbone_path):
    text = " ".join(f"word {index} of a long text" for index in range(60))
    model = pipeline(CausalTransformer(backbone_path(), max_seq_length=40))
    [found] = encode_chunks(model, [text], chunk_tokens=8)
    assert "".join(text[slice(*span)] for span in found.spans) == text
    # By hand: the first window that holds the chunk whole, of half the last one's tokens.
    own = untruncated_offsets(model[0], [text])[0]
    length, step = 32, 16
    for span, vector in list(zip(found.spans, found.vectors, strict=True))[:-1:3]:
        behind = next(i for i, (_, end) in enumerate(own) if end == span[1]) + 1
        start = min(-(-max(0, behind - length) // step) * step, len(own) - length)
        window = (own[start][0], own[start + length - 1][1])
        part = text[slice(*window)]
        tokens = model.encode(part, output_value="token_embeddings").numpy()
        first, last = (place - window[0] for place in span)
        mine = [i for i, (a, b) in enumerate(token_offsets(model[0], part)) if a < last and b > first]
        assert relative_error(vector, tokens[mine].mean(0)) < 1e-5
    with pytest.raises(ValueError, match="reads 32 tokens of a long text at a time: give chunk_tokens=32"):
        encode_chunks(model, [text], chunk_tokens=33)
    with pytest.raises(ValueError, match="The model has no pooling, so chunks have no vectors"):
        encode_chunks(SentenceTransformer(modules=[model[0]]), [TEXT], chunk_tokens=5)


WRONG_SETTINGS = [
    ({"chunk_tokens": 0}, "chunk_tokens=0, overlap=0: give at least 1 token per chunk"),
    ({"overlap": 4}, "chunk_tokens=4, overlap=4: give .* fewer tokens than a chunk has"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"prompt_name": "queri"}, "prompt_name='queri': the model has"),
    ({"texts": "abc"}, "texts is one string, .*: give a list"),
    ({"texts": ["abc", None]}, "something else than strings: give a list"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_SETTINGS)
def test_settings_that_cannot_be_used_are_refused(arguments, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_chunks(pipeline(CausalTransformer(shared())), **{"texts": ["abc"], "chunk_tokens": 4, **arguments})


WITHOUT_VECTORS = [
    ("words", EchoModule, {"repetitions": 3, "pool_copies": "repeated"}, 'pool_over="text", and pool_copies="la'),
    ("words", st_reba.EarlyLateModule, {}, "has no vectors of tokens. For words use EchoModule or ReBAModule"),
    ("words", Transformer, {}, "first module is Transformer: words need a module of st_reba"),
    ("chunks", CausalTransformer, {"template": "prompteol"}, "CausalTransformer reads the prompt .* after the text"),
    ("chunks", CausalTransformer, {"pool_over": "whole"}, 'has pool_over="whole"'),
    ("chunks", st_reba.MetaEOLModule, {"templates": ["So {text}:"]}, "MetaEOLModule has no vectors of tokens"),
    ("chunks", EchoModule, {"repetitions": 3, "pool_copies": "repeated"}, "reads a token in several copies"),
    ("chunks", st_reba.LayerStates, {}, "LayerStates has no vectors of tokens, so chunks have none"),
    ("chunks", Transformer, {}, "first module is Transformer: chunks need a module of st_reba"),
]


@pytest.mark.parametrize(("wanted", "kind", "arguments", "message"), WITHOUT_VECTORS)
def test_recipes_without_vectors_of_tokens_are_refused(wanted, kind, arguments, message, backbone_path):
    model = pipeline(kind(backbone_path("llama", "bert"), **arguments))
    with pytest.raises(ValueError, match=message):
        encode_words(model, ["abc"], ["a"]) if wanted == "words" else encode_chunks(model, ["abc"], chunk_tokens=2)


def test_chunks_on_an_accelerator(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    [expected] = encode_chunks(model, [TEXT], chunk_tokens=5, prompt="so: ")
    with SeveralDevices():
        put(model, FIRST)
        [found] = encode_chunks(model, [TEXT], chunk_tokens=5, prompt="so: ")
    assert np.allclose(found.vectors, expected.vectors, atol=1e-6)


# A text in terms of a prompt that stands in a slot of its own

ASPECTS = ["its topic", "情感", "the number of animals that are in it, if there are any", '"a {text} {prepend}"']
PONTE = [name for name in st_reba.TEMPLATES if name.startswith("ponte")]


def asked(module, **settings):
    return pipeline(CausalTransformer(module, **{"template": "ponte", **settings}), "lasttoken")


@pytest.mark.parametrize("kind", ["greedy", "bert"])
@pytest.mark.parametrize("template", PONTE)
def test_plain_transformers_on_the_string_with_both_in_their_slots(template, kind, backbone_path):
    path = backbone_path("llama", kind)
    plain = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = pipeline(CausalTransformer(path, template=template), "lasttoken")
    # A text may read like a slot.
    texts = [*TEXTS, "{prompt} of {text}"]
    for aspect in ASPECTS:
        vectors = model.encode(texts, prompt=aspect)
        for text, vector in zip(texts, vectors, strict=True):
            before, behind = (part.replace("{prompt}", aspect) for part in st_reba.TEMPLATES[template].split("{text}"))
            with torch.no_grad():
                inputs = tokenizer(before + text + behind, return_tensors="pt")
                states = plain(input_ids=inputs["input_ids"]).last_hidden_state[0]
            assert relative_error(vector, states[-1]) < 1e-5, (text, aspect)


def test_every_way_to_give_a_prompt(backbone_path, tmp_path):
    """By encode, by name, by default, as an input's own, which comes in place of any other; and after saving."""
    model = asked(backbone_path("llama"))
    model.prompts = {"topic": "its topic", "query": "the question", "document": "the answer"}
    model.default_prompt_name = "topic"
    expected = model.encode(TEXTS, prompt="its topic")
    loaded = reloaded(model, tmp_path)
    for each in (model, loaded):
        assert np.array_equal(each.encode(TEXTS), expected)
        assert np.array_equal(each.encode(TEXTS, prompt_name="topic"), expected)
        own = each.encode([st_reba.in_terms_of(text, "its topic") for text in TEXTS], prompt="the answer")
        assert relative_error(own, expected) < 1e-5
        assert np.array_equal(each.encode_query(TEXTS), each.encode(TEXTS, prompt="the question"))


@pytest.mark.parametrize("template", ["ponte", "ponte-aspect-first"])
def test_long_texts_are_cut_and_what_is_asked_is_not(template, shared):
    module = CausalTransformer(shared("llama", "greedy"), template=template)
    aspect = "the animals"
    features = module.preprocess(["自然语言" * 200], prompt=aspect)
    read = module.tokenizer.decode(features["input_ids"][0])
    first, last = st_reba.TEMPLATES[template].replace("{prompt}", aspect).split("{text}")
    assert read.startswith(first)
    assert read.endswith(last)
    assert 230 < features["input_ids"].shape[1] <= 256


def test_a_prompt_that_is_blank_is_refused(shared, backbone_path, tmp_path):
    refused = r"in terms of \{prompt\}: \"' reads a text in terms of a prompt, and no prompt was given: give one"
    model = asked(shared())
    for settings in ({}, {"prompt": " "}):
        with pytest.raises(ValueError, match=refused):
            model.encode(TEXTS, **settings)
    with pytest.raises(ValueError, match=refused):
        model.encode([st_reba.in_terms_of("a", "its topic"), "b"])
    built = st_reba.build(backbone_path("llama"), "prompteol", template="ponte", prompts={"query": "its topic"})
    with pytest.raises(ValueError, match="or export a model for each"):
        save_plain(built, tmp_path, pieces=True)


def test_a_slot_is_given_once_and_conversations_have_none(shared):
    with pytest.raises(ValueError, match=re.escape("has other braces than {text}, one {prompt}")):
        CausalTransformer(shared(), template="{prompt} {text} {prompt}")
    module = CausalTransformer(shared(), template="ponte")
    module.tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match='Input 0 of its batch is a conversation, .* use chat="conversation"'):
        module.preprocess([turns], prompt="its topic")
