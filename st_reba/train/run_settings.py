"""What every method of training is asked for: sentence-transformers' arguments, and how its models are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from sentence_transformers.util import get_device_name

from . import arguments as of_st
from .quantization import with_quantization
from .settings import Settings
from .values import nearest

#: Usual names in ``model_kwargs``, for who has mistyped one. Others are taken as well.
_USUAL = (
    "attn_implementation", "cache_dir", "device_map", "dtype", "key_mapping", "low_cpu_mem_usage", "max_memory",
    "offload_folder", "quantization_config", "revision", "subfolder", "token", "torch_dtype", "trust_remote_code",
    "use_safetensors", "variant",
)  # fmt: skip

#: What of ``model_kwargs`` says where weights lie, not which they are.
_PLACES = ("cache_dir", "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict")


class _Former(Enum):
    """What stands in a former setting: None was a value of some."""

    NOT_GIVEN = "not given"


def _intervals(kind: str) -> Callable[[Any], dict[str, Any]]:
    """Every so many steps, or each epoch."""
    return lambda steps: {f"{kind}_strategy": "epoch"} if steps is None else {f"{kind}_steps": steps}


#: What version 0.6 had settings of its own for, and which arguments say the same.
FORMER: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "epochs": lambda value: {"num_train_epochs": value},
    "max_steps": lambda value: {"max_steps": value},
    "batch_size": lambda value: {"per_device_train_batch_size": value},
    "learning_rate": lambda value: {"learning_rate": value},
    "warmup_ratio": lambda value: {"warmup_steps": value},
    "weight_decay": lambda value: {"weight_decay": value},
    "checkpoint_steps": _intervals("save"),
    "evaluation_steps": _intervals("eval"),
    "seed": lambda value: {"seed": value},
    "no_duplicates": lambda value: {"batch_sampler": "no_duplicates" if value else "batch_sampler"},
    "logging_steps": lambda value: {"logging_steps": value},
}


def translated(former: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with those that former settings stand for.

    Raises:
        ValueError: If both say something of the same.
    """
    found = dict(arguments)
    for name, value in former.items():
        for argument, meant in FORMER[name](value).items():
            if argument in arguments:
                raise ValueError(f"{name} and arguments: {argument} say the same: leave {name} out.")
            found[argument] = meant
    return found


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every method is asked for; a method adds what it needs besides.

    Attributes:
        arguments: Of ``SentenceTransformerTrainingArguments``, by their names there: epochs, batches, precision,
            accumulation, checkpoints, reports, the Hub, all of it.
        model_kwargs: For transformers' ``from_pretrained``: ``dtype``, ``device_map``, ``attn_implementation``,
            ``quantization_config`` and so on. ``dtype``: float32 on a CPU, else the model's own, unless it is given.

    ``epochs``, ``max_steps``, ``batch_size``, ``learning_rate``, ``warmup_ratio``, ``weight_decay``,
    ``checkpoint_steps``, ``evaluation_steps``, ``no_duplicates``, ``seed`` and ``dtype`` were settings until version
    0.6. They are taken still, with a warning, and become what they say.

    Raises:
        ValueError: As :class:`Settings`; and for an argument that there is not, with the nearest name, or of another
            type, or for two that do not go together.
    """

    FORMER_KEYS: ClassVar[frozenset[str]] = frozenset(FORMER) | {"dtype"}
    #: The method's own arguments, where it has others than :data:`st_reba.train.arguments.DEFAULTS`.
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    #: The method's own limits of numbers.
    LIMITS: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    arguments: dict[str, Any] = field(default_factory=dict)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    epochs: Any = field(default=_Former.NOT_GIVEN, repr=False)
    max_steps: Any = field(default=_Former.NOT_GIVEN, repr=False)
    batch_size: Any = field(default=_Former.NOT_GIVEN, repr=False)
    learning_rate: Any = field(default=_Former.NOT_GIVEN, repr=False)
    warmup_ratio: Any = field(default=_Former.NOT_GIVEN, repr=False)
    weight_decay: Any = field(default=_Former.NOT_GIVEN, repr=False)
    checkpoint_steps: Any = field(default=_Former.NOT_GIVEN, repr=False)
    evaluation_steps: Any = field(default=_Former.NOT_GIVEN, repr=False)
    no_duplicates: Any = field(default=_Former.NOT_GIVEN, repr=False)
    seed: Any = field(default=_Former.NOT_GIVEN, repr=False)
    dtype: Any = field(default=_Former.NOT_GIVEN, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        former = {
            known.name: value
            for known in fields(self)
            if known.name in self.FORMER_KEYS and (value := getattr(self, known.name)) is not _Former.NOT_GIVEN
        }
        if former:
            self._take_over(former)
        object.__setattr__(self, "arguments", of_st.check(self.arguments, {**of_st.LIMITS, **self.LIMITS}))
        of_st.complete(self.training_arguments, evaluates=self.evaluates)

    def _take_over(self, former: Mapping[str, Any]) -> None:
        steps = {name: value for name, value in former.items() if name != "dtype"}
        model_kwargs = dict(self.model_kwargs)
        if former.get("dtype", "auto") != "auto":
            if "dtype" in model_kwargs:
                raise ValueError("dtype and model_kwargs: dtype say the same: leave dtype out.")
            model_kwargs["dtype"] = former["dtype"]
        arguments = translated(steps, self.arguments)
        told = {"arguments": {name: value for name, value in arguments.items() if name not in self.arguments}}
        told["model_kwargs"] = {name: value for name, value in model_kwargs.items() if name not in self.model_kwargs}
        instead = "; ".join(
            f"{key}: {{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"
            for key, values in told.items()
            if values
        )
        warnings.warn(
            f"{', '.join(former)}: settings of st_reba until version 0.6, which will go. Write {instead}.",
            FutureWarning,
            stacklevel=5,
        )
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "model_kwargs", model_kwargs)
        # What is made of these settings, with others of them changed, takes them from there alone.
        for name in former:
            object.__setattr__(self, name, _Former.NOT_GIVEN)

    @property
    def usual_arguments(self) -> Mapping[str, Any]:
        """The method's own arguments, where they depend on other settings."""
        return self.ARGUMENTS

    @property
    def training_arguments(self) -> dict[str, Any]:
        """The arguments as they were given, over those of the method."""
        chosen = dict(self.usual_arguments)
        for kind in ("save", "eval"):
            # Who says when, says it whole.
            if f"{kind}_strategy" in self.arguments:
                chosen.pop(f"{kind}_steps", None)
        return {**chosen, **self.arguments}

    @property
    def random_seed(self) -> int:
        """Of the order of the rows and of all that is random."""
        return int(self._argument("seed"))

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, on each device."""
        return int(self._argument("per_device_train_batch_size"))

    def _argument(self, name: str) -> Any:
        return self.training_arguments.get(name, of_st.by_itself(name))

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return getattr(self, "evaluation", None) is not None

    def loading(self) -> dict[str, Any]:
        """``model_kwargs``, as transformers takes them.

        Raises:
            ValueError: If the quantisation is none that is known, or not of its form.
            ImportError: If the package that quantises is not installed.
        """
        given = with_quantization(self.model_kwargs)
        if "dtype" not in given and "torch_dtype" not in given:
            given["dtype"] = "float32" if get_device_name() == "cpu" else "auto"
        return given

    @contextmanager
    def names_are_checked(self) -> Iterator[None]:
        """Where a model is loaded with ``model_kwargs``, of which the model itself alone knows whether it takes all.

        Raises:
            ValueError: If it does not know a name in them; with the nearest one.
        """
        try:
            yield
        except TypeError as error:
            for name in self.model_kwargs:
                if f"unexpected keyword argument {name!r}" in str(error):
                    told = f"model_kwargs: transformers knows no {name!r}.{nearest(name, _USUAL)}"
                    raise ValueError(told) from error
            raise

    def identity(self) -> dict[str, Any]:
        """The settings that a run which goes on must share with the run that was interrupted, but the arguments."""
        own = {
            known.name: getattr(self, known.name)
            for known in fields(self)
            if known.name not in ("arguments", "model_kwargs", *self.FORMER_KEYS)
            and not known.metadata.get("may_change")
        }
        loaded = {name: value for name, value in self.model_kwargs.items() if name not in _PLACES}
        return {**own, **({"model_kwargs": loaded} if loaded else {})}

    @classmethod
    def instead_of(cls, key: str, known: list[str]) -> str:
        if of_st.is_known(key):
            return f"It is an argument of sentence-transformers: write it below arguments. Keys: {', '.join(known)}."
        if not nearest(key, known) and (near := of_st.nearest_name(key, FORMER)):
            # What version 0.6 called so has another name now.
            name = near if of_st.is_known(near) else next(iter(FORMER[near](1)))
            return f"The nearest is {name}, an argument of sentence-transformers: write it below arguments."
        return super().instead_of(key, known)
