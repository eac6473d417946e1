from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from typer.testing import CliRunner

from st_reba import CausalTransformer
from st_reba.hub import push

from ..conftest import pipeline
from . import typed

run = partial(typed, "push")

runner = CliRunner()

#: Where the backbone lies.
OWN = "0_CausalTransformer"


@pytest.fixture(scope="module")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("push") / "my-model"
    pipeline(CausalTransformer(backbone_path())).save_pretrained(str(directory))
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "my-model")


@pytest.fixture
def hub(monkeypatch):
    """What is asked of the Hub, by the name of the call; ``hub["raise"]`` is raised by the first of them."""
    asked: dict = {"private": True}

    def create_repo(self, repo_id, **options):
        if "raise" in asked:
            raise asked["raise"]
        asked["create_repo"] = (repo_id, options)

    def create_commit(self, repo_id, **options):
        asked["create_commit"] = (repo_id, options)
        return CommitInfo(
            commit_url="https://huggingface.co/org/name/commit/1",
            commit_message="m",
            commit_description="",
            oid="1",
            pr_url=f"https://huggingface.co/{repo_id}/discussions/1" if options["create_pr"] else None,
        )

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "create_branch", lambda self, *args, **kw: asked.update(create_branch=(args, kw)))
    monkeypatch.setattr(HfApi, "model_info", lambda self, repo_id: type("Info", (), {"private": asked["private"]}))
    return asked


def sent(hub) -> dict[str, bytes]:
    operations = hub["create_commit"][1]["operations"]
    contents = {}
    for operation in operations:
        with operation.as_file() as stream:
            contents[operation.path_in_repo] = stream.read()
    return contents


def test_the_literal_line(directory, hub):
    """One commit with every file as it is, but for the model's id in its card; nothing is loaded."""
    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("secret")
    (directory / ".env").write_text("secret")
    output = run(directory, "org/name")
    assert "Pushed" in output
    assert "https://huggingface.co/org/name/commit/1" in output
    assert 'import st_reba; SentenceTransformer("org/name")' in output
    contents = sent(hub)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert set(contents) == files - {".git/config", ".env"}
    assert contents[f"{OWN}/model.safetensors"] == (directory / OWN / "model.safetensors").read_bytes()
    assert 'SentenceTransformer("org/name")' in contents["README.md"].decode()
    assert hub["create_repo"] == ("org/name", {"private": None, "exist_ok": True})
    assert hub["create_commit"][1]["revision"] is None


def test_a_model_of_another_class(directory, hub):
    """Is loaded by that."""
    path = directory / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "MultiVectorEncoder"}))
    assert 'import st_reba; MultiVectorEncoder("org/name")' in run(directory, "org/name")
    assert hub["create_commit"][1]["commit_message"] == "Add name, a MultiVectorEncoder"


def test_every_option(directory, hub):
    output = run(directory, "org/name", "--private", "--revision", "dev", "--create-pr", "--message", "better")
    assert "Proposed" in output
    assert "https://huggingface.co/org/name/discussions/1" in output
    assert hub["create_repo"][1]["private"] is True
    assert hub["create_branch"] == (("org/name",), {"branch": "dev", "exist_ok": True})
    options = hub["create_commit"][1]
    assert (options["revision"], options["create_pr"], options["commit_message"]) == ("dev", True, "better")


def test_private_never_means_public(directory, hub):
    hub["private"] = False
    assert "org/name is there and public." in run(directory, "org/name", "--private", expect=1)
    assert "create_commit" not in hub


def spoiled(directory, how):
    path = directory / how[0]
    if how[1] is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        path.write_bytes(how[1])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("modules.json", None), "has no modules.json: it is not a saved SentenceTransformer."),
        (("modules.json", b"{"), "modules.json: not JSON"),
        (("modules.json", b"[]"), "modules.json is []: it must be a list of modules, at least one."),
        (
            ("modules.json", b'[{"type": "a", "name": "0", "path": "../.."}]'),
            "has the path '../..': a module lies inside",
        ),
        (("config_sentence_transformers.json", b'{"prompts": 3}'), "sets prompts to 3: it must be an object of names"),
        (("config_sentence_transformers.json", None), "has no config_sentence_transformers.json"),
        (("1_Pooling", None), "1_Pooling is missing: the model is not complete."),
        ((f"{OWN}/model.safetensors", None), "has no weights (model.safetensors, "),
        ((f"{OWN}/model.safetensors", b"\x08\0\0\0"), "model.safetensors is damaged or cut short"),
    ],
)
def test_what_is_no_model_is_refused_before_any_call(how, message, directory, hub):
    spoiled(directory, how)
    assert message in run(directory, "org/name", expect=1)
    assert "create_repo" not in hub


class TestLinks:
    """Whatever the user may read could be named by one, and would be uploaded."""

    @pytest.fixture
    def secret(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        path = tmp_path / "elsewhere" / "id_rsa"
        path.write_text("secret")
        return path

    @pytest.mark.parametrize("name", ["LICENSE", "assets/notes.txt", "modules.json", f"{OWN}/tokenizer.json"])
    def test_to_a_file_outside(self, name, secret, directory, hub):
        (directory / "assets").mkdir()
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(secret)
        said = run(directory, "org/name", expect=1)
        assert f"{name} is a link to {secret}, outside the model: put the file itself there" in said
        assert "create_repo" not in hub

    def test_by_way_of_another_link(self, secret, directory, hub):
        (directory / "a").symlink_to("b")
        (directory / "b").symlink_to(secret)
        assert "is a link to" in run(directory, "org/name", expect=1)

    @pytest.mark.parametrize("name", ["assets", "1_Pooling"])
    def test_to_a_directory_outside(self, name, secret, directory, hub):
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).symlink_to(secret.parent)
        assert f"{name} is a link to {secret.parent}, outside the model" in run(directory, "org/name", expect=1)
        assert "create_repo" not in hub

    def test_to_a_directory_inside(self, directory, hub):
        (directory / "again").symlink_to("1_Pooling")
        assert "again is a link to a directory, whose files would not be sent" in run(directory, "org/name", expect=1)

    def test_to_nothing(self, directory, hub):
        (directory / "LICENSE").symlink_to("nowhere")
        assert "LICENSE is a link to" in run(directory, "org/name", expect=1)

    def test_inside(self, directory, hub):
        (directory / "LICENSE").symlink_to("README.md")
        (directory / ".hidden").symlink_to("/etc")
        run(directory, "org/name")
        assert "LICENSE" in sent(hub)

    def test_of_the_hubs_cache(self, directory, hub, tmp_path):
        """A model there is a directory of links to blobs beside it."""
        cache = tmp_path / "models--org--name"
        snapshot = cache / "snapshots" / ("0" * 40)
        (cache / "blobs").mkdir(parents=True)
        files = [path for path in directory.rglob("*") if path.is_file()]
        for number, path in enumerate(files):
            link = snapshot / path.relative_to(directory)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(cache / "blobs" / str(number))
            link.symlink_to(os.path.relpath(cache / "blobs" / str(number), link.parent))
        run(snapshot, "org/name")
        assert set(sent(hub)) == {path.relative_to(directory).as_posix() for path in files}

    def test_of_what_looks_like_the_hubs_cache(self, secret, directory, hub, tmp_path):
        cache = tmp_path / "models--org--name"
        shutil.copytree(directory, cache / "snapshots" / ("0" * 40))
        (cache / "blobs").mkdir()
        (cache / "blobs" / "1").symlink_to(secret)
        (cache / "snapshots" / ("0" * 40) / "LICENSE").symlink_to("../../blobs/1")
        assert "outside the model" in run(cache / "snapshots" / ("0" * 40), "org/name", expect=1)
        assert "create_repo" not in hub


def test_a_shard_that_is_missing(directory, hub):
    (directory / OWN / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-1.safetensors"}}
    (directory / OWN / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1.safetensors is missing, which model.safetensors.index.json names." in run(
        directory, "org/name", expect=1
    )


class Response:
    headers: dict = {}
    request = None

    def __init__(self, status):
        self.status_code = status


def refusal(status: int) -> HfHubHTTPError:
    return HfHubHTTPError(f"{status} Client Error", response=Response(status), server_message="Nope.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(401), "The Hub does not accept the token (Nope.). Log in with `hf auth login`"),
        (refusal(403), "The token may not write to org/name (Nope.)."),
        (refusal(500), "The Hub refuses to take org/name (500: Nope.)."),
        (RuntimeError("Data processing error: closed"), "A large file was not taken (Data processing error: closed)."),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set, so nothing is sent"),
    ],
)
def test_what_the_hub_refuses(error, message, directory, hub):
    hub["raise"] = error
    assert message in run(directory, "org/name", expect=1)


def test_a_large_file_that_did_not_arrive(directory, hub):
    """The client says which; why is the cause of that."""
    hub["raise"] = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
    hub["raise"].__cause__ = TimeoutError()
    assert "A large file was not taken (TimeoutError)." in run(directory, "org/name", expect=1)


def test_no_network(directory, monkeypatch):
    """The real client, at an address where nobody listens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="gives no answer"):
        push.push(directory, "org/name", token="hf_x")


def test_no_answer_is_an_error_of_the_library_that_the_client_asks_through():
    assert push._NO_ANSWER
    assert issubclass(HfHubHTTPError, push._NO_ANSWER)
