"""Vectors of words within their sentences, and of chunks of a text, each pooled from one pass over the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize

from st_reba import (
    CausalTransformer,
    Centering,
    EarlyLateModule,
    EchoModule,
    IdfWeights,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    TopicModule,
    WhiteningTransform,
    encode_chunks,
    encode_words,
)
from st_reba.reading import words
from st_reba.reading.chunks import _cut
from st_reba.reading.words import WordTokens, find_words, own_offsets, pool_words, token_offsets
from st_reba.text.templates import normalized

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from ..devices import FIRST, SeveralDevices, put
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


TEXT = TEXTS[2]
SPANS = [(0, 23), (23, 50), (50, len(TEXT)), (10, 30), (4, 7)]

#: Recipes whose tokens know their text, and the classical one.
READERS = {
    "classical": (CausalTransformer, {}),
    "prompt": (CausalTransformer, {"template": "sentence {text} in a word:", "bidirectional_layers": 1}),
    "echo": (EchoModule, {"pool_copies": "repeated"}),
    "reba": (ReBAModule, {}),
    "rerouting": (KVReroutingModule, {"pool_over": "text", "hybrid": False}),
    "prepending": (TokenPrependingModule, {"template": "{prepend}{text}", "pool_over": "text"}),
}


def made(reader, backbone):
    kind, arguments = READERS[reader]
    return kind(backbone, **arguments)


@pytest.mark.parametrize("reader", READERS)
def test_a_chunk_is_the_mean_of_its_tokens_in_one_pass(reader, shared):
    model = pipeline(made(reader, shared()))
    tokens = model.encode(TEXT, output_value="token_embeddings").numpy()
    offsets = token_offsets(model[0], TEXT)
    assert len(tokens) == len(offsets)
    found = encode_chunks(model, TEXT, spans=SPANS)
    assert found.spans == SPANS
    for (start, end), vector in zip(SPANS, found.vectors, strict=True):
        own = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
        assert relative_error(vector, tokens[own].mean(0)) < 1e-5
    # They are pooled a few at a time.
    assert relative_error(encode_chunks(model, TEXT, spans=SPANS, batch_size=2).vectors, found.vectors) < 1e-6


def test_rerouting_reads_the_mean_and_the_last_token_of_a_chunk(shared):
    tokens = pipeline(KVReroutingModule(shared(), pool_over="text", hybrid=False))
    states = tokens.encode(TEXT, output_value="token_embeddings").numpy()
    model = pipeline(KVReroutingModule(shared(), pool_over="text"))
    [vector] = encode_chunks(model, TEXT, spans=[(0, len(TEXT))]).vectors
    assert relative_error(vector, (states.mean(0) + states[-1]) / 2) < 1e-5
    assert relative_error(vector, model.encode(TEXT)) < 1e-5
    # The module itself is as it was.
    assert model.encode([TEXT], output_value="token_embeddings")[0].shape[0] == 2


@pytest.mark.parametrize(("mode", "reader"), [("mean", "reba"), ("lasttoken", "classical"), ("weightedmean", "reba")])
def test_the_chunk_of_a_whole_text_is_what_encode_gives(mode, reader, shared):
    module = made(reader, shared())
    pooled = pipeline(module, mode)
    behind = [Centering.fit(pooled, TEXTS), WhiteningTransform.fit(pooled, TEXTS, dimension=3), Normalize()]
    model = SentenceTransformer(modules=[*pooled.children(), *behind], device="cpu")
    found = encode_chunks(model, TEXTS, spans=[[(0, len(text))] for text in TEXTS], batch_size=2)
    assert relative_error(np.concatenate([each.vectors for each in found]), model.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize(("kind", "pool_over"), [("sentencepiece", "all"), ("bert", "all"), ("greedy", "text")])
def test_the_same_of_special_tokens_and_prompts(kind, pool_over, shared):
    model = pipeline(CausalTransformer(shared("llama", kind), pool_over=pool_over))
    model.prompts = {"document": "A text: "}
    for name in (None, "document"):
        expected = model.encode(TEXTS, prompt_name=name)
        found = encode_chunks(model, TEXTS, spans=[[(0, len(text))] for text in TEXTS], prompt_name=name)
        assert relative_error(np.concatenate([each.vectors for each in found]), expected) < 1e-5
    model.default_prompt_name = "document"
    assert relative_error(encode_chunks(model, TEXT, spans=[(0, len(TEXT))]).vectors[0], model.encode(TEXT)) < 1e-5


def test_special_tokens_belong_to_the_chunks_at_the_ends(shared):
    model = pipeline(CausalTransformer(shared("llama", "bert"), pool_over="all"))
    states = model.encode(TEXT, output_value="token_embeddings").numpy()
    middle = len(TEXT) // 2
    found = encode_chunks(model, TEXT, spans=[(0, middle), (middle, len(TEXT))])
    split = next(i for i, (first, _) in enumerate(token_offsets(model[0], TEXT)) if first >= middle) + 1
    assert relative_error(found.vectors[0], states[:split].mean(0)) < 1e-5
    assert relative_error(found.vectors[1], states[split:].mean(0)) < 1e-5


def test_weights_of_tokens_count_within_a_chunk_and_settings_of_encode_are_kept(shared):
    module = shared()
    weighted = SentenceTransformer(modules=[module, IdfWeights.fit(module, TEXTS), pipeline(module)[1]], device="cpu")
    kept = {"truncate_dim": 5, "normalize_embeddings": True}
    [vector] = encode_chunks(weighted, TEXT, spans=[(0, len(TEXT))], **kept).vectors
    assert relative_error(vector, weighted.encode(TEXT, **kept)) < 1e-5
    assert encode_chunks(weighted, "", chunk_tokens=4, truncate_dim=5).vectors.shape == (0, 5)


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
        alone = encode_chunks(model, text, chunk_tokens=length, overlap=overlap)
        assert each.spans == alone.spans
        assert np.allclose(each.vectors, alone.vectors, atol=1e-5)
        covered = set().union(*(range(*span) for span in each.spans)) if text else set()
        assert covered == set(range(len(text)))
        assert each.vectors.shape == (len(each.spans), 32)
        assert sorted(each.spans) == each.spans
        assert len({end for _, end in each.spans}) == len(each.spans)


@pytest.mark.parametrize(
    ("tokens", "length", "overlap", "spans"),
    [
        ([1] * 10, 4, 0, [(0, 4), (4, 8), (8, 10)]),
        ([1] * 10, 4, 1, [(0, 4), (3, 7), (6, 10)]),
        ([], 3, 1, []),
        # A character of several tokens is not divided; behind a short chunk, the overlap would begin before the text.
        ([1, 3, 1], 2, 0, [(0, 1), (1, 2), (2, 3)]),
        ([1, 3, 1], 4, 3, [(0, 2), (1, 3)]),
        ([1, 3], 3, 2, [(0, 1), (1, 2)]),
        ([1, 1, 1, 3], 3, 2, [(0, 3), (3, 4)]),
    ],
)
def test_tokens_are_counted_and_shared(tokens, length, overlap, spans):
    own = [(character, character + 1) for character, count in enumerate(tokens) for _ in range(count)]
    assert _cut(own, length, overlap) == spans


class TestLongTexts:
    LONG = " ".join(f"word {index} of a long text" for index in range(60))

    def test_each_chunk_is_read_in_a_window(self, backbone_path):
        model = pipeline(CausalTransformer(backbone_path(), max_seq_length=40))
        found = encode_chunks(model, self.LONG, chunk_tokens=8)
        assert found.spans[-1][1] == len(self.LONG)
        assert "".join(self.LONG[slice(*span)] for span in found.spans) == self.LONG
        # By hand: the first window that holds the chunk whole, of half the last one's tokens.
        own = own_offsets(model[0], [self.LONG])[0]
        length, step = 32, 16
        for span, vector in list(zip(found.spans, found.vectors, strict=True))[:-1:3]:
            behind = next(i for i, (_, end) in enumerate(own) if end == span[1]) + 1
            start = min(-(-max(0, behind - length) // step) * step, len(own) - length)
            window = (own[start][0], own[start + length - 1][1])
            part = self.LONG[slice(*window)]
            tokens = model.encode(part, output_value="token_embeddings").numpy()
            first, last = (place - window[0] for place in span)
            mine = [i for i, (a, b) in enumerate(token_offsets(model[0], part)) if a < last and b > first]
            assert relative_error(vector, tokens[mine].mean(0)) < 1e-5

    def test_a_text_that_just_fits_is_read_whole(self, backbone_path):
        model = pipeline(ReBAModule(backbone_path()))
        length = len(model[0].token_ids([TEXT])[0])
        model.max_seq_length = length
        assert relative_error(encode_chunks(model, TEXT, spans=[(0, len(TEXT))]).vectors[0], model.encode(TEXT)) < 1e-5
        model.max_seq_length = length - 1
        with pytest.raises(ValueError, match="tokens, and the model reads"):
            encode_chunks(model, TEXT, spans=[(0, len(TEXT))])


@pytest.mark.parametrize("span", [(0, 0), (-1, 3), (0, 1000), (0.0, 2), "ab", (1, 2, 3), (True, 2), None])
def test_a_bad_span_is_refused(span, shared):
    with pytest.raises(ValueError, match=r"Text 1 has the span .*: give \(first character, one past the last\)"):
        encode_chunks(pipeline(CausalTransformer(shared())), ["a", "abc"], spans=[[(0, 1)], [span]])


def test_a_span_without_tokens_is_refused(shared):
    model = pipeline(CausalTransformer(shared("llama", "bert")))
    with pytest.raises(ValueError, match=r"Text 0 has the span \(1, 3\), '  ', in which the tokenizer finds no token"):
        encode_chunks(model, "a  b", spans=[(1, 3)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either as spans, or by chunk_tokens"),
        ({"spans": [[(0, 1)]], "overlap": 2}, "overlap=2: spans say themselves"),
        ({"chunk_tokens": 0}, "chunk_tokens=0: give the tokens"),
        ({"chunk_tokens": 4, "overlap": 4}, "overlap=4: give the tokens that a chunk shares .* 0 to 3"),
        ({"chunk_tokens": 4, "batch_size": 0}, "batch_size=0"),
        ({"chunk_tokens": 4, "prompt_name": "queri"}, 'prompt_name="queri": the model has'),
    ],
)
def test_settings_that_cannot_be_used_are_refused(arguments, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_chunks(pipeline(CausalTransformer(shared())), ["abc"], **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (CausalTransformer, {"template": "prompteol"}, "CausalTransformer is read to the end of its prompt"),
        (CausalTransformer, {"pool_over": "whole"}, 'has pool_over="whole"'),
        (MetaEOLModule, {"templates": ["So {text}:"]}, "MetaEOLModule hands on one vector a prompt"),
        (RefinedThoughtModule, {}, "RefinedThoughtModule gives a text as a whole its vector"),
        (EarlyLateModule, {"early_layer": 2}, "EarlyLateModule gives all tokens of a text the"),
        (Transformer, None, "first module is Transformer: chunks are read by one of st_reba's"),
    ],
)
def test_recipes_without_vectors_of_tokens_are_refused(kind, arguments, message, shared, encoder_paths):
    model = pipeline(Transformer(encoder_paths()[0]) if arguments is None else kind(shared(), **arguments))
    with pytest.raises(ValueError, match=message):
        encode_chunks(model, "abc", chunk_tokens=2)


def test_on_an_accelerator(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    expected = encode_chunks(model, TEXT, spans=SPANS, prompt="so: ")
    with SeveralDevices():
        put(model, FIRST)
        found = encode_chunks(model, TEXT, spans=SPANS, prompt="so: ")
    assert np.allclose(found.vectors, expected.vectors, atol=1e-6)
