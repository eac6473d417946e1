"""Differences between the supported versions of sentence-transformers and transformers.

The rest of the package is written for the current versions. docs/internals.md lists the private names that are used.
"""

from __future__ import annotations

import copy
from functools import partial
from inspect import signature
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

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

#: Whether ``load_adapter`` takes ``output_loading_info``.
ADAPTERS_ARE_REPORTED = signature(PreTrainedModel.load_adapter).return_annotation not in (None, "None")

_MODULE_CLASSES = "_module_classes"

#: Attributes that ST's ``Transformer`` sets when it loads a model, except the backbone. Some exist only in certain
#: versions, or with flash attention.
SET_BY_TRANSFORMER = (
    "_chat_template_suffix_cache", "_declared_forward_params", "_flatten_position_offset", "_method_signature_cache",
    "_prompt_length_mapping", "_query_expansion", "_unpad_inputs", "backend", "can_flatten_inputs", "data_collator",
    "do_lower_case", "document_length", "input_formatter", "modality_config", "model_forward_params",
    "module_output_name", "processing_kwargs", "processor", "query_length", "track_media_counts", "transformer_task",
)  # fmt: skip


class ReportingTransformer(Transformer):
    """ST's ``Transformer`` that keeps the loading report of transformers.

    It overrides a private method of ST. If a later ST loads in another way, there is no report, and
    :func:`st_reba.hub.loading.load` makes its own.
    """

    #: Report of ``output_loading_info=True``, or None if there is none.
    loading_report: dict[str, Any] | None = None

    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: Any,
        config: Any,
        backend: str,
        is_peft_model: bool,
        **model_kwargs: Any,
    ) -> PreTrainedModel:
        reporting = not is_peft_model or ADAPTERS_ARE_REPORTED
        if reporting:
            # Otherwise weights of another shape raise an error that does not name them.
            model_kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super()._load_model(
            model_name_or_path, transformer_task, config, backend, is_peft_model, **model_kwargs
        )
        model, self.loading_report = loaded if reporting else (loaded, None)
        return cast(PreTrainedModel, model)


def around(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Transformer:
    """Wrap a loaded model and its tokenizer in ST's ``Transformer`` without copying weights.

    Two private methods of ST are overridden. ST loads a tokenizer from a directory, so it first gets one of two tokens.
    """

    class Around(Transformer):
        def _load_config(self, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
            return model.config, False

        def _load_model(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
            return model

    with TemporaryDirectory() as directory:
        smallest = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=smallest).save_pretrained(directory)
        made = Around(directory)
    # A copy, as the module changes settings of the tokenizer's Python object.
    made.processor = copy.copy(tokenizer)
    made.modality_config, made.module_output_name = made.infer_modalities(model, made.processor)
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
