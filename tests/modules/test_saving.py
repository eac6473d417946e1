"""Saved models are the model in any process; and a name is where it is written."""

from __future__ import annotations

import inspect
import json
import pickle
import shutil
import textwrap

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import st_reba
from st_reba import ReBAModule, modules
from st_reba.hub import removed
from st_reba.modules import CausalModule
from st_reba.version import REQUIREMENT, __version__

from .. import processes
from ..backbones import TEXTS
from ..catalogued import PUBLIC_MODULES
from ..conftest import pipeline


def test_every_setting_is_saved():
    for module_class in (module for module in PUBLIC_MODULES if issubclass(module, CausalModule)):
        arguments = set(inspect.signature(module_class.__init__).parameters)
        arguments -= {"self", "model_name_or_path", "second_model_name_or_path", "transformer_kwargs"}
        # What it says is saved by the settings that it is about.
        arguments -= {"preset"}
        assert arguments <= set(module_class.config_keys), module_class


def test_what_is_written(shared, tmp_path):
    pipeline(ReBAModule(shared())).save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "modules.json").read_text())[0]["type"] == "st_reba.modules.ReBAModule"
    required = json.loads((tmp_path / "config_sentence_transformers.json").read_text())["requirements"]
    assert required == REQUIREMENT
    assert required["st_reba"]["specifier"] == f">={__version__}"
    assert not list(tmp_path.glob("*.py"))


@pytest.fixture
def run(tmp_path):
    """``run(code, *arguments)``: what a fresh process, as a user's would be, prints."""

    def printed(code: str, *arguments: str, expect: int = 0) -> str:
        (tmp_path / "script.py").write_text(textwrap.dedent(code))
        done = processes.run(tmp_path / "script.py", *arguments, out=tmp_path / "printed")
        assert done.returncode == expect, done.stdout
        return done.stdout

    return printed


@pytest.fixture(scope="module")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    model = pipeline(ReBAModule(backbone_path()), "lasttoken")
    model.save_pretrained(str(directory / "model"))
    np.save(directory / "expected.npy", model.encode(TEXTS))
    (directory / "model.pickle").write_bytes(pickle.dumps(model))
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    return directory


def test_a_fresh_process(saved, run):
    """With the flag; unpickled, as a worker has it; and with the import: the same to the bit."""
    code = """
        import json, pickle, sys
        import numpy as np
        from sentence_transformers import SentenceTransformer

        where = sys.argv[1]
        texts, expected = json.load(open(where + "/texts.json")), np.load(where + "/expected.npy")
        models = [SentenceTransformer(where + "/model", device="cpu", trust_remote_code=True)]
        models.append(pickle.load(open(where + "/model.pickle", "rb")))
        import st_reba
        models.append(SentenceTransformer(where + "/model", device="cpu"))
        assert all(np.array_equal(model.encode(texts), expected) for model in models)
        print("the same")
    """
    assert "the same" in run(code, str(saved))


def test_a_machine_without_st_reba(saved, run):
    """ST's own check says what is missing, before anything is loaded."""
    code = """
        import sys
        sys.modules["st_reba"] = None
        import importlib.metadata as metadata
        original = metadata.version
        def version(name):
            if name.replace("-", "_") == "st_reba":
                raise metadata.PackageNotFoundError(name)
            return original(name)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("version") is original:
                module.version = version
        from sentence_transformers import SentenceTransformer
        SentenceTransformer(sys.argv[1] + "/model", device="cpu", trust_remote_code=True)
    """
    message = run(code, str(saved), expect=1)
    assert f"st_reba>={__version__}, but it is not installed" in message
    assert "is part of st_reba; import st_reba before loading it." in message


class TestRegistry:
    def test_exactly_our_classes_are_known(self):
        """Guards the private mapping of ST's that our classes are added to."""
        mapping = SentenceTransformer._module_classes
        ours = {name: module for name, module in mapping.items() if name.startswith("st_reba.")}
        gone = {f"st_reba.modules.{name}" for name in removed.CLASSES}
        assert ours.keys() - gone == {f"st_reba.modules.{module.__name__}" for module in PUBLIC_MODULES}
        assert all(ours[f"st_reba.modules.{module.__name__}"] is module for module in PUBLIC_MODULES)

    def test_a_class_of_somebody_elses_is_refused(self, saved, tmp_path):
        shutil.copytree(saved / "model", tmp_path / "model")
        path = tmp_path / "model" / "modules.json"
        for reference in ("st_reba_cli.app", "os.system", "st_reba.modules.causal_module.CausalModule"):
            modules = json.loads(path.read_text())
            modules[0]["type"] = reference
            path.write_text(json.dumps(modules))
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                SentenceTransformer(str(tmp_path / "model"), device="cpu")

    def test_without_the_mapping_importing_still_works(self, run):
        """A later ST may drop it: then loading asks for the flag, and the flag works. It imports no training."""
        code = """
            import sys
            from sentence_transformers import SentenceTransformer
            for family in SentenceTransformer.__mro__:
                if "_module_classes" in vars(family):
                    del family._module_classes
            before = set(sys.modules)
            import st_reba
            print("imported", {"pydantic", "st_reba.train", "st_reba.encode"} & (set(sys.modules) - before))
        """
        assert "imported set()" in run(code)


def test_a_star_import_gives_the_public_names():
    """And no room of the package, which would hide a variable called ``text`` or ``hub``."""
    assert {*st_reba.__all__} == {
        "META_TASKS", "TEMPLATES", "DocumentChunks", "Row", "__version__", "build", "encode_chunks",
        "encode_words", "in_context", "in_terms_of", "register", *modules.__all__,
    }  # fmt: skip


def test_a_public_class_says_which_package_it_is_of():
    """In its own body: a class that is derived from one of ours is its author's."""
    for public in PUBLIC_MODULES:
        assert vars(public)["__module__"] == "st_reba.modules"
