from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, FalconH1Config, MambaConfig, Qwen3NextConfig

from st_reba import ValueAggregationModule
from st_reba.lm.anatomy import anatomy_of, output_projections

from .. import backbones, oracles
from ..backbones import DEMO_MODEL, TELLING
from ..conftest import paired, pipeline, relative_error


@pytest.mark.parametrize(("architecture", "dtype"), paired(TELLING, [torch.float32, torch.bfloat16]))
def test_they_are_what_each_architecture_calls_so(architecture, dtype):
    model = backbones.backbone(architecture).to(dtype)
    attention = model.config._attn_implementation
    found = output_projections(model)
    assert found == {layer: oracles.projection_name(architecture, layer) for layer in range(3)}
    assert model.config._attn_implementation == attention


def test_a_model_whose_last_tokens_look_at_themselves():
    """In its own bfloat16, where what the demo model's first layer reads off other tokens is less than rounding."""
    model = AutoModel.from_pretrained(DEMO_MODEL)
    assert model.dtype == torch.bfloat16
    assert output_projections(model) == {layer: f"layers.{layer}.self_attn.o_proj" for layer in range(8)}


def test_layers_of_other_kinds_are_left_out():
    size = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED}
    model = AutoModel.from_config(
        Qwen3NextConfig(
            **{**size, "num_hidden_layers": 4}, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        )
    ).eval()  # fmt: skip
    assert output_projections(model) == {3: "layers.3.self_attn.o_proj"}


def test_of_layers_that_have_a_state_space_beside_their_attention():
    """Both have the layer's number, and a projection."""
    size = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    model = AutoModel.from_config(FalconH1Config(**size, **mamba, mamba_chunk_size=16, pad_token_id=0)).eval()
    assert output_projections(model) == {layer: f"layers.{layer}.self_attn.o_proj" for layer in range(3)}
    # The embedding of a padding token is zero, and what comes behind it is as if it stood alone.
    assert anatomy_of(model).feed_forward == ("layers.2.feed_forward",)


def test_a_model_without_attention():
    model = AutoModel.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match="MambaModel has no attention whose values could be read. Use a model with"):
        output_projections(model)


def test_a_projection_that_is_no_module():
    """BLOOM's slow exact way multiplies with its weights itself."""
    model = backbones.backbone("bloom")
    for layer in model.h:
        layer.self_attention.pretraining_tp, layer.self_attention.slow_but_exact = 2, True
    with pytest.raises(ValueError, match="output projection of the attention in layer 0 of BloomModel was not found"):
        output_projections(model)


def test_one_that_stands_beside_the_attention_is_not_taken_for_another(monkeypatch):
    """As in BERT's build: the last matrix within the attention is then that of the values."""
    model = backbones.backbone("llama")
    for layer in model.layers:
        layer.self_attn.o_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="output projection of the attention in layer 0 of LlamaModel was not found"):
        output_projections(model)


def test_what_is_put_in_its_place_is_tapped(backbone_path):
    module = ValueAggregationModule(backbone_path(), template="{text}")
    before = pipeline(module).encode("a cat")
    torch.nn.init.zeros_(module.model.layers[1].self_attn.o_proj.weight)
    after = pipeline(module).encode("a cat")
    module.model.layers[1].self_attn.o_proj = torch.nn.Linear(32, 32)
    assert relative_error(after, before) > 0.01
    assert relative_error(pipeline(module).encode("a cat"), after) > 0.01
