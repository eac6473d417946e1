"""What was computed before a run was stopped, for the run that goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..files import atomic_file, remove_scratch
from ..lm.fingerprint import fingerprint_of


class Kept:
    """Tensors in files, each named by a digest of all that it was computed from: what is there is not computed again.

    A file is there wholly or not at all, so that a run that was killed and goes on gives what it would have given.

    Args:
        directory: Where the files lie; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(directory)

    def get(self, computed_from: Any, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors, computed if they are not there.

        Args:
            computed_from: All that they depend on, as JSON or ``str`` can write it down.
            compute: Gives them by name.

        Raises:
            NoRoomError: If the disk is full.
        """
        path = self.directory / f"{fingerprint_of(computed_from)}.safetensors"
        if path.is_file():
            try:
                return load_file(path)
            except SafetensorError:
                path.unlink()
        found = {name: tensor.contiguous() for name, tensor in compute().items()}
        with atomic_file(path) as stream:
            stream.write(save(found))
        return found
