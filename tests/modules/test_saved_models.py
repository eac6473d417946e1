"""Models that earlier versions saved load by the literal line, and embed as they did."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
from safetensors.numpy import load_file

from st_reba.catalogue import PUBLIC_MODULES
from st_reba.hub.checks import model_class

from ..fixtures.make_saved import given

FIXTURES = Path(__file__).parents[1] / "fixtures"
CLASSES_OF_0_1 = [
    "AllButTheTop",
    "BidirectionalLastLayer",
    "CausalTransformer",
    "ContrastivePromptingModule",
    "EchoModule",
    "EmbeddingFilter",
    "HierarchicalTokenPrependingModule",
    "InputEmbeddings",
    "KVReroutingModule",
    "LayerStates",
    "LayerwiseAutoencoder",
    "MetaEOLModule",
    "ReBAModule",
    "RefinedThoughtModule",
    "TokenPrependingModule",
    "TwinTower",
    "ValueAggregationModule",
    "WhiteningTransform",
]
MODELS = sorted(path.parent for path in FIXTURES.glob("saved-*/*/modules.json"))


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_saved_model_loads_and_embeds_as_it_did(path):
    texts = json.loads((path.parent / "texts.json").read_text(encoding="utf-8"))
    expected = load_file(path.parent / "embeddings.safetensors")[path.name]
    if (load := getattr(sentence_transformers, model_class(path), None)) is None:
        pytest.skip(f"this version of sentence-transformers has no {model_class(path)}")
    embeddings = given(load(str(path), device="cpu"), texts)
    assert embeddings.shape == expected.shape
    scale = np.linalg.norm(expected, axis=1, keepdims=True).clip(min=1)
    assert np.abs((embeddings - expected) / scale).max() <= 1e-5


def test_each_class_of_0_1_is_among_them_and_keeps_its_name():
    models = (path for path in MODELS if path.parent.name == "saved-0.1")
    saved = {part["type"] for path in models for part in json.loads((path / "modules.json").read_text())}
    assert {f"st_reba.modules.{name}" for name in CLASSES_OF_0_1} <= saved
    assert set(CLASSES_OF_0_1) <= {module.__name__ for module in PUBLIC_MODULES}


def test_they_are_small():
    # 80 KiB a model, in the mean.
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) < len(MODELS) * 80 * 2**10
