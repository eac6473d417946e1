"""What BERT-like encoders are made of, for the twin tower: the one place that looks inside them.

BERT and RoBERTa name their parts alike, and have for years, but promise none of it: docs/private-names.md lists what is
relied on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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
