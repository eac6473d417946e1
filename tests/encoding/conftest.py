from __future__ import annotations

import random

import pytest

from st_reba import ReBAModule

from ..conftest import pipeline


@pytest.fixture(scope="session")
def model_directory(backbone_path, tmp_path_factory):
    """A small saved model."""
    directory = tmp_path_factory.mktemp("encode") / "model"
    model = pipeline(ReBAModule(backbone_path()))
    model.prompts = {"query": "find: "}
    model.save_pretrained(str(directory), create_model_card=False)
    return directory


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of several lengths."""
    random.seed(seed)
    words = ["river", "bank", "我爱", "the quick", "Zwölf", "mouse", "🥊", "money"]
    return [f"{number} " + " ".join(random.choices(words, k=random.randint(0, 9))) for number in range(count)]
