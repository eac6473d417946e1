"""Several processes, as ``accelerate launch`` starts them, are one process with the same global batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_reba.train import BeLLMTraining, build_bellm, train_bellm

from .. import processes
from ..backbones import TEXTS

pytest.importorskip("peft")

COMMAND = "import runpy; runpy.run_module('st_reba', run_name='__main__')"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def given(shallow_path, tmp_path):
    """Settings by the rows of a device's batch: SGD, so that a weight moves as far as its gradient says."""
    rows = [
        f"{text} {n}\t{text} again {n}\t{TEXTS[(i + 2) % 5]} not {n}" for n in range(4) for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "triplets.tsv").write_text("\n".join(rows), encoding="utf-8")

    def settings(batch: int, **more):
        arguments = {
            "per_device_train_batch_size": batch, "optim": "sgd", "learning_rate": 0.5, "dataloader_drop_last": True,
            "batch_sampler": "batch_sampler", "use_cpu": True, "report_to": "none",
        }  # fmt: skip
        return {
            "model": shallow_path, "triplets": str(tmp_path / "triplets.tsv"), "rank": 4, "dropout": 0.0,
            "angle_weight": 0.1, "arguments": {**arguments, **more},
        }  # fmt: skip

    return settings


def test_two_processes_are_one(given, tmp_path):
    """Negatives are those of both, and so is the angle loss; the gradient is that of the whole batch."""
    alone, out = BeLLMTraining(**given(4)), tmp_path / "two"
    before = build_bellm(alone).encode(TEXTS)
    one = train_bellm(alone, tmp_path / "one", progress=False).encode(TEXTS)

    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(given(2)), encoding="utf-8")
    launched = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    running = [
        processes.start(
            "-c", COMMAND, "train", "bellm", "--config", tmp_path / "settings.yaml", "--out", out,
            out=tmp_path / f"printed-{rank}", env={**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    codes = [process.wait() for process in running]
    printed = [(tmp_path / f"printed-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    # One that fails takes the other with it: what both printed tells which was first.
    assert codes == [0, 0], "\n\n".join(printed)
    assert ["Load it with" in told for told in printed] == [True, False]
    two = SentenceTransformer(str(out / "model"), device="cpu").encode(TEXTS)
    assert np.abs(one - before).max() > 1e-2
    assert np.abs(two - one).max() < 1e-5
    run = json.loads((out / "checkpoints/run.json").read_text(encoding="utf-8"))
    assert (run["per_device_train_batch_size"], run["devices"]) == (2, 2)


def test_a_checkpoint_is_written_by_one(given, tmp_path, monkeypatch):
    """What is written by several at once may be read half-written."""
    monkeypatch.setattr(SentenceTransformerTrainingArguments, "should_save", False)
    train_bellm(BeLLMTraining(**given(4, save_steps=1, max_steps=1)), tmp_path / "run", progress=False)
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("checkpoint-1")
    assert not (checkpoint / "modules.json").exists()


@pytest.mark.long
def test_the_launcher(given, tmp_path):
    """The command of the page, with two processes on a CPU."""
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(given(2, max_steps=2)), encoding="utf-8")
    launch = ["launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", str(free_port())]
    command = ["train", "bellm", "--config", "settings.yaml", "--out", "run"]
    done = subprocess.run(
        [Path(sys.executable).with_name("accelerate"), *launch, "-m", "st_reba", *command],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model").is_dir()
