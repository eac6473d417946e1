from __future__ import annotations

import json
import re
import signal
import time
from functools import partial

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_reba import CausalTransformer
from st_reba_cli import load

from .. import processes
from ..backbones import TEXTS
from ..conftest import first, pipeline
from . import typed

run = partial(typed, "encode")

runner = CliRunner()
# In a process of its own nothing is patched.
COMMAND = ("-c", "from st_reba_cli import app; app()", "encode", "--dtype", "float32")


@pytest.fixture(scope="module")
def model_directory(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli-encode") / "my-model"
    pipeline(CausalTransformer(backbone_path())).save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def test_the_literal_line(model_directory, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run(model_directory, "texts.txt", "--out", "embeddings.npy", "--device", "cpu")
    assert "Wrote 5 vectors to embeddings.npy." in output
    expected = SentenceTransformer(str(model_directory), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(np.load("embeddings.npy"), expected, atol=1e-5)


def test_every_option(model_directory, tmp_path):
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"body": text, "id": i, "x": 0}) + "\n" for i, text in enumerate(TEXTS)))
    output = run(
        model_directory, records, "--out", tmp_path / "a.parquet", "--column", "body", "--keep", "id", "--keep", "x",
        "--precision", "uint8", "--calibration-rows", 3, "--truncate-dim", 12, "--normalize", "--prompt", "find: ",
        "--batch-size", 2, "--chunk-size", 2, "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    assert "Wrote 5 vectors" in output
    assert "Their ranges are in a.ranges.npy." in output
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["id", "x", "embedding"]
    assert table.schema.field("embedding").type.list_size == 12
    model = SentenceTransformer(str(model_directory), device="cpu")
    expected = model.encode(TEXTS[:3], prompt="find: ", truncate_dim=12, normalize_embeddings=True)
    np.testing.assert_allclose(np.load(tmp_path / "a.ranges.npy"), [expected.min(0), expected.max(0)], atol=1e-5)


def test_a_killed_run_resumes_to_the_same_bytes(model_directory, tmp_path):
    """SIGKILL in the middle, of a real process; then the same command to its end."""
    path = tmp_path / "many.txt"
    path.write_text("".join(f"{number} {'a word and ' * (number % 17)}\n" for number in range(240)))
    options = ["--device", "cpu", "--batch-size", 4, "--chunk-size", 4]
    killed = tmp_path / "killed.npy"
    parts = tmp_path / "killed.npy.partial" / "parts"
    process = processes.start(*COMMAND, model_directory, path, "--out", killed, *options, out=tmp_path / "printed")
    while process.poll() is None and (not parts.is_dir() or len(list(parts.iterdir())) < 8):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not killed.exists()
    assert 8 <= len(list(parts.iterdir())) < 60
    assert re.search(r"Wrote 240 vectors to .*killed.npy, \d+ of them from an interrupted run",
                     run(model_directory, path, "--out", killed, *options))  # fmt: skip
    run(model_directory, path, "--out", tmp_path / "whole.npy", *options)
    assert killed.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize("number", first([signal.SIGKILL, signal.SIGTERM], 1))
def test_no_worker_outlives_a_run_on_several_devices(number, model_directory, tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(f"{number} {'a word and ' * (number % 17)}\n" for number in range(20_000)))
    parts = tmp_path / "a.npy.partial" / "parts"
    options = ["--device", "cpu,cpu", "--batch-size", "4", "--chunk-size", "4"]
    out = tmp_path / "printed"
    process = processes.start(*COMMAND, model_directory, path, "--out", tmp_path / "a.npy", *options, out=out)
    while process.poll() is None and (not parts.is_dir() or len(list(parts.iterdir())) < 4):
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait(timeout=60)
    output = out.read_text()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone) >= 2, alive) == (True, [])
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert ("Stopped. The same command goes on" in output) == (number == signal.SIGTERM)
    assert not list(tmp_path.glob("*.npy"))


def test_stopped_by_hand(model_directory, texts, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("st_reba.encode.encode_file", stop)
    output = run(model_directory, texts, "--out", tmp_path / "a.npy", expect=130)
    assert "Stopped. The same command goes on from" in output


def test_bad_input(model_directory, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    output = run(model_directory, tmp_path / "t.jsonl", "--out", tmp_path / "a.npy", expect=1)
    assert "t.jsonl, line 2: text: 1 is not text. A row is text." in output
    (tmp_path / "empty").mkdir()
    output = run(model_directory, tmp_path / "empty", "--out", tmp_path / "a.npy", expect=1)
    assert "empty is a directory without a table in it (nothing): give a file, or a folder of" in output
    assert "no.txt: there is no such file" in run(model_directory, "no.txt", "--out", "a.npy", expect=1)


def test_the_fastest_precision_where_it_is_sound(model_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "fastest_on_cpu", lambda: torch.bfloat16)
    (tmp_path / "texts.txt").write_text("a cat\na dog\nthe bank of the river\n", encoding="utf-8")
    vectors = {}
    for name, alike, options in (("a", 0.999, ()), ("b", 0.9, ()), ("c", 0.999, ("--dtype", "float32"))):
        monkeypatch.setattr(load, "agreement", lambda first, second, alike=alike: alike)
        said = run(model_directory, tmp_path / "texts.txt", "--out", tmp_path / f"{name}.npy", *options)
        assert ("In bfloat16, which this processor is fastest in" in said) == (name == "a")
        assert ("In float32, as bfloat16 does not agree" in said) == (name == "b")
        vectors[name] = np.load(tmp_path / f"{name}.npy")
    np.testing.assert_array_equal(vectors["b"], vectors["c"])
    assert not np.array_equal(vectors["a"], vectors["c"])
    np.testing.assert_allclose(vectors["a"], vectors["c"], atol=0.1)
