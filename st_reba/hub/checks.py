"""What is checked before anything is sent to the Hub, without its client: a repository's name, and a saved model."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from .saved_files import (
    AdapterFile,
    SentenceTransformersFile,
    check_link,
    check_saved,
    checked,
    checked_index,
    read_object,
)

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_repo_id(repo_id: str) -> None:
    """See that a repository is named with its owner.

    Raises:
        ValueError: If it is not.
    """
    if repo_id.count("/") != 1:
        raise ValueError(f'"{repo_id}": a repository is "org/name" or "user/name".')


def check_saved_model(root: Path) -> None:
    """See that a directory is a SentenceTransformer with all its parts. Weights are not loaded.

    Raises:
        ValueError: If something is missing or cut short, naming it.
    """
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such directory. Give one that `st-reba build` or `save` has written.")
    _check_links(root)
    for name in ("modules.json", "config_sentence_transformers.json"):
        if not (root / name).is_file():
            raise ValueError(f"{root} has no {name}: it is not a saved SentenceTransformer.")
    modules = check_saved(root)
    for entry in modules:
        folder = root / entry.path
        # A module without settings, such as Normalize, may have no folder: some uploads lose empty ones.
        if not folder.is_dir() and not entry.type.endswith(".Normalize"):
            raise ValueError(f"{folder} is missing: the model is not complete. Save it again.")
    _check_backbone(root / modules[0].path)
    _check_adapter(root / modules[0].path)
    for path in files_of(root):
        if path.suffix == ".safetensors":
            _check_safetensors(path)


def model_class(root: Path) -> str:
    """Which of sentence-transformers' classes a saved model is loaded by; that of a model before 5 is not written."""
    path = root / "config_sentence_transformers.json"
    return checked(SentenceTransformersFile, read_object(path) if path.is_file() else {}, path).model_type


def _check_links(root: Path) -> None:
    """What is sent is what the user sees in the directory: a link could name any file that the user may read."""
    for path in _entries(root):
        if not path.is_symlink():
            continue
        if not path.exists():
            raise ValueError(
                f"{path} is a link to {path.resolve()}, where nothing is. Remove it, or save the model again."
            )
        check_link(path, root)
        if path.is_dir():
            raise ValueError(
                f"{path} is a link to a directory, whose files would not be sent: put the directory there."
            )


def _check_backbone(folder: Path) -> None:
    """A language model's folder has its weights, all shards of them. Other first modules have their own ways."""
    if not (folder / "config.json").is_file() or "model_type" not in read_object(folder / "config.json"):
        return
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"{folder} has no weights ({', '.join(_WEIGHTS)}): the model is not complete. Save it again.")
    if found.suffix == ".json":
        for shard in sorted(set(checked_index(found).weight_map.values())):
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard} is missing, which {found.name} names. Save the model again.")


def _check_adapter(folder: Path) -> None:
    """An adapter's backbone is found by its name, which must mean something elsewhere."""
    config = folder / "adapter_config.json"
    if config.is_file():
        base = Path(str(checked(AdapterFile, read_object(config), config).base_model_name_or_path))
        if base.is_absolute() or base.is_dir():
            raise ValueError(
                f"{folder} is an adapter on {base}, which is a directory of this machine: nobody else could load it. "
                "Push the merged model, or name the backbone's Hub id as base_model_name_or_path in "
                "adapter_config.json."
            )


def _check_safetensors(path: Path) -> None:
    try:
        # Only its header is read; with "pt" this would import torch.
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}). Save the model again.") from None


def files_of(root: Path) -> list[Path]:
    """What of a saved model is sent: all files but hidden ones."""
    return [path for path in _entries(root) if path.is_file()]


def _entries(root: Path) -> list[Path]:
    """All that lies in a directory, but what is hidden. What a link to a directory leads to is not entered."""
    return sorted(
        path for path in root.rglob("*") if not any(part.startswith(".") for part in path.relative_to(root).parts)
    )
