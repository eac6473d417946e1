"""JTCSE: two encoders side by side, which read each other's values while they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from ..hub.saved_files import fetching
from ..lm.gguf import is_gguf
from ..settings import whole
from .checkpoints import Files, SafeTransformer, backbone_of, check_model, read_config

#: Where in a saved model the second tower lies.
SECOND = "tower_2"

#: The model types whose layers are those of BERT.
FAMILIES = ("bert", "camembert", "roberta", "xlm-roberta")

# What two encoders share, their hidden size besides, for one to read the other's values.
_SHAPE = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps")

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

# Read by the losses alone. Encoders that were trained on masked words have none: training begins with a fresh one.
_TRAINED_ONLY = ("pooler.",)


class TwinTower(SafeTransformer):
    r"""Two BERT-like encoders over the same tokens; word i is the sum of their last hidden states (JTCSE).

    .. math:: e_i = h^L_{I,i} + h^L_{II,i}

    With ``Pooling(..., "cls")`` behind it, a text is the sum of the two CLS states, as in the paper. It costs two
    encoders and no more: the cross-attention between the towers is a side branch that is there for training, when
    :class:`st_reba.train.losses.JTCSELoss` asks for it.

    In every k-th layer, the attention weights of each tower weigh the values of the other as well (Equation 10); see
    :func:`cross_stream`. The branch has no own weights. Without it (``cross_every=0``) this is TNCSE.

    Args:
        model_name_or_path: Tower I: path or Hub id of an encoder of BERT's build (BERT, RoBERTa, XLM-R, CamemBERT).
        second_model_name_or_path: Tower II, with the same tokens. None: a copy of tower I.
        cross_every: k; the cross layers are those whose number, counted from 1, is a multiple of it. The default has 6
            of 12 layers cross; 12, 6, 4, 3, 2 and 1 give the paper's 1, 2, 3, 4, 6 and 12. 0: none.
        second_subfolder: For loading: where beside tower I the second tower lies.
        **transformer_kwargs: As for ST's ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on.
            ``model_kwargs`` and ``config_kwargs`` are for both towers.

    Raises:
        ValueError: If an encoder is of another architecture, or its checkpoint lacks weights (of the pooler apart,
            which is read in training alone), the two do not fit together, or ``cross_every`` is no number of layers.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*SafeTransformer.config_keys, "cross_every", "second_subfolder"]
    forward_kwargs: set[str] = {"tower_outputs", "cross_stream"}

    method = "JTCSE"
    equation = r"e_i = h^L_{I,i} + h^L_{II,i}"
    cost = "Two encoders, one pass each."
    citation = (
        "Tianyu Zong, Hongzhu Yi, Bingkang Shi, Yuanxiang Wang, Jungang Xu: JTCSE: Joint Tensor-Modulus Constraints "
        "and Cross-Attention for Unsupervised Contrastive Learning of Sentence Embeddings. 2025, arXiv:2505.02366."
    )
    copies = 1

    def __init__(
        self,
        model_name_or_path: str | PathLike[str],
        second_model_name_or_path: str | PathLike[str] | None = None,
        *,
        cross_every: int = 2,
        second_subfolder: str | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        model_name_or_path = fspath(model_name_or_path)
        if second_model_name_or_path is not None:
            second_model_name_or_path = fspath(second_model_name_or_path)
        # A configuration that someone else wrote names it, so it can be this directory only.
        if second_subfolder not in (None, SECOND):
            raise ValueError(
                f"second_subfolder={second_subfolder!r}: the second tower of a saved TwinTower lies in {SECOND!r}. For "
                "another encoder, give second_model_name_or_path."
            )
        if "subfolder" not in (transformer_kwargs.get("model_kwargs") or {}):
            model_name_or_path = backbone_of(model_name_or_path)
        config = _encoder_config(model_name_or_path, transformer_kwargs)
        depth = config.num_hidden_layers
        says = (
            f"give a number of layers from 1 to {depth}, as many as each tower has, or 0 for no cross-attention. 2, "
            "every second layer, is the paper's choice."
        )
        self.cross_every = whole("cross_every", 0, depth, says).check(cross_every)
        second, arguments = second_model_name_or_path, transformer_kwargs
        if second_subfolder is not None:
            second, arguments = model_name_or_path, _inside(second_subfolder, transformer_kwargs)
        if second is not None:
            _check_they_fit(config, _encoder_config(second, arguments), cross_every)
        super().__init__(model_name_or_path, **transformer_kwargs)
        self.check_weights(_TRAINED_ONLY)
        self.second = deepcopy(self.model) if second is None else self._second(second, arguments)
        tokenizer = self._tokenizer
        tokenizer.model_max_length = min(tokenizer.model_max_length, *map(positions, self.towers))

    def _second(self, name: str, arguments: dict[str, Any]) -> PreTrainedModel:
        """Tower II, loaded as tower I is.

        Raises:
            ValueError: If its tokens are not those of tower I.
        """
        loaded = SafeTransformer(name, **arguments)
        loaded.check_weights(_TRAINED_ONLY)
        if self._tokenizer.get_vocab() != loaded._tokenizer.get_vocab():
            raise ValueError(
                f"The tokenizer of {name} is not that of the first tower, and both towers read the same tokens. Give "
                "two encoders with one tokenizer."
            )
        return loaded.model

    @property
    def towers(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Towers I and II."""
        return self.model, self.second

    @property
    def second_subfolder(self) -> str:
        """Where in a saved model the second tower lies."""
        return SECOND

    @property
    def cross_layers(self) -> list[int]:
        """The cross layers (Equation 7), counted from 1."""
        depth = self.model.config.num_hidden_layers
        return list(range(self.cross_every, depth + 1, self.cross_every)) if self.cross_every else []

    # Vectors out

    def forward(
        self, features: dict[str, Any], tower_outputs: bool = False, cross_stream: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Run both towers.

        Args:
            features: What ``preprocess`` returned.
            tower_outputs: Hand on what the losses look at, too.
            cross_stream: With ``tower_outputs``: run the side branch, where there are cross layers.
            **kwargs: Unused.

        Returns:
            The features with ``token_embeddings`` (B, N, D). With ``tower_outputs`` also, each (B, 2, D), with tower I
            first: ``cls_states`` (the last hidden states of CLS), ``pooler_outputs``, and ``cross_states`` (CLS at the
            end of the cross-attention stream).
        """
        inputs = {name: features[name] for name in _INPUTS if name in features}
        if tower_outputs:
            return {**features, **self._outputs(inputs, cross_stream and bool(self.cross_layers))}
        first, second = (tower(**inputs, return_dict=True).last_hidden_state for tower in self.towers)
        return {**features, "token_embeddings": first + second}

    def _outputs(self, inputs: dict[str, Tensor], through_both: bool) -> dict[str, Tensor]:
        first, second = (tower(**inputs, output_hidden_states=through_both, return_dict=True) for tower in self.towers)
        outputs = {
            "token_embeddings": first.last_hidden_state + second.last_hidden_state,
            "cls_states": torch.stack([first.last_hidden_state[:, 0], second.last_hidden_state[:, 0]], dim=1),
            "pooler_outputs": torch.stack([first.pooler_output, second.pooler_output], dim=1),
        }
        if through_both:
            mask = inputs["attention_mask"].bool()
            layers = [[encoder_layers(tower)[number - 1] for number in self.cross_layers] for tower in self.towers]
            states = [[output.hidden_states[number - 1] for number in self.cross_layers] for output in (first, second)]
            streams = [
                cross_stream(layers[own], layers[other], states[own], states[other], mask)
                for own, other in ((0, 1), (1, 0))
            ]
            outputs["cross_states"] = torch.stack([stream[:, 0] for stream in streams], dim=1)
        return outputs

    # On disk

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save tower I and the tokenizer as an encoder is saved, tower II beside them, and the settings."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        self.second.save_pretrained(Path(output_path) / SECOND, safe_serialization=safe_serialization)


# What one tower is made of. BERT and RoBERTa name their parts alike, and have for years, but promise none of it:
# docs/internals.md lists what is relied on.


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


def positions(tower: PreTrainedModel) -> int:
    """How many tokens an encoder has positions for. RoBERTa's begin after that of its padding."""
    embeddings: Any = tower.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def encoder_layers(tower: PreTrainedModel) -> list[Any]:
    """An encoder's layers, from the first."""
    encoder: Any = tower.encoder
    return list(encoder.layer)


def cross_stream(
    own: Sequence[Any], other: Sequence[Any], own_states: Sequence[Tensor], other_states: Sequence[Tensor], mask: Tensor
) -> Tensor:
    r"""The cross-attention stream of one tower (JTCSE, Equation 10), through the given layers of both.

    The stream leaves the tower's own states in front of the first of these layers. At each of them, the tower's
    attention weights, which its own states give, weigh the other tower's values. The rest of the layer follows, with
    the stream itself as the residual:

    .. math:: c \leftarrow \mathrm{FFN}\left(\mathrm{Norm}\left(c + O\,[SA_I \cdot V_{II} HD_{II}]\right)\right)

    Args:
        own: The tower's cross layers.
        other: The same layers of the other tower.
        own_states: What enters each of them, (B, N, D).
        other_states: What enters each of the other tower's.
        mask: (B, N), boolean: which tokens are not padding.

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
            attn_mask=mask[:, None, None],
            dropout_p=attention.dropout.p if attention.training else 0.0,
        )
        attended = layer.attention.output(context.transpose(1, 2).flatten(2), stream)
        stream = layer.output(layer.intermediate(attended), attended)
    return stream


def _heads(states: Tensor, attention: Any) -> Tensor:
    """(B, N, D) as (B, heads, N, D / heads)."""
    return states.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)


# Loading


def _inside(subfolder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``Transformer`` for an encoder in a directory of a model, which has the tokenizer."""
    found = dict(arguments)
    for kind in ("model_kwargs", "config_kwargs"):
        given = arguments.get(kind) or {}
        found[kind] = {**given, "subfolder": "/".join(filter(None, (given.get("subfolder"), subfolder)))}
    return found


def _encoder_config(name: str, arguments: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a tower, for which no weight is read.

    Raises:
        ValueError: If it is that of no encoder of BERT's build, or asks for more than it may.
    """
    if is_gguf(name):
        raise ValueError(
            f"{name} is a GGUF file: TwinTower needs encoders of BERT's build, which transformers does not read from "
            "one. Give a directory or Hub id with config.json and safetensors."
        )
    with fetching(name):
        check_model(name, arguments.get("model_kwargs"), arguments.get("config_kwargs"))
        config = read_config(Files(name, arguments.get("config_kwargs") or {}))
    check_family(config, name)
    return config


def _check_they_fit(first: PreTrainedConfig, second: PreTrainedConfig, cross_every: int) -> None:
    if first.vocab_size != second.vocab_size or first.hidden_size != second.hidden_size:
        raise ValueError(
            f"The towers have {first.vocab_size} and {second.vocab_size} tokens, and {first.hidden_size} and "
            f"{second.hidden_size} dimensions. They read the same tokens and are summed, so give two encoders with the "
            "same tokenizer and hidden size."
        )
    if cross_every and any(getattr(first, name) != getattr(second, name) for name in _SHAPE):
        raise ValueError(
            f"cross_every={cross_every} needs towers of one shape (layers, heads, inner size, activation), and these "
            "differ. Use two encoders of one shape, or cross_every=0 (TNCSE)."
        )
