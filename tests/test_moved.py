"""What was imported under a former name still comes, with a warning that says where it lies now."""

from __future__ import annotations

import importlib
import sys

import pytest

MOVED = {
    "st_reba.catalogue": ("st_reba.recipes", "find"),
    "st_reba.losses": ("st_reba.training.losses", "JTCSELoss"),
    "st_reba.readers.chunks": ("st_reba.reading.chunks", "encode_chunks"),
    "st_reba.readers.words": ("st_reba.reading.words", "encode_words"),
    "st_reba.readers.layers": ("st_reba.reading.layers", "LayerReader"),
    "st_reba.readers.sweep": ("st_reba.compare.sweep", "RecipeSweep"),
    "st_reba.readers.store": ("st_reba.evaluation.store", "EmbeddingStore"),
    "st_reba.jtcse.cls_energy": ("st_reba.evaluation.cls_energy", "CLSEnergyEvaluator"),
    "st_reba.jtcse.info_nce": ("st_reba.training.losses", "InfoNCELoss"),
    "st_reba.jtcse.interaction": ("st_reba.training.losses", "InteractionInfoNCELoss"),
    "st_reba.jtcse.loss": ("st_reba.training.losses", "JTCSELoss"),
    "st_reba.jtcse.tensor_modulus": ("st_reba.training.losses", "TensorModulusLoss"),
    "st_reba.jtcse.training": ("st_reba.training.jtcse", "train_jtcse"),
}


@pytest.mark.parametrize("old", MOVED)
def test_a_former_name_warns_and_gives_what_it_gave(old):
    new, name = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}: import from there."):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)
