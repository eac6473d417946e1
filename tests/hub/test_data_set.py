"""Vectors that ``encode`` writes to a data set of the Hub, over HTTP, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO

import numpy as np
import pyarrow.parquet as pq
import pytest

from .server import Repository, RunningHub

#: Encodes texts to each URL, and prints what is refused.
SCRIPT = """
import json, sys
from pathlib import Path
from st_reba.encode import encode_file
from tests.encode.conftest import Fake

Path("modules.json").write_text("[]")
Path("texts.txt").write_text("a\\nbc\\ndef\\ng\\n")
refused = {}
for url, options in json.loads(sys.argv[1]):
    try:
        encode_file(Fake("."), "texts.txt", url, **options)
    except (OSError, ValueError) as error:
        refused[url] = str(error)
print(json.dumps(refused))
"""


@pytest.fixture
def hub():
    running = RunningHub({"hf_owner": ("org",)})
    running.repositories["org/vectors"] = Repository("org/vectors")
    running.start()
    yield running
    running.stop()


def test_encode_writes_to_a_data_set(hub, tmp_path):
    """A file, a file in a folder, and shards, which are replaced; a repository that is not there is refused at once."""
    at = "hf://datasets/org/vectors"
    runs = [
        [f"{at}/a.npy", {}],
        [f"{at}/deep/a.parquet", {}],
        [f"{at}/shards", {"chunk_size": 1}],
        [f"{at}/shards", {"chunk_size": 2, "overwrite": True}],
        [f"{at}/a.npy", {}],
        ["hf://datasets/org/none/a.npy", {}],
    ]
    command = [sys.executable, "-c", SCRIPT, json.dumps(runs)]
    environment = hub.environment(tmp_path / "home", HF_TOKEN="hf_owner")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        f"{at}/a.npy": f"{at}/a.npy exists: choose another --out, or replace it with --overwrite.",
        "hf://datasets/org/none/a.npy": "--out hf://datasets/org/none/a.npy: the Hub has no such repository, or does "
        "not show it to you. Make it first, or log in with `hf auth login`.",
    }
    files = hub.repositories["org/vectors"].files()
    shards = [f"shards/part-0000000{number}.parquet" for number in range(2)]
    assert sorted(files) == [".gitattributes", "a.npy", "deep/a.parquet", "shards/_SUCCESS", *shards]
    vectors = np.load(BytesIO(files["a.npy"]))
    assert vectors[:, 0].tolist() == [1, 2, 3, 1]
    assert np.array_equal(pq.read_table(BytesIO(files["deep/a.parquet"]))["embedding"].to_pylist(), vectors)
    assert np.array_equal(
        [row for name in shards for row in pq.read_table(BytesIO(files[name]))["embedding"].to_pylist()], vectors
    )
