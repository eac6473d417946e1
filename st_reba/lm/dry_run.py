"""Trying a language model out on a few tokens, and leaving it as it was: the one place where that is done.

Modes of its modules, hooks and the attention that it was told to use are afterwards what they were before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import backbone
from .precision import without_autocast

#: What a model raises that cannot be run in some way.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError)

#: What models are tried on: two texts that share their first token and their last.
TOKENS = ((0, 1, 2, 3), (0, 2, 1, 3))


@dataclass(frozen=True)
class Call:
    """One call of a module in a dry run: the first thing that it was given, and what it gave."""

    module: nn.Module
    given: Any
    gave: Any


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in this block as for inference, then leave each of its modules in the mode that it was in.

    ``train()`` would put all of them in one mode: a layer that was frozen by ``eval()`` would drop out again.
    """
    modes = [(module, module.training) for module in model.modules()]
    # What is read from a file is in it already, and each module that is told so takes as long as a small operation.
    if any(training for _, training in modes):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training


@contextmanager
def dry_run(model: Any, attention: str | None = None) -> Iterator[None]:
    """Try a model out in this block, and leave it as it was.

    Without dropout, gradients and autocast, whose rounding would look like another result.

    Args:
        model: A language model, or one of sentence-transformers.
        attention: The attention implementation that a language model is asked to use in this block; None: its own.
    """
    asked = contextlib.nullcontext() if attention is None else _attending_by(model, attention)
    with in_eval_mode(model), torch.inference_mode(), without_autocast(backbone.device(model)), asked:
        yield


def output_on(model: PreTrainedModel, attention: str | None = None, **kwargs: Any) -> Any:
    """What a model gives for :data:`TOKENS`, in a dry run.

    Hidden states are not asked for: transformers then leaves hooks on the model that cannot be pickled.
    """
    with dry_run(model, attention):
        input_ids = torch.tensor(TOKENS, device=backbone.device(model))
        return model(input_ids=input_ids, return_dict=True, **backbone.without_hidden_states(model), **kwargs)


@contextmanager
def noting_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Collect the calls of a model's modules in this block and this thread, those that ended first first."""
    calls: list[Call] = []
    thread = threading.get_ident()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == thread:
            calls.append(Call(module, next(iter((*args, *kwargs.values())), None), output))

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield calls


@contextmanager
def given_instead(changes: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Change the states that modules are given in this block and this thread."""
    thread = threading.get_ident()

    def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        if args:
            return (changes[module](args[0]), *args[1:]), kwargs
        name, states = next(iter(kwargs.items()))
        return args, {**kwargs, name: changes[module](states)}

    with contextlib.ExitStack() as hooks:
        for module in changes:
            hooks.callback(module.register_forward_pre_hook(change, with_kwargs=True).remove)
        yield


def gives_the_same(
    model: PreTrainedModel, both: Callable[[], tuple[Tensor, Tensor]], attention: str | None = None
) -> bool:
    """Whether a cheap way to run a model, or a part of it, gives what is expected; not so where it cannot be run.

    Args:
        model: It is tried in a dry run.
        both: Gives the states of the cheap way, and those expected.
        attention: As for :func:`dry_run`.
    """
    try:
        with dry_run(model, attention):
            found, expected = both()
    except CANNOT_RUN:
        return False
    return found.shape == expected.shape and close(found, expected)


def close(states: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding in the model's own precision."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Ask for an attention implementation, without the log line that answers where an architecture cannot follow."""
    # Not by its level: to set it takes longer than all the rest here, since each logger that there is forgets its own.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_an_error)
    try:
        model.set_attn_implementation(name)
    finally:
        logger.removeFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config in _configurations(model)]
    try:
        set_attention(model, name)
        if name == "eager":
            # Falcon reads this name at every call, yet does not let the public method set it.
            model.config._attn_implementation = name
        yield
    finally:
        # What is set on a configuration is set on its parts too, which come later here.
        for config, implementation in before:
            config._attn_implementation = implementation


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Those of a model, of its modules and of their parts, each before its own parts."""
    found: dict[int, PreTrainedConfig] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
