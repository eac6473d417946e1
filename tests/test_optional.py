"""A package that is not there and one that is broken are two things, to be mended in two ways."""

from __future__ import annotations

import sys

import pytest

from st_reba.optional import require

BROKEN = {
    "a library of another version": (
        "raise ImportError('libarrow.so.99: cannot open\\nshared object file')",
        "ImportError",
    ),
    "a package that it needs": ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_pack"),
    "any other error": ("raise AttributeError('_ARRAY_API not found')", "AttributeError: _ARRAY_API not found"),
    "no message": ("raise RuntimeError", "RuntimeError: no message"),
    "a part that an older version has not": ("", "No module named 'brittle.other'"),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package(code)``: one that is installed and runs this when it is imported."""

    def write(code: str) -> None:
        (tmp_path / "brittle").mkdir()
        (tmp_path / "brittle" / "__init__.py").write_text("")
        (tmp_path / "brittle" / "part.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in ("brittle", "brittle.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("code", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_called_broken_and_its_error_shown(code, said, package):
    package(code)
    with pytest.raises(ImportError) as refused:
        require("brittle.part" if code else "brittle.other", "extra", "A test")
    shown = str(refused.value)
    assert shown.startswith("A test needs brittle, which is installed and cannot be imported (")
    assert said in shown
    assert 'pip install "st-reba[extra]"' in shown
    assert "\n" not in shown


@pytest.mark.parametrize("name", ["no_such_package_at_all", "no_such_package_at_all.part"])
def test_a_missing_package_is_called_missing(name):
    with pytest.raises(ImportError, match=r'^A test needs no_such_package_at_all: pip install "st-reba\[extra\]"\.$'):
        require(name, "extra", "A test")


def test_a_package_that_is_there(package):
    package("there = True")
    assert require("brittle.part", "extra", "A test").there
