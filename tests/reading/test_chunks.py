from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

import st_reba
from st_reba import (
    CausalTransformer,
    Centering,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    IdfWeights,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
    WhiteningTransform,
    encode_chunks,
)
from st_reba.reading.chunks import _cut

from ..backbones import TEXTS
from ..conftest import examples, paired, pipeline, relative_error
from ..devices import FIRST, SeveralDevices, put

TEXT = TEXTS[2]
SPANS = [(0, 23), (23, 50), (50, len(TEXT)), (10, 30), (4, 7)]

#: Recipes whose tokens know their text, and the classical one.
READERS = {
    "classical": lambda backbone: CausalTransformer(backbone),
    "echo": lambda backbone: EchoModule(backbone),
    "echo-repeated": lambda backbone: EchoModule(backbone, pool_copies="repeated"),
    "reba": lambda backbone: ReBAModule(backbone),
    "reba-chunks": lambda backbone: ReBAModule(backbone, chunk_length=7),
    "rerouting": lambda backbone: KVReroutingModule(backbone, pool_over="text", hybrid=False),
    "prepending": lambda backbone: TokenPrependingModule(backbone, template="{prepend}{text}", pool_over="text"),
    "prepending-blocks": lambda backbone: HierarchicalTokenPrependingModule(
        backbone, template="{prepend}{text}", block_length=4
    ),
    "bidirectional": lambda backbone: CausalTransformer(backbone, bidirectional_layers=1),
    "prompt": lambda backbone: CausalTransformer(backbone, template="sentence {text} in a word:"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_chunk_is_the_mean_of_its_tokens_in_one_pass(reader, shared):
    model = pipeline(READERS[reader](shared()))
    tokens = model.encode(TEXT, output_value="token_embeddings").numpy()
    offsets = model[0].token_offsets(TEXT)
    assert len(tokens) == len(offsets)
    found = encode_chunks(model, TEXT, spans=SPANS)
    assert found.spans == SPANS
    for (start, end), vector in zip(SPANS, found.vectors, strict=True):
        own = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
        assert relative_error(vector, tokens[own].mean(0)) < 1e-5


def test_rerouting_reads_the_mean_and_the_last_token_of_a_chunk(shared):
    tokens = pipeline(KVReroutingModule(shared(), pool_over="text", hybrid=False))
    states = tokens.encode(TEXT, output_value="token_embeddings").numpy()
    model = pipeline(KVReroutingModule(shared(), pool_over="text"))
    [vector] = encode_chunks(model, TEXT, spans=[(0, len(TEXT))]).vectors
    assert relative_error(vector, (states.mean(0) + states[-1]) / 2) < 1e-5
    assert relative_error(vector, model.encode(TEXT)) < 1e-5
    # The module itself is as it was.
    assert model.encode([TEXT], output_value="token_embeddings")[0].shape[0] == 2


def test_early_tokens_learn_of_what_follows_and_causal_ones_do_not(shared):
    other = TEXT[:50] + "and then there was nothing left to say about it."
    for reader, learns in (("classical", False), ("reba", True), ("rerouting", True), ("prepending", True)):
        model = pipeline(READERS[reader](shared()))
        first, second = (encode_chunks(model, text, spans=[(0, 23)]).vectors[0] for text in (TEXT, other))
        assert (relative_error(first, second) > 1e-4) is learns, reader


@pytest.mark.parametrize(
    ("mode", "reader"), paired(["mean", "lasttoken", "weightedmean", "max", "cls"], ["reba", "classical"])
)
def test_the_chunk_of_a_whole_text_is_what_encode_gives(mode, reader, shared):
    module = READERS[reader](shared())
    pooled = pipeline(module, mode)
    behind = [Centering.fit(pooled, TEXTS), WhiteningTransform.fit(pooled, TEXTS, dimension=3), Normalize()]
    model = SentenceTransformer(modules=[*pooled.children(), *behind], device="cpu")
    found = encode_chunks(model, TEXTS, spans=[[(0, len(text))] for text in TEXTS], batch_size=2)
    assert relative_error(np.concatenate([each.vectors for each in found]), model.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize(("kind", "pool_over"), paired(["bytes", "sentencepiece", "bert", "greedy"], ["text", "all"]))
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
    split = next(i for i, (first, _) in enumerate(model[0].token_offsets(TEXT)) if first >= middle) + 1
    assert relative_error(found.vectors[0], states[:split].mean(0)) < 1e-5
    assert relative_error(found.vectors[1], states[split:].mean(0)) < 1e-5


def test_a_module_that_hands_on_the_last_token_alone(shared):
    model = pipeline(ReBAModule(shared(), rows="last"), "lasttoken")
    every = pipeline(ReBAModule(shared()), "lasttoken")
    found, expected = (encode_chunks(each, TEXT, spans=SPANS).vectors for each in (model, every))
    assert relative_error(found, expected) < 1e-6
    assert model[0].rows == "last"


def test_weights_of_tokens_count_within_a_chunk(shared):
    module = shared()
    model = pipeline(module)
    weighted = SentenceTransformer(modules=[module, IdfWeights.fit(module, TEXTS), model[1]], device="cpu")
    [vector] = encode_chunks(weighted, TEXT, spans=[(0, len(TEXT))]).vectors
    assert relative_error(vector, weighted.encode(TEXT)) < 1e-5


@given(
    texts=st.lists(st.sampled_from([*TEXTS, "", "a b c " * 30]), min_size=1, max_size=5),
    length=st.integers(1, 12),
    data=st.data(),
)
@settings(max_examples=examples(40))
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


def test_tokens_are_counted_and_shared():
    own = [(i, i + 1) for i in range(10)]
    assert _cut(own, 4, 0) == [(0, 4), (4, 8), (8, 10)]
    assert _cut(own, 4, 1) == [(0, 4), (3, 7), (6, 10)]
    assert _cut(own, 10, 9) == [(0, 10)]
    assert _cut([], 3, 1) == []


def test_a_character_of_several_tokens_is_not_divided():
    own = [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert _cut(own, 2, 0) == [(0, 1), (1, 2), (2, 3)]
    assert _cut(own, 4, 3) == [(0, 2), (1, 3)]
    assert _cut(own, 1, 0) == [(0, 1), (1, 2), (2, 3)]


def test_a_character_of_several_tokens_behind_a_short_chunk(shared):
    """The overlap would begin before the text does."""
    found = encode_chunks(pipeline(CausalTransformer(shared())), "a\U0001f9a9", chunk_tokens=3, overlap=2)
    assert found.spans[0][0] == 0
    assert found.spans[-1][1] == 2
    assert _cut([(0, 1), *[(1, 2)] * 3], 3, 2) == [(0, 1), (1, 2)]


@given(tokens=st.lists(st.integers(1, 6), max_size=12), length=st.integers(1, 8), data=st.data())
def test_what_holds_of_chunks_whatever_a_character_takes(tokens, length, data):
    overlap = data.draw(st.integers(0, length - 1))
    own = [(character, character + 1) for character, count in enumerate(tokens) for _ in range(count)]
    spans = _cut(own, length, overlap)
    assert set().union(*(range(*span) for span in spans)) == set(range(len(tokens)))
    for one, other in itertools.pairwise(spans):
        assert one[0] < other[0] <= one[1] < other[1]
    for start, end in spans:
        assert end - start == 1 or sum(tokens[start:end]) <= length
    if set(tokens) == {1}:
        assert all(end - start == length for start, end in spans[:-1])
        assert all(one[1] - other[0] == overlap for one, other in itertools.pairwise(spans))


class TestLongTexts:
    LONG = " ".join(f"word {index} of a long text" for index in range(60))

    def test_each_chunk_is_read_in_a_window(self, backbone_path):
        model = pipeline(CausalTransformer(backbone_path(), max_seq_length=40))
        found = encode_chunks(model, self.LONG, chunk_tokens=8)
        whole = pipeline(CausalTransformer(backbone_path("gpt_neox"), max_seq_length=None))
        assert whole.max_seq_length is None or whole.max_seq_length < len(model[0].token_ids([self.LONG])[0])
        assert found.spans[-1][1] == len(self.LONG)
        assert "".join(self.LONG[slice(*span)] for span in found.spans) == self.LONG
        # By hand: the first window that holds the chunk whole, of half the last one's tokens.
        own = model[0].own_offsets([self.LONG])[0]
        length, step = 32, 16
        for span, vector in list(zip(found.spans, found.vectors, strict=True))[:-1:3]:
            behind = next(i for i, (_, end) in enumerate(own) if end == span[1]) + 1
            start = min(-(-max(0, behind - length) // step) * step, len(own) - length)
            window = (own[start][0], own[start + length - 1][1])
            part = self.LONG[slice(*window)]
            tokens = model.encode(part, output_value="token_embeddings").numpy()
            mine = [
                i
                for i, (a, b) in enumerate(model[0].token_offsets(part))
                if a < span[1] - window[0] and b > span[0] - window[0]
            ]
            assert relative_error(vector, tokens[mine].mean(0)) < 1e-5

    @pytest.mark.parametrize(
        ("kind", "pool_over"), paired(["bytes", "sentencepiece", "bert", "greedy"], ["all", "text"])
    )
    def test_every_chunk_has_its_tokens_whatever_the_tokenizer(self, kind, pool_over, backbone_path):
        model = pipeline(CausalTransformer(backbone_path("llama", kind), max_seq_length=24, pool_over=pool_over))
        found = encode_chunks(model, [self.LONG[:400], TEXT], chunk_tokens=5, overlap=2, prompt="so: ", batch_size=3)
        assert found[0].spans[-1][1] == 400
        assert np.isfinite(found[0].vectors).all()
        assert (np.abs(found[0].vectors).sum(1) > 0).all()

    def test_a_text_that_just_fits_is_read_whole(self, backbone_path):
        model = pipeline(ReBAModule(backbone_path()))
        length = len(model[0].token_ids([TEXT])[0])
        model.max_seq_length = length
        assert relative_error(encode_chunks(model, TEXT, spans=[(0, len(TEXT))]).vectors[0], model.encode(TEXT)) < 1e-5
        model.max_seq_length = length - 1
        with pytest.raises(ValueError, match="tokens, and the model reads"):
            encode_chunks(model, TEXT, spans=[(0, len(TEXT))])


@pytest.mark.parametrize("span", [(0, 0), (-1, 3), (2, 1), (0, 1000), (0.0, 2), "ab", (1, 2, 3), 5, (True, 2), None])
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
        ({"spans": [[(0, 1)]], "chunk_tokens": 3}, "either as spans, or by chunk_tokens"),
        ({"spans": []}, "1 texts and 0 lists of spans"),
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
    ("made", "message"),
    [
        (lambda backbone: CausalTransformer(backbone, template="prompteol"), "CausalTransformer is read to the end of"),
        (lambda backbone: KVReroutingModule(backbone), "KVReroutingModule is read to the end of its prompt"),
        (
            lambda backbone: MetaEOLModule(backbone, templates=["So {text}:"]),
            "MetaEOLModule hands on one vector a pro",
        ),
        (lambda backbone: RefinedThoughtModule(backbone), "RefinedThoughtModule gives a text as a whole its vector"),
        (lambda backbone: ValueAggregationModule(backbone), "ValueAggregationModule gives a text as a whole"),
        (lambda backbone: EarlyLateModule(backbone, early_layer=2), "EarlyLateModule gives all tokens of a text the"),
        (lambda backbone: CausalTransformer(backbone, pool_over="whole"), 'has pool_over="whole"'),
        (lambda backbone: EchoModule(backbone, repetitions=3, pool_copies="repeated"), 'use pool_copies="last"'),
    ],
)
def test_recipes_without_vectors_of_tokens_are_refused(made, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_chunks(pipeline(made(shared())), "abc", chunk_tokens=2)


def test_other_models_are_refused(encoder_paths):
    from sentence_transformers.base.modules import Transformer

    model = SentenceTransformer(modules=[(t := Transformer(encoder_paths()[0])), Pooling(t.get_embedding_dimension())])
    with pytest.raises(ValueError, match="first module is Transformer: chunks are read by one of st_reba's"):
        encode_chunks(model, "abc", chunk_tokens=2)


def test_settings_of_encode(shared):
    model = pipeline(CausalTransformer(shared()))
    kept = encode_chunks(model, TEXT, spans=[(0, len(TEXT))], truncate_dim=5, normalize_embeddings=True)
    expected = model.encode(TEXT, truncate_dim=5, normalize_embeddings=True)
    assert relative_error(kept.vectors[0], expected) < 1e-5
    assert encode_chunks(model, "", chunk_tokens=4, truncate_dim=5).vectors.shape == (0, 5)


def test_chunks_are_pooled_a_few_at_a_time(shared):
    model = pipeline(CausalTransformer(shared()))
    expected = encode_chunks(model, TEXT, spans=SPANS).vectors
    assert relative_error(encode_chunks(model, TEXT, spans=SPANS, batch_size=2).vectors, expected) < 1e-6


def test_half_precision_and_one_by_one(backbone_path):
    model = pipeline(CausalTransformer(backbone_path(), deterministic=True, model_kwargs={"dtype": torch.bfloat16}))
    alone = [encode_chunks(model, text, spans=[(0, len(text))]).vectors for text in TEXTS]
    together = encode_chunks(model, TEXTS, spans=[[(0, len(text))] for text in TEXTS])
    assert all((one == each.vectors).all() for one, each in zip(alone, together, strict=True))
    assert st_reba.DocumentChunks is type(together[0])


def test_on_an_accelerator(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    expected = encode_chunks(model, TEXT, spans=SPANS)
    with SeveralDevices():
        put(model, FIRST)
        found = encode_chunks(model, TEXT, spans=SPANS)
    assert np.allclose(found.vectors, expected.vectors, atol=1e-6)
