"""Where benchmarks run: on the fastest device there is, each with its own clock."""

from __future__ import annotations

import time

import torch
from sentence_transformers.util import get_device_name


def device() -> str:
    """The accelerator, or ``"cpu"``."""
    return str(get_device_name())


def now(place: str) -> float:
    """Seconds of the processor; by the clock where an accelerator works, when all work that it was given is done."""
    if torch.device(place).type == "cpu":
        return time.process_time()
    torch.get_device_module(place).synchronize()
    return time.perf_counter()
