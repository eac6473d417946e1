"""A saved model in mteb's registry, and mteb's own command with one. Its data would be downloaded: here it is made."""

from __future__ import annotations

import json
import runpy
import shutil
import sys

import mteb
import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.tasks import STSBenchmarkSTS
from sentence_transformers import SentenceTransformer

from st_reba.evaluation import mteb_model

from .. import processes
from ..backbones import TEXTS

PAIRS = {"sentence1": TEXTS[:3], "sentence2": TEXTS[1:4], "score": [5.0, 1.0, 3.0]}


@pytest.fixture
def registered():
    """Forgets what a test registers."""
    before = dict(MODEL_REGISTRY)
    yield
    for name in MODEL_REGISTRY.keys() - before.keys():
        del MODEL_REGISTRY[name]


@pytest.mark.usefixtures("registered")
class TestEntry:
    def test_mteb_loads_the_model_by_name_and_by_path(self, prompted_path):
        entry = mteb_model(prompted_path, "org/prompted")
        own = SentenceTransformer(prompted_path, device="cpu")
        for name in ("org/prompted", prompted_path):
            loaded = mteb.get_model(name, device="cpu")
            assert np.array_equal(loaded.model.encode(TEXTS), own.encode(TEXTS))
            assert loaded.mteb_model_meta.name == "org/prompted"
        assert entry.embed_dim == own.get_embedding_dimension()
        assert entry.n_parameters == sum(weight.numel() for weight in own.parameters())
        assert entry.max_tokens == own.max_seq_length
        assert (entry.use_instructions, entry.training_datasets, entry.model_type) == (True, set(), ["dense"])
        # What mteb writes beside results names nothing of this machine.
        assert prompted_path not in json.dumps(entry.to_dict(), default=str)

    def test_the_revision_follows_the_files_and_not_the_card(self, prompted_path, tmp_path):
        copied = tmp_path / "copied"
        shutil.copytree(prompted_path, copied)
        first = mteb_model(copied)
        assert first.name == "st_reba/copied"
        (copied / "README.md").write_text(
            "---\nlicense: MIT\nbase_model: org/base\ntags:\n- generated_from_trainer\n---\n"
        )
        second = mteb_model(copied)
        assert second.revision == first.revision
        assert (second.license, second.adapted_from, second.training_datasets) == ("mit", "org/base", None)
        settings = copied / "config_sentence_transformers.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "similarity_fn_name": "dot"}))
        assert mteb_model(copied).revision != first.revision

    def test_refusals(self, prompted_path, tmp_path):
        with pytest.raises(ValueError, match="there is no such directory"):
            mteb_model(tmp_path / "missing")
        with pytest.raises(ValueError, match='name="prompted": mteb names a model "org/name"'):
            mteb_model(prompted_path, "prompted")


@pytest.mark.usefixtures("registered")
def test_mtebs_command_runs_a_directory_and_writes_a_card(prompted_path, tmp_path, monkeypatch):
    def load(task, *args, **kwargs):
        task.dataset = DatasetDict({"test": Dataset.from_dict(PAIRS)})
        task.data_loaded = True

    def typed(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["mteb", *words])
        runpy.run_module("st_reba.evaluation.mteb", run_name="__main__")

    monkeypatch.setattr(STSBenchmarkSTS, "load_data", load)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(prompted_path, "my-model")
    typed("run", "-m", "my-model", "-t", "STSBenchmark", "--output-folder", "out")
    [found] = tmp_path.glob("out/results/st_reba__my-model/*/STSBenchmark.json")
    written = json.loads(found.read_text(encoding="utf-8"))
    [result] = mteb.evaluate(
        SentenceTransformer(prompted_path, device="cpu"), [STSBenchmarkSTS()], cache=None, show_progress_bar=False
    ).task_results
    assert written["scores"]["test"][0]["main_score"] == pytest.approx(result.get_score(), abs=1e-6)
    typed(
        "create-model-results", "--model-name", "my-model", "--output-path", "card.md", "--results-folder", "out",
        "--tasks", "STSBenchmark", "--from-existing", "my-model/README.md",
    )  # fmt: skip
    card = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert "- mteb\n" in card
    assert "ReBA" in card


def test_importing_the_evaluators_imports_no_mteb(tmp_path):
    code = "import sys, st_reba.evaluation; print('mteb' in sys.modules)"
    assert processes.run("-c", code, out=tmp_path / "printed").stdout == "False\n"
