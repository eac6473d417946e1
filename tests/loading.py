"""Tiny models that are loaded again and again, read twice and then copied: to read one takes five times as long.

So are their tokenizers and configurations, which one loading asks for three times.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

#: Directories of models that stay as they are for the whole session: what is read there for the first time is kept.
LASTING: set[str] = set()

#: Which transformers does not read.
OF_ST = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")

Copies = Callable[[], Any]


@contextmanager
def read_once() -> Iterator[None]:
    """In this context, ``from_pretrained`` gives copies of what it has read before.

    Of any directory with the same content, asked for in the same way, since most of what tests save is a few backbones.
    """
    kept: dict[tuple[Any, ...], Copies | None] = {}

    def once(kind: Any, identity: Callable[[Path], Any], *, at_once: bool = False) -> Any:
        read = vars(kind)["from_pretrained"].__func__

        def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            directory = Path(str(path)) / (kwargs.get("subfolder") or "")
            if not directory.is_dir() or "gguf_file" in kwargs:
                return read(cls, path, *args, **kwargs)
            try:
                settings = sorted((name, value) for name, value in kwargs.items() if name != "subfolder")
                asked = tuple(map(_known_by, (*args, *itertools.chain(*settings))))
                key = (kind, cls, identity(directory), torch.get_default_dtype(), *asked)
            except TypeError:
                return read(cls, path, *args, **kwargs)
            copied = kept.get(key)
            if copied is None:
                loaded = read(cls, path, *args, **kwargs)
                if getattr(loaded, "vocab_file", None):
                    # Which it copies from there when it is saved.
                    return loaded
                lasts = at_once or key in kept or str(directory) in LASTING
                kept[key] = _copies_of(loaded) if lasts else None
                return loaded
            return _named(copied(), path)

        return classmethod(from_pretrained)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PreTrainedModel, "from_pretrained", once(PreTrainedModel, _by_weights))
        patched.setattr(AutoConfig, "from_pretrained", once(AutoConfig, _by_settings, at_once=True))
        patched.setattr(AutoProcessor, "from_pretrained", once(AutoProcessor, _by_settings))
        patched.setattr(AutoTokenizer, "from_pretrained", once(AutoTokenizer, _by_settings))
        yield


def _known_by(value: Any) -> Any:
    """What tells an argument from another.

    Raises:
        TypeError: If nothing does.
    """
    if isinstance(value, PreTrainedConfig):
        # Whose copies are told where they were read.
        settings = {**value.to_dict(), "_name_or_path": None}
        return type(value), json.dumps(settings, default=repr, sort_keys=True)
    if isinstance(value, dict):
        if "_adapter_model_path" in value:
            # An adapter lies in a directory of its own, which another test may have under the same name.
            raise TypeError(value)
        return tuple(map(_known_by, itertools.chain(*value.items())))
    if value is None or isinstance(value, (str, int, float, torch.dtype)):
        return value
    raise TypeError(value)


def _by_settings(directory: Path) -> Any:
    """The content of all that is neither weights nor sentence-transformers' own."""
    content: list[Any] = []
    for file in sorted(directory.iterdir()):
        others = file.suffix in (".safetensors", ".bin", ".md") or file.name in OF_ST
        content.append((file.name, None if others or file.is_dir() else _content(file)))
    return tuple(content)


def _by_weights(directory: Path) -> Any:
    """The content of weights and configuration.

    Raises:
        TypeError: If what is read lies elsewhere, too.
    """
    files = [file for file in sorted(directory.iterdir()) if file.is_file()]
    if any(file.suffix == ".py" or file.name == "adapter_config.json" for file in files):
        raise TypeError(directory)
    read = [file for file in files if file.suffix in (".safetensors", ".bin") or file.name.endswith("onfig.json")]
    read += [file for file in files if file.name.endswith(".index.json")]
    relevant = [file for file in read if not file.name.startswith(("tokenizer", "sentence", "processor"))]
    return tuple((file.name, _content(file)) for file in relevant)


def _content(file: Path) -> bytes:
    stat = file.stat()
    return _digest(file, *stat[:7], stat.st_mtime_ns)


@functools.cache
def _digest(file: Path, *stat: int) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _named(loaded: Any, path: Any) -> Any:
    """What is loaded, a model with a report too, says where it was read."""
    own = loaded[0] if isinstance(loaded, tuple) else loaded
    if isinstance(own, PreTrainedModel):
        own.config._name_or_path = str(path)
    if isinstance(own, PreTrainedConfig):
        own._name_or_path = str(path)
    else:
        own.name_or_path = str(path)
    if isinstance(own, PreTrainedTokenizerBase):
        own.init_kwargs["name_or_path"] = str(path)
    return loaded


def _copies_of(loaded: Any) -> Copies:
    """Gives copies of a model or a tokenizer as it is now, in a fifth of the time that ``copy.deepcopy`` takes: all but
    its tensors is pickled."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            if id(value) not in places:
                places[id(value)] = len(tensors)
                tensors.append(copy.deepcopy(value))
            return places[id(value)]

    stream = io.BytesIO()
    try:
        Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(loaded)
    except (pickle.PicklingError, AttributeError, TypeError):
        # It has something that only its own code can make.
        return functools.partial(copy.deepcopy, copy.deepcopy(loaded))

    class Unpickler(pickle.Unpickler):
        def __init__(self) -> None:
            super().__init__(io.BytesIO(stream.getvalue()))
            self._own = copy.deepcopy(tensors)

        def persistent_load(self, place: int) -> Tensor:
            return self._own[place]

    return lambda: Unpickler().load()
