"""Simulation of several devices on the CPU: tensors have a nominal device, and operations refuse to mix devices.

All values are computed on the CPU. The output of an operation is on the device of its inputs, and an operation on
tensors of two devices fails, as on two GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")
# Names of a kind of device that PyTorch knows and this build has no code for: nothing can run there by accident.
FIRST, SECOND = torch.device("maia:0"), torch.device("maia:1")

_the_device = torch.Tensor.device.__get__


def where(tensor: Tensor) -> torch.device:
    return getattr(tensor, "_where", CPU)


def put(module: nn.Module, device: torch.device) -> None:
    """Set the nominal device of a module's tensors."""
    for tensor in (*module.parameters(), *module.buffers()):
        vars(tensor)["_where"] = device


class SeveralDevices(TorchFunctionMode):
    """Mode in which tensors report their nominal device."""

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        if function == _the_device:
            return where(args[0])
        args, kwargs = list(args), dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A number may come from anywhere.
        places = {where(tensor) for tensor in tensors if tensor.dim() > 0} or {where(tensor) for tensor in tensors}
        if len(places) > 1:
            raise RuntimeError(f"{function.__name__}: tensors on {sorted(map(str, places))}")
        place = next(iter(places), CPU)
        if kwargs.get("device") is not None:
            place, kwargs["device"] = torch.device(kwargs["device"]), CPU
        elif function == torch.Tensor.cpu:
            place = CPU
        elif function == torch.Tensor.to:
            for index, argument in enumerate(args[1:], 1):
                if isinstance(argument, (str, torch.device)):
                    place, args[index] = torch.device(argument), CPU

        def placed(tensor: Tensor) -> Tensor:
            if where(tensor) == place:
                return tensor
            if any(tensor is given for given in tensors):
                # It moved: the one that was given stays where it is.
                tensor = tensor.clone()
            vars(tensor)["_where"] = place
            return tensor

        return tree_map_only(Tensor, placed, function(*args, **kwargs))
