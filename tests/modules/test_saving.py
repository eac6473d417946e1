"""Saved, pickled and pushed models are the model."""

from __future__ import annotations

import inspect
import json
import pickle
import textwrap

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.modules import CausalModule
from st_reba.version import REQUIREMENT, __version__

from .. import processes
from ..backbones import TEXTS
from ..catalogued import PUBLIC_MODULES, completed
from ..conftest import long, paired, pipeline

BACKBONES = [module for module in PUBLIC_MODULES if issubclass(module, CausalModule)]

CASES = completed(
    {
        "bag": (InputEmbeddings, {}),
        "classical": (CausalTransformer, {"template": "in a word, {text}:", "pool_over": "all"}),
        "layer states": (LayerStates, {"pool_over": "all", "template": "so: {text}"}),
        "echo": (EchoModule, {"template": "springer", "pool_copies": "repeated", "pool_over": "all"}),
        "echo-3": (EchoModule, {"repetitions": 3}),
        "reba": (ReBAModule, {"repetitions": 3, "layers": [0, -1], "normalize_weights": True}),
        "reba last": (ReBAModule, {"repetitions": 1, "rows": "last"}),
        "bidirectional": (BidirectionalLastLayer, {"bidirectional_layers": 2, "template": "representative-word-paper"}),
        "reba, bidirectional": (ReBAModule, {"bidirectional_layers": 1}),
        "thought": (RefinedThoughtModule, {"iterations": 3, "tolerance": 0.01}),
        "token prepending": (
            TokenPrependingModule,
            {"prepend_layers": 2, "output_layer": 2, "seed": 5, "rows": "last"},
        ),
        "token prepending, blocks": (HierarchicalTokenPrependingModule, {"block_length": 4, "whole_sentences": False}),
        "value aggregation": (ValueAggregationModule, {"layers": [0, -1], "normalize_text": True}),
        "contrastive prompting": (
            ContrastivePromptingModule,
            {"contrast_layer": 1, "scale": "norm", "auxiliary_template": "irrelevant: {text}", "final_norm": True},
        ),
        "early and late": (EarlyLateModule, {"template": "prompteol-zh", "early_layer": 2, "normalize_text": False}),
        "early and late, short": (EarlyLateModule, {"output_layer": 2, "final_norm": False, "bidirectional_layers": 1}),
        "reba, chunks": (ReBAModule, {"chunk_length": 5, "layers": [-1]}),
        "reba, short": (ReBAModule, {"max_seq_length": 7}),
        "prompteol": (
            CausalTransformer,
            {"template": "prompteol-zh", "pool_over": "all", "rows": "last", "normalize_text": True},
        ),
        "knowledge": (CausalTransformer, {"template": "knowledge"}),
        "whole, without the norm": (BidirectionalLastLayer, {"pool_over": "whole", "final_norm": False}),
        "thought, without the norm": (RefinedThoughtModule, {"iterations": 2, "final_norm": False}),
        "metaeol": (MetaEOLModule, {"templates": ["In a word, {text}:", "{text}"], "normalize_text": True}),
        "kv re-routing": (KVReroutingModule, {"layers": [0, 2], "prefix_bias": 0.5}),
        "kv re-routing, tokens": (KVReroutingModule, {"hybrid": False, "rows": "last", "output_layer": 2}),
    }
)


#: In one batch, with padding.
FEW = TEXTS[:2]

#: The first of each class: what else a class saves are further settings.
FIRST = {module_class: case for case, (module_class, _) in reversed(CASES.items())}


@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST.values()])
def test_further_settings(case, backbone_path, shared, tmp_path):
    module_class, settings = CASES[case]
    module = module_class((backbone_path if "max_seq_length" in settings else shared)(), **settings)
    module.save(str(tmp_path))
    loaded = module_class.load(str(tmp_path))
    assert loaded.get_config_dict() == module.get_config_dict()
    assert loaded.max_seq_length == module.max_seq_length
    for key, value in settings.items():
        if key != "template":
            assert getattr(loaded, key) == value
    assert np.array_equal(pipeline(loaded).encode(FEW), pipeline(module).encode(FEW))


@pytest.mark.parametrize(
    ("case", "kind"), paired([case if case in FIRST.values() else long(case) for case in CASES], ["bytes", "bert"])
)
def test_save_and_load(case, kind, backbone_path, shared, tmp_path):
    module_class, settings = CASES[case]
    backbone = (backbone_path if "max_seq_length" in settings else shared)("llama", kind)
    module = module_class(backbone, **settings)
    width = module.get_embedding_dimension()
    parts = [module, Pooling(width, "mean"), Dense(width, 8), Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert type(loaded[0]) is module_class
    assert loaded[0].get_config_dict() == module.get_config_dict()
    assert loaded.max_seq_length == model.max_seq_length
    for key, value in settings.items():
        if key != "template":
            assert getattr(loaded[0], key) == value
    assert np.array_equal(loaded.encode(FEW), model.encode(FEW))
    again = tmp_path / "again"
    loaded.save_pretrained(str(again), create_model_card=False)
    for path in (path for path in again.rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / path.relative_to(again)).read_bytes(), path.name


@pytest.mark.parametrize("case", FIRST.values())
def test_settings_are_shown(case, shared):
    """By its ``extra_repr`` ST's ``merge`` tells whether two modules are alike."""
    module_class, settings = CASES[case]
    module = module_class(shared(), **settings)
    own = [name for name in module.config_keys if name not in Transformer.config_keys]
    assert module.extra_repr() == ", ".join(f"{name}={getattr(module, name)!r}" for name in own)


def test_every_setting_is_saved():
    import inspect

    for module_class in BACKBONES:
        arguments = set(inspect.signature(module_class.__init__).parameters)
        arguments -= {"self", "model_name_or_path", "second_model_name_or_path", "transformer_kwargs"}
        # What it says is saved by the settings that it is about.
        arguments -= {"preset"}
        assert arguments <= set(module_class.config_keys), module_class


def test_what_is_written(shared, tmp_path):
    pipeline(ReBAModule(shared())).save_pretrained(str(tmp_path))
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert modules[0]["type"] == "st_reba.modules.ReBAModule"
    config = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert config["requirements"] == REQUIREMENT
    assert config["requirements"]["st_reba"]["specifier"] == f">={__version__}"
    assert not list(tmp_path.glob("*.py"))


def test_a_module_saved_on_its_own(shared, tmp_path):
    EchoModule(shared(), repetitions=3).save(str(tmp_path))
    assert EchoModule.load(str(tmp_path)).repetitions == 3


def test_requirements_of_others_are_kept(shared, tmp_path):
    (tmp_path / "config_sentence_transformers.json").write_text('{"requirements": {"peft": ">=0.1"}}')
    EchoModule(shared()).save(str(tmp_path))
    config = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert config["requirements"] == {"peft": ">=0.1", **REQUIREMENT}


@pytest.fixture(scope="module")
def reserved(backbone_path):
    """Not shared with other tests: transformers cannot pickle a backbone once it has handed out all states."""
    return CausalTransformer(backbone_path())


@pytest.mark.parametrize("case", [case if case in FIRST.values() else long(case) for case in CASES])
def test_pickle(case, backbone_path, reserved):
    module_class, settings = CASES[case]
    model = pipeline(module_class(backbone_path() if "max_seq_length" in settings else reserved, **settings))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).encode(FEW), model.encode(FEW))


@pytest.fixture
def run(tmp_path):
    """``run(code, *arguments)``: what a fresh process, as a user's would be, prints."""

    def printed(code: str, *arguments: str, expect: int = 0) -> str:
        done = processes.run("-c", textwrap.dedent(code), *arguments, out=tmp_path / "printed")
        assert done.returncode == expect, done.stdout
        return done.stdout

    return printed


@pytest.fixture(scope="module")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    model = pipeline(ReBAModule(backbone_path()), "lasttoken")
    model.save_pretrained(str(directory / "model"))
    np.save(directory / "expected.npy", model.encode(TEXTS))
    (directory / "texts.json").write_text(json.dumps(TEXTS))
    return directory


ENCODE = """
    import json, sys
    import numpy as np
    from sentence_transformers import SentenceTransformer
    {imports}
    where = sys.argv[1]
    if __name__ == "__main__":
        model = SentenceTransformer(where + "/model", device="cpu"{flag})
        vectors = model.encode(json.load(open(where + "/texts.json")){how})
        expected = np.load(where + "/expected.npy")
        assert {check}, "not the same"
        print("the same")
"""


SAME = "np.array_equal(vectors, expected)"
# Workers have other batches than one process has: equal but for rounding.
NEAR = "np.allclose(vectors, expected, rtol=1e-5, atol=1e-6)"


def test_a_fresh_process_without_the_import(saved, run):
    code = ENCODE.format(imports="", flag=", trust_remote_code=True", how="", check=SAME)
    assert "the same" in run(code, str(saved))


def test_a_fresh_process_with_the_import_and_its_workers(saved, tmp_path):
    alone = ENCODE.format(imports="import st_reba", flag="", how="", check=SAME)
    several = ENCODE.format(imports="", flag="", how=', device=["cpu", "cpu"], chunk_size=2', check=NEAR)
    code = textwrap.dedent(alone) + textwrap.dedent(several)
    script = tmp_path / "encode.py"
    script.write_text(code)
    done = processes.run(script, saved, out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("the same") == 2


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
        ours = {reference: module for reference, module in mapping.items() if reference.startswith("st_reba.")}
        assert ours == {f"st_reba.modules.{module.__name__}": module for module in PUBLIC_MODULES}

    def test_a_class_of_somebody_elses_is_refused(self, saved, tmp_path):
        import shutil

        shutil.copytree(saved / "model", tmp_path / "model")
        path = tmp_path / "model" / "modules.json"
        for reference in ("st_reba_cli.app", "os.system", "st_reba.modules.causal_module.CausalModule"):
            modules = json.loads(path.read_text())
            modules[0]["type"] = reference
            path.write_text(json.dumps(modules))
            with pytest.raises(ValueError, match="trust_remote_code=True"):
                SentenceTransformer(str(tmp_path / "model"), device="cpu")

    def test_without_the_mapping_importing_still_works(self, run):
        """A later ST may drop it: then loading asks for the flag, and the flag works."""
        code = """
            import sys
            from sentence_transformers import SentenceTransformer
            for family in SentenceTransformer.__mro__:
                if "_module_classes" in vars(family):
                    del family._module_classes
            import st_reba
            print("imported")
        """
        assert "imported" in run(code)


class TestWhereAClassLives:
    """Every class says that it is of the package, as saved models do: see tests/modules/test_imports.py."""

    def test_signatures_are_shown(self):
        assert list(inspect.signature(ReBAModule).parameters)[:3] == ["model_name_or_path", "repetitions", "layers"]

    def test_a_router_names_the_package_too(self, shared, tmp_path):
        query, document = ReBAModule(shared()), EchoModule(shared())
        pooling = Pooling(32, "mean")
        router = Router.for_query_document([query, pooling], [document, pooling])
        model = SentenceTransformer(modules=[router], device="cpu")
        model.save_pretrained(str(tmp_path))
        saved = json.loads((tmp_path / "router_config.json").read_text())
        assert {"st_reba.modules.ReBAModule", "st_reba.modules.EchoModule"} <= set(saved["types"].values())

    def test_a_class_of_the_users_keeps_its_name(self, shared, tmp_path):
        pipeline(TheirModule(shared())).save_pretrained(str(tmp_path))
        assert json.loads((tmp_path / "modules.json").read_text())[0]["type"] == f"{__name__}.TheirModule"


class TheirModule(ReBAModule):
    """Derived from one of ours."""


def test_bfloat16_models_stay_so(backbone_path, tmp_path):
    model = pipeline(ReBAModule(backbone_path(), model_kwargs={"dtype": "bfloat16"}))
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded.dtype == torch.bfloat16
    vectors = [one.encode(TEXTS, convert_to_tensor=True) for one in (model, loaded)]
    assert torch.equal(*vectors)
