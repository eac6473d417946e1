"""Token prepending, one slot or two for each block: where slots stand, and their vector on disk."""

from __future__ import annotations

import copy
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerFast

from st_reba import CausalTransformer, HierarchicalTokenPrependingModule, TokenPrependingModule
from st_reba.modules.changes import Prepend
from st_reba.text.layouts import _SENTENCE_END
from st_reba.text.tokens import special_tokens

from .. import oracles
from ..backbones import TEXTS, own
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE, Naive, laid_out_in_blocks, vector

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


LONG = "The dog sat. The cat ran; it was late! 他不喜欢苹果。我爱自然语言处理。 Who knows?"


@pytest.mark.parametrize("kind", ["bert", "sentencepiece"])
def test_with_special_tokens_and_a_prompt(kind, shared):
    module = TokenPrependingModule(shared("gpt2", kind), template="{prepend} {text}.", rows="last")
    plain = CausalTransformer(shared("gpt2", kind)).model
    model, slot = oracles.with_slot(plain, vector(Naive(plain, None), seed=0))
    before, after = ([2], [3]) if kind == "bert" else ([1], [])

    # As the authors do it: the slot is an entry that is added to the vocabulary.
    tokenizer = copy.deepcopy(module.tokenizer)
    tokenizer.add_tokens(["<PST>"])
    added = tokenizer.convert_tokens_to_ids("<PST>")

    encode = pipeline(module, "lasttoken").encode
    for text in TEXTS[:3]:
        whole = tokenizer(f"query:<PST> {text}.")["input_ids"]
        assert (whole[: len(before)], whole[len(whole) - len(after) :]) == (before, after)
        ids = [slot if token == added else token for token in whole]
        with torch.no_grad():
            states = oracles.token_prepending(model, "gpt2", ids, {ids.index(slot): -1}, 2, 3)
        assert relative_error(encode(text, prompt="query:"), states[-1]) < TOLERANCE


def test_a_prompt_with_a_slot_is_a_prompt(shared):
    """Only templates have slots: a text or a prompt that looks like one stays text."""
    module = TokenPrependingModule(shared())
    features = module.preprocess(["{prepend}"], prompt="{prepend}")
    assert (features["copy_index"] == -2).sum() == 1


class TestOnDisk:
    def test_the_vector_is_saved(self, shared, tmp_path):
        model = pipeline(TokenPrependingModule(shared(), seed=7), "lasttoken")
        other = pipeline(TokenPrependingModule(shared(), seed=8), "lasttoken")
        assert relative_error(model.encode(TEXTS), other.encode(TEXTS)) > 1e-3
        # Not the seed decides what is loaded, but the vector: another release may draw otherwise.
        model[0].initial_state.mul_(-2)
        model.save_pretrained(str(tmp_path))
        assert list(load_file(own(tmp_path) / Prepend.FILE)) == ["initial_state"]
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert torch.equal(loaded[0].initial_state, model[0].initial_state)
        assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))

    @pytest.mark.parametrize("state", [{"initial_state": torch.zeros(5)}, {"other": torch.zeros(32)}])
    def test_a_vector_of_another_model(self, state, shared, tmp_path):
        pipeline(TokenPrependingModule(shared())).save_pretrained(str(tmp_path))
        save_file(state, str(own(tmp_path) / Prepend.FILE))
        with pytest.raises(ValueError, match='under "initial_state", and the model.s input embeddings have 32 values'):
            SentenceTransformer(str(tmp_path), device="cpu")


def blocks_of(module, text):
    """Ids of each block: what stands behind the slots within the text."""
    features = module.preprocess([text])
    marked = list(zip(features["input_ids"][0].tolist(), features["copy_index"][0].tolist(), strict=True))
    first = next((i for i, (_, copy) in enumerate(marked) if copy == 0), len(marked))
    blocks = []
    for token, of_copy in marked[max(0, first - 1) :]:
        if of_copy < -1:
            blocks.append([])
        elif of_copy == 0:
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
    assert list(chain(*blocks)) == module.tokenizer(LONG, add_special_tokens=False)["input_ids"]

    front = [*special_tokens(module.tokenizer)[0], *module.tokenizer("x", add_special_tokens=False)["input_ids"]]
    behind = module.tokenizer(" y", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        states = laid_out_in_blocks(Naive(eager(), None), blocks, 2, 3, front=front, behind=behind)
    value = pipeline(module).encode([LONG, "a"], output_value="token_embeddings", batch_size=2)[0]
    assert relative_error(value, states) < TOLERANCE


def test_short_sentences_share_a_block(shared):
    module = HierarchicalTokenPrependingModule(shared(), block_length=12)
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


@pytest.mark.parametrize("length", [1, 32, 1000])
def test_long_texts_fill_the_room_and_no_more(length, shared):
    path = shared("gpt2")
    for whole in (False, True):
        module = HierarchicalTokenPrependingModule(path, block_length=length, whole_sentences=whole)
        ids = module.preprocess(["word " * 600 + "end. " * 3])["input_ids"]
        assert ids.shape[1] <= 256
        if not whole:
            assert ids.shape[1] >= 254
        assert np.isfinite(pipeline(module).encode("a. b! c? " * 300)).all()


def test_a_tokenizer_that_does_not_say_where_its_tokens_lie(shared, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="does not say where its tokens lie, .* or whole_sentences=False"):
        HierarchicalTokenPrependingModule(shared())
    assert HierarchicalTokenPrependingModule(shared(), whole_sentences=False).block_length == 32
