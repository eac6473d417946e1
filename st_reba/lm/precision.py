"""Sums are taken in float32 at least, whatever a model runs in, and in float64 in a float64 model.

Three things would take them elsewhere: a model in half precision, torch's default dtype, and autocast, which rounds the
operands of every matrix product.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def for_summing(values: Tensor) -> Tensor:
    """The same values, to be added up."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What ``torch.autocast`` runs products in here, on this device; None outside it."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """In this block, operations on this device run in the dtype that they are given."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights_ij states_j: of (B, n, N), as wide as sums are, and (B, N, D), (B, n, D), as wide."""
    with without_autocast(states.device):
        return torch.bmm(weights, for_summing(states))
