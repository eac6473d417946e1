"""How much of a long text is tokenised."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from st_reba.serve import models as tokens_file
from st_reba.serve.models import OwnTokenizer

from ..backbones import DEMO_MODEL

WORDS = "the cat sat on the mat, and 我爱自然语言处理 ran. "


def byte_level():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def from_end():
    return AutoTokenizer.from_pretrained(DEMO_MODEL, truncation_side="left")


def word_piece():
    """Drops blanks and accents, and takes a word of more than 100 characters for one unknown token."""
    letters = {f"{mark}{letter}" for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz,.我爱自然语言处理"}
    vocabulary = {token: index for index, token in enumerate(["[UNK]", "the", *sorted(letters)])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def unigram():
    """Makes one blank of many."""
    inner = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((letter, -3.0) for letter in "▁abcdemnost"), ("▁the", -4.0)], 0)
    )
    inner.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TEXTS = {
    "words": WORDS * 2_000,
    "one word": "a" * 60_000,
    "blanks": f"the{' ' * 20_000}cat{' ' * 20_000}{WORDS * 200}",
    "accents": f"the a{chr(0x301) * 30_000} {WORDS * 200}",
    "a long word where it is cut": "the " * 2_000 + "a" * 40_000,
}


# From its end, the tokens of a long run of one letter depend on where it begins.
CASES = [(made, name) for made in (byte_level, from_end, word_piece, unigram) for name in TEXTS
         if made is not from_end or "word" not in name or name == "words"]  # fmt: skip


@pytest.mark.parametrize(("made", "name"), CASES)
def test_what_is_read_is_that_of_the_whole_text(made, name):
    text = TEXTS[name]
    tokens = OwnTokenizer(made())
    (whole,) = tokens.ids([text])
    for limit in (1, 100, 1000):
        part, count = tokens.cut(text, limit)
        (own,) = tokens.ids([part])
        read = slice(-limit, None) if made is from_end else slice(limit)
        assert own[read] == whole[read]
        assert count == len(own)
        # One token of this tokenizer stands for each two characters at least.
        if made in (byte_level, from_end) and name == "words":
            assert len(part) <= 8 * (limit + 256)


def test_a_short_text_is_whole():
    tokens = OwnTokenizer(byte_level())
    assert tokens.cut("a short text", 2) == ("a short text", len(tokens.ids(["a short text"])[0]))
    assert tokens.cut(WORDS * 100, None)[0] == WORDS * 100


def test_counting_all():
    tokens = OwnTokenizer(byte_level())
    text = WORDS * 2_000
    assert tokens.cut(text, 2, count_all=True) == (text, len(tokens.ids([text])[0]))


@pytest.mark.parametrize("limit", [None, 16])
def test_a_text_that_would_be_tokenised_without_end(monkeypatch, limit):
    monkeypatch.setattr(tokens_file, "CHARACTERS", 5_000)
    tokens = OwnTokenizer(word_piece())
    assert tokens.cut("a" * 5_000, limit) == ("a" * 5_000, 1)
    said = "the model reads all of them" if limit is None else r"\d+,\d+ of them have fewer tokens than the model reads"
    with pytest.raises(ValueError, match=f"has 90,000 characters, and {said}.*: send it in parts"):
        tokens.cut("a" * 90_000, limit)


def test_tokens_of_a_text_that_is_too_long():
    tokens = OwnTokenizer(byte_level())
    text = WORDS * 500
    (ids,) = tokens.ids([text])
    part = tokens.text(ids, 100)
    assert text.startswith(part.rstrip("\ufffd"))
    assert tokens.ids([part])[0][:100] == ids[:100]
    with pytest.raises(ValueError, match="token 5000 is -1"):
        tokens.text([*ids[:5000], -1], 100)
