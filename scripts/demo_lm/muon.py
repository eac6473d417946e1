"""Muon: momentum whose matrices are made orthogonal before they become steps (Jordan et al., 2024).

PyTorch has one too (``torch.optim.Muon``). It computes in bfloat16, matrix by matrix, which on a CPU without bfloat16
products takes half as long as the forward and backward pass of this model; in float32, all matrices of a shape at
once, it takes a tenth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# A polynomial whose repeated use drives singular values towards 1, chosen for its slope at 0.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_STEPS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1.

    Args:
        matrices: (k, m, n).

    Returns:
        (k, m, n); singular values between about 0.7 and 1.2.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    found = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = found @ found.mT
        quartic = torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        found = torch.baddbmm(found, quartic, found, beta=_LINEAR)
    return found if wide is matrices else found.mT


class Muon(torch.optim.Optimizer):
    r"""Muon for the matrices inside the layers; embeddings and norms belong to AdamW.

    .. math:: M_t = \mu M_{t-1} + G_t, \quad
              W_t = (1 - \eta\lambda) W_{t-1} - \eta \sqrt{\max(1, m / n)} \, \mathrm{orth}(G_t + \mu M_t)

    Args:
        parameters: Matrices, (m, n) each.
        lr: The spectral norm of a step.
        momentum: :math:`\mu`.
        weight_decay: :math:`\lambda`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                directions = orthogonalised(torch.stack([self._lookahead(p, group["momentum"]) for p in parameters]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(directions.unbind()), alpha=-group["lr"] * scale)

    def _lookahead(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the gradient, and the momentum after it."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(momentum).add_(parameter.grad)
        return parameter.grad + momentum * state["momentum"]
