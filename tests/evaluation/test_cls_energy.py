from __future__ import annotations

import pytest
import torch
from sentence_transformers.base.modules import Transformer

from st_reba import TwinTower
from st_reba.evaluation import CLSEnergyEvaluator

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_oracle_of_two_towers(family, encoder_paths):
    model = pipeline(TwinTower(*encoder_paths(family)), "cls").train()
    texts = ["the cat", TEXTS[1][:4], TEXTS[3]]
    found = CLSEnergyEvaluator(texts, batch_size=2).shares(model)
    assert model.training
    for text, value in zip(texts, found, strict=True):
        with torch.no_grad():
            contexts = oracles.twin_tower(*model[0].towers, model.tokenizer(text)["input_ids"], 0)[3]
        assert torch.allclose(value, oracles.cls_energy([*contexts[0], *contexts[1]]), rtol=1e-4)


def test_one_encoder(encoder_paths, tmp_path):
    path, _ = encoder_paths()
    model = pipeline(Transformer(path), "cls")
    evaluator = CLSEnergyEvaluator([*TEXTS, "", " "], name="own")
    metrics = evaluator(model, str(tmp_path), epoch=1, steps=2)
    assert list(metrics) == [evaluator.primary_metric] == ["own_cls_energy"]
    twins = pipeline(TwinTower(path), "cls")
    assert metrics["own_cls_energy"] == pytest.approx(CLSEnergyEvaluator(TEXTS)(twins)["cls_energy"], rel=1e-5)
    lines = (tmp_path / "cls_energy_own_results.csv").read_text().splitlines()
    assert lines[0].endswith("cls_energy")
    assert len(lines) == 2


def test_nothing_stays_watched(encoder_paths):
    model = pipeline(TwinTower(*encoder_paths()), "cls")
    before = model.encode(TEXTS)
    CLSEnergyEvaluator(TEXTS)(model)
    assert not model[0].model.encoder.layer[0].attention.self._forward_hooks
    assert (model.encode(TEXTS) == before).all()


def test_refusals(shared):
    with pytest.raises(ValueError, match="'llama': CLSEnergyEvaluator takes encoders"):
        CLSEnergyEvaluator(TEXTS)(pipeline(shared()))
    with pytest.raises(ValueError, match="needs texts, and the 2 given are empty"):
        CLSEnergyEvaluator(["", " "])
