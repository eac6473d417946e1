"""The layer states of texts on the disk, so that a frozen backbone reads each text once, whatever is trained on it."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ..files import atomic_file, remove_scratch
from ..lm.backbone import device
from ..lm.fingerprint import fingerprint
from ..modules import LayerStates

_HASH_BYTES = 16
_FORMAT = 1


class StatesCache:
    """What :class:`st_reba.modules.LayerStates` reads of texts, kept in float16 in a directory.

    The states of a model with these settings lie in a directory of their own, named by a fingerprint of both, and in it
    by a hash of the text, so that one cache serves many models and data sets. It only ever grows, by files that are
    there whole or not at all: a run that is killed loses what it had not yet written, a second process may write at the
    same time, and files are mapped into memory, not read, when they are opened.

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
        self.chunk_size = chunk_size
        self.directory = Path(directory) / _key(module)
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(self.directory)
        self._files: list[tuple[Tensor, Tensor]] = []
        self._rows: dict[bytes, tuple[int, int]] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            self._open(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, text: str) -> bool:
        return _hash(text) in self._rows

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
        missing = [text for text in dict.fromkeys(texts) if text not in self]
        for start in range(0, len(missing), self.chunk_size):
            chunk = sorted(missing[start : start + self.chunk_size], key=len)
            states = []
            for first in range(0, len(chunk), batch_size):
                states.append(self._read(chunk[first : first + batch_size]))
                if on_texts is not None:
                    on_texts(len(states[-1]))
            self._write(chunk, torch.cat(states))
        return len(missing)

    def states(self, texts: Sequence[str]) -> Tensor:
        """The states of texts that are in the cache, (B, L, D), float32, on the CPU.

        Raises:
            KeyError: If one of them is not.
        """
        places = [self._place(text) for text in texts]
        shape = (len(places), self.module.depth, self.module.get_embedding_dimension())
        found = torch.empty(shape, dtype=torch.float32)
        for file in {file for file, _ in places}:
            wanted = [index for index, (own, _) in enumerate(places) if own == file]
            rows = [places[index][1] for index in wanted]
            states, scales = self._files[file]
            found[wanted] = states[rows].float() * scales[rows][..., None]
        return found

    def _place(self, text: str) -> tuple[int, int]:
        """Its file, and its row there."""
        try:
            return self._rows[_hash(text)]
        except KeyError:
            raise KeyError(f"{text!r} is not in the cache {self.directory}: add it first.") from None

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

    def _write(self, texts: list[str], states: Tensor) -> None:
        scales = torch.exp2(torch.frexp(states.abs().amax(dim=-1)).exponent.float())
        hashes = np.frombuffer(b"".join(map(_hash, texts)), dtype=np.uint8).reshape(-1, _HASH_BYTES)
        tensors = {
            "hashes": torch.from_numpy(hashes.copy()),
            "states": (states / scales[..., None]).half(),
            "scales": scales,
        }
        path = self.directory / f"{uuid.uuid4().hex}.safetensors"
        with atomic_file(path) as stream:
            stream.write(save(tensors))
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                hashes, states, scales = (file.get_tensor(name) for name in ("hashes", "states", "scales"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Remove it; its texts are then read again.") from None
        number = len(self._files)
        self._files.append((states, scales))
        self._rows.update({row.tobytes(): (number, index) for index, row in enumerate(hashes.numpy())})


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


def _key(module: LayerStates) -> str:
    """Tells this model with these settings from any other: how it lays a text out goes in with what it is."""
    features = module.preprocess(["a"])
    layout = {name: part.tolist() for name, part in features.items()}
    settings = [
        _FORMAT,
        fingerprint(module.model, module.tokenizer, module.max_seq_length),
        module.pool_over,
        module.bidirectional_layers,
        module.normalize_text,
        module.tokenization,
        layout,
        *module.get_config_dict().get("changes", []),
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
