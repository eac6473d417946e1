"""What BERT-like encoders are made of, for the twin tower: the one place that looks inside them.

BERT and RoBERTa name their parts alike, and have for years, but promise none of it: docs/private-names.md lists what is
relied on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

#: The model types whose layers are those of BERT.
FAMILIES = ("bert", "camembert", "roberta", "xlm-roberta")

#: What two encoders share for one to read the other's values.
_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
)


def check_family(config: PreTrainedConfig, given: str, called: str = "TwinTower") -> None:
    """Refuse what is not an encoder of BERT's build.

    Raises:
        ValueError: If the configuration is of another architecture, or BERT's set up as a decoder.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{given} is of the architecture {config.model_type!r}: {called} takes encoders of the architectures "
            f"{', '.join(FAMILIES)}."
        )
    if config.is_decoder:
        raise ValueError(f"{given} is set up as a decoder (is_decoder in its configuration): {called} takes encoders.")


def same_shape(first: PreTrainedConfig, second: PreTrainedConfig) -> bool:
    """Whether the layers of two encoders pair up, weight by weight."""
    return all(getattr(first, name) == getattr(second, name) for name in _SHAPE)


def positions(model: PreTrainedModel) -> int:
    """How many tokens an encoder has positions for. RoBERTa's begin after that of its padding."""
    embeddings: Any = model.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def layers(model: PreTrainedModel) -> list[Any]:
    """An encoder's layers, from the first."""
    encoder: Any = model.encoder
    return list(encoder.layer)


def key_mask(attention_mask: Tensor) -> Tensor:
    """(B, 1, 1, N), boolean: what attention may look at, from a mask of (B, N)."""
    return attention_mask[:, None, None, :].bool()


def cross_stream(
    own: Sequence[Any], other: Sequence[Any], own_states: Sequence[Tensor], other_states: Sequence[Tensor], mask: Tensor
) -> Tensor:
    r"""The cross-attention stream of one encoder (JTCSE, Equation 10), through the given layers of both.

    It leaves the encoder's own stream in front of the first of these layers. At each of them, the encoder's attention
    weights, which its own states give, weigh the other encoder's values; the rest of its layer follows, with the stream
    itself as the residual:

    .. math:: c \leftarrow \mathrm{FFN}\left(\mathrm{Norm}\left(c + O\,[SA_I \cdot V_{II} HD_{II}]\right)\right)

    Args:
        own: The encoder's cross layers.
        other: The same layers of the other encoder.
        own_states: What enters each of them, (B, N, D).
        other_states: What enters each of the other encoder's.
        mask: Of the keys; see :func:`key_mask`.

    Returns:
        (B, N, D).
    """
    stream = own_states[0]
    for layer, values_of, states, values in zip(own, other, own_states, other_states, strict=True):
        attention = layer.attention.self
        context = scaled_dot_product_attention(
            _heads(attention.query(states), attention),
            _heads(attention.key(states), attention),
            _heads(values_of.attention.self.value(values), attention),
            attn_mask=mask,
            dropout_p=attention.dropout.p if attention.training else 0.0,
        )
        attended = layer.attention.output(context.transpose(1, 2).flatten(2), stream)
        stream = layer.output(layer.intermediate(attended), attended)
    return stream


def _heads(states: Tensor, attention: Any) -> Tensor:
    """(B, N, D) as (B, heads, N, D / heads)."""
    return states.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)


@contextmanager
def watching_contexts(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the context tensors of each layer, the weighted values (B, N, D), of what runs inside."""
    contexts: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: tuple[Tensor, ...]) -> None:
        contexts.append(output[0])

    with ExitStack() as hooks:
        for layer in layers(model):
            hooks.callback(layer.attention.self.register_forward_hook(keep).remove)
        yield contexts


def pairs_up(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    """Whether :func:`run_as_one` computes what two encoders of the :func:`same_shape` compute.

    Not if a part of theirs was replaced (by an adapter, or quantised), they lie on several devices, or attention is to
    run elsewhere than in PyTorch.
    """
    for model in (first, second):
        if model.config._attn_implementation not in ("sdpa", "eager"):
            return False
        if any(type(linear) is not nn.Linear for layer in layers(model) for linear in _linears(layer)):
            return False
    weights = [weight for model in (first, second) for layer in layers(model) for weight in layer.parameters()]
    return len({(weight.device, weight.dtype) for weight in weights}) == 1


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    attention = layer.attention
    own = (attention.self.query, attention.self.key, attention.self.value, attention.output.dense)
    return (*own, layer.intermediate.dense, layer.output.dense)


def run_as_one(first: PreTrainedModel, second: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Two encoders of one shape over the same tokens, each operation on both at once, without dropout.

    Their weights are laid side by side in memory the first time; they stay what they were, and nothing is kept twice.

    Args:
        first: One.
        second: The other; see :func:`pairs_up`.
        inputs: ``input_ids``, ``attention_mask`` and so on, (B, N) each.

    Returns:
        Last hidden states (2, B, N, D).
    """
    mask = inputs["attention_mask"]
    embedded = {name: value for name, value in inputs.items() if name != "attention_mask"}
    embeddings: list[Any] = [model.embeddings for model in (first, second)]
    states = torch.stack([embed(**embedded) for embed in embeddings]).flatten(1, 2)
    # Where nothing is padded, no mask lets attention take its fastest way.
    keys = None if bool(mask.all()) else key_mask(mask).repeat(2, 1, 1, 1)
    for pair in zip(layers(first), layers(second), strict=True):
        states = _layer(pair, states, keys, mask.shape[0])
    return states.unflatten(1, mask.shape)


def _layer(pair: tuple[Any, Any], states: Tensor, keys: Tensor | None, batch: int) -> Tensor:
    """One layer of both encoders; states are (2, B * N, D)."""
    attention = [layer.attention.self for layer in pair]
    shape = (2 * batch, -1, attention[0].num_attention_heads, attention[0].attention_head_size)
    query, key, value = (
        _linear([getattr(part, name) for part in attention], states).view(shape).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    context = scaled_dot_product_attention(query, key, value, attn_mask=keys).transpose(1, 2).reshape(states.shape)
    attended = _add_and_norm([layer.attention.output for layer in pair], context, states)
    inner = pair[0].intermediate.intermediate_act_fn(_linear([layer.intermediate.dense for layer in pair], attended))
    return _add_and_norm([layer.output for layer in pair], inner, attended)


def _add_and_norm(parts: list[Any], states: Tensor, residual: Tensor) -> Tensor:
    norms = [part.LayerNorm for part in parts]
    states = _linear([part.dense for part in parts], states) + residual
    states = nn.functional.layer_norm(states, states.shape[-1:], eps=norms[0].eps)
    return torch.addcmul(_beside(norms, "bias")[:, None], states, _beside(norms, "weight")[:, None])


def _linear(parts: list[nn.Linear], states: Tensor) -> Tensor:
    return torch.baddbmm(_beside(parts, "bias")[:, None], states, _beside(parts, "weight").mT)


def _beside(parts: Sequence[nn.Module], name: str) -> Tensor:
    """A parameter of two modules as one tensor (2, ...), of which they are the halves.

    They are made so where they are not, or no longer: moving a model to a device takes them apart.
    """
    first, second = (getattr(part, name) for part in parts)
    if not _are_halves(first, second):
        with torch.inference_mode(False), torch.no_grad():
            first.data, second.data = torch.stack([first.data, second.data])
    return first.detach().as_strided((2, *first.shape), (first.numel(), *first.stride()))


def _are_halves(first: Tensor, second: Tensor) -> bool:
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() - first.storage_offset() == first.numel()
    )
