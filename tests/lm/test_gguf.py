"""A GGUF file is a model like any other: converted once, kept, and equal to what transformers reads from it."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, ReBAModule, TwinTower
from st_reba.lm import gguf
from st_reba.lm.gguf import is_gguf
from st_reba.modules.lm_head import head_blocks

from .. import ggufs, processes
from ..backbones import TEXTS
from ..conftest import pipeline, raising


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """``files(type)``: a file whose matrices are stored as that, in a directory of its own."""

    @cache
    def file(kind: str) -> Path:
        return ggufs.write(tmp_path_factory.mktemp(kind) / "tiny.gguf", kind)

    return lambda kind="Q8_0": file(kind)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Where converted files are kept, for tests of what is read, which may find there what others have converted."""
    with pytest.MonkeyPatch.context() as patch:
        ggufs.keep_at(tmp_path_factory.mktemp("assets"), patch)
        yield


@pytest.fixture
def kept(tmp_path, monkeypatch, common):
    """The same place of the test's own, empty."""
    ggufs.keep_at(tmp_path / "assets", monkeypatch)
    return tmp_path / "assets" / "st_reba" / "gguf"


def left_in(kept: Path) -> list[Path]:
    return [path for path in kept.glob("*/*") if path.is_dir()]


@pytest.fixture
def conversions(monkeypatch):
    """The precisions that files are converted to from here on."""
    asked = []
    read = gguf._read

    def counted(source, dtype, *others):
        asked.append(str(dtype).removeprefix("torch."))
        return read(source, dtype, *others)

    monkeypatch.setattr(gguf, "_read", counted)
    return asked


@pytest.mark.usefixtures("common")
class TestRead:
    def test_as_the_model_that_was_written(self, files, tmp_path):
        """Nothing is lost in a file of full precision, and little in Q8_0; the oracle never was a file of GGUF."""
        ggufs.original().save_pretrained(tmp_path)
        ggufs.tokenizer().save_pretrained(tmp_path)
        expected, exact, rounded = (
            pipeline(ReBAModule(str(path))).encode(TEXTS) for path in (tmp_path, files("F32"), files("Q8_0"))
        )
        np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-6)
        assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.1
        head = ggufs.original().lm_head.weight.detach()
        for source in (str(files("F32")), CausalTransformer(str(files("F32")))):
            torch.testing.assert_close(torch.cat(list(head_blocks(source))), head)

    def test_nothing_beside_it(self, files, tmp_path):
        """Configuration and tokenizer come from the file, whatever lies beside it; a name needs no suffix."""
        blob = tmp_path / "sha256-0123"
        blob.write_bytes(files().read_bytes())
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}')
        assert is_gguf(str(blob))
        module = CausalTransformer(str(blob))
        assert module.model.config.model_type == "llama"
        assert module.tokenizer.eos_token == ggufs.tokenizer().eos_token

    def test_named_as_transformers_names_it(self, files):
        file, asked = files(), {"gguf_file": files().name}
        named = CausalTransformer(str(file.parent.parent), model_kwargs={**asked, "subfolder": file.parent.name})
        assert named.model.config.name_or_path == CausalTransformer(str(file)).model.config.name_or_path
        # What it takes where st_reba does not help.
        CausalTransformer(str(file.parent), model_args=asked, config_kwargs=dict(asked), processor_kwargs=dict(asked))
        assert asked == {"gguf_file": file.name}

    def test_what_is_saved_is_an_ordinary_directory(self, files, tmp_path):
        model = pipeline(ReBAModule(str(files())))
        model.save_pretrained(str(tmp_path))
        assert "quantization_config" not in json.loads((tmp_path / "0_ReBAModule" / "config.json").read_text())
        assert "gguf_file" not in (tmp_path / "0_ReBAModule" / "sentence_bert_config.json").read_text()
        assert not list(tmp_path.rglob("*.gguf"))
        np.testing.assert_array_equal(SentenceTransformer(str(tmp_path)).encode(TEXTS), model.encode(TEXTS))
        assert "`tiny`" in (tmp_path / "README.md").read_text()


def test_what_is_one():
    for name in ("org/repo/model.gguf", "org/repo/Q4/model.GGUF", "org/repo:Q4_K_M", "missing.gguf"):
        assert is_gguf(name), name
    for name in ("org/repo", "repo", "C:/models/repo", "/a/b"):
        assert not is_gguf(name), name


class TestKept:
    def test_converted_once_whatever_its_name_and_again_for_other_versions(
        self, files, kept, conversions, tmp_path, monkeypatch
    ):
        renamed = tmp_path / "other-name.gguf"
        renamed.write_bytes(files().read_bytes())
        half = gguf.converted(files(), torch.bfloat16)
        for name in (files(), files(), renamed):
            whole = gguf.converted(name)
        # From float32 both are the same numbers, and need no conversion; what came first takes half the room.
        assert gguf.converted(files(), "float16") == whole
        assert (half / "model.safetensors").stat().st_size < 0.6 * (whole / "model.safetensors").stat().st_size
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(gguf.converted, [files()] * 4))) == 1
        assert conversions == ["bfloat16", "float32"]
        assert [path.name for path in kept.glob("*/*/*")] == ["tiny", "tiny"]
        monkeypatch.setattr(gguf.transformers, "__version__", "5.99")
        gguf.converted(files())
        assert conversions == ["bfloat16", "float32", "float32"]

    def test_by_content(self, kept, conversions, tmp_path):
        """Another file of the same name, size and time is another model."""
        file = tmp_path / "model.gguf"
        embeddings, sizes = [], set()
        for seed in range(2):
            ggufs.write(file, seed=seed)
            os.utime(file, (0, 0))
            sizes.add(file.stat().st_size)
            embeddings.append(pipeline(CausalTransformer(str(file))).encode(TEXTS))
        assert (len(sizes), len(conversions)) == (1, 2)
        assert not np.array_equal(*embeddings)

    def test_a_killed_conversion_leaves_nothing(self, files, kept, tmp_path):
        """Killed when all but the last step is done, while another process waits for it."""
        script = (
            "import functools, pathlib, sys, time\n"
            "from st_reba.lm import gguf\n"
            "gguf.cached_assets_path = functools.partial(gguf.cached_assets_path, assets_dir=sys.argv[3])\n"
            "def stall(*_):\n"
            "    pathlib.Path(sys.argv[2]).touch()\n"
            "    time.sleep(600)\n"
            "gguf._check_tokenizer = stall\n"
            "gguf.converted(pathlib.Path(sys.argv[1]))\n"
        )
        mark, printed = tmp_path / "stalled", tmp_path / "printed"
        process = processes.start("-c", script, files(), mark, tmp_path / "assets", out=printed)
        try:
            while not mark.exists():
                assert process.poll() is None, printed.read_text()
                time.sleep(0.05)
            assert list(kept.glob("*/.*/whole/tiny/model.safetensors"))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(gguf.converted, files())
                time.sleep(0.5)
                assert not waiting.done()
                process.kill()
                directory = waiting.result(timeout=60)
        finally:
            process.kill()
        assert (directory / "model.safetensors").is_file()
        assert [path.name for path in kept.glob("*/.*")] == []

    def test_a_failed_conversion_leaves_nothing(self, files, kept, monkeypatch):
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(gguf, "_check_tokenizer", raising(full))
        with pytest.raises(OSError, match=r"No space left on device, .*: '.*gguf"):
            gguf.converted(files())
        assert left_in(kept) == []


class TestRefused:
    def test_without_the_reader(self, files, kept, monkeypatch):
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ImportError, match=r'A GGUF file needs gguf: pip install "st-reba\[gguf\]"\.'):
            ReBAModule(str(files()))

    def test_files_that_are_no_whole_gguf(self, files, kept, tmp_path):
        content, cut = files().read_bytes(), tmp_path / "cut.gguf"
        for share in (0.02, 0.3, 0.999):
            cut.write_bytes(content[: int(share * len(content))])
            with pytest.raises(ValueError, match=r"cut\.gguf cannot be read as a GGUF file by transformers"):
                ReBAModule(str(cut))
        assert left_in(kept) == []
        cut.write_text("version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(ValueError, match=r"cut\.gguf is not a GGUF file: it does not begin with.*lfs pull"):
            ReBAModule(str(cut))

    NOT_WHOLE = [
        ({"architecture": "clip"}, r"clip.* not supported yet.*as its authors publish it"),
        # transformers would fill in random weights.
        ({"leave_out": "blk.1.attn_q.weight"}, r"lacks 1 weights, such as model\.layers\.1.* one part of several"),
        ({"says": {"num_hidden_layers": 5000}}, r"asks for 5000 \(llama\.block_count\), and has 21 tensors: at mo"),
        ({"says": {"num_hidden_layers": 20}}, r"describes a larger model than its checkpoint holds"),
        ({"says": {"intermediate_size": 10**7}}, r"than its checkpoint holds: .* shape \(10000000, 32\)"),
        ({"says": {"vocab_size": 10**7}}, r"describes a larger model than its checkpoint holds"),
    ]

    @pytest.mark.parametrize(("given", "message"), NOT_WHOLE)
    def test_what_cannot_be_made_whole(self, given, message, kept, tmp_path):
        """Before memory is taken for it."""
        file = ggufs.write(tmp_path / "tiny.gguf", **given)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=message):
            ReBAModule(str(file))
        # In kilobytes, with what the conversion itself takes.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
        assert left_in(kept) == []

    def test_a_tokenizer_that_changes_when_saved(self, files, kept, monkeypatch):
        loaded = gguf.AutoTokenizer.from_pretrained

        def changed(path, **kwargs):
            tokenizer = loaded(path, **kwargs)
            if not kwargs:
                tokenizer.add_tokens(["ello"])
            return tokenizer

        monkeypatch.setattr(gguf.AutoTokenizer, "from_pretrained", changed)
        with pytest.raises(ValueError, match="does not read this file's tokenizer, .* back as it wrote it"):
            gguf.converted(files())
        assert left_in(kept) == []

    def test_no_such_file_and_encoders(self, files, kept):
        for name in ("missing.gguf", "some/missing.gguf", "/nowhere/at/all/missing.gguf"):
            with pytest.raises(FileNotFoundError, match=r"there is no such file\. Check the path"):
                ReBAModule(name)
        with pytest.raises(OSError, match=r"missing\.gguf"):
            ReBAModule(str(files().parent), model_kwargs={"gguf_file": "missing.gguf"})
        with pytest.raises(ValueError, match="is of the architecture 'llama', .*: TwinTower takes encoders"):
            TwinTower(str(files()))
