"""What is refused on older versions. That it works on current ones is tested where it belongs."""

from __future__ import annotations

import pytest

from st_reba import CausalTransformer
from st_reba.hub import compat


def test_a_backbone_on_several_devices(backbone_path, monkeypatch):
    module = CausalTransformer(backbone_path())
    module.model.hf_device_map = {"layers.0": 0, "layers.1": "disk"}
    monkeypatch.setattr(compat, "PLACEMENT_IS_KEPT", False)
    with pytest.raises(ValueError, match=r"placed on 0, disk \(device_map\).* Use sentence-transformers 6\.2 or later"):
        CausalTransformer(module)


def test_a_map_to_one_device(backbone_path, monkeypatch):
    monkeypatch.setattr(compat, "PLACEMENT_IS_KEPT", False)
    CausalTransformer(backbone_path(), model_kwargs={"device_map": "auto"})
