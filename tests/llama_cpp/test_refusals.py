"""What is said where llama.cpp is not there, or is another one, or the file is none: no llama.cpp is needed here."""

from __future__ import annotations

import ctypes.util
import sys
from types import SimpleNamespace

import pytest

from st_reba.lm import llama_cpp
from st_reba.modules import LlamaCppTransformer

from .. import ggufs


@pytest.fixture(autouse=True)
def anew():
    llama_cpp.library.cache_clear()
    yield
    llama_cpp.library.cache_clear()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ImportError, match=r'llama.cpp needs xllamacpp: pip install "st-reba\[llamacpp\]"'):
        LlamaCppTransformer(str(ggufs.write(tmp_path / "model.gguf")))


def test_a_release_that_is_called_otherwise_is_refused_before_it_is_called(monkeypatch):
    of_another = SimpleNamespace(
        __version__="2030.1.1", xllamacpp=SimpleNamespace(__file__=ctypes.util.find_library("c"))
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", of_another)
    with pytest.raises(ImportError, match=r'xllamacpp 2030.1.1 brings .* pip install "xllamacpp=='):
        llama_cpp.library()


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("gone.gguf", None, FileNotFoundError, "there is no such file"),
        ("text.gguf", b"version https://git-lfs", ValueError, "is not a GGUF file: it does not begin with GGUF"),
        ("model.safetensors", b"x", ValueError, "is not a GGUF file, and llama.cpp runs no other"),
        ("model-00001-of-00002.gguf", b"GGUF", ValueError, "one part of several"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, error, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=says):
        LlamaCppTransformer(str(tmp_path / name))
