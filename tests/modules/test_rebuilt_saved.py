"""Models that earlier versions saved load into the rebuilt classes and embed as they did. It goes with the old."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from transformers import CONFIG_MAPPING, AutoConfig

from st_reba import modules
from st_reba.modules.llama_cpp import LlamaCppConfig

from . import test_saved_models as before
from .test_saved_models import EMBEDDINGS, GONE, MODELS, TEXTS_FILE
from .test_saved_models import unpacked as unpacked

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


@pytest.fixture(autouse=True)
def rebuilt(monkeypatch):
    """What saved models name is the rebuilt class."""
    family = next(family for family in SentenceTransformer.__mro__ if "_module_classes" in vars(family))
    own = {f"st_reba.modules.{name}": getattr(modules, name) for name in modules.SAVED}
    monkeypatch.setattr(family, "_module_classes", {**family._module_classes, **own})
    monkeypatch.setattr(before, "AttentionReranker", modules.AttentionReranker)
    old = CONFIG_MAPPING[LlamaCppConfig.model_type]
    AutoConfig.register(LlamaCppConfig.model_type, LlamaCppConfig, exist_ok=True)
    yield
    AutoConfig.register(LlamaCppConfig.model_type, old, exist_ok=True)


@pytest.mark.parametrize(("archive", "model"), [case for case in MODELS if case[1] not in GONE])
def test_a_saved_model_loads_and_embeds_as_it_did(archive, model, unpacked):
    place = unpacked(archive)
    texts = json.loads((place / TEXTS_FILE).read_text(encoding="utf-8"))
    expected = {key: rows for key, rows in load_file(place / EMBEDDINGS).items() if key.split("/")[0] == model}
    before.check_loads(place / model, texts, expected)


def test_what_llama_cpp_runs_loads_and_embeds_as_it_did(unpacked):
    before.test_what_llama_cpp_runs_loads_and_embeds_as_it_did(unpacked)
