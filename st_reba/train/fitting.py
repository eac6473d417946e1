"""Training with the trainer of sentence-transformers: data, exact resumption, and a stop before NaN reaches weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from ..data.columns import CONDITIONAL, NAMED, PAIRS, SENTENCES, TRIPLETS, Schema, read_table
from ..data.sources import TO_TRAIN
from ..files import atomic_directory, atomic_file, check_free, remove_scratch
from ..fingerprint import fingerprint_of, fingerprint_of_weight
from ..hub.adapters import Adapter
from ..hub.checkpoints import Files
from ..optional import require
from .settings import RunSettings, arguments_identity, complete_arguments, default_arguments, make_arguments

#: Folders of the finished model and of the checkpoints in an output directory.
MODEL = "model"
CHECKPOINTS = "checkpoints"

_RUN = "run.json"
# Written last: a checkpoint with this file is complete.
_LOSS_STATE = "loss_state.pt"


class _Trainer(SentenceTransformerTrainer):
    """Trainer that stops before it saves values that are not finite; evaluation leaves the random state unchanged."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = super().training_step(*args, **kwargs)
        _check_finite(f"the loss is {value.item()}", [value], self.args, self.state.global_step + 1)
        return value

    def check_weights(self) -> None:
        weights = (parameter.detach() for parameter in self.model.parameters() if parameter.requires_grad)
        _check_finite("a weight is not finite after it", weights, self.args, self.state.global_step)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()
        # Neither library limits saving to one process: all would write the same files. Sharded weights need all
        # processes to gather them.
        if self.args.should_save or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        for path in Path(str(args[0])).rglob(ADAPTER_CONFIG_NAME):
            # It was loaded in its backbone's precision, and is trained in float32.
            model: Any = getattr(self.model, "_orig_mod", self.model)[0].model
            weights = Adapter.of(Files(str(path.parent), {})).named_in(model)
            require("peft", "train", "An adapter").set_peft_model_state_dict(model, weights)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # The number of evaluations must not change the weights.
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)


def begin(settings: RunSettings, output: str | Path) -> SentenceTransformerTrainingArguments:
    """Check a run before anything is loaded.

    Returns:
        The training arguments, with the rank of this process and the world size.

    Raises:
        ValueError: If sentence-transformers refuses the arguments, or the finished model already exists.
        ImportError: If accelerate is not installed.
    """
    check_free(Path(output) / MODEL, "output")
    arguments = complete_arguments(settings.training_arguments, evaluates=settings.evaluation is not None)
    return make_arguments(arguments, Path(output) / CHECKPOINTS, progress=False)


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

    A resumed run ends with the same weights as an uninterrupted one: order of the rows, random state, optimizer and
    schedule are restored (on a CPU to the bit). Further state of a loss (a generator, weights of a head) is restored if
    it is in ``loss.state_dict()``, for example by ``get_extra_state``.

    Args:
        model: The model to train.
        dataset: A ``datasets.Dataset`` with the columns of the loss.
        loss: A loss with the interface of sentence-transformers.
        output: Directory of the run. Checkpoints and the TensorBoard log are in ``output/checkpoints``.
        settings: Training arguments, and the settings that identify the run.
        evaluator: Evaluator of the model; by default it runs once per epoch.
        identity: Further JSON values that identify the run. A resumed run must have the same values, the same settings
            that affect the weights, the same number of devices and the same data.
        callbacks: Further callbacks of the trainer.
        progress: Whether to show a progress bar.

    Returns:
        The trainer's state: ``global_step``, ``log_history``.

    Raises:
        DivergedError: If the loss or a gradient is not finite, before it reaches the weights.
        ValueError: If the checkpoints belong to another or an unknown run, or the finished model already exists.
        ImportError: If accelerate is not installed.
    """
    output = Path(output)
    check_free(output / MODEL, "output")
    checkpoints = output / CHECKPOINTS
    arguments = complete_arguments(settings.training_arguments, evaluates=evaluator is not None)
    arguments.setdefault("dataloader_pin_memory", model.device.type == "cuda")
    limit = arguments.pop("save_total_limit")
    args = make_arguments(arguments, checkpoints, progress=progress)
    run = {
        **arguments_identity(arguments),
        "devices": args.world_size * max(1, args.n_gpu),
        "loss": type(loss).__name__,
        **settings.identity(),
        **(identity or {}),
    }
    check_same_run(checkpoints, run, dataset)
    start = last_checkpoint(checkpoints)
    every = [_Upkeep(loss, limit), *callbacks]
    trainer = _Trainer(model=model, args=args, train_dataset=dataset, loss=loss, evaluator=evaluator, callbacks=every)
    if start is not None:
        loss.load_state_dict(torch.load(start / _LOSS_STATE, weights_only=True), strict=False)
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    trainer.check_weights()
    return trainer.state


def is_main() -> bool:
    """Return whether this is the main process, which alone writes and prints."""
    return bool(require("accelerate", "train", "Training").PartialState().is_main_process)


def save(model: SentenceTransformer, output: str | Path, name: str = MODEL) -> None:
    """Save a finished model as ``output/name`` from the main process, unless it already exists."""
    directory = Path(output) / name
    if is_main() and not directory.exists():
        with atomic_directory(directory, "output") as scratch:
            model.save_pretrained(str(scratch))
    require("accelerate", "train", "Training").PartialState().wait_for_everyone()


# Checkpoints


def last_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    complete = [path.parent for path in directory.glob(f"checkpoint-*/{_LOSS_STATE}")]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def check_same_run(directory: Path, settings: Mapping[str, Any], dataset: Any) -> None:
    """Check that checkpoints belong to this run, and record the run from the main process.

    Args:
        directory: Directory of the checkpoints. Incomplete ones are removed.
        settings: Values that affect the weights, by name.
        dataset: The training data.

    Raises:
        ValueError: If settings or data differ from those of the checkpoints, or those are unknown.
    """
    # Compared after a round trip through JSON, which turns tuples into lists.
    now = json.loads(json.dumps({**settings, "data": data_digest(dataset)}, default=repr))
    if last_checkpoint(directory) is not None:
        try:
            then = {**json.loads((directory / _RUN).read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError):
            raise ValueError(
                f"{directory} has checkpoints of an unknown run, without a readable {_RUN}. Remove {directory} to "
                "start again, or give another output directory."
            ) from None
        # A run omits arguments at their defaults; settings that no longer exist are ignored.
        for name in sorted({*now, *(then.keys() & default_arguments())}):
            if now.get(name) != then.get(name):
                before, after = (f"{name}={run.get(name, default_arguments().get(name))!r}" for run in (then, now))
                raise ValueError(
                    f"{directory} has checkpoints of a run with {before}, but this run has {after}. Give the same "
                    "settings and data to resume it, or another output directory."
                )
    if is_main():
        directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(directory)
        for checkpoint in directory.glob("checkpoint-*"):
            if not (checkpoint / _LOSS_STATE).exists():
                shutil.rmtree(checkpoint, ignore_errors=True)
        with atomic_file(directory / _RUN) as stream:
            stream.write(json.dumps(now, indent=2, sort_keys=True).encode())


# Divergence and callbacks


class DivergedError(RuntimeError):
    """Error raised when a loss, a gradient or a weight is no longer a finite number."""


def _check_finite(message: str, tensors: Iterable[Tensor], arguments: TrainingArguments, step: int) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        checkpoint = last_checkpoint(Path(str(arguments.output_dir)))
        kept = "There is no checkpoint" if checkpoint is None else f"The last good checkpoint is {checkpoint}"
        problem = f"Training diverged at step {step}: {message}. {kept}."
        raise DivergedError(f"{problem} Lower the learning rate, warm up, or look for a faulty row in the data.")


class _Upkeep(TrainerCallback):
    """Callback that checks gradients, completes checkpoints, and fixes bugs of the oldest supported trainers.

    Args:
        loss: The loss, whose state is saved with each checkpoint.
        limit: Number of checkpoints to keep, always with the newest and the best; None or 0: all.
    """

    def __init__(self, loss: nn.Module, limit: int | None) -> None:
        self._loss, self._limit = loss, limit

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Otherwise a resumed run would keep the save, evaluation and logging steps of the checkpoint.
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # When a resumed run skips batches, the oldest version sets the epoch of the wrapper alone, and the inner
        # sampler repeats the order of the first epoch.
        sampler = kwargs["train_dataloader"].batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        # The trainer counts fractions of epochs: 1.0 is the start of the second epoch.
        sampler.set_epoch(int((state.epoch or 0) + 1e-6))

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # With fp16 the gradient scaler skips steps that overflow.
        if not args.fp16:
            parameters = [parameter for group in kwargs["optimizer"].param_groups for parameter in group["params"]]
            gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
            _check_finite("the gradient is not finite", gradients, args, state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The oldest version clears the gradients of the model alone: those of the loss's weights would add up.
        kwargs["optimizer"].zero_grad()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        # The trainer saves the model's state, but not its extra state.
        loss_state = {
            name: value
            for name, value in self._loss.state_dict().items()
            if not name.startswith("model.") or name.endswith("_extra_state")
        }
        directory = Path(str(args.output_dir))
        with atomic_file(directory / f"checkpoint-{state.global_step}" / _LOSS_STATE) as stream:
            torch.save(loss_state, stream)
        # The trainer itself would remove older checkpoints before the new one is complete.
        rotate_checkpoints(str(directory), self._limit, state.best_model_checkpoint)


# Digests of data and weights


def data_digest(dataset: Any) -> str:
    """Return a digest of the rows, and the names and types of the columns, of a ``datasets.Dataset``."""
    digest = hashlib.sha256(repr(dataset.features).encode())
    for rows in dataset.iter(batch_size=1000):
        digest.update(repr(rows).encode())
    return digest.hexdigest()[:16]


def weights_digest(module: nn.Module) -> str:
    """Return a digest of the bytes of all parameters and buffers of a module."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return fingerprint_of(*(fingerprint_of_weight(name, [weights[name]]) for name in sorted(weights)))


# Data


def read_triplets(source: str | Path) -> Any:
    """Read (anchor, positive, hard negative), as from NLI: premise, entailment, contradiction.

    Args:
        source: A file, with named columns or with columns in this order; a folder of shards; a remote path; or a
            dataset of ``datasets.load_dataset``: see :func:`st_reba.data.sources.files_of`. The default split is
            ``train``.

    Returns:
        A ``datasets.Dataset`` with the columns anchor, positive and negative.

    Raises:
        ValueError: If a row is malformed, there are no rows, or ``source`` is neither a readable file nor a dataset.
            The message has the file, the line and the expected columns.
        ImportError: If ``datasets`` is not installed.
    """
    return _read(source, TRIPLETS)


def read_scored_pairs(source: str | Path) -> Any:
    """Read pairs of texts with a similarity: columns sentence1, sentence2 and score.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, PAIRS)


def read_conditional_pairs(source: str | Path) -> Any:
    """Read rows of conditional similarity (C-STS): columns sentence1, sentence2, condition and score, 1 to 5.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, CONDITIONAL)


def read_sentences(source: str | Path) -> Any:
    """Read texts: the column sentence. A .txt file has one text per line; other columns of a table are ignored.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, SENTENCES)


def pairs_evaluator(
    source: str | None, kind: type[BaseEvaluator] = EmbeddingSimilarityEvaluator, **options: Any
) -> Any:
    """Return an evaluator on the scored pairs of a source, see :func:`read_scored_pairs`; None without a source."""
    return None if source is None else kind(*read_scored_pairs(source)[:].values(), **options)


def dataset(columns: Mapping[str, Any]) -> Any:
    """Return a ``datasets.Dataset`` of columns in memory.

    Raises:
        ImportError: If ``datasets`` is not installed.
    """
    return require("datasets", "train", "Training data").Dataset.from_dict(columns)


def _read(source: str | Path, schema: Schema) -> Any:
    # Training has no --columns option to mention in errors.
    return dataset(read_table(source, [replace(schema, remedy=NAMED)], splits=TO_TRAIN).values)
