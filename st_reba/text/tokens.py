"""Tokens of strings and of words: ids, the characters that each holds, and what a tokenizer adds around a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

#: First character, and one past the last.
Span = tuple[int, int]

# Blanks of byte-level tokenizers and of SentencePiece, and a byte of SentencePiece.
_BYTE_LEVEL_BLANK = "Ġ"
_PIECE_BLANK = "▁"
_PIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# json.loads makes one of "\ud800". UTF-8 cannot encode it.
_HALF_SURROGATE = re.compile("[\ud800-\udfff]")

# Texts that show special tokens, and the number of vocabulary entries that make one if these have no tokens.
_SAMPLES = ("a b c 1 ?", "我 я")
_ENTRIES = 100


class Tokens(NamedTuple):
    """Tokens of a string, without special tokens.

    Attributes:
        ids: Token ids.
        spans: Characters of which each token holds any part; None if the tokenizer has no offsets, and its tokens do
            not spell the string.
    """

    ids: list[int]
    spans: list[Span] | None


def tokenize(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> list[Tokens]:
    """Tokenize strings without special tokens and without truncation.

    Raises:
        ValueError: If the tokenizer refuses a string because of half a surrogate pair.
    """
    if not strings:
        return []
    try:
        encoded = tokenizer(
            list(strings), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
            return_offsets_mapping=tokenizer.is_fast, verbose=False,
        )  # fmt: skip
    except Exception:
        # Each kind of tokenizer raises an error of its own.
        for string in strings:
            if half := _HALF_SURROGATE.search(string):
                raise ValueError(
                    f"A text or a prompt has half of a surrogate pair, {half[0]!r}, as its character "
                    f"{half.start() + 1} of {len(string)}. Remove it, or decode the text from its bytes with "
                    'errors="replace".'
                ) from None
        raise
    if tokenizer.is_fast:
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        # The tokenizer of a server may have no offsets.
        return [Tokens(ids, None if spans is None else _with_blanks(tokenizer, ids, spans)) for ids, spans in pairs]
    return [
        Tokens(ids, _spelled(tokenizer.convert_ids_to_tokens(ids), string))
        for ids, string in zip(encoded["input_ids"], strings, strict=True)
    ]


def _with_blanks(tokenizer: PreTrainedTokenizerBase, ids: list[int], offsets: list[Span]) -> list[Span]:
    """Extend offsets by the leading blanks that byte-level tokenizers leave out."""
    spans, reached = list[Span](), 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        if start > reached:
            piece = cast(str, tokenizer.convert_ids_to_tokens(token))
            start = max(reached, start - (len(piece) - len(piece.lstrip(_BYTE_LEVEL_BLANK))))
        spans.append((start, end))
        reached = max(reached, end)
    return spans


def _spelled(pieces: Sequence[str], string: str) -> list[Span] | None:
    """Return the spans of SentencePiece's pieces; None if these are not the string, or it behind one blank.

    They are not if the string was normalised, or has characters that are not in the vocabulary.
    """
    spelling = [*map(_bytes_of, pieces)]
    whole, expected = b"".join(spelling), string.encode("utf-8", "surrogatepass")
    # SentencePiece adds a blank at the front.
    added = len(whole) - len(expected)
    if added not in (0, 1) or whole != b" " * added + expected:
        return None
    # The character of each byte.
    character = [number for number, letter in enumerate(string) for _ in letter.encode("utf-8", "surrogatepass")]
    spans, position = [], -added
    for part in spelling:
        first, last = max(position, 0), max(position + len(part) - 1, 0)
        position += len(part)
        spans.append((character[first], character[last] + 1) if expected else (0, 0))
    return spans


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece."""
    byte = _PIECE_BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(_PIECE_BLANK, " ").encode("utf-8", "surrogatepass")


def cut(text: str, spans: Sequence[Span], count: int, side: str) -> Span:
    """Return the characters that stay of a text that may have ``count`` of its own tokens; the same twice if none.

    A token that holds a part of a character is not kept without the others.

    Args:
        text: The text.
        spans: Spans of its own tokens.
        count: Number of tokens that may stay.
        side: Side to cut from, as tokenizers call it: ``"right"`` or ``"left"``.
    """
    if count >= len(spans):
        return 0, len(text)
    if count < 1:
        return 0, 0
    if side == "left":
        return max(spans[-count - 1][1], spans[-count][0]), len(text)
    return 0, min(spans[count - 1][1], spans[count][0])


def separator(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a special token at which a tokenizer splits a string, as at any entry that is added to its vocabulary.

    None if all of them take blanks with them, or the tokenizer has no offsets.
    """
    if not tokenizer.is_fast:
        return None
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and not (token.lstrip or token.rstrip or token.single_word):
            [tokens] = tokenize(tokenizer, [f"a{token.content}a"])
            if (1, 1 + len(token.content)) in (tokens.spans or ()):
                return str(token.content)
    return None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer adds before and after a text, such as those of ``[CLS]`` and ``[SEP]``.

    Raises:
        ValueError: If they cannot be told from the text, or no text has tokens.
    """
    if tokenizer.is_fast and tokenizer.num_special_tokens_to_add() == 0:
        return [], []
    pairs = _pairs(tokenizer, _SAMPLES)
    name = type(tokenizer).__name__
    if not pairs:
        # It has no tokens for these characters: take a text of its own vocabulary.
        special = set(tokenizer.all_special_ids)
        entries = [token for token in range(min(len(tokenizer), _ENTRIES)) if token not in special]
        pairs = _pairs(tokenizer, [cast(str, tokenizer.decode(entries))])
    if not pairs:
        raise ValueError(f"{name} gives no tokens for any text that was tried: use the tokenizer of this model.")
    # A text may begin or end like the special tokens, so take what all texts have in common.
    common = set.intersection(*(_splits(plain, full) for plain, full in pairs))
    if len(common) != 1:
        plain, full = pairs[0]
        raise ValueError(
            f"{name} reads {_SAMPLES[0]!r} as {full} with special tokens and as {plain} without: special "
            "tokens cannot be told from the text, or are others than around other texts. Use a tokenizer that adds the "
            "same tokens at both ends of every text."
        )
    [(before, after)] = common
    return [*before], [*after]


def _pairs(tokenizer: PreTrainedTokenizerBase, samples: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each text that has any, without special tokens and with them."""
    plain = tokenizer([*samples], add_special_tokens=False)["input_ids"]
    return [pair for pair in zip(plain, tokenizer([*samples])["input_ids"], strict=True) if pair[0]]


def _splits(plain: list[int], full: list[int]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what is before and after ``plain`` wherever ``full`` contains it."""
    count = len(plain)
    starts = [start for start in range(len(full) - count + 1) if full[start : start + count] == plain]
    return {(tuple(full[:start]), tuple(full[start + count :])) for start in starts}


# Words

_WORD = re.compile(r"\w+")
#: Mark before the word that a prompt asks for.
QUOTE = '"'

# English words without a topic.
_ENGLISH = """
    a about above after again against all am an and any are as at be because been before being below between both but
    by can cannot could did do does doing down during each few for from further had has have having he her here hers
    herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on once
    only or other our ours ourselves out over own same she should so some such than that the their theirs them
    themselves then there these they this those through to too under until up very was we were what when where which
    while who whom why will with would you your yours yourself yourselves s t d ll m re ve
"""
STOP_WORDS = tuple(_ENGLISH.split())


def words_of(text: str, stop_words: Collection[str] = ()) -> list[str]:
    """Return the different words of a text, in lower case and order, without punctuation and stop words."""
    return [word for word in dict.fromkeys(_WORD.findall(text.lower())) if word not in stop_words]


def word_token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], stop_words: Collection[str] = ()
) -> list[list[int]]:
    """Return, for each text, the different tokens of its words right behind a quotation mark.

    Args:
        tokenizer: Tokenizer of the model.
        texts: B strings.
        stop_words: Words that are left out.
    """
    words = [words_of(text, stop_words) for text in texts]
    every = list(dict.fromkeys(word for of_text in words for word in of_text))
    ids: dict[str, list[int]] = {}
    for word, tokens in zip(every, tokenize(tokenizer, [QUOTE + word for word in every]), strict=True):
        if tokens.spans is None:
            # No offsets: take the tokens of the word alone.
            ids[word] = tokenize(tokenizer, [word])[0].ids
        else:
            # A token that holds the mark too cannot follow it.
            pairs = zip(tokens.ids, tokens.spans, strict=True)
            ids[word] = [token for token, (start, end) in pairs if start >= len(QUOTE) and end > start]
    return [list(dict.fromkeys(token for word in of_text for token in ids[word])) for of_text in words]


def lower_case_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[int]:
    """Return the tokens that can begin a word behind a quotation mark: lower-case letters of any script, no blank."""
    special = set(tokenizer.all_special_ids)
    tokens = []
    for token in range(min(vocabulary, len(tokenizer))):
        piece = str(tokenizer.convert_ids_to_tokens(token))
        # Blanks of byte-level tokenizers and SentencePiece, and parts of characters, do not decode to themselves.
        if token not in special and piece.isalpha() and piece == piece.lower() == str(tokenizer.decode([token])):
            tokens.append(token)
    return tokens
