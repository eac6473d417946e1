"""An output takes its place without destroying anything that its user has not given up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from st_reba.encode import encode_file


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a\nb\nc\n")
    return path


def when_encoded(act):
    return lambda stage, done, total: act() if (stage, done) == ("Encoding", total) else None


def write_mine(path: Path) -> None:
    if path.suffix:
        path.write_text("mine")
    else:
        path.mkdir(exist_ok=True)
        (path / "part-00000000.parquet").write_text("mine")


def mine(path: Path) -> bool:
    return (path if path.suffix else path / "part-00000000.parquet").read_bytes() == b"mine"


def rows(path: Path) -> int:
    return len(np.load(path)) if path.suffix == ".npy" else pq.read_table(path).num_rows


@pytest.mark.parametrize("out", ["a.npy", "a.parquet", "shards"])
class TestWhatAppearsMeanwhile:
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_is_left_as_it_is(self, out, overwrite, ones, texts, tmp_path):
        """With --overwrite, too: nobody has said that about a file that was not there."""
        path = tmp_path / out
        appear = when_encoded(lambda: write_mine(path))
        with pytest.raises(FileExistsError, match=f"{out} appeared, or was written, while this ran: .* vectors are in"):
            encode_file(ones, texts, path, overwrite=overwrite, chunk_size=2, on_progress=appear)
        assert mine(path)
        beside = path.with_name(f"{path.stem}-1{path.suffix}")
        assert rows(beside) == 3
        assert sorted(left.name for left in tmp_path.iterdir()) == sorted([out, beside.name, "texts.txt"])

    def test_is_left_where_another_was_to_be_replaced(self, out, ones, texts, tmp_path):
        path = tmp_path / out
        encode_file(ones, texts, path)
        (tmp_path / f"{path.stem}-1{path.suffix}").mkdir()
        (tmp_path / f"{path.stem}-1{path.suffix}" / "mine").touch()
        with pytest.raises(FileExistsError, match=f"{path.stem}-2"):
            encode_file(ones, texts, path, overwrite=True, on_progress=when_encoded(lambda: write_mine(path)))
        assert mine(path)
        assert rows(tmp_path / f"{path.stem}-2{path.suffix}") == 3

    def test_what_was_there_is_replaced(self, out, ones, texts, tmp_path):
        path = tmp_path / out
        write_mine(path)
        encode_file(ones, texts, path, overwrite=True)
        assert rows(path) == 3
        assert sorted(left.name for left in tmp_path.iterdir()) == sorted([out, "texts.txt"])


def test_on_a_file_system_without_links(ones, texts, tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    encode_file(ones, texts, tmp_path / "a.npy")
    assert rows(tmp_path / "a.npy") == 3
    with pytest.raises(FileExistsError):
        encode_file(ones, texts, tmp_path / "b.npy", on_progress=when_encoded(lambda: write_mine(tmp_path / "b.npy")))
    assert mine(tmp_path / "b.npy")


class TestRanges:
    def run(self, ones, texts, out, **options):
        np.save(out.with_name("given.npy"), np.array([[0, 0], [1, 1]], np.float32))
        return encode_file(ones, texts, out, precision="int8", ranges=out.with_name("given.npy"), **options)

    def test_that_appear_meanwhile(self, ones, texts, tmp_path):
        path = tmp_path / "a.ranges.npy"
        with pytest.raises(FileExistsError, match=r"a.ranges.npy appeared.* the ranges are in .*a.ranges-1.npy"):
            self.run(ones, texts, tmp_path / "a.npy", on_progress=when_encoded(lambda: write_mine(path)))
        assert mine(path)
        assert np.load(tmp_path / "a.ranges-1.npy").tolist() == [[0, 0], [1, 1]]
        assert rows(tmp_path / "a.npy") == 3

    def test_of_somebody_else_beside_an_interrupted_run(self, ones, texts, tmp_path):
        def stop(stage, done, total):
            if (stage, done) == ("Encoding", 2):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run(ones, texts, tmp_path / "a.npy", chunk_size=2, on_progress=stop)
        write_mine(tmp_path / "a.ranges.npy")
        with pytest.raises(FileExistsError):
            self.run(ones, texts, tmp_path / "a.npy", chunk_size=2)
        assert mine(tmp_path / "a.ranges.npy")

    def test_their_own_file_as_input(self, ones, texts, tmp_path):
        """The ranges of a run, given again to the same run: nothing is lost."""
        self.run(ones, texts, tmp_path / "a.npy")
        ranges = tmp_path / "a.ranges.npy"
        before = ranges.read_bytes()
        encode_file(ones, texts, tmp_path / "a.npy", precision="int8", ranges=ranges, overwrite=True)
        assert ranges.read_bytes() == before


class TestWhatIsReadIsNotWritten:
    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("through_a_link", [False, True])
    def test_the_input_in_the_outputs_place(self, overwrite, through_a_link, ones, tmp_path):
        shards = tmp_path / "shards"
        shards.mkdir()
        source = shards / "part-00000000.parquet"
        pq.write_table(pa.table({"text": ["a"]}), source)
        before = source.read_bytes()
        given = source
        if through_a_link:
            given = tmp_path / "link.parquet"
            given.symlink_to(source)
        for out in (shards, source):
            with pytest.raises(ValueError, match="is read, but lies where --out .* is written: choose another --out"):
                encode_file(ones, given, out, overwrite=overwrite)
        link = tmp_path / "elsewhere"
        link.symlink_to(shards)
        with pytest.raises(ValueError, match="is read, but lies where"):
            encode_file(ones, given, link, overwrite=overwrite)
        assert source.read_bytes() == before

    def test_the_input_in_the_folder_of_parts(self, ones, texts, tmp_path):
        (tmp_path / "a.npy.partial").mkdir()
        inside = texts.rename(tmp_path / "a.npy.partial" / "texts.txt")
        with pytest.raises(ValueError, match="is read, but lies where"):
            encode_file(ones, inside, tmp_path / "a.npy", overwrite=True)
        assert inside.read_text() == "a\nb\nc\n"

    def test_ranges_in_the_outputs_place(self, ones, texts, tmp_path):
        np.save(tmp_path / "a.npy", np.zeros((2, 2)))
        with pytest.raises(ValueError, match="is read, but lies where"):
            encode_file(ones, texts, tmp_path / "a.npy", precision="int8", ranges=tmp_path / "a.npy", overwrite=True)

    def test_the_output_in_the_model(self, ones, texts):
        """Its parts would be files of the model, which must not change."""
        with pytest.raises(ValueError, match="lies in the model's own directory"):
            encode_file(ones, texts, Path(ones.model) / "a.npy")
