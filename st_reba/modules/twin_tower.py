"""JTCSE's encoder: two BERT-like encoders, which read each other's values during training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ..settings import check, check_int
from .transformer import SafeTransformer

#: Folder of the second tower in a saved model.
SECOND = "tower_2"

#: Model types whose layers are those of BERT.
FAMILIES = ("bert", "camembert", "roberta", "xlm-roberta")

# Settings that two encoders must share for one to read the other's values.
_SHAPE = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps")


class TwinTower(SafeTransformer):
    r"""JTCSE's encoder: word i is the sum of its last hidden states in two BERT-like encoders.

    .. math:: e_i = h^L_{I,i} + h^L_{II,i}

    With ``Pooling(..., "cls")`` the embedding of a text is the sum of the two CLS states, as in the paper. The
    cross-attention between the towers is a side branch for training, which
    :class:`st_reba.train.losses.JTCSELoss` asks for: in every k-th layer, the attention weights of each tower weight
    the values of the other as well (Equation 10); see :func:`cross_stream_of`. The branch has no weights of its own.
    Without it (``cross_every=0``) this is TNCSE.

    Args:
        model_name_or_path: Tower I: path or Hub id of BERT, RoBERTa, XLM-R or CamemBERT.
        second_model_name_or_path: Tower II, with the same tokenizer. None: a copy of tower I.
        cross_every: k; the cross layers are those whose number, counted from 1, is a multiple of it. With 12 layers,
            12, 6, 4, 3, 2 and 1 give the paper's 1, 2, 3, 4, 6 and 12 cross layers. 0: none.
        second_subfolder: Folder of tower II in a saved model; used for loading.
        **transformer_kwargs: As for ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on. ``model_kwargs``
            and ``config_kwargs`` are for both towers.

    Raises:
        ValueError: If an encoder is of another architecture, its checkpoint lacks weights other than those of the
            pooler, the two do not fit each other, or ``cross_every`` is not a number of layers.
    """

    config_keys = [*SafeTransformer.config_keys, "cross_every", "second_subfolder"]
    forward_kwargs: set[str] = {"tower_outputs", "cross_stream"}
    #: Folder of tower II in a saved model.
    second_subfolder = SECOND

    method = "JTCSE"
    equation = r"e_i = h^L_{I,i} + h^L_{II,i}"
    cost = "Two encoders, one pass each."
    citation = (
        "Tianyu Zong, Hongzhu Yi, Bingkang Shi, Yuanxiang Wang, Jungang Xu: JTCSE: Joint Tensor-Modulus Constraints "
        "and Cross-Attention for Unsupervised Contrastive Learning of Sentence Embeddings. 2025, arXiv:2505.02366."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str],
        second_model_name_or_path: str | PathLike[str] | None = None,
        *,
        cross_every: int = 2,
        second_subfolder: str | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        # The setting may come from somebody else's file, so that only this folder is allowed.
        advice = f"tower II of a saved TwinTower is in {SECOND!r}; for another, give second_model_name_or_path."
        check("second_subfolder", second_subfolder, second_subfolder in (None, SECOND), advice)
        super().__init__(model_name_or_path, **transformer_kwargs)
        _check_encoder(self)
        if second_subfolder is not None:
            second_model_name_or_path = model_name_or_path
            for kind in ("model_kwargs", "config_kwargs"):
                of_first = transformer_kwargs.get(kind) or {}
                place = "/".join(filter(None, (of_first.get("subfolder"), second_subfolder)))
                transformer_kwargs[kind] = {**of_first, "subfolder": place}
        second: SafeTransformer = self
        if second_model_name_or_path is not None:
            second = SafeTransformer(second_model_name_or_path, **transformer_kwargs)
            _check_encoder(second)
        one, other = (
            (tower.model.config.vocab_size, tower.model.config.hidden_size, tower._tokenizer.get_vocab())
            for tower in (self, second)
        )
        if one != other:
            raise ValueError(
                f"{second_model_name_or_path} has other tokens than the first tower, or another width: {other[0]} "
                f"tokens and {other[1]} dimensions, not {one[0]} and {one[1]}. Both towers read the same tokens and "
                "are summed, so give two encoders with one tokenizer and hidden size."
            )
        self.second = deepcopy(self.model) if second is self else second.model
        depth = self.model.config.num_hidden_layers
        advice = f"give a number of layers from 1 to {depth}, or 0 for no cross-attention."
        self.cross_every = check_int("cross_every", cross_every, 0, depth, advice)
        shapes = [[getattr(tower.config, name) for name in _SHAPE] for tower in self.towers]
        problem = "cross-attention needs towers of one shape (layers, heads, inner size, activation), and these differ."
        advice = f"{problem} Use two encoders of one shape, or cross_every=0 (TNCSE)."
        check("cross_every", cross_every, not cross_every or shapes[0] == shapes[1], advice)
        tokenizer = self._tokenizer
        tokenizer.model_max_length = min(tokenizer.model_max_length, *map(_positions, self.towers))

    @property
    def towers(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Towers I and II."""
        return self.model, self.second

    @property
    def cross_layers(self) -> list[int]:
        """Numbers of the cross layers (Equation 7), counted from 1."""
        depth = self.model.config.num_hidden_layers
        return list(range(self.cross_every, depth + 1, self.cross_every)) if self.cross_every else []

    def forward(
        self, features: dict[str, Any], tower_outputs: bool = False, cross_stream: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Run both towers.

        Args:
            features: Result of ``preprocess``.
            tower_outputs: Whether to return what the losses need, too.
            cross_stream: With ``tower_outputs``: whether to run the side branch, if there are cross layers.
            **kwargs: Ignored.

        Returns:
            The features with ``token_embeddings`` (B, N, D). With ``tower_outputs`` also, each (B, 2, D) with tower I
            first: ``cls_states`` (last hidden states of CLS), ``pooler_outputs``, and ``cross_states`` (CLS at the end
            of the cross-attention stream).
        """
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: features[name] for name in names if name in features}
        crosses = tower_outputs and cross_stream and bool(self.cross_layers)
        outputs = [tower(**inputs, output_hidden_states=crosses, return_dict=True) for tower in self.towers]
        states = [output.last_hidden_state for output in outputs]
        features = {**features, "token_embeddings": states[0] + states[1]}
        if tower_outputs:
            features["cls_states"] = torch.stack([state[:, 0] for state in states], dim=1)
            features["pooler_outputs"] = torch.stack([output.pooler_output for output in outputs], dim=1)
        if crosses:
            one, other = (
                [(tower.encoder.layer[number - 1], output.hidden_states[number - 1]) for number in self.cross_layers]
                for tower, output in zip(cast(Any, self.towers), outputs, strict=True)
            )
            mask = inputs["attention_mask"].bool()
            streams = cross_stream_of(one, other, mask), cross_stream_of(other, one, mask)
            features["cross_states"] = torch.stack([stream[:, 0] for stream in streams], dim=1)
        return features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save tower I, tokenizer and settings, and tower II in a folder."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        self.second.save_pretrained(Path(output_path) / SECOND, safe_serialization=safe_serialization)


def cross_stream_of(own: Sequence[tuple[Any, Tensor]], other: Sequence[tuple[Any, Tensor]], mask: Tensor) -> Tensor:
    r"""Run the cross-attention stream of one tower (JTCSE, Equation 10) through the cross layers of both.

    The stream starts from the tower's own states before the first of these layers. At each of them, the tower's
    attention weights, computed from its own states, weight the other tower's values. The rest of the layer follows,
    with the stream as the residual:

    .. math:: c \leftarrow \mathrm{FFN}\left(\mathrm{Norm}\left(c + O\,[SA_I \cdot V_{II} HD_{II}]\right)\right)

    Args:
        own: Cross layers of the tower, each with its input, (B, N, D).
        other: Those of the other tower.
        mask: (B, N), boolean, True for tokens that are not padding.

    Returns:
        (B, N, D).
    """
    stream = own[0][1]
    for (layer, states), (other_layer, values) in zip(own, other, strict=True):
        attention = layer.attention.self
        query, key, value = (
            part.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)
            for part in (attention.query(states), attention.key(states), other_layer.attention.self.value(values))
        )
        dropout = attention.dropout.p if attention.training else 0.0
        context = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None], dropout_p=dropout)
        attended = layer.attention.output(context.transpose(1, 2).flatten(2), stream)
        stream = layer.output(layer.intermediate(attended), attended)
    return stream


def _positions(tower: PreTrainedModel) -> int:
    """Return the number of an encoder's positions. RoBERTa's begin after that of its padding."""
    embeddings: Any = tower.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def _check_encoder(tower: SafeTransformer) -> None:
    """Raise unless a tower is an encoder like BERT, with all its weights but those of the pooler."""
    config = tower.model.config
    if config.model_type not in FAMILIES or config.is_decoder:
        raise ValueError(
            f"{config.name_or_path} is of the architecture {config.model_type!r}, or a decoder: TwinTower takes "
            f"encoders of the architectures {', '.join(FAMILIES)}, with is_decoder false in their configuration."
        )
    # Only the losses read the pooler. Encoders that were trained on masked words have none, and training starts anew.
    tower.missing_weights.check(tower.model, ("pooler.",))
