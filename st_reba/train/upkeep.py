"""What the trainers of transformers and of older sentence-transformers leave undone."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class SetEpoch(TrainerCallback):
    """Tells the batch sampler its epoch, through whatever it was wrapped in.

    Where batches are skipped to resume a run, older transformers tell only the wrapper, and the epoch that goes on gets
    the order of the first.
    """

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        sampler = kwargs["train_dataloader"].batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        # The trainer counts in fractions: 1.0 is the beginning of the second epoch.
        sampler.set_epoch(int((state.epoch or 0) + 1e-6))


class ClearGradients(TrainerCallback):
    """Clears the gradients of a loss's own weights, which older ST adds up: the trainer clears the model's."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()


class OwnIntervals(TrainerCallback):
    """Saves, evaluates and logs as often as this run is asked to.

    The trainer goes on as often as the run did that wrote the checkpoint.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
