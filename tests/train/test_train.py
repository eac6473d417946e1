from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from st_reba import BidirectionalLastLayer, CausalTransformer, EchoModule, ReBAModule

from ..backbones import TEXTS
from ..conftest import paired, pipeline, relative_error


@pytest.mark.parametrize(
    ("architecture", "settings"),
    paired(["llama", "gemma2_softcap", "mistral_window", "bloom"], [{}, {"rows": "last"}, {"normalize_weights": True}]),
)
@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_gradients_are_those_of_the_paper(architecture, settings, backbone_path, eager, token_ids):
    """Through the states and through the weights: against autograd on the stored maps."""
    module = ReBAModule(backbone_path(architecture), **settings)
    model = pipeline(module, "mean")
    features = module.preprocess([TEXTS[0], TEXTS[1]])
    vectors = model(features)["sentence_embedding"]
    direction = torch.linspace(-1, 1, vectors.shape[1])
    (vectors @ direction).sum().backward()

    reference = eager(architecture)
    reference.zero_grad()
    total = 0
    for text in TEXTS[:2]:
        ids = token_ids(text)
        output = reference(input_ids=torch.tensor([ids * 2]), output_attentions=True)
        weights = torch.stack([w[0] for w in output.attentions]).flatten(0, 1)
        weights = ((weights + weights.mT) / 2).amax(dim=0)[: len(ids)].triu()
        if settings.get("normalize_weights"):
            weights = weights / weights.sum(-1, keepdim=True)
        words = weights @ output.last_hidden_state[0]
        total = total + (words[-1] if settings.get("rows") == "last" else words.mean(0)) @ direction
    total.backward()
    expected = dict(reference.named_parameters())
    for name, parameter in module.model.named_parameters():
        if expected[name].grad is not None and expected[name].grad.norm() > 1e-4:
            assert relative_error(parameter.grad, expected[name].grad) < 1e-3, name
    reference.zero_grad()


@pytest.mark.parametrize("architecture", ["llama", "mistral_window"])
def test_gradients_in_chunks(architecture, backbone_path, eager, token_ids):
    """Through the pass over the whole text and through those over its chunks."""
    module = ReBAModule(backbone_path(architecture), chunk_length=8)
    model = pipeline(module, "mean")
    vector = model(module.preprocess([TEXTS[0]]))["sentence_embedding"][0]
    direction = torch.linspace(-1, 1, len(vector))
    (vector @ direction).backward()

    reference = eager(architecture)
    reference.zero_grad()

    def look(ids):
        output = reference(input_ids=torch.tensor([ids]), output_attentions=True)
        weights = torch.stack([maps[0] for maps in output.attentions]).flatten(0, 1)
        return output.last_hidden_state[0], ((weights + weights.mT) / 2).amax(dim=0)

    ids, total = token_ids(TEXTS[0]), 0
    assert len(ids) > 8
    assert len(ids) % 8
    states, weights = look(ids)
    for first in range(0, len(ids), 8):
        here = slice(first, min(first + 8, len(ids)))
        size = here.stop - first
        again, inner = look(ids[here] * 2)
        words = weights[here, here].triu() @ states[here] + inner[:size, size:] @ again[size:]
        total = total + words.sum(0) / len(ids)
    (total @ direction).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in module.model.named_parameters():
        if expected[name].grad is not None and expected[name].grad.norm() > 1e-4:
            assert relative_error(parameter.grad, expected[name].grad) < 1e-3, name
    reference.zero_grad()


@pytest.mark.parametrize("module_class", [CausalTransformer, EchoModule, ReBAModule])
def test_inference_keeps_nothing(module_class, backbone_path):
    model = pipeline(module_class(backbone_path()))
    assert not any(item["sentence_embedding"].requires_grad for item in model.encode(TEXTS, output_value=None))
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("module_class", [BidirectionalLastLayer, EchoModule, ReBAModule])
def test_gradients_pass_through_bidirectional_layers(module_class, backbone_path):
    model = pipeline(module_class(backbone_path(), bidirectional_layers=2))
    model(model.preprocess(TEXTS))["sentence_embedding"].square().sum().backward()
    for name, parameter in model[0].model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize(
    ("loss_class", "module_class"),
    paired([MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss], [EchoModule, ReBAModule]),
)
def test_sts_trainer(loss_class, module_class, backbone_path, tmp_path):
    model = pipeline(module_class(backbone_path()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = {"anchor": TEXTS * 2, "positive": [*TEXTS[1:], TEXTS[0]] * 2}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        learning_rate=1e-3, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(rows), loss=loss_class(model)
    )
    trainer.train()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert len(changed) > len(before) / 2
    model.save_pretrained(str(tmp_path / "trained"))
    assert "## Training Details" in (tmp_path / "trained" / "README.md").read_text()


def test_gradient_checkpointing_is_refused(backbone_path):
    model = pipeline(ReBAModule(backbone_path())).train()
    model[0].model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="Gradient checkpointing .* Turn it off to train through ReBAModule"):
        model(model.preprocess(TEXTS))
    assert model.encode(TEXTS).any()
