"""A saved model in mteb's registry, evaluated there. mteb's data would be downloaded: here it is made."""

from __future__ import annotations

import json
import shutil

import mteb
import numpy as np
import pytest
from mteb.models.model_implementations import MODEL_REGISTRY
from sentence_transformers import SentenceTransformer

from st_reba.evaluation import mteb_model

from ..backbones import TEXTS
from ..conftest import change


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
        assert (entry.embed_dim, entry.max_tokens) == (own.get_embedding_dimension(), own.max_seq_length)
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
        change(copied / "config_sentence_transformers.json", similarity_fn_name="dot")
        assert mteb_model(copied).revision != first.revision

    def test_refusals(self, prompted_path, tmp_path):
        with pytest.raises(ValueError, match="there is no such directory"):
            mteb_model(tmp_path / "missing")
        with pytest.raises(ValueError, match='name="prompted": mteb names a model "org/name"'):
            mteb_model(prompted_path, "prompted")
