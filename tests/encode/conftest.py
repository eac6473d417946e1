from __future__ import annotations

import pytest

from ..conftest import pipeline
from .inputs import Fake


@pytest.fixture(scope="session")
def model_directory(shallow_path, tmp_path_factory):
    """A small saved model."""
    from st_reba import ReBAModule

    directory = tmp_path_factory.mktemp("encode") / "model"
    model = pipeline(ReBAModule(shallow_path))
    model.prompts = {"query": "find: "}
    model.save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture(scope="package", autouse=True)
def no_waiting_for_the_disk():
    """No test here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def fake(tmp_path_factory):
    """Encodes without a model: its directory is one by name alone."""
    directory = tmp_path_factory.mktemp("fake")
    (directory / "modules.json").write_text("[]")
    return Fake(str(directory))
