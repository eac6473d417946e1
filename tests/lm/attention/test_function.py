from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from st_reba.lm.attention import weights as layer_weights
from st_reba.lm.attention.changes import FirstKey
from st_reba.lm.attention.function import observable_attention
from st_reba.lm.attention.observers import Census, InChunks, RunningMaximum
from st_reba.lm.attention.weights import LayerWeights, StoredWeights
from st_reba.lm.run import Pass, passing, watching


def layer(index=0, **attributes):
    module = nn.Module()
    module.layer_idx = index
    module.is_causal = True
    module.num_key_value_groups = 2
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def problem(length=9, requires_grad=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(3, heads, length, 8, generator=generator) for heads in (4, 2, 2)]
    return [tensor.to(dtype).requires_grad_(requires_grad) for tensor in drawn]


def naive(query, key, value, mask=None, softcap=None, sinks=None, bias=None):
    """Output (B, N, H, d) and weights (B, H, N, N) of causal attention, all written out."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.mT * 8**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    causal = torch.ones(scores.shape[-2:]).tril().bool()
    scores = scores.masked_fill(~(causal if mask is None else causal & mask), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


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


WINDOW = torch.ones(9, 9).triu(-3).bool()
CASES = {
    "plain": {},
    "window": {"mask": WINDOW},
    "softcap": {"softcap": 1.5},
    "softcap in a window": {"softcap": 1.5, "mask": WINDOW},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "position bias": {"bias": torch.linspace(-2, 2, 4 * 81).view(1, 4, 9, 9)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
def test_output_and_weights(case, watched, differentiable):
    extras = CASES[case]
    tensors = problem(requires_grad=differentiable)
    mask = extras.get("mask")
    kwargs = {
        "attention_mask": None if mask is None else (mask & torch.ones(9, 9).tril().bool())[None, None],
        "softcap": extras.get("softcap"),
        "s_aux": extras.get("sinks"),
        "position_bias": extras.get("bias"),
    }
    expected, weights = naive(*tensors, **extras)
    observer = Maps()
    if watched:
        with watching(observer):
            output, _ = observable_attention(layer(), *tensors, **kwargs)
        visible = weights > 0
        torch.testing.assert_close(observer.seen[0][visible], weights[visible])
    else:
        output, _ = observable_attention(layer(), *tensors, **kwargs)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("differentiable", [False, True])
class TestPrecision:
    """Of what an observer is shown, and of the output."""

    def run(self, tensors, case):
        extras = CASES[case]
        mask = extras.get("mask")
        observer = Maps()
        with watching(observer):
            output, _ = observable_attention(
                layer(),
                *tensors,
                attention_mask=None if mask is None else (mask & torch.ones(9, 9).tril().bool())[None, None],
                softcap=extras.get("softcap"),
                s_aux=extras.get("sinks"),
                position_bias=extras.get("bias"),
            )
        return output, observer.seen[0]

    def test_float64_stays_float64(self, case, differentiable):
        tensors = problem(requires_grad=differentiable, dtype=torch.float64)
        expected, weights = naive(*tensors, **CASES[case])
        output, found = self.run(tensors, case)
        visible = weights > 0
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[visible], weights[visible], rtol=1e-12, atol=1e-12)

    def test_under_autocast_products_are_rounded_and_sums_are_not(self, case, differentiable):
        """Query and key come in float32 and value in half precision, as rotary positions leave them."""
        query, key, value = problem(requires_grad=differentiable)
        rounded = [tensor.bfloat16().float() for tensor in (query, key, value)]
        extras = dict(CASES[case])
        if "bias" in extras:
            extras["bias"] = extras["bias"].bfloat16().float()
        expected, weights = naive(*rounded, **extras)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, found = self.run([query, key, value.bfloat16()], case)
        assert output.dtype == torch.bfloat16
        assert found.dtype == torch.float32
        visible = weights > 0
        torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
        # The softmax that is written out rounds its scores, as eager attention under autocast does. The kernel of torch
        # takes its exponentials to some 6e-5, on processors that have AVX2 alone.
        allowed = 2e-2 if differentiable or "softcap" in case or case == "sinks" else 1e-4
        torch.testing.assert_close(found[visible], weights[visible], rtol=allowed, atol=allowed)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_attention_written_out(case):
    """Of the output and of the weights that an observer sees."""
    extras = CASES[case]
    mask = extras.get("mask")
    ours = problem(requires_grad=True, dtype=torch.float64)
    theirs = problem(requires_grad=True, dtype=torch.float64)
    output, found = TestPrecision().run(ours, case)
    expected, weights = naive(*theirs, **extras)
    visible = weights > 0
    (output.pow(2).sum() + found[visible].pow(3).sum()).backward()
    (expected.pow(2).sum() + weights[visible].pow(3).sum()).backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert mask is None or not visible.all()


def test_an_additive_mask_is_a_mask():
    tensors = problem()
    mask = torch.zeros(1, 1, 9, 9).masked_fill_(~(WINDOW & torch.ones(9, 9).tril().bool()), float("-inf"))
    with watching(Maps()):
        output, _ = observable_attention(layer(), *tensors, attention_mask=mask)
    torch.testing.assert_close(output, naive(*tensors, mask=WINDOW)[0])


def test_dropout_while_watching_is_dropout():
    """8000 draws, as texts of one batch."""
    tensors = [tensor[:1].expand(8000, -1, -1, -1) for tensor in problem()]
    torch.manual_seed(0)
    with watching(Maps()):
        outputs = observable_attention(layer(), *tensors, attention_mask=None, dropout=0.3)[0]
    expected = naive(*(tensor[:1] for tensor in tensors))[0][0]
    assert outputs.std(dim=0).max() > 0.1
    assert (outputs.mean(dim=0) - expected).abs().max() < 0.1


def sources(length=40, batch=3):
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(3):
        query, key, value = (torch.randn(batch, heads, length, 8, generator=generator) for heads in (4, 2, 2))
        _, weights = naive(query, key, value)
        scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
        hidden = torch.ones(length, length).triu(1).bool()
        lse = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
        made.append((LayerWeights(index, query, key, lse, 8**-0.5), StoredWeights(index, weights)))
    return made


@pytest.mark.parametrize("kind", [0, 1], ids=["query and key", "map"])
@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("scratch", [1, 2**14, 2**28], ids=["a head of a text", "some", "all"])
@pytest.mark.parametrize("gradients", [False, True])
class TestRunningMaximum:
    def expected(self, layers):
        return torch.stack([sources()[index][1].weights for index in layers]).amax(dim=(0, 2))

    def run(self, observer, kind, block, scratch, gradients, monkeypatch):
        monkeypatch.setattr(layer_weights, "_KEY_BLOCK", block)
        monkeypatch.setitem(layer_weights._SCRATCH_BYTES, "cpu", scratch)
        with torch.set_grad_enabled(gradients):
            for pair in sources():
                if observer.wants(pair[kind].layer):
                    observer.observe(pair[kind])
        return observer.result().exp()

    @pytest.mark.parametrize("layers", [None, {1}])
    def test_rectangle(self, kind, block, scratch, gradients, layers, monkeypatch):
        observer = RunningMaximum(slice(3, 20), slice(3, 40), layers)
        result = self.run(observer, kind, block, scratch, gradients, monkeypatch)
        expected = self.expected(layers or range(3))[:, 3:40, 3:20].mT
        meaningful = torch.ones(17, 37).triu().bool()
        torch.testing.assert_close(result[:, meaningful], expected[:, meaningful])

    def test_one_key_a_text(self, kind, block, scratch, gradients, monkeypatch):
        keys = torch.tensor([5, 19, 7])
        observer = RunningMaximum(keys, slice(5, 40))
        result = self.run(observer, kind, block, scratch, gradients, monkeypatch)
        for text, key in enumerate(keys):
            expected = self.expected(range(3))[text, key:40, key]
            torch.testing.assert_close(result[text, 0, key - 5 :], expected)


@pytest.mark.parametrize("kind", [0, 1], ids=["query and key", "map"])
@pytest.mark.parametrize(("length", "count"), [(10, 3), (10, 4), (37, 1), (50, 1), (1, 37)])
def test_a_maximum_in_chunks(kind, length, count):
    """Of the third token on, where the last chunk may reach beyond the end."""
    observer = RunningMaximum(slice(0, length), slice(0, length), {0, 2})
    for pair in sources():
        if (chunks := InChunks(observer, 3, length, count)).wants(pair[kind].layer):
            chunks.observe(pair[kind])
    result = observer.result().exp().unflatten(0, (3, count))
    expected = torch.stack([sources()[index][1].weights for index in (0, 2)]).amax(dim=(0, 2))
    for chunk in range(count):
        first, last = 3 + chunk * length, min(3 + (chunk + 1) * length, 40)
        block = expected[:, first:last, first:last].mT
        meaningful = torch.ones(last - first, last - first).triu().bool()
        found = result[:, chunk, : last - first, : last - first]
        torch.testing.assert_close(found[:, meaningful], block[:, meaningful])


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_every_kind_of_attention(case):
    extras = CASES[case]
    mask = extras.get("mask")
    _, weights = naive(*problem(), **extras)
    observer = RunningMaximum(slice(0, 4), slice(0, 4))
    with watching(InChunks(observer, 1, 4, 2)), torch.no_grad():
        observable_attention(
            layer(),
            *problem(),
            attention_mask=None if mask is None else (mask & torch.ones(9, 9).tril().bool())[None, None],
            softcap=extras.get("softcap"),
            s_aux=extras.get("sinks"),
            position_bias=extras.get("bias"),
        )
    result = observer.result().exp().unflatten(0, (3, 2))
    meaningful = torch.ones(4, 4).triu().bool()
    for chunk, first in enumerate((1, 5)):
        block = weights[:, :, first : first + 4, first : first + 4].amax(dim=1).mT
        torch.testing.assert_close(result[:, chunk, meaningful], block[:, meaningful])


def test_a_maximum_of_nothing():
    with pytest.raises(RuntimeError, match="no attention layer was seen"):
        RunningMaximum(slice(0, 1), slice(0, 1)).result()


def test_census_reports_what_it_does_not_know():
    census = Census()
    with passing(Pass(census=census)):
        observable_attention(layer(4), *problem(), None, sliding_window=3, new_trick=1, unused_trick=None)
    assert census.attentions.keys() == {4}
    assert census.unknown == {"new_trick"}


def test_a_layer_without_a_number_cannot_be_watched():
    module = layer()
    del module.layer_idx
    with watching(Maps()), pytest.raises(RuntimeError, match="does not say which layer it is"):
        observable_attention(module, *problem(), None)


def test_observers_of_two_threads_do_not_meet():
    barrier = threading.Barrier(2)
    seen = {}

    def work(name):
        observer = Maps()
        with watching(observer):
            barrier.wait()
            observable_attention(layer(name), *problem(), None)
            barrier.wait()
        seen[name] = list(observer.seen)

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1: [1], 2: [2]}


def test_an_observer_is_gone_when_its_block_ends():
    observer = Maps()
    with pytest.raises(KeyError), watching(observer):
        raise KeyError
    observable_attention(layer(), *problem(), None)
    assert observer.seen == {}


class TestRerouting:
    """Beside keys and values that were made longer, in the plainest way."""

    POSITIONS = torch.tensor([8, 3, 5])

    def run(self, tensors, case, dropout=0.0, observer=None, bias=0.7):
        extras = CASES[case]
        mask = extras.get("mask")
        with (
            passing(Pass(rerouting=FirstKey([0], self.POSITIONS, bias))),
            watching(observer) if observer else contextlib.nullcontext(),
        ):
            output, _ = observable_attention(
                layer(),
                *tensors,
                attention_mask=None if mask is None else (mask & torch.ones(9, 9).tril().bool())[None, None],
                softcap=extras.get("softcap"),
                s_aux=extras.get("sinks"),
                position_bias=extras.get("bias"),
                dropout=dropout,
            )
        return output

    def longer(self, tensors, case, bias=0.7):
        query, key, value = tensors
        extras = CASES[case]
        outputs, weights = [], []
        for text, position in enumerate(self.POSITIONS):
            one, keys, values = query[text], key[text].repeat_interleave(2, 0), value[text].repeat_interleave(2, 0)
            keys = torch.cat([keys[:, position, None], keys], dim=1)
            values = torch.cat([values[:, position, None], values], dim=1)
            scores = one @ keys.mT * 8**-0.5
            if "softcap" in extras:
                scores = extras["softcap"] * torch.tanh(scores / extras["softcap"])
            if "bias" in extras:
                scores = scores + torch.cat([extras["bias"][0, :, :, position, None], extras["bias"][0]], dim=-1)
            scores[..., 0] += bias
            seen = torch.ones(9, 9).tril().bool() & extras.get("mask", torch.ones(9, 9).bool())
            seen = torch.cat([torch.ones(9, 1).bool(), seen], dim=1)
            scores = scores.masked_fill(~seen, float("-inf"))
            if "sinks" in extras:
                scores = torch.cat([scores, extras["sinks"].view(-1, 1, 1).expand(-1, 9, 1)], dim=-1)
            found = scores.softmax(-1)[..., :10]
            outputs.append((found @ values).transpose(0, 1))
            weights.append(found[..., 1:])
        return torch.stack(outputs), torch.stack(weights)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("differentiable", [False, True])
    def test_output_and_weights(self, case, differentiable):
        tensors = problem(requires_grad=differentiable)
        expected, weights = self.longer(tensors, case)
        torch.testing.assert_close(self.run(tensors, case), expected)
        observer = Maps()
        torch.testing.assert_close(self.run(tensors, case, observer=observer), expected)
        visible = weights > 0
        torch.testing.assert_close(observer.seen[0][visible], weights[visible])

    def test_gradients(self):
        ours, theirs = problem(requires_grad=True), problem(requires_grad=True)
        self.run(ours, "softcap in a window").pow(2).sum().backward()
        self.longer(theirs, "softcap in a window")[0].pow(2).sum().backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)

    def test_dropout_is_dropout(self):
        tensors = problem()
        torch.manual_seed(0)
        outputs = torch.stack([self.run(tensors, "plain", dropout=0.3, bias=3.0) for _ in range(700)])
        assert (outputs.mean(dim=0) - self.longer(tensors, "plain", bias=3.0)[0]).abs().max() < 0.15
        # The first token sees itself and the prefix, which is dropped as often as anything else.
        kept = torch.nn.functional.cosine_similarity(outputs[:, 0, 0, 0], tensors[2][0, 0, 0][None]).gt(0.9999)
        assert 0.1 < kept.float().mean() < 0.4

    def test_only_in_its_layers_and_only_in_its_block(self):
        tensors = problem()
        with passing(Pass(rerouting=FirstKey([1], self.POSITIONS))):
            torch.testing.assert_close(observable_attention(layer(0), *tensors, None)[0], naive(*tensors)[0])
        torch.testing.assert_close(observable_attention(layer(1), *tensors, None)[0], naive(*tensors)[0])
