"""Matrices of tests over the catalogue: a module that gets a row there is tested everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from st_reba.modules import CausalModule
from st_reba.recipes import every_row

Case = tuple[type[CausalModule], dict[str, Any]]


def completed(cases: Mapping[str, Case]) -> dict[str, Case]:
    """Cases, each a class and its settings, and the first recipe of every module of the catalogue that has none."""
    every = dict(cases)
    for row in every_row():
        if row.module not in {module for module, _ in every.values()}:
            every[row.key] = row.module, dict(row.settings)
    return every
