"""Safe loading of models: without code of their files, without random weights, and within bounds.

transformers draws weights that a checkpoint lacks at random, and logs it. Such embeddings are worthless, and others at
each load, so such a checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    utils,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from ..lm.gguf import as_directory
from ..lm.parts import language_model_in
from ..lm.sizes import SizeError, check_size, within_size
from ..lm.views import body_of, is_multimodal
from ..settings import check, check_tokens
from . import compat, saved_files
from .adapters import Adapter, unadapted
from .checkpoints import SAVED_MODEL, Checkpoint, Files, check_checkpoint, is_noted, missing_weights
from .push import loading_class
from .saved_files import fetching, read_modules, read_object

# Number of weights that an error message names.
_NAMED = 5
# Former names of sentence-transformers' arguments, which it still reads.
_FORMER_NAMES = {"model_kwargs": "model_args", "processor_kwargs": "tokenizer_args", "config_kwargs": "config_args"}
# Arguments that go with a language model that the program has loaded.
_FOR_LOADED = {"tokenizer", "max_seq_length", "disable_adapter"}

# Settings of sentence-transformers that have one value here, and the advice for others.
_TASK = 'st_reba embeds text. Load it with transformer_task="feature-extraction", or give the path of its model.'
_ONLY: dict[str, tuple[Any, str]] = {
    "backend": ("torch", 'st_reba reads hidden states and attention; use backend="torch".'),
    "transformer_task": ("feature-extraction", _TASK),
    "query_expansion": (None, "a causal language model was not trained to fill in masked tokens. Leave it out."),
}

# Beginning of the names of a language model's weights in multimodal checkpoints.
_PART = r"^(?:model\.)?language_model\.(?:model\.)?"
_T = TypeVar("_T")
#: A path or Hub id; a loaded ``Transformer``; or a language model that the program has loaded.
ModelSource: TypeAlias = str | PathLike[str] | nn.Module
#: Function from a model's name and arguments to its directory or Hub id, and the arguments to load that with.
Locate = Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]]]


class MissingWeights(NamedTuple):
    """Weights that a checkpoint lacks.

    Attributes:
        checkpoint: Name of the checkpoint.
        names: Their names, each with what the checkpoint has instead, if anything.
    """

    checkpoint: str
    names: Mapping[str, str]

    def check(self, model: PreTrainedModel, needless: Iterable[str] = ()) -> None:
        """Raise if a model needs any of them.

        Args:
            model: The model, or what is left of it.
            needless: Beginnings of the names of weights that are not needed.

        Raises:
            ValueError: If it does, naming them.
        """
        names = {unadapted(name) for name in model.state_dict()} if self.names else set()
        missing = {unadapted(name): instead for name, instead in self.names.items()}
        needed = sorted(name for name in missing.keys() & names if not name.startswith(tuple(needless)))
        if not needed:
            return
        listed = ", ".join(f"{name} ({missing[name]})" if missing[name] else name for name in needed[:_NAMED])
        more = f" and {len(needed) - _NAMED} more" if len(needed) > _NAMED else ""
        count = "1 weight" if len(needed) == 1 else f"{len(needed)} weights"
        raise ValueError(
            f"{self.checkpoint} lacks {count} that {type(model).__name__} needs: {listed}{more}. transformers "
            "would draw random numbers for that, others at each load. Get the whole checkpoint, or save the model "
            "again."
        )


class Loaded(NamedTuple):
    """A model that was loaded, or whose weights are shared.

    Attributes:
        transformer: Its tokenizer and sentence-transformers' settings.
        model: The language model.
        missing: Weights that its checkpoint lacks.
        poolings: Modes of the pooling with which it was trained as an embedder; none if its files name none.
    """

    transformer: Transformer
    model: PreTrainedModel
    missing: MissingWeights
    poolings: frozenset[str]


def load(source: ModelSource, *, locate: Locate = as_directory, **kwargs: Any) -> Loaded:
    """Load a model, or share one that is loaded.

    Args:
        source: A path or Hub id, or those of a GGUF file (see :func:`~st_reba.lm.gguf.as_directory`); or a loaded
            ``Transformer``, or a language model that the program has loaded with transformers.
        locate: Finds the files of a path or Hub id.
        **kwargs: As for sentence-transformers' ``Transformer``; none for a loaded one. For a language model, its
            ``tokenizer``, ``max_seq_length``, and ``disable_adapter=True`` to read it without peft's adapters.

    Raises:
        ValueError: If the model's files ask for more than they may, it has no tokenizer, or a setting cannot be used.
    """
    source = fspath(source) if isinstance(source, PathLike) else source
    settings = {**(vars(source) if isinstance(source, Transformer) else {}), **kwargs}
    for setting in ("query_length", "document_length", "max_seq_length"):
        check_tokens(setting, settings.get(setting))
    for setting, (only, advice) in _ONLY.items():
        value = settings.get(setting, only)
        check(setting, value, value == only, advice)
    if isinstance(source, str):
        kind, unfit = "a path or Hub id", kwargs.keys() & {"tokenizer", "disable_adapter"}
    elif isinstance(source, Transformer):
        kind, unfit = "a Transformer that is already loaded", {*kwargs}
    else:
        kind, unfit = "a language model that is already loaded", kwargs.keys() - _FOR_LOADED
    if unfit:
        raise ValueError(f"{', '.join(sorted(unfit))} cannot be set on {kind}: leave it out.")
    if isinstance(source, str):
        with fetching(source):
            loaded = _load(*locate(source, kwargs))
    else:
        loaded = _share(source if isinstance(source, Transformer) else _around(source, **kwargs))
    compat.check_placement(loaded.model)
    tokenizer = loaded.transformer.tokenizer
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer: st_reba embeds text.")
    check_tokens("the tokenizer's model_max_length", tokenizer.model_max_length)
    return loaded


def _around(
    model: nn.Module, *, tokenizer: Any = None, max_seq_length: int | None = None, disable_adapter: bool = False
) -> Transformer:
    """Return a ``Transformer`` around a view of a loaded language model."""
    body = body_of(model, disable_adapter=disable_adapter)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        problem = f"tokenizer={tokenizer!r}: a loaded language model does not bring its tokenizer."
        raise ValueError(f"{problem} Give it, such as tokenizer=AutoTokenizer.from_pretrained(...).")
    transformer = compat.around(language_model_in(body)[0], tokenizer)
    if max_seq_length is not None:
        transformer.max_seq_length = max_seq_length
    return transformer


def _share(transformer: Transformer) -> Loaded:
    """Share the language model of a loaded ``Transformer``."""
    model: Any = transformer.model
    name, poolings = str(model.config.name_or_path or ""), getattr(transformer, "trained_poolings", None)
    if poolings is None:
        poolings = _poolings(Files(name, {})) if name else frozenset()
    if hasattr(model, "get_base_model"):
        model = body_of(model)
        # Unlike a model that the program has loaded, it is moved and cast with the module.
        del model._apply
    return Loaded(transformer, language_model_in(model)[0], MissingWeights(name, {}), poolings)


def _load(name: str, kwargs: dict[str, Any]) -> Loaded:
    """Load a checkpoint, once its files are known to be harmless, and note which weights it lacks."""
    model_kwargs, processor_kwargs, config_kwargs = (
        {**(kwargs.pop(former, None) or {}), **(kwargs.pop(kind, None) or {})} for kind, former in _FORMER_NAMES.items()
    )
    if "subfolder" not in model_kwargs:
        name = backbone_of(name)
    checkpoint = check_checkpoint(name, model_kwargs, config_kwargs)
    files = Files(name, model_kwargs)
    tokenizer = _load_tokenizer(Files(name, processor_kwargs), checkpoint.base, kwargs.get("max_seq_length"))
    model, missing = _load_model(files, checkpoint, config_kwargs)
    if "model_max_length" in processor_kwargs:
        # Then sentence-transformers does not limit it to the model's positions.
        kwargs["processor_kwargs"] = {"model_max_length": tokenizer.model_max_length}
    transformer = compat.around(model, tokenizer, **{**kwargs, "unpad_inputs": False})
    return Loaded(transformer, model, missing, _poolings(files))


def _load_tokenizer(files: Files, base: Files | None, max_seq_length: int | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, or of the model that it is an adapter for.

    Raises:
        ValueError: If its files ask for more than they may, or transformers cannot read them.
    """
    if base is not None and not any(map(files.find, (TOKENIZER_CONFIG_FILE, "tokenizer.json"))):
        # peft writes no tokenizer; the trainers of others do.
        files = base.with_arguments(files.arguments)
    arguments = {**files.arguments}
    if max_seq_length is not None:
        arguments.setdefault("model_max_length", max_seq_length)
    file = files.find(TOKENIZER_CONFIG_FILE)
    settings = {} if file is None else read_object(file, saved_files.Tokenizer)
    check_tokens("the tokenizer's model_max_length", {**settings, **arguments}.get("model_max_length"))
    advice = "Get tokenizer.json and tokenizer_config.json anew, or save the model again."
    with saved_files.readable(f"{files}: its tokenizer cannot be read", advice):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(files.name, **arguments))


def _load_model(
    files: Files, checkpoint: Checkpoint, config_kwargs: Mapping[str, Any]
) -> tuple[PreTrainedModel, MissingWeights]:
    """Load the language model of a checkpoint, with its adapter, and note which weights they lack."""
    base = files if checkpoint.base is None else checkpoint.base.with_arguments(files.arguments)
    config: Any = checkpoint.config
    if config is None:
        config = AutoConfig.from_pretrained(base.name, **base.with_arguments(config_kwargs).arguments)
    # Otherwise weights of another shape raise an error that does not name them.
    arguments = {**base.arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    # transformers would find an adapter in the root of a saved model whose own files are in a folder.
    arguments["adapter_kwargs"] = {"subfolder": base.arguments.get("subfolder") or ""}
    # Multimodal checkpoints are saved from this class: its body alone may not find weights by their names.
    is_whole = is_multimodal(config) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    auto: Any = AutoModelForMultimodalLM if is_whole else AutoModel
    try:
        whole, report = _within_size(checkpoint, lambda: auto.from_pretrained(base.name, config=config, **arguments))
    except ImportError:
        if not is_multimodal(config):
            raise
        # A package for images or sounds is not there, and a language model does not need it.
        text, arguments["key_mapping"] = config.get_text_config(decoder=True), {_PART: ""}
        whole, report = AutoModel.from_pretrained(base.name, config=text, **arguments)
        if missing_weights(report):
            raise
    if "key_mapping" in arguments:
        # With these, it would be saved under the checkpoint's names, and would not load again.
        vars(whole).pop("_weight_conversions", None)
    has_adapter = hasattr(whole, "peft_config")
    model, path = language_model_in(whole)
    missing = MissingWeights(str(base), {} if has_adapter else missing_weights(report, path))
    if checkpoint.base is not None or has_adapter:
        adapter = Adapter.of(files)
        adapted = model if has_adapter or adapter.fits(model) else whole
        lacking = adapter.put_on(adapted)
        if adapted is not model:
            model, path = language_model_in(whole)
            lacking = {name.removeprefix(f"{path}."): instead for name, instead in lacking.items()}
        missing = MissingWeights(str(files if lacking else base), {**missing.names, **lacking})
    # An adapter that is added to it is saved with these.
    model.name_or_path = str(base) if Path(base.name).is_dir() else base.name
    model.st_reba_revision = base.arguments.get("revision")  # type: ignore[assignment]
    return model, missing


def _within_size(checkpoint: Checkpoint, make: Callable[[], _T]) -> _T:
    """Load a model, unless its checkpoint is far too small for it."""
    if checkpoint.config is not None and checkpoint.stored is not None:
        try:
            with within_size(checkpoint.stored, checkpoint.file):
                return make()
        except Exception as error:
            # Any error may come of a configuration that describes a larger model, or none.
            check_size(checkpoint.config, checkpoint.stored, checkpoint.file)
            if not isinstance(error, SizeError):
                raise
    # The size is not known, or layers that share weights had weights of their own while they were built.
    return make()


def _poolings(files: Files) -> frozenset[str]:
    """Return the modes of the pooling that a checkpoint was saved with as an embedder; none if it was not."""
    path = files.find("1_Pooling/config.json")
    try:
        return frozenset() if path is None else modes_of(Pooling.load(str(path.parent)))
    except (OSError, TypeError, ValueError):
        return frozenset()


def modes_of(pooling: Pooling) -> frozenset[str]:
    """Return the modes of a pooling, which may have one or several."""
    modes = pooling.pooling_mode
    return frozenset({modes} if isinstance(modes, str) else modes)


# Saved models


class SavedModelConfig(PreTrainedConfig):
    """Configuration in the root of a saved model, which is not a model of transformers."""

    model_type = SAVED_MODEL

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
            folder = read_modules(modules)[0]["path"]
            inner = files.find(f"{folder}/{utils.CONFIG_NAME}")
            if inner is not None and "model_type" in read_object(inner):
                message += f" Its language model is in the folder {folder}."
        raise ValueError(message)


AutoConfig.register(SavedModelConfig.model_type, SavedModelConfig, exist_ok=True)


def backbone_of(name_or_path: str | PathLike[str]) -> str:
    """Return the path of the language model of a saved model that has it in a directory of its own; any other as it is.

    Args:
        name_or_path: A directory, or a Hub id.

    Raises:
        ValueError: If its ``modules.json`` is malformed, or leads out of the model.
    """
    root = Path(name_or_path)
    config, modules = root / utils.CONFIG_NAME, root / "modules.json"
    if not modules.is_file() or (config.is_file() and not is_noted(config)):
        return fspath(name_or_path)
    inner = root / read_modules(modules)[0]["path"]
    return str(inner) if (inner / utils.CONFIG_NAME).is_file() else fspath(name_or_path)
