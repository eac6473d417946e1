"""Differences between the supported versions of sentence-transformers and transformers.

The rest of the package is written for the current versions. docs/internals.md lists the private names that are used.
"""

from __future__ import annotations

import copy
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import sentence_transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .saved_files import REMOVED_CLASSES, refuse_class

#: Whether ST leaves a backbone where accelerate placed it, on several devices or offloaded (6.2 and later).
PLACEMENT_IS_KEPT = Version(sentence_transformers.__version__) >= Version("6.2")

_MODULE_CLASSES = "_module_classes"

#: Attributes that ST's ``Transformer`` sets when it loads a model, except the backbone. Some exist only in certain
#: versions, or with flash attention.
SET_BY_TRANSFORMER = (
    "_chat_template_suffix_cache", "_declared_forward_params", "_flatten_position_offset", "_method_signature_cache",
    "_prompt_length_mapping", "_query_expansion", "_unpad_inputs", "backend", "can_flatten_inputs", "data_collator",
    "do_lower_case", "document_length", "input_formatter", "modality_config", "model_forward_params",
    "module_output_name", "processing_kwargs", "processor", "query_length", "track_media_counts", "transformer_task",
)  # fmt: skip


def around(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Transformer:
    """Make ST's ``Transformer`` of a model and its tokenizer.

    Two private methods of ST are overridden. ST would load a processor from a directory, which may lack it, or have one
    for images: so it gets a directory with a tokenizer of two tokens, and finds ours in its place.

    Args:
        model: The model. No weight is copied.
        tokenizer: Its tokenizer, which is copied: ST changes settings of the Python object.
        **settings: Settings of ST's ``Transformer``.
    """
    tokenizer = copy.copy(tokenizer)

    class Around(Transformer):
        processor = property(lambda self: tokenizer, lambda self, value: None)

        def _load_config(self, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
            return model.config, False

        def _load_model(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
            return model

    with TemporaryDirectory() as directory:
        smallest = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=smallest).save_pretrained(directory)
        made = Around(directory, **settings)
    vars(made)["processor"] = tokenizer
    return made


def share(transformer: Transformer, module: Transformer) -> None:
    """Copy the tokenizer and ST's settings, but not the backbone, from a loaded ``Transformer`` to a module.

    ST has no public way to do so. Only the attributes in :data:`SET_BY_TRANSFORMER` are copied.
    """
    for name in SET_BY_TRANSFORMER:
        if name in vars(transformer):
            setattr(module, name, vars(transformer)[name])


def make_known(*modules: type[nn.Module]) -> None:
    """Let ST load these classes from a modules.json without ``trust_remote_code=True``.

    They are added to a private mapping of ST. If a later ST drops it, loading needs the flag. The mapping also has the
    removed classes, whose ``load`` raises an error.
    """
    classes = {f"{module.__module__}.{module.__name__}": module for module in modules}
    removed = {f"st_reba.modules.{name}": SimpleNamespace(load=partial(refuse_class, name)) for name in REMOVED_CLASSES}
    for family in SentenceTransformer.__mro__:
        mapping = vars(family).get(_MODULE_CLASSES)
        if mapping is not None:
            setattr(family, _MODULE_CLASSES, {**removed, **mapping, **classes})
            break


def check_placement(backbone: nn.Module) -> None:
    """Check that ST keeps the placement of a backbone that is on several devices or offloaded.

    Raises:
        ValueError: If ST is too old, and would move it to one device.
    """
    devices = {str(device) for device in (getattr(backbone, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 and not PLACEMENT_IS_KEPT:
        raise ValueError(
            f"The backbone was placed on {', '.join(sorted(devices))} (device_map), and sentence-transformers "
            f"{sentence_transformers.__version__} moves a model to one device. Use sentence-transformers 6.2 or later, "
            "or a device_map with one device."
        )
