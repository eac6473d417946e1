from __future__ import annotations

import numpy as np
import pytest
from pyarrow import parquet
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import encode_chunks
from st_reba.encode import Encoder, encode_file

from .inputs import sentences

LENGTH, OVERLAP = 4, 1


@pytest.fixture
def encoder(model_directory):
    return Encoder(str(model_directory), chunk_tokens=LENGTH, chunk_overlap=OVERLAP)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*sentences(20), "", *sentences(3, seed=1)]) + "\n")
    return path


@pytest.fixture
def expected(encoder, texts):
    model = SentenceTransformer(encoder.model, device="cpu")
    found = encode_chunks(model, texts.read_text().splitlines(), chunk_tokens=LENGTH, overlap=OVERLAP)
    rows = [(number, *span) for number, each in enumerate(found) for span in each.spans]
    return rows, np.concatenate([each.vectors for each in found])


def check(table, expected):
    rows, vectors = expected
    assert list(zip(*(table[name].to_pylist() for name in ("document", "start", "end")), strict=True)) == rows
    assert np.abs(np.array(table["embedding"].to_pylist()) - vectors).max() < 1e-5


@pytest.mark.parametrize("name", ["a.parquet", "shards"])
def test_a_row_a_chunk(name, encoder, texts, expected, tmp_path):
    made = encode_file(encoder, texts, tmp_path / name, chunk_size=8)
    assert (made.rows, made.texts, made.resumed) == (len(expected[0]), 24, 0)
    check(parquet.read_table(tmp_path / name), expected)


def test_a_killed_run_goes_on(encoder, texts, expected, tmp_path):
    def stop(stage, done, total):
        if (stage, done) == ("Encoding", 24):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, texts, tmp_path / "a.parquet", chunk_size=8, on_progress=stop)
    with pytest.raises(ValueError, match="chunk_tokens 4 "):
        encode_file(Encoder(encoder.model), texts, tmp_path / "a.parquet", chunk_size=8)
    # The chunk that was being written, too.
    assert encode_file(encoder, texts, tmp_path / "a.parquet", chunk_size=8).resumed == 16
    check(parquet.read_table(tmp_path / "a.parquet"), expected)


def test_kept_columns_and_precision(encoder, tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text("id\ttext\na\tthe quick brown fox\nb\tmoney\n")
    encode_file(encoder, path, tmp_path / "a.parquet", keep=["id"], precision="int8")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["id", "document", "start", "end", "embedding"]
    ids = {0: "a", 1: "b"}
    assert table["id"].to_pylist() == [ids[number] for number in table["document"].to_pylist()]
    assert np.load(tmp_path / "a.ranges.npy").shape == (2, 32)


def test_texts_without_a_chunk(encoder, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n")
    assert encode_file(encoder, path, tmp_path / "a.parquet").rows == 0
    assert parquet.read_table(tmp_path / "a.parquet").num_rows == 0
    with pytest.raises(ValueError, match="have no chunks: give --ranges"):
        encode_file(encoder, path, tmp_path / "b.parquet", precision="int8")


def test_what_cannot_be_is_refused_before_anything_is_read(encoder, texts, tmp_path):
    with pytest.raises(ValueError, match=r"not where a chunk lies: give an --out that ends in \.parquet"):
        encode_file(encoder, texts, tmp_path / "a.npy")
    with pytest.raises(ValueError, match="chunk_overlap=2: it is between chunks; give chunk_tokens"):
        Encoder(encoder.model, chunk_overlap=2)
    with pytest.raises(ValueError, match="overlap=4: give the tokens that a chunk shares"):
        Encoder(encoder.model, chunk_tokens=4, chunk_overlap=4)
    assert list(tmp_path.iterdir()) == [texts]


def test_the_command(encoder, texts, expected, tmp_path):
    out = tmp_path / "chunks.parquet"
    arguments = [encoder.model, texts, "--out", out, "--chunk-tokens", LENGTH, "--chunk-overlap", OVERLAP]
    result = CliRunner().invoke(cli.app, ["encode", *map(str, arguments), "--device", "cpu"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert f"Wrote {len(expected[0])} vectors to {out}, the chunks of 24 texts." in " ".join(result.output.split())
    check(parquet.read_table(out), expected)


def test_a_kept_column_of_the_same_name_is_refused(encoder, tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text("start\ttext\n1\tthe quick brown fox\n")
    with pytest.raises(ValueError, match="keep start: a chunk's own columns have that name"):
        encode_file(encoder, path, tmp_path / "a.parquet", keep=["start"])
