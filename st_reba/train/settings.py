"""Settings of a training: dataclasses checked by pydantic, the YAML files that they are read from, and the training
arguments of sentence-transformers, which are checked before anything is loaded."""

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

#: Types are checked to the letter: ``True`` is no whole number; but a whole number is a number.
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid")

#: A path, a Hub id or a data set's name: text, whichever it was given as.
PathText = Annotated[str, BeforeValidator(lambda given: fspath(given) if isinstance(given, PathLike) else given)]
# Types of settings with a range.
AtLeast1 = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

#: Arguments that every run has unless others are given.
DEFAULTS: Mapping[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-5,
    "save_total_limit": 2,
    "logging_steps": 50,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
}
_LIMITS: Mapping[str, Any] = {
    **dict.fromkeys(("num_train_epochs", "learning_rate", "save_steps", "eval_steps", "logging_steps"), Field(gt=0)),
    **dict.fromkeys(("per_device_eval_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "seed"), Field(ge=0)),
    "max_steps": Field(ge=-1),
}
#: Arguments that cannot be given, each with the reason.
_ELSEWHERE = {
    "output_dir": "checkpoints are in the output directory of the run",
    "resume_from_checkpoint": "a run goes on by itself from the last checkpoint in its output directory",
    "disable_tqdm": "progress=False where training is called hides the bar",
    "ignore_data_skip": "a resumed run goes on in the data where it was stopped",
    "save_only_model": "no run could be resumed from such a checkpoint",
    "push_to_hub": "st-reba push OUT/model org/name pushes the finished model",
}
#: Beginnings of the names of arguments that change no weight, so that a resumed run may have others.
_MAY_CHANGE = (
    "activation_checkpointing", "batch_eval_metrics", "dataloader_num_workers", "dataloader_p", "ddp_", "debug", "do_",
    "enable_jit_checkpoint", "gradient_checkpointing", "hub_", "include_", "local_rank", "log", "per_device_eval",
    "project", "push_to_hub", "report_to", "run_name", "skip_memory_metrics", "torch_empty_cache_steps", "trackio_",
    "use_cpu",
)  # fmt: skip
#: The same, unless an evaluation decides which step is the best, or when the rate falls.
_EVALUATING = ("eval_", "save_")
#: Arguments without a meaning where there is nothing to evaluate on.
_OF_EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model")
#: Settings that change no weight: the content of data is compared, wherever the data are.
_SOURCES = ("triplets", "pairs", "sentences", "texts", "evaluation", "cache")
#: What of ``model_kwargs`` says where weights are, and not which they are.
_PLACES = ("cache_dir", "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict")


@cache
def defaults() -> dict[str, Any]:
    """Return all arguments of sentence-transformers with their defaults."""
    return {
        known.name: known.default if known.default_factory is MISSING else known.default_factory()
        for known in fields(SentenceTransformerTrainingArguments)
        if known.init
    }


@cache
def _arguments() -> type[BaseModel]:
    """Return a model that checks the types and ranges of arguments."""
    kinds = get_type_hints(SentenceTransformerTrainingArguments)
    checked: Any = {
        name: (Annotated[kinds[name], _LIMITS.get(name, Field())], default) for name, default in defaults().items()
    }
    return create_model("Arguments", __config__=STRICT, **checked)


def complete(given: Mapping[str, Any], *, evaluates: bool) -> dict[str, Any]:
    """Return the given arguments with the defaults of a run.

    Args:
        given: By name.
        evaluates: Whether there is something to evaluate on.

    Raises:
        ValueError: If there is no such argument, with the nearest name; or it is of another type, or out of range; or
            it cannot be given; or the arguments ask for an evaluation, and there is nothing to evaluate on.
    """
    for name in given.keys() & _ELSEWHERE:
        raise ValueError(f"arguments: {name} cannot be given: {_ELSEWHERE[name]}. Leave it out.")
    try:
        _arguments().model_validate(dict(given))
    except ValidationError as error:
        raise ValueError(f"arguments: {_sentence(error)}") from None
    arguments = {
        **DEFAULTS,
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "eval_strategy": "epoch" if given.get("eval_steps") is None else "steps",
        **given,
    }
    if not evaluates:
        arguments |= {name: defaults()[name] for name in _OF_EVALUATION}
        if arguments["save_strategy"] == "best":
            arguments["save_strategy"] = "epoch"
    best = arguments.get("load_best_model_at_end") or arguments["save_strategy"] == "best"
    if best and arguments.get("metric_for_best_model") is None:
        raise ValueError(
            "arguments: an evaluation decides which model is the best. Name one of its numbers, such as "
            "metric_for_best_model: eval_spearman_cosine."
        )
    return arguments


def made(arguments: Mapping[str, Any], output: Path, *, progress: bool) -> SentenceTransformerTrainingArguments:
    """Return complete arguments as the object that the trainer takes.

    Raises:
        ValueError: If sentence-transformers refuses them: a word is unknown, or two do not go together, or not with
            this machine.
        ImportError: If accelerate is not installed.
    """
    require("accelerate", "train", "Training")
    try:
        return SentenceTransformerTrainingArguments(**arguments, output_dir=str(output), disable_tqdm=not progress)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"arguments: {error}") from error


def identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that decide the weights, without those at their defaults.

    A resumed run must share them with the interrupted one.
    """
    by_evaluation = ("reduce_lr_on_plateau", "greedy")
    evaluation_decides = arguments.get("load_best_model_at_end") or arguments.get("lr_scheduler_type") in by_evaluation
    may_change = _MAY_CHANGE if evaluation_decides else (*_MAY_CHANGE, *_EVALUATING)
    return {
        name: value
        for name, value in arguments.items()
        if value != defaults()[name] and not name.startswith(may_change)
    }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """Settings that all methods share; each method adds its own.

    Attributes:
        arguments: Of ``SentenceTransformerTrainingArguments``, by their names there: epochs, batches, precision,
            accumulation, checkpoints, reports, all of it.
        evaluation: Scored pairs to evaluate on: see :func:`st_reba.train.read_scored_pairs`.
        model_kwargs: For transformers' ``from_pretrained``: ``dtype``, ``device_map``, ``attn_implementation``,
            ``quantization_config`` and so on. ``dtype``: float32 on a CPU, else the model's own, unless it is given.

    Raises:
        ValueError: If a setting or an argument has another type or is out of range, naming it, what was given and what
            is allowed; or there is no such argument, with the nearest name.
    """

    #: The method's own arguments, where it has others than :data:`DEFAULTS`.
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    #: The fewest rows of a batch.
    SMALLEST_BATCH: ClassVar[int] = 1

    arguments: dict[str, Any] = field(default_factory=dict)
    evaluation: PathText | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _OF_EVALUATION if self.evaluation is None else ():
            if self.arguments.get(name, "no") not in ("no", False):
                raise ValueError(
                    f"arguments: {name}: {self.arguments[name]!r} was given, but there is nothing to evaluate on. Give "
                    "scored pairs as evaluation, or leave it out."
                )
        found = complete(self.training_arguments, evaluates=self.evaluation is not None)
        if (rows := found["per_device_train_batch_size"]) < self.SMALLEST_BATCH:
            raise ValueError(
                f"arguments: per_device_train_batch_size: {rows} was given: give {self.SMALLEST_BATCH} or more."
            )

    @property
    def training_arguments(self) -> dict[str, Any]:
        """Arguments given, over the method's own."""
        return {**self.ARGUMENTS, **self.arguments}

    def load(self, kind: Callable[..., M], name: str, **options: Any) -> M:
        """Load a model as a module, with ``model_kwargs``.

        Raises:
            ValueError: If transformers does not know one of them for this model.
        """
        dtype = {"dtype": "float32" if get_device_name() == "cpu" else "auto"}
        given = self.model_kwargs if "torch_dtype" in self.model_kwargs else {**dtype, **self.model_kwargs}
        try:
            return kind(name, model_kwargs=given, **options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"model_kwargs: {error}") from error

    def identity(self) -> dict[str, Any]:
        """Return the settings, without arguments, that a resumed run must share with the interrupted one."""
        apart = ("arguments", "model_kwargs", *_SOURCES)
        own = {known.name: getattr(self, known.name) for known in fields(self) if known.name not in apart}
        loaded = {name: value for name, value in self.model_kwargs.items() if name not in _PLACES}
        return {**own, **({"model_kwargs": loaded} if loaded else {})}


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2 for what people write here: ``no`` is a word, and ``2e-4`` a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in own if not tag.endswith((":bool", ":float"))]
    for first, own in yaml.SafeLoader.yaml_implicit_resolvers.items()
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
        kind: The dataclass that names the keys.

    Raises:
        ValueError: If the file is not such a list, or a key is unknown or missing, or a value is not allowed: naming
            the file, the key, what was given and what is allowed.
        FileNotFoundError: If there is no such file.
    """
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not YAML ({' '.join(str(error).split())}).") from None
    keys = [known.name for known in fields(kind)]
    if not isinstance(given, dict):
        held = "nothing" if given is None else f"a {type(given).__name__}"
        raise ValueError(
            f"{path} holds {held}, but it must hold lines such as model: org/name. Keys: {', '.join(keys)}."
        )
    try:
        return kind(**{str(key): value for key, value in given.items()})
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error, keys)}") from None


def _sentence(error: ValidationError, keys: Sequence[str] = ()) -> str:
    """Return the first of pydantic's errors as a sentence, with the nearest of ``keys`` and arguments."""
    first, *more = error.errors(include_url=False)
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "value_error":
        return str(first["msg"].removeprefix("Value error, "))
    if first["type"] == "missing":
        return f"the key {name!r} is missing. Add a line {name}: VALUE."
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        names = [*keys, *defaults()]
        near = next(iter([known for known in names if name in known] or get_close_matches(name, names, n=1)), "")
        listed = f" Keys: {', '.join(keys)}." if keys else ""
        below = ", to be written below arguments" if keys and near not in keys else ""
        return f"{name!r} is unknown.{listed}" + (f" The nearest is {near}{below}." if near else "")
    # A type that is a union has an error for each of its parts.
    said = dict.fromkeys(each["msg"] for each in (first, *more) if each["loc"][:1] == first["loc"][:1])
    return f"{name}: {first['input']!r} was given: {' or '.join(each[0].lower() + each[1:] for each in said)}."
