"""One table in seven files: whatever it comes in, the comparison is the same."""

from __future__ import annotations

import csv
import functools
import gzip
import http.server
import io
import json
import os
import threading

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import st_reba_cli as cli

pytestmark = pytest.mark.usefixtures("quick_commands")

NAMES = ("sentence1", "sentence2", "score")
ROWS = [(f"a cat, {number}", f'the "dog" {number * 7}', float(number % 5)) for number in range(20)]


def as_csv(rows):
    stream = io.StringIO()
    csv.writer(stream).writerows([NAMES, *rows])
    return stream.getvalue().encode()


def as_jsonl(rows):
    return "".join(json.dumps(dict(zip(NAMES, row, strict=True))) + "\n" for row in rows).encode()


@pytest.fixture
def sources(tmp_path):
    """By what it is, what ``--data`` is given."""
    stream = io.BytesIO()
    columns = [list(column) for column in zip(*ROWS, strict=True)]
    pq.write_table(pa.table(dict(zip(NAMES, columns, strict=True))), stream)
    files = {
        "pairs.tsv": "".join("\t".join(map(str, row)) + "\n" for row in ROWS).encode(),
        "pairs.csv": as_csv(ROWS),
        "pairs.jsonl": as_jsonl(ROWS),
        "pairs.parquet": stream.getvalue(),
        "pairs.csv.gz": gzip.compress(as_csv(ROWS)),
        "shards/part-9.jsonl": as_jsonl(ROWS[:12]),
        "shards/part-10.jsonl": as_jsonl(ROWS[12:]),
    }
    memory = fsspec.filesystem("memory")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        memory.pipe(f"/tables/{name}", content)
    found = {name: tmp_path / name for name in files if "/" not in name}
    yield found | {"shards": tmp_path / "shards", "memory": "memory://tables/shards"}
    memory.rm("/tables", recursive=True)


@pytest.fixture
def served(tmp_path):
    """The address of a server on this machine that has these files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    directory = os.fspath(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=directory))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def compared(source, model, out):
    """What was said of the data, and the scores."""
    arguments = ("compare", "--model", model, "--data", source, "--device", "cpu", "--recipes", "classical")
    options = ("--no-controls", "--out", out)
    result = CliRunner().invoke(cli.app, [str(argument) for argument in (*arguments, *options)])
    assert result.exit_code == 0, result.output
    rows = csv.DictReader((out / "results.csv").read_text(encoding="utf-8").splitlines())
    scores = [{name: row[name] for name in row if name.startswith(("recipe", "STS", "Beyond"))} for row in rows]
    return result.stderr, scores


def test_one_table_one_result(sources, shallow_path, tmp_path):
    found = {name: compared(source, shallow_path, tmp_path / f"out-{name}") for name, source in sources.items()}
    _, expected = found["pairs.tsv"]
    assert len(expected) >= 2
    for name, (said, scores) in found.items():
        assert scores == expected, name
        assert f"{sources[name]}: 20 pairs with scores from 0 to 4; columns: sentence1, sentence2, score" in said


def test_over_http(sources, served, shallow_path, tmp_path):
    pytest.importorskip("aiohttp", reason='fsspec reads http with it: pip install "st-reba[data]"')
    _, expected = compared(sources["pairs.csv"], shallow_path, tmp_path / "here")
    for name in ("pairs.csv.gz", "pairs.parquet"):
        said, scores = compared(f"{served}/{name}", shallow_path, tmp_path / f"there-{name}")
        assert scores == expected
        assert said.startswith(f"{served}/{name}: 20 pairs")
