"""How a server may read texts: as the saved model does, or with one of the faults that servers have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..modules import CausalModule, CausalTransformer
from ..text.layout import NOT_TEXT
from ..text.templates import PoolOver

#: Modes of pooling that servers have.
_MODES = {"mean": "the mean of all tokens", "lasttoken": "the last token", "cls": "the first token"}
_SPECIAL = {"eos": "end token (EOS)", "bos": "begin token (BOS)"}

_POOL_OVER: tuple[PoolOver, ...] = get_args(PoolOver)

Edit = Callable[[dict[str, Any]], dict[str, Any]]


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
        if self.from_end:
            text = self._ending(text)
        with self._limited():
            features = self.model.preprocess([text], prompt=self.prompt)
        for edit in self.edits:
            features = edit(features)
        features = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in features.items()
        }
        vector: np.ndarray = self.model.eval()(features)["sentence_embedding"][0].double().cpu().numpy()
        return vector

    def otherwise(self, cause: str, **changes: Any) -> Reading:
        """The same with one thing changed."""
        return replace(self, causes=(*self.causes, cause), **changes)

    def _ending(self, text: str) -> str:
        length = self.length or text_limit(self.model, self.prompt)
        offsets = self.model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text if length is None or len(offsets) <= length else text[offsets[-length][0] :]

    @contextmanager
    def _limited(self) -> Iterator[None]:
        tokenizer = self.model.tokenizer
        if self.length is None or self.from_end:
            yield
        elif isinstance(tokenizer, Tokenizer):
            # That of a static model, which cuts no text.
            tokenizer.enable_truncation(self.length)
            try:
                yield
            finally:
                tokenizer.no_truncation()
        else:
            before = tokenizer.model_max_length
            extra = 0 if isinstance(self.model[0], CausalModule) else _around(self.model, self.prompt)
            tokenizer.model_max_length = self.length + extra
            try:
                yield
            finally:
                tokenizer.model_max_length = before


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


def pairs(own: Reading) -> Iterator[Reading]:
    """Two faults at a time."""
    kinds = (_prompts, _specials, _poolings, _behind)
    for place, kind in enumerate(kinds):
        for reading in kind(own):
            yield from chain.from_iterable(other(reading) for other in kinds[place + 1 :])


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
    found = {
        "eos": {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None},
        "bos": {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None},
    }
    for name, known in found.items():
        at_end = name == "eos"
        if int(ids[0, -1 if at_end else 0]) in known:
            yield own.otherwise(f"the {_SPECIAL[name]} is missing", edits=(*own.edits, _without(at_end)))
        elif known:
            edit = _with(min(known), at_end)
            yield own.otherwise(f"an {_SPECIAL[name]} is added" if at_end else f"a {_SPECIAL[name]} is added",
                                edits=(*own.edits, edit))  # fmt: skip


def _poolings(own: Reading) -> Iterator[Reading]:
    for place, part in enumerate(own.model.children()):
        if not isinstance(part, Pooling) or not isinstance(part.pooling_mode, str):
            continue
        model = _all_tokens(own.model)
        for mode, called in _MODES.items():
            if mode != part.pooling_mode:
                other = Pooling(part.embedding_dimension, mode, part.include_prompt)
                cause = f"pooling is {called}, and the model's is {_MODES.get(part.pooling_mode, part.pooling_mode)}"
                yield own.otherwise(cause, model=_with_part(model, place, other))
        first = own.model[0]
        if isinstance(first, CausalModule):
            for over in _POOL_OVER:
                if over == first.pool_over:
                    continue
                other_first = copy.copy(first)
                other_first.pool_over = over
                cause = f'pooling is over what pool_over="{over}" means, and the model\'s is "{first.pool_over}"'
                yield own.otherwise(cause, model=_with_part(own.model, 0, other_first))
        if own.prompt:
            other = Pooling(part.embedding_dimension, part.pooling_mode, not part.include_prompt)
            cause = f"the prompt's tokens are {'left out of' if part.include_prompt else 'part of'} the pooling"
            yield own.otherwise(cause, model=_with_part(own.model, place, other))


def _behind(own: Reading) -> Iterator[Reading]:
    """Modules behind the pooling that servers do not know."""
    parts = list(own.model.children())
    pooled = next((place for place, part in enumerate(parts) if isinstance(part, Pooling)), len(parts))
    for place, part in enumerate(parts[pooled + 1 :], pooled + 1):
        # Normalization shows by the vectors' lengths.
        if not isinstance(part, Normalize):
            cause = f"{type(part).__name__}, which stands behind the pooling, is missing"
            yield own.otherwise(cause, model=_with_part(own.model, place, nn.Identity()))


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
        model=_with_part(own.model, 0, plain),
    )
    yield reading
    yield from [*_prompts(reading), *_specials(reading), *_poolings(reading)]


def _all_tokens(model: SentenceTransformer) -> SentenceTransformer:
    """A model whose first module hands on every token that it reads: what pools otherwise needs them."""
    if getattr(model[0], "rows", "all") == "all":
        return model
    first: Any = copy.copy(model[0])
    first.rows = "all"
    return _with_part(model, 0, first)


def _with_part(model: SentenceTransformer, place: int, part: nn.Module) -> SentenceTransformer:
    """A model that shares all but one module with another."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other._modules[list(model._modules)[place]] = part
    return other


def _without(at_end: bool) -> Edit:
    """Leaves out the first token, or the last."""

    def edit(features: dict[str, Any]) -> dict[str, Any]:
        length = features["input_ids"].shape[1]
        kept = slice(0, length - 1) if at_end else slice(1, length)
        return {name: value[:, kept] if _is_row(value, length) else value for name, value in features.items()}

    return edit


def _with(token: int, at_end: bool) -> Edit:
    """Adds a token before the first, or behind the last."""
    added = {"input_ids": token, "attention_mask": 1, "copy_index": NOT_TEXT}

    def edit(features: dict[str, Any]) -> dict[str, Any]:
        length = features["input_ids"].shape[1]
        found = dict(features)
        for name, value in features.items():
            if _is_row(value, length):
                own = torch.full_like(value[:, :1], added.get(name, 0))
                found[name] = torch.cat((value, own) if at_end else (own, value), dim=1)
        return found

    return edit


def _is_row(value: object, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == length


def _around(model: SentenceTransformer, prompt: str | None) -> int:
    """Tokens that stand around a text."""
    ids = model.preprocess(["a"], prompt=prompt)["input_ids"]
    return int(ids.shape[1]) - len(model.tokenizer("a", add_special_tokens=False)["input_ids"])
