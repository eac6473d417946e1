"""What a user does with the Hub: push from one process, load in another, over HTTP.

Hub addresses and offline mode are read at import, so everything happens in processes of their own: one that pushes, one
that loads, and goes on when the Hub is gone.
"""

from __future__ import annotations

import json
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
from .server import RunningHub

#: huggingface-hub 1 closes its client where the server is gone, and asks again with that one.
SPEAKS_ON = pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("2"), reason="huggingface-hub 1 asks again with a closed client"
)
BUILT, HALF_WAY = "org/built", "org/half-way"


#: References and model_kwargs, and what is said where there is nothing to load.
GGUF = [
    ("org/tiny-gguf/tiny-Q8_0.gguf", {}, None),
    ("org/tiny-gguf/more/tiny-Q8_0_L.gguf", {}, None),
    ("org/tiny-gguf", {"gguf_file": "tiny-Q8_0.gguf", "revision": "main"}, None),
    ("org/tiny-gguf:q8_0", {}, None),
    ("org/gated/tiny-Q8_0.gguf", {}, "org/gated/tiny-Q8_0.gguf: there is no such file here, and the Hub does not give"),
    ("org/gated/tiny-Q8_0.gguf", {"token": "hf_owner"}, None),
    ("org/tiny-gguf:Q8_0", {"local_files_only": True}, None),
    ("org/tiny-gguf:Q2_K", {}, "one file with Q2_K in its name is needed, and the repository has none. Give the file"),
    ("org/parts:Q8_0", {}, "the repository has a-Q8_0.gguf, b-Q8_0.gguf. Give the file: org/parts/NAME.gguf."),
    ("org/other/tiny.gguf", {}, "org/other/tiny.gguf: there is no such file here, and the Hub does not give it"),
    ("org/parts/a-Q8_0.gguf", {"local_files_only": True, "revision": "no-such"}, "a-Q8_0.gguf: there is no such file"),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    return directory


@pytest.fixture(scope="module")
def hub(backbone_path, tmp_path_factory):
    running = RunningHub({"hf_owner": ("owner", "org"), "hf_stranger": ("stranger",)})
    backbone = {path.name: path.read_bytes() for path in Path(backbone_path()).iterdir()}
    running.put("base/tiny-llama", {**backbone, "README.md": b"---\nlicense: llama2\nlanguage:\n- zh\n---\n# Tiny\n"})
    content = ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()
    running.put("org/tiny-gguf", {"tiny-Q8_0.gguf": content, "more/tiny-Q8_0_L.gguf": content})
    running.put("org/parts", {"a-Q8_0.gguf": content, "b-Q8_0.gguf": content})
    running.put("org/gated", {"tiny-Q8_0.gguf": content}, gated=True)
    running.start()
    yield running
    running.stop()


def somebody(workplace: Path, *arguments: str, env) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("somebody.py")
    with (workplace / f"{arguments[0]}.log").open("wb") as printed:
        command = [sys.executable, str(script), str(workplace), *arguments]
        return subprocess.Popen(command, env=env, stdout=printed, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def pushed(hub, workplace):
    """What the pushes gave; the Hub breaks down amid one, and comes back."""
    hub.break_at("POST", f"/api/models/{HALF_WAY}/commit/main")
    process = somebody(workplace, "push", env=hub.environment(workplace / "pusher", HF_TOKEN="hf_owner"))
    try:
        while hub.running and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, (workplace / "push.log").read_text()
        repository = hub.repositories[HALF_WAY]
        # The weights are there, and nothing refers to them: no repository with half a model.
        assert (len(repository.commits), len(repository.objects)) == (1, 1)
        hub.start()
        assert process.wait(timeout=300) == 0, (workplace / "push.log").read_text()
    finally:
        process.kill()
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

    def put(name: str, path: str, change) -> None:
        """What was pushed, with one thing changed, and code beside it."""
        files = dict(hub.repositories[BUILT].files())
        files |= {path: json.dumps(change(json.loads(files[path]))).encode(), "remote_code.py": MARKING.encode()}
        hub.put(f"evil/{name}", files)

    def module(index: int, **changes):
        return lambda modules: [{**one, **changes} if one["idx"] == index else one for one in modules]

    put("repetitions", "0_ReBAModule/sentence_bert_config.json", lambda config: {**config, "repetitions": 10**9})
    put("climbing", "modules.json", module(0, path="../../x"))
    put("installed-class", "modules.json", module(1, type="planted_module.Thing"))
    put("remote-class", "modules.json", module(1, type="remote_code.Thing"))
    cases = {
        "made in Python": {"model_name_or_path": "org/made"},
        "new": {"model_name_or_path": BUILT},
        "branch": {"model_name_or_path": BUILT, "revision": "three-copies"},
        "pull request": {"model_name_or_path": BUILT, "revision": "refs/pr/1"},
        "private": {"model_name_or_path": "org/built-secret", "token": "hf_owner"},
        "after the breakdown": {"model_name_or_path": HALF_WAY},
        **{name: {"model_name_or_path": name} for name in hub.repositories if name.startswith("evil/")},
        **{f"GGUF {number}": [reference, given] for number, (reference, given, _) in enumerate(GGUF)},
    }
    offline = {
        "local files only": {"model_name_or_path": BUILT, "local_files_only": True},
        "local files only, branch": {"model_name_or_path": BUILT, "revision": "three-copies", "local_files_only": True},
    }
    env = hub.environment(home, MARK=str(home / "mark"))
    process = somebody(workplace, "load", json.dumps(cases), json.dumps(offline), env=env)
    try:
        while not (workplace / "loaded.json").exists():
            assert process.poll() is None, (workplace / "load.log").read_text()
            time.sleep(0.02)
        hub.stop()
        (workplace / "the Hub is gone").touch()
        assert process.wait(timeout=300) == 0, (workplace / "load.log").read_text()
    finally:
        process.kill()
    return json.loads((workplace / "loaded.json").read_text()) | json.loads((workplace / "offline.json").read_text())


@pytest.mark.parametrize(
    ("case", "revision", "built", "output"),
    [
        ("new", "main", "two", 'Load it with: import st_reba; SentenceTransformer("org/built")'),
        ("again", "main", "two", "Pushed "),
        ("branch", "three-copies", "three", 'SentenceTransformer("org/built", revision="three-copies")'),
        ("pull request", "refs/pr/1", "echo", "/org/built/discussions/1"),
    ],
)
def test_where_a_push_goes(case, revision, built, output, pushed, hub, workplace):
    outcome = pushed[case]
    assert outcome["code"] == 0, outcome
    assert output in outcome["output"]
    assert f"{hub.endpoint}/{BUILT}/" in outcome["output"]
    directory, there = workplace / "built" / built, hub.repositories[BUILT].files(revision)
    local = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    # Nothing is deleted: where the model before was of another class, its backbone stays beside this one's.
    before = {path for path in there if path.startswith("0_ReBAModule/")}
    assert set(there) - {".gitattributes"} - before == set(local) - before
    for path in set(local) - {"README.md"}:
        assert there[path] == local[path].read_bytes(), path


@pytest.mark.parametrize("name", [BUILT, "org/made"])
def test_the_card_says_where_the_model_and_its_base_lie(name, pushed, hub):
    card = hub.repositories[name].files()["README.md"].decode()
    base = "[base/tiny-llama](https://huggingface.co/base/tiny-llama)"
    for expected in ("base_model: base/tiny-llama", "license: llama2", "language:\n- zh", f'("{name}")', base):
        assert expected in card, expected


def test_a_push_is_one_commit_or_none_where_nothing_has_changed_and_private_if_asked(pushed, hub):
    repository = hub.repositories[BUILT]
    main, branch = (repository.commits[repository.resolve(name)] for name in ("main", "three-copies"))
    assert repository.commits[main.parent].message == "initial commit"
    assert branch.parent == main.sha
    assert [main.message, branch.message] == ["Add built, a SentenceTransformer", "Three copies"]
    assert pushed["private"]["code"] == 0, pushed["private"]
    assert (hub.repositories["org/built-secret"].private, repository.private) == (True, False)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("private over public", "org/built is there and public. Make it private on the Hub first,"),
        ("wrong token", "does not accept the token (Invalid credentials in Authorization header). Log in with"),
        ("a stranger", "The token may not write to org/built (You don't have write access to org/built)."),
        ("half way", "gives no answer (Server disconnected without sending a response.)."),
    ],
)
def test_a_push_is_refused_in_a_sentence(case, message, pushed):
    outcome = pushed[case]
    assert (outcome["code"], outcome["trace"]) == (1, None), outcome
    assert outcome["output"].count("Error: ") == 1
    assert message in outcome["output"]


def test_nothing_is_half_pushed(pushed, hub):
    assert "org/built-other" not in hub.repositories
    assert pushed["half way, again"]["code"] == 0, pushed["half way, again"]


@pytest.mark.parametrize(
    ("case", "module", "built"),
    [
        ("made in Python", "CausalTransformer", "made"),
        ("new", "ReBAModule", "two"),
        ("branch", "ReBAModule", "three"),
        ("pull request", "EchoModule", "echo"),
        ("private", "ReBAModule", "two"),
        ("after the breakdown", "ReBAModule", "two"),
        ("local files only", "ReBAModule", "two"),
        pytest.param("local files only, branch", "ReBAModule", "three", marks=SPEAKS_ON),
    ],
)
def test_it_loads_bit_for_bit(case, module, built, outcomes, workplace):
    assert outcomes[case].get("module") == module, outcomes[case]
    expected = np.load(workplace / f"{built}.npy")
    assert np.array_equal(np.array(outcomes[case]["embeddings"], dtype=expected.dtype), expected)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("repetitions", "repetitions=1000000000: give a whole number from 1 to 1024"),
        ("climbing", "path '../../x'"),
        ("installed-class", "trust_remote_code=True"),
        ("remote-class", "trust_remote_code=True"),
    ],
)
def test_what_is_evil_is_refused(case, message, outcomes, home):
    outcome = outcomes[f"evil/{case}"]
    assert outcome.get("error") == "ValueError", outcome
    assert message in outcome["message"]
    # Nothing was imported.
    assert not (home / "mark").exists()
    assert not list(home.glob("modules/**/remote_code.py"))


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
    assert not list(home.rglob("*.incomplete"))
