"""Checkpoints of others: loaded without code, without random weights and within bounds; and what is noted in ours.

A model's files are somebody else's text. ST hands what they say about loading to transformers as arguments, and among
transformers' arguments are some that run code, read and write files elsewhere, or take the protection off pickled
weights. So a file may ask for what saving could have written, and for nothing else. What a caller passes is the
caller's own business and never looked at here.

What is missing in a checkpoint, transformers draws at random, and logs it. An embedding made of that is worth
nothing and is another one at each load, so such a checkpoint is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from sentence_transformers.base.modules import Module, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, utils
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.peft_utils import find_adapter_config_file

from ..hub import card, compat, saved_files
from ..hub.push import loading_class
from ..hub.saved_files import check_inside, check_values, fetching, quoted, read_object, shown, without_removed
from ..lm import backbone, gguf, llama_cpp
from ..lm.loaded import body_of
from ..lm.sizes import MAX_EXPERTS, MAX_LABELS, MAX_LAYERS, MAX_SIZE, SizeError, check_size, in_a_line, within_size
from ..settings import Setting, choice, described, flag, optional, tokens
from ..version import REQUIREMENT

#: Attention in plain PyTorch, or in a package that the user has installed. Any other name may be that of a kernel on
#: the Hub, which is code. The last is what our own modules set.
PLAIN_ATTENTION = re.compile("eager|sdpa|flex_attention|flash_attention_[234]|st_reba")

#: Asked of ``from_pretrained`` to hear what is missing, and what has another shape before it gives up on that.
REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def _is_plain(value: Any) -> bool:
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and PLAIN_ATTENTION.fullmatch(name)) for name in names)


def _is_dtype(value: Any) -> bool:
    return value == "auto" or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))


#: The arguments of transformers that a file of settings may give.
_ARGUMENTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "model_kwargs": {"attn_implementation": _is_plain, "dtype": _is_dtype, "torch_dtype": _is_dtype},
    "processor_kwargs": {"model_max_length": lambda value: type(value) is int},
    "config_kwargs": {},
}
# The names that ST gave them before, and still reads.
_FORMER_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# What earlier versions of ST wrote beside the settings of today.
_FORMER_SETTINGS = ("do_lower_case", "max_seq_length", "unpad_inputs")
# By the end of their names, the numbers in a config.json that say how many parts are built, and the most there may be.
_MOST = {"layer": MAX_LAYERS, "layers": MAX_LAYERS, "experts": MAX_EXPERTS, "num_labels": MAX_LABELS}
# The parts of a config.json that are configurations of their own, by the ends of their names.
_PARTS = ("config", "encoder", "decoder")
#: The arguments of ``load`` that say where the files of a model on the Hub are.
ON_THE_HUB = ("token", "cache_folder", "revision", "local_files_only")
# The arguments of transformers that say where a model's files are.
_WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
#: What an adapter puts between a layer's name and its weight's.
_ADAPTED = ".base_layer."
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# A pickled checkpoint has no header: it holds no more numbers than half its bytes, and this many do no harm.
_PICKLED_LEAST = 2**24
# How many weights a refusal names.
_NAMED = 5

# Settings of ST's own, with some values of which a module would not be what it is.
_OF_TRANSFORMER: Sequence[Setting[Any]] = (
    optional(flag("unpad_inputs")),
    tokens("query_length"),
    tokens("document_length"),
    choice("backend", "torch", says='st_reba reads hidden states and attention; use backend="torch".'),
    choice(
        "transformer_task",
        "feature-extraction",
        says='st_reba embeds text. Load it with transformer_task="feature-extraction", or give the path of its model.',
    ),
    Setting(
        "query_expansion",
        lambda value: value is None,
        "a causal language model was not trained to fill in masked tokens, so st_reba adds none to a query. Leave it "
        "out.",
    ),
)


class SafeTransformer(compat.ReportingTransformer):
    """ST's ``Transformer``, for checkpoints of others: files ask for nothing but settings, and no weight is made up.

    A subclass calls :meth:`check_weights` once its backbone is what it will be.

    Args:
        model_name_or_path: A path or Hub id, or those of a GGUF file (see :func:`st_reba.lm.gguf.as_directory`); or a
            loaded ``Transformer``, whose weights and tokenizer are then shared, not copied; or a language model that
            the program has loaded with transformers, whose weights are shared: see :func:`st_reba.lm.loaded.body_of`.
        **kwargs: As for ST's ``Transformer``; none beside a loaded one. Beside a language model, its ``tokenizer``,
            ``max_seq_length``, and ``disable_adapter=True`` to read it without the adapters that peft put on it.

    Raises:
        ValueError: If the model's files ask for more than they may, it has no tokenizer, or a setting of ST's is one
            with which the module would not be what it is.
    """

    # Batches are padded: that is no setting here, and is not saved as one.
    config_keys: list[str] = [key for key in Transformer.config_keys if key != "unpad_inputs"]

    #: The weights that were not in the checkpoint, and what is there instead, if anything.
    lacking: Mapping[str, str] = {}
    #: The checkpoint that lacks them.
    checkpoint: str = ""
    #: Whether the backbone is a view of a language model that somebody else has loaded, moves and casts.
    is_borrowed: bool = False
    #: How the backbone was pooled when it was trained as an embedder; none if its checkpoint says nothing of it.
    trained_poolings: frozenset[str] = frozenset()

    def __init__(self, model_name_or_path: str | PathLike[str] | nn.Module, **kwargs: Any) -> None:
        borrows = False
        if isinstance(model_name_or_path, PathLike):
            model_name_or_path = fspath(model_name_or_path)
        if isinstance(model_name_or_path, nn.Module) and not isinstance(model_name_or_path, Transformer):
            model_name_or_path, kwargs = self._around(model_name_or_path, **kwargs), {}
            borrows = True
        elif unfit := sorted({"tokenizer", "disable_adapter"} & kwargs.keys()):
            raise ValueError(
                f"{unfit[0]} goes with a language model that is already loaded, and {model_name_or_path} is "
                f"{'a path or Hub id' if isinstance(model_name_or_path, str) else 'a Transformer'}: leave it out."
            )
        loaded = model_name_or_path if isinstance(model_name_or_path, Transformer) else None
        asked = {**({} if loaded is None else vars(loaded)), **kwargs}
        for setting in _OF_TRANSFORMER:
            if setting.name in asked:
                setting.check(asked[setting.name])
        if loaded is None:
            with fetching(name := cast(str, model_name_or_path)):
                self._load(*self._directory(name, kwargs))
        elif kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a backbone that is already loaded: leave them out.")
        else:
            self._share(loaded)
            self.is_borrowed |= borrows
        compat.check_placement(self.model)
        if self.tokenizer is None:
            raise ValueError(f"{model_name_or_path} has no tokenizer: st_reba embeds text.")
        tokens("the tokenizer's model_max_length").check(self._tokenizer.model_max_length)

    @staticmethod
    def _around(
        model: nn.Module,
        *,
        tokenizer: Any = None,
        max_seq_length: int | None = None,
        disable_adapter: bool = False,
        **others: Any,
    ) -> Transformer:
        """ST's ``Transformer`` around a view of a loaded language model."""
        if others:
            raise ValueError(
                f"{sorted(others)} cannot be set on a language model that is already loaded: leave them out."
            )
        tokens("max_seq_length").check(max_seq_length)
        body = body_of(model, disable_adapter=disable_adapter)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(
                f"tokenizer={tokenizer!r}: a loaded language model does not bring its tokenizer. Give it, such as "
                "tokenizer=AutoTokenizer.from_pretrained(...)."
            )
        made = compat.around(body, tokenizer)
        if max_seq_length is not None:
            made.max_seq_length = max_seq_length
        return made

    def _directory(self, name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The directory or Hub id that a model is loaded from, and the arguments to load it with."""
        return gguf.as_directory(name, kwargs)

    def _load(self, name: str, kwargs: dict[str, Any]) -> None:
        """Load a checkpoint, once its files are known to be harmless, and note which weights it lacks."""
        tokens("max_seq_length").check(kwargs.get("max_seq_length"))
        given = {kind: {**(kwargs.get(kind) or kwargs.get(former) or {})} for former, kind in _FORMER_NAMES.items()}
        model_kwargs, processor_kwargs = given["model_kwargs"], given["processor_kwargs"]
        if "subfolder" not in model_kwargs:
            name = backbone_of(name)
        base, size = check_checkpoint(name, model_kwargs, given["config_kwargs"])
        files, tokenizer = Files(name, model_kwargs), Files(name, processor_kwargs)
        if base is not None and not any(map(files.find, (TOKENIZER_CONFIG_FILE, "tokenizer.json"))):
            # peft writes no tokenizer, the trainers of others do. A revision or a subfolder is the adapter's.
            tokenizer = Files(base.name, of_base(processor_kwargs))
            kwargs = {"tokenizer_name_or_path": base.name, **kwargs, "processor_kwargs": tokenizer.arguments}
            kwargs.pop("tokenizer_args", None)
        file = tokenizer.find(TOKENIZER_CONFIG_FILE)
        said = {} if file is None else read_object(file)
        check_values(said, saved_files.TOKENIZER, file)
        if kwargs.get("max_seq_length") is None:
            # ST compares it with the model's positions, before anybody else can look at it.
            tokens("the tokenizer's model_max_length").check({**said, **processor_kwargs}.get("model_max_length"))
        try:
            self._load_within(size, name, {**kwargs, "unpad_inputs": False})
        except ValueError as error:
            # transformers keeps what is wrong with a tokenizer to itself where it looks for any processor.
            if str(error).startswith("Unrecognized processing class"):
                _explain_tokenizer(tokenizer)
            raise
        self.checkpoint = str(files)
        self.trained_poolings = poolings_beside(files)
        report = self.loading_report
        if report is None and not hasattr(self.model, "peft_config"):
            report = _names_alone(name, model_kwargs)
        self.lacking = lacking(report) if report is not None else {}
        if base is not None and not self.lacking:
            # Of an adapter and the model that it is for, transformers reports on the adapter alone.
            self.checkpoint = base.name
            self.lacking = lacking(_names_alone(base.name, of_base(model_kwargs)))

    def _load_within(self, size: Size | None, name: str, kwargs: dict[str, Any]) -> None:
        """What ST's constructor does, where no model is built that its checkpoint cannot fill."""
        if size is not None:
            try:
                with compat.tokenizer_apart(), within_size(size.stored, size.file):
                    super().__init__(name, **kwargs)
                    return
            except Exception as error:
                # Whatever it was: if the configuration describes a larger model, or none, that is what to say.
                check_size(*size)
                if not isinstance(error, SizeError):
                    raise
        # Nothing is known of the size, or layers share their weights and had them each while they were built.
        with compat.tokenizer_apart():
            super().__init__(name, **kwargs)

    def _share(self, other: Transformer) -> None:
        """Take the weights, the tokenizer and the settings of a loaded ``Transformer``, on a view of its backbone."""
        nn.Module.__init__(self)
        compat.share(other, self)
        if isinstance(other, SafeTransformer):
            self.lacking, self.checkpoint = other.lacking, other.checkpoint
            self.trained_poolings = other.trained_poolings
        elif name := other.model.config.name_or_path:
            self.trained_poolings = poolings_beside(Files(name, {}))
        self.is_borrowed = getattr(other, "is_borrowed", False)
        self.unpad_inputs = False
        # What is set here, and by what follows, is not the other's to bear.
        self.model = backbone.view(other.model)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As :meth:`torch.nn.Module._apply`, which moves and casts; a borrowed backbone is left to who loaded it."""
        if not self.is_borrowed:
            return super()._apply(fn, recurse)
        for name, child in self.named_children():
            if recurse and name != "model":
                child._apply(fn)
        return super()._apply(fn, recurse=False)

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, self.tokenizer)

    def on_model_ready(self, model: Any) -> None:
        """Called by ST when the pipeline is complete: give it our model card."""
        card.adopt(model)

    def extra_repr(self) -> str:
        return described(self, [key for key in self.config_keys if key not in Transformer.config_keys])

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
        if not self.lacking:
            return
        own = {name.replace(_ADAPTED, ".") for name in self.model.state_dict()}
        plain = {name.replace(_ADAPTED, "."): why for name, why in self.lacking.items()}
        needed = sorted(name for name in plain.keys() & own if not name.startswith(tuple(needless)))
        if not needed:
            return
        shown = ", ".join(f"{name} ({plain[name]})" if plain[name] else name for name in needed[:_NAMED])
        more = f" and {len(needed) - _NAMED} more" if len(needed) > _NAMED else ""
        count = "1 weight" if len(needed) == 1 else f"{len(needed)} weights"
        raise ValueError(
            f"{self.checkpoint} lacks {count} that {type(self.model).__name__} needs: {shown}{more}. transformers "
            "would draw random numbers for that, others at each load. Get the whole checkpoint, or save the model "
            "again."
        )

    @classmethod
    def load(cls, model_name_or_path: str | PathLike[str], subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as ST's ``Transformer.load`` does.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json. May be left out for a directory.
            *args: As for ST's ``Transformer.load``.
            **kwargs: As for ST's ``Transformer.load``.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none that a saved module
                has, or weights are missing.
        """
        name = fspath(model_name_or_path)
        return super().load(name if check_inside(subfolder) else backbone_of(name), subfolder, *args, **kwargs)

    @classmethod
    def load_config(  # type: ignore[override]
        cls, model_name_or_path: str, subfolder: str = "", **where: Any
    ) -> dict[str, Any]:
        """The settings of a saved module.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies.
            **where: As for ST's ``Transformer.load_config``. The file has the name that ST writes, and no former one.

        Raises:
            ValueError: If its file sets what no saved module would.
        """
        name = cls.config_file_name
        file = "/".join(filter(None, (model_name_or_path, subfolder, name)))
        saved = without_removed(cls._saved(model_name_or_path, subfolder, **where), cls.__name__, file)
        check_transformer_settings(saved, cls.config_keys, cls.__name__, file)
        where["config_filename"] = name
        return without_removed(super().load_config(model_name_or_path, subfolder, **where), cls.__name__, file)

    @classmethod
    def _saved(cls, model_name_or_path: str, subfolder: str, **where: Any) -> dict[str, Any]:
        """What the file of a saved module sets; nothing where there is none."""
        found = cls.load_file_path(model_name_or_path, cls.config_file_name, subfolder=subfolder, **where)
        return {} if found is None else read_object(Path(found))

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and note in ST's own configuration that st_reba is needed to load."""
        super().save(output_path, *args, **kwargs)
        note_requirement(Path(output_path))


@dataclass(frozen=True)
class Files:
    """A model's files.

    Attributes:
        name: A directory or a Hub id.
        arguments: What is passed to ``from_pretrained``: some of it says where the files are.
    """

    name: str
    arguments: Mapping[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        """The arguments that say where the files are."""
        return {name: self.arguments[name] for name in _WHERE if self.arguments.get(name) is not None}

    def __str__(self) -> str:
        return "/".join(filter(None, (self.name, self.arguments.get("subfolder"))))

    def find(self, name: str) -> Path | None:
        """Where a file lies on this machine, fetched if need be; None if there is none, or nothing is had."""
        try:
            found = cached_file(self.name, name, **self.where)
        except OSError:
            return None
        return None if found is None else Path(found)


def modes_of(pooling: Pooling) -> frozenset[str]:
    """The modes of a pooling, which may have one or several."""
    modes = pooling.pooling_mode
    return frozenset({modes} if isinstance(modes, str) else modes)


def poolings_beside(files: Files) -> frozenset[str]:
    """The modes of the pooling that a checkpoint was saved with as an embedder; none if it was not."""
    found = files.find("1_Pooling/config.json")
    try:
        return frozenset() if found is None else modes_of(Pooling.load(str(found.parent)))
    except (OSError, TypeError, ValueError):
        # No pooling of ST's.
        return frozenset()


def of_base(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the model that an adapter is for, which has a revision and a directory of its own."""
    return {name: value for name, value in arguments.items() if name not in ("revision", "subfolder")}


# Settings


def saved_settings(
    module: type[Module],
    model_name_or_path: str | PathLike[str],
    subfolder: str,
    kwargs: Mapping[str, Any],
    removed: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What the file of a saved module without a language model says.

    Args:
        module: Its class.
        model_name_or_path: A directory or a Hub id.
        subfolder: Where in it the module lies.
        kwargs: What ST passes to ``load``; that of :data:`ON_THE_HUB` is used.
        removed: Settings that 1.0 removed, each with its default in 0.8.

    Returns:
        The settings; the arguments that say where the module's other files are; and what to call the place.

    Raises:
        ValueError: If ``subfolder`` leads out of the model, or a setting is none of this class's, or a removed one has
            another value.
    """
    where = {"subfolder": check_inside(subfolder)} | {name: kwargs[name] for name in ON_THE_HUB if name in kwargs}
    name = fspath(model_name_or_path)
    place = "/".join(filter(None, (name, subfolder)))
    file = module.load_file_path(name, module.config_file_name, **where)
    settings = {} if file is None else read_object(Path(file))
    called = f"{place}/{module.config_file_name}"
    settings = without_removed(settings, module.__name__, called, removed or {})
    check_settings(settings, module.config_keys, module.__name__, called)
    return settings, where, place


def check_settings(settings: Iterable[str], known: Collection[str], module: str, file: str) -> None:
    """Refuse settings that no module of this class could have saved.

    Args:
        settings: The names of a module's settings, as its file has them.
        known: The names that there are.
        module: Its class.
        file: What the file is called, with its directory.

    Raises:
        ValueError: If there is one that is not known.
    """
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{file} sets {quoted(name)}, which is no setting of {module}: a saved one has "
                f"{', '.join(sorted(known)) or 'none'}. Remove it from the file, or save the model again."
            )


def check_transformer_settings(settings: Mapping[str, Any], known: Collection[str], module: str, file: str) -> None:
    """As :func:`check_settings`, for a module with a backbone, whose file may name transformers' arguments, too.

    Raises:
        ValueError: If it gives an argument that is not allowed, or lets another method than ``forward`` read text.
    """
    kinds = {name: _FORMER_NAMES.get(name, name) for name in (*_ARGUMENTS, *_FORMER_NAMES)}
    check_settings(settings, {*known, *_FORMER_SETTINGS, *kinds}, module, file)
    check_values(settings, saved_files.TRANSFORMER, file)
    for name, kind in kinds.items():
        allowed = _ARGUMENTS[kind]
        for argument, value in settings.get(name, {}).items():
            if argument not in allowed or not allowed[argument](value):
                names = f"{', '.join(sorted(allowed))}, within bounds" if allowed else "nothing"
                raise ValueError(
                    f"{file} sets {quoted(argument)} in {name} to {shown(value)}, which a file may not: there it may "
                    f"set {names}. Remove it from the file; if you trust the model, pass {kind}="
                    f"{{{argument!r}: ...}} yourself."
                )


# Configurations


def check_model(
    name_or_path: str, model_kwargs: Mapping[str, Any] | None, config_kwargs: Mapping[str, Any] | None
) -> Files | None:
    """Refuse a model whose configuration asks for code, or for more than a model can be. No weight is read.

    If the model is an adapter, the model that it is for is held to the same.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: What the caller, or a checked file, passes to ``AutoModel.from_pretrained``.
        config_kwargs: The same for ``AutoConfig.from_pretrained``: ``subfolder``, ``revision`` and so on are used.

    Returns:
        The model that an adapter is for, if it lies apart.

    Raises:
        ValueError: If it does.
    """
    files = Files(name_or_path, config_kwargs or {})
    chosen = any("attn_implementation" in (given or {}) for given in (model_kwargs, config_kwargs))
    _check_config(files, chosen)
    found = find_adapter_config_file(name_or_path, **files.where)
    if found is None:
        return None
    adapter = Path(found)
    settings = read_object(adapter)
    check_values(settings, saved_files.ADAPTER, adapter)
    _check_ranks(settings, adapter)
    base = Files(str(settings.get("base_model_name_or_path")), of_base(files.arguments))
    _check_config(base, chosen)
    return None if adapter.with_name(utils.CONFIG_NAME).is_file() else base


def _check_config(files: Files, attention_is_chosen: bool) -> None:
    found = files.find(utils.CONFIG_NAME)
    # Where there is none, loading fails with a message.
    if found is not None:
        file, said = f"{files}/{utils.CONFIG_NAME}", read_object(found)
        _check_part(said, file, attention_is_chosen)
        if "configuration_files" in said:
            # It may choose another file by transformers' version.
            _check_part(PreTrainedConfig.get_config_dict(files.name, **files.where)[0], file, attention_is_chosen)


def _check_part(config: dict[str, Any], file: str, attention_is_chosen: bool, path: str = "") -> None:
    """A configuration, or an object within one, which stands at ``path``, and all objects within that."""
    # An object that is no configuration of its own has other keys.
    if not path or path.endswith(_PARTS):
        check_values(config, saved_files.LANGUAGE_MODEL, f"{file}, {path}," if path else file)
    for key, value in config.items():
        place = f"{path}.{quoted(key)}" if path else quoted(key)
        if key in ("attn_implementation", "_attn_implementation") and not attention_is_chosen and not _is_plain(value):
            raise ValueError(
                f"{file} sets {place} to {shown(value)}: that may be a kernel, code from the Hub. Remove it from "
                'the file, or choose yourself: model_kwargs={"attn_implementation": "sdpa"}.'
            )
        if key in ("dtype", "torch_dtype") and not isinstance(value, dict | None) and not _is_dtype(value):
            raise ValueError(
                f"{file} sets {place} to {shown(value)}: give a type of PyTorch's numbers, such as float32."
            )
        most = next((most for name, most in _MOST.items() if key.endswith(name)), None)
        if most is not None and type(value) is int and value > most:
            raise ValueError(f"{file} asks for {value} ({place}): st_reba loads models with at most {most}.")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _check_part(inner, file, attention_is_chosen, place)


def read_config(files: Files) -> PreTrainedConfig:
    """The configuration of a model that :func:`check_model` has looked at.

    Raises:
        ValueError: If transformers makes none of it, or a size in it is none.
    """
    file = f"{files}/{utils.CONFIG_NAME}"
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(files.name, **files.arguments)
    except (ImportError, MemoryError, OSError):
        raise
    # What its own class finds wrong with a configuration may be of any type.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        raise ValueError(f"{file} is no configuration that transformers reads ({in_a_line(error)}).") from error
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        size = getattr(config.get_text_config(decoder=True), name, None)
        # An older huggingface_hub takes true for a number.
        if isinstance(size, bool) or (isinstance(size, int) and not 1 <= size <= MAX_SIZE):
            raise ValueError(f"{file} sets {name} to {size}: it must be a whole number, from 1 to {MAX_SIZE}.")
    return config


def _check_ranks(settings: Mapping[str, Any], adapter: Path) -> None:
    """An adapter's ranks are dimensions of its weights."""
    weights = adapter.with_name(_ADAPTER_WEIGHTS)
    if not weights.is_file():
        return
    rank = max([settings.get("r") or 0, *settings.get("rank_pattern", {}).values()])
    largest = max((size for shape in _shapes(weights) for size in shape), default=0)
    if rank > largest:
        raise ValueError(
            f"{adapter} asks for a rank of {rank}, and no weight of {weights.name} has a size beyond {largest}: they "
            "are of two adapters. Get both from one place."
        )


def _explain_tokenizer(files: Files) -> None:
    """Say what is wrong with a tokenizer.

    Raises:
        ValueError: If anything is, but that a package, memory or a file is missing.
    """
    try:
        AutoTokenizer.from_pretrained(files.name, **files.arguments)
    except (ImportError, MemoryError, OSError):
        return
    except Exception as cause:
        raise ValueError(
            f"{files}: its tokenizer cannot be read ({in_a_line(cause)}). Get "
            "tokenizer.json and tokenizer_config.json anew, or save the model again."
        ) from cause


# Weights


class Size(NamedTuple):
    """How large a model may be.

    Attributes:
        config: Its configuration.
        stored: How many numbers its checkpoint holds, at most.
        file: What the configuration was read from.
    """

    config: PreTrainedConfig
    stored: int
    file: str


def check_checkpoint(
    name_or_path: str, model_kwargs: Mapping[str, Any], config_kwargs: Mapping[str, Any]
) -> tuple[Files | None, Size | None]:
    """Refuse a model whose configuration asks for what it may not.

    So does that of the model that an adapter is for. Shards that lie outside the model are refused, too. No weight is
    read; of a model on the Hub the files are fetched.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: What is passed to ``AutoModel.from_pretrained``.
        config_kwargs: What is passed to ``AutoConfig.from_pretrained``.

    Returns:
        The model that an adapter is for, if it lies apart; and how large the model may be, if that can be said.

    Raises:
        ValueError: As :func:`check_model`, or if a file is malformed, or lies outside the model.
        OSError: If a shard is missing, or a directory has no weights at all.
    """
    base = check_model(name_or_path, model_kwargs, config_kwargs)
    files = base or Files(name_or_path, config_kwargs)
    if files.arguments.get("trust_remote_code") or model_kwargs.get("trust_remote_code"):
        # Its code may build anything.
        return base, None
    config = read_config(files)
    weights = _weights(files, model_kwargs, config)
    stored = sum(_numbers(path, config) for path in weights)
    return base, Size(config, stored, f"{files}/{utils.CONFIG_NAME}") if weights else None


def _weights(files: Files, model_kwargs: Mapping[str, Any], config: PreTrainedConfig) -> list[Path]:
    """The files of a checkpoint, those first that transformers looks for first; none where the Hub has none."""
    names = [utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME, utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME]
    if model_kwargs.get("use_safetensors") is False:
        names = names[2:]
    if variant := model_kwargs.get("variant"):
        names = [f"{stem}.{variant}.{suffix}" for stem, _, suffix in (name.rpartition(".") for name in names)]
    if asked := getattr(config, "transformers_weights", None):
        names = [asked]
    found = next(filter(None, map(files.find, names)), None)
    if found is None and config.model_type != llama_cpp.MODEL_TYPE and (directory := Path(str(files))).is_dir():
        gguf_file = next(directory.glob("*.gguf"), None)
        instead = "a directory with the whole model" if gguf_file is None else f"the GGUF file in it: {gguf_file}"
        raise FileNotFoundError(
            f"{files} has a {utils.CONFIG_NAME} and no weights: none of {', '.join(names)} is there. Give {instead}."
        )
    if found is None or found.suffix != ".json":
        return [] if found is None else [found]
    shards = []
    for name in sorted(set(saved_files.shards_of(found).values())):
        shard = files.find(name)
        if shard is None:
            raise FileNotFoundError(f"{found} names {name!r}, which is not there: get the whole checkpoint.")
        shards.append(shard)
    return shards


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


def _names_alone(name_or_path: str, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The report on a checkpoint, which is not read where accelerate is there to spare it."""
    given = {name: value for name, value in model_kwargs.items() if name in (*_WHERE, "key_mapping", "variant")}
    nowhere = {"device_map": "meta"} if is_accelerate_available() else {}
    _, report = AutoModel.from_pretrained(name_or_path, **given, **REPORTING, **nowhere)
    return dict(report)


def lacking(report: Mapping[str, Any]) -> dict[str, str]:
    """The names of the weights that were not in a checkpoint, and what is there instead, if anything.

    Args:
        report: What ``from_pretrained`` returns for ``output_loading_info=True``.
    """
    found = dict.fromkeys(report["missing_keys"], "")
    for name, there, wanted in report["mismatched_keys"]:
        found[name] = f"{tuple(there)} there, {tuple(wanted)} by its configuration"
    return found


# Ours, on disk


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
            _note_in_root(root, directory)
            return


def _note_in_root(root: Path, directory: Path) -> None:
    """Write a ``config.json`` that names st_reba, for programs that look for a language model in a model's root.

    Only a first module in a directory of its own gets it. A file that is there is left; but where an adapter lies in
    the root, one of ours, of a model that was saved there before, would be taken for the adapter's base model.
    """
    config = root / utils.CONFIG_NAME
    if (root / "adapter_config.json").is_file():
        if _is_noted(config):
            config.unlink()
    elif directory != root and directory.name.startswith("0_") and not config.exists():
        noted = {"load_with": "sentence-transformers, after import st_reba", "model_type": SavedModelConfig.model_type}
        config.write_text(json.dumps(noted, indent=2), encoding="utf-8")


def _is_noted(config: Path) -> bool:
    return config.is_file() and read_object(config).get("model_type") == SavedModelConfig.model_type


class SavedModelConfig(PreTrainedConfig):
    """Configuration of a saved model's root, of which transformers makes no model."""

    model_type = "st_reba"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Raise an error that says how to load the model.

        Raises:
            ValueError: Always.
        """
        name = str(kwargs.get("name_or_path"))
        kind = loading_class(name) or "SentenceTransformer"
        message = f'{name} is a {kind} of st_reba, not a language model: load it with {kind}("{name}").'
        files = Files(name, kwargs)
        if modules := files.find("modules.json"):
            folder = saved_files.read_modules(modules)[0]["path"]
            inner = files.find(f"{folder}/{utils.CONFIG_NAME}")
            if inner is not None and "model_type" in read_object(inner):
                message += f" Its language model is in the folder {folder}."
        raise ValueError(message)


AutoConfig.register(SavedModelConfig.model_type, SavedModelConfig)


def backbone_of(name_or_path: str | PathLike[str]) -> str:
    """The language model of a saved model that has it in a directory of its own; anything else as it is.

    Args:
        name_or_path: A directory, or a Hub id.

    Raises:
        ValueError: If its ``modules.json`` is malformed, or leads out of the model.
    """
    root = Path(name_or_path)
    config, modules = root / utils.CONFIG_NAME, root / "modules.json"
    if not modules.is_file() or (config.is_file() and not _is_noted(config)):
        return fspath(name_or_path)
    inner = root / saved_files.read_modules(modules)[0]["path"]
    return str(inner) if (inner / utils.CONFIG_NAME).is_file() else fspath(name_or_path)
