"""Whether a checkpoint has all the weights of its model.

What is missing in a checkpoint, transformers draws at random, and logs it. An embedding made of that is worth
nothing and is another one at each load, so such a checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from ..hub import compat
from ..lm.sizes import in_a_line
from .checkpoint import check_sizes
from .saved_settings import (
    adapted_model,
    check_is_object,
    check_model,
    check_tokenizer,
    check_transformer_settings,
    hub_arguments,
    of_base,
)

# How many weights a refusal names.
_NAMED = 5

#: Asked of ``from_pretrained`` to hear what is missing, and what has another shape before it gives up on that.
REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}

#: Files of which a tokenizer has at least one.
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
# What tells ST's loaders where a model is, in the order of load_config's arguments, the file's name first.
_WHERE = ("config_filename", "token", "cache_folder", "revision", "local_files_only")
_INPUTS = ("model_kwargs", "model_args"), ("config_kwargs", "config_args")


class CheckedTransformer(compat.ReportingTransformer):
    """ST's ``Transformer``, for checkpoints of others: files ask for nothing but settings, and no weight is made up.

    A subclass calls :meth:`check_weights` once its backbone is what it will be.

    Args:
        model_name_or_path: A path or Hub id.
        **kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If the model's files ask for more than they may; see :mod:`st_reba.modules.saved_settings`.
    """

    #: The weights that were not in the checkpoint, and what is there instead, if anything.
    lacking: Mapping[str, str] = {}
    #: The checkpoint that lacks them.
    checkpoint: str = ""

    def __init__(self, model_name_or_path: str, **kwargs: Any) -> None:
        model_kwargs, config_kwargs = ({**_first(kwargs, names)} for names in _INPUTS)
        check_model(model_name_or_path, model_kwargs, config_kwargs)
        check_sizes(model_name_or_path, model_kwargs, config_kwargs)
        processor_kwargs = {**_first(kwargs, ("processor_kwargs", "tokenizer_args"))}
        check_tokenizer(model_name_or_path, processor_kwargs)
        where = hub_arguments(model_kwargs)
        base = adapted_model(model_name_or_path, where)
        if base is not None and not self._has_tokenizer(model_name_or_path, where):
            # A revision or a subfolder is the adapter's.
            kwargs = {"tokenizer_name_or_path": base, **kwargs}
            kwargs["processor_kwargs"] = of_base(_first(kwargs, ("processor_kwargs", "tokenizer_args")))
            kwargs.pop("tokenizer_args", None)
        with _tokenizer_explained(model_name_or_path, processor_kwargs), compat.tokenizer_apart():
            super().__init__(model_name_or_path, **kwargs)
        self.checkpoint = "/".join(filter(None, (model_name_or_path, where.get("subfolder"))))
        is_adapter = hasattr(self.model, "peft_config")
        report = self.loading_report
        if report is None and not is_adapter:
            report = _names_alone(model_name_or_path, model_kwargs, where)
        self.lacking = lacking(report) if report is not None else {}
        if base is not None and not self.lacking:
            # Of an adapter and the model that it is for, transformers reports on the adapter alone.
            self.checkpoint = base
            self.lacking = lacking(_names_alone(base, model_kwargs, of_base(where)))

    def _has_tokenizer(self, model_name_or_path: str, where: Mapping[str, Any]) -> bool:
        """Whether a tokenizer lies beside an adapter. peft writes none, the trainers of others do."""
        asked = {"cache_folder" if key == "cache_dir" else key: value for key, value in where.items()}
        return any(self.load_file_path(model_name_or_path, file, **asked) for file in _TOKENIZER)

    @property
    def save_in_root(self) -> bool:  # type: ignore[override]
        """Whether ST saves the backbone in the model's root, not in a directory of the module's own.

        In the root, a program that reads ``config.json`` and ``1_Pooling`` there and nothing else, as inference engines
        do, would serve the bare backbone under the recipe's name. Only what transformers finds nowhere else stays: an
        adapter, which has no ``config.json``, and a backbone with code of its own, which nothing runs unasked. Version
        0.1 saved all in the root; that loads as ever.
        """
        return hasattr(self.model, "peft_config") or bool(getattr(self.model.config, "auto_map", None))

    def check_weights(self, needless: Iterable[str] = ()) -> None:
        """Refuse a backbone that has weights which its checkpoint has not.

        Args:
            needless: Beginnings of names of weights that are not needed.

        Raises:
            ValueError: If there are any, naming them.
        """
        check_weights(self.model, self.lacking, self.checkpoint, needless)

    @classmethod
    def load_config(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings of a saved module.

        Raises:
            ValueError: If its file sets what no saved module would.
        """
        file = "/".join(filter(None, (model_name_or_path, subfolder, cls.config_file_name)))
        where = dict(zip(_WHERE, args, strict=False)) | {name: kwargs[name] for name in _WHERE if name in kwargs}
        check_is_object(cls, model_name_or_path, {"subfolder": subfolder, **where})
        try:
            settings: dict[str, Any] = super().load_config(model_name_or_path, subfolder, *args, **kwargs)
        except (AttributeError, TypeError) as error:
            names = "model_kwargs, processor_kwargs, config_kwargs and modality_config"
            raise ValueError(f"{file} is malformed ({error}): {names} are objects of names and values.") from error
        check_transformer_settings(settings, cls.config_keys, cls.__name__, file)
        return settings


@contextmanager
def _tokenizer_explained(name_or_path: str, processor_kwargs: dict[str, Any]) -> Iterator[None]:
    """Say what is wrong with a tokenizer, which transformers keeps to itself where it looks for any processor."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Unrecognized processing class"):
            raise
        try:
            AutoTokenizer.from_pretrained(name_or_path, **processor_kwargs)
        except (ImportError, MemoryError, OSError):
            raise error from None
        except Exception as cause:
            place = "/".join(filter(None, (name_or_path, processor_kwargs.get("subfolder"))))
            raise ValueError(
                f"{place}: its tokenizer cannot be read ({in_a_line(cause)}). Get tokenizer.json and "
                "tokenizer_config.json anew, or save the model again."
            ) from error
        raise


def _first(kwargs: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    return next((kwargs[name] for name in names if kwargs.get(name)), {})


def _names_alone(name_or_path: str, model_kwargs: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    """The report on a checkpoint, which is not read where accelerate is there to spare it."""
    given = {name: value for name, value in model_kwargs.items() if name in ("key_mapping", "variant")}
    nowhere = {"device_map": "meta"} if is_accelerate_available() else {}
    _, report = AutoModel.from_pretrained(name_or_path, **given, **where, **REPORTING, **nowhere)
    return dict(report)


def lacking(report: Mapping[str, Any]) -> dict[str, str]:
    """The names of the weights that were not in a checkpoint, and what is there instead, if anything.

    Args:
        report: What ``from_pretrained`` returns for ``output_loading_info=True``.
    """
    missing = dict.fromkeys(report["missing_keys"], "")
    mismatched = {
        name: f"{tuple(there)} there, {tuple(wanted)} by its configuration"
        for name, there, wanted in report["mismatched_keys"]
    }
    return {**missing, **mismatched}


#: What an adapter puts between a layer's name and its weight's.
_ADAPTED = ".base_layer."


def check_weights(model: PreTrainedModel, lacking: Mapping[str, str], place: str, needless: Iterable[str] = ()) -> None:
    """Refuse a model for the weights that its checkpoint lacks, unless they are of layers that were left out.

    Raises:
        ValueError: If there are any, naming them.
    """
    own = {name.replace(_ADAPTED, ".") for name in model.state_dict()}
    plain = {name.replace(_ADAPTED, "."): why for name, why in lacking.items()}
    needed = sorted(name for name in plain.keys() & own if not name.startswith(tuple(needless)))
    if not needed:
        return
    shown = ", ".join(f"{name} ({plain[name]})" if plain[name] else name for name in needed[:_NAMED])
    more = f" and {len(needed) - _NAMED} more" if len(needed) > _NAMED else ""
    count = "1 weight" if len(needed) == 1 else f"{len(needed)} weights"
    raise ValueError(
        f"{place} lacks {count} that {type(model).__name__} needs: {shown}{more}. transformers would draw random "
        "numbers for that, others at each load. Get the whole checkpoint, or save the model again."
    )
