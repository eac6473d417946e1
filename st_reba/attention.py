"""Watching attention without storing it.

``output_attentions=True`` keeps every map of every layer: 2 GiB for one text of 1,024 tokens in a 7B model. Instead, an
attention function is registered with transformers under :data:`NAME`. It computes what the architecture asks for and
shows each layer's queries, keys and log-sum-exp to the *probe* that is watching, if any; the weight with which query j
attends to key i is then exp(q_j . k_i * scale - lse_j), and a probe forms as few of them as it needs.

Nothing here knows a method. The probe travels in a context variable, so two threads, or two models, do not meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .chunks import diagonal_blocks, split
from .kernels import attention_with_lse
from .precision import autocast_dtype, summing_dtype, widened, without_autocast

NAME = "st_reba"

#: Arguments an architecture may pass that change nothing in the softmax: the mask already says what they say.
HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)

# Bytes of scratch memory for the rectangle of one head: on a CPU what stays in a core's cache, on an accelerator enough
# to fill it. Rows of keys go in blocks, because queries before the first key of a block are never asked for.
_SCRATCH_BYTES = {"cpu": 2**20}
_SCRATCH_BYTES_ACCELERATOR = 2**28
_KEY_BLOCK = 128

# The log of a weight that is nothing, yet a number.
_NOTHING = -1e4


class WeightSource(Protocol):
    """The attention weights of one layer, to be formed piece by piece, in float32 or, in a float64 model, float64."""

    @property
    def layer(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        """log p(query -> key), (texts, keys, queries), of ``dtype``; into ``out`` where one is given."""
        ...

    def at_keys(self, positions: Tensor) -> WeightSource:
        """The same layer with one key a text, ``positions`` (B,)."""
        ...


class Probe(Protocol):
    """What watches a forward pass."""

    def wants(self, layer: int) -> bool:
        """Whether this layer's weights are to be shown."""
        ...

    def observe(self, source: WeightSource) -> None:
        """Look at one layer. ``source`` must not outlive the call."""
        ...


_probe: ContextVar[Probe | None] = ContextVar("st_reba_probe", default=None)


@contextlib.contextmanager
def watching(probe: Probe) -> Iterator[None]:
    """Show every attention layer that runs in this block, in this thread, to ``probe``."""
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)


class Masking(Protocol):
    """What replaces the mask that an architecture would use."""

    def applies(self, layer: int) -> bool:
        """Whether this layer's mask is replaced."""
        ...

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, queries, keys), True where a key is seen; None if all are.

        ``keys`` is how many there are, ``window`` the layer's sliding window, ``device`` where the layer runs.
        """
        ...


@dataclass(frozen=True)
class BothWays:
    """Layers whose tokens attend to later ones too.

    Attributes:
        layers: Their indices.
        real: (B, N), which tokens are not padding: no real token attends to padding.
    """

    layers: Collection[int]
    real: Tensor

    def applies(self, layer: int) -> bool:
        return layer in self.layers

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, N, N), True where a token is seen; None if every token sees every other.

        ``causal_mask`` is what the architecture would have used, (B or 1, 1, N, N); None for all earlier tokens. A
        sliding window stays a window, to both sides.
        """
        if causal_mask is None and bool(self.real.all()):
            return None
        seen = self.real.to(device)[:, None, None, :]
        if causal_mask is not None:
            past = causal_mask if causal_mask.dtype == torch.bool else causal_mask == 0
            seen = seen & (past | past.mT)
        # Padding sees itself at least: a softmax over nothing would be NaN.
        return seen | torch.eye(self.real.shape[1], dtype=torch.bool, device=device)


@dataclass(frozen=True)
class AfterPrefix:
    """A few new tokens behind cached prefixes of unequal lengths, whose caches are padded to N.

    Attributes:
        lengths: (B,) cached tokens that count; those behind are neither seen nor part of the positions.
        new: How many tokens are new: they stand at positions lengths, lengths + 1, ...
    """

    lengths: Tensor
    new: int
    _masks: dict[tuple[int, int | None, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def applies(self, layer: int) -> bool:
        return True

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, new, N + new): the prefix and the new tokens up to itself, in the window. Made once for all layers."""
        kind = keys, window, device
        if kind not in self._masks:
            self._masks[kind] = self._visible(keys, window).to(device)
        return self._masks[kind]

    def _visible(self, keys: int, window: int | None) -> Tensor:
        slot = torch.arange(keys - self.new, device=self.lengths.device)
        step = torch.arange(self.new, device=self.lengths.device)
        start = self.lengths[:, None, None, None]
        prefix = (slot < start).expand(-1, 1, self.new, -1)
        own = (step <= step[:, None]).expand(len(self.lengths), 1, -1, -1)
        if window is not None:
            prefix = prefix & (start + step[:, None] - slot < window)
            own = own & (step[:, None] - step < window)
        return torch.cat([prefix, own], dim=-1)


_masking: ContextVar[Masking | None] = ContextVar("st_reba_masking", default=None)


@contextlib.contextmanager
def masked_by(masking: Masking | None) -> Iterator[None]:
    """In this block, in this thread, let ``masking`` replace the masks of the layers that it applies to."""
    token = _masking.set(masking)
    try:
        yield
    finally:
        _masking.reset(token)


def attending_both_ways(layers: Collection[int], real: Tensor) -> contextlib.AbstractContextManager[None]:
    """Let these layers attend both ways among the real tokens, (B, N)."""
    return masked_by(BothWays(layers, real) if layers else None)


@dataclass(frozen=True)
class Rerouting:
    r"""A token of each text whose key and value stand before all others too, so that every token sees them.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V]

    Key and value are those that the layer computed, at the position where the token stands; whatever mask or window the
    layer has, it does not hide them.

    Attributes:
        layers: Indices of the layers.
        positions: (B,) where the token stands.
        bias: Added to the logit of the key that stands before all others.
    """

    layers: Collection[int]
    positions: Tensor
    bias: float = 0.0

    def logits(
        self, query: Tensor, key: Tensor, scale: float, softcap: float | None, position_bias: Tensor | None
    ) -> Tensor:
        """What each query gives the token's key, (B, H, N), float32 or float64."""
        groups = query.shape[1] // key.shape[1]
        one = widened(self.taken(key).repeat_interleave(groups, dim=1))
        logits = (widened(query) @ one.mT)[..., 0] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if position_bias is not None:
            # The key keeps its position.
            index = self.positions.to(query.device).view(-1, 1, 1, 1)
            whole = position_bias.expand(len(query), -1, -1, -1)
            logits = logits + whole.gather(3, index.expand(*whole.shape[:3], 1))[..., 0].to(logits)
        return logits + self.bias

    def taken(self, states: Tensor) -> Tensor:
        """(B, G, 1, d): the token's, of (B, G, N, d)."""
        index = self.positions.to(states.device).view(-1, 1, 1, 1)
        return states.gather(2, index.expand(-1, states.shape[1], 1, states.shape[3]))


_rerouting: ContextVar[Rerouting | None] = ContextVar("st_reba_rerouting", default=None)


@contextlib.contextmanager
def rerouted(rerouting: Rerouting) -> Iterator[None]:
    """Re-route in this block, in this thread."""
    token = _rerouting.set(rerouting)
    try:
        yield
    finally:
        _rerouting.reset(token)


@dataclass(frozen=True)
class QueryKeySource:
    """Weights as exp(score - log-sum-exp), for the architectures that call the attention function.

    query (B, H, N, d), key (B, G, N, d) with G key-value heads, log_sum_exp (B, H, N), bias broadcastable to
    (B, H, N, N) or None, softcap as in Gemma 2: c * tanh(score / c).
    """

    layer: int
    query: Tensor
    key: Tensor
    log_sum_exp: Tensor
    scale: float
    bias: Tensor | None
    softcap: float | None

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        return summing_dtype(self.query.dtype)

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        key = widened(self.key[texts, head // (self.heads // self.key.shape[1]), keys])
        query = widened(self.query[texts, head, queries])
        negative_lse = -self.log_sum_exp[texts, head, None, queries]
        if self.softcap is None:
            result = torch.baddbmm(negative_lse, key, query.mT, alpha=self.scale, out=out)
        else:
            scores = torch.bmm(key, query.mT, out=out) * (self.scale / self.softcap)
            result = torch.add(negative_lse, scores.tanh(), alpha=self.softcap, out=out)
        if self.bias is None:
            return result
        bias = self.bias[texts if self.bias.shape[0] > 1 else slice(None), head if self.bias.shape[1] > 1 else 0]
        return torch.add(result, bias[:, queries, keys].mT, out=out)

    def at_keys(self, positions: Tensor) -> QueryKeySource:
        batch, heads, _, size = self.key.shape
        index = positions.view(batch, 1, 1, 1)
        key = self.key.gather(2, index.expand(batch, heads, 1, size))
        bias = self.bias
        if bias is not None:
            bias = bias.expand(batch, -1, -1, -1)
            bias = bias.gather(3, index.expand(*bias.shape[:3], 1))
        return replace(self, key=key, bias=bias)

    def at_queries(self, positions: Tensor) -> QueryKeySource:
        """The same layer with one query a text, ``positions`` (B,)."""
        batch, heads, _, size = self.query.shape
        index = positions.view(batch, 1, 1, 1)
        bias = self.bias
        if bias is not None:
            bias = bias.expand(batch, -1, -1, -1)
            bias = bias.gather(2, index.expand(*bias.shape[:2], 1, bias.shape[3]))
        return replace(
            self,
            query=self.query.gather(2, index.expand(batch, heads, 1, size)),
            log_sum_exp=self.log_sum_exp.gather(2, index[..., 0].expand(batch, heads, 1)),
            bias=bias,
        )

    def in_chunks(self, start: int, length: int, count: int) -> QueryKeySource:
        """The same layer within chunks from ``start`` on, each as a text of its own, (B * count) of them.

        What reaches beyond the end of the input has weights that mean nothing.
        """

        def cut(values: Tensor) -> Tensor:
            return split(values, 2, start, length, count).transpose(1, 2).flatten(0, 1)

        bias = self.bias
        if bias is not None:
            bias = diagonal_blocks(bias, start, length, count).expand(self.batch, *[-1] * 4).flatten(0, 1)
        return replace(self, query=cut(self.query), key=cut(self.key), log_sum_exp=cut(self.log_sum_exp), bias=bias)


@dataclass(frozen=True)
class SymmetrizedSource:
    """A layer that attends both ways, as a maximum over causal layers counts it.

    There the symmetrised (A_ij + A_ji) / 2 is half of A_ji off the diagonal, and A_ii on it. So that all layers are
    halved alike afterwards, this gives log(A_ij + A_ji) off the diagonal, and log A_ii on it.

    Attributes:
        forward: Weights of query j on key i.
        backward: Weights of query i on key j.
        positions: (B,) the key of each text, where there is one a text; None where keys are positions themselves.
    """

    forward: QueryKeySource
    backward: QueryKeySource
    positions: Tensor | None = None

    @property
    def layer(self) -> int:
        return self.forward.layer

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def heads(self) -> int:
        return self.forward.heads

    @property
    def device(self) -> torch.device:
        return self.forward.device

    @property
    def dtype(self) -> torch.dtype:
        return self.forward.dtype

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        # Clamped, because the gradient of logaddexp is NaN where neither sees the other.
        forward = self.forward.log_weights(texts, head, keys, queries).clamp(min=_NOTHING)
        backward = self.backward.log_weights(texts, head, queries, keys).mT.clamp(min=_NOTHING)
        key = torch.arange(keys.start, keys.stop, device=self.device)[None]
        if self.positions is not None:
            key = self.positions[texts, None]
        query = torch.arange(queries.start, queries.stop, device=self.device)
        both = torch.where(key[..., None] == query, forward, torch.logaddexp(forward, backward))
        return both if out is None else out.copy_(both)

    def at_keys(self, positions: Tensor) -> SymmetrizedSource:
        return SymmetrizedSource(self.forward.at_keys(positions), self.backward.at_queries(positions), positions)


@dataclass(frozen=True)
class MapSource:
    """Weights as an architecture hands them out itself, with ``output_attentions=True``: weights (B, H, N, N)."""

    layer: int
    weights: Tensor

    @property
    def batch(self) -> int:
        return self.weights.shape[0]

    @property
    def heads(self) -> int:
        return self.weights.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return summing_dtype(self.weights.dtype)

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        # Clamped, because the gradient of log is infinite at the zeros of a causal map.
        weights = widened(self.weights[texts, head, queries, keys].mT).clamp(min=torch.finfo(self.dtype).tiny)
        return torch.log(weights, out=out)

    def at_keys(self, positions: Tensor) -> MapSource:
        index = positions.view(-1, 1, 1, 1)
        return replace(self, weights=self.weights.gather(3, index.expand(*self.weights.shape[:3], 1)))

    def in_chunks(self, start: int, length: int, count: int) -> MapSource:
        """As :meth:`QueryKeySource.in_chunks`."""
        return replace(self, weights=diagonal_blocks(self.weights, start, length, count).flatten(0, 1))


class RunningMaximum:
    """The largest weight that any watched layer and head gives, for a rectangle of keys and queries.

    exp is monotone, so the maximum runs over log weights and one exp at the end gives the weights. Only entries with
    query >= key are meaningful: others may hold anything.

    Args:
        keys: A slice of key positions, or one position a text, (B,).
        queries: A slice of query positions.
        layers: The layers that count; None for all.
    """

    def __init__(self, keys: slice | Tensor, queries: slice, layers: Collection[int] | None = None) -> None:
        self.keys = keys
        self.queries = queries
        self.layers = layers
        self._maximum: Tensor | None = None

    def wants(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def result(self) -> Tensor:
        """max of log weights, (B, keys, queries), float32 or, in a float64 model, float64."""
        if self._maximum is None:
            raise RuntimeError("no attention layer was seen: the backbone's attention did not run in this context.")
        return self._maximum

    def observe(self, source: WeightSource) -> None:
        keys = self.keys
        if isinstance(keys, Tensor):
            source, keys = source.at_keys(keys.to(source.device)), slice(0, 1)
        maximum = self._maximum
        if maximum is None:
            shape = (source.batch, keys.stop - keys.start, self.queries.stop - self.queries.start)
            maximum = torch.full(shape, float("-inf"), dtype=source.dtype, device=source.device)
        elif maximum.device != source.device:
            maximum = maximum.to(source.device)
        if torch.is_grad_enabled():
            for head in range(source.heads):
                weights = source.log_weights(slice(None), head, keys, self.queries)
                maximum = torch.maximum(maximum, weights)
        else:
            self._fold(source, keys, maximum)
        self._maximum = maximum

    def _fold(self, source: WeightSource, keys: slice, maximum: Tensor) -> None:
        """Take the maximum in place, in pieces that fit the scratch memory."""
        budget = _SCRATCH_BYTES.get(source.device.type, _SCRATCH_BYTES_ACCELERATOR)
        block = min(_KEY_BLOCK, keys.stop - keys.start)
        group = max(1, budget // max(1, 4 * block * maximum.shape[2]))
        for first in range(0, source.batch, group):
            texts = slice(first, min(first + group, source.batch))
            for start in range(keys.start, keys.stop, _KEY_BLOCK):
                stop = min(start + _KEY_BLOCK, keys.stop)
                # Queries before the block's first key cannot see it; with a key a text there is nothing to skip.
                skipped = max(0, start - self.queries.start) if isinstance(self.keys, slice) else 0
                queries = slice(self.queries.start + skipped, self.queries.stop)
                target = maximum[texts, start - keys.start : stop - keys.start, skipped:]
                scratch = torch.empty(target.shape, dtype=source.dtype, device=source.device)
                for head in range(source.heads):
                    source.log_weights(texts, head, slice(start, stop), queries, scratch)
                    torch.maximum(target, scratch, out=target)


class InChunks:
    """Shows another probe what each text attends to within its own chunks, as if a chunk were a text.

    Only these blocks on the diagonal are ever formed: (B * count, length, length) instead of (B, N, N). The attention
    itself is that of the whole texts.

    Args:
        probe: Shown B * count texts of ``length`` tokens.
        start: Where the first chunk begins.
        length: Tokens of a chunk.
        count: Chunks of each text.
    """

    def __init__(self, probe: Probe, start: int, length: int, count: int) -> None:
        self.probe = probe
        self.start = start
        self.length = length
        self.count = count

    def wants(self, layer: int) -> bool:
        return self.probe.wants(layer)

    def observe(self, source: WeightSource) -> None:
        # A layer that attends both ways has no look back within a chunk that the rest of the text would not change.
        assert isinstance(source, (QueryKeySource, MapSource))
        self.probe.observe(source.in_chunks(self.start, self.length, self.count))


class MeanWeights:
    """The weights of one query a text, averaged over the heads of one layer.

    Args:
        queries: (B,) the query of each text.
        layer: Which layer.
    """

    def __init__(self, queries: Tensor, layer: int) -> None:
        self.queries = queries
        self.layer = layer
        self.weights: Tensor | None = None

    def wants(self, layer: int) -> bool:
        return layer == self.layer

    def observe(self, source: WeightSource) -> None:
        """Keep (B, keys), of the dtype of ``source``, on the device of ``queries``.

        Keys behind the query are not masked where the layer needed no mask.
        """
        if isinstance(source, SymmetrizedSource):
            source = source.forward
        assert isinstance(source, QueryKeySource)
        query = source.at_queries(self.queries.to(source.device))
        keys = slice(0, source.key.shape[2])
        heads = [query.log_weights(slice(None), head, keys, slice(0, 1)) for head in range(source.heads)]
        self.weights = torch.stack(heads).exp().mean(dim=0)[..., 0].to(self.queries.device)

    def result(self) -> Tensor:
        if self.weights is None:
            raise RuntimeError("the layer was not seen: the backbone's attention did not run in this context.")
        return self.weights


class LayerCensus:
    """A probe that only notes which layers have attention, and what their attention is like.

    Attributes:
        layers: Indices of the layers that ran.
        explicit: Whether any asked for a softmax that the fused kernels do not know (soft cap, sinks).
        unknown: Names of the arguments they passed that are neither honoured nor harmless.
    """

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.explicit = False
        self.unknown: set[str] = set()

    def wants(self, layer: int) -> bool:
        self.layers.append(layer)
        return False

    def observe(self, source: WeightSource) -> None:
        raise AssertionError("a census wants no layer")


def observable_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: query (B, H, N, d), key and value (B, G, M, d), output (B, N, H, d).

    ``softcap``, attention sinks (``s_aux``) and dropout while somebody watches take the explicit softmax. What is
    neither honoured nor in :data:`HARMLESS` is reported to a :class:`LayerCensus`.
    """
    probe = _probe.get()
    masking = _masking.get()
    if masking is not None and not masking.applies(_layer_index(module)):
        masking = None
    if masking is not None:
        window = kwargs.get("sliding_window")
        attention_mask, is_causal = masking.mask(attention_mask, key.shape[2], window, key.device), False
    rerouting = _rerouting.get()
    if rerouting is not None and _layer_index(module) not in rerouting.layers:
        rerouting = None
    explicit = softcap is not None or s_aux is not None
    if isinstance(probe, LayerCensus):
        probe.explicit |= explicit
        probe.unknown |= {name for name, given in kwargs.items() if given is not None and name not in HARMLESS}
    # From here on ``probe`` is the one that wants to see this layer.
    if probe is not None and not probe.wants(layer := _layer_index(module)):
        probe = None
    if probe is None and rerouting is None and not explicit and position_bias is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal)

    query, key, value = _in_one_dtype(query, key, value)
    if position_bias is not None:
        # The kernels round it so: the weights must know.
        position_bias = position_bias.to(query.dtype)
    # Autocast would round the weights on their way to the probe, too.
    with without_autocast(query.device):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        bias = _as_bias(attention_mask, position_bias, key.shape[2])
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = causal and attention_mask is None and query.shape[2] > 1
        # The fused kernels' log-sum-exp has no gradient and they know no dropout beside it.
        explicit = explicit or dropout > 0 or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
        if causal and (explicit or bias is not None):
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
            bias, causal = (hidden[None, None] if bias is None else bias + hidden), False
        if explicit:
            output, lse = _explicit_attention(query, key, value, bias, scale, softcap, s_aux, dropout)
        else:
            output, lse = attention_with_lse(query, key, value, bias=bias, causal=causal, scale=scale)
        if rerouting is not None:
            logits = rerouting.logits(query, key, scale, softcap, position_bias)
            output, lse = _with_one_more(output, lse, logits, rerouting.taken(value), dropout)
        if probe is not None:
            source = QueryKeySource(layer, query, key, lse, scale, bias, softcap)
            probe.observe(SymmetrizedSource(source, source) if isinstance(masking, BothWays) else source)
    return output.transpose(1, 2).contiguous(), None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's own SDPA has them under autocast, where rotary positions leave query and key wider than value."""
    dtype = autocast_dtype(query.device)
    if dtype is None or query.dtype == torch.float64:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _with_one_more(output: Tensor, lse: Tensor, logits: Tensor, value: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention with one more key, from the attention without it.

    A softmax over one more logit is a mixture: weight sigmoid(logit - lse) on the new value, the rest on what there
    was. So no mask has to be made, and ``output`` (B, H, N, d) and ``lse`` (B, H, N) bring windows, soft caps and sinks
    with them. ``logits`` (B, H, N), ``value`` (B, G, 1, d); out, the new output and log-sum-exp.
    """
    weight = torch.sigmoid(logits - lse)[..., None]
    given = weight if dropout == 0 else nn.functional.dropout(weight, dropout)
    value = value.repeat_interleave(output.shape[1] // value.shape[1], dim=1)
    mixed = (1 - weight) * widened(output) + given * widened(value)
    return mixed.to(output.dtype), torch.logaddexp(lse, logits)


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise RuntimeError(f"{type(module).__name__} does not say which layer it is: its attention cannot be watched.")
    return index


def _as_bias(attention_mask: Tensor | None, position_bias: Tensor | None, length: int) -> Tensor | None:
    """A boolean mask (True: visible) or an additive one, and a position bias, as one term to add to the scores."""
    bias = attention_mask
    if bias is not None:
        bias = bias[..., :length]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, float("-inf"))
    if position_bias is None:
        return bias
    return position_bias if bias is None else bias + position_bias


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention written out, one head at a time, in float32 or float64 where it matters.

    Same shapes as the fused one. A sink is one more logit of each head, (H,), that takes weight and gives no value.
    """
    groups = query.shape[1] // key.shape[1]
    outputs, sums = [], []
    for head in range(query.shape[1]):
        scores = torch.matmul(query[:, head], key[:, head // groups].mT) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = widened(scores)
        if bias is not None:
            scores = scores + bias[:, head if bias.shape[1] > 1 else 0]
        lse = scores.logsumexp(dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks[head].to(lse))
        weights = (scores - lse[..., None]).exp().to(query.dtype)
        if dropout > 0:
            weights = nn.functional.dropout(weights, dropout)
        outputs.append(weights @ value[:, head // groups])
        sums.append(lse)
    return torch.stack(outputs, dim=1), torch.stack(sums, dim=1)


def register() -> None:
    """Make the attention function known to transformers; masks are made as for its own ``sdpa``.

    torch.compile leaves the function out of its graphs: a graph would replay what it saw when it was traced, and never
    ask again who is watching or what replaces the masks.
    """
    AttentionInterface.register(NAME, torch.compiler.disable(observable_attention))
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
