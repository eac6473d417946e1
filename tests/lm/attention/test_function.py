"""The attention function beside attention that is written out, and what observers see of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from st_reba.lm.attention import weights as layer_weights
from st_reba.lm.attention.changes import Bidirectional, FirstKey
from st_reba.lm.attention.function import observable_attention
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.attention.weights import LayerWeights
from st_reba.lm.run import Pass, passing, watching

CAUSAL = torch.ones(9, 9).tril().bool()
WINDOW = torch.ones(9, 9).triu(-3).bool()
CASES = {
    "plain": {},
    "window": {"mask": WINDOW},
    "softcap in a window": {"softcap": 1.5, "mask": WINDOW},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "position bias": {"bias": torch.linspace(-2, 2, 4 * 81).view(1, 4, 9, 9)},
}


def layer(index=0):
    module = nn.Module()
    module.layer_idx, module.is_causal, module.num_key_value_groups = index, True, 2
    return module


def problem(requires_grad=False, dtype=torch.float32):
    """Query, key and value of three texts: 4 heads that share 2 keys."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(3, heads, 9, 8, generator=generator) for heads in (4, 2, 2)]
    return [tensor.to(dtype).requires_grad_(requires_grad) for tensor in drawn]


def naive(query, key, value, mask=None, softcap=None, sinks=None, bias=None, prefix=None):
    """Output (B, N, H, d) and weights (B, H, N, N) of causal attention, all written out.

    With ``prefix``, a position a text and a bias: that token's key and value stand before all others, too.
    """
    length = query.shape[2]
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    seen = torch.ones(length, length).tril().bool() & (torch.ones(length, length).bool() if mask is None else mask)
    before = 0.0
    if prefix is not None:
        positions, before = prefix
        texts = torch.arange(len(key))
        key, value = (torch.cat([own[texts, :, positions, None], own], dim=2) for own in (key, value))
        seen = torch.cat([torch.ones(length, 1).bool(), seen], dim=1)
        if bias is not None:
            bias = bias.expand(len(key), -1, -1, -1)
            bias = torch.cat([bias[texts, :, :, positions, None], bias], dim=3)
    scores = query @ key.mT * 8**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if prefix is not None:
        scores = torch.cat([scores[..., :1] + before, scores[..., 1:]], dim=-1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights[..., -length:]


def attention(tensors, case, observer=None, change=None, dropout=0.0, index=0):
    """The function's output on a case, in a pass with an observer or a change."""
    extras = CASES[case]
    mask = extras.get("mask")
    with ExitStack() as stack:
        if change is not None:
            stack.enter_context(passing(Pass(rerouting=change)))
        if observer is not None:
            stack.enter_context(watching(observer))
        output, _ = observable_attention(
            layer(index),
            *tensors,
            attention_mask=None if mask is None else (mask & CAUSAL)[None, None],
            softcap=extras.get("softcap"),
            s_aux=extras.get("sinks"),
            position_bias=extras.get("bias"),
            dropout=dropout,
        )
    return output


class Maps:
    """An observer that keeps everything, for comparison."""

    def __init__(self):
        self.seen = {}

    def wants(self, index):
        return True

    def observe(self, source):
        whole = slice(0, source.log_sum_exp.shape[-1])
        log_weights = source.log_weights(slice(None), slice(None), whole, whole)
        self.seen[source.layer] = log_weights.exp().permute(0, 1, 3, 4, 2).flatten(1, 2)


PREFIX = (torch.tensor([8, 3, 5]), 0.7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", [None, PREFIX], ids=["", "a key rerouted"])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_output_weights_and_gradients_are_those_that_are_written_out(case, prefix, differentiable, dtype, allowed):
    """Watched or not, in the precision of what is given."""
    ours, theirs = problem(differentiable, dtype), problem(differentiable, dtype)
    expected, weights = naive(*theirs, **CASES[case], prefix=prefix)
    observer, change = Maps(), prefix and FirstKey([0], *prefix)
    unwatched, output = attention(ours, case, None, change), attention(ours, case, observer, change)
    for found in (unwatched, output):
        torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)
    visible = weights > 0
    torch.testing.assert_close(observer.seen[0][visible], weights[visible], rtol=allowed, atol=allowed)
    if differentiable:
        (output.pow(2).sum() + observer.seen[0][visible].pow(3).sum()).backward()
        (expected.pow(2).sum() + weights[visible].pow(3).sum()).backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=10 * allowed, atol=10 * allowed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("differentiable", [False, True])
def test_under_autocast_products_are_rounded_and_sums_are_not(case, differentiable):
    """Query and key come in float32 and value in half precision, as rotary positions leave them."""
    query, key, value = problem(differentiable)
    rounded = [tensor.bfloat16().float() for tensor in (query, key, value)]
    extras = {name: given.bfloat16().float() if name == "bias" else given for name, given in CASES[case].items()}
    expected, weights = naive(*rounded, **extras)
    observer = Maps()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention([query, key, value.bfloat16()], case, observer)
    assert (output.dtype, observer.seen[0].dtype) == (torch.bfloat16, torch.float32)
    visible = weights > 0
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    # The softmax that is written out rounds its scores, as eager attention under autocast does. The kernel of torch
    # takes its exponentials to some 6e-5, on processors that have AVX2 alone.
    allowed = 2e-2 if differentiable or "softcap" in case or case == "sinks" else 1e-4
    torch.testing.assert_close(observer.seen[0][visible], weights[visible], rtol=allowed, atol=allowed)


def test_an_additive_mask_is_a_mask():
    tensors = problem()
    mask = torch.zeros(1, 1, 9, 9).masked_fill_(~(WINDOW & CAUSAL), float("-inf"))
    with watching(Maps()):
        output, _ = observable_attention(layer(), *tensors, attention_mask=mask)
    torch.testing.assert_close(output, naive(*tensors, mask=WINDOW)[0])


def test_a_window_opens_to_both_sides_and_padding_sees_itself():
    real = torch.ones(1, 9).bool()
    real[:, 7:] = False
    seen = Bidirectional({0}, real).mask((WINDOW & CAUSAL)[None, None], 9, 4, torch.device("cpu"))
    assert torch.equal(seen[0, 0], (WINDOW & WINDOW.T & real) | torch.eye(9).bool())
    assert Bidirectional({0}, real, padded=False).mask(None, 9, None, torch.device("cpu")) is None


@pytest.mark.parametrize("rerouted", [False, True])
def test_dropout_is_dropout(rerouted):
    """4000 draws, as texts of one batch."""
    tensors = [tensor[:1].expand(4000, -1, -1, -1) for tensor in problem()]
    prefix = (torch.tensor([8]), 3.0) if rerouted else None
    change = FirstKey([0], torch.full((4000,), 8), 3.0) if rerouted else None
    torch.manual_seed(0)
    outputs = attention(tensors, "plain", None if rerouted else Maps(), change, dropout=0.3)
    expected = naive(*(tensor[:1] for tensor in tensors), prefix=prefix)[0][0]
    assert outputs.std(dim=0).max() > 0.1
    assert (outputs.mean(dim=0) - expected).abs().max() < 0.1


def sources(length=40):
    """Three layers, each with its map."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(3):
        query, key, value = (torch.randn(3, heads, length, 8, generator=generator) for heads in (4, 2, 2))
        _, weights = naive(query, key, value)
        scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
        lse = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).logsumexp(-1)
        made.append((LayerWeights(index, query, key, lse, 8**-0.5), weights))
    return made


def largest(layers):
    """(B, queries, keys): the largest weight of any head of these layers."""
    return torch.stack([sources()[index][1] for index in layers]).amax(dim=(0, 2))


class TestRunningMaximum:
    @pytest.mark.parametrize(
        ("block", "scratch", "gradients"), [(4, 1, False), (4, 2**14, True), (128, 2**14, False), (128, 2**28, True)]
    )
    @pytest.mark.parametrize("layers", [None, {1}])
    def test_of_a_rectangle_and_of_one_key_a_text(self, block, scratch, gradients, layers, monkeypatch):
        """A head of a text at a time, some, or all."""
        monkeypatch.setattr(layer_weights, "_KEY_BLOCK", block)
        monkeypatch.setitem(layer_weights._SCRATCH_BYTES, "cpu", scratch)
        keys = torch.tensor([5, 19, 7])
        rectangle = RunningMaximum(slice(3, 20), slice(3, 40), layers)
        column = RunningMaximum(keys, slice(5, 40), layers)
        with torch.set_grad_enabled(gradients):
            for source, _ in sources():
                for observer in (rectangle, column):
                    if observer.wants(source.layer):
                        observer.observe(source)
        expected = largest(layers or range(3))
        meaningful = torch.ones(17, 37).triu().bool()
        found = rectangle.result().exp()[:, meaningful]
        torch.testing.assert_close(found, expected[:, 3:40, 3:20].mT[:, meaningful])
        for text, key in enumerate(keys):
            torch.testing.assert_close(column.result().exp()[text, 0, key - 5 :], expected[text, key:40, key])


def test_a_maximum_of_nothing():
    with pytest.raises(RuntimeError, match="no attention layer was seen"):
        RunningMaximum(slice(0, 1), slice(0, 1)).result()


def test_a_layer_without_a_number_cannot_be_watched():
    module = layer()
    del module.layer_idx
    with watching(Maps()), pytest.raises(RuntimeError, match="does not say which layer it is"):
        observable_attention(module, *problem(), None)
