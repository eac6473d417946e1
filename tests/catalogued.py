"""Matrices of tests over the recipes: a module that gets a row is tested everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from st_reba import modules
from st_reba.modules import CausalModule
from st_reba.recipes import every_row

#: What a modules.json may name.
PUBLIC_MODULES: list[type[Any]] = [getattr(modules, name) for name in modules.__all__]

Case = tuple[type[CausalModule], dict[str, Any]]


def completed(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Cases, each a class and its settings, and the first recipe of every module that has a row and no case."""
    every = dict(cases)
    for row in every_row():
        if row.module not in {module for module, _ in every.values()}:
            every[row.key] = row.module, dict(row.settings)
    return every
