"""Runs that do not reach their end."""

from __future__ import annotations

from transformers import TrainerCallback


class StopAfter(TrainerCallback):
    """What a user does, or a machine that fails.

    Args:
        step: Behind which.
        run: Part of the output directory of the run that is meant, where there are several.
    """

    def __init__(self, step: int, run: str = "") -> None:
        self.step, self.run = step, run

    def on_step_end(self, args, state, control, **kwargs):
        if self.run in args.output_dir and state.global_step == self.step:
            raise KeyboardInterrupt
