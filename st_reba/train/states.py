"""Tensors of texts on the disk: a frozen model reads each text once, whatever is trained on what it says."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ..files import atomic_file, remove_scratch
from ..lm.backbone import device
from ..lm.fingerprint import fingerprint, fingerprint_of
from ..modules import LayerStates

_HASH_BYTES = 16


class TextTensors:
    """Tensors of texts, kept in a directory by a hash of the text.

    It only ever grows, by files that are there whole or not at all: a run that is killed loses what it had not yet
    written, a second process may write at the same time, and files are mapped into memory, not read, when they are
    opened.

    Args:
        directory: Of what one model says; it is made.
        chunk_size: Texts that are written as one file.

    Raises:
        ValueError: If a file in it cannot be read.
    """

    def __init__(self, directory: Path, chunk_size: int) -> None:
        self.directory, self.chunk_size = directory, chunk_size
        directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(directory)
        self._files: list[dict[str, Tensor]] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self._open(path)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, text: str) -> bool:
        return _hash(text) in self._places

    def keep(self, texts: Iterable[str], read: Callable[[list[str]], dict[str, Tensor]]) -> int:
        """Read the texts that are not yet there, and keep what is read.

        Args:
            texts: Strings; a text that stands twice is read once.
            read: Gives tensors of some texts, by name, with a row for each text.

        Returns:
            How many texts were read.
        """
        missing = [text for text in dict.fromkeys(texts) if text not in self]
        for start in range(0, len(missing), self.chunk_size):
            chunk = missing[start : start + self.chunk_size]
            hashes = np.frombuffer(bytearray().join(map(_hash, chunk)), dtype=np.uint8).reshape(-1, _HASH_BYTES)
            path = self.directory / f"{uuid.uuid4().hex}.safetensors"
            with atomic_file(path) as stream:
                stream.write(save({"hashes": torch.from_numpy(hashes), **read(chunk)}))
            self._open(path)
        return len(missing)

    def rows(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """What was read of texts, by name, a row for each.

        Raises:
            KeyError: If one of them is not there.
        """
        found: dict[str, Tensor] = {}
        places = []
        for text in texts:
            place = self._places.get(_hash(text))
            if place is None:
                raise KeyError(f"{text!r} is not in the cache {self.directory}: add it first.")
            places.append(place)
        files, rows = torch.tensor(places).unbind(dim=1)
        for file in files.unique().tolist():
            for name, tensor in self._files[file].items():
                whole = found.setdefault(name, tensor.new_empty((len(texts), *tensor.shape[1:])))
                whole[files == file] = tensor[rows[files == file]]
        return found

    def _open(self, path: Path) -> None:
        try:
            tensors = load_file(path)
            hashes = tensors.pop("hashes").numpy()
        except (SafetensorError, OSError, KeyError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Remove it; its texts are then read again.") from None
        self._places.update({own.tobytes(): (len(self._files), row) for row, own in enumerate(hashes)})
        self._files.append(tensors)


class StatesCache(TextTensors):
    """What :class:`st_reba.modules.LayerStates` reads of texts, kept in float16 in a directory.

    The states of a model with these settings lie in a directory of their own, named by a fingerprint of both, and in it
    by a hash of the text, so that one cache serves many models and data sets: see :class:`TextTensors`.

    A text takes 2 L D bytes: 48 KiB with GPT-2 medium. A state is stored with a scale of its own, a power of two, since
    the residual stream of some models leaves the range of float16; what is read back is within 2^-11 of the largest
    number in the state.

    Args:
        directory: Where the caches of all models lie.
        module: The model whose states they are.
        chunk_size: Texts that are written as one file.

    Raises:
        ValueError: If a file in it cannot be read.
    """

    def __init__(self, directory: str | Path, module: LayerStates, *, chunk_size: int = 4096) -> None:
        self.module = module
        # How the module lays a text out goes in with what it is.
        layout = {name: part.tolist() for name, part in module.preprocess(["a"]).items()}
        key = fingerprint_of(
            fingerprint(module.model, module.tokenizer, module.max_seq_length), module.pool_over,
            module.bidirectional_layers, module.normalize_text, module.tokenization, layout,
            *module.get_config_dict().get("changes", []),
        )  # fmt: skip
        super().__init__(Path(directory) / key, chunk_size)

    def add(self, texts: Iterable[str], *, batch_size: int = 64, on_texts: Callable[[int], None] | None = None) -> int:
        """Read the texts that are not yet in the cache, and keep their states.

        Args:
            texts: Strings; a text that stands twice is read once.
            batch_size: Texts at a time.
            on_texts: Called with the number of texts whenever some of them have been read.

        Returns:
            How many texts were read.

        Raises:
            ValueError: If a state is not finite, so that nothing could be learnt from it.
        """

        def read(chunk: list[str]) -> dict[str, Tensor]:
            batches = []
            for first in range(0, len(chunk), batch_size):
                batches.append(self._read(chunk[first : first + batch_size]))
                if on_texts is not None:
                    on_texts(len(batches[-1]))
            states = torch.cat(batches)
            scales = torch.exp2(torch.frexp(states.abs().amax(dim=-1)).exponent.float())
            return {"states": (states / scales[..., None]).half(), "scales": scales}

        return self.keep(sorted(texts, key=len), read)

    def states(self, texts: Sequence[str]) -> Tensor:
        """The states of texts that are in the cache, (B, L, D), float32, on the CPU.

        Raises:
            KeyError: If one of them is not.
        """
        found = self.rows(texts)
        return found["states"].float() * found["scales"][..., None]

    @torch.inference_mode()
    def _read(self, texts: list[str]) -> Tensor:
        features = batch_to_device(self.module.eval().preprocess(texts), device(self.module.model))
        states = self.module(features)["layer_states"].float().cpu()
        if not bool(states.isfinite().all()):
            bad = next(text for text, own in zip(texts, states, strict=True) if not own.isfinite().all())
            raise ValueError(
                f"The states of {bad!r} are not finite: the model overflows in {self.module.model.dtype}. Load it in "
                "float32 or bfloat16."
            )
        return states


class ModelOnStates(SentenceTransformer):
    """What stands behind :class:`st_reba.modules.LayerStates` in a pipeline, as a model of its own.

    It trains and encodes like any other; what that module would read of a text, it looks up. Made by :meth:`of`.
    """

    _cache: StatesCache | None = None

    @classmethod
    def of(cls, module: nn.Module, cache: StatesCache) -> ModelOnStates:
        """The model of one module, which takes ``layer_states``, and of a cache with all the texts it will see."""
        model = cls(modules=[module])
        model._cache = cache
        return model

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """``layer_states`` (B, L, D), and ``input_ids``, by which ST's trainer knows a column of texts: (B,) numbers.

        Raises:
            ValueError: If there is a prompt: the cache holds texts as its module lays them out, without one.
            KeyError: If a text is not in the cache.
        """
        if prompt:
            raise ValueError(f"prompt={prompt!r}: cached states have none. Put it into the template of LayerStates.")
        cache = cast(StatesCache, self._cache)
        return {"input_ids": torch.arange(len(inputs)), "layer_states": cache.states(inputs)}


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
