"""The card of a trained model: what the method is, and what sentence-transformers tells of the training."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, train_bellm, train_freeze, train_jtcse

pytest.importorskip("peft")


@pytest.mark.parametrize(
    ("train", "kind", "given", "rows", "method", "loss"),
    [
        (train_bellm, BeLLMTraining, {"rank": 2, "angle_weight": 1.0, "triplets": "rows.tsv"},
         "a man\ta person\tno one\nice\twater\tfire\n", "Bidirectional last layer", "ContrastiveAngleLoss"),
        (train_freeze, FreezeTraining, {"stage": "siamese", "pairs": "rows.tsv"},
         "a man\ta person\t4.5\nice\twater\t3\n", "Layer states", "PairScoreMSELoss"),
        (train_jtcse, JTCSETraining, {"texts": "rows.tsv"}, "sentence\na man\nice\nwater\n", "JTCSE", "JTCSELoss"),
    ],
)  # fmt: skip
def test_both_are_told(train, kind, given, rows, method, loss, backbone_path, encoder_paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.tsv").write_text(rows, encoding="utf-8")
    model = encoder_paths()[0] if kind is JTCSETraining else backbone_path()
    arguments = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none"}
    train(kind(model=model, arguments=arguments, **given), tmp_path / "run", progress=False)
    text = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    for told in (
        f"**{method}**", "import st_reba", "## Method", "## Limits", "It was [trained](#training-details) with",
        "## Training Details", loss, "#### Non-Default Hyperparameters", "`max_steps`: 1", "PyTorch: ",
    ):  # fmt: skip
        assert told in text
    assert "Nothing was trained" not in text
    assert "without training" not in text
    assert {"st-reba", "generated_from_trainer"} <= set(ModelCard(text).data.tags)
