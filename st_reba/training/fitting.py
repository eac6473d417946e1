"""One run of sentence-transformers' trainer, which can be resumed, and stops before NaN reaches the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.sampler import BatchSamplers
from torch import nn
from transformers import TrainerCallback
from transformers.integrations.integration_utils import is_tensorboard_available

from ..files import check_free, whole_directory
from ..optional import require_accelerate
from .checkpoints import CHECKPOINTS, CompleteCheckpoints, check_same_run, last_checkpoint, load_loss_state
from .divergence import DivergedError, StopOnDivergence
from .settings import RunSettings
from .upkeep import ClearGradients, OwnIntervals, SetEpoch

__all__ = ["MODEL", "DivergedError", "Fitted", "StopOnDivergence", "finish", "fit"]

#: Where in an output directory the finished model lies.
MODEL = "model"


@dataclass(frozen=True)
class Fitted:
    """What a run did.

    Attributes:
        steps: Steps that the model has had, those before an interruption included.
        resumed_at: The step that the run went on from; 0 if it began anew.
        log: The trainer's log: an entry with ``step`` and ``loss``, or with what an evaluator found (``eval_...``).
    """

    steps: int
    resumed_at: int
    log: list[dict[str, float]]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and mean training loss since the entry before."""
        return [(int(entry["step"]), entry["loss"]) for entry in self.log if "loss" in entry]


class _Trainer(SentenceTransformerTrainer):
    """Evaluates without a draw from the training's random state: how often changes no weight."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)


#: What every training is asked for, under the names that :func:`fit` has for it.
_ASKED = (
    "epochs", "max_steps", "batch_size", "learning_rate", "warmup_ratio", "weight_decay", "checkpoint_steps",
    "evaluation_steps", "seed",
)  # fmt: skip


def asked(settings: RunSettings) -> dict[str, Any]:
    """What a training is asked for, as arguments of :func:`fit`."""
    return {name: getattr(settings, name) for name in _ASKED}


def fit(
    model: SentenceTransformer,
    dataset: Any,
    loss: nn.Module,
    *,
    output: str | Path,
    epochs: float = 1,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    seed: int = 42,
    warmup_ratio: float = 0.0,
    weight_decay: float = 0.0,
    max_steps: int = -1,
    checkpoint_steps: int | None = None,
    evaluator: BaseEvaluator | None = None,
    evaluation_steps: int | None = None,
    data_collator: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    no_duplicates: bool = False,
    identity: Mapping[str, Any] | None = None,
    logging_steps: int = 50,
    progress: bool = True,
) -> Fitted:
    """Train a model in place, from the last complete checkpoint in ``output/checkpoints`` if there is one.

    A run that was interrupted and resumed ends with the same weights as one that was not: order of the rows, random
    state, optimizer and schedule go on where they were (on a CPU to the bit). What a loss keeps beside the model (a
    generator's state, weights of a head) goes on too if it is in ``loss.state_dict()``; ``get_extra_state`` puts it
    there.

    Args:
        model: What is trained.
        dataset: A ``datasets.Dataset`` with the columns that the loss expects.
        loss: A loss of ST's, or one called in the same way.
        output: The run's directory. Checkpoints and the TensorBoard log lie in ``output/checkpoints``.
        epochs: Passes over the data.
        batch_size: Rows a step, on each device.
        learning_rate: At its highest; it falls linearly to 0.
        seed: Of the order of the rows and of all that is random.
        warmup_ratio: Share of the steps in which the rate rises from 0.
        weight_decay: Of AdamW.
        max_steps: Ends the run after so many steps, whatever ``epochs`` says; -1 for no such end.
        checkpoint_steps: Steps between checkpoints; None: one at the end of each epoch. The last two are kept.
        evaluator: Run every ``evaluation_steps`` steps; None: at the end of each epoch.
        evaluation_steps: See ``evaluator``.
        data_collator: Turns a list of rows into a batch; None: ST's own.
        callbacks: Further callbacks of the trainer.
        no_duplicates: Whether no text may stand twice in a batch, for losses with in-batch negatives.
        identity: What else must be as it was for a run to be resumed, such as the model's name; JSON values. Of the
            arguments here, all that decide the weights must be, and the data's content.
        logging_steps: Steps between entries of the log.
        progress: Whether to show a bar.

    Raises:
        DivergedError: If the loss or a gradient is no longer a finite number, before it reaches the weights.
        ValueError: If the checkpoints there are of another run or do not say of which, or its finished model is there
            already.
        ImportError: If accelerate is not installed.
    """
    require_accelerate()
    output = Path(output)
    check_free(output / MODEL, "output")
    checkpoints = output / CHECKPOINTS
    hyperparameters = {
        "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed,
        "warmup_ratio": warmup_ratio, "weight_decay": weight_decay, "max_steps": max_steps,
        "no_duplicates": no_duplicates,
    }  # fmt: skip
    check_same_run(checkpoints, {**hyperparameters, "loss": type(loss).__name__, **(identity or {})}, dataset)
    evaluates = "no" if evaluator is None else "epoch" if evaluation_steps is None else "steps"
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_ratio,
        weight_decay=weight_decay,
        seed=seed,
        batch_sampler=BatchSamplers.NO_DUPLICATES if no_duplicates else BatchSamplers.BATCH_SAMPLER,
        save_strategy="epoch" if checkpoint_steps is None else "steps",
        save_steps=checkpoint_steps or 0,
        save_total_limit=2,
        eval_strategy=evaluates,
        eval_steps=evaluation_steps,
        logging_steps=logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        disable_tqdm=not progress,
        report_to=["tensorboard"] if is_tensorboard_available() else [],
        dataloader_pin_memory=model.device.type == "cuda",
    )
    upkeep = [SetEpoch(), ClearGradients(), OwnIntervals()]
    watch = [*upkeep, StopOnDivergence(loss, checkpoints), CompleteCheckpoints(loss)]
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluator,
        data_collator=data_collator,
        callbacks=[*watch, *callbacks],
    )
    start = last_checkpoint(checkpoints)
    if start is not None:
        load_loss_state(loss, start)
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    return Fitted(
        steps=trainer.state.global_step,
        resumed_at=0 if start is None else int(start.name.rpartition("-")[2]),
        log=trainer.state.log_history,
    )


def finish(output: str | Path, name: str = MODEL) -> AbstractContextManager[Path]:
    """A directory to save a finished model in, which becomes ``output/name`` when all of it is written, or vanishes."""
    return whole_directory(Path(output) / name, "output")
