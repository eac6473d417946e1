"""Where chunks are encoded: in this process, or in one for each of several devices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from operator import methodcaller
from typing import Protocol

from .work import ChunkWorker, OnTexts, Plan
from .workers import WorkerProcess, share


class Engine(Protocol):
    """Encodes chunks somewhere.

    Attributes:
        device: The kind of device, such as ``"cpu"`` or ``"cuda"``: results may differ in their last bits between them.
    """

    device: str

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        """Calibrate if need be, then encode the chunks of these numbers; yields each that is done, in any order.

        What was started for it is ended when it is closed. ``on_texts`` is told of each batch, where that is known.
        """


class LocalEngine:
    """This machine.

    Args:
        devices: One device: the model runs in this process. Several (a name may come twice): each has a process with a
            model of its own, which ends when this process ends, however it does. The output is the same.

    Raises:
        ValueError: If no device is given, or they are not of one kind.
    """

    def __init__(self, devices: Sequence[str] = ("cpu",)) -> None:
        kinds = {device.split(":")[0] for device in devices}
        if len(kinds) != 1 or "" in kinds:
            raise ValueError(f'devices {list(devices)}: give one or more of one kind, such as "cuda:0" and "cuda:1".')
        self.devices = list(devices)
        self.device = kinds.pop()

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        if len(self.devices) == 1:
            with ChunkWorker(plan, plan.encoder.load(self.devices[0]), on_texts) as worker:
                if plan.needs_ranges:
                    worker.calibrate()
                for number, following in zip_longest(todo, todo[1:]):
                    yield from worker.encode(number, following)
                yield from worker.finish()
            return
        with ExitStack() as stack:
            workers = [stack.enter_context(WorkerProcess(plan, device)) for device in self.devices[: len(todo)]]
            if plan.needs_ranges:
                workers[0].begin(methodcaller("calibrate"))
                workers[0].finish(on_texts)
            yield from share(workers, todo, on_texts)
