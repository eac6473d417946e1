"""``st-reba push``: what is sent, and what is refused before any call. All options, to a real Hub, are in tests/hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from ..conftest import change
from . import typed

#: Where the backbone lies.
OWN = "0_CausalTransformer"


@pytest.fixture(autouse=True)
def model(desk, saved) -> Path:
    shutil.copytree(saved, "model")
    return desk / "model"


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """What is sent to the Hub, by name; ``hub["raise"]`` is raised by the first call."""
    asked: dict = {}

    def create_repo(self, repo_id, **options):
        if "raise" in asked:
            raise asked["raise"]
        asked["sent"] = {}

    def create_commit(self, repo_id, *, operations, **options):
        for operation in operations:
            with operation.as_file() as stream:
                asked["sent"][operation.path_in_repo] = stream.read()
        return SimpleNamespace(commit_url="https://hub/[a]", pr_url=None)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    return asked


def test_what_is_sent(model, hub):
    """Every file as it is, but for the model's id in its card, and for what is hidden; nothing is loaded."""
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("secret")
    (model / ".env").write_text("secret")
    (model / "README.md").write_text('SentenceTransformer("sentence_transformers_model_id")')
    (model / "LICENSE").symlink_to("modules.json")
    change(model / "config_sentence_transformers.json", model_type="MultiVectorEncoder")
    output = typed("push model org/name --json")
    assert "Pushed model to org/name: https://hub/[a]" in output
    assert '"schema": "st-reba/push/1"' in output
    line = 'import st_reba; from sentence_transformers import MultiVectorEncoder; MultiVectorEncoder("org/name")'
    assert line in output
    files = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert set(hub["sent"]) == files - {".git/config", ".env"}
    assert hub["sent"][f"{OWN}/model.safetensors"] == (model / OWN / "model.safetensors").read_bytes()
    assert 'SentenceTransformer("org/name")' in hub["sent"]["README.md"].decode()
    # The client opens no pull request that would change nothing.
    assert "all of these files already: there is nothing to" in typed("push model org/name --create-pr", expect=1)


NO_MODELS = [
    ("modules.json", b'[{"type": "a", "name": "0", "path": "../.."}]', "'../..' leads out of its model: give"),
    (f"{OWN}/model.safetensors", None, "has no weights (model.safetensors, "),
    (f"{OWN}/model.safetensors", b"\x08\0\0\0", "model.safetensors: these weights are damaged or cut short"),
    (f"{OWN}/model.safetensors.index.json", b'{"weight_map": {"w": "model-1.safetensors"}}', "model-1.safetensors "
     "is missing, which model.safetensors.index.json names."),
    (f"{OWN}/adapter_config.json", b"{}", "has no weights (adapter_model.safetensors, adapter_model.bin). Save"),
    (f"{OWN}/config.json", b'{"model_type": "st_reba_llama_cpp", "file": "a.gguf"}', "has no weights (a.gguf): the mo"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), NO_MODELS)
def test_what_is_no_model_is_refused_before_any_call(name, content, said, model, hub):
    path = model / name
    if "index" in name or content is None:
        path.with_name("model.safetensors").unlink()
    if content is not None:
        path.write_bytes(content)
    assert said in typed("push model org/name", expect=1)
    assert "sent" not in hub


@pytest.mark.parametrize("name", ["LICENSE", "assets/notes.txt", f"{OWN}/tokenizer.json", "1_Pooling"])
def test_a_link_out_of_the_model(name, model, hub):
    """Whatever the user may read could be named by one, and would be uploaded."""
    secret = model.parent / "elsewhere"
    secret.mkdir()
    if name != "1_Pooling":
        secret /= "id_rsa"
        secret.write_text("secret")
    link = model / name
    link.parent.mkdir(exist_ok=True)
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to(secret)
    assert f"{name} is a link to {secret}, outside the model" in typed("push model org/name", expect=1)
    assert "sent" not in hub


def test_a_blob_that_is_a_link(model, hub):
    """In what looks like the Hub's cache."""
    snapshot, blob = Path("models--org--name/snapshots/0"), Path("models--org--name/blobs/1")
    shutil.copytree("saved", snapshot)
    blob.parent.mkdir()
    blob.symlink_to("/etc/passwd")
    (snapshot / "LICENSE").symlink_to("../../blobs/1")
    assert "outside the model" in typed(f"push {snapshot} org/name", expect=1)
    assert "sent" not in hub


def test_links_of_the_hubs_cache(model, hub):
    """A model there is a directory of links to blobs beside it."""
    cache = Path("models--org--name").absolute()
    snapshot = cache / "snapshots" / ("0" * 40)
    (cache / "blobs").mkdir(parents=True)
    files = [path for path in model.rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(cache / "blobs" / str(number))
        link.symlink_to(os.path.relpath(cache / "blobs" / str(number), link.parent))
    typed(f"push {snapshot} org/name")
    assert set(hub["sent"]) == {path.relative_to(model).as_posix() for path in files}


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=500)
REFUSED = HfHubHTTPError("500 Server Error", response=RESPONSE, server_message="Nope.")


REFUSALS_OF_THE_HUB = [
    (REFUSED, None, "The Hub refuses to take org/name (500: Nope.)."),
    (RuntimeError("Data processing error: closed"), None, "A large file was not uploaded (Data processing error: "),
    # The client says which; why is the cause of that.
    (RuntimeError("Error while uploading 'a' to the Hub."), TimeoutError(), "not uploaded (TimeoutError)."),
    (OfflineModeIsEnabled("offline"), None, "HF_HUB_OFFLINE is set: unset it to push"),
]


@pytest.mark.parametrize(("error", "cause", "said"), REFUSALS_OF_THE_HUB)
def test_what_the_hub_refuses(error, cause, said, hub):
    error.__cause__ = cause
    hub["raise"] = error
    assert said in typed("push model org/name", expect=1)
