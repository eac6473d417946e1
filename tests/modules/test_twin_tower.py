"""The twin tower equals two encoders and their cross-attention written out token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig

from st_reba import TwinTower

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error

FAMILIES = tuple(backbones.ENCODERS)


def outputs(module: TwinTower, texts: list[str]) -> dict[str, torch.Tensor]:
    module.eval()
    with torch.no_grad():
        return module(module.preprocess(texts), tower_outputs=True, cross_stream=True)


@pytest.mark.parametrize(("cross_every", "family"), [(1, "bert"), (0, "roberta"), (2, "bert"), (4, "roberta")])
def test_oracle(family, cross_every, encoder_paths):
    """In a padded batch, which the oracle never sees."""
    module = TwinTower(*encoder_paths(family), cross_every=cross_every)
    texts = [TEXTS[0], "the cat"]
    found = outputs(module, texts)
    for row, text in enumerate(texts):
        ids = module.tokenizer(text)["input_ids"]
        with torch.no_grad():
            states, streams, pooled, _ = oracles.twin_tower(*module.towers, ids, cross_every)
        assert relative_error(found["token_embeddings"][row, : len(ids)], states[0] + states[1]) < 1e-5
        for tower in (0, 1):
            assert relative_error(found["cls_states"][row, tower], states[tower][0]) < 1e-5
            assert relative_error(found["pooler_outputs"][row, tower], pooled[tower]) < 1e-5
            if cross_every:
                assert relative_error(found["cross_states"][row, tower], streams[tower][0]) < 1e-5
    assert ("cross_states" in found) == bool(cross_every)


@pytest.mark.parametrize(("cross_every", "layers"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_the_cross_layers_are_the_multiples(cross_every, layers, encoder_paths):
    """One name is both towers, and the cross stream adds no parameters."""
    module = TwinTower(encoder_paths()[0], cross_every=cross_every)
    assert module.cross_layers == layers
    assert sum(p.numel() for p in module.parameters()) == 2 * sum(p.numel() for p in module.model.parameters())


def test_towers_of_two_shapes_are_tncse(encoder_paths, tmp_path):
    first, _ = encoder_paths()
    backbones.encoder("bert", num_hidden_layers=2).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(first).save_pretrained(tmp_path)
    module = TwinTower(first, str(tmp_path), cross_every=0)
    assert pipeline(module, "cls").encode(TEXTS).shape == (5, 32)
    with pytest.raises(ValueError, match="cross_every=2 needs towers of one shape .* or cross_every=0"):
        TwinTower(first, str(tmp_path))


def test_each_saved_tower_is_an_encoder(encoder_paths, tmp_path):
    model = pipeline(TwinTower(*encoder_paths("roberta"), cross_every=4, max_seq_length=9), "cls")
    model.save_pretrained(str(tmp_path))
    assert TwinTower(encoder_paths("roberta")[0]).max_seq_length == backbones.POSITIONS - 1
    assert "**JTCSE**" in (tmp_path / "README.md").read_text()
    for subfolder, tower in zip(("0_TwinTower", "0_TwinTower/tower_2"), model[0].towers, strict=True):
        encoder = AutoModel.from_pretrained(tmp_path, subfolder=subfolder).state_dict()
        assert all(torch.equal(value, encoder[name]) for name, value in tower.state_dict().items())


def test_gradient_checkpointing_changes_nothing(encoder_paths):
    gradients = []
    for checkpointed in (False, True):
        module = TwinTower(*encoder_paths(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
        for tower in module.towers:
            if checkpointed:
                tower.gradient_checkpointing_enable()
        module(module.preprocess(TEXTS), tower_outputs=True, cross_stream=True)["cross_states"].sum().backward()
        gradients.append(module.model.embeddings.word_embeddings.weight.grad)
    assert relative_error(*gradients) < 1e-5


def test_bad_settings(encoder_paths):
    for settings, message in (
        ({"cross_every": 5}, r"cross_every=5: give a number of layers from 1 to 4, .* or 0 for no cross-attention"),
        ({"second_subfolder": "../x"}, "'../x': the second tower of a saved TwinTower lies in 'tower_2'"),
    ):
        with pytest.raises(ValueError, match=message):
            TwinTower(encoder_paths()[0], **settings)


def test_other_architectures_are_refused(backbone_path, encoder_paths, tmp_path):
    BertConfig(is_decoder=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is set up as a decoder"):
        TwinTower(str(tmp_path))
    message = "is of the architecture 'llama': TwinTower takes encoders of the architectures bert, camembert, roberta"
    with pytest.raises(ValueError, match=message):
        TwinTower(backbone_path())
    with pytest.raises(ValueError, match=message):
        TwinTower(encoder_paths()[0], backbone_path())


def test_towers_with_other_tokens_are_refused(encoder_paths, tmp_path):
    first, _ = encoder_paths()
    with pytest.raises(ValueError, match="The towers have 384 and 300 tokens, and 32 and 32 dimensions"):
        TwinTower(first, encoder_paths(vocab_size=300)[0])
    backbones.encoder("bert").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(first)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not that of the first tower, and both towers read the same tokens"):
        TwinTower(first, str(tmp_path))
