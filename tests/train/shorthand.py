"""Training arguments by shorter names, for settings that differ in one or two of them."""

from __future__ import annotations

from typing import Any

SHORT = {
    "batch_size": "per_device_train_batch_size",
    "checkpoint_steps": "save_steps",
    "epochs": "num_train_epochs",
    "evaluation_steps": "eval_steps",
    "learning_rate": "learning_rate",
    "logging_steps": "logging_steps",
    "max_steps": "max_steps",
    "seed": "seed",
}


def whole(**given: Any) -> dict[str, Any]:
    """The same settings with their training arguments where they belong."""
    arguments = {name: given.pop(short) for short, name in SHORT.items() if short in given}
    return {**given, "arguments": {**arguments, **given.get("arguments", {})}}
