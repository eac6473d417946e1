"""Runs that do not reach their end, and the card of those that do."""

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


def check_card(directory, *said: str) -> None:
    """A trained model's card says what the method is, and what sentence-transformers says of the training."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    for part in ("import st_reba", "## Method", "It was [trained](#training-details)", "## Training Details", *said):
        assert part in text
    assert "Nothing was trained" not in text
    assert "without training" not in text
