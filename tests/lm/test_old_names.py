"""Paths that something was imported from before it moved: they work for one release, and warn."""

from __future__ import annotations

import importlib
import sys

import pytest

MOVED = {
    "st_reba.lm.attention.masks": ("st_reba.lm.attention.changes", ["AfterPrefix", "BothWays", "Masking"]),
    "st_reba.lm.attention.rerouting": ("st_reba.lm.attention.changes", ["Rerouting"]),
    "st_reba.lm.hooks": ("st_reba.lm.run", ["Halt", "Hook", "hooked"]),
    "st_reba.lm.states": ("st_reba.lm.run", ["StatesAt", "at", "put"]),
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_works_and_warns(old, monkeypatch):
    new, names = MOVED[old]
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}: import from there"):
        module = importlib.import_module(old)
    for name in names:
        assert getattr(module, name) is getattr(importlib.import_module(new), name)
