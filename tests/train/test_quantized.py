"""An adapter on weights of few bits, by torchao on a CPU; what is merged is the backbone as it was."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import TorchAoConfig

from st_reba.train import BeLLMTraining, build_bellm, train_bellm

from ..backbones import TEXTS

pytest.importorskip("peft")
quantization = pytest.importorskip("torchao.quantization")


def test_adapter_and_merged_model_are_close(backbone_path, tmp_path):
    rows = "".join(f"{text}\t{text} again\t{TEXTS[i - 2]} not\n" for i, text in enumerate(TEXTS))
    (tmp_path / "triplets.tsv").write_text(rows, encoding="utf-8")
    settings = BeLLMTraining(
        model=backbone_path(), triplets=str(tmp_path / "triplets.tsv"), rank=4,
        model_kwargs={"quantization_config": TorchAoConfig(quantization.Int8WeightOnlyConfig())},
        arguments={"learning_rate": 1e-2, "per_device_train_batch_size": 5, "num_train_epochs": 3, "report_to": "none"},
    )  # fmt: skip
    before = build_bellm(settings)
    assert "torchao" in type(before[0].model.layers[0].mlp.up_proj.weight).__module__
    merged = train_bellm(settings, tmp_path / "run", progress=False)
    assert type(merged[0].model.layers[0].mlp.up_proj.weight).__module__.startswith("torch.nn")
    whole = SentenceTransformer(str(tmp_path / "run/model"), device="cpu")
    assert np.array_equal(whole.encode(TEXTS), merged.encode(TEXTS))
    moved = np.abs(merged.encode(TEXTS) - before.encode(TEXTS)).max()
    adapter = SentenceTransformer(str(tmp_path / "run/adapter"), device="cpu")
    assert np.abs(merged.encode(TEXTS) - adapter.encode(TEXTS)).max() < 0.1 * moved
