from __future__ import annotations

import copy
import json
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer

from st_reba import CausalTransformer, LayerStates

from .. import oracles
from ..backbones import TEXTS, own, third
from ..conftest import examples, pipeline, relative_error


def states(module, texts, **kwargs):
    with torch.inference_mode():
        return module(module.preprocess(texts, **kwargs))["layer_states"]


@pytest.mark.parametrize("architecture", third(0))
def test_every_layer_on_every_architecture(architecture, shared, eager, token_ids):
    module = LayerStates(shared(architecture)).eval()
    assert module.depth == 3
    found = states(module, TEXTS)
    assert found.shape == (len(TEXTS), 3, 32)
    for row, text in zip(found, TEXTS, strict=True):
        assert relative_error(row, oracles.layer_states(eager(architecture), token_ids(text))) < 1e-5


def test_the_last_layer_is_read_before_the_final_norm(shared):
    """Which is not what transformers hands out for it."""
    module = LayerStates(shared()).eval()
    features = module.preprocess(TEXTS[:1])
    with torch.inference_mode():
        output = module.model(input_ids=features["input_ids"], output_hidden_states=True)
        last = states(module, TEXTS[:1])[0, -1]
        assert relative_error(module.model.norm(last), output.hidden_states[-1][0, -1]) < 1e-6
        assert relative_error(last, output.hidden_states[-1][0, -1]) > 0.1


def test_token_embeddings_are_the_classical_ones(shared):
    for pooling in ("mean", "lasttoken"):
        ours = pipeline(LayerStates(shared("qwen3")), pooling).encode([*TEXTS, ""])
        assert np.array_equal(ours, pipeline(CausalTransformer(shared("qwen3")), pooling).encode([*TEXTS, ""]))


def test_a_preset_that_reads_the_last_token_hands_it_on_alone(shared):
    modules = (kind(shared(), template="prompteol").eval() for kind in (LayerStates, CausalTransformer))
    found, expected = (module(module.preprocess(TEXTS)) for module in modules)
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    assert relative_error(found["token_embeddings"], expected["token_embeddings"]) < 1e-5


@pytest.mark.parametrize("pool_over", ["text", "all"])
def test_which_token_is_the_last(pool_over, backbone_path, eager):
    """[CLS] q : the cat ! [SEP]: the text ends before the literal, the layout behind it."""
    path = backbone_path("gpt2", "bert")
    module = LayerStates(path, template="{text}!", pool_over=pool_over).eval()
    ids = module.preprocess(["the cat"], prompt="q:")["input_ids"][0].tolist()
    end = len(ids) if pool_over == "all" else len(ids) - 2
    assert module.tokenizer.decode(ids[end - 1]).strip() == ("[SEP]" if pool_over == "all" else "cat")
    expected = oracles.layer_states(module.model, ids[:end])
    assert relative_error(states(module, ["the cat"], prompt="q:")[0], expected) < 1e-5


@settings(max_examples=examples(15))
@given(batch=st.lists(st.sampled_from([*TEXTS, ""]), min_size=1, max_size=6), tokens=st.sampled_from([1, 40, 4096]))
def test_a_batch_is_its_texts(batch, tokens, shared):
    module = LayerStates(shared("mistral_window")).eval()
    module._warned_empty = True
    module.CPU_TOKENS = tokens
    for row, text in zip(states(module, batch), batch, strict=True):
        assert relative_error(row, states(module, [text])[0]) < 1e-5 if text else not row.any()


def test_one_pass_that_keeps_one_vector_a_text(shared):
    module = LayerStates(shared()).eval()
    passes = []
    hook = module.model.layers[0].register_forward_pre_hook(lambda *call: passes.append(call))
    found = states(module, TEXTS)
    hook.remove()
    assert len(passes) == 1
    assert found.untyped_storage().nbytes() == found.numel() * 4


def test_modules_that_share_a_backbone(shared):
    first = LayerStates(shared()).eval()
    alone = states(first, TEXTS)
    second = LayerStates(first, template="so: {text}").eval()
    assert torch.equal(states(first, TEXTS), alone)
    assert torch.equal(states(LayerStates(second), TEXTS), alone)
    assert not torch.equal(states(second, TEXTS), alone)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copied, backbone_path):
    module = LayerStates(backbone_path()).eval()
    assert torch.equal(states(copied(module), TEXTS), states(module, TEXTS))


def test_threads(shared):
    """Each reads its own states, though the layers and their hooks are the same."""
    module = LayerStates(shared()).eval()
    inputs = [module.preprocess([text]) for text in TEXTS]
    expected = [states(module, [text]) for text in TEXTS]
    found = {}

    @torch.inference_mode()
    def work(index):
        found[index] = [module(dict(inputs[index]))["layer_states"] for _ in range(10)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, alone in enumerate(expected):
        assert all(torch.equal(one, alone) for one in found[index])


def test_gradients_reach_the_backbone(backbone_path):
    module = LayerStates(backbone_path())
    module(module.preprocess(TEXTS))["layer_states"].square().sum().backward()
    for name, parameter in module.model.named_parameters():
        if name != "norm.weight":
            assert parameter.grad.norm() > 0, name
    assert module.model.norm.weight.grad is None
    module.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="Turn it off to train through LayerStates"):
        module.train()(module.preprocess(TEXTS))


def test_bfloat16(backbone_path, shared):
    full = states(LayerStates(shared()).eval(), TEXTS)
    half = states(LayerStates(backbone_path(), model_kwargs={"dtype": "bfloat16"}).eval(), TEXTS)
    assert torch.cosine_similarity(full, half.float(), dim=-1).min() > 0.99


def test_backbones_that_cannot_be_read(backbone_path):
    module = Transformer(backbone_path())
    module.model.layers = torch.nn.ModuleList([*module.model.layers, torch.nn.Identity()])
    with pytest.raises(ValueError, match="The layers of LlamaModel were not found"):
        LayerStates(module)


def test_version_0_1_handed_on_all_tokens_in_any_case(shared, tmp_path):
    pipeline(LayerStates(shared(), rows="last")).save_pretrained(str(tmp_path))
    assert SentenceTransformer(str(tmp_path), device="cpu")[0].rows == "last"
    path = own(tmp_path) / "sentence_bert_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: config[name] for name in config.keys() - {"final_norm", "tokenization"}}))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded.encode(TEXTS[0], output_value="token_embeddings").shape[0] > 1
