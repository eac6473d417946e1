from __future__ import annotations

from functools import partial

import huggingface_hub
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from st_reba_cli.load import stand_in


def keep_in(place, monkeypatch):
    kept = partial(huggingface_hub.cached_assets_path, assets_dir=place)
    monkeypatch.setattr("st_reba_cli.load.cached_assets_path", kept)


def test_it_is_made_once_and_alike_everywhere(tmp_path, monkeypatch):
    made = []
    state = torch.random.get_rng_state()
    for name in ("first", "second"):
        keep_in(tmp_path / name, monkeypatch)
        path = stand_in()
        assert path.is_relative_to(tmp_path / name)
        made.append((path / "model.safetensors").read_bytes())
        written = (path / "model.safetensors").stat().st_mtime_ns
        assert (stand_in() / "model.safetensors").stat().st_mtime_ns == written
    assert made[0] == made[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_reads_any_text(tmp_path, monkeypatch):
    keep_in(tmp_path, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(stand_in())
    model = AutoModelForCausalLM.from_pretrained(stand_in())
    for text in ("A fox.", "\n\t", "狐狸", "\0\x7f\U0001f98a"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids.shape == (1, len(text.encode()))
        assert model(ids).logits.isfinite().all()
        assert tokenizer.decode(ids[0]) == text
