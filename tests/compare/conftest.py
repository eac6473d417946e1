"""Comparisons of tiny models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def timed_once(timed_once):
    """In one batch as well: of few texts, it is as good as three."""
    from st_reba.compare import timing

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timing, "TIMED_BATCHES", 1)
        yield
