from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from st_reba import HierarchicalTokenPrependingModule
from st_reba.text.layouts import _SENTENCE_END
from st_reba.text.tokens import special_tokens

from .. import oracles
from ..backbones import TEXTS, third
from ..conftest import long, paired, pipeline, relative_error
from .test_token_prepending import drawn

TOLERANCE = 1e-5
LONG = "The dog sat. The cat ran; it was late! 他不喜欢苹果。我爱自然语言处理。 Who knows?"


def laid_out(blocks, slot, front=()):
    """Ids with a slot a block in front and before each, whose state each slot takes, and where the text is."""
    ids, takes, text = [*front, *[slot] * len(blocks)], {}, []
    for number, block in enumerate(blocks):
        ids.append(slot)
        ids += block
        last = len(ids) - 1
        takes |= {len(front) + number: last, last - len(block): last}
        text += range(last + 1 - len(block), last + 1)
    return ids, takes, text


@pytest.mark.parametrize(("architecture", "settings"), paired(third(0), [(2, 3, 4), (3, 3, 1), (2, 2, 100)]))
def test_oracle(architecture, settings, shared, eager, token_ids):
    layers, output_layer, length = settings
    module = HierarchicalTokenPrependingModule(
        shared(architecture), prepend_layers=layers, output_layer=output_layer, block_length=length,
        whole_sentences=False,
    )  # fmt: skip
    model, slot = oracles.with_slot(eager(architecture), drawn(module))
    encoded = pipeline(module).encode([*TEXTS, ""], output_value="token_embeddings", batch_size=6)
    for text, value in zip(TEXTS, encoded, strict=False):
        words = token_ids(text)
        blocks = [words[start : start + length] for start in range(0, len(words), length)]
        ids, takes, positions = laid_out(blocks, slot)
        states = oracles.token_prepending(model, architecture, ids, takes, layers, output_layer)
        assert relative_error(value, states[positions]) < TOLERANCE, text
    assert not encoded[-1].any()


def blocks_of(module, text):
    """Ids of each block: what stands behind the slots within the text."""
    features = module.preprocess([text])
    marked = list(zip(features["input_ids"][0].tolist(), features["copy_index"][0].tolist(), strict=True))
    first = next((i for i, (_, copy) in enumerate(marked) if copy == 0), len(marked))
    blocks = []
    for token, copy in marked[max(0, first - 1) :]:
        if copy < -1:
            blocks.append([])
        elif copy == 0:
            blocks[-1].append(token)
    return blocks


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
def test_whole_sentences(kind, shared, eager):
    module = HierarchicalTokenPrependingModule(shared("llama", kind), block_length=1, template="x{prepend}{text} y")
    blocks = blocks_of(module, LONG)
    decode = module.tokenizer.decode
    expected = ["The dog sat.", "The cat ran; it was late!", "他不喜欢苹果。", "我爱自然语言处理。", "Who knows?"]
    if kind == "bytes":
        assert [decode(block).strip() for block in blocks] == expected
    assert len(blocks) == len(expected)
    assert [token for block in blocks for token in block] == module.tokenizer(LONG, add_special_tokens=False)[
        "input_ids"
    ]

    model, slot = oracles.with_slot(eager(), drawn(module))
    front = [*special_tokens(module.tokenizer)[0], *module.tokenizer("x", add_special_tokens=False)["input_ids"]]
    ids, takes, positions = laid_out(blocks, slot, front)
    after = module.tokenizer(" y", add_special_tokens=False)["input_ids"]
    states = oracles.token_prepending(model, "llama", [*ids, *after], takes, 2, 3)
    value = pipeline(module).encode([LONG, "a"], output_value="token_embeddings", batch_size=2)[0]
    assert relative_error(value, states[positions]) < TOLERANCE


def test_short_sentences_share_a_block(shared):
    module = HierarchicalTokenPrependingModule(shared(), block_length=12)
    module._warned_empty = True
    blocks = [blocks_of(module, text) for text in (LONG, "No end", "", "Version 3.14 of it.\nNext line")]
    assert all(len(block) >= 12 for row in blocks for block in row[:-1])
    assert 1 < len(blocks[0]) < 5
    assert [len(row) for row in blocks[1:3]] == [1, 0]


def test_ends_of_sentences():
    text = 'Version 3.14 of it.\n\nHe said: "No!" Really?! 什么？好。 e.g.'
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    found = [text[start:stop].strip() for start, stop in pairwise([0, *ends])]
    assert [part for part in found if part] == [
        "Version 3.14 of it.", 'He said: "No!"', "Really?!", "什么？", "好。", "e.g.",
    ]  # fmt: skip


def test_a_block_does_not_end_within_a_character(shared):
    """Of the three tokens of a Chinese full stop, each lies where the whole of it lies."""
    module = HierarchicalTokenPrependingModule(shared(), block_length=1)
    blocks = blocks_of(module, "他来了。我走了。")
    assert [module.tokenizer.decode(block) for block in blocks] == ["他来了。", "我走了。"]


def test_slots_within_the_text_are_not_handed_on(shared, token_ids):
    module = HierarchicalTokenPrependingModule(
        shared(), block_length=1, whole_sentences=False, pool_over="all", template="a{prepend}{text}b"
    )
    item = pipeline(module).encode("the cat", output_value=None)
    assert item["input_ids"].tolist() == [*token_ids("the cat"), *token_ids("b")]


@pytest.mark.parametrize("length", [1, 32, 1000, long(3)])
def test_long_texts_fill_the_room_and_no_more(length, shared):
    path = shared("gpt2")
    for whole in (False, True):
        module = HierarchicalTokenPrependingModule(path, block_length=length, whole_sentences=whole)
        ids = module.preprocess(["word " * 600 + "end. " * 3])["input_ids"]
        assert ids.shape[1] <= 256
        if not whole:
            assert ids.shape[1] >= 254
        assert np.isfinite(pipeline(module).encode("a. b! c? " * 300)).all()


def test_saved(shared, tmp_path):
    model = pipeline(HierarchicalTokenPrependingModule(shared(), block_length=3, seed=3))
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert (loaded[0].block_length, loaded[0].seed) == (3, 3)
    assert np.array_equal(loaded.encode([*TEXTS, LONG]), model.encode([*TEXTS, LONG]))


def test_a_tokenizer_that_does_not_say_where_its_tokens_lie(shared, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="does not say where its tokens lie, .* or whole_sentences=False"):
        HierarchicalTokenPrependingModule(shared())
    assert HierarchicalTokenPrependingModule(shared(), whole_sentences=False).block_length == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_length": 0}, "block_length=0: give the tokens of a block, 1 or more"),
        ({"block_length": 2.0}, "block_length=2.0: give the tokens"),
        ({"whole_sentences": "yes"}, "whole_sentences='yes': use True or False"),
        ({"template": "{text}"}, r"must have one \{prepend\}"),
        ({"prepend_layers": 4}, "prepend_layers=4: 3 layers"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        HierarchicalTokenPrependingModule(shared(), **settings)
