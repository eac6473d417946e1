from __future__ import annotations

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.words import encode_words

from . import oracles
from .conftest import pipeline, relative_error


def test_a_word_is_the_mean_of_its_tokens(backbone_path, eager, token_ids):
    sentences = ["the quick brown fox jumps", "我爱自然语言处理。", "bank bank river money", "Deich 🥊 groß"]
    words = ["brown", "自然", "bank", "🥊"]
    vectors = encode_words(pipeline(ReBAModule(backbone_path())), sentences, words, batch_size=3)
    tokenizer = CausalTransformer(backbone_path()).tokenizer
    for sentence, word, vector in zip(sentences, words, vectors, strict=True):
        offsets = tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        first = sentence.index(word)
        own = [i for i, (a, b) in enumerate(offsets) if a < first + len(word) and b > first]
        assert own
        expected = oracles.algorithm_2(eager(), token_ids(sentence), 2)[torch.tensor(own)].mean(0)
        assert relative_error(vector, expected) < 1e-5


def test_a_word_of_many_tokens_and_a_token_of_many_characters(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    tokens = model.encode("the dog", output_value="token_embeddings")
    offsets = model[0].token_offsets("the dog")
    assert len(offsets) == len(tokens)
    assert np.allclose(encode_words(model, ["the dog"], ["the dog"])[0], tokens.mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("sentence", "word", "message"),
    [
        ("a cat", "dog", "The word 'dog' does not occur in 'a cat'"),
        ("a cat", "", "The word '' does not occur"),
        ("cat " * 200 + "dog", "dog", "'dog' was truncated away: .* longer than max_seq_length"),
    ],
)
def test_words_that_are_not_there(sentence, word, message, backbone_path):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(EchoModule(backbone_path())), [sentence], [word])


def test_as_many_words_as_sentences(backbone_path):
    with pytest.raises(ValueError, match="2 sentences and 1 words were given"):
        encode_words(pipeline(EchoModule(backbone_path())), ["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("module_class", "settings"),
    [(ReBAModule, {"rows": "last"}), (EchoModule, {"repetitions": 3, "pool_copies": "repeated"})],
)
def test_modules_without_one_vector_a_token(module_class, settings, backbone_path):
    with pytest.raises(ValueError, match='words need pool_over="text", and pool_copies="last" or rows="all"'):
        encode_words(pipeline(module_class(backbone_path(), **settings)), ["the cat sat"], ["cat"])


def test_other_modules(backbone_path):
    from sentence_transformers.base.modules import Transformer

    with pytest.raises(ValueError, match="first module is Transformer: words need one of st_reba's modules"):
        encode_words(pipeline(Transformer(backbone_path("llama", "bert"))), ["a"], ["a"])
