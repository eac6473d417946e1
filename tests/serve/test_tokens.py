"""How much of a long text is tokenised."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from st_reba.serve import models as tokens_file
from st_reba.serve.forms import RefusedError
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
    whole = tokens.ids(text)
    assert tokens.cut(text, 2, "'input'", whole=True) == (text, len(whole))
    for limit in (1, 100, 1000):
        part, count = tokens.cut(text, limit, "'input'")
        own = tokens.ids(part)
        read = slice(-limit, None) if made is from_end else slice(limit)
        assert own[read] == whole[read]
        assert count == len(own)
        # One token of this tokenizer stands for each two characters at least.
        if made in (byte_level, from_end) and name == "words":
            assert len(part) <= 8 * (limit + 256)


@pytest.mark.parametrize(("limit", "whole"), [(None, False), (16, False), (16, True)])
def test_a_text_that_would_be_tokenised_without_end(monkeypatch, limit, whole):
    monkeypatch.setattr(tokens_file, "CHARACTERS", 5_000)
    tokens = OwnTokenizer(word_piece())
    assert tokens.cut("a" * 5_000, limit, "'input'[0]", whole) == ("a" * 5_000, 1)
    with pytest.raises(RefusedError, match=r"^'input'\[0\] has 90,000 characters, and \d+,\d+ of them, .* in parts\.$"):
        tokens.cut("a" * 90_000, limit, "'input'[0]", whole)


@pytest.mark.parametrize("made", [byte_level, from_end])
def test_tokens_of_a_text_that_is_too_long(made):
    tokens = OwnTokenizer(made())
    ids = tokens.ids(WORDS * 500)
    read = slice(-100, None) if made is from_end else slice(100)
    assert tokens.ids(tokens.text(ids, 100, "'input'"))[read] == ids[read]
    with pytest.raises(RefusedError, match="token 5000 is -1"):
        tokens.text([*ids[:5000], -1], 100, "'input'")
