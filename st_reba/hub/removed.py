"""Classes and settings that models saved by earlier versions name, and that 1.0 removed: refused by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

#: Classes of ``st_reba.modules``, the last of which 0.8 has.
CLASSES = (
    "EchoLayersModule",
    "HierarchicalTokenPrependingModule",
    "MoEEModule",
    "RerankModule",
)
#: Settings of the modules that stay, each with its default in 0.8.
SETTINGS: dict[str, Any] = {"chunk_length": None, "readout": "layer", "without_sink": False, "changes": []}

_ADVICE = "removed in 1.0: load it with st_reba 0.8."


def refuse_class(name: str, model: object, *args: Any, **kwargs: Any) -> NoReturn:
    """Take the place of ``load`` of a class that is gone.

    Raises:
        ValueError: Always, naming the model and the class.
    """
    raise ValueError(f"{model} is of {name}, {_ADVICE}")


def check_classes(references: Iterable[object], model: object) -> None:
    """Refuse a saved model that names a class that is gone.

    Args:
        references: The types of its modules, as its files name them.
        model: What the model is called.

    Raises:
        ValueError: If one of them is gone.
    """
    gone = {f"st_reba.modules.{name}": name for name in CLASSES}
    for reference in references:
        if isinstance(reference, str) and reference in gone:
            refuse_class(gone[reference], model)


def is_no_sink(settings: Mapping[str, Any]) -> bool:
    """Whether a saved CausalTransformer is what ``NoSinkModule`` is now: 0.8 saved that as its one change."""
    changes = settings.get("changes")
    change = changes[0] if isinstance(changes, list) and len(changes) == 1 else None
    names = {"key", "layers", "bidirectional_layers"}
    return isinstance(change, dict) and change.keys() == names and change["key"] == "no-sink"


def without_removed(
    settings: dict[str, Any], module: str, file: str, gone: Mapping[str, Any] = SETTINGS
) -> dict[str, Any]:
    """Return the settings of a saved module without those that are gone.

    Args:
        settings: As the file has them.
        module: The module's class.
        file: What the file is called.
        gone: The settings that are gone, each with its default in 0.8.

    Raises:
        ValueError: If one of those has another value than its default.
    """
    if module == "NoSinkModule" and is_no_sink(settings):
        (change,) = settings["changes"]
        settings = {name: value for name, value in {**settings, **change}.items() if name not in ("changes", "key")}
    for name, default in gone.items():
        if settings.get(name, default) != default:
            raise ValueError(f"{file} sets {name} to {settings[name]!r:.80}, a setting of {module}, {_ADVICE}")
    return {name: value for name, value in settings.items() if name not in gone}
