"""Sums in float32 at least, or in float64 in a float64 model.

Half precision, PyTorch's default dtype and autocast would round them.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def widen(values: Tensor) -> Tensor:
    """Return values in float32 at least, to be summed."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which ``torch.autocast`` computes products on a device here; None outside autocast."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off on a device within the block."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """Sum states (B, N, D) with weights (B, n, N): (B, n, D), in float32 at least."""
    with without_autocast(states.device):
        return torch.bmm(widen(weights.to(states.device)), widen(states))
