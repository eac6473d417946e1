"""A model's weights on the disk while another model needs the memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ..files import is_full


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Take a model's weights out of memory, and put them back at the end, to the bit.

    Whatever shares its parameters lacks them as well, and is not to be run meanwhile. Parameters of a type of their
    own, as those of quantised models, stay where they are; and so do all where the disk has no room.

    Args:
        model: On any devices.
    """
    plain = [parameter for parameter in model.parameters() if type(parameter) is nn.Parameter]
    with tempfile.TemporaryDirectory(prefix="st-reba-") as directory:
        path = Path(directory) / "weights.pt"
        try:
            torch.save([parameter.data for parameter in plain], path)
        # torch has an error of its own for a full disk.
        except (OSError, RuntimeError) as error:
            if not is_full(error):
                raise
            plain = []
        for parameter in plain:
            parameter.data = parameter.data.new_empty(0)
        try:
            yield
        finally:
            for parameter, weights in zip(plain, torch.load(path) if plain else [], strict=True):
                parameter.data = weights
