"""How a server may read texts: as the saved model does, or with one of the faults that servers have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from sentence_transformers.util import batch_to_device
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..modules import CausalModule, CausalTransformer
from ..text.layout import NOT_TEXT
from ..text.templates import PoolOver

#: Modes of pooling that servers have.
_MODES = {"mean": "the mean of all tokens", "lasttoken": "the last token", "cls": "the first token"}

#: A token that is added, or None for one that is left out; and whether that is at the end, or else at the beginning.
Edit = tuple[int | None, bool]


@dataclass(frozen=True)
class Reading:
    """A way to embed a text with the weights of a saved model.

    Attributes:
        model: The pipeline.
        prompt: What stands before a text.
        edits: What is done to its tokens.
        length: Tokens of a text that are read; None: as many as the model reads.
        from_end: Whether what is too long loses its beginning.
        causes: What is done otherwise than the saved model does it, in words.
    """

    model: SentenceTransformer
    prompt: str | None
    edits: tuple[Edit, ...] = ()
    length: int | None = None
    from_end: bool = False
    causes: tuple[str, ...] = ()

    @torch.inference_mode()
    def embed(self, text: str) -> np.ndarray:
        """The vector of one text, on its own."""
        tokenizer = self.model.tokenizer
        with ExitStack() as undo:
            if self.from_end:
                limit = text_limit(self.model, self.prompt)
                read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
                text = text if limit is None or len(read) <= limit else text[read[-limit][0] :]
            elif self.length is not None and isinstance(tokenizer, Tokenizer):
                # That of a static model, which cuts no text.
                tokenizer.enable_truncation(self.length)
                undo.callback(tokenizer.no_truncation)
            elif self.length is not None:
                extra = 0 if isinstance(self.model[0], CausalModule) else _around(self.model, self.prompt)
                undo.callback(setattr, tokenizer, "model_max_length", tokenizer.model_max_length)
                tokenizer.model_max_length = self.length + extra
            features = self.model.preprocess([text], prompt=self.prompt)
        for token, at_end in self.edits:
            features = _edited(features, token, at_end)
        features = batch_to_device(features, self.model.device)
        vector: np.ndarray = self.model.eval()(features)["sentence_embedding"][0].double().cpu().numpy()
        return vector

    def otherwise(self, cause: str, **changes: Any) -> Reading:
        """The same with one thing changed."""
        return replace(self, causes=(*self.causes, cause), **changes)


def saved(model: SentenceTransformer, prompt_name: str | None) -> Reading:
    """As ``encode`` reads.

    Raises:
        ValueError: If the model has no such prompt.
    """
    if prompt_name is not None and prompt_name not in model.prompts:
        names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
        raise ValueError(f"--prompt-name {prompt_name}: the model has {names}.")
    name = prompt_name or model.default_prompt_name
    return Reading(model, model.prompts[name] if name is not None else None)


def text_limit(model: SentenceTransformer, prompt: str | None) -> int | None:
    """Tokens of a text that a model reads; None: no limit."""
    first = model[0]
    if isinstance(first, CausalModule):
        return first.max_tokens(prompt)
    limit = model.max_seq_length
    return None if limit is None or limit > 10**9 else max(1, limit - _around(model, prompt))


def faults(own: Reading) -> Iterator[Reading]:
    """Every fault that is looked for, but in how long a text may be."""
    return chain(_prompts(own), _specials(own), _poolings(own), _behind(own), _plain(own))


def lengths(own: Reading, tokens: int) -> Iterator[Reading]:
    """Every other length at which a text of so many tokens may be cut."""
    limit = text_limit(own.model, own.prompt)
    usual = {2**power - less for power in range(3, 16) for less in range(4)}
    if limit is not None:
        yield own.otherwise("a text that is too long loses its beginning and not its end", from_end=True)
    for length in sorted({*usual, tokens}):
        if not 1 <= length <= tokens or length == limit:
            continue
        if length < tokens:
            cause = f"texts are cut after {length} tokens, and the model reads {limit or 'all'}"
        else:
            cause = f"texts are not cut, and the model reads {limit} tokens"
        yield own.otherwise(cause, length=length)


def _prompts(own: Reading) -> Iterator[Reading]:
    if own.prompt:
        yield own.otherwise("the prompt is missing", prompt=None)
    for name, prompt in own.model.prompts.items():
        if prompt and prompt != own.prompt:
            yield own.otherwise(f'the prompt is that of "{name}"', prompt=prompt)


def _specials(own: Reading) -> Iterator[Reading]:
    tokenizer = own.model.tokenizer
    ids = own.model.preprocess(["a"], prompt=own.prompt).get("input_ids")
    # A static model adds none.
    if isinstance(tokenizer, Tokenizer) or not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.shape[1]:
        return
    for called, at_end, known in (
        ("an end token (EOS)", True, {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}),
        ("a begin token (BOS)", False, {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}),
    ):
        if int(ids[0, -1 if at_end else 0]) in known:
            missing = f"the {called.partition(' ')[2]} is missing"
            yield own.otherwise(missing, edits=(*own.edits, (None, at_end)))
        elif known:
            yield own.otherwise(f"{called} is added", edits=(*own.edits, (min(known), at_end)))


def _poolings(own: Reading) -> Iterator[Reading]:
    first: Any = own.model[0]
    for place, part in enumerate(own.model.children()):
        if not isinstance(part, Pooling) or not isinstance(part.pooling_mode, str):
            continue
        # What pools otherwise needs every token that the first module reads.
        every = own.model if getattr(first, "rows", "all") == "all" else _with(own.model, 0, _set(first, rows="all"))
        for mode, called in _MODES.items():
            if mode != part.pooling_mode:
                other = Pooling(part.embedding_dimension, mode, part.include_prompt)
                cause = f"pooling is {called}, and the model's is {_MODES.get(part.pooling_mode, part.pooling_mode)}"
                yield own.otherwise(cause, model=_with(every, place, other))
        for over in get_args(PoolOver) if isinstance(first, CausalModule) else ():
            if over != first.pool_over:
                cause = f'pooling is over what pool_over="{over}" means, and the model\'s is "{first.pool_over}"'
                yield own.otherwise(cause, model=_with(own.model, 0, _set(first, pool_over=over)))
        if own.prompt:
            other = Pooling(part.embedding_dimension, part.pooling_mode, not part.include_prompt)
            cause = f"the prompt's tokens are {'left out of' if part.include_prompt else 'part of'} the pooling"
            yield own.otherwise(cause, model=_with(own.model, place, other))


def _behind(own: Reading) -> Iterator[Reading]:
    """Modules behind the pooling that servers do not know."""
    parts = list(own.model.children())
    pooled = next((place for place, part in enumerate(parts) if isinstance(part, Pooling)), len(parts))
    for place, part in enumerate(parts[pooled + 1 :], pooled + 1):
        # Normalization shows by the vectors' lengths.
        if not isinstance(part, Normalize):
            cause = f"{type(part).__name__}, which stands behind the pooling, is missing"
            yield own.otherwise(cause, model=_with(own.model, place, nn.Identity()))


def _plain(own: Reading) -> Iterator[Reading]:
    """What a server does that knows the architecture and the pooling, and nothing of the recipe."""
    first = own.model[0]
    if not isinstance(first, CausalModule):
        return
    try:
        plain = CausalTransformer(first, pool_over="whole", rows="all")
    except ValueError:
        return
    if plain.get_embedding_dimension() != first.get_embedding_dimension():
        return
    plain.train(first.training)
    reading = own.otherwise(
        f"the recipe ({type(first).__name__}) is missing: texts are read as any language model reads them, once",
        model=_with(own.model, 0, plain),
    )
    yield reading
    yield from [*_prompts(reading), *_specials(reading), *_poolings(reading)]


def _set(module: Any, **settings: Any) -> Any:
    """A module that shares all but some settings with another."""
    other = copy.copy(module)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


def _with(model: SentenceTransformer, place: int, part: nn.Module) -> SentenceTransformer:
    """A model that shares all but one module with another."""
    other = copy.copy(model)
    other._modules = {**model._modules, list(model._modules)[place]: part}
    return other


def _edited(features: dict[str, Any], token: int | None, at_end: bool) -> dict[str, Any]:
    """What a tokenizer gives, with a token more or less: see :data:`Edit`."""
    length = features["input_ids"].shape[1]
    added = {"input_ids": token, "attention_mask": 1, "copy_index": NOT_TEXT}
    found = dict(features)
    for name, value in features.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != length:
            continue
        if token is None:
            found[name] = value[:, :-1] if at_end else value[:, 1:]
        else:
            own = torch.full_like(value[:, :1], added.get(name) or 0)
            found[name] = torch.cat((value, own) if at_end else (own, value), dim=1)
    return found


def _around(model: SentenceTransformer, prompt: str | None) -> int:
    """Tokens that stand around a text."""
    ids = model.preprocess(["a"], prompt=prompt)["input_ids"]
    return int(ids.shape[1]) - len(model.tokenizer("a", add_special_tokens=False)["input_ids"])
