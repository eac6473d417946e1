"""Conversations as texts: what a tokenizer's chat template writes around the messages of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from .tokens import special_tokens

#: What is read of a conversation.
Chat = Literal["turn", "conversation"]

# Stands for the message that is read. No chat template writes it, and none would change it.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}st-reba\N{OBJECT REPLACEMENT CHARACTER}"


def is_conversation(given: Any) -> bool:
    """Whether this is a list of messages, or one message: ``{"role": ..., "content": ...}``."""
    messages = [given] if isinstance(given, Mapping) else given
    return (
        isinstance(messages, Sequence)
        and not isinstance(messages, str)
        and len(messages) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages)
    )


def read_as(
    tokenizer: PreTrainedTokenizerBase, conversation: Mapping[str, Any] | Sequence[Mapping[str, Any]], chat: Chat
) -> tuple[str, str]:
    """What stands before the text, and the text.

    Args:
        tokenizer: Has a chat template.
        conversation: See :func:`is_conversation`.
        chat: ``"turn"``: the text is the content of the last message, and all that the chat template writes before it
            stands before the text, as a prompt does; what it writes behind it is left out. ``"conversation"``: the text
            is all that the template writes.

    Raises:
        ValueError: If there is no chat template, it refuses the conversation or does not write its last message as it
            is, or a message has more than text.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "A conversation was given, and the tokenizer has no chat template: give the text itself, or a tokenizer "
            "with chat_template."
        )
    messages = [conversation] if isinstance(conversation, Mapping) else conversation
    said = [{**message, "content": _text_of(message["content"])} for message in messages]
    if chat == "conversation":
        return "", _without_begin(tokenizer, _written(tokenizer, said))
    before, *behind = _written(tokenizer, [*said[:-1], {**said[-1], "content": _MARK}]).split(_MARK)
    if len(behind) != 1:
        raise ValueError(
            f"The tokenizer's chat template writes the last message {len(behind)} times, so it is not known what "
            'stands before it: use chat="conversation".'
        )
    return _without_begin(tokenizer, before), said[-1]["content"]


def _text_of(content: Any) -> str:
    """The text of a message, which may come in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts or not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"A message has the content {content!r}: st_reba reads text, or a list of parts with text.")
    return "\n".join(part["text"] for part in parts)


def _written(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # whatever the template raises
        raise ValueError(f"The tokenizer's chat template refuses the conversation: {error}") from error


def _without_begin(tokenizer: PreTrainedTokenizerBase, written: str) -> str:
    """Without the beginning-of-text token, where the tokenizer puts one before every text itself."""
    begin = tokenizer.bos_token
    puts_it = begin and tokenizer.bos_token_id in special_tokens(tokenizer)[0]
    return written.removeprefix(begin) if puts_it else written
