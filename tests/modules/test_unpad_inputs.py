"""Texts one behind the other in one row give what they give in a padded batch."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from st_reba import (
    AttentionPoolingModule,
    CausalTransformer,
    EchoLayersModule,
    EchoModule,
    KVReroutingModule,
    ReBAModule,
    ValueAggregationModule,
)
from tests.backbones import OWN_ATTENTION, TELLING, TEXTS
from tests.conftest import paired

MIXED = [*TEXTS, "", "a b c"]
METHODS = [
    (CausalTransformer, {}),
    (CausalTransformer, {"rows": "last", "template": "prompteol"}),
    (CausalTransformer, {"final_norm": False, "output_layer": 2}),
    (EchoModule, {"pool_copies": "repeated"}),
    (EchoModule, {"rows": "last"}),
    (EchoLayersModule, {}),
    (ReBAModule, {}),
    (ReBAModule, {"rows": "last", "layers": [1]}),
    (ReBAModule, {"chunk_length": 3}),
    (AttentionPoolingModule, {}),
    # Done to padded batches, whatever is asked for.
    (ValueAggregationModule, {}),
    (KVReroutingModule, {}),
]


@pytest.fixture
def rows_run(monkeypatch):
    """How many rows each pass of a language model has, and of how many tokens."""
    shapes = []
    forward = Transformer.forward

    def noting(self, features, **kwargs):
        shapes.append(tuple(features["input_ids"].shape) if "input_ids" in features else None)
        return forward(self, features, **kwargs)

    monkeypatch.setattr(Transformer, "forward", noting)
    return shapes


def embedded(module, texts=MIXED):
    with torch.no_grad():
        return module(module.preprocess(texts))


@pytest.fixture(scope="module")
def unpadded(backbone_path):
    """A backbone that was asked for it, and so is what is made on it."""
    return CausalTransformer(backbone_path(), unpad_inputs=True)


@pytest.mark.parametrize(("made", "settings"), METHODS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_equals_the_padded_batch(made, settings, shared, unpadded, rows_run):
    padded = made(shared(), **settings).eval()
    packed = made(unpadded, **settings).eval()
    expected = embedded(padded)
    assert all(shape[0] > 1 for shape in rows_run)
    rows_run.clear()
    found = embedded(packed)
    assert all((shape[0] == 1) is (made not in (ValueAggregationModule, KVReroutingModule)) for shape in rows_run)
    torch.testing.assert_close(found["token_embeddings"], expected["token_embeddings"], rtol=1e-4, atol=1e-5)
    assert torch.equal(found["attention_mask"], expected["attention_mask"])


@pytest.mark.parametrize(("name", "made"), paired(TELLING, [CausalTransformer, ReBAModule]))
@pytest.mark.filterwarnings("ignore:.*computes its attention in its own code")
def test_every_architecture(made, name, shared, backbone_path, rows_run):
    """Windows and soft caps are those of each text, wherever it stands in the row; some architectures are padded."""
    expected = embedded(made(shared(name)).eval())
    rows_run.clear()
    if name in OWN_ATTENTION:
        with pytest.warns(UserWarning, match="unpad_inputs=True: .* does not read texts in one row"):
            module = made(backbone_path(name), unpad_inputs=True).eval()
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="unpad_inputs")
            module = made(backbone_path(name), unpad_inputs=True).eval()
    found = embedded(module)
    if name not in OWN_ATTENTION:
        assert {shape[0] for shape in rows_run} == {1}
    torch.testing.assert_close(found["token_embeddings"], expected["token_embeddings"], rtol=1e-4, atol=1e-5)


def test_nothing_is_packed_where_nothing_is_padded(backbone_path, rows_run):
    module = CausalTransformer(backbone_path(), unpad_inputs=True).eval()
    embedded(module, ["same", "same", "same"])
    assert rows_run[0][0] == 3


def test_gradients_flow(backbone_path):
    grown = []
    for unpad in (False, True):
        module = ReBAModule(backbone_path(), unpad_inputs=unpad).train()
        module(module.preprocess(MIXED))["token_embeddings"].square().sum().backward()
        grown.append([weight.grad for weight in module.parameters()])
    for padded, packed in zip(*grown, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-4)


def test_it_is_saved_where_it_was_asked_for(backbone_path, tmp_path):
    for asked in (None, True, False):
        module = CausalTransformer(backbone_path(), unpad_inputs=asked)
        module.save(str(tmp_path / str(asked)))
        assert CausalTransformer.load(str(tmp_path / str(asked))).unpad_inputs is asked


def test_another_value_is_refused(backbone_path):
    module = CausalTransformer(backbone_path())
    with pytest.raises(ValueError, match="unpad_inputs='yes': use True, False or None"):
        module.unpad_inputs = "yes"


# With "flash" in it, transformers would look for a package of that name.
STAND_IN = "varlen_stand_in"


def stand_in(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """Attention of texts in one row, cut where it is told, as flash attention cuts it; and nothing else."""
    assert attention_mask is None
    assert cu_seq_lens_q is not None, "a padded batch"
    bounds = list(itertools.pairwise(cu_seq_lens_q.tolist()))
    assert max_length_q == max(end - start for start, end in bounds)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    texts = [
        scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], is_causal=True, scale=scaling
        )
        for start, end in bounds
    ]
    return torch.cat(texts, dim=2).transpose(1, 2), None


@pytest.fixture
def flash_attention(monkeypatch):
    """How a model is loaded whose attention is the stand-in, in which ST finds flash attention."""
    AttentionInterface.register(STAND_IN, stand_in)
    AttentionMaskInterface.register(STAND_IN, lambda **kwargs: None)
    found = Transformer._can_flatten_inputs

    def can_flatten_inputs(self):
        if self.config._attn_implementation != STAND_IN:
            return found(self)
        if self.model_forward_params is not None:
            self.model_forward_params |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        return True

    monkeypatch.setattr(Transformer, "_can_flatten_inputs", can_flatten_inputs)
    return {"model_kwargs": {"attn_implementation": STAND_IN}}


@pytest.mark.parametrize(
    ("made", "settings"), [(CausalTransformer, {}), (EchoModule, {"rows": "last"}), (ReBAModule, {})]
)
def test_under_flash_attention_it_is_done_unasked(made, settings, backbone_path, flash_attention):
    expected = SentenceTransformer(modules=[made(backbone_path(), **settings), Pooling(32, "mean")]).encode(MIXED)
    module = made(backbone_path(), **settings, **flash_attention)
    model = SentenceTransformer(modules=[module, Pooling(32, "mean")])
    # Where attention is watched it is ours, and sees texts padded.
    assert module.can_flatten_inputs is (made is not ReBAModule)
    torch.testing.assert_close(torch.as_tensor(model.encode(MIXED)), torch.as_tensor(expected), rtol=1e-4, atol=1e-5)
    module.unpad_inputs = False
    if made is not ReBAModule:
        with pytest.raises(AssertionError, match="a padded batch"):
            model.encode(MIXED)


def test_a_shared_backbone_is_packed_where_st_would(backbone_path, flash_attention):
    shared = Transformer(backbone_path(), **flash_attention)
    module = CausalTransformer(shared)
    assert module.can_flatten_inputs
    assert not CausalTransformer(Transformer(backbone_path())).can_flatten_inputs
