"""Saved models in mteb's registry, from which mteb loads them by name.

:func:`mteb_model` imports mteb when it is called, because the import takes seconds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from huggingface_hub import metadata_load

from ..fingerprint import digest_of_file, fingerprint_of
from ..hub.push import ENCODERS, check_saved_model, files_of, model_class
from ..optional import require

if TYPE_CHECKING:
    from mteb.models import ModelMeta

#: mteb's method of ``ModelMeta`` and mteb's wrapper, by the class of sentence-transformers that loads a model.
_KNOWN = {
    "SentenceTransformer": ("from_sentence_transformer_model", "SentenceTransformerEncoderWrapper"),
    "MultiVectorEncoder": ("from_multi_vector_encoder_model", "MultiVectorWrapper"),
    "SparseEncoder": ("from_sparse_encoder_model", "SparseEncoderWrapper"),
}


def mteb_model(directory: str | Path, name: str | None = None) -> ModelMeta:
    """Add a saved model to mteb's registry.

    Afterwards ``mteb.get_model(name)`` and ``mteb.get_model(str(directory))`` load it, and mteb's results and model
    cards name it: ``mteb.evaluate(mteb_model("my-model"), tasks)``. The model is loaded once, on the CPU.

    Args:
        directory: A saved ``SentenceTransformer``, ``MultiVectorEncoder`` or ``SparseEncoder``.
        name: ``"org/name"`` for results and cards. None: ``"st_reba/"`` and the directory's name.

    Returns:
        The entry. Its revision is a hash of the model's files, so mteb's cache has no results of another model for it.

    Raises:
        ImportError: If mteb is missing.
        ValueError: If the directory is no complete model, or the name has no ``/``.
    """
    require("mteb", "mteb", "An entry of mteb's registry")
    from mteb.models import ModelMeta
    from mteb.models.model_implementations import MODEL_REGISTRY
    from mteb.types import Licenses

    root = Path(directory)
    check_saved_model(root)
    name = f"st_reba/{root.resolve().name}" if name is None else name
    if name.count("/") != 1:
        raise ValueError(f'name="{name}": mteb names a model "org/name".')
    kind = model_class(root)
    if kind not in _KNOWN:
        raise ValueError(f"{root} is a {kind}. Give one of {', '.join(_KNOWN)}.")
    model = ENCODERS[kind](str(root), device="cpu")
    # Pages of text are no part of the model.
    files = [path for path in files_of(root) if path.suffix != ".md"]
    meta = getattr(ModelMeta, _KNOWN[kind][0])(model)
    weights = list(model.parameters())
    card = (metadata_load(root / "README.md") or {}) if (root / "README.md").is_file() else {}
    licence = str(card.get("license")).lower()
    entry = meta.model_copy(
        update={
            # mteb writes what is in loader_kwargs beside its results, where a path of this machine means nothing.
            "loader": partial(_load, directory=str(root.resolve())),
            "name": name,
            "revision": fingerprint_of([(path.relative_to(root).as_posix(), digest_of_file(path)) for path in files]),
            "n_parameters": sum(weight.numel() for weight in weights) or None,
            "memory_usage_mb": sum(weight.nbytes for weight in weights) / 2**20 or None,
            "license": licence if licence in get_args(Licenses) else None,
            "open_weights": True,
            "use_instructions": any(model.prompts.values()),
            # A recipe learns from no labelled data. Of a trained model, its data's names are not mteb's.
            "training_datasets": None if "generated_from_trainer" in card.get("tags", []) else set(),
            "adapted_from": card.get("base_model", meta.adapted_from),
        }
    )
    MODEL_REGISTRY[name] = MODEL_REGISTRY[str(directory)] = entry
    return entry


def _load(name: str, revision: str | None = None, *, directory: str, **settings: Any) -> Any:
    """Return mteb's wrapper of the model in a directory. mteb calls this with an entry's name and revision."""
    import mteb.models

    return getattr(mteb.models, _KNOWN[model_class(Path(directory))][1])(directory, **settings)
