"""One run of sentence-transformers' trainer, which can be resumed, and stops before NaN reaches the weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import nn
from transformers import TrainerCallback

from ..files import atomic_directory, check_free
from ..hub.push import check_repo_id, push
from . import arguments as of_st
from .checkpoints import CHECKPOINTS, CompleteCheckpoints, check_same_run, last_checkpoint, load_loss_state
from .divergence import DivergedError, StopOnDivergence
from .processes import is_main, wait
from .run_settings import FORMER, RunSettings, translated
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

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """From one process alone. Transformers leaves that to how a model is saved, and sentence-transformers to the
        trainer, so that all processes would write the same files at once. Where the weights are spread over processes,
        all are needed to gather them."""
        if self.args.should_save or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super().save_model(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)


def asked(settings: RunSettings) -> dict[str, Any]:
    """What a training is asked for, as keywords of :func:`fit`."""
    return {"arguments": settings.training_arguments}


def begin(
    settings: RunSettings, output: str | Path, *, one_device: bool = False
) -> SentenceTransformerTrainingArguments:
    """Refuse what can be refused before anything is loaded.

    Args:
        settings: What is asked for.
        output: Directory of the run.
        one_device: Whether the method is trained in one process alone.

    Returns:
        The arguments, which know of this process among others.

    Raises:
        ValueError: If sentence-transformers refuses the arguments, the finished model is there already, or it is to be
            pushed and its name on the Hub is missing or malformed; or there are several processes for a method of one.
        ImportError: If accelerate is not installed.
    """
    check_free(Path(output) / MODEL, "output")
    arguments = of_st.complete(settings.training_arguments, evaluates=settings.evaluates)
    if arguments.get("push_to_hub"):
        if not arguments.get("hub_model_id"):
            raise ValueError("arguments: push_to_hub needs a name: add hub_model_id: org/name.")
        check_repo_id(arguments["hub_model_id"])
    made = of_st.made(arguments, Path(output) / CHECKPOINTS, progress=False)
    if one_device and made.world_size > 1:
        raise ValueError(
            f"{type(settings).__name__} is for one process, and there are {made.world_size}: what it trains is small. "
            "Start it without a launcher."
        )
    return made


def fit(
    model: SentenceTransformer,
    dataset: Any,
    loss: nn.Module,
    *,
    output: str | Path,
    arguments: Mapping[str, Any] | None = None,
    evaluator: BaseEvaluator | None = None,
    data_collator: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    identity: Mapping[str, Any] | None = None,
    progress: bool = True,
    **former: Any,
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
        arguments: Of ``SentenceTransformerTrainingArguments``, by name. What is not given is as
            :data:`st_reba.train.arguments.DEFAULTS` has it, checkpoints and evaluations once an epoch, and otherwise
            as it is there.
        evaluator: What evaluates.
        data_collator: Turns a list of rows into a batch; None: ST's own.
        callbacks: Further callbacks of the trainer.
        identity: What else must be as it was for a run to be resumed, such as the model's name; JSON values. Of the
            arguments, all that decide the weights must be, and the data's content. Devices and their batches may be
            others where a step has the same rows, and a loss sees the same rows at once.
        progress: Whether to show a bar.
        **former: ``epochs``, ``batch_size`` and the others by which arguments were called until version 0.6.

    Raises:
        DivergedError: If the loss or a gradient is no longer a finite number, before it reaches the weights.
        ValueError: If the checkpoints there are of another run or do not say of which, or its finished model is there
            already.
        ImportError: If accelerate is not installed.
    """
    output = Path(output)
    check_free(output / MODEL, "output")
    checkpoints = output / CHECKPOINTS
    if unknown := [name for name in former if name not in FORMER]:
        raise TypeError(f"fit() takes no {unknown[0]!r}: give arguments={{...}}, those of sentence-transformers.")
    if former:
        told = (
            f"{', '.join(sorted(former))}: keywords of fit() until version 0.6, which will go. Give arguments={{...}}."
        )
        warnings.warn(told, FutureWarning, stacklevel=2)
    given = of_st.check(translated(former, arguments or {}))
    chosen = of_st.complete(given, evaluates=evaluator is not None)
    if "dataloader_pin_memory" not in chosen:
        chosen["dataloader_pin_memory"] = model.device.type == "cuda"
    # Not the trainer's to heed: see CompleteCheckpoints.
    limit = chosen.pop("save_total_limit")
    made = of_st.made(chosen, checkpoints, progress=progress)
    decided = {
        **of_st.identity(chosen),
        **of_st.rows_of(made, gathered=getattr(loss, "gather_across_devices", False)),
        "loss": type(loss).__name__,
    }
    check_same_run(checkpoints, {**decided, **(identity or {})}, dataset, writes=is_main())
    upkeep = [SetEpoch(), ClearGradients(), OwnIntervals()]
    watch = [*upkeep, StopOnDivergence(loss, checkpoints), CompleteCheckpoints(loss, limit)]
    trainer = _Trainer(
        model=model,
        args=made,
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
    return atomic_directory(Path(output) / name, "output")


def save(model: SentenceTransformer, output: str | Path, name: str = MODEL) -> None:
    """Save a finished model as ``output/name``, from one process for all; nothing where it is there already."""
    if is_main() and not (Path(output) / name).exists():
        with finish(output, name) as directory:
            model.save_pretrained(str(directory))
    wait()


def publish(settings: RunSettings, output: str | Path) -> None:
    """Push the finished model to the Hub, if the arguments ask for it.

    Raises:
        ValueError: As :func:`st_reba.hub.push.push`, and so of its other errors. The finished model stays where it is.
    """
    arguments = settings.training_arguments
    if arguments.get("push_to_hub") and is_main():
        push(
            Path(output) / MODEL,
            arguments["hub_model_id"],
            private=bool(arguments.get("hub_private_repo")),
            revision=arguments.get("hub_revision"),
            token=arguments.get("hub_token"),
        )
    wait()
