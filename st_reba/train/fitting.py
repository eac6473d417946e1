"""One run of sentence-transformers' trainer: it can be resumed, stops before NaN reaches the weights, is saved and
pushed by one process of several."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from ..files import atomic_directory, atomic_file, check_free, remove_scratch
from ..hub.push import check_repo_id, push
from ..lm.fingerprint import fingerprint_of, fingerprint_of_weight
from ..optional import require
from . import settings as of_st
from .settings import RunSettings

#: Where in an output directory the finished model lies, and the checkpoints.
MODEL = "model"
CHECKPOINTS = "checkpoints"

_RUN = "run.json"
# How a run is told from another, where it is not by a setting's name and value.
_SAID = {
    "data": "other data",
    "frozen_weights": "other frozen weights",
    "sentences": "other sentences",
}
# Written last: a checkpoint that has it is whole.
_LOSS_STATE = "loss_state.pt"


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


def begin(settings: RunSettings, output: str | Path) -> SentenceTransformerTrainingArguments:
    """Refuse what can be refused before anything is loaded.

    Args:
        settings: What is asked for.
        output: Directory of the run.

    Returns:
        The arguments, which know of this process among others.

    Raises:
        ValueError: If sentence-transformers refuses the arguments, the finished model is there already, or it is to be
            pushed and its name on the Hub is missing or malformed.
        ImportError: If accelerate is not installed.
    """
    check_free(Path(output) / MODEL, "output")
    arguments = of_st.complete(settings.training_arguments, evaluates=settings.evaluation is not None)
    if arguments.get("push_to_hub"):
        if not arguments.get("hub_model_id"):
            raise ValueError("arguments: push_to_hub needs a name: add hub_model_id: org/name.")
        check_repo_id(arguments["hub_model_id"])
    return of_st.made(arguments, Path(output) / CHECKPOINTS, progress=False)


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
            :data:`st_reba.train.settings.DEFAULTS` has it, checkpoints and evaluations once an epoch, and otherwise
            as it is there.
        evaluator: What evaluates.
        data_collator: Turns a list of rows into a batch; None: ST's own.
        callbacks: Further callbacks of the trainer.
        identity: What else must be as it was for a run to be resumed, such as the model's name; JSON values. Of the
            arguments, all that decide the weights must be, and the number of devices, and the data's content.
        progress: Whether to show a bar.

    Raises:
        DivergedError: If the loss or a gradient is no longer a finite number, before it reaches the weights.
        ValueError: If the checkpoints there are of another run or do not say of which, or its finished model is there
            already.
        ImportError: If accelerate is not installed.
    """
    output = Path(output)
    check_free(output / MODEL, "output")
    checkpoints = output / CHECKPOINTS
    chosen = of_st.complete(arguments or {}, evaluates=evaluator is not None)
    chosen.setdefault("dataloader_pin_memory", model.device.type == "cuda")
    # The trainer would remove older checkpoints before the new one is whole: CompleteCheckpoints does it.
    limit = chosen.pop("save_total_limit")
    made = of_st.made(chosen, checkpoints, progress=progress)
    decided = {
        **of_st.identity(chosen),
        "devices": made.world_size * max(1, made.n_gpu),
        "loss": type(loss).__name__,
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
        data_collator=data_collator,
        callbacks=[
            _Upkeep(), StopOnDivergence(loss, checkpoints), CompleteCheckpoints(loss, limit), *callbacks
        ],
    )  # fmt: skip
    if start is not None:
        loss.load_state_dict(torch.load(start / _LOSS_STATE, weights_only=True), strict=False)
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    return Fitted(
        steps=trainer.state.global_step,
        resumed_at=0 if start is None else _step(start),
        log=trainer.state.log_history,
    )


def fit_as_set(
    settings: RunSettings,
    model: SentenceTransformer,
    dataset: Any,
    loss: nn.Module,
    output: Path,
    *,
    evaluator: BaseEvaluator | None,
    progress: bool,
    identity: Mapping[str, Any] | None = None,
) -> Fitted:
    """:func:`fit` as settings ask for it; they, and what else is given as ``identity``, tell the run from others."""
    return fit(
        model,
        dataset,
        loss,
        output=output,
        arguments=settings.training_arguments,
        evaluator=evaluator,
        identity={**settings.identity(), **(identity or {})},
        progress=progress,
    )


def is_main() -> bool:
    """Whether this is the one process that writes and tells; a process alone is."""
    return bool(require("accelerate", "train", "Training").PartialState().is_main_process)


def wait() -> None:
    """Until all of them are here."""
    require("accelerate", "train", "Training").PartialState().wait_for_everyone()


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


# Checkpoints


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    return max((found.parent for found in directory.glob(f"checkpoint-*/{_LOSS_STATE}")), key=_step, default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class CompleteCheckpoints(TrainerCallback):
    """Adds to each checkpoint what the trainer leaves out, the state of the loss; then removes older ones.

    Of the model's own state, saved with the model already, only what ``get_extra_state`` gives is written again: a
    module's file has no place for it.

    Args:
        loss: Whose state is written.
        limit: How many checkpoints stay, the newest and the best in any case; None or 0: all.
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
        directory = str(args.output_dir)
        with atomic_file(Path(directory) / f"checkpoint-{state.global_step}" / _LOSS_STATE) as stream:
            torch.save(own, stream)
        rotate_checkpoints(directory, self._limit, state.best_model_checkpoint)


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
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                before, here = (
                    _SAID.get(name, f"{name}={{!r}}").format(run.get(name, of_st.usual().get(name)))
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
        parameters = [parameter for group in kwargs["optimizer"].param_groups for parameter in group["params"]]
        finite = _finite(parameter.grad for parameter in parameters if parameter.grad is not None)
        # With fp16, the scaler passes over a step whose gradient left the range, and scales less.
        if not finite and not args.fp16:
            raise self._error("the gradient is not finite")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            self._check_weights(kwargs["model"])

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()
        self._check_weights(kwargs["model"])

    def _check_weights(self, model: nn.Module) -> None:
        if not _finite(parameter.detach() for parameter in model.parameters() if parameter.requires_grad):
            raise self._error("a weight is not finite after it")

    def _error(self, what: str) -> DivergedError:
        return DivergedError(what, self._step, last_checkpoint(self._checkpoints))


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class _Upkeep(TrainerCallback):
    """What transformers leaves out, and what its lowest version and that of sentence-transformers do."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A run that goes on would save, evaluate and log as often as the run did that wrote the checkpoint.
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Where batches are skipped to resume a run, the lowest version tells its epoch to the wrapper alone: the batch
        # sampler inside would give the order of the first.
        sampler = kwargs["train_dataloader"].batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        # The trainer counts in fractions: 1.0 is the beginning of the second epoch.
        sampler.set_epoch(int((state.epoch or 0) + 1e-6))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The lowest version clears the model's gradients alone: those of a loss's own weights would add up.
        kwargs["optimizer"].zero_grad()


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
