"""What a loaded language model says of itself: its size, its limits, where and how it runs."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel


def depth(model: PreTrainedModel) -> int:
    """Number of layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of token ids that have an input embedding."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has, or None if its configuration names no limit.

    Beyond the length it was first trained on, a model with long-range rotary embeddings (LongRoPE, as in Phi-3-128k)
    reads every token of a batch otherwise as soon as one text is that long. An embedding would depend on its batch, so
    that length is the limit.
    """
    config = model.config.get_text_config(decoder=True)
    # The second is MPT's name for it.
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        found.append(rotary.get("original_max_position_embeddings"))
    return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)


def device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its input.

    That is where its first parameter is, unless accelerate has placed the model: what is offloaded is nowhere.
    """
    placed = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if placed is None else torch.device(placed)


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Whether a backward pass through the model would run its layers a second time."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def check_it_can_be_saved(model: PreTrainedModel) -> None:
    """Refuse weights that transformers would not know how to write.

    Raises:
        ValueError: For a model that torchao's ``quantize_`` changed after it was loaded. One that transformers
            quantised on loading has a quantizer, which knows.
    """
    quantized = any(type(parameter.data).__module__.startswith("torchao") for parameter in model.parameters())
    if quantized and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} was quantised after it was loaded, and its configuration does not say how, so it "
            "cannot be saved. Quantise it on loading instead: "
            'model_kwargs={"quantization_config": TorchAoConfig(...)}, with TorchAoConfig from transformers.'
        )
