from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import TwinTower
from st_reba.train import JTCSETraining, train_jtcse

from ..backbones import TEXTS
from . import check_card
from .stopping import stop


@pytest.fixture
def settings(encoder_paths, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"{text} {number}" for number in range(2) for text in TEXTS), encoding="utf-8")
    first, second = encoder_paths(num_hidden_layers=2)
    given = {"model": first, "second_model": second, "texts": str(path)}
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 2}
    return lambda changes=(), **arguments: JTCSETraining(**{**given, **dict(changes)}, arguments={**usual, **arguments})


def test_a_resumed_run_is_the_run(settings, tmp_path):
    """With dropout, and the coin of the interaction loss, which has a generator of its own; with moved data."""
    expected = train_jtcse(settings(save_steps=6), tmp_path / "whole", progress=False).state_dict()
    stop(train_jtcse, settings(), tmp_path / "parts", 5)
    moved = (tmp_path / "texts.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(ValueError, match="of a run with temperature=0.05, but now it is temperature=0.1"):
        train_jtcse(settings({"texts": str(moved), "temperature": 0.1}), tmp_path / "parts", progress=False)
    found = train_jtcse(settings({"texts": str(moved)}, save_steps=3), tmp_path / "parts", progress=False).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    before = TwinTower(settings().model, settings().second_model).state_dict()
    assert sum(not torch.equal(value, expected[f"0.{name}"]) for name, value in before.items()) > len(before) / 2


def test_what_is_written(settings, tmp_path):
    pairs = tmp_path / "dev.tsv"
    pairs.write_text("".join(f"{text}\t{TEXTS[0]}\t{score}\n" for score, text in enumerate(TEXTS)), encoding="utf-8")
    out = tmp_path / "run"
    changes = {"evaluation": str(pairs), "cross_every": 1, "max_seq_length": 9}
    chosen = settings(changes, eval_steps=3, save_steps=6)
    model = train_jtcse(chosen, out, progress=False)
    loaded = SentenceTransformer(str(out / "model"), device="cpu")
    assert loaded[0].cross_every == 1
    assert loaded.max_seq_length == 9
    assert (loaded.encode(TEXTS) == model.to("cpu").encode(TEXTS)).all()
    (state,) = (out / "checkpoints").glob("checkpoint-6/trainer_state.json")
    log = json.loads(state.read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_dev_spearman_cosine" in entry] == [3, 6]
    assert {"info_nce", "interaction", "modulus"} <= set(log[0])
    check_card(out / "model", "**JTCSE**", "JTCSELoss")
