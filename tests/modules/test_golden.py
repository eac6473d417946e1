"""Every method gives the token ids and vectors of the archive, which the code before the rebuild wrote."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers.base.modules import Transformer

from st_reba import modules

from ..fixtures import golden

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


@pytest.fixture(scope="module")
def archive():
    with np.load(golden.ARCHIVE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = {}

    def get(architecture):
        if architecture not in made:
            made[architecture] = Transformer(golden.save(tmp_path_factory.mktemp(architecture), architecture))
        return made[architecture]

    return get


@pytest.mark.parametrize("architecture", golden.ARCHITECTURES)
@pytest.mark.parametrize("case", golden.known_cases(), ids=lambda case: case.name)
def test_golden(case, architecture, archive, loaded):
    module = getattr(modules, case.module)(loaded(architecture), **case.settings)
    for call in case.calls:
        for key, values in golden.found(case, module, call):
            if not key.endswith("vectors"):
                expected = archive[key]
                if key.endswith("counts"):
                    # An empty text has one zero vector or several.
                    values, expected = values[1:], expected[1:]
                assert np.array_equal(values, expected), key
                continue
            expected = archive[f"{architecture}/{key}"]
            worst = np.abs(values - expected).max()
            assert worst <= case.tolerance(expected), f"{key}: {worst:.1e}"
