"""Runs that do not reach their end."""

from __future__ import annotations

import sys

import pytest
from transformers import TrainerCallback

from st_reba.train import fit, fitting


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


def stop(train, settings, output, step: int, run: str = "") -> None:
    """Train, such as by ``train_bellm``, up to a step."""

    def stopped(*args, **kwargs):
        return fit(*args, **kwargs, callbacks=[StopAfter(step, run)])

    with pytest.MonkeyPatch.context() as patch:
        for module in (fitting, sys.modules[train.__module__]):
            patch.setattr(module, "fit", stopped, raising=False)
        with pytest.raises(KeyboardInterrupt):
            train(settings, output, progress=False)
