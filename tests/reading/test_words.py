from __future__ import annotations

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer, EchoModule, ReBAModule, encode_words
from st_reba.reading import words
from st_reba.reading.words import WordTokens, find_words, pool_words, token_offsets
from st_reba.text.templates import normalized

from .. import oracles
from ..conftest import pipeline, relative_error


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


def test_words_in_chunks(shared, eager, token_ids):
    model = pipeline(ReBAModule(shared(), chunk_length=4))
    vectors = encode_words(model, ["the quick brown fox jumps"], ["fox jumps"])
    words = oracles.chunked(eager(), token_ids("the quick brown fox jumps"), 2, 4)
    offsets = token_offsets(model[0], "the quick brown fox jumps")
    found = [index for index, (_, last) in enumerate(offsets) if last > len("the quick brown ")]
    assert relative_error(vectors[0], words[torch.tensor(found)].mean(0)) < 1e-5


def test_a_word_of_many_tokens_and_a_token_of_many_characters(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    tokens = model.encode("the dog", output_value="token_embeddings")
    offsets = token_offsets(model[0], "the dog")
    assert len(offsets) == len(tokens)
    assert np.allclose(encode_words(model, ["the dog"], ["the dog"])[0], tokens.mean(0), atol=1e-6)


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
    ("sentence", "word", "message"),
    [
        ("a cat", "dog", "The word 'dog' does not occur in 'a cat'"),
        ("a cat", "", "The word '' does not occur"),
        ("cat " * 200 + "dog", "dog", "'dog' was truncated away: .* longer than max_seq_length"),
    ],
)
def test_words_that_are_not_there(sentence, word, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(EchoModule(shared())), [sentence], [word])


def test_as_many_words_as_sentences(shared):
    with pytest.raises(ValueError, match="2 sentences and 1 words were given"):
        encode_words(pipeline(EchoModule(shared())), ["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("module_class", "settings"),
    [(ReBAModule, {"rows": "last"}), (EchoModule, {"repetitions": 3, "pool_copies": "repeated"})],
)
def test_modules_without_one_vector_a_token(module_class, settings, shared):
    with pytest.raises(ValueError, match='words need pool_over="text", and pool_copies="last" or rows="all"'):
        encode_words(pipeline(module_class(shared(), **settings)), ["the cat sat"], ["cat"])


def test_no_sentences(shared):
    with pytest.raises(ValueError, match="No sentences were given"):
        encode_words(pipeline(EchoModule(shared())), [], [])


def test_other_modules(backbone_path):
    from sentence_transformers.base.modules import Transformer

    with pytest.raises(ValueError, match="first module is Transformer: words need one of st_reba's modules"):
        encode_words(pipeline(Transformer(backbone_path("llama", "bert"))), ["a"], ["a"])
