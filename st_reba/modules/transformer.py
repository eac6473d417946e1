"""Base of the modules with a language model: safe loading, and saving that names this package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self, cast

from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..hub import card, compat
from ..hub.loading import ModelSource as ModelSource
from ..hub.loading import backbone_of, load, modes_of
from ..hub.saved_files import check_inside, check_transformer_settings, read_object, without_removed
from ..hub.saving import complete, saving
from ..lm.gguf import as_directory
from ..settings import describe


class SafeTransformer(Transformer):
    """sentence-transformers' ``Transformer``, loaded as :func:`~st_reba.hub.loading.load` does.

    A subclass calls ``missing_weights.check`` when its model is complete.

    Args:
        model_name_or_path: See :func:`~st_reba.hub.loading.load`. A loaded model's weights are shared.
        **kwargs: See there.

    Raises:
        ValueError: See there.
    """

    #: Pooling modes that do not fit the module, each with what to do instead, for a warning.
    incompatible_poolings: Mapping[str, str] = {}
    # Batches are padded: that is no setting here, and is not saved.
    config_keys: list[str] = [key for key in Transformer.config_keys if key != "unpad_inputs"]

    def __init__(self, model_name_or_path: ModelSource, **kwargs: Any) -> None:
        loaded = load(model_name_or_path, locate=self._directory, **kwargs)
        nn.Module.__init__(self)
        compat.share(loaded.transformer, self)
        self.unpad_inputs = False
        # A multimodal model also has a processor of images or sounds.
        self.processor = self.tokenizer
        self.modality_config = {name: own for name, own in self.modality_config.items() if name in ("text", "message")}
        self.model = loaded.model
        #: Weights that the checkpoint lacks.
        self.missing_weights = loaded.missing
        #: Modes of the pooling with which the model was trained as an embedder; none if its checkpoint names none.
        self.trained_poolings = loaded.poolings

    def _directory(self, name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the directory or Hub id that a model is loaded from, and the arguments to load it with."""
        return as_directory(name, kwargs)

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, self.tokenizer)

    def on_model_ready(self, model: Any) -> None:
        """Give a pipeline this package's model card, and warn about a pooling that does not fit its model.

        sentence-transformers calls it on a complete pipeline.
        """
        card.adopt(model)
        for modes in (modes_of(part) for part in model.children() if isinstance(part, Pooling)):
            if self.trained_poolings and modes != self.trained_poolings:
                warnings.warn(
                    f"{self.model.config.name_or_path} was trained as an embedder that is pooled by "
                    f"{' and '.join(sorted(self.trained_poolings))}, as its 1_Pooling/config.json says, and is pooled "
                    f"by {' and '.join(sorted(modes))} here. Embeddings may be much worse: use the model as it is "
                    "saved, SentenceTransformer(...), or its own pooling.",
                    stacklevel=2,
                )
            for mode in sorted(self.incompatible_poolings.keys() & modes):
                advice = self.incompatible_poolings[mode]
                warnings.warn(f'{type(self).__name__} is followed by Pooling("{mode}"): {advice}', stacklevel=2)

    def extra_repr(self) -> str:
        return describe(self, [key for key in self.config_keys if key not in Transformer.config_keys])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_config_dict(), architecture=type(self.model).__name__)})"

    @property
    def save_in_root(self) -> bool:  # type: ignore[override]
        """Whether sentence-transformers saves the model in the root, not in a directory of the module's own.

        In the root, a program that reads ``config.json`` and ``1_Pooling`` alone, such as an inference engine, would
        serve the bare model under the recipe's name. An adapter, which has no ``config.json``, and a model with code of
        its own stay there, because transformers finds them nowhere else. Version 0.1 saved all in the root.
        """
        return hasattr(self.model, "peft_config") or bool(getattr(self.model.config, "auto_map", None))

    @classmethod
    def load(cls, model_name_or_path: str | PathLike[str], subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Path of the module in it, ``path`` in its modules.json. May be left out for a directory.
            *args: As for sentence-transformers' ``Transformer.load``.
            **kwargs: See there.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or unknown, or weights are
                missing.
        """
        name = fspath(model_name_or_path)
        if not check_inside(subfolder):
            name = backbone_of(name)
        elif Path(name).is_dir():
            # transformers 5.6 takes an adapter in the root for one of the folder.
            name, subfolder = str(Path(name, subfolder)), ""
        return super().load(name, subfolder, *args, **kwargs)

    @classmethod
    def load_config(  # type: ignore[override]
        cls, model_name_or_path: str, subfolder: str = "", **where: Any
    ) -> dict[str, Any]:
        """Load the settings of a saved module.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Path of the module in it.
            **where: As for sentence-transformers' ``Transformer.load_config``. Former names of the file are not read.

        Raises:
            ValueError: If the file sets what no saved module would.
        """
        name = cls.config_file_name
        file = "/".join(filter(None, (model_name_or_path, subfolder, name)))
        settings = without_removed(cls._saved(model_name_or_path, subfolder, **where), cls.__name__, file)
        check_transformer_settings(settings, cls.config_keys, cls.__name__, file)
        where["config_filename"] = name
        config = without_removed(super().load_config(model_name_or_path, subfolder, **where), cls.__name__, file)
        # Version 0.1, which did not write it, tokenized in pieces.
        return {"tokenization": "pieces", **config} if "pool_over" in config else config

    @classmethod
    def _saved(cls, model_name_or_path: str, subfolder: str, **where: Any) -> dict[str, Any]:
        """Read the file of a saved module; empty if there is none."""
        path = cls.load_file_path(model_name_or_path, cls.config_file_name, subfolder=subfolder, **where)
        return {} if path is None else read_object(Path(path))

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, its tokenizer and the settings, and note that this package is needed to load them.

        Raises:
            ValueError: If it would not load again, with the remedy.
        """
        is_quantized = any(type(weight.data).__module__.startswith("torchao") for weight in self.model.parameters())
        # A model that transformers quantised has a quantizer, which can be saved.
        if is_quantized and getattr(self.model, "hf_quantizer", None) is None:
            raise ValueError(
                f"{type(self.model).__name__} was quantised after it was loaded, and its configuration does not say "
                "how, so it cannot be saved. Quantise it on loading instead: "
                'model_kwargs={"quantization_config": TorchAoConfig(...)}, with TorchAoConfig from transformers.'
            )
        with saving(self.model):
            super().save(output_path, *args, **kwargs)
        complete(Path(output_path))
