"""Bases of modules that consist of settings and weights, without a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor
from transformers.utils.import_utils import check_torch_load_is_safe

from ..hub.saved_files import ON_THE_HUB, check_inside, check_names, read_object, without_removed
from ..hub.saving import note_requirement
from ..settings import describe

#: Largest absolute value of a weight: the square of a much larger one overflows in float32. Whitening needs at most
#: some 10^7 times the inverse of the largest deviation of embeddings.
LARGEST_WEIGHT = 1e12


class StoredModule(Module):
    """Base of modules whose directory contains a configuration and weights, and nothing else."""

    #: Settings that are gone, each with the one value that a saved module may have.
    REMOVED: ClassVar[Mapping[str, Any]] = {}
    #: Whether there are weights.
    HAS_WEIGHTS: ClassVar[bool] = True

    def extra_repr(self) -> str:
        """Return the settings, by which sentence-transformers' ``merge`` compares two modules."""
        return describe(self, self.config_keys)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save settings and weights, and note in the model's configuration that loading it requires st_reba."""
        self.save_config(output_path)
        if self.HAS_WEIGHTS:
            self.save_torch_weights(output_path, safe_serialization=safe_serialization)
        note_requirement(Path(output_path))

    @classmethod
    def load(  # type: ignore[override]
        cls, model_name_or_path: str | PathLike[str], subfolder: str = "", **kwargs: Any
    ) -> Self:
        """Load a saved module.

        Args:
            model_name_or_path: Directory or Hub id.
            subfolder: Folder of the module in it: ``path`` in its modules.json.
            **kwargs: ``token``, ``cache_folder``, ``revision`` and ``local_files_only``, for a model on the Hub. Other
                arguments of sentence-transformers are ignored.

        Raises:
            ValueError: If ``subfolder`` is outside the model, a setting is out of range or unknown, a weight is not a
                number or too large, or settings and weights belong to different modules.
        """
        name = fspath(model_name_or_path)
        where = {"subfolder": check_inside(subfolder)} | {key: kwargs[key] for key in ON_THE_HUB if key in kwargs}
        place = "/".join(filter(None, (name, subfolder)))
        file, path = f"{place}/{cls.config_file_name}", cls.load_file_path(name, cls.config_file_name, **where)
        saved = {} if path is None else read_object(Path(path))
        settings = without_removed(saved, cls.__name__, file, cls.REMOVED)
        check_names(settings, cls.config_keys, cls.__name__, file)
        if cls.HAS_WEIGHTS and cls.load_file_path(name, "model.safetensors", **where) is None:
            check_torch_load_is_safe()
        weights = cls.load_torch_weights(name, **where) if cls.HAS_WEIGHTS else {}
        try:
            return cls.from_saved(settings, weights)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{place} is not a saved {cls.__name__}: {str(error).rstrip('.')}.") from error

    @classmethod
    def from_saved(cls, settings: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        """Make the module from saved settings and weights.

        Raises:
            RuntimeError, TypeError, ValueError: If they are not those of this class, or do not fit each other.
        """
        # Settings alone could ask for more memory than there is; on the meta device they take none.
        with torch.device("meta"):
            module = cls(**settings)
        check_magnitudes(weights, cls.__name__)
        module.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
        return module


class FixedWeights(StoredModule):
    """Base of modules that are made from their weights alone.

    The weights are buffers: they are saved and move with the model, gradients pass through them, and training does not
    change them. They keep at least float32: sentence-transformers gives all modules of a model the precision of its
    first one, in which a mean that is large relative to the deviation would be lost.

    Args:
        **weights: Weights by the names of the buffers.

    Raises:
        ValueError: If one of them is not a floating-point tensor, or has too large a value.
    """

    #: Dimensions of each weight, each a letter, such as ``{"mean": "D", "rows": "kD"}``. Only n may be 0, and
    #: neither k nor n is greater than D.
    SHAPES: ClassVar[Mapping[str, str]]
    #: Attributes that follow from the weights. They are saved to recognise the configuration of another module.
    SIZES: ClassVar[tuple[str, ...]]

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        #: Size of each dimension by its letter.
        self.dimensions = match_shapes(self.SHAPES, weights)
        check_magnitudes(weights, type(self).__name__)
        for name, weight in weights.items():
            self.register_buffer(name, weight.detach().to(torch.float32, copy=True).contiguous())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights, as ``to``, ``half`` and ``cuda`` do, but never below float32."""

        def moved(weight: Tensor) -> Tensor:
            cast_weight = fn(weight)
            return weight.to(cast_weight.device) if torch.finfo(cast_weight.dtype).bits < 32 else cast_weight

        return cast("Self", super()._apply(moved, recurse))

    @classmethod
    def from_saved(cls, settings: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        saved = {name: settings.pop(name, None) for name in cls.SIZES}
        module = cls(**settings, **weights)
        sizes = {name: getattr(module, name) for name in saved}
        if saved != sizes:
            raise ValueError(
                f"config.json says {saved} and the weights {sizes}. They are of two modules; save the model again."
            )
        return module


def match_shapes(shapes: Mapping[str, str], weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of each dimension, given the letters of each weight's dimensions.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    sizes: dict[str, int] = {}
    fits = all(weights[name].ndim == len(letters) for name, letters in shapes.items())
    for name, letters in shapes.items():
        for letter, size in zip(letters, weights[name].shape, strict=False):
            fits &= sizes.setdefault(letter, size) == size and (size > 0 or letter == "n")
    rows = next((letter for letter in "kn" if letter in sizes), "D")
    fits &= sizes.get(rows, 0) <= sizes.get("D", 0)
    if not fits:
        given = " and ".join(f"{name} is {tuple(weights[name].shape)}" for name in shapes)
        expected = " and ".join(str(tuple(letters)).replace("'", "") for letters in shapes.values())
        bound = "" if rows == "D" else f" with {rows} at most D"
        raise ValueError(f"{given}: give {expected}{bound}.")
    return sizes


def check_magnitudes(weights: Mapping[str, Tensor], module: str) -> None:
    """Raise if weights would make embeddings infinite or NaN.

    Raises:
        ValueError: If a weight is not a floating-point tensor, or has an absolute value above :data:`LARGEST_WEIGHT`.
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
