"""A name is where it is written: no import works only after another one."""

from __future__ import annotations

import json
import pickle
import pkgutil
from importlib.util import find_spec

import pytest

import st_reba
from st_reba import modules
from st_reba.modules import CausalModule, EmbeddingTransform

from .. import processes

ROOT = st_reba.__path__[0]
# What a file imports at its top and not every machine has.
NEEDS = {"st_reba.lm.attention.triton_kernel": "triton"}

#: Imports each name in a process that has nothing of the package but its path: ``st_reba/__init__.py`` would import
#: most of it first, in an order that happens to work. Prints a line for each that fails.
EACH_FIRST = """
import importlib, json, os, sys, types

root, kept, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.pycache_prefix, sys.dont_write_bytecode = kept, False  # each file is compiled once
assert not [name for name in sys.modules if name.startswith("st_reba")]
bare = sys.modules["st_reba"] = types.ModuleType("st_reba")
bare.__path__ = [root]
for name in names:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {error!r}", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
print("all tried")
"""


@pytest.mark.skipif(not processes.FORKS, reason="new interpreters would take minutes")
def test_each_file_can_be_imported_first(tmp_path):
    names = [found.name for found in pkgutil.walk_packages([ROOT], "st_reba.")]
    names = [name for name in names if name not in NEEDS or find_spec(NEEDS[name])]
    assert len(names) > 150
    done = processes.run("-c", EACH_FIRST, ROOT, tmp_path / "compiled", json.dumps(names), out=tmp_path / "printed")
    assert done.stdout.splitlines() == ["all tried"]


@pytest.mark.parametrize("line", ["import st_reba.modules", "from st_reba.modules import CausalTransformer, TwinTower"])
def test_the_modules_are_there_whatever_the_process_is_called(line, tmp_path):
    """A worker of the command has the command's name."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); sys.argv[0] = 'st-reba'\n{line}"
    done = processes.run("-c", code, ROOT.rpartition("st_reba")[0], out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout


def test_a_star_import_gives_the_public_names():
    """And no room of the package, which would hide a variable called ``text`` or ``hub``."""
    given: dict[str, object] = {}
    exec("from st_reba import *", given)
    assert given.keys() - {"__builtins__"} == {
        "META_TASKS", "TEMPLATES", "DocumentChunks", "Row", "__version__", "build", "encode_chunks", "encode_words",
        "in_context", "register", *modules.__all__,
    }  # fmt: skip


@pytest.mark.parametrize("name", modules.__all__)
def test_a_public_class_says_which_package_it_is_of(name):
    """In its own body: a class that is derived from one of ours is its author's."""
    public = getattr(modules, name)
    assert vars(public)["__module__"] == "st_reba.modules"
    assert pickle.loads(pickle.dumps(public)) is public


def test_no_model_names_the_bases_of_other_peoples_modules():
    assert CausalModule.__module__ == "st_reba.modules.causal_module"
    assert EmbeddingTransform.__module__ == "st_reba.modules.embedding_transforms"
