"""What a user does with the Hub: push from one process, load in another, over HTTP.

Hub addresses and offline mode are read at import, so everything happens in processes of their own: one that pushes, one
that loads, and one that loads when the Hub is gone.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from packaging.version import Version

from .. import processes
from ..backbones import TEXTS
from . import RunningHub, Storage, User

#: huggingface-hub 1 closes its client where the server is gone, and asks again with that one.
SPEAKS_ON = pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("2"), reason="huggingface-hub 1 asks again with a closed client"
)

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent

REPO, PRIVATE, GATED = "org/llama2-zh-reba", "org/secret", "org/gated"
BUILT = "org/built"
OWNER, STRANGER = "hf_owner", "hf_stranger"
BASE_CARD = b"---\nlicense: llama2\nlanguage:\n- zh\n---\n\n# A tiny llama\n"


def environment(hub: RunningHub, home: Path, **more: str) -> dict[str, str]:
    """A machine of its own: another cache, no token but those given."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(home / "planted")]),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    return directory


@pytest.fixture(scope="module")
def hub(backbone_path):
    users = {OWNER: User("owner", ("org",)), STRANGER: User("stranger")}
    storage = Storage(users)
    backbone = {path.name: path.read_bytes() for path in Path(backbone_path()).iterdir()}
    storage.put("base/tiny-llama", {**backbone, "README.md": BASE_CARD})
    storage.create("somebody/theirs")
    storage.create("org/full", full=True)
    running = RunningHub(storage)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def pushed(hub, workplace):
    """What the pushes gave; the Hub breaks down in the middle of two of them, and comes back."""
    log = workplace / "push.log"
    interrupted = ("org/half-way", "org/built-half-way")
    hub.break_at("POST", f"/api/models/{interrupted[0]}/commit/main")
    process = processes.start(
        SCRIPTS / "push.py", workplace, out=log, with_st=False,
        env=environment(hub, workplace / "pusher", HF_TOKEN=OWNER),
    )  # fmt: skip
    try:
        left = {}
        for repo_id, following in zip(interrupted, (*interrupted[1:], None), strict=True):
            while hub.running and process.poll() is None:
                time.sleep(0.05)
            assert process.poll() is None, log.read_text()
            repository = hub.storage.repositories[repo_id]
            left[repo_id] = {
                "commits": len(repository.commits),
                "files": sorted(repository.files()),
                "objects": len(repository.objects),
            }
            if following is not None:
                hub.break_at("POST", f"/api/models/{following}/commit/main")
            hub.start()
        assert process.wait(timeout=180) == 0, log.read_text()
    finally:
        process.kill()
    return {**json.loads((workplace / "pushed.json").read_text()), "left half way": left}


@pytest.fixture(scope="module")
def hostile(hub, pushed):
    """Repositories with one thing changed in what was pushed: the id of each."""
    repository = hub.storage.repositories[REPO]

    def put(name: str, path: str, change, revision: str = "main") -> str:
        files = {path: file.content for path, file in repository.files(revision).items()}
        files[path] = json.dumps(change(json.loads(files[path]))).encode()
        files["remote_code.py"] = MARKING.encode()
        hub.storage.put(f"evil/{name}", files)
        return f"evil/{name}"

    def module(index: int, **changes):
        return lambda modules: [{**one, **changes} if one["idx"] == index else one for one in modules]

    settings = "0_ReBAModule/sentence_bert_config.json"
    return {
        "repetitions": put("repetitions", settings, lambda config: {**config, "repetitions": 10**9}),
        "template": put(
            "template",
            "0_EchoModule/sentence_bert_config.json",
            lambda config: {**config, "template": "{text}{text.__class__}"},
            "refs/pr/1",
        ),
        "climbing": put("climbing", "modules.json", module(0, path="../../x")),
        "climbing pooling": put("climbing-pooling", "modules.json", module(1, path="1_Pooling/../../../x")),
        "absolute": put("absolute", "modules.json", module(0, path="/etc")),
        "installed class": put("installed-class", "modules.json", module(1, type="planted_module.Thing")),
        "class in the repository": put("remote-class", "modules.json", module(1, type="remote_code.Thing")),
        "not a class": put("not-a-class", "modules.json", module(0, type="os.system")),
    }


#: Python that leaves a mark when it is imported.
MARKING = "import os, pathlib\npathlib.Path(os.environ['MARK']).touch()\nclass Thing: pass\n"


@pytest.fixture(scope="module")
def home(workplace):
    """The cache of the machine that loads, and a module on its path that leaves a mark when it is imported."""
    planted = workplace / "loader" / "planted"
    planted.mkdir(parents=True)
    (planted / "planted_module.py").write_text(MARKING)
    return planted.parent


@pytest.fixture(scope="module")
def outcomes(hub, workplace, home, pushed, hostile):
    """What one process got from the Hub, and what when the Hub was gone."""
    repository = hub.storage.repositories[REPO]
    hub.storage.put(GATED, {path: file.content for path, file in repository.files().items()}, gated=True)
    cases = {
        "plain": {"model_name_or_path": REPO},
        "branch": {"model_name_or_path": REPO, "revision": "three-copies"},
        "tag": {"model_name_or_path": REPO, "revision": "v1"},
        "commit": {"model_name_or_path": REPO, "revision": repository.resolve("three-copies")},
        "pull request": {"model_name_or_path": REPO, "revision": "refs/pr/1"},
        "no such revision": {"model_name_or_path": REPO, "revision": "no-such"},
        # Before it is in the cache, which would serve it.
        "private, without a token": {"model_name_or_path": PRIVATE},
        "private, wrong token": {"model_name_or_path": PRIVATE, "token": "hf_wrong"},
        "private, a stranger": {"model_name_or_path": PRIVATE, "token": STRANGER},
        "private": {"model_name_or_path": PRIVATE, "token": OWNER},
        "pushed after the breakdown": {"model_name_or_path": "org/half-way"},
        "gated, without a token": {"model_name_or_path": GATED},
        "gated, a stranger": {"model_name_or_path": GATED, "token": STRANGER},
        "by command": {"model_name_or_path": BUILT},
        "by command, branch": {"model_name_or_path": BUILT, "revision": "three-copies"},
        "by command, pull request": {"model_name_or_path": BUILT, "revision": "refs/pr/1"},
        "by command, private": {"model_name_or_path": "org/built-secret", "token": OWNER},
        "by command, after the breakdown": {"model_name_or_path": "org/built-half-way"},
        "no such repository": {"model_name_or_path": "org/no-such", "token": OWNER},
        **{name: {"model_name_or_path": repo_id} for name, repo_id in hostile.items()},
    }
    without_the_hub = {
        "local files only": {"model_name_or_path": REPO, "local_files_only": True},
        "local files only, branch": {"model_name_or_path": REPO, "revision": "three-copies", "local_files_only": True},
        "never loaded": {"model_name_or_path": "base/tiny-llama", "local_files_only": True},
    }
    log = workplace / "load.log"
    process = processes.start(
        SCRIPTS / "load.py", workplace, json.dumps(cases), json.dumps(without_the_hub), out=log, with_st=False,
        env=environment(hub, home, MARK=str(home / "mark")),
    )  # fmt: skip
    try:
        while not (workplace / "loaded.json").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        hub.stop()
        (workplace / "the Hub is gone").touch()
        assert process.wait(timeout=180) == 0, log.read_text()
    finally:
        process.kill()
    hub.start()
    return [json.loads((workplace / f"{name}.json").read_text()) for name in ("loaded", "offline")]


@pytest.fixture(scope="module")
def loaded(outcomes):
    return outcomes[0]


@pytest.fixture(scope="module")
def offline(outcomes):
    return outcomes[1]


def same(outcome: dict, workplace: Path, name: str) -> bool:
    expected = np.load(workplace / f"{name}.npy")
    return np.array_equal(np.array(outcome["embeddings"], dtype=expected.dtype), expected)


#: The weights are there, and nothing refers to them: no repository with half a model.
LEFT_HALF_WAY = {"commits": 1, "files": [".gitattributes"], "objects": 1}


class TestPush:
    def test_a_new_repository(self, pushed, hub):
        assert pushed["new"]["url"].startswith(f"{hub.endpoint}/{REPO}/commit/")
        files = hub.storage.repositories[REPO].files("v1")
        assert files["0_ReBAModule/model.safetensors"].lfs
        assert not files["modules.json"].lfs

    def test_it_is_not_overwritten_unasked(self, pushed):
        assert pushed["already there"]["error"] == "HfHubHTTPError"
        assert "409" in pushed["already there"]["message"]

    def test_to_a_branch(self, pushed, hub):
        repository = hub.storage.repositories[REPO]
        config = json.loads(repository.files("three-copies")["0_ReBAModule/sentence_bert_config.json"].content)
        assert config["repetitions"] == 3
        assert repository.resolve("main") == repository.resolve("v1")
        assert "**ReBA-3**" in repository.files("three-copies")["README.md"].content.decode()

    def test_as_a_pull_request(self, pushed, hub):
        assert pushed["pull request"]["url"] == f"{hub.endpoint}/{REPO}/discussions/1"
        repository = hub.storage.repositories[REPO]
        modules = json.loads(repository.files("refs/pr/1")["modules.json"].content)
        assert modules[0]["type"] == "st_reba.modules.EchoModule"
        assert json.loads(repository.files()["modules.json"].content)[0]["type"] == "st_reba.modules.ReBAModule"

    def test_private(self, pushed, hub):
        assert hub.storage.repositories[PRIVATE].private

    def test_the_card(self, pushed, hub):
        card = hub.storage.repositories[REPO].files()["README.md"].content.decode()
        for expected in (
            "base_model: base/tiny-llama",
            "license: llama2",
            "language:\n- zh",
            "library_name: sentence-transformers",
            "pipeline_tag: sentence-similarity",
            f'SentenceTransformer("{REPO}")',
            "[base/tiny-llama](https://huggingface.co/base/tiny-llama)",
        ):
            assert expected in card, expected

    def test_wrong_token(self, pushed, hub):
        assert "401" in pushed["wrong token"]["message"]
        assert "Invalid credentials in Authorization header" in pushed["wrong token"]["message"]
        assert "org/other" not in hub.storage.repositories

    def test_a_namespace_that_is_not_ours(self, pushed, hub):
        message = pushed["no namespace of ours"]["message"]
        assert "403" in message
        assert 'You don\'t have the rights to create a model under the namespace "somebody"' in message
        assert "somebody/new" not in hub.storage.repositories

    def test_a_repository_that_is_not_ours(self, pushed, hub):
        message = pushed["no repository of ours"]["message"]
        assert "403" in message
        assert "You don't have write access to somebody/theirs" in message
        assert list(hub.storage.repositories["somebody/theirs"].files()) == [".gitattributes"]

    def test_the_hub_breaks_down_half_way(self, pushed, hub):
        assert pushed["left half way"]["org/half-way"] == LEFT_HALF_WAY
        assert pushed["half way"]["error"] == "RemoteProtocolError"
        assert pushed["half way"]["message"] == "Server disconnected without sending a response."
        assert "url" in pushed["half way, again"]
        assert set(hub.storage.repositories["org/half-way"].files()) == set(hub.storage.repositories[REPO].files())

    def test_what_the_client_sees(self, pushed, hub):
        seen, files = pushed["looked around"], sorted(hub.storage.repositories[REPO].files())
        assert seen["user"] == "owner"
        assert {"sentence-transformers", "st-reba", "reba"} <= set(seen["tags"])
        assert seen["pipeline_tag"] == "sentence-similarity"
        assert sorted(seen["files"]) == files
        assert sorted(seen["files after deletion"]) == [path for path in files if path != "README.md"]
        assert "1_Pooling" in seen["folders"]
        assert seen["references"] == [
            "refs/heads/main", "refs/heads/scratch/pad", "refs/heads/three-copies", "refs/pr/1", "refs/tags/v1"
        ]  # fmt: skip
        assert seen["bytes 8 to 12"] == '{"__'


class TestPushCommand:
    """`st-reba push`, of what `st-reba build` made."""

    @pytest.mark.parametrize(
        ("case", "revision", "output"),
        [
            ("command", "main", 'Load it with: import st_reba; SentenceTransformer("org/built")'),
            ("command, again", "main", "Pushed "),
            ("command, branch", "three-copies", 'SentenceTransformer("org/built", revision="three-copies")'),
            ("command, pull request", "refs/pr/1", "/org/built/discussions/1"),
        ],
    )
    def test_where_it_goes(self, case, revision, output, pushed, hub, workplace):
        assert pushed[case]["code"] == 0, pushed[case]
        assert output in pushed[case]["output"]
        assert f"{hub.endpoint}/{BUILT}/" in pushed[case]["output"]
        name = {"three-copies": "built-three", "refs/pr/1": "built-echo"}.get(revision, "built-two")
        directory = workplace / "built" / name
        there = hub.storage.repositories[BUILT].files(revision)
        local = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        # Nothing is deleted: where the model before was of another class, its backbone stays beside this one's.
        before = {path for path in there if path.startswith("0_ReBAModule/")}
        assert set(there) - {".gitattributes"} - before == set(local) - before
        for path in set(local) - {"README.md"}:
            assert there[path].content == local[path].read_bytes(), path
        assert all(there[path].lfs for path in local if path.endswith("model.safetensors"))
        assert f'SentenceTransformer("{BUILT}")' in there["README.md"].content.decode()

    def test_a_push_is_one_commit(self, pushed, hub):
        """And none, where nothing has changed."""
        repository = hub.storage.repositories[BUILT]
        main, branch = (repository.commits[repository.resolve(name)] for name in ("main", "three-copies"))
        assert repository.commits[main.parent].message == "initial commit"
        assert branch.parent == main.sha
        assert [main.message, branch.message] == ["Add built, a SentenceTransformer", "Three copies"]

    def test_private(self, pushed, hub):
        assert pushed["command, private"]["code"] == 0, pushed["command, private"]
        assert hub.storage.repositories["org/built-secret"].private
        assert not hub.storage.repositories[BUILT].private

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ("private over public", "org/built is there and public. Make it private on the Hub first,"),
            ("wrong token", "does not accept the token (Invalid credentials in Authorization header). Log in with"),
            ("no token", "does not accept the token (Invalid username or password.). Log in with `hf auth login`"),
            ("a stranger", "The token may not write to org/built (You don't have write access to org/built)."),
            ("no namespace of ours", "The token may not write to somebody/new (You don't have the rights to create"),
            ("no repository of ours", "The token may not write to somebody/theirs (You don't have write access to"),
            (
                "large files refused",
                "A large file was not taken (Storage limit reached). What was in org/full is unchanged",
            ),
            ("half way", "gives no answer (Server disconnected without sending a response.)."),
        ],
    )
    def test_is_refused_in_a_sentence(self, case, message, pushed):
        outcome = pushed[f"command, {case}"]
        assert (outcome["code"], outcome["trace"]) == (1, None), outcome
        assert outcome["output"].count("Error: ") == 1
        assert message in outcome["output"]

    def test_nothing_is_half_written(self, pushed, hub):
        repositories = hub.storage.repositories
        assert {"org/built-other", "somebody/new"}.isdisjoint(repositories)
        for untouched in ("somebody/theirs", "org/full"):
            assert list(repositories[untouched].files()) == [".gitattributes"]
        assert pushed["left half way"]["org/built-half-way"] == LEFT_HALF_WAY
        assert pushed["command, half way, again"]["code"] == 0, pushed["command, half way, again"]


class TestLoad:
    @pytest.mark.parametrize(
        ("case", "module", "model"),
        [
            ("plain", "ReBAModule", "two"),
            ("tag", "ReBAModule", "two"),
            ("branch", "ReBAModule", "three"),
            ("commit", "ReBAModule", "three"),
            ("pull request", "EchoModule", "echo"),
            ("private", "CausalTransformer", "classical"),
            ("pushed after the breakdown", "ReBAModule", "two"),
            ("by command", "ReBAModule", "built-two"),
            ("by command, branch", "ReBAModule", "built-three"),
            ("by command, pull request", "EchoModule", "built-echo"),
            ("by command, private", "ReBAModule", "built-two"),
            ("by command, after the breakdown", "ReBAModule", "built-two"),
        ],
    )
    def test_bit_for_bit(self, case, module, model, loaded, workplace):
        assert loaded[case].get("module") == module, loaded[case]
        assert same(loaded[case], workplace, model)

    @pytest.mark.parametrize(
        ("case", "error", "message"),
        [
            ("no such revision", "RevisionNotFoundError", "Revision Not Found|not a valid git identifier"),
            ("no such repository", "RepositoryNotFoundError", "404 Client Error|not a valid model identifier"),
            ("gated, without a token", "GatedRepoError", "401 Client Error"),
            ("gated, a stranger", "GatedRepoError", "403 Client Error"),
            ("private, without a token", "RepositoryNotFoundError", "401 Client Error|not a valid model identifier"),
            ("private, wrong token", "HfHubHTTPError", "Invalid credentials in Authorization header"),
            ("private, a stranger", "RepositoryNotFoundError", "404 Client Error|not a valid model identifier"),
        ],
    )
    def test_what_cannot_be_loaded(self, case, error, message, loaded):
        assert loaded[case].get("error") in (error, "OSError"), loaded[case]
        assert re.search(message, loaded[case]["message"]), loaded[case]

    @pytest.mark.parametrize(
        ("case", "model"),
        [("local files only", "two"), pytest.param("local files only, branch", "three", marks=SPEAKS_ON)],
    )
    def test_without_the_hub(self, case, model, offline, workplace):
        assert same(offline[case], workplace, model)

    def test_without_the_hub_and_never_loaded(self, offline):
        assert offline["never loaded"]["error"] == "OSError"
        assert "couldn't find them in the cached files" in offline["never loaded"]["message"]


class TestHostile:
    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ("repetitions", "repetitions=1000000000: give a whole number from 1 to 1024"),
            ("template", "'{text}{text.__class__}' has braces other than {text}"),
            ("climbing", "path '../../x'"),
            ("absolute", "path '/etc'"),
            # By ST; before 6.2 by the Hub's client.
            ("climbing pooling", "path '1_Pooling/../../../x'|Invalid pointer path"),
            ("installed class", "trust_remote_code=True"),
            ("class in the repository", "trust_remote_code=True"),
            ("not a class", "trust_remote_code=True"),
        ],
    )
    def test_is_refused_in_a_sentence(self, case, message, loaded):
        assert loaded[case].get("error") == "ValueError", loaded[case]
        assert re.search(message, loaded[case]["message"]), loaded[case]

    def test_nothing_was_imported(self, loaded, home):
        assert not (home / "mark").exists()
        assert not list(home.glob("modules/**/remote_code.py"))

    def test_nothing_is_half_written(self, loaded, home, workplace):
        assert not list(home.rglob("*.incomplete"))
        assert {path.name for path in workplace.iterdir()} <= {
            "texts.json", "push.log", "load.log", "pushed.json", "loaded.json", "offline.json", "pusher", "loader",
            "the Hub is gone",
            "two.npy", "three.npy", "echo.npy", "classical.npy",
            "built", "built-two.npy", "built-three.npy", "built-echo.npy",
        }  # fmt: skip
