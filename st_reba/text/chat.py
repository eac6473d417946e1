"""Conversations as texts, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from .tokens import special_tokens

#: Part of a conversation that is read.
Chat = Literal["turn", "conversation"]
#: A list of messages, or one message.
Conversation = Mapping[str, Any] | Sequence[Mapping[str, Any]]

# Placeholder of the message that is read, which no chat template writes or changes.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}st-reba\N{OBJECT REPLACEMENT CHARACTER}"


def is_conversation(given: Any) -> bool:
    """Return whether this is a list of messages, or one message: ``{"role": ..., "content": ...}``."""
    messages = [given] if isinstance(given, Mapping) else given
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    return is_list and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in messages)


def read_as(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, chat: Chat) -> tuple[str, str]:
    """Return the prompt and the text of a conversation.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: See :func:`is_conversation`.
        chat: ``"turn"``: the text is the content of the last message, and the prompt all that the chat template writes
            before it; what it writes after it is left out. ``"conversation"``: the text is all that it writes.

    Raises:
        ValueError: If there is no chat template, it refuses the conversation or does not write its last message as it
            is, or a message has more than text.
    """
    if not tokenizer.chat_template:
        problem = "A conversation was given, and the tokenizer has no chat template:"
        raise ValueError(f"{problem} give the text itself, or a tokenizer with chat_template.")
    messages = [conversation] if isinstance(conversation, Mapping) else conversation
    plain = [{**message, "content": _text_of(message["content"])} for message in messages]
    if chat == "conversation":
        return "", _without_begin(tokenizer, _apply(tokenizer, plain))
    before, *behind = _apply(tokenizer, [*plain[:-1], {**plain[-1], "content": _MARK}]).split(_MARK)
    if len(behind) != 1:
        raise ValueError(
            f"The tokenizer's chat template writes the last message {len(behind)} times, so that the text before it is "
            'not known. Use chat="conversation".'
        )
    return _without_begin(tokenizer, before), plain[-1]["content"]


def _text_of(content: Any) -> str:
    """Return the text of a message, which may come in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts or not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"A message has the content {content!r}: st_reba reads text, or a list of parts with text.")
    return "\n".join(part["text"] for part in parts)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # whatever the template raises
        raise ValueError(f"The tokenizer's chat template refuses the conversation: {error}") from error


def _without_begin(tokenizer: PreTrainedTokenizerBase, written: str) -> str:
    """Remove the beginning-of-text token if the tokenizer adds one before every text."""
    is_added = tokenizer.bos_token and tokenizer.bos_token_id in special_tokens(tokenizer)[0]
    return written.removeprefix(tokenizer.bos_token) if is_added else written
