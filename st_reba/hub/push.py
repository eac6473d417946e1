"""A saved model to the Hub, without loading it: it is checked, and uploaded as one commit."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import load_file_path

from .saved_files import (
    ADAPTER,
    check_link,
    check_saved,
    check_values,
    read_modules,
    read_object,
    read_settings,
    shards_of,
)

#: Sentence-transformers' classes that read texts one by one: a vector, weights of words, a vector for each token.
ENCODERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (SentenceTransformer, SparseEncoder, MultiVectorEncoder)
}
#: What loads a CrossEncoder that scores the documents of a query together.
BY_ATTENTION = "st_reba.AttentionReranker"
#: What the client raises where no answer came: huggingface_hub asks through httpx, and later versions through httpx2.
_NO_ANSWER = tuple(import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name))
#: Placeholders of a model's id in saved cards: of 0.8, and of sentence-transformers, which fills its own in itself.
_PLACEHOLDERS = (
    "path-or-id-of-this-model", "sentence_transformers_model_id", "cross_encoder_model_id", "sparse_encoder_model_id",
    "multi_vector_encoder_model_id",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


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

    The repository is made if there is none, and so is the branch. Hidden files are not sent. A model card that leaves
    the model's id open is filled in.

    Args:
        directory: A saved model; it is checked before anything is sent.
        repo_id: ``"org/name"``.
        private: The repository must be private; a new one is made so.
        revision: Branch to push to; the main one if None.
        create_pr: Open a pull request instead.
        message: Of the commit.
        token: Of the Hub; the one that was logged in with if None.

    Returns:
        Where the commit, or the pull request, can be seen.

    Raises:
        ValueError: If the directory is no complete model, the id is malformed, or the repository is public against
            ``private``.
        ConnectionError: If the Hub cannot be reached.
        PermissionError: If it refuses the token.
        OSError: If it refuses anything else, such as a large file.
    """
    root = Path(directory)
    check_saved_model(root)
    check_repo_id(repo_id)
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} is there and public. Make it private on the Hub first, or push without --private."
            )
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            operations=[_operation(root, path, repo_id) for path in files_of(root)],
            commit_message=message or f"Add {repo_id.split('/')[1]}, a {model_class(root)}",
            revision=revision,
            create_pr=create_pr,
        )
    except OfflineModeIsEnabled:
        raise ConnectionError("HF_HUB_OFFLINE is set, so nothing is sent: unset it to push.") from None
    except HfHubHTTPError as error:
        raise _refusal(error, repo_id) from None
    except _NO_ANSWER as error:
        raise ConnectionError(f"{api.endpoint} gives no answer ({error}). The repository is unchanged.") from None
    except RuntimeError as error:
        # The client's word for a large file that did not arrive; what happened is the cause.
        said = _said(error.__cause__ or error)
        raise OSError(f"A large file was not taken ({said}). What was in {repo_id} is unchanged: push again.") from None
    return str(commit.pr_url if create_pr else commit.commit_url)


def _operation(root: Path, path: Path, repo_id: str) -> CommitOperationAdd:
    name = path.relative_to(root).as_posix()
    if name != "README.md":
        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
    card = re.sub("|".join(_PLACEHOLDERS), repo_id, path.read_text("utf-8"))
    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=card.encode())


def _said(error: BaseException) -> str:
    """What the Hub says of an error, or else its last line, or its name where it has none."""
    return getattr(error, "server_message", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]


def _refusal(error: HfHubHTTPError, repo_id: str) -> OSError:
    """What the Hub has refused, in a sentence."""
    status = error.response.status_code
    said = _said(error)
    if status == 401:
        return PermissionError(
            f"The Hub does not accept the token ({said}). Log in with `hf auth login`, or set HF_TOKEN to one that may "
            "write."
        )
    if status == 403:
        return PermissionError(f"The token may not write to {repo_id} ({said}). Use one that may, or your own name.")
    return OSError(f"The Hub refuses to take {repo_id} ({status}: {said}).")


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
        ValueError: If something is missing or cut short, or is a link to what would not be sent, naming it.
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
        if path.suffix != ".safetensors":
            continue
        try:
            # Only its header is read.
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}). Save the model again.") from None


def model_class(root: Path) -> str:
    """Which of sentence-transformers' classes a saved model is loaded by; old models do not say it."""
    return str(read_settings(root).get("model_type", "SentenceTransformer"))


def saved_class(model: str, revision: str | None = None) -> str | None:
    """By which of sentence-transformers' classes a saved model is loaded; None where nothing says.

    Args:
        model: A directory, or a model on the Hub.
        revision: Of the Hub.
    """
    for name in ("config_sentence_transformers.json", "modules.json"):
        if (file := load_file_path(model, name, revision=revision)) is not None:
            return model_class(Path(file).parent)
    return None


def loading_class(model: str, revision: str | None = None) -> str | None:
    """The class that a user loads a saved model by: :func:`saved_class`, but for one that is saved as a CrossEncoder
    and scores the documents of a query together, :data:`BY_ATTENTION`.

    Args:
        model: A directory, or a model on the Hub.
        revision: Of the Hub.
    """
    file = load_file_path(model, "modules.json", revision=revision)
    modules = [] if file is None else read_modules(Path(file))
    by_attention = bool(modules) and modules[0]["type"] == "st_reba.modules.AttentionRerankModule"
    return BY_ATTENTION if by_attention else saved_class(model, revision)


def files_of(root: Path) -> list[Path]:
    """What of a saved model is sent: all files but hidden ones.

    Raises:
        ValueError: If a link leads out of it, or to a directory or nothing: what is sent is what the user sees in the
            directory, and a link could name any file that the user may read.
    """
    found = []
    for path in sorted(root.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_symlink():
            if not path.exists():
                raise ValueError(
                    f"{path} is a link to {path.resolve()}, where nothing is. Remove it, or save the model again."
                )
            check_link(path, root)
            if path.is_dir():
                raise ValueError(
                    f"{path} is a link to a directory, whose files would not be sent: put the directory there."
                )
        if path.is_file():
            found.append(path)
    return found


def _check_backbone(folder: Path) -> None:
    """A language model's folder has its weights, all shards of them. Other first modules have their own ways."""
    if not (folder / "config.json").is_file() or "model_type" not in read_object(folder / "config.json"):
        return
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"{folder} has no weights ({', '.join(_WEIGHTS)}): the model is not complete. Save it again.")
    if found.suffix == ".json":
        for shard in sorted(set(shards_of(found).values())):
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard} is missing, which {found.name} names. Save the model again.")


def _check_adapter(folder: Path) -> None:
    """An adapter's backbone is found by its name, which must mean something elsewhere."""
    config = folder / "adapter_config.json"
    if config.is_file():
        settings = read_object(config)
        check_values(settings, ADAPTER, config)
        base = Path(str(settings.get("base_model_name_or_path")))
        if base.is_absolute() or base.is_dir():
            raise ValueError(
                f"{folder} is an adapter on {base}, which is a directory of this machine: nobody else could load it. "
                "Push the merged model, or name the backbone's Hub id as base_model_name_or_path in "
                "adapter_config.json."
            )
