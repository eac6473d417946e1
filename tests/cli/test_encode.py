"""``st-reba encode``."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from .. import processes
from ..backbones import TEXTS
from ..conftest import long
from . import typed

# In a process of its own nothing is patched.
COMMAND = ("-c", "from st_reba_cli import app; app()", "encode", "saved", "many.txt", "--dtype", "float32")

pytestmark = pytest.mark.usefixtures("desk")


def test_every_option():
    records = "".join(json.dumps({"body": text, "id": i, "x": 0}) + "\n" for i, text in enumerate(TEXTS))
    Path("records.jsonl").write_text(records)
    output = typed(
        "encode saved records.jsonl --out a.parquet --column body --keep id --keep x --precision uint8 "
        "--truncate-dim 12 --calibration-rows 3 --normalize --prompt 'find: ' --batch-size 2 --chunk-size 2"
    )
    assert "Wrote 5 vectors to a.parquet." in output
    assert "Their ranges are in a.ranges.npy." in output
    table = pq.read_table("a.parquet")
    assert table.column_names == ["id", "x", "embedding"]
    assert table.schema.field("embedding").type.list_size == 12
    model = SentenceTransformer("saved", device="cpu")
    expected = model.encode(TEXTS[:3], prompt="find: ", truncate_dim=12, normalize_embeddings=True)
    np.testing.assert_allclose(np.load("a.ranges.npy"), [expected.min(0), expected.max(0)], atol=1e-5)


def started(out: str, rows: int, parts: int, *options: str):
    """A run of its own on so many rows, once so many parts are written."""
    Path("many.txt").write_text("".join(f"{number} {'a word and ' * (number % 17)}\n" for number in range(rows)))
    batches = ("--batch-size", "4", "--chunk-size", "4")
    process = processes.start(*COMMAND, "--out", out, *batches, *options, out=Path("printed").absolute())
    made = Path(f"{out}.partial/parts")
    while process.poll() is None and (not made.is_dir() or len(list(made.iterdir())) < parts):
        time.sleep(0.005)
    return process


def test_a_killed_run_resumes_to_the_same_bytes():
    """SIGKILL in the middle, of a real process; then the same command to its end."""
    process = started("killed.npy", 240, 8, "--device", "cpu")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not Path("killed.npy").exists()
    assert 8 <= len(list(Path("killed.npy.partial/parts").iterdir())) < 60
    line = "encode saved many.txt --dtype float32 --batch-size 4 --chunk-size 4 --device cpu --out"
    assert re.search(r"Wrote 240 vectors to killed.npy, \d+ of them from an int", typed(f"{line} killed.npy"))
    typed(f"{line} whole.npy")
    assert Path("killed.npy").read_bytes() == Path("whole.npy").read_bytes()
    assert not Path("killed.npy.partial/parts").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGKILL)])
def test_no_worker_outlives_a_run_on_several_devices(number):
    process = started("a.npy", 20_000, 4, "--device", "cpu,cpu")
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait(timeout=60)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone) >= 2, alive) == (True, [])
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    stopped = "Stopped. The same command goes on" in Path("printed").read_text()
    assert stopped == (number == signal.SIGTERM)
    assert not list(Path().glob("*.npy"))
