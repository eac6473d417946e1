"""Every command as it is typed after an installation, with what it wrote looked at.

What a command prints and refuses is in tests/cli, where it runs in the test's own process.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from typer.main import get_command

from st_reba import CausalTransformer, LayerwiseAutoencoder, ReBAModule
from st_reba.compare.results import Comparison
from st_reba.data.demo import demo_pairs
from st_reba.encode import destination_of
from st_reba.recipes import find
from st_reba_cli import app

from ..backbones import DEMO_MODEL
from ..conftest import pipeline
from ..hub.server import RunningHub
from .installed import Script

TEXTS = [
    "a cat sat", "the dog ran", "ice and snow", "it is warm", "a red car", "the old train", "we like tea", "they eat",
    "a blue bird", "the river", "stones are hard", "he sings",
]  # fmt: skip


@pytest.fixture
def desk(tmp_path, roomy_path, monkeypatch) -> None:
    """A directory with models, texts, pairs and a configuration; it is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("lm").symlink_to(roomy_path)
    pipeline(ReBAModule("lm")).save_pretrained("saved", create_model_card=False)
    pairs = [f"{TEXTS[n % 12]} {n}\t{TEXTS[5 * n % 11]} {n}\t{n % 5}" for n in range(24)]
    for name, rows in {"texts.txt": TEXTS, "pairs.tsv": pairs}.items():
        Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    arguments = {"max_steps": 1, "per_device_train_batch_size": 2}
    freeze = {"model": "lm", "pairs": "pairs.tsv", "bottlenecks": [8, 8], "arguments": arguments}
    Path("freeze.yaml").write_text(json.dumps(freeze), encoding="utf-8")  # JSON is YAML.


def typed(script: Script, line: str) -> str:
    """What a command says that has to end well."""
    done = script.run(*shlex.split(line), cwd=Path.cwd())
    assert (done.code, "Traceback" in done.output) == (0, False), done.output
    return done.lines


def json_in(told: str, schema: str) -> dict[str, Any]:
    """The object in what a command printed, on whichever stream."""
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(told, told.index('{\n "schema"'))
    assert found.pop("schema") == f"st-reba/{schema}/1"
    return found


def loaded(name: str) -> SentenceTransformer:
    return SentenceTransformer(name, device="cpu")


def encoded(name: str) -> np.ndarray:
    """What a saved model gives for the texts, loaded here; or what was encoded."""
    vectors: np.ndarray = np.load(name) if name.endswith(".npy") else loaded(name).encode(TEXTS)
    assert np.isfinite(vectors).all()
    return vectors


def same(first: str, second: str) -> bool:
    return np.allclose(encoded(first), encoded(second), atol=1e-5)


def files_of(name: str) -> dict[Path, bytes]:
    return {path.relative_to(name): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}


ENCODE = "encode saved texts.txt --out"

#: What is typed, what is said in the end, and what then holds.
CASES: dict[str, tuple[list[str], str, Callable[[], object]]] = {
    "encode": ([f"{ENCODE} a.npy"], "Wrote 12 vectors of 12 texts to a.npy.", lambda: same("a.npy", "saved")),
    "encode, on Ray": ([f"{ENCODE} a.npy --engine ray --device cpu"], "Wrote 12", lambda: same("a.npy", "saved")),
    "export, plain": (
        ["build --model lm --recipe classical --out built", "export --model built --plain plain"], "engine that has",
        lambda: "st_reba" not in Path("plain/modules.json").read_text() and same("plain", "built")),
    "export, static": (
        ["export --model lm --static table --fit-texts texts.txt --dimensions 8"], "Wrote table. Load it with",
        lambda: isinstance(loaded("table")[0], StaticEmbedding) and encoded("table").shape == (12, 8)),
    "train": (
        ["train freeze --config freeze.yaml --out run"], 'SentenceTransformer; SentenceTransformer("run/model")',
        lambda: any(isinstance(module, LayerwiseAutoencoder) for module in loaded("run/model"))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_command(name, script, desk):
    if "Ray" in name and find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-clients has it")
    lines, said, holds = CASES[name]
    for line in lines:
        told = typed(script, line)
    assert said in told
    assert holds()


def test_build_tells_what_it_wrote_on_stdout_and_all_else_on_stderr(script, desk):
    """In an interpreter that has nothing imported, as a shell starts it."""
    line = [script.path, *shlex.split("build --model lm --recipe reba-2 --out m --json")]
    done = subprocess.run(line, env=script.environment(), capture_output=True, text=True, check=True)
    assert json_in(done.stdout, "build") == {
        "path": "m", "family": "SentenceTransformer", "recipe": "reba-2",
        "load": 'import st_reba; from sentence_transformers import SentenceTransformer; SentenceTransformer("m")',
    }  # fmt: skip
    assert "Load it with" in done.stderr
    expected = pipeline(ReBAModule("lm")).encode(TEXTS, normalize_embeddings=True)
    assert np.allclose(encoded("m"), expected, atol=1e-5)


def test_the_printed_command_builds_what_was_scored(script, desk):
    """And what ``--save-best`` writes: layer, words, shares, and statistics of all texts.

    The labels are those of the second wording after a lower layer, so that there is something to choose; the columns
    have names of their own.
    """
    texts = [f"{TEXTS[n % 12]} {n}" for n in range(140)]
    topic = find("topic")
    own = replace(topic, layer=2, wording=topic.row.wordings[1], fit_texts=tuple(texts))
    vectors = own.model(CausalTransformer("lm")).encode(texts, normalize_embeddings=True)
    scores = (vectors[:70] * vectors[70:]).sum(axis=1)
    rows = [f"{first}\t{second}\t{score}" for first, second, score in zip(texts, texts[70:], scores, strict=False)]
    Path("labelled.tsv").write_text("\n".join(["q1\tq2\tlike", *rows]) + "\n", encoding="utf-8")
    given = "--model lm --data labelled.tsv --columns q1,q2,like --device cpu --recipes topic,classical --no-controls"
    told = typed(script, f"compare {given} --out report --save-best best")
    assert "lm on 70 pairs of labelled.tsv" in told
    found = Comparison.load(Path("report/comparison.json"))
    assert found.choice().chosen == {found.choice().read_at: 10}
    assert "--template" in found.build
    assert "--recipe topic@2" in found.build
    assert "--fit-texts labelled.tsv --columns q1,q2,like" in found.build
    typed(script, found.build.removeprefix("st-reba "))
    for name in ("best", "my-topic"):
        cosines = [(first * other).sum(axis=1) for first, other in [np.split(loaded(name).encode(texts), 2)]]
        np.testing.assert_allclose(cosines[0], scores, atol=1e-5)
    files, built = files_of("best"), files_of("my-topic")
    assert files.keys() == built.keys()
    # The card of the first has the comparison.
    assert [str(path) for path in files if files[path] != built[path]] == ["README.md"]


def test_compare_on_the_demo_model(script, desk):
    """Whatever the order of the file; what is saved is shown as it was."""
    lines = demo_pairs("en").read_text(encoding="utf-8").splitlines()[:60]
    results = []
    for name, rows in {"one": lines, "other": lines[::-1]}.items():
        Path(f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        given = f"--model {DEMO_MODEL} --data {name}.tsv --recipes echo-2,prompteol --no-controls --margin 2 --seed 3"
        told = typed(script, f"compare {given} --device cpu --out {name}")
        found = Comparison.load(Path(name, "comparison.json"))
        assert told.count(found.answer) == 1
        assert "Echo-2 (mean)" in found.answer
        results.append({result.name: (result.scores, result.chosen, result.read_at) for result in found.results})
    assert results[0] == results[1]
    assert sum(results[0]["PromptEOL, last"][1].values()) == 10
    again = typed(script, "compare --saved one/comparison.json --against other/comparison.json")
    assert found.answer in again
    assert "Nothing changed beyond the interval, of " in again
    assert "The intervals are paired: both comparisons are of the same labelled pairs." in again


def test_serve_and_verify(script, desk):
    serving = script.start("serve", "saved", "--port", "0", cwd=Path.cwd())
    try:
        printed = serving.until("at http://")
        assert printed.startswith("Loading saved; the address follows")
        url = printed.split(" at ", 1)[1].split()[0]
        told = script.run("verify", url, "--model", "saved", "--json", cwd=Path.cwd()).output
        assert f"Equal: {url}" in told
        assert json_in(told, "verify")["equal"] is True
    finally:
        serving.kill(signal.SIGTERM)
    assert serving.wait().code == 0
    assert "every request was answered" in serving.output


def test_a_killed_run_to_a_url_goes_on(script, desk):
    """Killed (SIGKILL) half-way: the place of the output stays empty until all is there."""
    many = Path("many.txt")
    many.write_text("".join(f"{number} {'a word and ' * (number % 17)}\n" for number in range(300)))
    line = ["encode", "saved", many, "--batch-size", "4", "--chunk-size", "16", "--out"]
    url = f"file://{Path.cwd()}/away/v.npy"
    running = script.start(*line, url, cwd=Path.cwd())
    work = Path(f"{destination_of(url).work}.partial")
    deadline = time.monotonic() + 60
    while len(list(work.glob("parts/part-*"))) < 3:
        assert time.monotonic() < deadline, running.output
        time.sleep(0.01)
    running.kill()
    assert running.wait().code == -signal.SIGKILL
    assert not Path("away").exists()
    done = script.run(*line, url, "--json", cwd=Path.cwd())
    told = json_in(done.output, "encode")
    assert (told["path"], told["rows"], told["texts"]) == (url, 300, 300)
    assert told["resumed"] >= 48
    assert [path.name for path in Path("away").iterdir()] == ["v.npy"]
    assert not work.exists()
    script.run(*line, "here.npy", cwd=Path.cwd())
    assert Path("away/v.npy").read_bytes() == Path("here.npy").read_bytes()


def test_push(script, desk):
    """To a Hub on this machine, whose address the client reads where it is imported."""
    hub = RunningHub({"hf_owner": ("somebody", "org")})
    hub.start()
    env = {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(Path("home").absolute()), "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_owner", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost",
    }  # fmt: skip
    try:
        done = script.run_alone("push", "saved", "org/name", "--json", cwd=Path.cwd(), env=env)
    finally:
        hub.stop()
    assert done.code == 0, done.output
    assert 'SentenceTransformer("org/name")' in json_in(done.output, "push")["load"]
    assert "modules.json" in hub.repositories["org/name"].files("main")


def test_a_shell_completes(script, desk):
    for line, found in (
        ("st-reba bu", {"build"}), ("st-reba build --fit-t", {"--fit-texts"}),
        ("st-reba build --recipe echo-t", {"echo-topic"}),
        ("st-reba build --recipe classical+white", {"classical+whitened"}),
    ):  # fmt: skip
        env = {"_ST_REBA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        assert set(script.run(cwd=Path.cwd(), env=env).output.split()) == found


def test_help_recipes_and_refusals_import_nothing_large(script, tmp_path):
    """Nor do refusals: they take a fifth of a second, and not seconds. Every command has a case here."""
    refused = ["build --dimensions 8 --out x", "compare --data no.tsv", "serve"]
    for line, code in (("--help", 0), ("recipes", 0), *((line, 1) for line in refused)):
        done = script.run_alone(*line.split(), cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert done.code == code, done.output
        assert not re.search(r"\| +(torch|transformers|numpy)$", done.output, re.MULTILINE)
    commands = get_command(app).commands
    assert {name.partition(",")[0] for name in CASES} | {
        "build", "compare", "serve", "verify", "push", "recipes"
    } == commands.keys()  # fmt: skip
