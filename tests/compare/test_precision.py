from __future__ import annotations

import pytest
import torch

from st_reba.compare.cost import fastest_on_cpu


@pytest.mark.parametrize(
    ("told", "fastest"),
    [
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_f": True, "architecture": "x86_64"}, torch.float32),
        (None, torch.float32),
    ],
)
def test_bfloat16_is_fastest_where_a_processor_has_units_for_it(told, fastest, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    if told is None:  # An older PyTorch.
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert fastest_on_cpu() is fastest
