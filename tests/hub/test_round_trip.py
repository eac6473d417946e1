"""What a user does with the Hub: push from one process, load in another, over HTTP.

Hub addresses and offline mode are read at import, so everything happens in processes of their own: one that pushes, one
that loads, and goes on when the Hub is gone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from packaging.version import Version

from st_reba import ReBAModule

from .. import ggufs
from ..backbones import TEXTS
from ..conftest import pipeline
from . import RunningHub, Storage, User

#: huggingface-hub 1 closes its client where the server is gone, and asks again with that one.
SPEAKS_ON = pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("2"), reason="huggingface-hub 1 asks again with a closed client"
)
SCRIPTS = Path(__file__).parent
REPO, BUILT, HALF_WAY = "org/llama2-zh-reba", "org/built", "org/half-way"
OWNER, STRANGER = "hf_owner", "hf_stranger"


#: References and model_kwargs, and what is said where there is nothing to load.
GGUF = [
    ("org/tiny-gguf/tiny-Q8_0.gguf", {}, None),
    ("org/tiny-gguf/more/tiny-Q8_0_L.gguf", {}, None),
    ("org/tiny-gguf", {"gguf_file": "tiny-Q8_0.gguf", "revision": "main"}, None),
    ("org/tiny-gguf:q8_0", {}, None),
    ("org/gated/tiny-Q8_0.gguf", {}, "org/gated/tiny-Q8_0.gguf: there is no such file here, and the Hub does not give"),
    ("org/gated/tiny-Q8_0.gguf", {"token": "hf_owner"}, None),
    ("org/tiny-gguf/tiny-Q8_0.gguf", {"local_files_only": True}, None),
    ("org/tiny-gguf:Q8_0", {"local_files_only": True}, None),
    ("org/tiny-gguf:Q2_K", {}, "one file with Q2_K in its name is needed, and the repository has none. Give the file"),
    ("org/parts:Q8_0", {}, "the repository has a-Q8_0.gguf, b-Q8_0.gguf. Give the file: org/parts/NAME.gguf."),
    ("org/tiny-gguf/other.gguf", {}, "org/tiny-gguf/other.gguf: there is no such file here, and the Hub does not give"),
    ("org/other/tiny.gguf", {}, "org/other/tiny.gguf: there is no such file here, and the Hub does not give it"),
    (
        "org/parts/a-Q8_0.gguf",
        {"local_files_only": True, "revision": "no-such"},
        "org/parts/a-Q8_0.gguf: there is no such file here, and the Hub",
    ),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    return directory


@pytest.fixture(scope="module")
def hub(backbone_path, tmp_path_factory):
    storage = Storage({OWNER: User("owner", ("org",)), STRANGER: User("stranger")})
    backbone = {path.name: path.read_bytes() for path in Path(backbone_path()).iterdir()}
    storage.put("base/tiny-llama", {**backbone, "README.md": b"---\nlicense: llama2\nlanguage:\n- zh\n---\n# Tiny\n"})
    storage.create("org/full", full=True)
    content = ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()
    storage.put("org/tiny-gguf", {"tiny-Q8_0.gguf": content, "more/tiny-Q8_0_L.gguf": content})
    storage.put("org/parts", {"a-Q8_0.gguf": content, "b-Q8_0.gguf": content})
    storage.put("org/gated", {"tiny-Q8_0.gguf": content}, gated=True)
    running = RunningHub(storage)
    running.start()
    yield running
    running.stop()


def started(script: str, *arguments: object, env, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as printed:
        command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
        return subprocess.Popen(command, env=env, stdout=printed, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def pushed(hub, workplace):
    """What the pushes gave, from Python and by the command; the Hub breaks down amid one, and comes back."""
    log = workplace / "push.log"
    hub.break_at("POST", f"/api/models/{HALF_WAY}/commit/main")
    process = started("push.py", workplace, env=hub.environment(workplace / "pusher", HF_TOKEN=OWNER), log=log)
    try:
        while hub.running and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, log.read_text()
        repository = hub.storage.repositories[HALF_WAY]
        # The weights are there, and nothing refers to them: no repository with half a model.
        assert (len(repository.commits), len(repository.objects)) == (1, 1)
        hub.start()
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    repository = hub.storage.repositories[REPO]
    repository.references["refs/tags/v1"] = repository.references["refs/heads/main"]
    return json.loads((workplace / "pushed.json").read_text())


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
def outcomes(hub, workplace, home, pushed):
    """What one process got from the Hub, and what when the Hub was gone."""
    repository = hub.storage.repositories[REPO]

    def put(name: str, path: str, change) -> None:
        """What was pushed, with one thing changed, and code beside it."""
        files = {path: file.content for path, file in repository.files().items()}
        files |= {path: json.dumps(change(json.loads(files[path]))).encode(), "remote_code.py": MARKING.encode()}
        hub.storage.put(f"evil/{name}", files)

    def module(index: int, **changes):
        return lambda modules: [{**one, **changes} if one["idx"] == index else one for one in modules]

    put("repetitions", "0_ReBAModule/sentence_bert_config.json", lambda config: {**config, "repetitions": 10**9})
    put("climbing", "modules.json", module(0, path="../../x"))
    put("installed-class", "modules.json", module(1, type="planted_module.Thing"))
    put("remote-class", "modules.json", module(1, type="remote_code.Thing"))
    cases = {
        "plain": {"model_name_or_path": REPO},
        "branch": {"model_name_or_path": REPO, "revision": "three-copies"},
        "tag": {"model_name_or_path": REPO, "revision": "v1"},
        "commit": {"model_name_or_path": REPO, "revision": repository.resolve("three-copies")},
        "pull request": {"model_name_or_path": REPO, "revision": "refs/pr/1"},
        "no such revision": {"model_name_or_path": REPO, "revision": "no-such"},
        # Before it is in the cache, which would serve it.
        "private, a stranger": {"model_name_or_path": "org/secret", "token": STRANGER},
        "private": {"model_name_or_path": "org/secret", "token": OWNER},
        "by command": {"model_name_or_path": BUILT},
        "by command, branch": {"model_name_or_path": BUILT, "revision": "three-copies"},
        "by command, pull request": {"model_name_or_path": BUILT, "revision": "refs/pr/1"},
        "by command, private": {"model_name_or_path": "org/built-secret", "token": OWNER},
        "by command, after the breakdown": {"model_name_or_path": HALF_WAY},
        **{name: {"model_name_or_path": name} for name in hub.storage.repositories if name.startswith("evil/")},
        **{f"GGUF {number}": [reference, given] for number, (reference, given, _) in enumerate(GGUF)},
    }
    offline = {
        "local files only": {"model_name_or_path": REPO, "local_files_only": True},
        "local files only, branch": {"model_name_or_path": REPO, "revision": "three-copies", "local_files_only": True},
    }
    log, env = workplace / "load.log", hub.environment(home, MARK=str(home / "mark"))
    process = started("load.py", workplace, json.dumps(cases), json.dumps(offline), env=env, log=log)
    try:
        while not (workplace / "loaded.json").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        hub.stop()
        (workplace / "the Hub is gone").touch()
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    return json.loads((workplace / "loaded.json").read_text()) | json.loads((workplace / "offline.json").read_text())


class TestPush:
    """``model.push_to_hub``."""

    def test_a_new_repository_a_branch_and_a_pull_request(self, pushed, hub):
        repository = hub.storage.repositories[REPO]
        assert pushed[0]["new"]["url"].startswith(f"{hub.endpoint}/{REPO}/commit/")
        assert pushed[0]["pull request"]["url"] == f"{hub.endpoint}/{REPO}/discussions/1"
        assert repository.files()["0_ReBAModule/model.safetensors"].lfs
        assert repository.resolve("main") == repository.resolve("v1")
        assert "**ReBA-3**" in repository.files("three-copies")["README.md"].content.decode()
        for revision, kind in (("main", "ReBAModule"), ("refs/pr/1", "EchoModule")):
            modules = json.loads(repository.files(revision)["modules.json"].content)
            assert modules[0]["type"] == f"st_reba.modules.{kind}"
        assert hub.storage.repositories["org/secret"].private

    def test_the_card(self, pushed, hub):
        card = hub.storage.repositories[REPO].files()["README.md"].content.decode()
        for expected in (
            "base_model: base/tiny-llama",
            "license: llama2",
            "language:\n- zh",
            f'SentenceTransformer("{REPO}")',
            "[base/tiny-llama](https://huggingface.co/base/tiny-llama)",
        ):
            assert expected in card, expected


class TestPushCommand:
    """`st-reba push`, of what `st-reba build` made."""

    @pytest.mark.parametrize(
        ("case", "revision", "output"),
        [
            ("new", "main", 'Load it with: import st_reba; SentenceTransformer("org/built")'),
            ("again", "main", "Pushed "),
            ("branch", "three-copies", 'SentenceTransformer("org/built", revision="three-copies")'),
            ("pull request", "refs/pr/1", "/org/built/discussions/1"),
        ],
    )
    def test_where_it_goes(self, case, revision, output, pushed, hub, workplace):
        outcome = pushed[1][case]
        assert outcome["code"] == 0, outcome
        assert output in outcome["output"]
        assert f"{hub.endpoint}/{BUILT}/" in outcome["output"]
        name = {"three-copies": "built-three", "refs/pr/1": "built-echo"}.get(revision, "built-two")
        directory = workplace / "built" / name
        there = hub.storage.repositories[BUILT].files(revision)
        local = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        # Nothing is deleted: where the model before was of another class, its backbone stays beside this one's.
        before = {path for path in there if path.startswith("0_ReBAModule/")}
        assert set(there) - {".gitattributes"} - before == set(local) - before
        for path in set(local) - {"README.md"}:
            assert there[path].content == local[path].read_bytes(), path
        assert f'SentenceTransformer("{BUILT}")' in there["README.md"].content.decode()

    def test_a_push_is_one_commit(self, pushed, hub):
        """And none, where nothing has changed."""
        repository = hub.storage.repositories[BUILT]
        main, branch = (repository.commits[repository.resolve(name)] for name in ("main", "three-copies"))
        assert repository.commits[main.parent].message == "initial commit"
        assert branch.parent == main.sha
        assert [main.message, branch.message] == ["Add built, a SentenceTransformer", "Three copies"]

    def test_private(self, pushed, hub):
        assert pushed[1]["private"]["code"] == 0, pushed[1]["private"]
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
            ("large files refused", "A large file was not taken (Storage limit reached). What was in org/full is unch"),
            ("half way", "gives no answer (Server disconnected without sending a response.)."),
        ],
    )
    def test_is_refused_in_a_sentence(self, case, message, pushed):
        outcome = pushed[1][case]
        assert (outcome["code"], outcome["trace"]) == (1, None), outcome
        assert outcome["output"].count("Error: ") == 1
        assert message in outcome["output"]

    def test_nothing_is_half_written(self, pushed, hub):
        assert {"org/built-other", "somebody/new"}.isdisjoint(hub.storage.repositories)
        assert list(hub.storage.repositories["org/full"].files()) == [".gitattributes"]
        assert pushed[1]["half way, again"]["code"] == 0, pushed[1]["half way, again"]


@pytest.mark.parametrize(
    ("case", "module", "model"),
    [
        ("plain", "ReBAModule", "two"),
        ("tag", "ReBAModule", "two"),
        ("branch", "ReBAModule", "three"),
        ("commit", "ReBAModule", "three"),
        ("pull request", "EchoModule", "echo"),
        ("private", "CausalTransformer", "classical"),
        ("by command", "ReBAModule", "built-two"),
        ("by command, branch", "ReBAModule", "built-three"),
        ("by command, pull request", "EchoModule", "built-echo"),
        ("by command, private", "ReBAModule", "built-two"),
        ("by command, after the breakdown", "ReBAModule", "built-two"),
        ("local files only", "ReBAModule", "two"),
        pytest.param("local files only, branch", "ReBAModule", "three", marks=SPEAKS_ON),
    ],
)
def test_it_loads_bit_for_bit(case, module, model, outcomes, workplace):
    assert outcomes[case].get("module") == module, outcomes[case]
    expected = np.load(workplace / f"{model}.npy")
    assert np.array_equal(np.array(outcomes[case]["embeddings"], dtype=expected.dtype), expected)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no such revision", "Revision Not Found|not a valid git identifier"),
        ("private, a stranger", "404 Client Error|not a valid model identifier"),
        ("evil/repetitions", "repetitions=1000000000: give a whole number from 1 to 1024"),
        ("evil/climbing", "path '../../x'"),
        ("evil/installed-class", "trust_remote_code=True"),
        ("evil/remote-class", "trust_remote_code=True"),
    ],
)
def test_what_is_refused(case, message, outcomes):
    assert "evil" not in case or outcomes[case].get("error") == "ValueError", outcomes[case]
    assert re.search(message, outcomes[case]["message"]), outcomes[case]


def test_every_spelling_of_a_gguf_file(outcomes, home, tmp_path):
    ggufs.original().save_pretrained(tmp_path)
    ggufs.tokenizer().save_pretrained(tmp_path)
    expected = pipeline(ReBAModule(str(tmp_path))).encode(TEXTS)
    for number, (reference, _, message) in enumerate(GGUF):
        outcome = outcomes[f"GGUF {number}"]
        if message is None:
            np.testing.assert_allclose(outcome["embeddings"], expected, rtol=1e-5, atol=1e-6)
        else:
            assert message in outcome["message"], reference
    # Kept below the client's home: one for all spellings of one content.
    assert len(list(home.glob("assets/st_reba/gguf/*/float32-*/*"))) == 1


def test_nothing_was_imported_and_nothing_is_half_written(outcomes, home, workplace):
    assert not (home / "mark").exists()
    assert not list(home.glob("modules/**/remote_code.py"))
    assert not list(home.rglob("*.incomplete"))
    assert {path.name for path in workplace.iterdir() if path.suffix != ".npy"} == {
        "texts.json", "push.log", "load.log", "pushed.json", "loaded.json", "offline.json", "pusher", "loader",
        "the Hub is gone", "built",
    }  # fmt: skip
