from __future__ import annotations

import random

import numpy as np
import pytest

from st_reba import ReBAModule
from st_reba.encoding import Encoder

from ..conftest import pipeline


@pytest.fixture(scope="session")
def model_directory(backbone_path, tmp_path_factory):
    """A small saved model."""
    directory = tmp_path_factory.mktemp("encode") / "model"
    model = pipeline(ReBAModule(backbone_path()))
    model.prompts = {"query": "find: "}
    model.save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture(scope="package", autouse=True)
def no_waiting_for_the_disk():
    """No test here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


class Ones(Encoder):
    """Loads nothing and computes nothing."""

    def load(self, device):
        return None

    def encode(self, model, texts):
        return np.ones((len(texts), 2), np.float32)


@pytest.fixture
def ones(tmp_path_factory):
    """Encodes without a model: its directory is one by name alone."""
    directory = tmp_path_factory.mktemp("ones")
    (directory / "modules.json").write_text("[]")
    return Ones(str(directory))


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of several lengths."""
    random.seed(seed)
    words = ["river", "bank", "我爱", "the quick", "Zwölf", "mouse", "🥊", "money"]
    return [f"{number} " + " ".join(random.choices(words, k=random.randint(0, 9))) for number in range(count)]
