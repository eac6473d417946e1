"""What was imported under a former name still comes, with a warning that says where it lies now."""

from __future__ import annotations

import importlib
import sys

import pytest

from . import processes

MOVED = {
    "st_reba.catalogue": ("st_reba.recipes", "find"),
    "st_reba.losses": ("st_reba.training.losses", "JTCSELoss"),
    "st_reba.readers.chunks": ("st_reba.reading.chunks", "encode_chunks"),
    "st_reba.readers.words": ("st_reba.reading.words", "encode_words"),
    "st_reba.readers.layers": ("st_reba.reading.layers", "LayerReader"),
    "st_reba.readers.sweep": ("st_reba.compare.sweep", "RecipeSweep"),
    "st_reba.readers.store": ("st_reba.evaluation.store", "EmbeddingStore"),
    "st_reba.jtcse.cls_energy": ("st_reba.evaluation.cls_energy", "CLSEnergyEvaluator"),
    "st_reba.jtcse.info_nce": ("st_reba.training.losses", "InfoNCELoss"),
    "st_reba.jtcse.interaction": ("st_reba.training.losses", "InteractionInfoNCELoss"),
    "st_reba.jtcse.loss": ("st_reba.training.losses", "JTCSELoss"),
    "st_reba.jtcse.tensor_modulus": ("st_reba.training.losses", "TensorModulusLoss"),
    "st_reba.jtcse.training": ("st_reba.training.jtcse", "train_jtcse"),
    "st_reba.modules.after_pooling.all_but_the_top": ("st_reba.modules.embedding_transforms", "AllButTheTop"),
    "st_reba.modules.after_pooling.embedding_filter": ("st_reba.modules.embedding_filter", "EmbeddingFilter"),
    "st_reba.modules.after_pooling.idf_weights": ("st_reba.modules.idf_weights", "IdfWeights"),
    "st_reba.modules.after_pooling.moments": ("st_reba.modules.moments", "embedding_moments"),
    "st_reba.modules.after_pooling.partwise_whitening": ("st_reba.modules.partwise_whitening", "PartwiseWhitening"),
    "st_reba.modules.after_pooling.standardization": ("st_reba.modules.embedding_transforms", "Centering"),
    "st_reba.modules.after_pooling.transform": ("st_reba.modules.embedding_transforms", "EmbeddingTransform"),
    "st_reba.modules.after_pooling.whitening": ("st_reba.modules.embedding_transforms", "SHRINKAGE"),
    "st_reba.modules.late_interaction": ("st_reba.modules.multi_vector", "multi_vector_encoder"),
    "st_reba.modules.training_free.attention_pooling": ("st_reba.modules.attention_pooling", "AttentionPoolingModule"),
    "st_reba.modules.training_free.bidirectional": ("st_reba.modules.bidirectional", "BidirectionalLastLayer"),
    "st_reba.modules.training_free.causal": ("st_reba.modules.causal_transformer", "CausalTransformer"),
    "st_reba.modules.training_free.contrastive_prompting": (
        "st_reba.modules.contrastive_prompting",
        "ContrastivePromptingModule",
    ),
    "st_reba.modules.training_free.early_late": ("st_reba.modules.early_late", "EarlyLateModule"),
    "st_reba.modules.training_free.echo": ("st_reba.modules.echo", "EchoModule"),
    "st_reba.modules.training_free.echo_layers": ("st_reba.modules.echo_layers", "EchoLayersModule"),
    "st_reba.modules.training_free.hierarchical_token_prepending": (
        "st_reba.modules.hierarchical_token_prepending",
        "HierarchicalTokenPrependingModule",
    ),
    "st_reba.modules.training_free.kv_rerouting": ("st_reba.modules.kv_rerouting", "KVReroutingModule"),
    "st_reba.modules.training_free.meta_eol": ("st_reba.modules.meta_eol", "MetaEOLModule"),
    "st_reba.modules.training_free.promptreps": ("st_reba.modules.promptreps", "PromptRepsModule"),
    "st_reba.modules.training_free.reba": ("st_reba.modules.reba", "ReBAModule"),
    "st_reba.modules.training_free.refined_thought": ("st_reba.modules.refined_thought", "RefinedThoughtModule"),
    "st_reba.modules.training_free.reranking": ("st_reba.modules.reranking", "RerankModule"),
    "st_reba.modules.training_free.token_prepending": ("st_reba.modules.token_prepending", "TokenPrependingModule"),
    "st_reba.modules.training_free.value_aggregation": ("st_reba.modules.value_aggregation", "ValueAggregationModule"),
    "st_reba.modules.trained.layer_states": ("st_reba.modules.layer_states", "LayerStates"),
    "st_reba.modules.trained.layerwise_autoencoder": ("st_reba.modules.layerwise_autoencoder", "LayerwiseAutoencoder"),
    "st_reba.modules.trained.twin_tower": ("st_reba.modules.twin_tower", "TwinTower"),
}


@pytest.mark.parametrize("old", MOVED)
def test_a_former_name_warns_and_gives_what_it_gave(old):
    new, name = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}: import from there."):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)


def test_the_package_itself_uses_no_former_name(tmp_path):
    code = "import st_reba, st_reba.compare.run, st_reba.training, st_reba.export, sys; print(*sys.modules, sep='\\n')"
    done = processes.run("-c", code, out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    assert not MOVED.keys() & set(done.stdout.splitlines())
