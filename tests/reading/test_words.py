"""Vectors of words within their sentences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Transformer

from st_reba import (
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    MetaEOLModule,
    ReBAModule,
    TopicModule,
    encode_words,
)
from st_reba.reading import words
from st_reba.reading.words import WordTokens, find_words, pool_words, token_offsets
from st_reba.text.templates import normalized

from .. import oracles
from ..conftest import pipeline, relative_error
from ..modules.methods import TWICE


def test_a_word_is_the_mean_of_its_tokens(backbone_path, eager, token_ids):
    sentences = ["the quick brown fox jumps", "我爱自然语言处理。", "bank bank river money", "Deich 🥊 groß"]
    asked = ["brown", "自然", "bank", "🥊"]
    vectors = encode_words(pipeline(ReBAModule(backbone_path())), sentences, asked, batch_size=3)
    tokenizer = CausalTransformer(backbone_path()).tokenizer
    for sentence, word, vector in zip(sentences, asked, vectors, strict=True):
        offsets = tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        first = sentence.index(word)
        own = [i for i, (a, b) in enumerate(offsets) if a < first + len(word) and b > first]
        assert own
        expected = oracles.algorithm_2(eager(), token_ids(sentence), 2)[torch.tensor(own)].mean(0)
        assert relative_error(vector, expected) < 1e-5


def test_order_batches_and_groups_do_not_matter(backbone_path, monkeypatch, capsys):
    model = pipeline(ReBAModule(backbone_path()))
    sentences = [f"{'the dog and ' * (index % 5)}cat no. {index}" for index in range(11)]
    asked = ["cat" if index % 2 else "no." for index in range(11)]
    one_by_one = np.concatenate(
        [encode_words(model, [sentence], [word]) for sentence, word in zip(sentences, asked, strict=True)]
    )
    monkeypatch.setattr(words, "_BATCHES", 2)
    vectors = encode_words(model, sentences, asked, batch_size=2, show_progress_bar=True)
    assert vectors.dtype == np.float32
    assert relative_error(vectors, one_by_one) < 1e-5
    assert "11/11" in capsys.readouterr().err


def test_words_of_embeddings_that_are_there_already(shared):
    """As a padded batch from the module, or one tensor a sentence from encode."""
    module = EchoModule(shared())
    model = pipeline(module)
    sentences = ["the cat sat on the mat", "a cat", "cat 猫"]
    asked = ["cat sat", "cat", "猫"]
    expected = encode_words(model, sentences, asked)
    found = find_words(module, sentences, asked)
    with torch.inference_mode():
        padded = module(module.preprocess(sentences))["token_embeddings"]
    assert relative_error(pool_words(padded, found), expected) < 1e-5
    listed = model.encode(sentences, output_value="token_embeddings")
    assert relative_error(pool_words(listed, found), expected) < 1e-5


def test_pooling_by_hand():
    tokens = torch.arange(12.0).reshape(1, 4, 3)
    assert pool_words(tokens, [WordTokens([1, 3], 4)]).tolist() == [[6, 7, 8]]
    half = pool_words(tokens.bfloat16(), [WordTokens([0], 4)])
    assert half.dtype == torch.float32
    for wrong in (tokens, [tokens[0]]):
        with pytest.raises(ValueError, match="hands on 4 vectors for 3 tokens of a sentence"):
            pool_words(wrong, [WordTokens([1], 3)])


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
def test_words_of_texts_that_are_normalised(kind, backbone_path):
    """A character keeps its place, and the mark that is added belongs to no word."""
    sentences = ['a "cat" and a dog', "我爱猫吗？", "is it a cat?", "the dog", "他说：“你好”"]
    asked = ["cat", "猫", "cat", "dog", "你好"]
    module = CausalTransformer(backbone_path("llama", kind), normalize_text=True)
    plain = CausalTransformer(backbone_path("llama", kind))
    as_read = [normalized(sentence) for sentence in sentences]
    expected = encode_words(pipeline(plain), as_read, asked)
    assert relative_error(encode_words(pipeline(module), sentences, asked), expected) < 1e-6
    assert module.token_ids(sentences) == plain.token_ids(as_read)
    for sentence, word in zip(sentences, find_words(module, sentences, asked), strict=True):
        first, last = (token_offsets(module, sentence)[index] for index in (word.indices[0], word.indices[-1]))
        assert asked[sentences.index(sentence)] in sentence[first[0] : last[1]]


@pytest.mark.parametrize(
    ("sentences", "words", "message"),
    [
        (["a cat"], ["dog"], "The word 'dog' does not occur in 'a cat'"),
        (["a cat"], [""], "The word '' does not occur"),
        (["cat " * 200 + "dog"], ["dog"], "'dog' was truncated away: .* longer than max_seq_length"),
        (["a", "b"], ["a"], "2 sentences and 1 words were given"),
        ([], [], "No sentences were given"),
    ],
)
def test_words_that_are_not_there(sentences, words, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(EchoModule(shared())), sentences, words)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (EchoModule, {"repetitions": 3, "pool_copies": "repeated"}, 'words need pool_over="text", and pool_copies="la'),
        (ReBAModule, {"rows": "last"}, 'pool_copies="last" or rows="all"'),
        (MetaEOLModule, {"templates": ["{text}"]}, "MetaEOLModule hands on one vector a prompt, not one a token"),
        (EarlyLateModule, {}, "same second half .* output_layer=1 and .*: it has no word embeddings"),
        (TopicModule, {"template": TWICE}, r"same parts behind the first \(which alone is that of EchoModule"),
        (Transformer, {}, "first module is Transformer: words need one of st_reba's modules"),
        (TopicModule, {"template": "{text} is"}, "gives a text as a whole its vector, and its tokens none"),
    ],
)
def test_modules_without_one_vector_a_token(kind, arguments, message, backbone_path):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(kind(backbone_path("llama", "bert"), **arguments)), ["the cat sat"], ["cat"])
