"""What is written, from what, and that an interrupted run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import quantize_embeddings

from st_reba import CausalTransformer, PromptRepsModule, encode_chunks
from st_reba.encode import Encoder, LocalEngine, encode_file
from st_reba.encode import encoder as encoder_file
from st_reba.modules.multi_vector import multi_vector_encoder

from ..conftest import change
from .conftest import TEXTS, contents, interrupted, names


@pytest.fixture(scope="module")
def model(model_directory):
    return SentenceTransformer(str(model_directory), device="cpu")


@pytest.fixture(scope="module")
def expected(model):
    return model.encode(TEXTS)


@pytest.fixture
def encoder(model_directory):
    return Encoder(str(model_directory), batch_size=8)


def vectors_of(path: Path) -> np.ndarray:
    return np.array(pq.read_table(path)["embedding"].to_pylist())


class TestOutputs:
    def test_npy_is_what_encode_and_save_give(self, encoder, texts, expected, tmp_path):
        """Rows in order, and the very bytes of numpy.save."""
        made = encode_file(encoder, texts, tmp_path / "deep" / "a.npy", chunk_size=8)
        vectors = np.load(tmp_path / "deep" / "a.npy")
        assert (made.rows, made.texts, made.resumed) == (50, 50, 0)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        np.save(tmp_path / "b.npy", vectors)
        assert (tmp_path / "deep" / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
        assert names(tmp_path / "deep") == ["a.npy"]

    def test_settings_reach_encode(self, encoder, texts, model, expected, tmp_path):
        asked = replace(encoder, prompt_name="query", truncate_dim=12, normalize=True)
        encode_file(asked, texts, tmp_path / "a.npy")
        wanted = model.encode(TEXTS, prompt="find: ", truncate_dim=12, normalize_embeddings=True)
        np.testing.assert_allclose(np.load(tmp_path / "a.npy"), wanted, atol=1e-5)
        encode_file(replace(encoder, dtype="bfloat16"), texts, tmp_path / "b.npy")
        half = np.load(tmp_path / "b.npy")
        assert half.dtype == np.float32
        assert model.similarity_pairwise(half, expected).min() > 0.99
        for precision in ("binary", "ubinary"):
            encode_file(replace(encoder, precision=precision), texts, tmp_path / f"{precision}.npy")
            assert np.array_equal(np.load(tmp_path / f"{precision}.npy"), quantize_embeddings(expected, precision))

    def test_parquet_keeps_columns_and_shards_are_parquet(self, encoder, expected, tmp_path):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
        for out in ("a.parquet", "shards"):
            encode_file(encoder, path, tmp_path / out, keep=["id", "text"], chunk_size=20)
            table = pq.read_table(tmp_path / out)
            assert table.column_names == ["id", "text", "embedding"]
            assert (table["id"].to_pylist(), table["text"].to_pylist()) == ([*range(50)], TEXTS)
            assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[32]"
            np.testing.assert_allclose(vectors_of(tmp_path / out), expected, atol=1e-5)
        assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
        assert names(tmp_path / "shards") == [f"part-0000000{number}.parquet" for number in range(3)]


def test_a_row_for_each_chunk_also_after_a_stop(encoder, model, tmp_path):
    """With a column that is kept; the last text has no chunk."""
    cut, read = replace(encoder, chunk_tokens=4, chunk_overlap=1), [*TEXTS, ""]
    path, out = tmp_path / "texts.jsonl", tmp_path / "a.parquet"
    path.write_text("".join(json.dumps({"text": text, "id": f"<{i}>"}) + "\n" for i, text in enumerate(read)))
    found = encode_chunks(model, read, chunk_tokens=4, overlap=1)
    rows = [(f"<{i}>", i, *span) for i, each in enumerate(found) for span in each.spans]
    interrupted(cut, path, out, at=24, keep=["id"])
    with pytest.raises(ValueError, match="chunk_tokens 4 "):
        encode_file(encoder, path, out, keep=["id"], chunk_size=8)
    made = encode_file(cut, path, out, keep=["id"], chunk_size=8)
    assert (made.rows, made.texts, made.resumed) == (len(rows), 51, 16)
    table = pq.read_table(out)
    assert table.column_names == ["id", "document", "start", "end", "embedding"]
    assert list(zip(*(table[name].to_pylist() for name in table.column_names[:4]), strict=True)) == rows
    np.testing.assert_allclose(vectors_of(out), np.concatenate([each.vectors for each in found]), atol=1e-5)


class TestLists:
    """Sparse models and those that give each token a vector, in Parquet: a list a text."""

    @pytest.fixture(scope="class")
    def saved(self, demo_path, tmp_path_factory):
        """``saved(class)``: a model of that class, and its directory."""
        directory = tmp_path_factory.mktemp("lists")
        sparse = SparseEncoder(modules=[PromptRepsModule(demo_path, top_k=6)], device="cpu")
        sparse.prompts = {"query": "Query: ", "document": ""}
        each = multi_vector_encoder(CausalTransformer(demo_path), dimension=8, fit_texts=TEXTS)
        for model in (sparse, each):
            model.save_pretrained(str(directory / type(model).__name__), create_model_card=False)
        return lambda kind: (
            kind(str(directory / kind.__name__), model_kwargs={"dtype": "float32"}),
            Encoder(str(directory / kind.__name__), batch_size=8, dtype="float32"),
        )

    @pytest.mark.parametrize("kind", [SparseEncoder, MultiVectorEncoder])
    def test_what_the_model_gives_also_after_a_stop(self, kind, saved, texts, tmp_path):
        """Under the name "query" texts are queries."""
        loaded, encoder = saved(kind)
        encoder = replace(encoder, prompt_name="query") if kind is SparseEncoder else encoder
        interrupted(encoder, texts, tmp_path / "a.parquet")
        made = encode_file(encoder, texts, tmp_path / "a.parquet", chunk_size=8)
        assert (made.rows, made.texts, made.resumed) == (50, 50, 24)
        encode_file(encoder, texts, tmp_path / "shards", chunk_size=8)
        table = pq.read_table(tmp_path / "a.parquet")
        assert table.equals(pq.read_table(tmp_path / "shards"))
        if kind is MultiVectorEncoder:
            for row, vectors in zip(table["vectors"].to_pylist(), loaded.encode_document(TEXTS), strict=True):
                np.testing.assert_allclose(row, np.asarray(vectors), atol=1e-5)
            return
        found = loaded.encode_query(TEXTS)
        dense = np.zeros(tuple(found.shape))
        for row, places in enumerate(table["indices"].to_pylist()):
            assert places == sorted(places)
            dense[row, places] = table["values"][row].as_py()
        np.testing.assert_allclose(dense, found.to_dense().numpy(), atol=1e-5)

    def test_what_they_have_no_place_for_is_refused_before_one_is_loaded(self, saved, texts, tmp_path, monkeypatch):
        _, encoder = saved(SparseEncoder)
        monkeypatch.setattr(Encoder, "load", lambda self, device: pytest.fail("loaded"))
        for settings, out, said in [
            ({}, "a.npy", "holds one vector a text and nothing else: give an --out that ends in .parquet"),
            ({"precision": "binary"}, "a.parquet", "precision: not for a SparseEncoder such as .*. Leave"),
        ]:
            with pytest.raises(ValueError, match=said):
                encode_file(replace(encoder, **settings), texts, tmp_path / out)
        assert names(tmp_path) == ["texts.txt"]


class TestResuming:
    @pytest.mark.parametrize("out", ["a.npy", "a.parquet", "shards"])
    def test_the_same_bytes_as_in_one_go(self, out, encoder, texts, tmp_path, spawned_by_fork):
        """Also on another number of devices."""
        interrupted(encoder, texts, tmp_path / out)
        assert not (tmp_path / out).exists()
        assert len(names(tmp_path / f"{out}.partial" / "parts")) == 3
        made = encode_file(encoder, texts, tmp_path / out, chunk_size=8, engine=LocalEngine(["cpu", "cpu"]))
        assert (made.rows, made.resumed) == (50, 24)
        encode_file(encoder, texts, tmp_path / "whole" / out, chunk_size=8)
        assert contents(tmp_path / out) == contents(tmp_path / "whole" / out)
        assert names(tmp_path) == sorted([out, "texts.txt", "whole"])

    def test_other_settings_are_refused(self, encoder, texts, tmp_path):
        out = tmp_path / "a.npy"
        interrupted(encoder, texts, out)
        with pytest.raises(ValueError, match=r"other settings: batch_size 8 \(now 5\). Use those"):
            encode_file(replace(encoder, batch_size=5), texts, out, chunk_size=8)
        binary = replace(encoder, precision="binary")
        with pytest.raises(ValueError, match=r"precision 'float32' \(now 'binary'\), chunk size 8 \(now 'growing'\)"):
            encode_file(binary, texts, out)
        change(tmp_path / "a.npy.partial" / "manifest.json", st_reba="0.7.1")
        with pytest.raises(ValueError, match=r"settings: st_reba '0.7.1' \(now '.*'\)\. .* again with --overwrite"):
            encode_file(encoder, texts, out, chunk_size=8)
        assert len(names(tmp_path / "a.npy.partial" / "parts")) == 3
        made = encode_file(binary, texts, out, overwrite=True)
        assert (made.resumed, np.load(out).shape) == (0, (50, 4))

    def test_one_process_at_a_time(self, fake, texts, tmp_path):
        def again(stage, done, total):
            if stage == "Encoding":
                with pytest.raises(ValueError, match="another process is writing this output"):
                    encode_file(fake, texts, tmp_path / "a.npy", chunk_size=8)

        assert encode_file(fake, texts, tmp_path / "a.npy", chunk_size=8, on_progress=again).rows == 50


class TestInputs:
    @pytest.mark.parametrize("source", ["in", "memory://in", "org/name"])
    def test_the_same_bytes_as_of_one_file(self, source, fake, texts, memory, tmp_path, monkeypatch):
        """Of a folder, of a remote one, and of a data set of the Hub."""
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: datasets.DatasetDict({"all": rows}))
        monkeypatch.chdir(tmp_path)
        Path("in").mkdir()
        for number, (start, end) in enumerate([(0, 5), (5, 20), (20, 50)], start=9):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[start:end])
            Path("in", f"part-{number}.jsonl").write_text(lines)
            memory.pipe(f"/in/part-{number}.jsonl", lines.encode())
        encode_file(fake, texts, tmp_path / "one.npy", chunk_size=8)
        interrupted(fake, source, tmp_path / "a.npy")
        made = encode_file(fake, source, tmp_path / "a.npy", chunk_size=8)
        assert (made.rows, made.resumed) == (50, 24)
        assert contents(tmp_path / "a.npy") == contents(tmp_path / "one.npy")
        assert not (tmp_path / "a.npy.partial").exists()

    def test_an_input_that_changes_while_it_is_copied_and_one_that_goes_afterwards(self, fake, texts, tmp_path):
        def spoil(stage, done, total):
            if (stage, done) == ("Checking", 50):
                texts.write_text("another\n" * 50)
            if stage == "Encoding":
                texts.unlink(missing_ok=True)

        with pytest.raises(ValueError, match="texts.txt was changed during the run"):
            encode_file(fake, texts, tmp_path / "a.npy", on_progress=spoil)
        assert names(tmp_path) == ["texts.txt"]
        go = lambda stage, done, total: spoil(stage, 0, total)  # noqa: E731
        assert encode_file(fake, texts, tmp_path / "a.npy", on_progress=go).rows == 50

    @pytest.mark.parametrize("devices", [1, 2])
    def test_few_texts_are_several_chunks_and_told_of_by_batch(self, devices, encoder, tmp_path, spawned_by_fork):
        path = tmp_path / "many.txt"
        path.write_text("".join(f"{number} {'word ' * (number % 7)}\n" for number in range(200)))
        told, engine = [], LocalEngine(["cpu"] * devices)
        encode_file(encoder, path, tmp_path / "a.parquet", engine=engine, on_progress=lambda *said: told.append(said))
        assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 7
        assert [at for stage, *at in told if stage == "Encoding"] == [[done, 200] for done in range(0, 201, 8)]


REFUSALS = [
    ({"batch_size": 0}, {}, "batch_size=0: give a whole number of 1 or more"),
    ({"truncate_dim": 33}, {}, "truncate_dim=33: the model's vectors have 32 values"),
    ({"precision": "int8"}, {}, "precision='int8': use 'float32' or 'binary' or 'ubinary'"),
    ({"prompt": "a", "prompt_name": "query"}, {}, "Give prompt or prompt_name, not both"),
    ({"prompt": "\udcff"}, {}, "The prompt holds half of a surrogate pair"),
    ({"prompt_name": "passage"}, {}, "Prompt name 'passage' not found in the configured prompts"),
    ({"model": "no/such-model"}, {}, r"nor a model on the Hub \(.+[^.]\)\. Check the name, or"),
    ({"revision": "main"}, {}, "is a directory: give a revision only for models on the Hub"),
    ({"chunk_overlap": 4}, {}, "chunk_overlap=4 needs chunk_tokens"),
    ({"chunk_tokens": 4, "chunk_overlap": 4}, {}, "overlap=4: give at least 1 token per chunk"),
    ({"chunk_tokens": 4}, {"out": "a.parquet", "keep": ["start"]}, "keep start: give each column once, and rename"),
    ({}, {"out": ".."}, "holds files other than shards"),
]


@pytest.mark.parametrize(("changes", "given", "message"), REFUSALS)
def test_refusals(changes, given, message, encoder, texts, tmp_path):
    options = {"out": "a.npy", **given}
    with pytest.raises(ValueError, match=message):
        encode_file(replace(encoder, **changes), texts, tmp_path / options.pop("out"), **options)
    assert names(tmp_path) == ["texts.txt"]


def test_a_model_that_reads_pairs_is_refused(shallow_path, texts, tmp_path, monkeypatch):
    CrossEncoder(shallow_path, num_labels=1, device="cpu").save_pretrained(str(tmp_path / "pairs"))
    with pytest.raises(ValueError, match="is a CrossEncoder, which reads texts in pairs"):
        encode_file(Encoder(str(tmp_path / "pairs")), texts, tmp_path / "a.parquet")
    on_the_hub = {"load_file_path": lambda *_, **__: "commit/modules.json", "saved_class": lambda *_: "CrossEncoder"}
    for name, found in on_the_hub.items():
        monkeypatch.setattr(encoder_file, name, found)
    with pytest.raises(ValueError, match="org/pairs is a CrossEncoder, which reads texts in pairs"):
        Encoder("org/pairs").pinned()


def test_an_adapter_is_for_a_model_at_a_revision(tmp_path, monkeypatch):
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text(json.dumps({"base_model_name_or_path": "org/base", "revision": "v1"}))
    monkeypatch.setattr(encoder_file, "load_file_path", lambda model, name, revision=None: f"{revision}/{name}")
    assert encoder_file.model_files(str(tmp_path), None)[0] == ["org/base@v1"]
    adapter.write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config.json is \[\], and not an object"):
        encoder_file.model_files(str(tmp_path), None)
