"""Chunks encoded on a Ray cluster: Ray Data's ``map_batches`` over a pool of actors with a model each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property

import numpy as np

from ..optional import require_ray
from .work import ChunkWorker, Plan

#: Chunks travel in this many groups a worker, so that one that is slow or dies holds little up.
_GROUPS = 64


class RayEngine:
    """A Ray cluster: the one that ``RAY_ADDRESS`` names, or one on this machine.

    Actors read the input and write their parts themselves, so every node must see both files at the same path; only
    chunk numbers travel. Ray starts an actor that died again and repeats what it was doing; as a part is written whole
    or not at all, under its number, no row is lost and none is there twice.

    Args:
        workers: Actors; each holds a model, and a GPU or a CPU core.
        device: ``"cuda"`` or ``"cpu"``; what the cluster has if None.

    Raises:
        ImportError: If Ray is not installed.
        ValueError: If ``workers`` is not positive, or the device is another.
    """

    def __init__(self, workers: int = 1, device: str | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: give a whole number from 1.")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f'device "{device}": on a Ray cluster give "cpu" or "cuda"; Ray picks which.')
        self._ray = require_ray()
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.workers = workers
        self.device = device or ("cuda" if self._ray.cluster_resources().get("GPU") else "cpu")

    def run(self, plan: Plan, todo: Sequence[int]) -> Generator[int, None, None]:
        resources = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        data = self._ray.data
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        if plan.needs_ranges:
            calibrated = self._ray.remote(**resources)(_calibrate).remote(plan, self.device)
            _raise(self._ray.get(calibrated))
        groups = min(len(todo), _GROUPS * self.workers)
        done = data.from_items([{"chunk": number} for number in todo], override_num_blocks=groups).map_batches(
            _Actor,
            fn_constructor_args=(plan, self.device),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(self.workers, groups)),
            **resources,
        )
        for row in done.iter_rows():
            _raise(row["refusal"])
            yield int(row["chunk"])


class _Actor:
    """A loaded model on some node."""

    def __init__(self, plan: Plan, device: str) -> None:
        self._plan = plan
        self._device = device

    @cached_property
    def _worker(self) -> ChunkWorker:
        return _worker(self._plan, self._device)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (number,) = batch["chunk"].tolist()
        return {**batch, "refusal": np.array([_refusal(lambda: self._worker.encode(number))])}


def _calibrate(plan: Plan, device: str) -> str:
    return _refusal(lambda: _worker(plan, device).calibrate())


def _worker(plan: Plan, device: str) -> ChunkWorker:
    return ChunkWorker(plan, plan.encoder.load(device))


def _refusal(work: Callable[[], None]) -> str:
    """Nothing, or a sentence that a user can act on. It travels as data: Ray wraps exceptions, in ways of its own."""
    try:
        work()
    except (ValueError, OSError, ImportError) as error:
        return str(error)
    return ""


def _raise(refusal: str) -> None:
    if refusal:
        raise ValueError(refusal)
