"""The training arguments of sentence-transformers, as a settings file gives them: checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available

from ..optional import require
from .values import converted, described, fits, hints_of, in_range, nearest

#: What every run does unless it is asked for something else.
DEFAULTS: Mapping[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-5,
    "save_total_limit": 2,
    "logging_steps": 50,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "hub_strategy": "end",
}

#: What a run may be asked for beyond its type.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "num_train_epochs": {"above": 0},
    "max_steps": {"least": -1},
    "per_device_train_batch_size": {"least": 1},
    "per_device_eval_batch_size": {"least": 1},
    "gradient_accumulation_steps": {"least": 1},
    "learning_rate": {"above": 0},
    "warmup_steps": {"least": 0},
    "weight_decay": {"least": 0},
    "save_steps": {"above": 0},
    "eval_steps": {"above": 0},
    "logging_steps": {"above": 0},
    "seed": {"least": 0},
}

#: What is decided elsewhere, and where.
_ELSEWHERE = {
    "output_dir": "the output directory of the run is where checkpoints lie",
    "resume_from_checkpoint": "a run goes on by itself from the last checkpoint in its output directory",
    "disable_tqdm": "whether there is a bar is asked where training is called (progress)",
    "ignore_data_skip": "a run that goes on takes up its data where it was stopped",
    "restore_callback_states_from_checkpoint": "a run that goes on does so as it is asked to now",
    "save_only_model": "a checkpoint that no run can go on from is of no use here",
}

#: What changes no weight, so that a run which goes on may have it otherwise: when and where something is written, told,
#: evaluated or run. What is told apart by the rows that a step has, instead, is in :func:`rows_of`.
_CHANGES_NO_WEIGHT = frozenset(
    {
        "activation_checkpointing", "activation_checkpointing_kwargs", "batch_eval_metrics",
        "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
        "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend", "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "debug", "do_eval", "do_predict", "do_train",
        "enable_jit_checkpoint", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_on_start",
        "eval_steps", "eval_strategy", "eval_use_gather_object", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "gradient_accumulation_steps", "include_for_metrics",
        "include_num_input_tokens_seen", "local_rank", "log_level", "log_level_replica", "log_on_each_node",
        "per_device_eval_batch_size", "per_device_train_batch_size", "project", "push_to_hub", "report_to", "run_name",
        "save_on_each_node", "save_steps", "save_strategy", "save_total_limit", "skip_memory_metrics",
        "torch_empty_cache_steps", "use_cpu",
    }
)  # fmt: skip
_OF_A_KIND_THAT_CHANGES_NONE = ("hub_", "logging_", "trackio_")

#: What decides weights after all where an evaluation does: which step is the best, or when the rate falls.
_EVALUATING = ("eval_delay", "eval_on_start", "eval_steps", "eval_strategy", "save_steps", "save_strategy")


def check(given: Mapping[str, Any], limits: Mapping[str, Mapping[str, float]] = LIMITS) -> dict[str, Any]:
    """Arguments as a file has them, of the types that they shall have.

    Args:
        given: By name.
        limits: Of numbers, by name.

    Raises:
        ValueError: If there is no such argument, with the nearest name; or it is of another type, or out of range; or
            it is decided elsewhere.
    """
    hints = {name: hint for name, hint in hints_of(SentenceTransformerTrainingArguments).items() if name in _fields()}
    checked = {}
    for name, value in given.items():
        if name in _ELSEWHERE:
            raise ValueError(f"arguments: {name} cannot be given: {_ELSEWHERE[name]}. Leave it out.")
        if name not in hints:
            raise ValueError(
                f"arguments: {name!r} is no training argument of sentence-transformers.{nearest(str(name), hints)}"
            )
        checked[name] = converted(value, hints[name])
        limit = limits.get(name, {})
        if not fits(checked[name], hints[name]) or not in_range(checked[name], limit):
            raise ValueError(f"arguments: {name}: {value!r} was given, but it must be {described(hints[name], limit)}.")
    return checked


def is_known(name: str) -> bool:
    """Whether sentence-transformers has such an argument."""
    return name in _fields()


def nearest_name(name: str, others: Iterable[str]) -> str | None:
    """The argument, or the one of some other names, that was likely meant by a name; None if none is near."""
    found = get_close_matches(name, [*_fields(), *others], n=1, cutoff=0.6)
    return found[0] if found else None


def complete(given: Mapping[str, Any], *, evaluates: bool) -> dict[str, Any]:
    """Arguments with what follows from them, and with what every run does where they do not say otherwise.

    Args:
        given: Checked ones.
        evaluates: Whether there is something to evaluate on.

    Raises:
        ValueError: If they ask for an evaluation, and there is nothing to evaluate on.
    """
    arguments = {**DEFAULTS, **given}
    if "report_to" not in given:
        arguments["report_to"] = ["tensorboard"] if is_tensorboard_available() else []
    # Steps are given by who wants steps.
    arguments.setdefault("save_strategy", "steps" if "save_steps" in given else "epoch")
    if not evaluates:
        _check_that_nothing_is_evaluated(given)
        arguments |= {"eval_strategy": "no", "eval_steps": None}
    arguments.setdefault("eval_strategy", "epoch" if arguments.get("eval_steps") is None else "steps")
    best = arguments.get("load_best_model_at_end") or arguments["save_strategy"] == "best"
    if best and arguments.get("metric_for_best_model") is None:
        raise ValueError(
            "arguments: what is best is decided by an evaluation: name one of its numbers, such as "
            "metric_for_best_model: eval_spearman_cosine."
        )
    return arguments


def _check_that_nothing_is_evaluated(given: Mapping[str, Any]) -> None:
    for name in ("eval_strategy", "load_best_model_at_end", "eval_on_start"):
        if given.get(name, "no") not in ("no", False):
            raise ValueError(
                f"arguments: {name}: {given[name]!r} was given, but there is nothing to evaluate on: give evaluation, "
                "scored pairs, or leave it out."
            )


def made(arguments: Mapping[str, Any], output: Path, *, progress: bool) -> SentenceTransformerTrainingArguments:
    """Complete arguments as the object that the trainer takes.

    Raises:
        ValueError: If sentence-transformers refuses them: two do not go together, or not with this machine.
        ImportError: If accelerate is not installed.
    """
    require("accelerate", "train", "Training")
    # What is pushed in the end is the finished model; the trainer would begin with empty checkpoints.
    only_in_the_end = arguments.get("push_to_hub") and arguments.get("hub_strategy") == "end"
    given = {**arguments, **({"push_to_hub": False} if only_in_the_end else {})}
    try:
        return SentenceTransformerTrainingArguments(**given, output_dir=str(output), disable_tqdm=not progress)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"arguments: {error}") from error


def identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that decide the weights: a run that goes on must share them with the run that was interrupted.

    What is as sentence-transformers has it by itself is left out, whether or not it was given.
    """
    evaluation_decides = arguments.get("load_best_model_at_end") or arguments.get("lr_scheduler_type") in (
        "reduce_lr_on_plateau",
        "greedy",
    )
    return {
        name: value
        for name, value in arguments.items()
        if value != _fields()[name] and (not _is_free(name) or (evaluation_decides and name in _EVALUATING))
    }


def rows_of(arguments: SentenceTransformerTrainingArguments, *, gathered: bool) -> dict[str, int]:
    """What stands for the number of devices and their batches: rows that a loss sees at once, and rows of a step.

    Args:
        arguments: Of a run.
        gathered: Whether the loss sees the rows of all devices at once.
    """
    alone, devices = int(arguments.train_batch_size), int(arguments.world_size)
    if getattr(arguments.accelerator_config, "split_batches", False):
        # Then a batch is one of all devices.
        alone //= devices
    return {
        "rows_of_a_batch": alone * devices if gathered else alone,
        "rows_of_a_step": alone * devices * int(arguments.gradient_accumulation_steps),
    }


def _is_free(name: str) -> bool:
    return name in _CHANGES_NO_WEIGHT or name.startswith(_OF_A_KIND_THAT_CHANGES_NONE)


def by_itself(name: str) -> Any:
    """What an argument is in a run that is not asked for another."""
    return DEFAULTS.get(name, unchanged(name))


def unchanged(name: str) -> Any:
    """What an argument is in sentence-transformers."""
    return _fields()[name]


def without_evaluation(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a run that has nothing to evaluate on, such as one before the run that was asked for."""
    of_evaluation = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    return {
        name: value
        for name, value in arguments.items()
        if not name.startswith("eval_") and name not in of_evaluation and value != "best"
    }


@cache
def _fields() -> dict[str, Any]:
    """What arguments there are, and what each is by itself."""
    return {
        known.name: known.default if known.default_factory is MISSING else known.default_factory()
        for known in fields(SentenceTransformerTrainingArguments)
        if known.init
    }
