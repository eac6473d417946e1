"""Chunks encoded on a Ray cluster: Ray Data's ``map_batches`` over a pool of actors with a model each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ..optional import require
from .work import ChunkWorker, OnTexts, Plan

#: Chunks travel in this many groups a worker, so that one that is slow or dies holds little up.
_GROUPS = 64
_POLL_S = 1.0


class RayEngine:
    """A Ray cluster: the one that ``RAY_ADDRESS`` names, or one on this machine.

    Actors read the copy of the input and write their parts themselves, so every node must see the output's folder at
    the same path; only chunk numbers travel. Ray starts an actor that died again and repeats what it was doing; as a
    part is written whole or not at all, under its number, no row is lost and none is there twice.

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
        require("ray.data", "ray", "The ray engine")
        self._ray = require("ray", "ray", "The ray engine")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.workers = workers
        self.device = device or ("cuda" if self._ray.cluster_resources().get("GPU") else "cpu")

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        resources = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        data = self._ray.data
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        tally = self._ray.remote(num_cpus=0)(_Tally).remote()
        with self._polling(tally, on_texts):
            if plan.needs_ranges:
                calibrated = self._ray.remote(**resources)(_calibrate).remote(plan, self.device, tally)
                _raise(self._ray.get(calibrated))
            groups = min(len(todo), _GROUPS * self.workers)
            done = data.from_items([{"chunk": number} for number in todo], override_num_blocks=groups).map_batches(
                _Actor,
                fn_constructor_args=(plan, self.device, tally),
                batch_size=1,
                compute=data.ActorPoolStrategy(size=min(self.workers, groups)),
                **resources,
            )
            for row in done.iter_rows():
                _raise(row["refusal"])
                yield int(row["chunk"])

    @contextmanager
    def _polling(self, tally: Any, on_texts: OnTexts) -> Iterator[None]:
        """Ask every second what actors have told: Ray gives rows whenever a whole group of chunks is done."""
        over = threading.Event()

        def poll() -> None:
            while not over.wait(_POLL_S):
                try:
                    told = self._ray.get(tally.taken.remote())
                except self._ray.exceptions.RayError:
                    return  # Its node is gone: chunks alone are told of from now on.
                for stage, texts in told.items():
                    on_texts(stage, texts)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Tally:
    """An actor that counts the texts which others have encoded since it was asked."""

    def __init__(self) -> None:
        self._texts: Counter[str] = Counter()

    def add(self, stage: str, texts: int) -> None:
        self._texts[stage] += texts

    def taken(self) -> Counter[str]:
        texts, self._texts = self._texts, Counter()
        return texts


class _Actor:
    """A loaded model on some node."""

    def __init__(self, plan: Plan, device: str, tally: Any) -> None:
        self._plan = plan
        self._device = device
        self._tally = tally

    @cached_property
    def _worker(self) -> ChunkWorker:
        return _worker(self._plan, self._device, self._tally)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (number,) = batch["chunk"].tolist()
        return {**batch, "refusal": np.array([_refusal(lambda: self._encode(number))])}

    def _encode(self, number: int) -> None:
        # It is not known which chunk Ray gives next, and this one has to be whole before it is called done.
        self._worker.encode(number)
        self._worker.finish()


def _calibrate(plan: Plan, device: str, tally: Any) -> str:
    return _refusal(lambda: _worker(plan, device, tally).calibrate())


def _worker(plan: Plan, device: str, tally: Any) -> ChunkWorker:
    def tell(stage: str, texts: int) -> None:
        tally.add.remote(stage, texts)

    return ChunkWorker(plan, plan.encoder.load(device), tell)


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
