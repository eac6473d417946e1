"""A run that has lost its way stops before its weights do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .checkpoints import last_checkpoint


class DivergedError(RuntimeError):
    """A loss or gradient is no longer a finite number.

    Attributes:
        step: The step that could not be made.
        checkpoint: The last checkpoint before it, or None.
    """

    def __init__(self, what: str, step: int, checkpoint: Path | None) -> None:
        self.step = step
        self.checkpoint = checkpoint
        kept = "There is no checkpoint" if checkpoint is None else f"The last good checkpoint is {checkpoint}"
        super().__init__(
            f"Training diverged at step {step}: {what}. {kept}. Lower the learning rate, warm up, or look for a faulty "
            "row in the data."
        )


class StopOnDivergence(TrainerCallback):
    """Stops a run at the first loss or gradient that is NaN or infinite.

    Both are looked at before the optimizer's step, and the weights before a checkpoint, so neither the model nor a
    checkpoint ever holds one.

    Args:
        loss: The loss that is trained on. Its value is watched through a forward hook.
        checkpoints: Where the checkpoints of the run are.
    """

    def __init__(self, loss: nn.Module, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._step = 1
        self._hook = loss.register_forward_hook(self._watch)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = state.global_step + 1

    def _watch(self, loss: nn.Module, inputs: Any, value: Tensor | dict[str, Tensor]) -> None:
        for name, part in value.items() if isinstance(value, dict) else [("the loss", value)]:
            if not bool(part.detach().isfinite().all()):
                raise self._error(f"{name} is {part.detach().sum().item()}")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.fp16:
            # The scaler passes over a step whose gradient left the range, and scales less.
            return
        gradients = [
            parameter.grad
            for group in kwargs["optimizer"].param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not _finite(gradients):
            raise self._error("the gradient is not finite")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check_what_is_saved(control, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check_what_is_saved(control, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()
        self._check_weights(kwargs["model"])

    def _check_what_is_saved(self, control: TrainerControl, model: nn.Module) -> None:
        if control.should_save:
            self._check_weights(model)

    def _check_weights(self, model: nn.Module) -> None:
        if not _finite(parameter.detach() for parameter in model.parameters() if parameter.requires_grad):
            raise self._error("a weight is not finite after it")

    def _error(self, what: str) -> DivergedError:
        return DivergedError(what, self._step, last_checkpoint(self._checkpoints))


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
