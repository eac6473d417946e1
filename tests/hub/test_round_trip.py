"""What a user does with the Hub, over HTTP: push, encode to a data set, load, and load again when the Hub is gone.

Hub addresses and offline mode are read at import, so all of it happens in one process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow.parquet as pq
import pytest
from packaging.version import Version

from st_reba import ReBAModule

from .. import ggufs
from ..backbones import TEXTS
from ..conftest import pipeline
from .server import Repository, RunningHub

BUILT, VECTORS = "org/built", "org/vectors"
#: Python that leaves a mark when it is imported.
MARKING = "import os, pathlib\npathlib.Path(os.environ['MARK']).touch()\nclass Thing: pass\n"

#: References and model_kwargs, and what is said where there is nothing to load.
GGUF = [
    ("org/tiny-gguf/tiny-Q8_0.gguf", {}, None),
    ("org/tiny-gguf", {"gguf_file": "tiny-Q8_0.gguf", "revision": "main"}, None),
    ("org/tiny-gguf:q8_0", {}, None),
    ("org/secret/tiny-Q8_0.gguf", {}, "org/secret/tiny-Q8_0.gguf: there is no such file, and it cannot be do"),
    ("org/secret/tiny-Q8_0.gguf", {"token": "hf_owner"}, None),
    ("org/tiny-gguf:Q8_0", {"local_files_only": True}, None),
    ("org/tiny-gguf:Q2_K", {}, "one file with Q2_K in its name is needed, and the repository has none. Give the file"),
    ("org/parts:Q8_0", {}, "the repository has a-Q8_0.gguf, b-Q8_0.gguf. Give the file: org/parts/NAME.gguf."),
    ("org/parts/a-Q8_0.gguf", {"local_files_only": True, "revision": "no-such"}, "a-Q8_0.gguf: there is no such file"),
]
#: What is loaded, the class of its module, and what was built of it.
LOADED = {
    "made in Python": ({"model_name_or_path": "org/made"}, "CausalTransformer", "made"),
    "new": ({"model_name_or_path": BUILT}, "ReBAModule", "two"),
    "adapter": ({"model_name_or_path": "org/adapted"}, "ReBAModule", "three"),
    "branch": ({"model_name_or_path": BUILT, "revision": "three-copies"}, "ReBAModule", "three"),
    "pull request": ({"model_name_or_path": BUILT, "revision": "refs/pr/1"}, "EchoModule", "echo"),
    "private": ({"model_name_or_path": "org/built-secret", "token": "hf_owner"}, "ReBAModule", "two"),
}
HERE = {"model_name_or_path": BUILT, "local_files_only": True}
OFFLINE = {"offline": (HERE, "ReBAModule", "two")}
#: Classes that somebody has named after the push: one that is installed, and one that lies beside the model.
EVIL = {"installed": "planted_module.Thing", "remote": "remote_code.Thing"}


@pytest.fixture(scope="module")
def hub(backbone_path, tmp_path_factory):
    running = RunningHub({"hf_owner": ("owner", "org"), "hf_stranger": ("stranger",)})
    backbone = {path.name: path.read_bytes() for path in Path(backbone_path()).iterdir()}
    running.put("base/tiny-llama", {**backbone, "README.md": b"---\nlicense: llama2\nlanguage:\n- zh\n---\n# Tiny\n"})
    content = ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()
    running.put("org/tiny-gguf", {"tiny-Q8_0.gguf": content})
    running.put("org/parts", {"a-Q8_0.gguf": content, "b-Q8_0.gguf": content})
    running.put("org/secret", {"tiny-Q8_0.gguf": content}, private=True)
    running.repositories[VECTORS] = Repository(VECTORS)
    with running:
        yield running


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    (directory / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    # Beside the client's home, and on its path.
    (directory / "home" / "planted").mkdir(parents=True)
    (directory / "home" / "planted" / "planted_module.py").write_text(MARKING)
    return directory


@pytest.fixture(scope="module")
def outcomes(hub, workplace):
    """What one process gave to the Hub and got from it."""
    home, log = workplace / "home", workplace / "log"
    env = hub.environment(home, HF_TOKEN="hf_owner", MARK=str(home / "mark"))
    with log.open("wb") as printed:
        command = [sys.executable, str(Path(__file__).with_name("somebody.py")), str(workplace)]
        process = subprocess.Popen(command, env=env, stdout=printed, stderr=subprocess.STDOUT)

    def until(name: str) -> None:
        while not (workplace / name).exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)

    try:
        until("pushed.json")
        for name, kind in EVIL.items():
            files = hub.repositories[BUILT].files()
            first, second, *more = json.loads(files["modules.json"])
            parts = json.dumps([first, {**second, "type": kind}, *more]).encode()
            hub.put(f"evil/{name}", {**files, "modules.json": parts, "remote_code.py": MARKING.encode()})
        cases = {
            **{case: arguments for case, (arguments, *_) in LOADED.items()},
            **{name: {"model_name_or_path": f"evil/{name}"} for name in EVIL},
            **{str(number): [reference, given] for number, (reference, given, _) in enumerate(GGUF)},
        }
        # All of it at once: the other process waits for it.
        (workplace / "unread").write_text(json.dumps(cases))
        (workplace / "unread").rename(workplace / "cases.json")
        until("loaded.json")
        hub.stop()
        (workplace / "unread").write_text(json.dumps({case: given for case, (given, *_) in OFFLINE.items()}))
        (workplace / "unread").rename(workplace / "offline.json")
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    found = [json.loads((workplace / f"{name}.json").read_text()) for name in ("gone", "loaded", "read")]
    return {"commands": found[0], "loaded": found[1] | found[2]}


def test_where_a_push_goes(outcomes, hub, workplace):
    """One commit, or none if nothing has changed."""
    for case, revision, built, output in (
        ("new", "main", "two", "Load it with: import st_reba; from sentence_transformers import SentenceTransformer; "),
        ("again", "main", "two", "Pushed "),
        ("branch", "three-copies", "three", 'SentenceTransformer("org/built", revision="three-copies")'),
        ("pull request", "refs/pr/1", "echo", "/org/built/discussions/1"),
    ):
        outcome = outcomes["commands"][case]
        assert outcome["code"] == 0, outcome
        assert output in outcome["output"]
        assert f"{hub.endpoint}/{BUILT}/" in outcome["output"]
        directory, there = workplace / "built" / built, hub.repositories[BUILT].files(revision)
        local = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        assert set(local) <= set(there)
        for path in set(local) - {"README.md"}:
            assert there[path] == local[path].read_bytes(), path
    repository = hub.repositories[BUILT]
    main, branch = (repository.commits[repository.resolve(name)] for name in ("main", "three-copies"))
    assert repository.commits[main.parent].message == "initial commit"
    assert branch.parent == main.sha
    assert [main.message, branch.message] == ["Add built, a SentenceTransformer", "Three copies"]
    assert (hub.repositories["org/built-secret"].private, repository.private) == (True, False)
    for name in (BUILT, "org/made"):
        card = hub.repositories[name].files()["README.md"].decode()
        base = "[base/tiny-llama](https://huggingface.co/base/tiny-llama)"
        for expected in ("base_model: base/tiny-llama", "license: llama2", "language:\n- zh", f'("{name}")', base):
            assert expected in card, expected


def refused(outcome):
    """The sentence in which a command is refused, with what was printed before."""
    assert (outcome["code"], outcome["trace"], outcome["output"].count("Error: ")) == (1, None, 1), outcome
    return outcome["output"]


NOT_THERE = "Error: The model {}: there is no such directory, and it cannot be downloaded from the Hub ({}"


def test_a_command_is_refused_in_a_sentence(outcomes, hub):
    for case, message in {
        "private over public": "org/built is public. Make it private on the Hub first,",
        "wrong token": "(401: Invalid credentials in Authorization header). Log in with",
        "a stranger": "The Hub refuses to take org/built (403: You don't have write access to org/built). Use a token",
        "a file again": f"hf://datasets/{VECTORS}/a.npy exists: choose another --out, or replace it with --overwrite.",
        "nowhere": "--out hf://datasets/org/none/a.npy: the Hub has no such repository, or you may not see it. Cre",
        "a typing error": NOT_THERE.format("org/modle", ""),
    }.items():
        assert message in refused(outcomes["commands"][case])
    assert "org/built-other" not in hub.repositories
    assert outcomes["commands"]["a typing error"]["output"].endswith("Check the name, or give a directory.")


@pytest.mark.skipif(Version(huggingface_hub.__version__) < Version("1.27"), reason="it sends by a closed client")
def test_a_hub_that_does_not_answer(outcomes, workplace):
    message = NOT_THERE.format("org/model", "it does not answer, and the model is not in the cache). Check")
    assert message in refused(outcomes["commands"]["no Hub"])
    # One file is asked for, six times, and not each file of the model.
    assert (workplace / "log").read_text().count("Retrying in") == 5


def test_an_adapter_names_the_model_that_it_is_for(outcomes, hub):
    files = hub.repositories["org/adapted"].files()
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == BUILT
    assert hub.repositories[BUILT].resolve(config["revision"]) == hub.repositories[BUILT].resolve("three-copies")
    assert "0_ReBAModule/model.safetensors" not in files


def test_encode_writes_to_a_data_set(outcomes, hub, workplace):
    files = hub.repositories[VECTORS].files()
    shards = [f"shards/part-0000000{number}.parquet" for number in range(2)]
    assert sorted(files) == [".gitattributes", "a.npy", "deep/a.parquet", "shards/_SUCCESS", *shards]
    expected = np.load(workplace / "two.npy")
    tables = [pq.read_table(BytesIO(files[name]))["embedding"].to_pylist() for name in ("deep/a.parquet", *shards)]
    for vectors in (np.load(BytesIO(files["a.npy"])), tables[0], [*tables[1], *tables[2]]):
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_what_is_loaded_is_what_was_pushed_bit_for_bit(outcomes, workplace):
    for case, (_, module, built) in {**LOADED, **OFFLINE}.items():
        outcome, expected = outcomes["loaded"][case], np.load(workplace / f"{built}.npy")
        assert outcome.get("module") == module, (case, outcome)
        assert np.array_equal(np.array(outcome["embeddings"], dtype=expected.dtype), expected), case


def test_what_is_evil_is_refused_and_nothing_is_imported(outcomes, workplace):
    for name in EVIL:
        outcome = outcomes["loaded"][name]
        assert outcome.get("error") == "ValueError", outcome
        assert "trust_remote_code=True" in outcome["message"]
    assert not (workplace / "home" / "mark").exists()
    assert not list((workplace / "home").glob("modules/**/remote_code.py"))


def test_every_spelling_of_a_gguf_file(outcomes, workplace, tmp_path):
    ggufs.original().save_pretrained(tmp_path)
    ggufs.tokenizer().save_pretrained(tmp_path)
    expected = pipeline(ReBAModule(str(tmp_path))).encode(TEXTS)
    for number, (reference, _, message) in enumerate(GGUF):
        outcome = outcomes["loaded"][str(number)]
        if message is None:
            np.testing.assert_allclose(outcome["embeddings"], expected, rtol=1e-5, atol=1e-6)
        else:
            assert message in outcome["message"], reference
    # Kept below the client's home: one for all spellings of one content.
    assert len(list((workplace / "home").glob("assets/st_reba/gguf/*/float32-*/*"))) == 1
    assert not list((workplace / "home").rglob("*.incomplete"))
