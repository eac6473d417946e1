"""What a tokenizer makes of strings: ids, which characters each stands for, and what it adds around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

#: First character, and one past the last.
Span = tuple[int, int]

# What byte-level tokenizers write for a blank, and SentencePiece for one and for a byte.
_BYTE_LEVEL_BLANK = "Ġ"
_PIECE_BLANK = "▁"
# What json.loads makes of "\ud800": no UTF-8 holds it.
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
_PIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

# Texts that show a tokenizer's special tokens, and how many entries of its vocabulary make one if these have no tokens.
_SAMPLES = ("a b c 1 ?", "我 я")
_ENTRIES = 100


class Tokens(NamedTuple):
    """The tokens of a string, without special tokens.

    Attributes:
        ids: Their ids.
        spans: For each, the characters that it holds any part of; None where the tokenizer does not say and its
            tokens do not spell the string.
    """

    ids: list[int]
    spans: list[Span] | None


def tokenized(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> list[Tokens]:
    """The tokens of each string, whole, without special tokens.

    Raises:
        ValueError: If the tokenizer refuses a string because half of a surrogate pair stands in it.
    """
    if not strings:
        return []
    try:
        encoded = tokenizer(
            list(strings),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=tokenizer.is_fast,
            verbose=False,
        )
    except Exception:
        # Each kind of tokenizer has an error of its own for it.
        for string in strings:
            if half := _HALF_OF_A_PAIR.search(string):
                raise ValueError(
                    f"A text, or a prompt, has half of a surrogate pair, {half[0]!r}, as its character "
                    f"{half.start() + 1} of {len(string)}, which is no character: leave it out, or decode the text "
                    'anew from its bytes, with errors="replace".'
                ) from None
        raise
    if tokenizer.is_fast:
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        # A server's tokenizer may not say where the tokens of a string lie.
        return [Tokens(ids, None if offsets is None else _untrimmed(tokenizer, ids, offsets)) for ids, offsets in pairs]
    return [
        Tokens(ids, _spelled(tokenizer.convert_ids_to_tokens(ids), string))
        for ids, string in zip(encoded["input_ids"], strings, strict=True)
    ]


def _untrimmed(tokenizer: PreTrainedTokenizerBase, ids: list[int], offsets: list[Span]) -> list[Span]:
    """The offsets with the blanks that a token begins with: byte-level tokenizers may leave them out."""
    spans: list[Span] = []
    reached = 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        if start > reached:
            piece = cast(str, tokenizer.convert_ids_to_tokens(token))
            start = max(reached, start - (len(piece) - len(piece.lstrip(_BYTE_LEVEL_BLANK))))
        spans.append((start, end))
        reached = max(reached, end)
    return spans


def _spelled(pieces: Sequence[str], string: str) -> list[Span] | None:
    """Where SentencePiece's pieces lie in the string; None where they do not spell it.

    They do not where the string was normalised, or has characters that are not in the vocabulary.
    """
    bytes_alone = [_PIECE_BYTE.fullmatch(piece) for piece in pieces]
    spelling = [
        bytes.fromhex(byte[1]) if byte else piece.replace(_PIECE_BLANK, " ").encode("utf-8", "surrogatepass")
        for piece, byte in zip(pieces, bytes_alone, strict=True)
    ]
    return spans_of(spelling, string)


def spans_of(spelling: Sequence[bytes], string: str) -> list[Span] | None:
    """The characters that each token of a string holds any part of, by the bytes that it spells.

    None where the tokens do not spell the string, or the string behind one blank.
    """
    whole, expected = b"".join(spelling), string.encode("utf-8", "surrogatepass")
    # The blank that SentencePiece puts in front.
    added = len(whole) - len(expected)
    if added not in (0, 1) or whole != b" " * added + expected:
        return None
    # Which character each byte belongs to.
    character = [number for number, letter in enumerate(string) for _ in letter.encode("utf-8", "surrogatepass")]
    spans, position = [], -added
    for part in spelling:
        first, last = max(position, 0), max(position + len(part) - 1, 0)
        position += len(part)
        spans.append((character[first], character[last] + 1) if expected else (0, 0))
    return spans


def cut(text: str, tokens: Tokens, count: int, side: str) -> Span:
    """The characters of a text that are left of it where it may have so many of its own tokens.

    A token that holds a part of a character is not kept without the others.

    Args:
        text: The text.
        tokens: Its own, with spans.
        count: How many may be left.
        side: The side to cut from, as tokenizers call it: ``"right"`` or ``"left"``.

    Returns:
        The first character that is left, and one past the last; the same where nothing is.
    """
    assert tokens.spans is not None
    if count >= len(tokens.ids):
        return 0, len(text)
    if count < 1:
        return 0, 0
    if side == "left":
        (_, before), (first, _) = tokens.spans[-count - 1], tokens.spans[-count]
        return max(before, first), len(text)
    (_, last), (behind, _) = tokens.spans[count - 1], tokens.spans[count]
    return 0, min(last, behind)


def separator(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A special token at which a tokenizer splits a string, as it does at any entry that is added to its vocabulary.

    None where there is none that takes no blanks with it, or the tokenizer does not say where its tokens lie.
    """
    if not tokenizer.is_fast:
        return None
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and not (token.lstrip or token.rstrip or token.single_word):
            [found] = tokenized(tokenizer, [f"a{token.content}a"])
            if (1, 1 + len(token.content)) in (found.spans or ()):
                return token.content
    return None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids a tokenizer puts before and after a text of its own accord, e.g. ``([CLS], [SEP])``.

    Raises:
        ValueError: If texts do not show them: the tokenizer reads a text differently with and without them, or puts
            other ones around other texts, or gives no text any tokens.
    """
    if tokenizer.is_fast and tokenizer.num_special_tokens_to_add() == 0:
        return [], []
    found = _around(tokenizer, _SAMPLES)
    if found is None:
        # It knows none of these characters: a text of its own entries, then.
        special = set(tokenizer.all_special_ids)
        entries = [token for token in range(min(len(tokenizer), _ENTRIES)) if token not in special]
        found = _around(tokenizer, [cast(str, tokenizer.decode(entries))])
    if found is None:
        name = type(tokenizer).__name__
        raise ValueError(f"{name} gives no tokens for any text that was tried: use the tokenizer of this model.")
    return found


def _around(tokenizer: PreTrainedTokenizerBase, samples: Sequence[str]) -> tuple[list[int], list[int]] | None:
    """What stands before and after the tokens of each of these texts alike; None where none has any.

    A text's first token may be the same as a special token: texts of several tokens are told from those.
    """
    found: tuple[list[int], list[int]] | None = None
    plain_ids = tokenizer([*samples], add_special_tokens=False)["input_ids"]
    for sample, plain, full in zip(samples, plain_ids, tokenizer([*samples])["input_ids"], strict=True):
        starts = [start for start in range(len(full) - len(plain) + 1) if full[start : start + len(plain)] == plain]
        ways = [(full[:start], full[start + len(plain) :]) for start in starts]
        if plain and (len(ways) != 1 or found not in (None, ways[0])):
            raise ValueError(
                f"{type(tokenizer).__name__} reads {sample!r} as {full} with special tokens and as {plain} without: "
                "special tokens cannot be told from the text, or are others than around other texts. Use a tokenizer "
                "that only adds tokens at the two ends, the same for every text."
            )
        if plain:
            found = ways[0]
    return found
