"""What differs between the versions of sentence-transformers and transformers that st_reba works with.

The rest of the package is written for the current ones and asks here. docs/internals.md lists what is private
upstream and used all the same.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
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

#: Whether transformers reports on an adapter's weights, as on a model's. Where it does not, to ask is an error.
ADAPTERS_ARE_REPORTED = signature(PreTrainedModel.load_adapter).return_annotation not in (None, "None")

_MODULE_CLASSES = "_module_classes"

#: The attributes that ST's ``Transformer`` sets on itself when it loads a model, the backbone apart. Some are those of
#: certain versions, or of flash attention, alone.
SET_BY_TRANSFORMER = (
    "_chat_template_suffix_cache", "_declared_forward_params", "_flatten_position_offset", "_method_signature_cache",
    "_prompt_length_mapping", "_query_expansion", "_unpad_inputs", "backend", "can_flatten_inputs", "data_collator",
    "do_lower_case", "document_length", "input_formatter", "modality_config", "model_forward_params",
    "module_output_name", "processing_kwargs", "processor", "query_length", "track_media_counts", "transformer_task",
)  # fmt: skip


class ReportingTransformer(Transformer):
    """ST's ``Transformer``, which keeps what transformers says about the weights it loads.

    Overrides a private method of ST's, which passes on what ``from_pretrained`` returns. Should a later ST load in
    another way, there is no report, and :class:`st_reba.modules.checkpoints.SafeTransformer` gets one by itself.
    """

    #: Of ``output_loading_info=True``; None if there was none.
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
            # Weights of another shape end loading with an error that does not name them, unless they are ignored.
            model_kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super()._load_model(
            model_name_or_path, transformer_task, config, backend, is_peft_model, **model_kwargs
        )
        model, self.loading_report = loaded if reporting else (loaded, None)
        return cast(PreTrainedModel, model)


@contextmanager
def tokenizer_apart() -> Iterator[None]:
    """Keeps ST's advice against ``tokenizer_name_or_path`` out of its log while a model is loaded with it.

    For an adapter that has no tokenizer beside it, ST has no other way.
    """

    def is_other_advice(record: logging.LogRecord) -> bool:
        return "tokenizer_name_or_path" not in str(record.msg)

    log = logging.getLogger(Transformer.__module__)
    log.addFilter(is_other_advice)
    try:
        yield
    finally:
        log.removeFilter(is_other_advice)


def around(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Transformer:
    """ST's ``Transformer`` around a loaded model and its tokenizer, neither of which is copied.

    ST loads what it is around, by two private methods, and its tokenizer from a directory, so that it is given one of
    two tokens first. Settings of the tokenizer's Python object are the module's own.
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
    made.processor = copy.copy(tokenizer)
    made.modality_config, made.module_output_name = made.infer_modalities(model, made.processor)
    return made


def share(transformer: Transformer, module: Transformer) -> None:
    """Give a module the tokenizer and the settings of ST that a loaded ``Transformer`` has; the backbone is not given.

    ST has no public way to make a ``Transformer`` of a loaded one. What a class of its own sets is not shared: see
    :data:`SET_BY_TRANSFORMER`.
    """
    for name in SET_BY_TRANSFORMER:
        if name in vars(transformer):
            setattr(module, name, vars(transformer)[name])


def make_known(*modules: type[nn.Module]) -> None:
    """Let ST resolve references to these classes in a modules.json without ``trust_remote_code=True``.

    Adds them to the mapping that ST's model families share and consult first, a private name. Should a later ST drop
    the mapping, loading asks for the flag. Classes that are gone are in it, too, for their ``load`` to refuse.
    """
    classes = {f"{module.__module__}.{module.__name__}": module for module in modules}
    gone = {f"st_reba.modules.{name}": SimpleNamespace(load=partial(refuse_class, name)) for name in REMOVED_CLASSES}
    for family in SentenceTransformer.__mro__:
        known = vars(family).get(_MODULE_CLASSES)
        if known is not None:
            setattr(family, _MODULE_CLASSES, {**gone, **known, **classes})
            break


def check_placement(backbone: nn.Module) -> None:
    """Refuse a backbone on several devices, or offloaded, where ST would move it to one.

    Raises:
        ValueError: If it is placed so, and ST is too old.
    """
    places = {str(place) for place in (getattr(backbone, "hf_device_map", None) or {}).values()}
    if len(places) > 1 and not PLACEMENT_IS_KEPT:
        raise ValueError(
            f"The backbone was placed on {', '.join(sorted(places))} (device_map), and sentence-transformers "
            f"{sentence_transformers.__version__} moves a model to one device. Use sentence-transformers 6.2 or later, "
            "or a device_map that names one device."
        )
