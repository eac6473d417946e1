"""Settings of training runs: dataclasses checked by pydantic, YAML files, and arguments of the trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.dataclasses import dataclass
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.util import get_device_name

from ..optional import require

M = TypeVar("M")
S = TypeVar("S", bound="RunSettings")

#: Strict types: ``True`` is no int, but an int is a float.
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid")

#: Path, Hub id or name of a dataset, as a string.
PathText = Annotated[str, BeforeValidator(lambda value: fspath(value) if isinstance(value, PathLike) else value)]
# Numbers with a range.
AtLeast1 = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

#: Defaults of all runs.
DEFAULTS: Mapping[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-5,
    "save_total_limit": 2,
    "logging_steps": 50,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
}
#: Defaults of contrastive training.
CONTRASTIVE: Mapping[str, Any] = {"per_device_train_batch_size": 64, "batch_sampler": "no_duplicates"}
_LIMITS: Mapping[str, Any] = {
    **dict.fromkeys(("num_train_epochs", "learning_rate", "save_steps", "eval_steps", "logging_steps"), Field(gt=0)),
    **dict.fromkeys(("per_device_eval_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "seed"), Field(ge=0)),
    "max_steps": Field(ge=-1),
}
#: Arguments that a run sets itself, or that would make it impossible to resume.
_REFUSED = {
    "output_dir", "resume_from_checkpoint", "disable_tqdm", "ignore_data_skip", "save_only_model", "push_to_hub",
}  # fmt: skip
#: Prefixes of arguments that do not affect the weights, so that a resumed run may change them.
_MAY_CHANGE = (
    "activation_checkpointing", "batch_eval_metrics", "dataloader_num_workers", "dataloader_p", "ddp_", "debug", "do_",
    "enable_jit_checkpoint", "gradient_checkpointing", "hub_", "include_", "local_rank", "log", "per_device_eval",
    "project", "push_to_hub", "report_to", "run_name", "skip_memory_metrics", "torch_empty_cache_steps", "trackio_",
    "use_cpu",
)  # fmt: skip
#: The same, unless an evaluation selects the best model or lowers the learning rate.
_EVALUATION_STEPS = ("eval_", "save_")
#: Arguments that have no effect without evaluation data.
_EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model")
#: Settings that name data, whose content is compared instead.
_SOURCES = ("triplets", "pairs", "sentences", "texts", "evaluation", "cache")
#: Settings in ``model_kwargs`` that place weights and do not change them.
_PLACEMENT = ("cache_dir", "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict")


@cache
def default_arguments() -> dict[str, Any]:
    """Return all arguments of sentence-transformers with their defaults."""
    return {
        argument.name: argument.default if argument.default_factory is MISSING else argument.default_factory()
        for argument in fields(SentenceTransformerTrainingArguments)
        if argument.init
    }


@cache
def _arguments_model() -> type[BaseModel]:
    """Return a pydantic model that checks the types and ranges of arguments."""
    types = get_type_hints(SentenceTransformerTrainingArguments)
    checked: Any = {name: (Annotated[types[name], _LIMITS.get(name, Field())], None) for name in default_arguments()}
    return create_model("Arguments", __config__=STRICT, **checked)


def complete_arguments(arguments: Mapping[str, Any], *, evaluates: bool) -> dict[str, Any]:
    """Check arguments, and return them with the defaults of a run.

    Args:
        arguments: Arguments by name.
        evaluates: Whether there is evaluation data.

    Raises:
        ValueError: If an argument is unknown, of another type, out of range or refused, or selects the best model
            without a metric.
    """
    for name in arguments.keys() & _REFUSED:
        raise ValueError(f"arguments: {name} cannot be given: the run sets it itself. Leave it out.")
    try:
        _arguments_model().model_validate(dict(arguments))
    except ValidationError as error:
        raise ValueError(f"arguments: {_sentence(error)}") from None
    completed = {
        **DEFAULTS,
        "save_strategy": "steps" if "save_steps" in arguments else "epoch",
        "eval_strategy": "epoch" if arguments.get("eval_steps") is None else "steps",
        **arguments,
    }
    if not evaluates:
        completed |= {name: default_arguments()[name] for name in _EVALUATION}
        if completed["save_strategy"] == "best":
            completed["save_strategy"] = "epoch"
    best = completed.get("load_best_model_at_end") or completed["save_strategy"] == "best"
    if best and completed.get("metric_for_best_model") is None:
        raise ValueError(
            "arguments: the best model needs a metric. Give one of the evaluation's, such as "
            "metric_for_best_model: eval_spearman_cosine."
        )
    return completed


def make_arguments(
    arguments: Mapping[str, Any], output: Path, *, progress: bool
) -> SentenceTransformerTrainingArguments:
    """Return complete arguments as an object for the trainer.

    Raises:
        ValueError: If sentence-transformers refuses them, because a value is unknown, two do not fit together or one
            does not fit this machine.
        ImportError: If accelerate is not installed.
    """
    require("accelerate", "train", "Training")
    try:
        return SentenceTransformerTrainingArguments(**arguments, output_dir=str(output), disable_tqdm=not progress)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"arguments: {error}") from error


def arguments_identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that affect the weights, without those at their defaults.

    A resumed run must have the same.
    """
    adaptive = arguments.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
    evaluation_matters = arguments.get("load_best_model_at_end") or adaptive
    may_change = _MAY_CHANGE if evaluation_matters else (*_MAY_CHANGE, *_EVALUATION_STEPS)
    return {
        name: value
        for name, value in arguments.items()
        if value != default_arguments()[name] and not name.startswith(may_change)
    }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """Settings of all methods; each method adds its own.

    Attributes:
        arguments: Arguments of ``SentenceTransformerTrainingArguments``, such as epochs, batches, precision,
            accumulation, checkpoints and reports.
        evaluation: Scored pairs to evaluate on: see :func:`st_reba.train.read_scored_pairs`.
        model_kwargs: Arguments of transformers' ``from_pretrained``: ``dtype``, ``device_map``,
            ``attn_implementation``, ``quantization_config`` and so on. The default ``dtype`` is float32 on a CPU, else
            the model's own.

    Raises:
        ValueError: If a setting or an argument is unknown, has another type or is out of range.
    """

    #: Defaults of the method, in addition to :data:`DEFAULTS`.
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    #: Minimum number of rows per batch.
    SMALLEST_BATCH: ClassVar[int] = 1

    arguments: dict[str, Any] = field(default_factory=dict)
    evaluation: PathText | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        evaluates = self.evaluation is not None
        for name in _EVALUATION:
            if not evaluates and self.arguments.get(name, "no") not in ("no", False):
                problem = f"arguments: {name}: {self.arguments[name]!r} was given, but there is nothing to evaluate on."
                raise ValueError(f"{problem} Give scored pairs as evaluation, or leave it out.")
        arguments = complete_arguments(self.training_arguments, evaluates=evaluates)
        if (rows := arguments["per_device_train_batch_size"]) < self.SMALLEST_BATCH:
            raise ValueError(
                f"arguments: per_device_train_batch_size: {rows} was given: give {self.SMALLEST_BATCH} or more."
            )

    @property
    def training_arguments(self) -> dict[str, Any]:
        """Defaults of the method, updated with the arguments."""
        return {**self.ARGUMENTS, **self.arguments}

    def load(self, kind: Callable[..., M], name: str, **options: Any) -> M:
        """Load a model as a module, with ``model_kwargs``.

        Raises:
            ValueError: If this model does not accept one of them.
        """
        dtype = {"dtype": "float32" if get_device_name() == "cpu" else "auto"}
        model_kwargs = self.model_kwargs if "torch_dtype" in self.model_kwargs else {**dtype, **self.model_kwargs}
        try:
            return kind(name, model_kwargs=model_kwargs, **options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"model_kwargs: {error}") from error

    def identity(self) -> dict[str, Any]:
        """Return the settings, without arguments, that must be the same in a resumed run."""
        excluded = ("arguments", "model_kwargs", *_SOURCES)
        settings = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in excluded}
        model_kwargs = {name: value for name, value in self.model_kwargs.items() if name not in _PLACEMENT}
        return {**settings, "model_kwargs": model_kwargs} if model_kwargs else settings


class _Loader(yaml.SafeLoader):
    """YAML loader with the booleans and floats of YAML 1.2: ``no`` is a string, and ``2e-4`` a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)


def read_settings(path: str | Path, kind: type[S]) -> S:
    """Read a YAML file of ``key: value`` lines.

    Args:
        path: The file, UTF-8.
        kind: Dataclass of the settings.

    Raises:
        ValueError: If the file is not such a mapping, a key is unknown or missing, or a value is not allowed.
        FileNotFoundError: If the file does not exist.
    """
    try:
        entries = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file ({' '.join(str(error).split())}).") from None
    keys = [entry.name for entry in fields(kind)]
    if not isinstance(entries, dict):
        content = "nothing" if entries is None else f"a {type(entries).__name__}"
        raise ValueError(f"{path} has {content}: give lines such as model: org/name. Keys: {', '.join(keys)}.")
    try:
        return kind(**{str(key): value for key, value in entries.items()})
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error, keys)}") from None


def _sentence(error: ValidationError, keys: Sequence[str] = ()) -> str:
    """Return the first of pydantic's errors as a sentence, and suggest the nearest of ``keys`` and arguments."""
    first, *more = error.errors(include_url=False)
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "value_error":
        return str(first["msg"].removeprefix("Value error, "))
    if first["type"] == "missing":
        return f"the key {name!r} is missing. Add a line {name}: VALUE."
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        names = [*keys, *default_arguments()]
        message = f"{name!r} is unknown."
        if keys:
            message += f" Keys: {', '.join(keys)}."
        if near := [key for key in names if name in key] or get_close_matches(name, names, n=1):
            below = ", below arguments" if keys and near[0] not in keys else ""
            message += f" The nearest is {near[0]}{below}."
        return message
    # A union has an error for each of its types.
    messages = dict.fromkeys(entry["msg"] for entry in (first, *more) if entry["loc"][:1] == first["loc"][:1])
    return f"{name}: {first['input']!r} was given: {' or '.join(text[0].lower() + text[1:] for text in messages)}."
