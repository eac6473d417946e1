"""Every command once, as it is typed after an installation, with what it wrote looked at.

A case is a function of the script and of a desk to work at; :func:`test_a_fault_is_seen` runs some of them on packages
that have a fault on purpose.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

from st_reba import BidirectionalLastLayer, LayerwiseAutoencoder, ReBAModule, TwinTower

from ..conftest import pipeline
from ..hub import RunningHub, Storage, User
from .installed import Done, Script, without

TEXTS = [
    "a cat sat", "the dog ran", "ice and snow", "it is warm", "a red car", "the old train", "we like tea", "they eat",
    "a blue bird", "the river", "stones are hard", "he sings",
]  # fmt: skip


@dataclass
class Desk:
    """A directory with a model, texts and pairs, and the script."""

    script: Script
    place: Path
    model: str
    saved: str
    encoders: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    def type(self, *words: object) -> Done:
        """A command that has to end well, in float32: what it wrote is held against float32."""
        done = self.script.run(*words, cwd=self.place, env=self.env)
        assert done.code == 0, done.output
        assert "Traceback" not in done.output, done.output
        return done

    def encoded(self, name: str) -> np.ndarray:
        """What the saved model that it wrote gives for the texts, loaded here."""
        vectors: np.ndarray = SentenceTransformer(str(self.place / name), device="cpu").encode(TEXTS)
        assert np.isfinite(vectors).all()
        return vectors

    def written(self, name: str) -> set[str]:
        return {path.name for path in (self.place / name).iterdir()}


@pytest.fixture
def desk(script, tmp_path, backbone_path, roomy_path, encoder_paths) -> Desk:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    # A search halves them, and no text may be in both halves.
    pairs = [f"{TEXTS[n % 12]} {n}\t{TEXTS[5 * n % 11]} {n}\t{n % 5}" for n in range(66)]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    rows = [f"{a}\t{b}\t{c}" for a, b, c in zip(TEXTS, TEXTS[1:], TEXTS[2:], strict=False)]
    (tmp_path / "nli.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    saved = tmp_path / "saved"
    pipeline(ReBAModule(roomy_path)).save_pretrained(str(saved), create_model_card=False)
    return Desk(script, tmp_path, roomy_path, str(saved), encoder_paths())


def build(desk: Desk) -> None:
    done = desk.type("build", "--model", desk.model, "--out", "built", "--pooling", "mean")
    assert 'Load it with: import st_reba; SentenceTransformer("built")' in done.lines
    expected = pipeline(ReBAModule(desk.model)).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(desk.encoded("built"), expected, atol=1e-6)


def build_fitted(desk: Desk) -> None:
    done = desk.type(
        "build", "--model", desk.model, "--recipe", "classical+whitened", "--fit-texts", "texts.txt", "--out", "built"
    )
    assert f"on {len(TEXTS)} texts" in done.lines
    assert np.linalg.matrix_rank(desk.encoded("built")) > 1


def build_others(desk: Desk) -> None:
    desk.type("build", "--model", desk.model, "--multi-vector", "--recipe", "echo-2", "--out", "multi")
    assert json.loads((desk.place / "multi" / "config_sentence_transformers.json").read_text())["model_type"] == (
        "MultiVectorEncoder"
    )
    refused = desk.script.run(
        "build", "--model", desk.model, "--sparse", "--out", "sparse", cwd=desk.place, env=desk.env
    )
    assert (refused.code, (desk.place / "sparse").exists()) == (1, False), "a body without a head has no vocabulary"


def compare(desk: Desk) -> None:
    """Also: the line that it prints builds the model that it saved."""
    done = desk.type(
        "compare", "--model", desk.model, "--data", "pairs.tsv", "--recipes", "classical+whitened", "--device", "cpu",
        "--out", "report", "--save-best", "best", "--no-controls", "--dtype", "float32",
    )  # fmt: skip
    assert {"report.html", "results.csv", "comparison.json"} <= desk.written("report")
    (line,) = [line for line in done.output.splitlines() if line.startswith("st-reba build")]
    words = line.split()[1:]
    words[words.index("--out") + 1] = "typed"
    desk.type(*words)
    np.testing.assert_allclose(desk.encoded("typed"), desk.encoded("best"), atol=1e-6)
    desk.type("compare", "--saved", "report/comparison.json", "--against", "report/comparison.json")


def compare_default(desk: Desk) -> None:
    done = desk.type("compare", "--model", desk.model, "--dry-run")
    assert "recipes on 200 " in done.lines or "texts" in done.lines
    assert "LOAD REPORT" not in done.output


def search(desk: Desk) -> None:
    desk.type("search", "--model", desk.model, "--data", "pairs.tsv", "--out", "found", "--dtype", "float32")
    assert json.loads((desk.place / "found" / "comparison.json").read_text())["results"]


def layers(desk: Desk) -> None:
    done = desk.type("layers", "--model", desk.model, "--data", "pairs.tsv", "--dtype", "float32")
    assert "Turning point: layer " in done.lines
    assert desk.written("st-reba-layers") == {"layers.csv", "layers.png", "dependency.csv", "dependency.png"}


def encode(desk: Desk) -> None:
    desk.type("encode", desk.saved, "texts.txt", "--out", "a.npy", "--dtype", "float32")
    np.testing.assert_allclose(np.load(desk.place / "a.npy"), desk.encoded("saved"), atol=1e-5)
    desk.type("encode", desk.saved, "texts.txt", "--out", "b.parquet", "--chunk-tokens", "3", "--dtype", "float32")
    assert (desk.place / "b.parquet").stat().st_size > 0


def encode_on_several(desk: Desk) -> None:
    desk.type(
        "encode", desk.saved, "texts.txt", "--out", "a.npy", "--device", "cpu,cpu", "--chunk-size", "4",
        "--dtype", "float32",
    )  # fmt: skip
    np.testing.assert_allclose(np.load(desk.place / "a.npy"), desk.encoded("saved"), atol=1e-5)


def encode_on_ray(desk: Desk) -> None:
    desk.type(
        "encode", desk.saved, "texts.txt", "--out", "a.npy", "--engine", "ray", "--device", "cpu", "--dtype", "float32"
    )
    np.testing.assert_allclose(np.load(desk.place / "a.npy"), desk.encoded("saved"), atol=1e-5)


def serve_and_verify(desk: Desk) -> None:
    serving = desk.script.start("serve", desk.saved, "--port", "0", "--dtype", "float32", cwd=desk.place, env=desk.env)
    try:
        said = serving.until("at http://")
        url = said.split(" at ", 1)[1].split()[0]
        done = desk.type("verify", url, "--model", desk.saved, "--dtype", "float32")
        assert f"Equal: {url}" in done.lines
    finally:
        serving.kill(signal.SIGTERM)
    assert serving.wait().code == 0
    assert "every request was answered" in serving.output


def push(desk: Desk) -> None:
    """To a Hub on this machine, whose address the client reads where it is imported."""
    hub = RunningHub(Storage({"hf_owner": User("somebody", ("org",))}))
    hub.start()
    home = desk.place / "home"
    env = {
        **desk.env, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_owner",
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    try:
        done = desk.script.run_alone("push", desk.saved, "org/name", cwd=desk.place, env=env)
    finally:
        hub.stop()
    assert done.code == 0, done.output
    assert 'Load it with: import st_reba; SentenceTransformer("org/name")' in done.lines
    assert "modules.json" in hub.storage.repositories["org/name"].files("main")


def export_plain(desk: Desk) -> None:
    desk.type("build", "--model", desk.model, "--recipe", "classical", "--out", "built")
    desk.type("export", "--model", "built", "--plain", "plain")
    assert "st_reba" not in (desk.place / "plain" / "modules.json").read_text()
    np.testing.assert_allclose(desk.encoded("plain"), desk.encoded("built"), atol=1e-5)


def export_static(desk: Desk) -> None:
    desk.type("export", "--model", desk.model, "--static", "table", "--fit-texts", "texts.txt", "--dimensions", "8")
    assert isinstance(SentenceTransformer(str(desk.place / "table"), device="cpu")[0], StaticEmbedding)
    assert desk.encoded("table").shape == (len(TEXTS), 8)


def _train(desk: Desk, method: str, **settings: Any) -> Done:
    arguments = {"max_steps": 1, "per_device_train_batch_size": 2}
    file = desk.place / f"{method}.yaml"
    file.write_text(json.dumps({**settings, "arguments": arguments}), encoding="utf-8")  # JSON is YAML.
    done = desk.type("train", method, "--config", file, "--out", "run")
    assert 'Load it with: import st_reba; SentenceTransformer("run/model")' in done.lines
    return done


def train_bellm(desk: Desk) -> None:
    _train(desk, "bellm", model=desk.model, triplets="nli.tsv", rank=2)
    assert isinstance(SentenceTransformer(str(desk.place / "run" / "model"), device="cpu")[0], BidirectionalLastLayer)
    with safe_open(desk.place / "run" / "adapter" / "adapter_model.safetensors", framework="np") as adapter:
        assert list(adapter.keys())


def train_freeze(desk: Desk) -> None:
    _train(desk, "freeze", model=desk.model, pairs="pairs.tsv", bottlenecks=[8, 8])
    model = SentenceTransformer(str(desk.place / "run" / "model"), device="cpu")
    assert any(isinstance(module, LayerwiseAutoencoder) for module in model)
    desk.encoded("run/model")


def train_jtcse(desk: Desk) -> None:
    first, second = desk.encoders
    _train(desk, "jtcse", model=first, second_model=second, texts="texts.txt")
    assert isinstance(SentenceTransformer(str(desk.place / "run" / "model"), device="cpu")[0], TwinTower)


def _distil(desk: Desk, student: str) -> None:
    (desk.place / "many.txt").write_text("\n".join(f"{a} {b}" for a in TEXTS for b in TEXTS[:4]), encoding="utf-8")
    done = desk.type(
        "distil", "--recipe", "echo-2", "--model", desk.model, "--texts", "many.txt", "--student", student,
        "--epochs", "1", "--held-out", "12", "--out", "run",
    )  # fmt: skip
    assert "on 12 texts that were held out" in done.lines
    assert len(desk.encoded("run/model")) == len(TEXTS)


def distil_to_a_recipe(desk: Desk) -> None:
    _distil(desk, "classical")


def distil_to_a_table(desk: Desk) -> None:
    _distil(desk, "static")


def distil_to_another_model(desk: Desk) -> None:
    student = SentenceTransformer(desk.encoders[0], device="cpu")
    assert isinstance(student[-1], Pooling)
    student.save_pretrained(str(desk.place / "student"), create_model_card=False)
    _distil(desk, "student")


CASES: tuple[Callable[[Desk], None], ...] = (
    build, build_fitted, build_others, compare, compare_default, search, layers, encode, encode_on_several,
    serve_and_verify, push, export_plain, export_static, train_bellm, train_freeze, train_jtcse, distil_to_a_recipe,
    distil_to_a_table, distil_to_another_model,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_command(case, desk):
    case(desk)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; make test-clients has it")
def test_on_ray(desk):
    encode_on_ray(desk)


def test_every_command_has_a_case(script, tmp_path):
    """Alone: an interpreter that has nothing imported, as a shell starts it."""
    said = script.run_alone("--help", cwd=tmp_path).output
    typed = {case.__name__.split("_")[0] for case in CASES} | {"verify"}
    for command in (
        "build",
        "compare",
        "distil",
        "encode",
        "export",
        "layers",
        "push",
        "search",
        "serve",
        "train",
        "verify",
    ):
        assert f" {command} " in said
        assert command in typed


def test_the_module_is_the_same_command(script, tmp_path):
    done = script.run_alone("--version", cwd=tmp_path)
    assert (done.code, done.output.strip().count(".")) == (0, 2)


#: A line that a file loses, and a case that then has to fail.
FAULTS = {
    "st_reba_cli/layers.py": ("    from st_reba.optional import require\n", layers),
    "st_reba_cli/encode.py": ("import signal\n", encode),
    "st_reba/modules/__init__.py": ("from .reba import ReBAModule\n", build),
}


@pytest.mark.parametrize("file", FAULTS)
def test_a_fault_is_seen(file, desk, tmp_path_factory):
    line, case = FAULTS[file]
    packages = tmp_path_factory.mktemp("faulty")
    desk.env["PYTHONPATH"] = without(desk.script.path, file, line, packages)
    with pytest.raises(AssertionError, match=r"ImportError|KeyError|NameError|cannot import name"):
        case(desk)


def test_a_missing_extra_is_seen(desk, tmp_path_factory):
    """What is not installed is told in a sentence, with what installs it, before anything is written."""
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n", encoding="utf-8")
    done = desk.script.run_alone(
        "layers", "--model", desk.model, "--data", "pairs.tsv", cwd=desk.place, env={"PYTHONPATH": str(hidden)}
    )
    assert done.code == 1
    assert "Traceback" not in done.output
    assert 'pip install "st-reba[report]"' in done.lines
    assert not (desk.place / "st-reba-layers").exists()
