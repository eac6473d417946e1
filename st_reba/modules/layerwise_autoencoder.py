"""FREEZE: what the layers of a frozen language model say, each in a space of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize

from ..lm.sizes import MAX_LAYERS
from ..settings import Setting, flag, whole
from .moments import Moments
from .partwise import SHRINKAGE, PartwiseWhitening
from .stored import StoredModule

#: Widths of the bottlenecks in the paper, and the shares of D = 1,024, the width of its GPT-2 medium, that they are.
PAPER_BOTTLENECKS = ((256, 1 / 4), (512, 1 / 2))

# The exponential of more than this is far from 1 on the one side and from overflow on the other.
_LARGEST_LOGIT = 30.0

# Far above the states of any language model.
_WIDEST = 2**20

DEPTH = whole("depth", 1, MAX_LAYERS)
HIDDEN_SIZE = whole("hidden_size", 1, _WIDEST)
HEAD_DIMENSION = whole("head_dimension", 1, _WIDEST)
ENCODERS = flag("encoders")
DECODERS = flag("decoders")


class LayerwiseAutoencoder(StoredModule):
    r"""An encoder for each layer of a frozen language model, and a similarity that reads them all.

    .. math:: e = \frac{1}{\sqrt{L}} [\hat{f}_1(z_1), \dots, \hat{f}_L(z_L)], \qquad
        \hat{f} = \frac{f}{\lVert f \rVert}, \quad f_l(z) = \tanh(W_l \mathrm{LayerNorm}(z) + b_l)

    (FREEZE, section 4.2.) It stands behind :class:`LayerStates`. The embedding e has length 1, and the cosine (or dot
    product) of two is the mean of their layers' cosines :math:`c_l`, so that every vector store can search it. The
    similarity that is trained goes further, and reads the L cosines with a small MLP:

    .. math:: s = \sigma(\mathrm{MLP}(c) - \log d) = \frac{1}{1 + d\,e^{-\mathrm{MLP}(c)}},
        \qquad d = \frac{1}{L} \sum_l (1 - c_l)

    The term :math:`\log d` is ours. In the paper, :math:`s = \sigma(\mathrm{MLP}(c))`, two identical sentences score
    whatever the MLP makes of ones (0.47 in its appendix); here :math:`d = 0` and the score is 1, whatever the weights.

    With ``decoders``, each layer can also be decoded, which :class:`st_reba.training.losses.ReconstructionLoss` trains:
    the encoder sees a state through its LayerNorm alone, so that (without the affine part) is what is reconstructed.

    With ``layers``, some of the layers are read, and L is their number in all of the above: an embedding has as many
    numbers as their widths together.

    Args:
        depth: The number of layers that :class:`LayerStates` hands on.
        hidden_size: D, the width of a state.
        bottlenecks: Widths of the encodings, for equal shares of the layers: ``(256, 512)`` is 256 in the first half of
            the layers and 512 in the second, L widths are one for each. None: the paper's 256 and 512, though no more
            than a quarter and a half of D, as in the paper's model.
        head_dimension: Width of the MLP's hidden layer.
        encoders: False takes the states as they are: the paper's first iteration (4.2.1), an MLP on raw cosines.
        decoders: Whether there are decoders.
        layers: Behind which layers the states are read, counted from 1, rising. None: all of them.

    Raises:
        ValueError: If a size is out of range, there are more bottlenecks than layers, or no such layers.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

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
        self.depth = DEPTH.check(depth)
        self.hidden_size = HIDDEN_SIZE.check(hidden_size)
        self.head_dimension = HEAD_DIMENSION.check(head_dimension)
        self.encoders = ENCODERS.check(encoders)
        self.decoders = DECODERS.check(decoders)
        if decoders and not encoders:
            raise ValueError("decoders=True with encoders=False: there is nothing to decode. Leave out one of the two.")
        #: Behind which layers the states are read, counted from 1; None: all of them.
        checked = _layers(depth).check(layers)
        self.layers = None if checked is None else list(checked)
        self._indices = [layer - 1 for layer in self.layers or range(1, depth + 1)]
        count = len(self._indices)
        if bottlenecks is None:
            of_the_paper = [min(width, max(1, int(share * hidden_size))) for width, share in PAPER_BOTTLENECKS]
            bottlenecks = of_the_paper[-count:]
        self.bottlenecks = list(_bottlenecks(count, hidden_size).check(bottlenecks))
        #: (L,) widths of the encodings.
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
        """The widths of all encodings, together."""
        return sum(self.widths)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Encode and concatenate.

        Args:
            features: With ``layer_states`` (B, L, D), as :class:`LayerStates` gives them.
            **kwargs: What ST passes to every module.

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
        """The embeddings (B, E) of states (B, L, D)."""
        unit = [normalize(encoding, dim=-1) for encoding in self.encode_layers(states)]
        is_text = states.flatten(1).any(dim=1)
        return torch.cat(unit, dim=-1) * (is_text / len(unit) ** 0.5)[:, None]

    def encode_layers(self, states: Tensor) -> list[Tensor]:
        """Each layer's encodings, L times (B, b_l), as long as they come out, of states (B, L, D)."""
        if states.shape[1:] != (self.depth, self.hidden_size):
            raise ValueError(
                f"layer_states of {states.shape[1]} layers and width {states.shape[2]} were given, but these encoders "
                f"are for {self.depth} layers and width {self.hidden_size}. Use the model they were made for, or make "
                "others."
            )
        layers = self._of_layers(states)
        if not self.encoders:
            return layers
        return [encode(layer) for encode, layer in zip(self.encoder, layers, strict=True)]

    def _of_layers(self, states: Tensor) -> list[Tensor]:
        """L times (B, D): those that are read."""
        layers = states.to(next(self.parameters()).dtype).unbind(dim=1)
        return [layers[index] for index in self._indices]

    def reconstruction_errors(self, states: Tensor) -> Tensor:
        """(L,): each layer's mean squared error, over texts and dimensions, of reconstructing the normalised states.

        A normalised state has mean 0 and variance 1, so that 1 is the error of reconstructing nothing.

        Raises:
            ValueError: If there are no decoders.
        """
        if not self.decoders:
            raise ValueError("There are no decoders to reconstruct states with: make the module with decoders=True.")
        wanted = [layer_norm(layer, (self.hidden_size,)) for layer in self._of_layers(states)]
        decoded = [decode(layer) for decode, layer in zip(self.decoder, self.encode_layers(states), strict=True)]
        return torch.stack([(one - other).square().mean() for one, other in zip(decoded, wanted, strict=True)])

    @torch.no_grad()
    def whiten(self, states: Tensor, *, shrinkage: float = SHRINKAGE) -> None:
        r"""Let each encoder begin as a whitening of its layer's normalised states, in place of its random weights.

        .. math:: f_l(z) = \tanh(W_l (\mathrm{norm}(z) - \mu_l))

        with the mean :math:`\mu_l` and the first directions of :class:`PartwiseWhitening` for these states. So the
        cosine of two embeddings is one that needs no labels, and few labels have less to change.

        Args:
            states: (B, L, D) of plain texts, some hundreds or more, as :class:`LayerStates` gives them.
            shrinkage: As for :class:`PartwiseWhitening`.

        Raises:
            ValueError: If there are no encoders, or the texts are too few or too much alike.
        """
        if not self.encoders:
            raise ValueError("There are no encoders to begin as a whitening: make the module with encoders=True.")
        texts = states[states.flatten(1).any(dim=1)]
        for encode, layer in zip(self.encoder, self._of_layers(texts), strict=True):
            moments = Moments(self.hidden_size)
            moments.add(layer_norm(layer, (self.hidden_size,)))
            whitening = PartwiseWhitening.from_moments(moments, shares=[1.0], shrinkage=shrinkage)
            norm, linear, _ = cast(tuple[nn.LayerNorm, nn.Linear, nn.Module], tuple(encode.children()))
            norm.reset_parameters()
            linear.weight.copy_(whitening.weight[0, : linear.out_features])
            linear.bias.copy_(-linear.weight @ whitening.mean[0].to(linear.weight))

    def without_decoders(self) -> LayerwiseAutoencoder:
        """A copy that has no decoders, for when pretraining is over."""
        other = type(self)(**{**self.get_config_dict(), "decoders": False})
        other.load_state_dict(self.state_dict(), strict=False)
        return other

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """(B, L): 1 - c_l, what each layer's cosine lacks to 1, for B pairs of embeddings, (B, E) each."""
        pairs = zip(first.split(self.widths, dim=-1), second.split(self.widths, dim=-1), strict=True)
        # Half the squared distance of unit vectors: of equal ones it is 0, to the bit.
        return torch.stack(
            [(normalize(one, dim=-1) - normalize(other, dim=-1)).square().sum(dim=-1) / 2 for one, other in pairs],
            dim=-1,
        )

    def scores(self, first: Tensor, second: Tensor) -> Tensor:
        """As :meth:`score_pairs`, for tensors on the module's device, and with gradients."""
        return self.head(self.distances(first, second))

    @torch.no_grad()
    def score_pairs(self, first: ArrayLike | Tensor, second: ArrayLike | Tensor) -> Tensor:
        """The trained similarity of pairs of texts, from their embeddings.

        Args:
            first: (B, E) embeddings that :meth:`forward` gave, or one (E,), as arrays or tensors.
            second: As many others.

        Returns:
            (B,), float32, on the CPU: similarities between 0 and 1; exactly 1 for equal embeddings.

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
    """The L cosines, through a small MLP and a sigmoid, to a similarity that is 1 where all of them are.

    Args:
        depth: L.
        dimension: Width of the hidden layer.
    """

    def __init__(self, depth: int, dimension: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(depth, dimension), nn.GELU(), nn.Linear(dimension, 1))

    def forward(self, distances: Tensor) -> Tensor:
        """(B,) similarities from (B, L) distances 1 - c_l."""
        logits = self.mlp(1 - distances)[..., 0]
        # float16 ends where the exponential of 11 is.
        precise = torch.promote_types(logits.dtype, torch.float32)
        odds = torch.exp(-logits.to(precise).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT))
        # sigmoid(logit - log d), in the form whose gradient is finite at d = 0.
        return 1 / (1 + distances.to(precise).mean(dim=-1) * odds)


def _layers(depth: int) -> Setting[Sequence[int] | None]:
    """Which of so many layers are read."""
    return Setting(
        "layers",
        lambda given: given is None or (_are_whole(given, depth) and list(given) == sorted(set(given))),
        f"give a rising list of layers from 1 to {depth}, such as [{max(1, depth // 2)}, {depth}], or None for all of "
        "them.",
    )


def _bottlenecks(count: int, hidden_size: int) -> Setting[Sequence[int]]:
    """The widths of the encodings of so many layers."""
    return Setting(
        "bottlenecks",
        lambda given: _are_whole(given, hidden_size) and len(given) <= count,
        f"give a list of widths for equal shares of the {count} layers, such as [256, 512]; at most {count}, each a "
        f"whole number from 1 to {hidden_size}, the width of a state.",
    )


def _are_whole(given: Any, most: int) -> bool:
    """Whether it is a list of whole numbers from 1 on, one at least."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return is_list and all(type(number) is int and 1 <= number <= most for number in given)
