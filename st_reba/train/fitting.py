"""One run of sentence-transformers' trainer, resumed where it stopped and ended before NaN reaches the weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from ..files import atomic_directory, atomic_file, check_free, remove_scratch
from ..lm.fingerprint import fingerprint_of, fingerprint_of_weight
from ..optional import require
from . import settings as of_st
from .settings import RunSettings

#: Where in an output directory the finished model lies, and the checkpoints.
MODEL = "model"
CHECKPOINTS = "checkpoints"

_RUN = "run.json"
# Values of a run that are digests.
_DIGESTS = ("data", "frozen_weights", "sentences")
# Written last: a checkpoint that has it is whole.
_LOSS_STATE = "loss_state.pt"


class _Trainer(SentenceTransformerTrainer):
    """Trainer that raises DivergedError before a number that is not finite is saved, and evaluates without chance."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = super().training_step(*args, **kwargs)
        _check_finite(f"the loss is {value.item()}", [value], self.args, self.state.global_step + 1)
        return value

    def check_weights(self) -> None:
        weights = (parameter.detach() for parameter in self.model.parameters() if parameter.requires_grad)
        _check_finite("a weight is not finite after it", weights, self.args, self.state.global_step)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()
        # Transformers leaves it to the model, and sentence-transformers to the trainer, which process writes: all would
        # write the same files. Where the weights are spread over processes, all are needed to gather them.
        if self.args.should_save or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super().save_model(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # Without a draw from the training's random state: how often it is evaluated changes no weight.
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)


def begin(settings: RunSettings, output: str | Path) -> SentenceTransformerTrainingArguments:
    """Raise what can be raised before anything is loaded.

    Returns:
        The arguments, which know of this process among others.

    Raises:
        ValueError: If sentence-transformers refuses the arguments, or the finished model is there already.
        ImportError: If accelerate is not installed.
    """
    check_free(Path(output) / MODEL, "output")
    arguments = of_st.complete(settings.training_arguments, evaluates=settings.evaluation is not None)
    return of_st.made(arguments, Path(output) / CHECKPOINTS, progress=False)


def fit(
    model: SentenceTransformer,
    dataset: Any,
    loss: nn.Module,
    output: str | Path,
    settings: RunSettings,
    *,
    evaluator: BaseEvaluator | None = None,
    identity: Mapping[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
) -> TrainerState:
    """Train a model in place, from the last complete checkpoint in ``output/checkpoints`` if there is one.

    A run that was interrupted and resumed ends with the same weights as one that was not: order of the rows, random
    state, optimizer and schedule go on where they were (on a CPU to the bit). State that a loss keeps in addition to
    the model (a generator, weights of a head) goes on too if it is in ``loss.state_dict()``; ``get_extra_state`` puts
    it there.

    Args:
        model: The model to train.
        dataset: A ``datasets.Dataset`` with the columns that the loss expects.
        loss: A loss of ST's, or one called in the same way.
        output: The run's directory. Checkpoints and the TensorBoard log are in ``output/checkpoints``.
        settings: Training arguments, and settings that tell the run from others.
        evaluator: Evaluates the model, once an epoch unless the arguments say otherwise.
        identity: Further values, as JSON has them, that a resumed run must share with the interrupted one. Of the
            settings it must share those that decide the weights, and the number of devices and the data's content.
        callbacks: Further callbacks of the trainer.
        progress: Whether to show a bar.

    Returns:
        The trainer's state: ``global_step``, ``log_history``.

    Raises:
        DivergedError: If the loss or a gradient is no longer a finite number, before it reaches the weights.
        ValueError: If the checkpoints there are of another run or of an unknown one, or the finished model is there
            already.
        ImportError: If accelerate is not installed.
    """
    output = Path(output)
    check_free(output / MODEL, "output")
    checkpoints = output / CHECKPOINTS
    arguments = of_st.complete(settings.training_arguments, evaluates=evaluator is not None)
    arguments.setdefault("dataloader_pin_memory", model.device.type == "cuda")
    limit = arguments.pop("save_total_limit")
    made = of_st.made(arguments, checkpoints, progress=progress)
    decided = {
        **of_st.identity(arguments),
        "devices": made.world_size * max(1, made.n_gpu),
        "loss": type(loss).__name__,
        **settings.identity(),
        **(identity or {}),
    }
    check_same_run(checkpoints, decided, dataset, writes=is_main())
    start = last_checkpoint(checkpoints)
    trainer = _Trainer(
        model=model,
        args=made,
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluator,
        callbacks=[_Upkeep(loss, limit), *callbacks],
    )
    if start is not None:
        loss.load_state_dict(torch.load(start / _LOSS_STATE, weights_only=True), strict=False)
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    trainer.check_weights()
    return trainer.state


def is_main() -> bool:
    """Whether this is the one process that writes and tells; a process alone is."""
    return bool(require("accelerate", "train", "Training").PartialState().is_main_process)


def save(model: SentenceTransformer, output: str | Path, name: str = MODEL) -> None:
    """Save a finished model as ``output/name``, from one process for all, unless it is there already."""
    directory = Path(output) / name
    if is_main() and not directory.exists():
        with atomic_directory(directory, "output") as scratch:
            model.save_pretrained(str(scratch))
    require("accelerate", "train", "Training").PartialState().wait_for_everyone()


# Checkpoints


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    return max((found.parent for found in directory.glob(f"checkpoint-*/{_LOSS_STATE}")), key=_step, default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def check_same_run(directory: Path, settings: Mapping[str, Any], dataset: Any, *, writes: bool = True) -> None:
    """Refuse to go on from the checkpoints of another run; note which run it is where there are none.

    Args:
        directory: Of the checkpoints. What a killed run did not write to its end is removed.
        settings: What decides the weights, by name.
        dataset: What is trained on.
        writes: Whether this process is the one that writes.

    Raises:
        ValueError: If settings or data are not those that the checkpoints were made with, or it is not known which
            those were.
    """
    # As JSON has it: a tuple comes back as a list.
    now = json.loads(json.dumps({**settings, "data": data_digest(dataset)}, default=repr))
    if last_checkpoint(directory) is not None:
        try:
            then = json.loads((directory / _RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            then = None
        if not isinstance(then, dict):
            raise ValueError(
                f"{directory} holds checkpoints, but its {_RUN} does not say of which run. Remove {directory} to begin "
                "anew, or give another output directory."
            )
        # A setting of an older version that is no longer one, is as it was by default.
        for name in sorted({*now, *(then.keys() & of_st.defaults())}):
            if now.get(name) != then.get(name):
                before, here = (
                    f"other {name}" if name in _DIGESTS else f"{name}={run.get(name, of_st.defaults().get(name))!r}"
                    for run in (then, now)
                )
                raise ValueError(
                    f"{directory} holds checkpoints of a run with {before}, but now it is {here}. Give what was given "
                    "then to go on, or another output directory."
                )
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(directory)
        for found in directory.glob("checkpoint-*"):
            if not (found / _LOSS_STATE).exists():
                shutil.rmtree(found, ignore_errors=True)
        with atomic_file(directory / _RUN) as stream:
            stream.write(json.dumps(now, indent=2, sort_keys=True).encode())


# What stops or keeps up a run


class DivergedError(RuntimeError):
    """Error raised when a loss, a gradient or a weight is no longer a finite number."""


def _check_finite(message: str, tensors: Iterable[Tensor], arguments: TrainingArguments, step: int) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        checkpoint = last_checkpoint(Path(str(arguments.output_dir)))
        kept = "There is no checkpoint" if checkpoint is None else f"The last good checkpoint is {checkpoint}"
        raise DivergedError(
            f"Training diverged at step {step}: {message}. {kept}. Lower the learning rate, warm up, or look for a "
            "faulty row in the data."
        )


class _Upkeep(TrainerCallback):
    """Checks gradients, completes checkpoints, and mends what the lowest versions of the trainers leave out.

    Args:
        loss: The loss, whose state is written into each checkpoint.
        limit: How many checkpoints are kept, the newest and the best in any case; None or 0: all.
    """

    def __init__(self, loss: nn.Module, limit: int | None) -> None:
        self._loss, self._limit = loss, limit

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # A resumed run would save, evaluate and log as often as the run did that wrote the checkpoint.
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Where batches are skipped to resume a run, the lowest version sets the epoch of the wrapper alone: the batch
        # sampler inside would give the order of the first.
        sampler = kwargs["train_dataloader"].batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        # The trainer counts in fractions: 1.0 is the beginning of the second epoch.
        sampler.set_epoch(int((state.epoch or 0) + 1e-6))

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # With fp16, the scaler passes over a step whose gradient left the range, and scales less.
        if not args.fp16:
            parameters = [parameter for group in kwargs["optimizer"].param_groups for parameter in group["params"]]
            gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
            _check_finite("the gradient is not finite", gradients, args, state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The lowest version clears the model's gradients alone: those of a loss's own weights would add up.
        kwargs["optimizer"].zero_grad()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        # The model's own state is saved already, but for what ``get_extra_state`` gives.
        own = {
            name: value
            for name, value in self._loss.state_dict().items()
            if not name.startswith("model.") or name.endswith("_extra_state")
        }
        directory = Path(str(args.output_dir))
        with atomic_file(directory / f"checkpoint-{state.global_step}" / _LOSS_STATE) as stream:
            torch.save(own, stream)
        # Only now: the trainer would remove older checkpoints before the new one is whole.
        rotate_checkpoints(str(directory), self._limit, state.best_model_checkpoint)


# What tells data and weights from any other: all of their content, wherever they lie


def data_digest(dataset: Any) -> str:
    """Of the rows, and the names and types of the columns, of a ``datasets.Dataset``."""
    digest = hashlib.sha256(repr(dataset.features).encode())
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        # Copied, as a slice would be written with what lies around it.
        for batch in table.combine_chunks().take(pa.array(range(len(table)))).to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def weights_digest(module: nn.Module) -> str:
    """Of all parameters and buffers of a module, to the byte."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return fingerprint_of(*(fingerprint_of_weight(name, [weights[name]]) for name in sorted(weights)))
