"""Checkpoints: loaded without code and without random weights, held to their size, and written with what they need.

What is missing in a checkpoint, transformers draws at random, and logs it. An embedding made of that is worth
nothing and is another one at each load, so such a checkpoint is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from sentence_transformers.base.modules import Transformer
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.import_utils import is_accelerate_available

from ..hub import card, compat
from ..hub.saved_files import AdapterFile, ModulesFile, checked, checked_index, is_inside, read_json, read_object
from ..lm.sizes import check_size, in_a_line
from ..settings import shown, tokens
from ..version import REQUIREMENT
from .saved_settings import (
    adapted_model,
    adapter_file,
    check_is_object,
    check_model,
    check_tokenizer,
    check_transformer_settings,
    hub_arguments,
    model_file,
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
# Its arguments that are arguments of transformers, each under its name and its former one.
_INPUTS = ("model_kwargs", "model_args"), ("config_kwargs", "config_args"), ("processor_kwargs", "tokenizer_args")
#: What an adapter puts between a layer's name and its weight's.
_ADAPTED = ".base_layer."
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# A pickled checkpoint has no header: it holds no more numbers than half its bytes, and this many do no harm.
_PICKLED_LEAST = 2**24


# Loading


class SafeTransformer(compat.ReportingTransformer):
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
        tokens("max_seq_length").check(kwargs.get("max_seq_length"))
        model_kwargs, config_kwargs, processor_kwargs = ({**_first(kwargs, names)} for names in _INPUTS)
        check_checkpoint(model_name_or_path, model_kwargs, config_kwargs)
        check_tokenizer(model_name_or_path, processor_kwargs)
        where = hub_arguments(model_kwargs)
        base = adapted_model(model_name_or_path, where)
        if base is not None and not self._has_tokenizer(model_name_or_path, where):
            # A revision or a subfolder is the adapter's.
            kwargs = {"tokenizer_name_or_path": base, **kwargs, "processor_kwargs": of_base(processor_kwargs)}
            kwargs.pop("tokenizer_args", None)
        with _tokenizer_explained(model_name_or_path, processor_kwargs), compat.tokenizer_apart():
            try:
                # Batches are padded.
                super().__init__(model_name_or_path, **{**kwargs, "unpad_inputs": False})
            except TypeError:
                # ST compares the tokenizer's limit with the model's positions, before anybody else can look at it.
                limit = getattr(vars(self).get("processor"), "model_max_length", None)
                tokens("the tokenizer's model_max_length").check(limit)
                raise
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

    def on_model_ready(self, model: Any) -> None:
        """Called by ST when the pipeline is complete: give it our model card."""
        card.adopt(model)

    def extra_repr(self) -> str:
        return shown(self, [key for key in self.config_keys if key not in Transformer.config_keys])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_config_dict(), architecture=type(self.model).__name__)})"

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
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as ST's ``Transformer.load`` does.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json. May be left out for a directory.
            *args: As for ST's ``Transformer.load``.
            **kwargs: As for ST's ``Transformer.load``.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none that a saved module
                has, a change is none that is registered, or weights are missing.
        """
        if not check_inside(subfolder):
            model_name_or_path = backbone_of(model_name_or_path)
        return super().load(model_name_or_path, subfolder, *args, **kwargs)

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

    def get_config_dict(self) -> dict[str, Any]:
        # Padding is not a setting here, so it is not saved as one.
        return {key: value for key, value in super().get_config_dict().items() if key != "unpad_inputs"}


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


# Size


def check_checkpoint(
    name_or_path: str, model_kwargs: Mapping[str, Any] | None, config_kwargs: Mapping[str, Any] | None
) -> None:
    """Refuse a model whose configuration asks for what it may not, or does not go with its checkpoint.

    So does that of the model that an adapter is for. Shards that lie outside the model are refused, too. No weight is
    read; of a model on the Hub the files are fetched.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: What is passed to ``AutoModel.from_pretrained``.
        config_kwargs: What is passed to ``AutoConfig.from_pretrained``.

    Raises:
        ValueError: As :func:`check_model`, or if the configuration describes a larger model, or none; or a file is
            malformed, or lies outside the model.
        OSError: If a shard is missing.
    """
    check_model(name_or_path, model_kwargs, config_kwargs)
    given, config_kwargs = model_kwargs or {}, dict(config_kwargs or {})
    where = hub_arguments(config_kwargs)
    adapter = adapter_file(name_or_path, where)
    if adapter is not None:
        _check_ranks(adapter)
    if (base := adapted_model(name_or_path, where)) is not None:
        name_or_path, where, config_kwargs = base, of_base(where), of_base(config_kwargs)
    if config_kwargs.get("trust_remote_code") or given.get("trust_remote_code"):
        # Its code may build anything.
        return
    file = "/".join(filter(None, (name_or_path, where.get("subfolder"), CONFIG_NAME)))
    config = _config(name_or_path, config_kwargs, file)
    files = _files(name_or_path, where, given, config)
    if files:
        check_size(config, sum(_numbers(path, config) for path in files), file)


def _config(name_or_path: str, config_kwargs: dict[str, Any], file: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name_or_path, **config_kwargs)
    except (ImportError, MemoryError, OSError):
        raise
    # What its own class finds wrong with a configuration may be of any type.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        raise ValueError(f"{file} is no configuration that transformers reads ({in_a_line(error)}).") from error


def _files(
    name_or_path: str, where: Mapping[str, Any], model_kwargs: Mapping[str, Any], config: PreTrainedConfig
) -> list[Path]:
    """The files of a checkpoint, those first that transformers looks for first; none where loading will find none."""
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    if model_kwargs.get("use_safetensors") is False:
        names = names[2:]
    if variant := model_kwargs.get("variant"):
        names = [f"{stem}.{variant}.{suffix}" for stem, _, suffix in (name.rpartition(".") for name in names)]
    if asked := getattr(config, "transformers_weights", None):
        names = [asked]
    for name in names:
        found = model_file(name_or_path, name, where)
        if found is None:
            continue
        if found.suffix != ".json":
            return [found]
        shards = sorted(set(checked_index(found).weight_map.values()))
        return [_shard(name_or_path, shard, where, found) for shard in shards]
    return []


def _shard(name_or_path: str, shard: str, where: Mapping[str, Any], index: Path) -> Path:
    found = model_file(name_or_path, shard, where)
    if found is None:
        raise FileNotFoundError(f"{index} names {shard!r}, which is not there: get the whole checkpoint.")
    return found


def _numbers(path: Path, config: PreTrainedConfig) -> int:
    """How many numbers a file holds, at most."""
    size = path.stat().st_size
    if getattr(config, "quantization_config", None) is not None:
        return 8 * size
    if path.suffix != ".safetensors":
        return max(size // 2, _PICKLED_LEAST)
    return sum(prod(shape) for shape in _shapes(path))


def _shapes(path: Path) -> list[list[int]]:
    try:
        with safe_open(path, framework="pt") as weights:
            return [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(
            f"{path}: these weights are damaged or cut short ({error}). Fetch or save them again."
        ) from error


def _check_ranks(adapter: Path) -> None:
    """An adapter's ranks are dimensions of its weights."""
    settings = checked(AdapterFile, read_object(adapter), adapter)
    weights = adapter.with_name(_ADAPTER_WEIGHTS)
    if not weights.is_file():
        return
    rank = max([settings.r or 0, *settings.rank_pattern.values()])
    largest = max((size for shape in _shapes(weights) for size in shape), default=0)
    if rank > largest:
        raise ValueError(
            f"{adapter} asks for a rank of {rank}, and no weight of {weights.name} has a size beyond {largest}: they "
            "are of two adapters. Get both from one place."
        )


# On disk


def note_requirement(directory: Path) -> None:
    """Note in the configuration that ST has written, if it has, that st_reba is needed to load the model.

    Args:
        directory: Of the module: the model's own, or one right below it.
    """
    for root in (directory, directory.parent):
        path = root / "config_sentence_transformers.json"
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            config["requirements"] = {**config.get("requirements", {}), **REQUIREMENT}
            path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            return


def check_inside(subfolder: str) -> str:
    """Refuse a module's path that leads out of its model, by the rules of any system (later STs do so, too)."""
    if not is_inside(subfolder):
        raise ValueError(
            f"modules.json has the path {subfolder!r}: a module lies inside its model, so give a relative path "
            'without "..", or "" for the model\'s own directory.'
        )
    return subfolder


def backbone_of(name_or_path: str) -> str:
    """The language model of a saved model that has it in a directory of its own; anything else as it is.

    Args:
        name_or_path: A directory, or a Hub id.

    Raises:
        ValueError: If its ``modules.json`` is malformed, or leads out of the model.
    """
    root = Path(name_or_path)
    if (root / "config.json").is_file() or not (root / "modules.json").is_file():
        return name_or_path
    modules = checked(ModulesFile, read_json(root / "modules.json"), root / "modules.json").root
    inner = root / modules[0].path
    return str(inner) if (inner / "config.json").is_file() else name_or_path
