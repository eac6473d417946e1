"""What was imported under a former name still comes, with a warning that says where it lies now."""

from __future__ import annotations

import importlib
import sys

import pytest

from st_reba.lm import run

from . import processes

#: The paths that the pages of a release have named.
MOVED = {
    "st_reba.catalogue": ("st_reba.recipes", "find"),
    "st_reba.encoding": ("st_reba.encode", "encode_file"),
    "st_reba.jtcse": ("st_reba.train.jtcse", "train_jtcse"),
    "st_reba.losses": ("st_reba.train.losses", "JTCSELoss"),
    "st_reba.serving.app": ("st_reba.serve.app", "make_app"),
    "st_reba.serving.limits": ("st_reba.serve.batches", "Limits"),
    "st_reba.serving.models": ("st_reba.serve.models", "Embedder"),
    "st_reba.serving.verify": ("st_reba.verify", "verify"),
    "st_reba.training": ("st_reba.train", "train_bellm"),
    "st_reba.compare.mteb.intervals": ("st_reba.compare.mteb", "mteb_estimates"),
    "st_reba.evaluation.late_interaction": ("st_reba.evaluation.rankings", "LateInteraction"),
    "st_reba.lm.attention.masks": ("st_reba.lm.attention.changes", "BothWays"),
    "st_reba.lm.attention.rerouting": ("st_reba.lm.attention.changes", "Rerouting"),
    "st_reba.modules.after_pooling.moments": ("st_reba.modules.moments", "embedding_moments"),
    "st_reba.modules.late_interaction": ("st_reba.modules.multi_vector", "multi_vector_encoder"),
    "st_reba.modules.training_free.reranking": ("st_reba.modules.reranking", "cross_encoder"),
    "st_reba.readers.chunks": ("st_reba.reading.chunks", "encode_chunks"),
    "st_reba.readers.sweep": ("st_reba.compare.sweep", "RecipeSweep"),
    "st_reba.readers.words": ("st_reba.reading.words", "encode_words"),
}

#: What has another name now.
RENAMED = {"BothWays": "Bidirectional", "Rerouting": "FirstKey"}


@pytest.mark.parametrize("old", MOVED)
def test_a_former_name_warns_and_gives_what_it_gave(old):
    new, name = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}: import from there."):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), RENAMED.get(name, name))


def test_the_name_of_an_effect_in_a_change_of_ones_own_still_comes():
    assert run.Effect is run.PassChange


def test_the_package_itself_uses_no_former_name_and_imports_no_training(tmp_path):
    # Where the process was forked, it has imported pydantic for others.
    code = """
import sys
before = set(sys.modules)
import st_reba
print(*{"pydantic", "st_reba.train", "st_reba.encode"} & (set(sys.modules) - before))
import st_reba.compare.run, st_reba.train, st_reba.export
print(*sys.modules)
"""
    done = processes.run("-c", code, out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    unasked, every = done.stdout.splitlines()
    assert unasked == ""
    assert not MOVED.keys() & set(every.split())
