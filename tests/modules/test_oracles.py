"""Every module equals the papers' algorithm, to 1e-5 in float32, on every architecture, in a mixed batch."""

from __future__ import annotations

import warnings

import pytest
import torch

from st_reba import CausalTransformer, EchoModule, InputEmbeddings, ReBAModule
from st_reba.lm.anatomy import anatomy_of

from .. import oracles
from ..backbones import EACH, OWN_ATTENTION, TEXTS, third
from ..conftest import paired, pipeline, relative_error

TOLERANCE = 1e-5
#: Of several lengths: Chinese, a long one, and one token.
FEW = TEXTS[1:4]


def make(module_class, path, **settings):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*computes its attention in its own code")
        return module_class(path, **settings)


def assert_words_equal(module, expected_words):
    words = pipeline(module).encode(FEW, output_value="token_embeddings", batch_size=len(FEW))
    for text, value in zip(FEW, words, strict=True):
        assert relative_error(value, expected_words(text)) < TOLERANCE, text


# How often a text is repeated is a matter of the layout, which no architecture knows.
@pytest.mark.parametrize(("architecture", "k"), paired(EACH, [2, 3, 1]))
def test_reba(architecture, k, shared, eager, token_ids):
    module = make(ReBAModule, shared(architecture), repetitions=k)
    assert anatomy_of(module.model).calls_our_attention == (architecture not in OWN_ATTENTION)
    last = make(ReBAModule, shared(architecture), repetitions=k, rows="last")
    found = pipeline(module, ("mean", "lasttoken")).encode(FEW, batch_size=len(FEW), output_value=None)
    found_last = pipeline(last, ("mean", "lasttoken")).encode(FEW, batch_size=len(FEW))
    for text, item, vector in zip(FEW, found, found_last, strict=True):
        words = oracles.algorithm_2(eager(architecture), token_ids(text), k)
        assert relative_error(item["token_embeddings"][item["attention_mask"].bool()], words) < TOLERANCE, text
        both = torch.cat([oracles.algorithm_3(words, pooling) for pooling in ("mean", "lasttoken")])
        assert relative_error(item["sentence_embedding"], both) < TOLERANCE, text
        assert relative_error(vector, words[-1].repeat(2)) < TOLERANCE, text


@pytest.mark.parametrize(("architecture", "layers"), paired(["llama", "gemma2_softcap", "bloom"], [[-1], [0, 2]]))
def test_reba_of_some_layers(architecture, layers, shared, eager, token_ids):
    module = make(ReBAModule, shared(architecture), layers=layers)
    assert_words_equal(module, lambda t: oracles.algorithm_2(eager(architecture), token_ids(t), 2, layers=layers))


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_reba_with_normalized_weights(architecture, shared, eager, token_ids):
    module = make(ReBAModule, shared(architecture), normalize_weights=True)
    assert_words_equal(module, lambda t: oracles.algorithm_2(eager(architecture), token_ids(t), 2, normalize=True))


@pytest.mark.parametrize(("architecture", "k"), paired(third(1), [2, 3]))
def test_echo(architecture, k, shared, eager, token_ids):
    last, repeated = (
        make(EchoModule, shared(architecture), repetitions=k, pool_copies=copies) for copies in ("last", "repeated")
    )
    expected = {text: oracles.echo(eager(architecture), token_ids(text), k, first_copy=1) for text in FEW}
    assert_words_equal(repeated, expected.get)
    assert_words_equal(last, lambda text: expected[text][-len(token_ids(text)) :])


@pytest.mark.parametrize("architecture", third(2))
def test_classical(architecture, shared, eager, token_ids):
    module = make(CausalTransformer, shared(architecture))
    assert_words_equal(module, lambda text: oracles.classical(eager(architecture), token_ids(text)))


def test_input_embeddings(shared, eager, token_ids):
    table = eager().get_input_embeddings().weight.detach()
    assert_words_equal(InputEmbeddings(shared()), lambda text: table[torch.tensor(token_ids(text))])


@pytest.mark.parametrize("architecture", EACH)
def test_the_backbones_attend_far_from_uniformly(architecture, eager, token_ids):
    """Otherwise the tests above could not tell one attention from another."""
    _, maps = oracles.run(eager(architecture), token_ids(TEXTS[2]) * 2)
    ratio = torch.stack([layer.max(dim=-1).values[:, -1] * (layer[0, -1] > 0).sum() for layer in maps])
    assert ratio.mean() > 2


def test_mean_pooling_equals_the_sum_over_columns(shared, eager, token_ids):
    """Eq. 7: summing each column of A first gives the same mean."""
    ids = token_ids(TEXTS[2])
    states, maps = oracles.run(eager(), ids * 2)
    weights = oracles.algorithm_1(maps)
    columns = torch.stack([weights[: min(len(ids), k + 1), k].sum() for k in range(2 * len(ids))])
    vector = pipeline(ReBAModule(shared())).encode(TEXTS[2])
    assert relative_error(vector, columns @ states / len(ids)) < TOLERANCE


class TestChunked:
    """Chunks of 5 tokens, where the texts have 1 to 40."""

    @pytest.mark.parametrize(("architecture", "k"), paired(third(0), [2, 3, 1]))
    def test_words(self, architecture, k, shared, eager, token_ids):
        every, last = (
            make(ReBAModule, shared(architecture), repetitions=k, chunk_length=5, rows=rows) for rows in ("all", "last")
        )
        words = {text: oracles.chunked(eager(architecture), token_ids(text), k, 5) for text in FEW}
        assert_words_equal(every, words.get)
        assert_words_equal(last, lambda text: words[text][-1:])

    @pytest.mark.parametrize(("architecture", "length"), paired(["llama", "mistral_window", "bloom"], [1, 8, 13]))
    def test_lengths(self, architecture, length, shared, eager, token_ids):
        assert all(len(token_ids(TEXTS[2])) % length for length in (8, 13))
        module = make(ReBAModule, shared(architecture), chunk_length=length)
        assert_words_equal(module, lambda text: oracles.chunked(eager(architecture), token_ids(text), 2, length))

    @pytest.mark.parametrize("architecture", ["llama", "gemma2_softcap", "falcon"])
    def test_some_layers_and_normalized(self, architecture, shared, eager, token_ids):
        settings = {"layers": [0, -1], "normalize_weights": True}
        module = make(ReBAModule, shared(architecture), chunk_length=7, **settings)
        assert_words_equal(
            module,
            lambda text: oracles.chunked(eager(architecture), token_ids(text), 2, 7, layers=[0, -1], normalize=True),
        )

    @pytest.mark.parametrize("kind", ["bert", "sentencepiece"])
    def test_special_tokens_and_the_prompt_stand_before_each_chunk(self, kind, shared, eager):
        module = ReBAModule(shared("llama", kind), chunk_length=5)
        before, after = ([2], [3]) if kind == "bert" else ([1], [])

        def ids(text):
            return module.tokenizer(text, add_special_tokens=False)["input_ids"]

        for prompt in ("", "the fox: "):
            words = pipeline(module).encode(FEW, output_value="token_embeddings", prompt=prompt, batch_size=3)
            for text, value in zip(FEW, words, strict=True):
                expected = oracles.chunked(eager(), ids(text), 2, 5, before + ids(prompt), after)
                assert relative_error(value, expected) < TOLERANCE, text

    @pytest.mark.parametrize(("architecture", "k"), paired(["llama", "gpt_oss_sinks", "gpt_neo"], [1, 2, 3]))
    def test_one_chunk_is_reba(self, architecture, k, shared):
        settings = {"repetitions": k, "chunk_length": 50}
        chunked = pipeline(make(ReBAModule, shared(architecture), **settings))
        whole = pipeline(make(ReBAModule, shared(architecture), repetitions=k))
        assert relative_error(chunked.encode(TEXTS), whole.encode(TEXTS)) < 1e-6

    def test_one_chunk_beside_longer_texts_is_reba(self, shared):
        whole, chunked = (pipeline(ReBAModule(shared(), chunk_length=length)) for length in (None, 12))
        vectors = chunked.encode(TEXTS, batch_size=len(TEXTS))
        assert relative_error(vectors[3], whole.encode(TEXTS[3])) < 1e-6
        assert relative_error(vectors[2], whole.encode(TEXTS[2])) > 1e-3

    def test_words_see_the_text_before_their_chunk_and_not_behind_it(self, shared, token_ids):
        ids = token_ids(TEXTS[2])
        encode = pipeline(ReBAModule(shared(), chunk_length=5)).encode
        words, shorter = (encode(text, output_value="token_embeddings") for text in (TEXTS[2], TEXTS[2][:-4]))
        kept = 5 * (len(token_ids(TEXTS[2][:-4])) // 5)
        assert token_ids(TEXTS[2][:-4])[:kept] == ids[:kept]
        assert relative_error(shorter[:kept], words[:kept]) < TOLERANCE
        other = encode("The cat" + TEXTS[2][7:], output_value="token_embeddings")
        assert relative_error(other[-5:], words[-5:]) > 1e-3
