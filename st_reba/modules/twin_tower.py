"""JTCSE: two encoders side by side, which read each other's values while they are trained."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..hub import compat
from ..lm.gguf import is_gguf
from ..settings import tokens
from . import encoders
from .checkpoints import (
    REPORTING,
    SafeTransformer,
    backbone_of,
    check_checkpoint,
    check_weights,
    lacking,
    note_requirement,
)
from .saved_settings import check_tokenizer

#: Where in a saved model the second tower lies.
SECOND = "tower_2"

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

# Read by the losses alone. Encoders that were trained on masked words have none: training begins with a fresh one.
_TRAINED_ONLY = ("pooler.",)


class TwinTower(SafeTransformer):
    r"""Two BERT-like encoders over the same tokens; word i is the sum of their last hidden states (JTCSE).

    .. math:: e_i = h^L_{I,i} + h^L_{II,i}

    With ``Pooling(..., "cls")`` behind it, a text is the sum of the two CLS states, as in the paper. It costs two
    encoders and no more: the cross-attention between the towers is a side branch that is there for training, when
    :class:`st_reba.training.losses.JTCSELoss` asks for it.

    In every k-th layer, the attention weights of each tower weigh the values of the other as well (Equation 10); see
    :func:`st_reba.modules.encoders.cross_stream`. The branch has no own weights. Without it
    (``cross_every=0``) this is TNCSE.

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

    config_keys: list[str] = [*Transformer.config_keys, "cross_every", "second_subfolder"]
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
        model_name_or_path: str,
        second_model_name_or_path: str | None = None,
        *,
        cross_every: int = 2,
        second_subfolder: str | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        if "subfolder" not in (transformer_kwargs.get("model_kwargs") or {}):
            model_name_or_path = backbone_of(model_name_or_path)
        first = _Place(model_name_or_path, transformer_kwargs)
        second = first.of_second(second_model_name_or_path, second_subfolder)
        config = first.config()
        _check_cross_every(cross_every, config.num_hidden_layers)
        if second is not None:
            _check_they_fit(config, second.config(), cross_every)
        super().__init__(model_name_or_path, **transformer_kwargs)
        self.check_weights(_TRAINED_ONLY)
        tokenizer = cast(PreTrainedTokenizerBase, self.tokenizer)
        tokens("the tokenizer's model_max_length").check(tokenizer.model_max_length)
        if second is not None and second_subfolder is None:
            _check_tokens(tokenizer, second)
        self.second = deepcopy(self.model) if second is None else second.model()
        for tower in self.towers:
            compat.check_placement(tower)
        tokenizer.model_max_length = min(tokenizer.model_max_length, *map(encoders.positions, self.towers))
        self.cross_every = cross_every

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

    def _outputs(self, inputs: dict[str, Tensor], cross_stream: bool) -> dict[str, Tensor]:
        first, second = (tower(**inputs, output_hidden_states=cross_stream, return_dict=True) for tower in self.towers)
        outputs = {
            "token_embeddings": first.last_hidden_state + second.last_hidden_state,
            "cls_states": torch.stack([first.last_hidden_state[:, 0], second.last_hidden_state[:, 0]], dim=1),
            "pooler_outputs": torch.stack([first.pooler_output, second.pooler_output], dim=1),
        }
        if cross_stream:
            mask = encoders.key_mask(inputs["attention_mask"])
            layers = [[encoders.layers(tower)[number - 1] for number in self.cross_layers] for tower in self.towers]
            states = [[output.hidden_states[number - 1] for number in self.cross_layers] for output in (first, second)]
            streams = [
                encoders.cross_stream(layers[own], layers[other], states[own], states[other], mask)
                for own, other in ((0, 1), (1, 0))
            ]
            outputs["cross_states"] = torch.stack([stream[:, 0] for stream in streams], dim=1)
        return outputs

    # On disk

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save tower I and the tokenizer as an encoder is saved, tower II beside them, and the settings."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        self.second.save_pretrained(Path(output_path) / SECOND, safe_serialization=safe_serialization)
        note_requirement(Path(output_path))


class _Place:
    """Where an encoder's files lie, and how they are read."""

    def __init__(self, name: str, transformer_kwargs: dict[str, Any], subfolder: str | None = None) -> None:
        self.name = name
        self.given = transformer_kwargs
        self.subfolder = subfolder

    def of_second(self, name: str | None, subfolder: str | None) -> _Place | None:
        """Where tower II lies, if this is where tower I does; None if it is a copy."""
        if subfolder is None:
            return None if name is None else _Place(name, self.given)
        # A configuration that someone else wrote names it, so it can be this directory only.
        if subfolder != SECOND:
            raise ValueError(
                f"second_subfolder={subfolder!r}: the second tower of a saved TwinTower lies in {SECOND!r}. For "
                "another encoder, give second_model_name_or_path."
            )
        return _Place(self.name, self.given, subfolder)

    def config(self) -> PreTrainedConfig:
        if is_gguf(self.name):
            raise ValueError(
                f"{self.name} is a GGUF file: TwinTower needs encoders of BERT's build, which transformers does not "
                "read from one. Give a directory or Hub id with config.json and safetensors."
            )
        options = self._options("config_kwargs")
        check_checkpoint(self.name, self._options("model_kwargs"), options)
        config = AutoConfig.from_pretrained(self.name, **options)
        encoders.check_family(config, self.name)
        return config

    def model(self) -> PreTrainedModel:
        options = {**self._options("model_kwargs"), **REPORTING}
        model, report = AutoModel.from_pretrained(self.name, config=self.config(), **options)
        check_weights(model, lacking(report), "/".join(filter(None, (self.name, self.subfolder))), _TRAINED_ONLY)
        return cast(PreTrainedModel, model)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        options = self._options("processor_kwargs")
        check_tokenizer(self.name, options)
        return AutoTokenizer.from_pretrained(self.name, **options)

    def _options(self, kind: str) -> dict[str, Any]:
        options = dict(self.given.get(kind) or {})
        if self.subfolder is not None:
            options["subfolder"] = "/".join(filter(None, (options.get("subfolder"), self.subfolder)))
        return options


def _check_cross_every(cross_every: int, depth: int) -> None:
    if type(cross_every) is not int or not 0 <= cross_every <= depth:
        raise ValueError(
            f"cross_every={cross_every!r}: give a number of layers from 1 to {depth}, as many as each tower has, or 0 "
            "for no cross-attention. 2, every second layer, is the paper's choice."
        )


def _check_they_fit(first: PreTrainedConfig, second: PreTrainedConfig, cross_every: int) -> None:
    if first.vocab_size != second.vocab_size or first.hidden_size != second.hidden_size:
        raise ValueError(
            f"The towers have {first.vocab_size} and {second.vocab_size} tokens, and {first.hidden_size} and "
            f"{second.hidden_size} dimensions. They read the same tokens and are summed, so give two encoders with the "
            "same tokenizer and hidden size."
        )
    if cross_every and not encoders.same_shape(first, second):
        raise ValueError(
            f"cross_every={cross_every} needs towers of one shape (layers, heads, inner size, activation), and these "
            "differ. Use two encoders of one shape, or cross_every=0 (TNCSE)."
        )


def _check_tokens(tokenizer: PreTrainedTokenizerBase, second: _Place) -> None:
    if second.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"The tokenizer of {second.name} is not that of the first tower, and both towers read the same tokens. "
            "Give two encoders with one tokenizer."
        )
