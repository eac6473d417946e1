"""Models that earlier versions saved embed as they did; and a saved model is the model in any process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import pickle
import re
import shutil
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer

from st_reba import AttentionReranker, CausalTransformer, NoSinkModule, ReBAModule
from st_reba.hub.push import model_class
from st_reba.hub.saved_files import REMOVED_CLASSES, check_saved, without_removed
from st_reba.modules import CausalModule
from st_reba.version import __version__

from .. import processes
from ..backbones import TEXTS
from ..conftest import change, pipeline, reloaded
from ..fixtures import make_saved
from ..fixtures.make_saved import EMBEDDINGS, FIXTURES, TEXTS_FILE
from .methods import PUBLIC_MODULES

#: What versions saved, by its SHA-256: an archive is never written again. make_saved makes the next one.
ARCHIVES = {
    "saved-0.1.tar.xz": "3396a4f7a9a1f8e3719596b069b1aad61a38ecffae03bd39f30b4f6d97eb7d28",
    "saved-0.7.tar.xz": "c5dd5eb76f00786ec85ee2a192526c6ce82c770031e0258548e88b95fc2d1f88",
    "saved-0.8.tar.xz": "23d5f3dfb18925089cf5688cf2fd00dcdb7580a34c7a111fb2d9e4ebf5bc57f9",
    "saved-0.8-elsewhere.tar.xz": "641efd90859731ef8739f1131769fe0ef058240d6f5cb51cbf7f22ff42406f86",
    # Written when 0.8 was ready: what came after the others, that which 1.0 removed among it.
    "saved-0.8-late.tar.xz": "5b91da418a5fc016f75b7519b2134e8b792e28a907a9af4c560df8ecd91145b0",
    "saved-1.0.tar.xz": "9afb859bdd972045055b34090095dc511a335679fa2f674cbc3c06635c96166f",
    "saved-1.0-elsewhere.tar.xz": "fb7ce4b9cddc6465d8dbc315a4d5c23adbe6600b9e1b392cb4a48537a755217d",
}
#: What llama.cpp and a server run: tested apart.
ELSEWHERE = ("llama-cpp", "endpoint")

#: How a model that is not loaded any more is refused, and the names of these models.
REFUSED = {
    "is of EchoLayersModule": ("echo-layers", "echo-layers-3", "echo-layers-last", "padded"),
    "is of RerankModule": ("reranker", "reranker-changed"),
    "is of HierarchicalTokenPrependingModule": (
        "hierarchical-token-prepending", "changed-hierarchical-token-prepending",
    ),
    "sets chunk_length to": ("reba-chunks", "changed-reba-chunks"),
    "is of MoEEModule": ("experts",),
    "sets readout to 'before_mlp', a setting of": (
        "before-mlp", "before-mlp-echo", "changed-bidirectional", "changed-classical", "changed-contrastive-prompting",
        "changed-early-late", "changed-echo", "changed-kv-rerouting", "changed-metaeol", "changed-reba",
        "changed-refined-thought", "changed-token-prepending", "changes-before-mlp",
    ),
    "sets without_sink to True, a setting of ReBAModule": ("reba-without-sink",),
    "sets changes to [{'key':": (
        "changed-layer-states", "changed-value-aggregation", "changes-blocks", "changes-both-ways-prepend",
        "changes-both-ways-reroute", "changes-both-ways-steer", "changes-prepend", "changes-prepend-reroute",
        "changes-prepend-steer", "changes-reroute", "changes-reroute-steer", "changes-steer", "hide-sink",
        "no-sink-echo", "promptreps-tied", "slots", "weaken-sink",
    ),
}  # fmt: skip
GONE = {model: said for said, models in REFUSED.items() for model in models}


def is_intact(archive: str) -> bool:
    return hashlib.sha256((FIXTURES / archive).read_bytes()).hexdigest() == ARCHIVES[archive]


def models_of(archive: str) -> list[str]:
    """The names of the models in an archive; none if it is not the one that was written."""
    if not is_intact(archive):
        return []
    with tarfile.open(FIXTURES / archive) as packed:
        return [name.split("/")[0] for name in packed.getnames() if name.endswith("/modules.json")]


MODELS = [(archive, model) for archive in ARCHIVES for model in models_of(archive) if model not in ELSEWHERE]
REMOVED = [(archive, model) for archive, model in MODELS if model in GONE and archive < "saved-1"]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """``unpacked(archive)``: a folder with what is in it, made once."""

    @functools.cache
    def folder(archive):
        place = tmp_path_factory.mktemp(archive.removesuffix(".tar.xz"))
        with tarfile.open(FIXTURES / archive) as packed:
            # Python before 3.11.4 has no filters.
            packed.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return place

    return folder


def test_each_archive_is_as_its_version_wrote_it():
    assert {path.name for path in FIXTURES.glob("saved-*")} == ARCHIVES.keys()
    assert [archive for archive in ARCHIVES if not is_intact(archive)] == []


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize(("archive", "model"), [case for case in MODELS if case not in REMOVED])
def test_a_saved_model_loads_and_embeds_as_it_did(archive, model, unpacked):
    place = unpacked(archive)
    texts = json.loads((place / TEXTS_FILE).read_text(encoding="utf-8"))
    # A model's, or of one that reads queries in another way, a model's/query and a model's/document.
    expected = {key: rows for key, rows in load_file(place / EMBEDDINGS).items() if key.split("/")[0] == model}
    check_loads(place / model, texts, expected)


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize("case", sorted({*make_saved.CASES, *make_saved.OTHERS} - {model for _, model in MODELS}))
def test_what_the_next_archive_adds_is_written_and_loads(case, tmp_path, tmp_path_factory):
    expected = make_saved.saved(case, make_saved.made(case, tmp_path_factory.getbasetemp()), tmp_path)
    check_loads(tmp_path / case, make_saved.TEXTS, expected)


def check_loads(path, texts, expected):
    """A saved model loads by the literal line, has the settings that its files say, and gives what it gave."""
    model = path.name
    is_ours = model.startswith("attention-reranker")
    load = AttentionReranker if is_ours else getattr(sentence_transformers, model_class(path), None)
    if load is None:
        pytest.skip(f"this version of sentence-transformers has no {model_class(path)}")
    if model == "lengths" and "query_length" not in CausalTransformer.config_keys:
        pytest.skip("this version of sentence-transformers has no lengths by task")
    loaded = load(str(path), device="cpu")
    for part, module in zip(json.loads((path / "modules.json").read_text()), loaded, strict=True):
        if part["type"].startswith("st_reba.modules."):
            # Some of what is set no embedding shows, such as deterministic.
            saved = json.loads((path / part["path"] / module.config_file_name).read_text(encoding="utf-8"))
            settings = json.loads(json.dumps(module.get_config_dict()))
            if model in ("unpadded", "unpadded-reba"):
                # Earlier versions could run texts in one row: it is read, and batches are padded.
                assert "unpad_inputs" not in settings
                assert module.unpad_inputs is False
                del saved["unpad_inputs"]
            saved = without_removed(saved, type(module).__name__, "")
            assert {name: settings.get(name) for name in saved} == saved
    assert expected
    for key, rows in expected.items():
        embeddings = make_saved.given(loaded, texts, key.partition("/")[2] or None)
        assert embeddings.shape == rows.shape
        if model.startswith("promptreps"):
            rows, embeddings = of_the_same_tokens(loaded.tokenizer, rows, embeddings)
        scale = np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1)
        assert np.abs((embeddings - rows) / scale).max() <= 1e-5, key


@pytest.mark.parametrize(("archive", "model"), REMOVED)
def test_what_is_gone_is_refused_by_its_name(archive, model, unpacked):
    path = unpacked(archive) / model
    told = rf"^{re.escape(str(path))}\S* {re.escape(GONE[model])}.*, removed in 1.0: load it with st_reba 0.8.$"
    with pytest.raises(ValueError, match=told):
        getattr(sentence_transformers, model_class(path))(str(path), device="cpu")
    if GONE[model].startswith("is of"):
        with pytest.raises(ValueError, match=told):
            check_saved(path)


def test_no_sink_is_saved_by_its_own_class(unpacked, tmp_path):
    """0.8 saved it as a change of CausalTransformer."""
    loaded = sentence_transformers.SentenceTransformer(str(unpacked("saved-0.8-late.tar.xz") / "no-sink-set"))
    again = reloaded(loaded, tmp_path)
    assert type(again[0]) is NoSinkModule
    assert (again[0].layers, again[0].bidirectional_layers) == ([0, 1], 2)
    assert np.array_equal(again.encode(["the cat"]), loaded.encode(["the cat"]))


@pytest.mark.parametrize("family", ["SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder"])
def test_a_part_of_a_router_that_is_gone_is_refused_by_its_name(family, tmp_path):
    """Nothing is imported on the model's behalf."""
    name = REMOVED_CLASSES[0]
    (tmp_path / "st_reba.py").write_text("raise AssertionError")
    routes = {"types": {"0": f"st_reba.modules.{name}"}, "structure": {"query": ["0"]}, "parameters": {}}
    (tmp_path / "router_config.json").write_text(json.dumps(routes))
    router = "sentence_transformers.base.modules.Router"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": router}]))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": family}))
    for load in (getattr(sentence_transformers, family), lambda path: check_saved(Path(path))):
        with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))} is of {name}, removed in 1.0"):
            load(str(tmp_path))


@pytest.mark.parametrize("version", ["0.8", "1.0"])
def test_what_llama_cpp_runs_loads_and_embeds_as_it_did(version, unpacked):
    pytest.importorskip("xllamacpp")
    place = unpacked(f"saved-{version}-elsewhere.tar.xz")
    loaded = sentence_transformers.SentenceTransformer(str(place / "llama-cpp"), device="cpu")
    expected = load_file(place / EMBEDDINGS)["llama-cpp"]
    found = loaded.encode(json.loads((place / TEXTS_FILE).read_text(encoding="utf-8")))
    # Other processors and releases of llama.cpp round otherwise, and keys and values are kept in half precision.
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()


def test_what_a_server_runs_loads_with_its_settings(unpacked, tmp_path):
    """A model of 0.8 in OpenAI's form; as it lies in the archive it asks in a form that went."""
    shutil.copytree(unpacked("saved-0.8-elsewhere.tar.xz") / "endpoint", tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"sets form to 'tei', .* removed in 1\.0: load it with st_reba 0\.8"):
        sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    change(tmp_path / "0_EndpointTransformer" / "config.json", form="openai")
    for directory in (tmp_path, unpacked("saved-1.0-elsewhere.tar.xz") / "endpoint"):
        saved = json.loads((directory / "0_EndpointTransformer" / "config.json").read_text(encoding="utf-8"))
        loaded = sentence_transformers.SentenceTransformer(str(directory), device="cpu")[0].get_config_dict()
        assert loaded == {name: saved[name] for name in loaded}
        assert loaded["key_variable"] == "MY_API_KEY"


def of_the_same_tokens(tokenizer, before, now):
    """The weights of PromptReps that are there before and now.

    Up to 0.8, digits could be among the tokens that are added, and a text without words of its own had no tokens.
    """
    gone = np.flatnonzero(((before != 0) & (now == 0)).any(axis=0))
    assert all(token.isdigit() for token in tokenizer.convert_ids_to_tokens(gone.tolist()))
    had_words = before.any(axis=1)
    assert np.array_equal(np.count_nonzero(before, axis=1)[had_words], np.count_nonzero(now, axis=1)[had_words])
    same = (before != 0) & (now != 0)
    return before * same, now * same


def test_layer_states_of_0_1_hand_on_all_tokens_whatever_they_say(unpacked, tmp_path):
    shutil.copytree(unpacked("saved-0.1.tar.xz") / "layer-states", tmp_path, dirs_exist_ok=True)
    change(tmp_path / "sentence_bert_config.json", rows="last")
    assert sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")[0].rows == "all"


def test_the_next_archive_has_every_setting_and_none_is_written_over():
    make_saved.check_cases()
    with pytest.raises(FileExistsError, match="what a version saved is never written again"):
        make_saved.make_archive(FIXTURES / "saved-0.7.tar.xz")


def test_every_setting_is_saved():
    for module_class in (module for module in PUBLIC_MODULES if issubclass(module, CausalModule)):
        arguments = set(inspect.signature(module_class.__init__).parameters)
        arguments -= {"self", "model_name_or_path", "second_model_name_or_path", "transformer_kwargs", "settings"}
        # It is saved in a file of its own.
        arguments -= {"initial_state"}
        assert arguments <= set(module_class.config_keys), module_class


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
        gone = {f"st_reba.modules.{name}" for name in REMOVED_CLASSES}
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
            print("imported", {"st_reba.train", "st_reba.encode"} & (set(sys.modules) - before))
        """
        assert "imported set()" in run(code)


def test_a_public_class_says_which_package_it_is_of():
    """A class that is derived from one of ours is its author's."""
    for public in PUBLIC_MODULES:
        assert vars(public)["__module__"] == "st_reba.modules"
