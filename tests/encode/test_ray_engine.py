from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from st_reba.encode import Encoder, RayEngine, encode_file

from .inputs import sentences

TEXTS = sentences(60)


@dataclass(frozen=True)
class Dying(Encoder):
    """Kills its worker's process, once, when a text comes up."""

    at: str = ""
    killed: str = ""

    def encode(self, model, texts):
        if any(text.startswith(self.at) for text in texts) and not Path(self.killed).exists():
            Path(self.killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(model, texts)


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
class TestTwoWorkers:
    def test_a_worker_that_is_killed_loses_and_doubles_nothing(self, model_directory, texts, tmp_path):
        plain = Encoder(str(model_directory), batch_size=4)
        dying = Dying(str(model_directory), batch_size=4, at="33 ", killed=str(tmp_path / "killed"))
        counts = []
        made = encode_file(
            dying,
            texts,
            tmp_path / "ray.npy",
            chunk_size=8,
            precision="uint8",
            calibration_rows=20,
            engine=RayEngine(workers=2),
            on_progress=lambda stage, done, total: counts.append(done),
        )
        assert (tmp_path / "killed").exists()
        assert (made.rows, made.resumed, counts[-1]) == (60, 0, 60)
        encode_file(plain, texts, tmp_path / "local.npy", chunk_size=8, precision="uint8", calibration_rows=20)
        by_ray, locally = (np.load(tmp_path / name).astype(int) for name in ("ray.npy", "local.npy"))
        # A worker has one thread, this process may have more: the last bits, and so a bucket, may differ.
        assert np.abs(by_ray - locally).max() <= 1
        assert not (tmp_path / "ray.npy.partial").exists()

    def test_what_this_machine_began_a_cluster_finishes(self, model_directory, texts, tmp_path):
        def stop(stage, done, total):
            # A batch of the fifth chunk.
            if (stage, done) == ("Encoding", 36):
                raise KeyboardInterrupt

        encoder = Encoder(str(model_directory), batch_size=4)
        with pytest.raises(KeyboardInterrupt):
            encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8, on_progress=stop)
        made = encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8, engine=RayEngine(2, "cpu"))
        assert (made.rows, made.resumed) == (60, 32)

    def test_a_folder_of_shards(self, model_directory, texts, tmp_path):
        """Whole chunks go to a worker, also those that end in another file than they begin in."""
        (tmp_path / "in").mkdir()
        for number, start in enumerate(range(0, 60, 7)):
            rows = "".join(text + "\n" for text in TEXTS[start : start + 7])
            (tmp_path / "in" / f"part-{number}.txt").write_text(rows, encoding="utf-8")
        encoder = Encoder(str(model_directory), batch_size=4)
        made = encode_file(encoder, tmp_path / "in", tmp_path / "a.npy", chunk_size=8, engine=RayEngine(2, "cpu"))
        encode_file(encoder, texts, tmp_path / "b.npy", chunk_size=8)
        assert made.rows == 60
        np.testing.assert_allclose(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"), atol=1e-5)

    def test_a_workers_refusal_is_the_users(self, model_directory, texts, tmp_path):
        encoder = replace(Encoder(str(model_directory)), truncate_dim=33)
        with pytest.raises(ValueError, match=r"^truncate_dim=33: the model's vectors have 32 values\.$"):
            encode_file(encoder, texts, tmp_path / "a.npy", engine=RayEngine(2))
        assert not (tmp_path / "a.npy.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0: give a whole number from 1"),
        ({"device": "cuda:1"}, 'device "cuda:1": on a Ray cluster give "cpu" or "cuda"'),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        RayEngine(**options)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match='needs ray: pip install "st-reba\\[ray\\]"'):
        RayEngine()
