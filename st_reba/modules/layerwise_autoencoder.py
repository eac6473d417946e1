"""FREEZE: a trained similarity of the states that a frozen language model has after each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize

from ..lm.passes import Capture
from ..lm.sizes import MAX_LAYERS
from ..moments import Moments
from ..settings import check, check_flag, check_int
from ..text.layout import Layout
from .causal import CausalTransformer
from .embedding_transforms import PARTWISE_SHRINKAGE, PartwiseWhitening
from .stored import StoredModule
from .vectors import TokenVectors, last_position

#: Widths of the paper's bottlenecks, and their shares of D = 1,024 in its GPT-2 medium.
PAPER_BOTTLENECKS = ((256, 1 / 4), (512, 1 / 2))

# Its exponential is far from 1, and far from overflow.
_LARGEST_LOGIT = 30.0

# Far above the width of any language model.
_WIDEST = 2**20


class LayerStates(CausalTransformer):
    r"""The last token's residual stream after every layer.

    .. math:: z_l = h^{(l)}_n, \quad l = 1, \dots, L

    where :math:`h^{(l)}` is the residual stream after layer l (FREEZE, section 3.2: "last token at each layer, after
    the residual connection"). That of the last layer is taken before the final norm, too. The input embeddings,
    :math:`h^{(0)}`, are not part of it.

    It adds ``layer_states`` (B, L, D) to the features, for :class:`LayerwiseAutoencoder`. The token embeddings are
    those of :class:`CausalTransformer`.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"text"`` for the last token of the text, ``"all"``
            for that of the layout.
    """

    method = "Layer states"
    equation = r"z_l = h^{(l)}_n, \quad l = 1, \dots, L"
    citation = (
        "Hayden McDonald, Nicholas Marsano, Oliver McLaughlin: FREEZE! Pretrained Language Models as Frozen Feature "
        "Extractors for Semantic Tasks. 2024."
    )
    # The states are those of a whole text.
    has_token_vectors = False
    reads_all_layers = True

    @property
    def depth(self) -> int:
        """Number of layers, L."""
        return len(self.lm.layers)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the saved settings. Version 0.1, which wrote no ``final_norm``, returned all tokens."""
        config: dict[str, Any] = super().load_config(*args, **kwargs)
        return {**config, "rows": "all"} if "rows" in config and "final_norm" not in config else config

    def read(self, layout: Layout) -> TokenVectors:
        selected = self.selected(layout)
        layers = Capture(self.lm.layers, "after", last_position(selected))
        tokens = TokenVectors.pick(self.run(layout, layers), layout, selected)
        states = torch.stack([state.to(tokens.states) for state in layers.states], dim=1)
        is_empty = layout.is_empty.to(states.device, non_blocking=True)
        return tokens._replace(extra={"layer_states": states.masked_fill(is_empty[:, None, None], 0)})


class LayerwiseAutoencoder(StoredModule):
    r"""An encoder for each layer of a frozen language model, and a similarity of their encodings.

    .. math:: e = \frac{1}{\sqrt{L}} [\hat{f}_1(z_1), \dots, \hat{f}_L(z_L)], \qquad
        \hat{f} = \frac{f}{\lVert f \rVert}, \quad f_l(z) = \tanh(W_l \mathrm{LayerNorm}(z) + b_l)

    (FREEZE, section 4.2.) It follows :class:`LayerStates`. The embedding e has length 1, and the cosine (or dot
    product) of two is the mean of their layers' cosines :math:`c_l`, so that every vector store can search it. The
    trained similarity reads the L cosines with a small MLP:

    .. math:: s = \sigma(\mathrm{MLP}(c) - \log d) = \frac{1}{1 + d\,e^{-\mathrm{MLP}(c)}},
        \qquad d = \frac{1}{L} \sum_l (1 - c_l)

    The term :math:`\log d` is ours. In the paper, :math:`s = \sigma(\mathrm{MLP}(c))`, the score of two identical
    sentences is the MLP's value for ones (0.47 in its appendix); here :math:`d = 0` and the score is 1, whatever the
    weights.

    With ``decoders``, each encoding can be decoded, which :class:`st_reba.train.losses.ReconstructionLoss` trains. What
    is reconstructed is the state's LayerNorm without the affine part, because the encoder sees nothing else.

    With ``layers``, L is the number of layers that are read.

    Args:
        depth: Number of layers that :class:`LayerStates` returns.
        hidden_size: Width of a state, D.
        bottlenecks: Widths of the encodings, for equal shares of the layers: ``(256, 512)`` is 256 in the first half of
            the layers and 512 in the second, L widths are one for each. None: the paper's 256 and 512, but at most a
            quarter and a half of D, as in the paper's model.
        head_dimension: Width of the MLP's hidden layer.
        encoders: False takes the states as they are: the paper's first iteration (4.2.1), an MLP on raw cosines.
        decoders: Whether there are decoders.
        layers: Layers after which states are read, counted from 1, rising. None: all of them.

    Raises:
        ValueError: If a size is out of range, there are more bottlenecks than layers, or there is no such layer.
    """

    config_keys = ["depth", "hidden_size", "head_dimension", "encoders", "decoders", "bottlenecks", "layers"]

    def __init__(
        self,
        depth: int,
        hidden_size: int,
        *,
        bottlenecks: Sequence[int] | None = None,
        head_dimension: int = 64,
        encoders: bool = True,
        decoders: bool = False,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.depth = check_int("depth", depth, 1, MAX_LAYERS)
        self.hidden_size = check_int("hidden_size", hidden_size, 1, _WIDEST)
        self.head_dimension = check_int("head_dimension", head_dimension, 1, _WIDEST)
        self.encoders, self.decoders = check_flag("encoders", encoders), check_flag("decoders", decoders)
        check("decoders", decoders, encoders or not decoders, "with encoders=False there is nothing to decode.")
        is_rising = layers is None or (_are_ints(layers, depth) and list(layers) == sorted(set(layers)))
        advice = f"give a rising list of layers from 1 to {depth}, or None for all of them."
        check("layers", layers, is_rising, advice)
        #: Layers after which states are read, counted from 1; None for all.
        self.layers = None if layers is None else list(layers)
        count = len(self.layers or range(depth))
        if bottlenecks is None:
            bottlenecks = [min(width, max(1, int(share * hidden_size))) for width, share in PAPER_BOTTLENECKS][-count:]
        width = f"a whole number from 1 to {hidden_size}, the width of a state."
        advice = f"give a list of widths for equal shares of the {count} layers, such as [256, 512]; at most {count}"
        are_widths = _are_ints(bottlenecks, hidden_size) and len(bottlenecks) <= count
        check("bottlenecks", bottlenecks, are_widths, f"{advice}, each {width}")
        self.bottlenecks = list(bottlenecks)
        #: Widths of the encodings, (L,).
        self.widths = [hidden_size] * count
        if encoders:
            self.widths = [self.bottlenecks[place * len(self.bottlenecks) // count] for place in range(count)]
            self.encoder = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, width), nn.Tanh())
                for width in self.widths
            )
        if decoders:
            self.decoder = nn.ModuleList(nn.Linear(width, hidden_size) for width in self.widths)
        self.head = SimilarityHead(count, head_dimension)

    def get_embedding_dimension(self) -> int:
        """Return the sum of the widths of all encodings."""
        return sum(self.widths)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Encode and concatenate.

        Args:
            features: With ``layer_states`` (B, L, D), as :class:`LayerStates` gives them.
            **kwargs: Ignored.

        Returns:
            The features with ``sentence_embedding`` (B, E); zeros for a text without tokens, whose states are zeros.

        Raises:
            ValueError: If there are no such states, or they are those of another model.
        """
        states = features.get("layer_states")
        if states is None:
            raise ValueError(
                "There are no layer_states to encode: put st_reba's LayerStates at the head of the pipeline, in place "
                "of its first module."
            )
        return {**features, "sentence_embedding": self.embed(states)}

    def embed(self, states: Tensor) -> Tensor:
        """Return the embeddings, (B, E), of states (B, L, D)."""
        unit = [normalize(encoding, dim=-1) for encoding in self.encode_layers(states)]
        is_text = states.flatten(1).any(dim=1)
        return torch.cat(unit, dim=-1) * (is_text / len(unit) ** 0.5)[:, None]

    def encode_layers(self, states: Tensor) -> list[Tensor]:
        """Return each layer's encodings, L times (B, b_l), before normalisation, of states (B, L, D)."""
        if states.shape[1:] != (self.depth, self.hidden_size):
            raise ValueError(
                f"layer_states of {states.shape[1]} layers and width {states.shape[2]} were given, but these encoders "
                f"are for {self.depth} layers and width {self.hidden_size}. Use the model they were made for, or make "
                "others."
            )
        layers = self._layers_of(states)
        if not self.encoders:
            return layers
        return [encode(layer) for encode, layer in zip(self.encoder, layers, strict=True)]

    def _layers_of(self, states: Tensor) -> list[Tensor]:
        """Return the states of the layers that are read, L times (B, D)."""
        layers = states.to(next(self.parameters()).dtype).unbind(dim=1)
        return [layers[layer - 1] for layer in self.layers or range(1, self.depth + 1)]

    def reconstruction_errors(self, states: Tensor) -> Tensor:
        """Return each layer's mean squared error of reconstructing the normalised states, (L,).

        A normalised state has mean 0 and variance 1: the error of reconstructing zeros is 1.
        """
        expected = [layer_norm(layer, (self.hidden_size,)) for layer in self._layers_of(states)]
        decoded = [decode(layer) for decode, layer in zip(self.decoder, self.encode_layers(states), strict=True)]
        return torch.stack([(one - other).square().mean() for one, other in zip(decoded, expected, strict=True)])

    @torch.no_grad()
    def whiten(self, states: Tensor, *, shrinkage: float = PARTWISE_SHRINKAGE) -> None:
        r"""Replace each encoder's random weights by a whitening of its layer's normalised states.

        .. math:: f_l(z) = \tanh(W_l (\mathrm{norm}(z) - \mu_l))

        with the mean :math:`\mu_l` and the first directions of :class:`PartwiseWhitening` for these states. The cosine
        of two embeddings is then one that needs no labels, and few labels have less to change.

        Args:
            states: (B, L, D) of plain texts, some hundreds or more, as :class:`LayerStates` gives them.
            shrinkage: As for :class:`PartwiseWhitening`.

        Raises:
            ValueError: If the texts are too few or too similar.
        """
        texts = states[states.flatten(1).any(dim=1)]
        for encode, layer in zip(self.encoder, self._layers_of(texts), strict=True):
            moments = Moments(self.hidden_size)
            moments.add(layer_norm(layer, (self.hidden_size,)))
            whitening = PartwiseWhitening.from_moments(moments, shares=[1.0], shrinkage=shrinkage)
            norm, linear, _ = cast(tuple[nn.LayerNorm, nn.Linear, nn.Module], tuple(encode.children()))
            norm.reset_parameters()
            linear.weight.copy_(whitening.weight[0, : linear.out_features])
            linear.bias.copy_(-linear.weight @ whitening.mean[0].to(linear.weight))

    def without_decoders(self) -> LayerwiseAutoencoder:
        """Return a copy without decoders, for use after pretraining."""
        other = type(self)(**{**self.get_config_dict(), "decoders": False})
        other.load_state_dict(self.state_dict(), strict=False)
        return other

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """Return 1 - c_l for each layer, (B, L), of B pairs of embeddings, (B, E) each."""
        pairs = zip(first.split(self.widths, dim=-1), second.split(self.widths, dim=-1), strict=True)
        # Half the squared distance of unit vectors, which is exactly 0 for equal ones.
        halves = [(normalize(one, dim=-1) - normalize(other, dim=-1)).square().sum(dim=-1) / 2 for one, other in pairs]
        return torch.stack(halves, dim=-1)

    def scores(self, first: Tensor, second: Tensor) -> Tensor:
        """Return :meth:`score_pairs` of tensors on the module's device, with gradients."""
        return self.head(self.distances(first, second))

    @torch.no_grad()
    def score_pairs(self, first: ArrayLike | Tensor, second: ArrayLike | Tensor) -> Tensor:
        """Compute the trained similarity of pairs of texts from their embeddings.

        Args:
            first: Embeddings of :meth:`forward`, (B, E), or one, (E,), as arrays or tensors.
            second: As many others.

        Returns:
            Similarities between 0 and 1, (B,), float32, on the CPU; exactly 1 for equal embeddings.

        Raises:
            ValueError: If they are not of the same shape, or of another width.
        """
        weight = next(self.parameters())
        one, other = (torch.atleast_2d(torch.as_tensor(given).to(weight)) for given in (first, second))
        dimension = self.get_embedding_dimension()
        if one.shape != other.shape or one.ndim != 2 or one.shape[1] != dimension:
            raise ValueError(
                f"Embeddings of shapes {tuple(one.shape)} and {tuple(other.shape)} were given: score_pairs takes pairs "
                f"of whole embeddings, (B, {dimension}) each. Do not truncate or binarise them."
            )
        return self.scores(one, other).float().cpu()


class SimilarityHead(nn.Module):
    """Similarity from L cosines through a small MLP and a sigmoid; 1 if all cosines are 1.

    Args:
        depth: L.
        dimension: Width of the hidden layer.
    """

    def __init__(self, depth: int, dimension: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(depth, dimension), nn.GELU(), nn.Linear(dimension, 1))

    def forward(self, distances: Tensor) -> Tensor:
        """Return similarities, (B,), of distances 1 - c_l, (B, L)."""
        logits = self.mlp(1 - distances)[..., 0]
        # In float16 the exponential of 12 overflows.
        precise = torch.promote_types(logits.dtype, torch.float32)
        odds = torch.exp(-logits.to(precise).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT))
        # sigmoid(logit - log d), in the form whose gradient is finite at d = 0.
        return 1 / (1 + distances.to(precise).mean(dim=-1) * odds)


def _are_ints(values: Any, most: int) -> bool:
    """Return whether a value is a list of one whole number from 1 to ``most``, or several."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    return is_list and all(type(value) is int and 1 <= value <= most for value in values)
