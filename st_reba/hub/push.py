"""A saved model to the Hub, without loading it."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from .checks import check_repo_id, check_saved_model, files_of, model_class

#: What the client raises where no answer came: huggingface_hub asks through httpx, and later versions through httpx2.
_NO_ANSWER = tuple(import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name))
#: What saved cards say where a model's id belongs.
_PLACEHOLDERS = ("path-or-id-of-this-model", "sentence_transformers_model_id")


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

    The repository is made if there is none, and so is the branch. Hidden files stay here; a model card that leaves the
    model's id open gets it.

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
        return _push(api, root, repo_id, private, revision, create_pr, message)
    except OfflineModeIsEnabled:
        raise ConnectionError("HF_HUB_OFFLINE is set, so nothing is sent: unset it to push.") from None
    except HfHubHTTPError as error:
        raise _refusal(error, repo_id) from None
    except _NO_ANSWER as error:
        raise ConnectionError(f"{api.endpoint} gives no answer ({error}). What was there is unchanged.") from None
    except RuntimeError as error:
        # The client's word for a large file that did not arrive; what happened is the cause.
        said = _said(error.__cause__ or error)
        raise OSError(f"A large file was not taken ({said}). What was in {repo_id} is unchanged: push again.") from None


def _push(
    api: HfApi,
    root: Path,
    repo_id: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    message: str | None,
) -> str:
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise ValueError(f"{repo_id} is there and public. Make it private on the Hub first, or push without --private.")
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    commit = api.create_commit(
        repo_id,
        operations=[_operation(root, path, repo_id) for path in files_of(root)],
        commit_message=message or f"Add {repo_id.split('/')[1]}, a {model_class(root)}",
        revision=revision,
        create_pr=create_pr,
    )
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
