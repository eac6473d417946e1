"""Where chunks are encoded: in this process, or in one for each of several devices."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

from .encoder import Encoder
from .work import ChunkWorker, Encode, Plan, calibrate


class Engine(Protocol):
    """Encodes chunks somewhere.

    Attributes:
        device: The kind of device, such as ``"cpu"`` or ``"cuda"``: results may differ in their last bits between them.
    """

    device: str

    def run(self, plan: Plan, todo: Sequence[int]) -> Iterator[int]:
        """Calibrate if need be, then encode the chunks of these numbers; yields each that is done, in any order."""


class LocalEngine:
    """This machine.

    Args:
        devices: One device: the model runs in this process. Several (a name may come twice): each has a process with a
            copy of the model. The output is the same.

    Raises:
        ValueError: If no device is given, or they are not of one kind.
    """

    def __init__(self, devices: Sequence[str] = ("cpu",)) -> None:
        kinds = {device.split(":")[0] for device in devices}
        if len(kinds) != 1 or "" in kinds:
            raise ValueError(f'devices {list(devices)}: give one or more of one kind, such as "cuda:0" and "cuda:1".')
        self.devices = list(devices)
        self.device = kinds.pop()

    def run(self, plan: Plan, todo: Sequence[int]) -> Iterator[int]:
        with self._encoders(plan.encoder) as encoders:
            if plan.needs_ranges:
                calibrate(plan, encoders[0])
            workers = [ChunkWorker(plan, encode) for encode in encoders]
            if len(workers) == 1:
                for number in todo:
                    workers[0](number)
                    yield number
            else:
                yield from _side_by_side(workers, todo)

    @contextmanager
    def _encoders(self, encoder: Encoder) -> Iterator[list[Encode]]:
        if len(self.devices) == 1:
            yield [partial(encoder.encode, encoder.load(self.devices[0]))]
            return
        model = encoder.load("cpu")
        with ExitStack() as stack:
            pools = []
            for device in self.devices:
                # A pool for each device, not one for all: each then takes its next chunk when it is ready.
                pools.append(model.start_multi_process_pool([device]))
                stack.callback(model.stop_multi_process_pool, pools[-1])
            yield [partial(encoder.encode, model, pool=pool) for pool in pools]


def _side_by_side(workers: Sequence[ChunkWorker], todo: Sequence[int]) -> Iterator[int]:
    """Each chunk by whichever worker is free: at most one chunk a worker is in memory."""
    free: queue.SimpleQueue[ChunkWorker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def encode(number: int) -> int:
        worker = free.get()
        try:
            worker(number)
        finally:
            free.put(worker)
        return number

    with ThreadPoolExecutor(len(workers)) as executor:
        yield from executor.map(encode, todo)
