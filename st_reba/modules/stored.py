"""What the modules share that are settings and weights of their own, without a language model inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor
from transformers.utils.import_utils import check_torch_load_is_safe

from ..settings import described
from .checkpoints import note_requirement, saved_settings

#: No weight is larger. Whitening's are at most some 10^7 times the inverse of the embeddings' largest deviation. With
#: much more, squares overflow in float32, and an embedding is no number or a zero vector.
LARGEST_WEIGHT = 1e12


class StoredModule(Module):
    """Base of the modules whose directory holds a configuration and weights, and nothing else."""

    def extra_repr(self) -> str:
        """The settings, by which ST's ``merge`` tells whether two modules are alike."""
        return described(self, self.config_keys)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save settings and weights, and note in the pipeline's configuration that st_reba is needed to load it."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)
        note_requirement(Path(output_path))

    @classmethod
    def load(  # type: ignore[override]
        cls, model_name_or_path: str | PathLike[str], subfolder: str = "", **kwargs: Any
    ) -> Self:
        """Load a saved module.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json.
            **kwargs: ``token``, ``cache_folder``, ``revision`` and ``local_files_only``, of a model on the Hub. What
                else ST passes is not used: a saved module says all there is to say.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none of this class's, a
                weight is not a number or too large for one, or settings and weights do not fit each other.
        """
        name = fspath(model_name_or_path)
        settings, where, place = saved_settings(cls, name, subfolder, kwargs)
        if cls.load_file_path(name, "model.safetensors", **where) is None:
            check_torch_load_is_safe()
        weights = cls.load_torch_weights(name, **where)
        try:
            return cls.from_saved(settings, weights)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place} is not a saved {cls.__name__}: {str(error).rstrip('.')}.") from error

    @classmethod
    def from_saved(cls, settings: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        """The module of saved settings and weights.

        Raises:
            TypeError, ValueError: If they are none of this class's, or do not fit each other.
        """
        # Settings alone could ask for more memory than there is: without memory it is seen what they ask for.
        with torch.device("meta"):
            module = cls(**settings)
        asked = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        if asked != found:
            name = min(name for name in asked.keys() | found.keys() if asked.get(name) != found.get(name))
            raise ValueError(
                f"config.json and the weights do not fit each other ({name} is {asked.get(name, 'not there')} by the "
                f"one and {found.get(name, 'not there')} by the other). They are of two modules; save the model again."
            )
        check_magnitudes(weights, cls.__name__)
        module.to_empty(device="cpu").load_state_dict(weights)
        return module


class FixedWeights(StoredModule):
    """Base of those that are made from their weights, and from nothing that ``config.json`` alone could say.

    The weights are buffers: they are saved and move with the model, gradients pass through them, and training leaves
    them as they are. They stay float32 at least: ST gives all modules of a pipeline the precision of its first one, in
    which a mean that is large beside a deviation would be lost.

    Args:
        **weights: By the names of the buffers.

    Raises:
        ValueError: If one of them is not a tensor of numbers that float32 can be multiplied by.
    """

    #: Attributes that follow from the weights, and are saved so that a configuration of another module is noticed.
    SIZES: ClassVar[tuple[str, ...]]

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        check_magnitudes(weights, type(self).__name__)
        for name, weight in weights.items():
            self.register_buffer(name, weight.detach().to(torch.float32, copy=True).contiguous())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``half``, ``cuda`` and the like come down to."""

        def moved(weight: Tensor) -> Tensor:
            found = fn(weight)
            return weight.to(found.device) if torch.finfo(found.dtype).bits < 32 else found

        return cast("Self", super()._apply(moved, recurse))

    @classmethod
    def from_saved(cls, settings: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        sizes = {name: settings.pop(name, None) for name in cls.SIZES}
        module = cls(**settings, **weights)
        found = {name: getattr(module, name) for name in sizes}
        if sizes != found:
            raise ValueError(
                f"config.json says {sizes} and the weights {found}. They are of two modules; save the model again."
            )
        return module


def check_magnitudes(weights: Mapping[str, Tensor], module: str) -> None:
    """Refuse weights that would make embeddings infinite, or no numbers.

    Raises:
        ValueError: If a weight is not made of floating-point numbers, or has one beyond :data:`LARGEST_WEIGHT`.
    """
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"{module}'s {name} is of {weight.dtype}: weights are floating-point numbers.")
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if not largest <= LARGEST_WEIGHT:
            raise ValueError(
                f"{module}'s {name} has the value {largest:.3g}, and weights are numbers not beyond "
                f"{LARGEST_WEIGHT:.0e}: embeddings would overflow. Make or save the module again."
            )
