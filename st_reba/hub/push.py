"""Upload of a saved model to the Hub, as one commit and without loading it."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import load_file_path
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from ..lm.llama_cpp import MODEL_TYPE
from .checkpoints import ADAPTER_WEIGHTS, WEIGHTS, shapes_of
from .saved_files import AdapterConfig, check_link, check_saved, read_modules, read_object, read_settings, shards_of

#: Classes of sentence-transformers that encode single texts: as a vector, sparse weights, or token vectors.
ENCODERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (SentenceTransformer, SparseEncoder, MultiVectorEncoder)
}
#: Class that loads a CrossEncoder which scores all documents of a query together.
BY_ATTENTION = "st_reba.AttentionReranker"
#: Errors of the client without an answer: huggingface_hub uses httpx, and later versions httpx2.
_NO_ANSWER = tuple(import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name))
#: Placeholders of a model's id in saved cards, by st_reba 0.8 and by sentence-transformers.
_PLACEHOLDERS = (
    "path-or-id-of-this-model", "sentence_transformers_model_id", "cross_encoder_model_id", "sparse_encoder_model_id",
    "multi_vector_encoder_model_id",
)  # fmt: skip
#: Remedies by the status with which the Hub refuses a push.
_REMEDIES = {
    401: "Log in with `hf auth login`, or set HF_TOKEN to a token that may write.",
    403: "Use a token that may write to it, or your own name.",
}


def push(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a saved SentenceTransformer, as one commit.

    The repository and the branch are created if they do not exist. Hidden files are skipped. Placeholders of the
    model's id in its card are filled in.

    Args:
        directory: Directory of a saved model, which is checked before the upload.
        repo_id: Repository, as ``"org/name"``.
        private: Whether the repository must be private. A new one is created so.
        revision: Branch to push to. Defaults to the main branch.
        create_pr: Whether to open a pull request.
        message: Commit message.
        token: Token for the Hub. Defaults to that of the login.

    Returns:
        URL of the commit or the pull request.

    Raises:
        ValueError: If the directory is not a complete model, the id is malformed, ``private`` is set and the
            repository is public, or a pull request would change nothing.
        ConnectionError: If the Hub cannot be reached.
        PermissionError: If the Hub refuses the token.
        OSError: If the Hub refuses anything else, such as a large file.
    """
    root = Path(directory)
    check_saved_model(root)
    if repo_id.count("/") != 1:
        raise ValueError(f'"{repo_id}": a repository is "org/name" or "user/name".')
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise ValueError(f"{repo_id} is public. Make it private on the Hub first, or push without --private.")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        files = [_operation(root, path, repo_id) for path in files_of(root)]
        text = message or f"Add {repo_id.split('/')[1]}, a {model_class(root)}"
        done = api.create_commit(repo_id, operations=files, commit_message=text, revision=revision, create_pr=create_pr)
    except OfflineModeIsEnabled:
        raise ConnectionError("HF_HUB_OFFLINE is set: unset it to push.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        kind = PermissionError if status in _REMEDIES else OSError
        reason = f"The Hub refuses to take {repo_id} ({status}: {_reason(error)})."
        raise kind(" ".join(filter(None, [reason, _REMEDIES.get(status)]))) from None
    except _NO_ANSWER as error:
        raise ConnectionError(f"{api.endpoint} gives no answer ({error}). The repository is unchanged.") from None
    except RuntimeError as error:
        # Raised for a large file that did not arrive, with the reason as its cause.
        reason = _reason(error.__cause__ or error)
        raise OSError(f"A large file was not uploaded ({reason}). {repo_id} is unchanged: push again.") from None
    if create_pr and done.pr_url is None:
        raise ValueError(f"{repo_id} has all of these files already: there is nothing to propose.")
    return str(done.pr_url if create_pr else done.commit_url)


def _operation(root: Path, path: Path, repo_id: str) -> CommitOperationAdd:
    name = path.relative_to(root).as_posix()
    if name != "README.md":
        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
    card = re.sub("|".join(_PLACEHOLDERS), repo_id, path.read_text("utf-8"))
    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=card.encode())


def _reason(error: BaseException) -> str:
    """Return the Hub's message for an error, or the last line or the name of the error."""
    return getattr(error, "server_message", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]


def check_saved_model(root: Path) -> None:
    """Check that a directory is a complete SentenceTransformer, without loading its weights.

    Raises:
        ValueError: If a file is missing, cut short, or a link to a file outside the directory.
    """
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such directory. Give one that `st-reba build` or `save` has written.")
    files = files_of(root)
    for name in ("modules.json", "config_sentence_transformers.json"):
        if not (root / name).is_file():
            raise ValueError(f"{root} has no {name}: it is not a saved SentenceTransformer.")
    modules = check_saved(root)
    for entry in modules:
        folder = root / entry["path"]
        # A module without settings, such as Normalize, may have no folder: some uploads lose empty ones.
        if not folder.is_dir() and not entry["type"].endswith(".Normalize"):
            raise ValueError(f"{folder} is missing: the model is not complete. Save it again.")
    _check_backbone(root / modules[0]["path"])
    _check_adapter(root / modules[0]["path"])
    for path in files:
        if path.suffix == ".safetensors":
            # Reads only the header.
            shapes_of(path)


def model_class(root: Path) -> str:
    """Return the name of the sentence-transformers class that loads a saved model, by default SentenceTransformer."""
    return str(read_settings(root).get("model_type", "SentenceTransformer"))


def saved_class(model: str, revision: str | None = None) -> str | None:
    """Return the name of the sentence-transformers class that loads a model, or None if it is not a saved one.

    Args:
        model: Directory or Hub id.
        revision: Revision on the Hub.
    """
    for name in ("config_sentence_transformers.json", "modules.json"):
        if (file := load_file_path(model, name, revision=revision)) is not None:
            return model_class(Path(file).parent)
    return None


def loading_class(model: str) -> str | None:
    """Return the name of the class that loads a model, which may be :data:`BY_ATTENTION`: see :func:`saved_class`."""
    file = load_file_path(model, "modules.json")
    if file is not None and read_modules(Path(file))[0]["type"] == "st_reba.modules.AttentionRerankModule":
        return BY_ATTENTION
    return saved_class(model)


def files_of(root: Path) -> list[Path]:
    """Return all files of a saved model except hidden ones.

    Raises:
        ValueError: If a link leads out of the directory, to another directory, or to nothing. Otherwise an upload
            could include any file that the user may read.
    """
    files = []
    for path in sorted(root.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_symlink():
            check_link(path, root)
            if not path.is_file():
                problem = f"{path} is a link to {path.resolve()}, not a file:"
                raise ValueError(f"{problem} put the file itself there, or remove it.")
        if path.is_file():
            files.append(path)
    return files


def _check_backbone(folder: Path) -> None:
    """Check that the folder of a language model has all of its weights."""
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "model_type" not in config:
        return
    names = [str(config.get("file"))] if config["model_type"] == MODEL_TYPE else WEIGHTS
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None:
        raise ValueError(f"{folder} has no weights ({', '.join(names)}): the model is not complete. Save it again.")
    if weights.suffix == ".json":
        for shard in sorted(set(shards_of(weights).values())):
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard} is missing, which {weights.name} names. Save the model again.")


def _check_adapter(folder: Path) -> None:
    """Check that an adapter has weights, and its backbone a Hub id and not a path on this machine."""
    config = folder / ADAPTER_CONFIG_NAME
    if not config.is_file():
        return
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ValueError(f"{folder} has no weights ({', '.join(ADAPTER_WEIGHTS)}). Save the model again.")
    base = read_object(config, AdapterConfig).get("base_model_name_or_path")
    if base and (Path(base).is_absolute() or Path(base).is_dir()):
        raise ValueError(
            f"{folder} is an adapter on the directory {base}, so nobody else could load it. Push the merged model, or "
            "set base_model_name_or_path in adapter_config.json to the backbone's Hub id."
        )
