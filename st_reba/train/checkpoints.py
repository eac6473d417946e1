"""Which checkpoints are whole, what they hold beside the trainer's own, and which run they belong to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files import atomic_file, remove_scratch
from .arguments import is_known, unchanged
from .digests import data_digest

#: Where in an output directory they lie.
CHECKPOINTS = "checkpoints"

_RUN = "run.json"
# What is known by a digest, which nobody could read.
_DIGESTS = {"data": "other data", "frozen_weights": "other frozen weights", "sentences": "other sentences"}
# What is made of several arguments, and of which.
_MADE_OF = {
    "rows_of_a_batch": "rows that the loss sees at once: per_device_train_batch_size, on all devices where it gathers",
    "rows_of_a_step": "rows of a step: per_device_train_batch_size x gradient_accumulation_steps x devices",
}
# Written last: a checkpoint that has it is whole.
_LOSS_STATE = "loss_state.pt"


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    return max(_whole(directory), key=_step, default=None)


def load_loss_state(loss: nn.Module, checkpoint: Path) -> None:
    """Put back what a loss keeps beside the model."""
    loss.load_state_dict(torch.load(checkpoint / _LOSS_STATE, weights_only=True), strict=False)


def remove_older(directory: Path, limit: int | None, best: Path | None) -> None:
    """Remove all but the newest whole checkpoints; the newest and the best stay in any case.

    Args:
        directory: Of the checkpoints.
        limit: How many stay; None, or less than 1: all.
        best: The one that an evaluation liked most, if any.
    """
    if limit is None or limit < 1:
        return
    newest, *older = sorted(_whole(directory), key=_step, reverse=True)
    kept = [newest, *(found for found in older if found == best)]
    kept += [found for found in older if found != best][: max(0, limit - len(kept))]
    for found in directory.glob("checkpoint-*"):
        if found not in kept:
            shutil.rmtree(found, ignore_errors=True)


class CompleteCheckpoints(TrainerCallback):
    """Adds to each checkpoint what the trainer leaves out, the state of the loss; then removes older ones.

    The trainer would remove older ones before the new one is whole. Of the model's own state, saved with the model
    already, only what ``get_extra_state`` gives is written again: a module's file has no place for it.

    Args:
        loss: Whose state is written.
        limit: How many checkpoints stay: see :func:`remove_older`.
    """

    def __init__(self, loss: nn.Module, limit: int | None) -> None:
        self._loss, self._limit = loss, limit

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        own = {
            name: value
            for name, value in self._loss.state_dict().items()
            if not name.startswith("model.") or name.endswith("_extra_state")
        }
        directory = Path(str(args.output_dir))
        with atomic_file(directory / f"checkpoint-{state.global_step}" / _LOSS_STATE) as stream:
            torch.save(own, stream)
        best = state.best_model_checkpoint
        remove_older(directory, self._limit, None if best is None else Path(best))


def check_same_run(directory: Path, settings: Mapping[str, Any], dataset: Any, *, writes: bool = True) -> None:
    """Refuse to go on from the checkpoints of another run; note which run it is where there are none.

    Args:
        directory: Of the checkpoints.
        settings: What decides the weights, by name.
        dataset: What is trained on.
        writes: Whether this process is the one that writes.

    Raises:
        ValueError: If settings or data are not those that the checkpoints were made with, or it is not known which
            those were.
    """
    # As JSON has it: a tuple comes back as a list.
    now = json.loads(json.dumps({**settings, "data": data_digest(dataset)}, default=repr))
    directory.mkdir(parents=True, exist_ok=True)
    if writes:
        remove_scratch(directory)
    if last_checkpoint(directory) is None:
        if writes:
            with atomic_file(directory / _RUN) as stream:
                stream.write(json.dumps(now, indent=2, sort_keys=True).encode())
        return
    then = _noted(directory)
    for name in sorted({*now, *then}):
        if now.get(name) != then.get(name):
            raise ValueError(
                f"{directory} holds checkpoints of a run with {_said(name, then)}, but now it is "
                f"{_said(name, now)}. Give what was given then to go on, or another output directory."
            )


def _noted(directory: Path) -> dict[str, Any]:
    """The run that a directory's checkpoints are of."""
    try:
        run = json.loads((directory / _RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run = None
    if not isinstance(run, dict):
        raise ValueError(
            f"{directory} holds checkpoints, but its {_RUN} does not say of which run. Remove {directory} to begin "
            "anew, or give another output directory."
        )
    return run


def _whole(directory: Path) -> list[Path]:
    return [found.parent for found in directory.glob(f"checkpoint-*/{_LOSS_STATE}")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _said(name: str, run: Mapping[str, Any]) -> str:
    if name in _MADE_OF:
        return f"{run.get(name)} {_MADE_OF[name]}"
    if name not in run and is_known(name):
        return f"{name}={unchanged(name)!r}"
    return _DIGESTS.get(name) or f"{name}={run.get(name)!r}"
