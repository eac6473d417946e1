"""Former paths of modules, which go in the release after the next: to import one warns, and gives what it is now."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Where a path leads.
MOVED = {
    "st_reba.catalogue": "st_reba.recipes",
    "st_reba.compare.mteb.intervals": "st_reba.compare.mteb",
    "st_reba.encoding": "st_reba.encode",
    "st_reba.evaluation.late_interaction": "st_reba.evaluation.rankings",
    "st_reba.jtcse": "st_reba.train.jtcse",
    "st_reba.lm.attention.masks": "st_reba.lm.attention.changes",
    "st_reba.lm.attention.rerouting": "st_reba.lm.attention.changes",
    "st_reba.losses": "st_reba.train.losses",
    "st_reba.modules.after_pooling": "st_reba.modules",
    "st_reba.modules.after_pooling.moments": "st_reba.modules.moments",
    "st_reba.modules.late_interaction": "st_reba.modules.multi_vector",
    "st_reba.modules.training_free": "st_reba.modules",
    "st_reba.modules.training_free.reranking": "st_reba.modules.reranking",
    "st_reba.readers": "st_reba.reading",
    "st_reba.readers.chunks": "st_reba.reading.chunks",
    "st_reba.readers.sweep": "st_reba.compare.sweep",
    "st_reba.readers.words": "st_reba.reading.words",
    "st_reba.serving": "st_reba.serve",
    "st_reba.serving.app": "st_reba.serve.app",
    "st_reba.serving.limits": "st_reba.serve.batches",
    "st_reba.serving.models": "st_reba.serve.models",
    "st_reba.serving.verify": "st_reba.verify",
    "st_reba.training": "st_reba.train",
    "st_reba.verify.endpoint": "st_reba.lm.endpoint",
}
#: What has another name there.
RENAMED = {"AfterPrefix": "BehindPrefix", "BothWays": "Bidirectional", "Masking": "LayerMask", "Rerouting": "FirstKey"}


class FormerModule(ModuleType):
    """A module under its former path: all that it has is looked up in the present one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(MOVED[self.__name__]), RENAMED.get(name, name))


class FormerPaths(MetaPathFinder, Loader):
    """Finds what :data:`MOVED` lists, for Python's import system, where there is no such file."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = FormerModule(spec.name)
        # No folder: what was below it is found here, too.
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} is now {MOVED[old]}: import from there.", DeprecationWarning, stacklevel=2)
