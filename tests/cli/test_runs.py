"""``st-reba encode`` and ``st-reba train``: what is printed and written, also where a run is stopped."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from .. import processes
from ..backbones import TEXTS
from ..conftest import raising
from . import typed

pytestmark = pytest.mark.usefixtures("desk")


def test_every_option():
    records = "".join(json.dumps({"body": text, "id": i, "x": 0}) + "\n" for i, text in enumerate(TEXTS))
    Path("records.jsonl").write_text(records)
    output = typed(
        "encode saved records.jsonl --out a.parquet --column body --keep id --keep x "
        "--truncate-dim 12 --normalize --prompt 'find: ' --batch-size 2 --chunk-size 2 --json"
    )
    assert "Wrote 5 vectors of 5 texts to a.parquet." in output
    assert '"schema": "st-reba/encode/1", "path": "a.parquet", "rows": 5, "texts": 5, "resumed": 0' in output
    table = pq.read_table("a.parquet")
    assert table.column_names == ["id", "x", "embedding"]
    assert table.schema.field("embedding").type.list_size == 12
    model = SentenceTransformer("saved", device="cpu")
    expected = model.encode(TEXTS, prompt="find: ", truncate_dim=12, normalize_embeddings=True)
    np.testing.assert_allclose(table["embedding"].to_pylist(), expected, atol=1e-5)


def test_a_run_that_is_ended():
    """In a process of its own; that its workers end, and the same command goes on, is in tests/encode."""
    Path("many.txt").write_text("".join(f"{number} {'a word and ' * 9}\n" for number in range(2000)))
    options = "--dtype float32 --device cpu --batch-size 4 --chunk-size 4 --out a.npy"
    code, printed = "from st_reba_cli import app; app()", Path("printed").absolute()
    process = processes.start("-c", code, "encode", "saved", "many.txt", *options.split(), out=printed)
    while process.poll() is None and len(list(Path("a.npy.partial/parts").glob("*"))) < 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert "Stopped. The same command resumes from" in printed.read_text()
    assert not list(Path().glob("*.npy"))


TRAIN = "train bellm --config bellm.yaml --out out"


@pytest.fixture(autouse=True)
def runs(desk):
    Path("nli.tsv").write_text("a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n", encoding="utf-8")


def config(arguments: str = "learning_rate: 1e-3") -> None:
    pytest.importorskip("peft")
    given = f"arguments: {{per_device_train_batch_size: 2, {arguments}}}"
    Path("bellm.yaml").write_text(f"model: lm\ntriplets: nli.tsv\nrank: 2\n{given}\n")


def test_a_run_and_what_is_there_already():
    config()
    shown = typed(TRAIN)
    assert "Wrote out/model. Load it with: import st_reba; from sentence_transformers import Sentence" in shown
    assert "Wrote out/adapter" in shown
    assert "out/model exists and is not an empty" in typed(TRAIN, expect=1)


def test_the_other_methods(encoder_paths):
    for name, line in (
        ("freeze", "model: lm\npairs: pairs.tsv\nstage: cosines"),
        ("jtcse", f"model: {encoder_paths()[0]}\ntexts: texts.txt"),
    ):
        Path("run.yaml").write_text(f"{line}\narguments: {{max_steps: 1, per_device_train_batch_size: 2}}\n")
        assert f"Wrote {name}/model." in typed(f"train {name} --config run.yaml --out {name}")


def test_a_run_that_diverges():
    config("learning_rate: 1e300, num_train_epochs: 9")
    assert "Error: Training diverged at step" in typed(TRAIN, expect=1)
    assert not Path("out/model").exists()


def test_an_interrupted_run_says_how_to_go_on(monkeypatch):
    config()
    monkeypatch.setattr("st_reba.train.bellm.fit", raising(KeyboardInterrupt()))
    assert "Stopped. The same command resumes from the last checkpoint in out." in typed(TRAIN, expect=130)
