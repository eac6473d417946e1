"""The card of a trained model: what the method is, and what sentence-transformers tells of the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from st_reba.train import (
    BeLLMTraining,
    FreezeTraining,
    JTCSETraining,
    train_bellm,
    train_freeze,
    train_jtcse,
)

from ..backbones import TEXTS

pytest.importorskip("peft")

ONE_STEP = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none"}


def bellm(out: Path, backbone_path, encoder_paths) -> None:
    rows = out.parent / "triplets.tsv"
    rows.write_text("a man\ta person\tno one\nice\twater\tfire\n", encoding="utf-8")
    train_bellm(
        BeLLMTraining(model=backbone_path(), triplets=str(rows), rank=2, angle_weight=1.0, arguments=ONE_STEP),
        out,
        progress=False,
    )


def freeze(out: Path, backbone_path, encoder_paths) -> None:
    rows = out.parent / "pairs.tsv"
    rows.write_text("a man\ta person\t4.5\nice\twater\t3\n", encoding="utf-8")
    train_freeze(
        FreezeTraining(model=backbone_path(), pairs=str(rows), stage="siamese", arguments=ONE_STEP), out, progress=False
    )


def jtcse(out: Path, backbone_path, encoder_paths) -> None:
    rows = out.parent / "texts.txt"
    rows.write_text("\n".join(TEXTS), encoding="utf-8")
    first, second = encoder_paths()
    train_jtcse(
        JTCSETraining(model=first, second_model=second, texts=str(rows), arguments=ONE_STEP), out, progress=False
    )


@pytest.mark.parametrize(
    ("train", "method", "loss"),
    [
        (bellm, "Bidirectional last layer", "ContrastiveAngleLoss"),
        (freeze, "Layer states", "PairScoreMSELoss"),
        (jtcse, "JTCSE", "JTCSELoss"),
    ],
)
def test_both_are_told(train, method, loss, backbone_path, encoder_paths, tmp_path):
    train(tmp_path / "run", backbone_path, encoder_paths)
    text = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    for ours in (
        f"**{method}**",
        "import st_reba",
        "## Method",
        "## Limits",
        "It was [trained](#training-details) with",
    ):
        assert ours in text
    for theirs in ("## Training Details", loss, "#### Non-Default Hyperparameters", "`max_steps`: 1", "PyTorch: "):
        assert theirs in text
    assert "Nothing was trained" not in text
    assert "without training" not in text
    assert {"st-reba", "generated_from_trainer"} <= set(ModelCard(text).data.tags)
