"""Tiny GGUF files: a Llama of two layers with a byte-level BPE, in the format of llama.cpp's converter."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import backbones

#: The width of a block of every type that is not a K-quant: rows are multiples of it.
BLOCK = 32
#: Room for the longest prompts.
POSITIONS = 2048

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the files, trained once."""
    return backbones.tokenizer()


def keep_at(place: Path, patch: pytest.MonkeyPatch) -> None:
    """Keep there what is read out of files from here on."""
    patch.setattr("st_reba.lm.gguf.cached_assets_path", partial(huggingface_hub.cached_assets_path, assets_dir=place))


def original(seed: int = 0) -> LlamaForCausalLM:
    """Return the model of the files, with a head that is not tied to the embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=BLOCK, intermediate_size=2 * BLOCK, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return backbones.randomize(LlamaForCausalLM(config).eval().float())


def write(
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    leave_out: str | None = None,
    seed: int = 0,
    says: Mapping[str, Any] | None = None,
) -> Path:
    """Write :func:`original` to a file.

    Args:
        path: Path of the file.
        kind: Type of stored matrices, such as ``"Q8_0"``.
        architecture: Architecture in the header.
        leave_out: GGUF name of a tensor to omit.
        seed: Seed of the weights.
        says: Wrong values of the configuration in the header.
    """
    model = original(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    said = copy.deepcopy(model.config)
    for setting, value in (says or {}).items():
        setattr(said, setting, value)
    _write_config(writer, said)
    _write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        called = _gguf_name(name)
        if called != leave_out:
            _write_tensor(writer, called, _as_stored(name, tensor, model.config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    kinds = [gguf.TokenType.CONTROL if index == tokenizer().eos_token_id else gguf.TokenType.NORMAL
             for _, index in vocabulary]  # fmt: skip
    merges = json.loads(tokenizer().backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(tokenizer().eos_token_id)


def _gguf_name(name: str) -> str:
    parts = name.removeprefix("model.").removesuffix(".weight")
    if parts.startswith("layers."):
        _, layer, inner = parts.split(".", 2)
        return f"blk.{layer}.{_NAMES[inner]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts] + ".weight"


def _as_stored(name: str, tensor: torch.Tensor, config: LlamaConfig) -> np.ndarray:
    """Permute query and key weights: llama.cpp rotates neighbouring dimensions, transformers the two halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = tensor.numpy()
    for inner, count in heads.items():
        if f"{inner}.weight" in name:
            rows, columns = weights.shape
            halves = weights.reshape(count, 2, rows // count // 2, columns)
            return halves.swapaxes(1, 2).reshape(rows, columns)
    return weights


def _write_tensor(writer: gguf.GGUFWriter, name: str, weights: np.ndarray, kind: str) -> None:
    # Norms stay as they are, in every file there is.
    if kind == "F32" or weights.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(weights))
        return
    stored = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weights), stored), raw_dtype=stored)
