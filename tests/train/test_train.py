from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

from st_reba import EchoModule, ReBAModule

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}), ("gemma2_softcap", {"rows": "last"}), ("mistral_window", {"normalize_weights": True}),
        ("bloom", {}), ("mistral_window", {"chunk_length": 8}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_gradients_are_those_of_the_paper(architecture, settings, backbone_path, eager, token_ids, monkeypatch):
    """Through the states and through the weights, of each pass: against autograd on the stored maps."""
    module = ReBAModule(backbone_path(architecture), **settings)
    vectors = pipeline(module, "mean")(module.preprocess(TEXTS[:2]))["sentence_embedding"]
    direction = torch.linspace(-1, 1, vectors.shape[1])
    (vectors @ direction).sum().backward()

    def run(model, ids):
        output = model(input_ids=torch.tensor([ids]), output_attentions=True)
        return output.last_hidden_state[0], [weights[0] for weights in output.attentions]

    monkeypatch.setattr(oracles, "run", run)
    reference = eager(architecture)
    reference.zero_grad()
    for ids in map(token_ids, TEXTS[:2]):
        if "chunk_length" in settings:
            words = oracles.chunked(reference, ids, 2, 8)
        else:
            words = oracles.algorithm_2(reference, ids, 2, normalize="normalize_weights" in settings)
        ((words[-1] if "rows" in settings else words.mean(0)) @ direction).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in module.model.named_parameters():
        if expected[name].grad is not None and expected[name].grad.norm() > 1e-4:
            assert relative_error(parameter.grad, expected[name].grad) < 1e-3, name
    reference.zero_grad()


@pytest.mark.parametrize(
    ("loss_class", "module_class"),
    [(MultipleNegativesRankingLoss, EchoModule), (CachedMultipleNegativesRankingLoss, ReBAModule)],
)
def test_sts_trainer(loss_class, module_class, backbone_path, tmp_path):
    """Gradients pass through bidirectional layers, too."""
    model = pipeline(module_class(backbone_path(), bidirectional_layers=2))
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
    assert [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])] == []
    model.save_pretrained(str(tmp_path / "trained"))
    assert "## Training Details" in (tmp_path / "trained" / "README.md").read_text()


def test_gradient_checkpointing_is_refused(backbone_path):
    model = pipeline(ReBAModule(backbone_path())).train()
    model[0].model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="Gradient checkpointing .* Turn it off to train through ReBAModule"):
        model(model.preprocess(TEXTS))
    assert model.encode(TEXTS).any()
