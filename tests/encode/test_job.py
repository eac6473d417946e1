from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from st_reba.data.parquet_copy import ParquetCopy
from st_reba.encode import Encoder, LocalEngine, encode_file

from .inputs import Ones, sentences

TEXTS = sentences(50)


@pytest.fixture(scope="module")
def expected(model_directory):
    return SentenceTransformer(str(model_directory), device="cpu").encode(TEXTS)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def encoder(model_directory):
    return Encoder(str(model_directory), batch_size=8)


def interrupted(encoder, texts, out, **options):
    """A run that is stopped when the fourth chunk of eight rows is being written.

    The batch that comes next stops it, or, where no model tells of batches, the third chunk.
    """

    def stop(stage, done, total):
        if (stage, done) == ("Encoding", 24 if isinstance(encoder, Ones) else 40):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, texts, out, chunk_size=8, on_progress=stop, **options)


def left(tmp_path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "texts.txt")


class TestNpy:
    def test_is_what_encode_and_save_give(self, encoder, texts, expected, tmp_path):
        """Rows in order, and the very bytes of numpy.save."""
        made = encode_file(encoder, texts, tmp_path / "deep" / "a.npy", chunk_size=8)
        vectors = np.load(tmp_path / "deep" / "a.npy")
        assert (made.rows, made.resumed, made.ranges) == (50, 0, None)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        np.save(tmp_path / "b.npy", vectors)
        assert (tmp_path / "deep" / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
        assert left(tmp_path / "deep") == ["a.npy"]

    def test_settings_reach_encode(self, encoder, texts, model_directory, tmp_path):
        asked = replace(encoder, prompt_name="query", truncate_dim=12, normalize=True)
        encode_file(asked, texts, tmp_path / "a.npy", chunk_size=8)
        model = SentenceTransformer(str(model_directory), device="cpu")
        expected = model.encode(TEXTS, prompt="find: ", truncate_dim=12, normalize_embeddings=True)
        np.testing.assert_allclose(np.load(tmp_path / "a.npy"), expected, atol=1e-5)

    def test_half_precision_is_written_as_float32(self, encoder, texts, expected, tmp_path):
        encode_file(replace(encoder, dtype="bfloat16"), texts, tmp_path / "a.npy")
        vectors = np.load(tmp_path / "a.npy")
        assert vectors.dtype == np.float32
        cosine = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosine.min() > 0.99

    def test_several_devices_give_the_same_bytes(self, encoder, texts, tmp_path, spawned_by_fork):
        encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8)
        engine = LocalEngine(["cpu", "cpu"])
        encode_file(encoder, texts, tmp_path / "b.npy", chunk_size=8, engine=engine)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


class TestPrecision:
    @pytest.mark.parametrize("precision", ["binary", "ubinary"])
    def test_bits(self, precision, encoder, texts, expected, tmp_path):
        encode_file(encoder, texts, tmp_path / "a.npy", precision=precision)
        assert np.array_equal(np.load(tmp_path / "a.npy"), quantize_embeddings(expected, precision))

    @pytest.mark.parametrize("precision", ["int8", "uint8"])
    def test_ranges_are_those_of_the_first_texts(self, precision, encoder, texts, expected, tmp_path):
        options = {"precision": precision, "calibration_rows": 20}
        made = encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8, **options)
        assert made.ranges == tmp_path / "a.ranges.npy"
        ranges = np.load(made.ranges)
        np.testing.assert_allclose(ranges, [expected[:20].min(0), expected[:20].max(0)], atol=1e-5)
        near = np.abs(np.load(tmp_path / "a.npy") - quantize_embeddings(expected, precision, ranges).astype(int))
        assert near.max() <= 1

    def test_a_row_does_not_depend_on_the_others(self, encoder, texts, tmp_path):
        """Unlike with ST's encode(precision="int8"), a file quantised in pieces is the file quantised at once."""
        encode_file(encoder, texts, tmp_path / "a.npy", precision="int8", calibration_rows=20, chunk_size=8)
        tail = tmp_path / "tail.txt"
        tail.write_text("".join(text + "\n" for text in TEXTS[40:]), encoding="utf-8")
        encode_file(encoder, tail, tmp_path / "b.npy", precision="int8", ranges=tmp_path / "a.ranges.npy", chunk_size=8)
        assert np.array_equal(np.load(tmp_path / "a.npy")[40:], np.load(tmp_path / "b.npy"))
        assert (tmp_path / "a.ranges.npy").read_bytes() == (tmp_path / "b.ranges.npy").read_bytes()

    def test_refusals(self, encoder, texts, tmp_path):
        def refuse(message, file=texts, **options):
            with pytest.raises(ValueError, match=message):
                encode_file(encoder, file, tmp_path / "a.npy", **options)

        refuse('precision="int4": give one of float32, int8', precision="int4")
        np.save(tmp_path / "r.npy", np.zeros((2, 5)))
        refuse("Ranges are for precision int8 or uint8; binary needs none", precision="binary", ranges="r.npy")
        refuse("are for vectors of 5 values, but these have 32", precision="int8", ranges=tmp_path / "r.npy")
        for ranges, message in (
            (np.zeros(5), r"shape \(5,\); ranges are a \(2, values\) array of numbers, minima before maxima"),
            (np.array([[1.0], [0.0]]), "values that are not finite, or minima above their maxima; ranges are"),
            (np.array([[0.0], [np.inf]]), "values that are not finite"),
            (np.array([[0.0], [1e300]]), "values that are not finite"),
            (np.array([["a"], ["b"]]), "is an array of <U1; ranges are"),
            (np.array([[None], [1]]), "is not an array that NumPy can read"),
        ):
            np.save(tmp_path / "r.npy", ranges)
            refuse(message, precision="int8", ranges=tmp_path / "r.npy")
        for garbage in (b"", b"not an array", b"\x93NUMPY", (tmp_path / "r.npy").read_bytes()[:90]):
            (tmp_path / "r.npy").write_bytes(garbage)
            refuse("r.npy is not an array that NumPy can read", precision="int8", ranges=tmp_path / "r.npy")
        with (tmp_path / "r.npy").open("wb") as stream:
            np.savez(stream, a=np.zeros((2, 5)))
        refuse("r.npy is an archive; ranges are", precision="int8", ranges=tmp_path / "r.npy")
        refuse("is a directory: give a file", precision="int8", ranges=tmp_path)
        with pytest.raises(FileNotFoundError, match="no.npy: there is no such file"):
            encode_file(encoder, texts, tmp_path / "a.npy", precision="int8", ranges=tmp_path / "no.npy")
        (tmp_path / "one.txt").write_text("one")
        refuse("takes its ranges from two texts or more", file=tmp_path / "one.txt", precision="int8")
        assert left(tmp_path) == ["one.txt", "r.npy"]


class TestParquet:
    def records(self, tmp_path) -> Path:
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
        return path

    def test_kept_columns_stand_beside_their_vectors(self, encoder, expected, tmp_path):
        out = tmp_path / "a.parquet"
        encode_file(encoder, self.records(tmp_path), out, keep=["id", "text"], chunk_size=8)
        table = pq.read_table(out)
        assert table.column_names == ["id", "text", "embedding"]
        assert table["id"].to_pylist() == list(range(50))
        assert table["text"].to_pylist() == TEXTS
        assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[32]"
        vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(50, 32)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert pq.ParquetFile(out).num_row_groups == 7

    def test_shards(self, encoder, texts, tmp_path):
        """A directory of shards holds, in the order of their names, what one file does."""
        for out in ("a.parquet", "shards"):
            encode_file(encoder, texts, tmp_path / out, precision="ubinary", chunk_size=20)
        shards = sorted((tmp_path / "shards").iterdir())
        assert [path.name for path in shards] == [f"part-0000000{number}.parquet" for number in range(3)]
        rows = [row for path in shards for row in pq.read_table(path)["embedding"].to_pylist()]
        assert rows == pq.read_table(tmp_path / "a.parquet")["embedding"].to_pylist()
        encode_file(encoder, texts, tmp_path / "shards", chunk_size=50, overwrite=True)
        assert len(list((tmp_path / "shards").iterdir())) == 1
        assert left(tmp_path) == ["a.parquet", "shards"]

    def test_only_shards_are_overwritten(self, encoder, texts, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("precious")
        with pytest.raises(ValueError, match="holds something other than shards"):
            encode_file(encoder, texts, tmp_path / "mine", overwrite=True)
        assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"

    def test_refusals(self, encoder, texts, tmp_path):
        with pytest.raises(ValueError, match="An .npy holds vectors alone"):
            encode_file(encoder, texts, tmp_path / "a.npy", keep=["text"])
        with pytest.raises(ValueError, match="name each column once"):
            encode_file(encoder, texts, tmp_path / "a.parquet", keep=["text", "text"])
        with pytest.raises(ValueError, match="end it in .npy or .parquet"):
            encode_file(encoder, texts, tmp_path / "a.bin")


class TestResuming:
    @pytest.mark.parametrize("out", ["a.npy", "a.parquet", "shards"])
    def test_the_same_bytes_as_in_one_go(self, out, encoder, texts, tmp_path):
        options = {"precision": "int8", "calibration_rows": 20}
        interrupted(encoder, texts, tmp_path / out, **options)
        assert not (tmp_path / out).exists()
        assert len(list((tmp_path / f"{out}.partial" / "parts").iterdir())) == 4
        made = encode_file(encoder, texts, tmp_path / out, chunk_size=8, **options)
        assert (made.rows, made.resumed) == (50, 32)
        (tmp_path / "whole").mkdir()
        encode_file(encoder, texts, tmp_path / "whole" / out, chunk_size=8, **options)
        assert contents(tmp_path / out) == contents(tmp_path / "whole" / out)
        assert made.ranges.read_bytes() == (tmp_path / "whole" / made.ranges.name).read_bytes()
        assert not (tmp_path / f"{out}.partial").exists()

    def test_only_what_is_missing_is_encoded(self, encoder, texts, tmp_path, monkeypatch):
        interrupted(encoder, texts, tmp_path / "a.npy")
        seen = []
        real = Encoder.encode
        monkeypatch.setattr(
            Encoder,
            "encode",
            lambda self, model, texts: seen.extend(texts) or real(self, model, texts),
        )
        stages = []
        encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8, on_progress=lambda *said: stages.append(said))
        assert seen == TEXTS[32:]
        assert stages == [
            *(("Encoding", done, 50) for done in (32, 40, 48, 50)),
            *(("Writing", done, 50) for done in (0, 8, 16, 24, 32, 40, 48, 50)),
        ]

    def test_other_settings_are_refused(self, encoder, texts, tmp_path):
        out = tmp_path / "a.npy"
        interrupted(encoder, texts, out)
        with pytest.raises(ValueError, match=r"other settings: batch_size 8 \(now 5\). Go on with those"):
            encode_file(replace(encoder, batch_size=5), texts, out, chunk_size=8)
        with pytest.raises(ValueError, match=r"precision 'float32' \(now 'binary'\), chunk size 8 \(now 'growing'\)"):
            encode_file(encoder, texts, out, precision="binary")
        assert len(list((tmp_path / "a.npy.partial" / "parts").iterdir())) == 4
        made = encode_file(encoder, texts, out, precision="binary", overwrite=True)
        assert (made.resumed, np.load(out).shape) == (0, (50, 4))

    def test_a_run_that_another_version_began_is_refused(self, encoder, texts, tmp_path):
        out = tmp_path / "a.npy"
        interrupted(encoder, texts, out)
        manifest = tmp_path / "a.npy.partial" / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "st_reba": "0.7.1"}))
        (manifest.parent / "texts.parquet").rename(manifest.parent / "index.npy")
        with pytest.raises(ValueError, match=r"settings: st_reba '0.7.1' \(now '.*'\)\. .* anew with --overwrite"):
            encode_file(encoder, texts, out, chunk_size=8)
        assert encode_file(encoder, texts, out, chunk_size=8, overwrite=True).resumed == 0
        assert left(tmp_path) == ["a.npy"]

    def test_a_part_that_was_being_written_is_written_again(self, encoder, texts, tmp_path):
        interrupted(encoder, texts, tmp_path / "a.npy")
        (tmp_path / "a.npy.partial" / "parts" / ".writing-0").write_bytes(b"half")
        assert encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8).resumed == 32

    def test_one_process_at_a_time(self, encoder, texts, tmp_path):
        def again(stage, done, total):
            if stage == "Encoding":
                with pytest.raises(ValueError, match="another process is writing this output"):
                    encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8)

        assert encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=8, on_progress=again).rows == 50

    def test_a_folder_that_is_not_a_runs(self, encoder, texts, tmp_path):
        (tmp_path / "a.npy.partial").mkdir()
        (tmp_path / "a.npy.partial" / "mine").write_text("precious")
        with pytest.raises(ValueError, match="is not an interrupted run's"):
            encode_file(encoder, texts, tmp_path / "a.npy", overwrite=True)
        assert left(tmp_path / "a.npy.partial") == ["mine"]


class TestShardsAndRemotePaths:
    """What was killed goes on, rows are in order, and none is there twice: also where texts are in many files."""

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "in").mkdir()
        for number, (start, end) in enumerate([(0, 5), (5, 20), (20, 50)], start=9):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[start:end])
            (tmp_path / "in" / f"part-{number}.jsonl").write_text(lines)
        return tmp_path / "in"

    @pytest.fixture
    def remote(self, folder):
        filesystem = fsspec.filesystem("memory")
        filesystem.store.clear()
        for path in folder.iterdir():
            filesystem.pipe(f"/in/{path.name}", path.read_bytes())
        yield "memory://in"
        filesystem.store.clear()

    @pytest.mark.parametrize("kind", ["folder", "remote", "hub"])
    def test_the_same_bytes_as_of_one_file(self, kind, encoder, texts, folder, remote, tmp_path, monkeypatch):
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: datasets.DatasetDict({"all": rows}))
        source = {"folder": folder, "remote": remote, "hub": "org/name"}[kind]
        encode_file(encoder, texts, tmp_path / "one.npy", chunk_size=8)
        interrupted(encoder, source, tmp_path / "a.npy")
        made = encode_file(encoder, source, tmp_path / "a.npy", chunk_size=8)
        assert (made.rows, made.resumed) == (50, 32)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "one.npy").read_bytes()
        assert not (tmp_path / "a.npy.partial").exists()

    def test_a_copy_is_made_once(self, ones, remote, tmp_path):
        interrupted(ones, remote, tmp_path / "a.npy")
        stages = []
        encode_file(ones, remote, tmp_path / "a.npy", chunk_size=8, on_progress=lambda *said: stages.append(said))
        assert list(dict.fromkeys(stage for stage, done, _ in stages if done)) == ["Encoding", "Writing"]

    def test_other_shards_are_another_input(self, ones, folder, remote, tmp_path):
        for source in (folder, remote):
            interrupted(ones, source, tmp_path / "a.npy")
            line = b'{"text": "more"}\n'
            if source == remote:
                fsspec.filesystem("memory").pipe("/in/part-99.jsonl", line)
            else:
                (folder / "part-99.jsonl").write_bytes(line)
            with pytest.raises(ValueError, match=r"holds an interrupted run of other settings: input size \d+ \(now"):
                encode_file(ones, source, tmp_path / "a.npy", chunk_size=8)
            assert encode_file(ones, source, tmp_path / "a.npy", overwrite=True).rows == 51
            (tmp_path / "a.npy").unlink()

    def test_refusals(self, ones, folder, remote, tmp_path):
        with pytest.raises(ValueError, match="lies in the folder that is read: choose another --out"):
            encode_file(ones, folder, folder / "a.npy")
        fsspec.filesystem("memory").pipe("/in/part-10.jsonl", b'{"text": "a"}\n{"body": "b"}\n')
        with pytest.raises(
            ValueError, match=r"memory:///?in/part-10.jsonl, line 2 lacks text \(texts\); its columns are body"
        ):
            encode_file(ones, remote, tmp_path / "a.npy")
        with pytest.raises(FileNotFoundError, match="memory://no.txt: there is no such file"):
            encode_file(ones, "memory://no.txt", tmp_path / "a.npy")
        assert left(tmp_path) == ["in"]


class TestFewTexts:
    """What nobody has asked for a chunk size of: several chunks, and progress by the batch."""

    @pytest.fixture
    def many(self, tmp_path):
        path = tmp_path / "many.txt"
        path.write_text("".join(f"{number} {'word ' * (number % 7)}\n" for number in range(200)))
        return path

    @pytest.mark.parametrize("devices", [1, 2])
    def test_are_several_chunks_and_told_of_by_batch(self, devices, encoder, many, tmp_path, spawned_by_fork):
        told = []
        engine = LocalEngine(["cpu"] * devices)
        made = encode_file(
            encoder, many, tmp_path / "a.parquet", engine=engine, on_progress=lambda *said: told.append(said)
        )
        assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 7
        steps = [done for stage, done, total in told if (stage, total) == ("Encoding", made.rows)]
        assert steps == list(range(0, 201, 8)), "none goes back"
        encode_file(encoder, many, tmp_path / "b.parquet", chunk_size=200)
        one, other = (pq.read_table(tmp_path / name)["embedding"] for name in ("a.parquet", "b.parquet"))
        np.testing.assert_allclose(np.stack(one.to_numpy()), np.stack(other.to_numpy()), atol=1e-5)

    def test_ranges_are_told_of_too(self, encoder, many, tmp_path):
        told = []
        encode_file(encoder, many, tmp_path / "a.npy", precision="int8", calibration_rows=50,
                    on_progress=lambda *said: told.append(said))  # fmt: skip
        assert [said[1:] for said in told if said[0] == "Calibrating"] == [
            (done, 50) for done in (*range(8, 50, 8), 50)
        ]

    def test_cut_into_chunks(self, encoder, many, tmp_path):
        told = []
        encode_file(replace(encoder, chunk_tokens=4), many, tmp_path / "a.parquet",
                    on_progress=lambda *said: told.append(said))  # fmt: skip
        steps = [done for stage, done, total in told if (stage, total) == ("Encoding", 200)]
        assert len(steps) > 20
        assert steps == sorted(steps)
        assert steps[-1] == 200


class TestRefusals:
    def test_an_output_that_is_there(self, encoder, texts, tmp_path):
        for out, message in (("a.npy", "exists: choose another --out"), ("d.npy", "is a directory")):
            (tmp_path / "d.npy").mkdir(exist_ok=True)
            (tmp_path / "a.npy").write_text("mine")
            with pytest.raises(ValueError, match=message):
                encode_file(encoder, texts, tmp_path / out)
        assert (tmp_path / "a.npy").read_text() == "mine"
        encode_file(encoder, texts, tmp_path / "a.npy", overwrite=True)
        assert len(np.load(tmp_path / "a.npy")) == 50

    def test_bad_rows_are_found_before_anything_is_encoded(self, encoder, tmp_path):
        path = tmp_path / "records.jsonl"
        path.write_text('{"text": "a"}\n' * 30 + "{\n")
        with pytest.raises(ValueError, match="records.jsonl, line 31: not JSON"):
            encode_file(encoder, path, tmp_path / "a.npy", chunk_size=8)
        assert left(tmp_path) == ["records.jsonl"]

    def test_an_input_that_changes_while_it_is_copied(self, ones, texts, tmp_path):
        def spoil(stage, done, total):
            if (stage, done) == ("Checking", 50):
                texts.write_text("another\n" * 50)

        with pytest.raises(ValueError, match="texts.txt was changed during the run"):
            encode_file(ones, texts, tmp_path / "a.npy", chunk_size=8, on_progress=spoil)
        assert left(tmp_path) == []
        assert encode_file(ones, texts, tmp_path / "a.npy", chunk_size=8).rows == 50

    def test_an_input_that_goes_when_it_is_copied(self, ones, texts, tmp_path):
        """What is encoded is the copy."""

        def remove(stage, done, total):
            if stage == "Encoding":
                texts.unlink(missing_ok=True)

        assert encode_file(ones, texts, tmp_path / "a.npy", chunk_size=8, on_progress=remove).rows == 50

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"batch_size": 0}, "batch_size=0: give a whole number from 1"),
            ({"truncate_dim": 0}, "truncate_dim=0: give a whole number from 1"),
            ({"truncate_dim": 33}, "truncate_dim=33: the model's vectors have 32 values"),
            ({"prompt": "a", "prompt_name": "query"}, "in full or by its name, not both"),
            ({"prompt": "\udcff"}, "The prompt holds half of a surrogate pair"),
            ({"prompt_name": "passage"}, 'prompt_name="passage": the model has "query"'),
            ({"model": "no/such-model"}, "no/such-model: there is no such directory, and the Hub gives no such model"),
            ({"model": "no/such-model"}, r"\(.+[^.]\)\. Check the name, or give a directory that `st-reba build`"),
            ({"model": "../no/such/../model"}, "there is no such directory"),
            ({"revision": "main"}, "is a directory: a revision is for models of the Hub"),
        ],
    )
    def test_of_encoders(self, changes, message, encoder, texts, tmp_path):
        with pytest.raises(ValueError, match=message):
            encode_file(replace(encoder, **changes), texts, tmp_path / "a.npy")
        assert left(tmp_path) == []

    def test_of_numbers_and_devices(self, encoder, texts, tmp_path):
        with pytest.raises(ValueError, match="chunk_size=0: give a whole number from 1"):
            encode_file(encoder, texts, tmp_path / "a.npy", chunk_size=0)
        for devices in ([], ["cpu", "cuda:0"], [""]):
            with pytest.raises(ValueError, match="give one or more of one kind"):
                LocalEngine(devices)


def test_rows_in_memory_do_not_grow_with_the_file(encoder, tmp_path, monkeypatch):
    """Counted, not weighed: the chunk that is encoded, and the next one."""
    path = tmp_path / "many.txt"
    path.write_text("a\n" * 1000)
    most, encoded = 0, 0
    read = []
    real = ParquetCopy.read

    def counted(self, number):
        rows = real(self, number)
        read.append(len(rows[0]))
        return rows

    monkeypatch.setattr(ParquetCopy, "read", counted)

    class Counting(Ones):
        def encode(self, model, texts):
            nonlocal most, encoded
            encoded += len(texts)
            vectors = super().encode(model, texts)
            most = max(most, sum(read) - encoded)
            return vectors

    encode_file(Counting(encoder.model), path, tmp_path / "a.npy", chunk_size=16)
    assert encoded == 1000
    assert most <= 16


def contents(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.iterdir())] if path.is_dir() else [path.read_bytes()]
