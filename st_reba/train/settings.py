"""What a training is asked for: dataclasses checked by pydantic, the YAML files that they are read from, and the
training arguments of sentence-transformers, which are checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.util import get_device_name
from transformers.integrations.integration_utils import is_tensorboard_available

from ..optional import require

M = TypeVar("M")
S = TypeVar("S", bound="Settings")

#: To the letter: ``True`` is no whole number; but a whole number is a number.
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def setting(
    default: Any = MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    may_change: bool = False,
) -> Any:
    """A field of :class:`Settings` with a range, of a number or of a number or None.

    A number beside words has its range in its type: ``Annotated[int, pydantic.Field(ge=0)] | Literal["all"]``.

    Args:
        default: Its value where none is given; without a default it must be given.
        least: The lowest number that is allowed.
        above: A number that it must exceed.
        below: A number that it must not reach.
        may_change: Whether a run that was interrupted may go on with another value: true of what decides when something
            is written or evaluated, and of where data lie, of which the content counts.
    """
    return field(default=default, metadata={"range": Field(ge=least, gt=above, lt=below), "may_change": may_change})


def _check(name: str, value: Any, kind: Any, limits: Any) -> Any:
    """A value of a type and within limits, which are a pydantic ``Field``; a list is taken for a tuple.

    Raises:
        ValueError: If the value is not, in pydantic's words.
    """
    if isinstance(value, list) and any(get_origin(part) is tuple for part in (kind, *get_args(kind))):
        value = tuple(value)
    try:
        TypeAdapter(Annotated[kind, limits], config=_STRICT).validate_python(value)
    except ValidationError as error:
        said = dict.fromkeys(each["msg"].replace("tuple", "list") for each in error.errors(include_url=False))
        told = " or ".join(each[0].lower() + each[1:] for each in said)
        raise ValueError(f"{name}: {value!r} was given: {told}.") from None
    return value


def _nearest(given: str, known: Iterable[str]) -> str:
    """The name that was likely meant: one that has the given one as a part, or else one like it; empty if none is."""
    names = list(known)
    return next(iter([name for name in names if given in name] or get_close_matches(given, names, n=1)), "")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the frozen dataclasses that name what a training may be asked for.

    A field has any type that pydantic checks; :func:`setting` gives it a range.

    Raises:
        ValueError: If a value has another type or is out of range, naming the field, what was given and what is
            allowed.
    """

    #: Values that belong together, by the name that the key ``preset`` of a file has for them.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for known in fields(self):
            limits = known.metadata.get("range", Field())
            object.__setattr__(
                self, known.name, _check(known.name, getattr(self, known.name), kinds[known.name], limits)
            )

    @classmethod
    def of_preset(cls, name: str, /, **given: Any) -> Self:
        """The settings of a preset, with others in place of some of them or besides.

        Raises:
            ValueError: If there is no such preset, or as the class itself.
        """
        if name not in [*cls.PRESETS]:
            known = " or ".join(map(repr, cls.PRESETS))
            raise ValueError(f"preset: {name!r} was given, but it must be {known}, or left out.")
        chosen = dict(cls.PRESETS[name])
        for key, value in given.items():
            inner = isinstance(value, Mapping) and isinstance(chosen.get(key), Mapping)
            chosen[key] = {**chosen[key], **value} if inner else value
        return cls(**chosen)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 in what people write here: ``no`` is a word, and ``2e-4`` a number."""


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
        ValueError: If the file is not such a list, or a key is unknown or missing, or a value is not what it may be:
            naming the file, the key, what was given and what is allowed.
        FileNotFoundError: If there is no such file.
    """
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{line}: this is not YAML ({problem or ' '.join(str(error).split())}).") from None
    keys = [*(known.name for known in fields(kind)), *(["preset"] if kind.PRESETS else [])]
    listed = f"Keys: {', '.join(keys)}."
    if not isinstance(given, dict):
        held = "nothing" if given is None else f"a {type(given).__name__}"
        raise ValueError(f"{path} holds {held}, but it must hold lines such as model: org/name. {listed}")
    for key in given:
        if key not in keys:
            near = _nearest(str(key), [*keys, *(usual() if "arguments" in keys else ())])
            said = f" The nearest is {near}{'' if near in keys else ', to be written below arguments'}." if near else ""
            raise ValueError(f"{path}: the key {key!r} is unknown. {listed}{said}")
    for known in fields(kind):
        if known.default is known.default_factory is MISSING and known.name not in given:
            raise ValueError(f"{path}: the key {known.name!r} is missing. Add a line {known.name}: VALUE.")
    try:
        return kind.of_preset(given.pop("preset"), **given) if "preset" in given else kind(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# The training arguments of sentence-transformers

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
LIMITS: Mapping[str, Any] = {
    **dict.fromkeys(("num_train_epochs", "learning_rate", "save_steps", "eval_steps", "logging_steps"), Field(gt=0)),
    **dict.fromkeys(("per_device_eval_batch_size", "gradient_accumulation_steps"), Field(ge=1)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "seed"), Field(ge=0)),
    "max_steps": Field(ge=-1),
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

#: How names begin of what changes no weight, so that a run which goes on may have it otherwise: when and where
#: something is written, told, evaluated or run.
_MAY_CHANGE = (
    "activation_checkpointing", "batch_eval_metrics", "dataloader_num_workers", "dataloader_p", "ddp_", "debug", "do_",
    "enable_jit_checkpoint", "gradient_checkpointing", "hub_", "include_", "local_rank", "log", "per_device_eval",
    "project", "push_to_hub", "report_to", "run_name", "skip_memory_metrics", "torch_empty_cache_steps", "trackio_",
    "use_cpu",
)  # fmt: skip
#: The same, unless an evaluation decides which step is the best, or when the rate falls.
_EVALUATING = ("eval_", "save_")


@cache
def usual() -> dict[str, Any]:
    """What arguments there are, and what each is in sentence-transformers."""
    return {
        known.name: known.default if known.default_factory is MISSING else known.default_factory()
        for known in fields(SentenceTransformerTrainingArguments)
        if known.init
    }


def complete(given: Mapping[str, Any], *, evaluates: bool, smallest_batch: int = 1) -> dict[str, Any]:
    """Arguments with what follows from them, and with what every run does where they do not say otherwise.

    Args:
        given: By name.
        evaluates: Whether there is something to evaluate on.
        smallest_batch: Rows that a batch has at least.

    Raises:
        ValueError: If there is no such argument, with the nearest name; or it is of another type, or out of range; or
            it is decided elsewhere; or they ask for an evaluation, and there is nothing to evaluate on.
    """
    kinds = get_type_hints(SentenceTransformerTrainingArguments)
    limits = {**LIMITS, "per_device_train_batch_size": Field(ge=smallest_batch)}
    for name, value in given.items():
        if name in _ELSEWHERE:
            raise ValueError(f"arguments: {name} cannot be given: {_ELSEWHERE[name]}. Leave it out.")
        if name not in usual():
            near = _nearest(str(name), usual())
            said = f" The nearest is {near}." if near else ""
            raise ValueError(f"arguments: {name!r} is no training argument of sentence-transformers.{said}")
        _check(f"arguments: {name}", value, kinds[name], limits.get(name, Field()))
    arguments = {
        **DEFAULTS,
        # Steps are given by who wants steps.
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "eval_strategy": "epoch" if given.get("eval_steps") is None else "steps",
        "report_to": ["tensorboard"] if is_tensorboard_available() else [],
        **given,
    }
    if not evaluates:
        for name in ("eval_strategy", "load_best_model_at_end", "eval_on_start"):
            if given.get(name, "no") not in ("no", False):
                raise ValueError(
                    f"arguments: {name}: {given[name]!r} was given, but there is nothing to evaluate on: give "
                    "evaluation, scored pairs, or leave it out."
                )
        arguments |= {"eval_strategy": "no", "eval_steps": None}
    best = arguments.get("load_best_model_at_end") or arguments["save_strategy"] == "best"
    if best and arguments.get("metric_for_best_model") is None:
        raise ValueError(
            "arguments: what is best is decided by an evaluation: name one of its numbers, such as "
            "metric_for_best_model: eval_spearman_cosine."
        )
    return arguments


def made(arguments: Mapping[str, Any], output: Path, *, progress: bool) -> SentenceTransformerTrainingArguments:
    """Complete arguments as the object that the trainer takes.

    Raises:
        ValueError: If sentence-transformers refuses them: one is none of its words, or two do not go together, or not
            with this machine.
        ImportError: If accelerate is not installed.
    """
    require("accelerate", "train", "Training")
    # What is pushed in the end is the finished model; the trainer would begin with empty checkpoints.
    only_in_the_end = arguments.get("push_to_hub") and arguments.get("hub_strategy") == "end"
    given = {**arguments, "push_to_hub": False} if only_in_the_end else arguments
    try:
        return SentenceTransformerTrainingArguments(**given, output_dir=str(output), disable_tqdm=not progress)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"arguments: {error}") from error


def identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that decide the weights: a run that goes on must share them with the run that was interrupted.

    What is as sentence-transformers has it by itself is left out, whether or not it was given.
    """
    by_evaluation = ("reduce_lr_on_plateau", "greedy")
    evaluation_decides = arguments.get("load_best_model_at_end") or arguments.get("lr_scheduler_type") in by_evaluation
    may_change = _MAY_CHANGE if evaluation_decides else (*_MAY_CHANGE, *_EVALUATING)
    return {
        name: value for name, value in arguments.items() if value != usual()[name] and not name.startswith(may_change)
    }


# What every method is asked for

#: What of ``model_kwargs`` says where weights lie, not which they are.
_PLACES = ("cache_dir", "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every method is asked for; a method adds what it needs besides.

    Attributes:
        arguments: Of ``SentenceTransformerTrainingArguments``, by their names there: epochs, batches, precision,
            accumulation, checkpoints, reports, the Hub, all of it.
        evaluation: Scored pairs to evaluate on: see :func:`st_reba.train.read_scored_pairs`.
        model_kwargs: For transformers' ``from_pretrained``: ``dtype``, ``device_map``, ``attn_implementation``,
            ``quantization_config`` and so on. ``dtype``: float32 on a CPU, else the model's own, unless it is given.

    Raises:
        ValueError: As :class:`Settings`; and for an argument that there is not, with the nearest name, or of another
            type, or for two that do not go together.
    """

    #: The method's own arguments, where it has others than :data:`DEFAULTS`.
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    #: Rows of a batch, at least.
    SMALLEST_BATCH: ClassVar[int] = 1

    arguments: dict[str, Any] = field(default_factory=dict)
    evaluation: str | None = setting(None, may_change=True)
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        complete(self.training_arguments, evaluates=self.evaluation is not None, smallest_batch=self.SMALLEST_BATCH)

    @property
    def training_arguments(self) -> dict[str, Any]:
        """The arguments as they were given, over those of the method; who says when, says it whole."""
        said = {f"{kind}_steps" for kind in ("save", "eval") if f"{kind}_strategy" in self.arguments}
        usual_here = {name: value for name, value in self.ARGUMENTS.items() if name not in said}
        return {**usual_here, **self.arguments}

    def without_evaluation(self) -> dict[str, Any]:
        """The same for a run that has nothing to evaluate on, such as one before the run that was asked for."""
        names = ("eval_", "load_best_model_at_end", "metric_for_best_model", "greater_is_better")
        return {
            name: value
            for name, value in self.training_arguments.items()
            if not name.startswith(names) and value != "best"
        }

    @property
    def random_seed(self) -> int:
        """Of the order of the rows and of all that is random."""
        return int({**usual(), **self.training_arguments}["seed"])

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, on each device."""
        return int({**DEFAULTS, **self.training_arguments}["per_device_train_batch_size"])

    def loading(self) -> dict[str, Any]:
        """``model_kwargs``, with a precision."""
        if "torch_dtype" in self.model_kwargs:
            return dict(self.model_kwargs)
        return {"dtype": "float32" if get_device_name() == "cpu" else "auto", **self.model_kwargs}

    def load(self, kind: Callable[..., M], name: str, **options: Any) -> M:
        """A module of a model, loaded with ``model_kwargs``.

        Raises:
            ValueError: If the model, which alone knows whether it takes all of them, does not know a name.
        """
        try:
            return kind(name, model_kwargs=self.loading(), **options)
        except TypeError as error:
            for given in self.model_kwargs:
                if f"unexpected keyword argument {given!r}" in str(error):
                    raise ValueError(f"model_kwargs: transformers knows no {given!r}.") from error
            raise

    def identity(self) -> dict[str, Any]:
        """The settings that a run which goes on must share with the run that was interrupted, but the arguments."""
        own = {
            known.name: getattr(self, known.name)
            for known in fields(self)
            if known.name not in ("arguments", "model_kwargs") and not known.metadata.get("may_change")
        }
        loaded = {name: value for name, value in self.model_kwargs.items() if name not in _PLACES}
        return {**own, **({"model_kwargs": loaded} if loaded else {})}
