"""The attention function and its hooks against attention that is written out; and its kernels.

The Triton kernel runs in Triton's interpreter, on a CPU.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from st_reba.lm.attention import kernels
from st_reba.lm.attention.function import attention as registered
from st_reba.lm.attention.hooks import Bidirectional, ExtraKey, RunningMaximum
from st_reba.lm.attention.kernels import FoldKind, LogWeights, fold_kernel, trusted_fold, update_running_max
from st_reba.lm.passes import AttentionCall, Hook, active_pass
from st_reba.modules.no_sink import HideFirstToken

from ..conftest import raising

CAUSAL = torch.ones(9, 9).tril().bool()
WINDOW = torch.ones(9, 9).triu(-3).bool()
CASES = {
    "plain": {},
    "window": {"mask": WINDOW},
    "softcap in a window": {"softcap": 1.5, "mask": WINDOW},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "position bias": {"bias": torch.linspace(-2, 2, 4 * 81).view(1, 4, 9, 9)},
}


def layer():
    module = nn.Module()
    module.layer_idx, module.is_causal, module.num_key_value_groups = 0, True, 2
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


def attention(tensors, case, *hooks, dropout=0.0):
    """The function's output on a case, in a pass with hooks."""
    extras = {**dict.fromkeys(("softcap", "sinks", "bias")), **CASES[case]}
    mask = (extras["mask"] & CAUSAL)[None, None] if "mask" in extras else None
    given = {"softcap": extras["softcap"], "s_aux": extras["sinks"], "position_bias": extras["bias"]}
    with active_pass([hook for hook in hooks if hook is not None]):
        return registered(layer(), *tensors, attention_mask=mask, dropout=dropout, **given)[0]


class Maps(Hook):
    """Keeps everything, for comparison."""

    layers = None

    def after_attention(self, call, output, lse):
        keys = slice(-call.query.shape[2], None)
        weights = LogWeights.of(call, lse).form(keys=keys, queries=slice(0, lse.shape[-1]))
        self.map = weights.exp().permute(0, 1, 3, 4, 2).flatten(1, 2)
        return output, lse


PREFIX = (torch.tensor([8, 3, 5]), 0.7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", [None, PREFIX], ids=["", "a key rerouted"])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_output_weights_and_gradients_are_those_that_are_written_out(case, prefix, differentiable, dtype, allowed):
    """Watched or not, in the precision of what is given."""
    ours, theirs = problem(differentiable, dtype), problem(differentiable, dtype)
    expected, weights = naive(*theirs, **CASES[case], prefix=prefix)
    observer, change = Maps(), prefix and ExtraKey([0], *prefix)
    unwatched, output = attention(ours, case, change), attention(ours, case, change, observer)
    for found in (unwatched, output):
        torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)
    visible = weights > 0
    torch.testing.assert_close(observer.map[visible], weights[visible], rtol=allowed, atol=allowed)
    if differentiable:
        (output.pow(2).sum() + observer.map[visible].pow(3).sum()).backward()
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
    assert (output.dtype, observer.map.dtype) == (torch.bfloat16, torch.float32)
    visible = weights > 0
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    # The softmax that is written out rounds its scores, as eager attention under autocast does. The kernel of torch
    # takes its exponentials to some 6e-5, on processors that have AVX2 alone.
    allowed = 2e-2 if differentiable or "softcap" in case or case == "sinks" else 1e-4
    torch.testing.assert_close(observer.map[visible], weights[visible], rtol=allowed, atol=allowed)


def test_an_additive_mask_is_a_mask():
    tensors = problem()
    mask = torch.zeros(1, 1, 9, 9).masked_fill_(~(WINDOW & CAUSAL), float("-inf"))
    with active_pass([Maps()]):
        output, _ = registered(layer(), *tensors, attention_mask=mask)
    torch.testing.assert_close(output, naive(*tensors, mask=WINDOW)[0])


def call_of(query, key, value, mask=None):
    return AttentionCall(0, query, key, value, mask, True, 8**-0.5)


def test_a_window_opens_to_both_sides_and_padding_alone_sees_itself():
    real = torch.ones(1, 9).bool()
    real[:, 7:] = False
    windowed, plain = call_of(*problem(), (WINDOW & CAUSAL)[None, None]), call_of(*problem())
    Bidirectional({0}, real).before_attention(windowed)
    assert torch.equal(windowed.mask[0, 0], WINDOW & WINDOW.T & real)
    nothing = call_of(*problem())
    Bidirectional({0}, torch.zeros(1, 9).bool()).before_attention(nothing)
    assert torch.equal(nothing.mask[0, 0], torch.eye(9).bool())
    Bidirectional({0}, torch.ones(1, 9).bool()).before_attention(plain)
    assert plain.mask is None
    assert not plain.causal


def test_a_query_does_not_see_itself_where_its_key_is_not_selected():
    """Sparse attention may leave it out."""
    sparse = CAUSAL & ~torch.eye(9).bool()
    sparse[0, 0] = True
    for hook, expected in (
        (Bidirectional({0}, torch.ones(1, 9).bool()), sparse | sparse.T),
        (HideFirstToken({0}), (sparse & (torch.arange(9) > 0)) | torch.diag(torch.arange(9) < 2)),
    ):
        call = call_of(*problem(), sparse[None, None])
        hook.before_attention(call)
        assert torch.equal(call.mask[0, 0], expected)


def test_values_of_another_size_go_the_explicit_way():
    """As in latent attention, whose keys are wider."""
    query, key, value = problem()
    for hooks in ((), (Maps(),)):
        with active_pass(hooks):
            output, _ = registered(layer(), query, key, value[..., :5].contiguous(), None)
        torch.testing.assert_close(output, naive(query, key, value)[0][..., :5])


def test_behind_a_past_heads_share_keys():
    """The new queries' output is that of the whole text, under a mask that is one for all rows."""
    tensors = problem()
    expected, _ = naive(*tensors)
    mask = CAUSAL[None, None, 6:].expand(3, -1, -1, -1)
    query, key, value = tensors
    for hooks in ((), (Maps(),)):
        with active_pass(hooks):
            output, _ = registered(layer(), query[:, :, 6:], key, value, mask)
        torch.testing.assert_close(output, expected[:, 6:])


@pytest.mark.parametrize("rerouted", [False, True])
def test_dropout_is_dropout(rerouted):
    """4000 draws, as texts of one batch."""
    tensors = [tensor[:1].expand(4000, -1, -1, -1) for tensor in problem()]
    prefix = (torch.tensor([8]), 3.0) if rerouted else None
    change = ExtraKey([0], torch.full((4000,), 8), 3.0) if rerouted else Maps()
    torch.manual_seed(0)
    outputs = attention(tensors, "plain", change, dropout=0.3)
    expected = naive(*(tensor[:1] for tensor in tensors), prefix=prefix)[0][0]
    assert outputs.std(dim=0).max() > 0.1
    assert (outputs.mean(dim=0) - expected).abs().max() < 0.1


RECTANGLES = [(4, 1, False), (4, 2**14, True), (128, 2**14, False), (128, 2**28, True)]


@pytest.mark.parametrize(("block", "scratch", "gradients"), RECTANGLES)
@pytest.mark.parametrize("layers", [None, {1}])
def test_the_maximum_of_a_rectangle(block, scratch, gradients, layers, monkeypatch):
    """A head of a text at a time, some, or all."""
    monkeypatch.setattr(kernels, "_KEY_BLOCK", block)
    monkeypatch.setitem(kernels._SCRATCH_BYTES, "cpu", scratch)
    sources = [handed_over(size=8, seed=index) for index in range(3)]
    rectangle = RunningMaximum(slice(3, 20), slice(3, 40), layers)
    with torch.set_grad_enabled(gradients):
        for index in layers or range(3):
            watch(rectangle, sources[index])
    weights = torch.stack([written_out(sources[index]) for index in layers or range(3)])
    expected = weights.exp().float().amax(dim=(0, 2))
    meaningful = torch.ones(17, 37).triu().bool()
    found = rectangle.maximum.exp()[:, meaningful]
    torch.testing.assert_close(found, expected[:, 3:40, 3:20].mT[:, meaningful])


def test_a_maximum_of_nothing():
    with pytest.raises(RuntimeError, match="No watched layer ran"):
        RunningMaximum(slice(0, 1), slice(0, 1)).symmetrised()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("keys", [slice(2, 9), slice(5, 6)])
def test_the_symmetrised_maximum_of_a_causal_layer_and_one_that_attends_both_ways(keys, gradients):
    """Of (A_ij + A_ji) / 2 as it is written, on keys and queries from 2 on."""
    tensors, hook = problem(gradients), RunningMaximum(keys, slice(2, 9))
    hook.layers = None
    with active_pass([hook]), torch.set_grad_enabled(gradients):
        registered(layer(), *tensors, attention_mask=None)
    both = Bidirectional({0}, torch.ones(3, 9).bool())
    with active_pass([both, hook]), torch.set_grad_enabled(gradients):
        registered(layer(), *[2 * tensor for tensor in tensors], attention_mask=None)
    causal = naive(*tensors)[1]
    query, key = (2 * tensor for tensor in tensors[:2])
    full = (query @ key.repeat_interleave(2, 1).mT * 8**-0.5).softmax(-1)
    expected = torch.stack([(maps + maps.mT) / 2 for maps in (causal, full)]).amax(dim=(0, 2))[:, :, 2:].triu(-2)
    later = torch.arange(2, 9) >= torch.arange(keys.start, keys.stop)[:, None]
    torch.testing.assert_close(hook.symmetrised(), expected[:, keys] * later)


# Kernels

CPU = torch.device("cpu")
TRITON_KERNEL = "st_reba.lm.attention.triton_kernel"
TEXTS, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 70, 24


@pytest.fixture
def candidate(monkeypatch):
    """``candidate(kernel)``: the one that is tried on a CPU from here on."""
    kernels.trusted_kernel.cache_clear()

    def put(tried):
        kernels.trusted_kernel.cache_clear()
        monkeypatch.setitem(kernels._FUSED, "cpu", tried)

    yield put
    kernels.trusted_kernel.cache_clear()


def trusted(dtype=torch.float32, with_mask=False):
    return kernels.trusted_kernel("cpu", dtype, 16, 2, with_mask)


def wrong(call):
    output, lse = kernels.explicit_attention(call)
    return output, lse + 1


missing = raising(AttributeError("no such operator"))
full = raising(torch.cuda.OutOfMemoryError("CUDA out of memory."))


def without_mask(call):
    """As that of CUDA is."""
    return kernels.explicit_attention(replace(call, mask=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_private_cpu_kernel_is_there_and_right(dtype, with_mask, candidate):
    """Guards the private operator: without it everything still works, slower."""
    assert trusted(dtype, with_mask) is kernels._cpu_flash
    candidate(without_mask)
    assert trusted(dtype, with_mask) is (kernels.explicit_attention if with_mask else without_mask)


@pytest.mark.parametrize("kernel", [wrong, missing])
def test_a_kernel_that_is_wrong_is_not_used(kernel, candidate):
    """Nor one that does not run here; and a device that has none takes the plain way."""
    candidate(kernel)
    assert trusted() is kernels.explicit_attention
    assert kernels.trusted_kernel("meta", torch.float32, 16, 1, False) is kernels.explicit_attention
    # A full GPU says nothing about a kernel.
    candidate(full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trusted()


def test_the_signatures_of_the_private_operators():
    """The CUDA kernel cannot run everywhere the tests do; what it is called with can be compared everywhere."""
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)
    assert schema.startswith(
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp,"
    )


@pytest.fixture(autouse=True)
def no_kernel_is_trusted_yet():
    trusted_fold.cache_clear()
    yield
    trusted_fold.cache_clear()


@pytest.fixture(scope="module")
def kernel():
    """The module of the kernel, which runs in Triton's interpreter."""
    reason = "Triton is not installed: make test-triton has it, on Linux"
    pytest.importorskip("triton", reason=reason)
    # What Triton brings along is compiled; the kernel, which is defined below, is interpreted.
    importlib.import_module("triton.compiler.code_generator")
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from st_reba.lm.attention import triton_kernel

        of_builder = interpreter.InterpreterBuilder
        product = of_builder.create_dot

        def create_dot(self, left, right, *rest):
            """The interpreter keeps bfloat16 as integers of 16 bits, and multiplies these."""
            return product(self, *(_as_float32(interpreter, values) for values in (left, right)), *rest)

        patch.setattr(of_builder, "create_dot", create_dot)
        yield triton_kernel


def _as_float32(interpreter, values):
    if values.data.dtype != "uint16":
        return values
    bits = values.data.astype("uint32") << 16
    return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)


@pytest.fixture
def used(kernel, monkeypatch):
    """As on a GPU where the kernel proved itself. Filled with how often it ran."""
    runs = []

    def fold(*args):
        runs.append(args)
        kernel.update_running_max(*args)

    monkeypatch.setattr(kernels, "_FOLD_DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "trusted_fold", lambda kind: fold)
    return runs


def handed_over(dtype=torch.float32, heads=HEADS, groups=GROUPS, size=SIZE, softcap=None, bias=None, seed=0):
    """A layer as an architecture hands it over, with the log-sum-exp of attention written out in float64."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(TEXTS, LENGTH, count, size, generator=generator).to(dtype).transpose(1, 2)
        for count in (heads, groups)
    )
    source = LogWeights(query, key, torch.zeros(TEXTS, heads, LENGTH), size**-0.5, bias, softcap)
    return replace(source, lse=written_out(source).logsumexp(-1).float())


def watch(hook, source):
    """Let a hook see a layer that is handed over."""
    call = AttentionCall(0, source.query, source.key, source.key, None, True, source.scale, softcap=source.softcap)
    call.position_bias = source.bias
    hook.after_attention(call, source.query, source.lse)


def written_out(source):
    """The oracle: log weights (B, H, queries, keys), causal, one operation after the other, in float64."""
    key = source.key.double().repeat_interleave(source.query.shape[1] // source.key.shape[1], dim=1)
    scores = source.query.double() @ key.mT * source.scale
    if source.softcap is not None:
        scores = source.softcap * torch.tanh(scores / source.softcap)
    if source.bias is not None:
        scores = scores + source.bias.double()
    scores = scores - source.lse.double()[..., None]
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)


def window(size, heads=1):
    """A sliding window, for some heads another."""
    one = [torch.ones(LENGTH, LENGTH).tril().triu(1 - size - head).log() for head in range(heads)]
    return torch.stack(one)[None]


LAYERS = {
    "grouped queries": {},
    "a bias for each head, in bfloat16": {
        "bias": torch.linspace(-3, 3, HEADS * LENGTH**2).view(1, HEADS, LENGTH, LENGTH).bfloat16()
    },
    "a soft cap in a window": {"softcap": 1.5, "bias": window(9, HEADS)},
    "bfloat16 with a soft cap in a window": {"dtype": torch.bfloat16, "softcap": 1.5, "bias": window(9).bfloat16()},
    "large heads": {"dtype": torch.bfloat16, "size": 136, "heads": 2, "groups": 1},
}


@pytest.mark.parametrize("case", LAYERS)
def test_the_kernel_beside_the_oracle(kernel, case):
    """The keys are two blocks, and so are the queries; the second ones are not full."""
    # What a layer before may have left.
    source, before = handed_over(**LAYERS[case]), -3.5
    maximum = torch.full((TEXTS, 66, 66), before)
    kernel.update_running_max(source, slice(1, 67), slice(3, 69), maximum)
    expected = written_out(source).amax(dim=1)[:, 3:69, 1:67].mT.clamp(min=before)
    asked = torch.arange(3, 69) >= torch.arange(1, 67)[:, None]
    assert (expected[:, asked] > before).float().mean() > 0.2
    torch.testing.assert_close(maximum[:, asked].double(), expected[:, asked], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65])
def test_lengths_around_those_of_blocks(length, kernel):
    """Nothing beside the rectangle is written: a part of a larger tensor would show it."""
    source = handed_over(heads=2, groups=1, size=8)
    around = torch.full((TEXTS, length + 3, length + 5), -9.0)
    maximum = around[:, :length, :length].fill_(-math.inf)
    whole = slice(0, length)
    kernel.update_running_max(source, whole, whole, maximum)
    expected = written_out(source).amax(dim=1)[:, whole, whole].mT
    asked = torch.ones(length, length).triu().bool()
    torch.testing.assert_close(maximum[:, asked].double(), expected[:, asked], rtol=0, atol=5e-6)
    maximum.fill_(-9)
    assert (around == -9).all()


def test_layers_that_it_cannot_take_are_taken_otherwise(used):
    """In float64, or with gradients: in one model beside those that it takes."""
    source = handed_over()
    assert fold_kernel(replace(source, backward=source)) is None
    assert fold_kernel(replace(source, query=source.query.double(), key=source.key.double())) is None
    square = slice(0, 30)
    watch(RunningMaximum(square, square), source)
    assert not used, "not with gradients"
    observer = RunningMaximum(square, square)
    with torch.no_grad():
        watch(observer, source)
        watch(observer, source)
    expected = written_out(source).amax(dim=1)[:, :30, :30].mT
    seen = expected > -math.inf
    torch.testing.assert_close(observer.maximum[seen].double(), expected[seen], rtol=0, atol=1e-5)
    assert len(used) == 2


KIND = FoldKind(CPU, torch.float32, 4, 2, 8, False, None)
BIASED = KIND._replace(softcap=True, bias=(torch.float32, False))


def slightly_wrong(*args):
    """In one entry, by less than TF32 would be."""
    update_running_max(*args)
    args[3][-1, -1, -1] += 1e-4


def forgetful(*args):
    """In the entries that the layer before leaves as they are."""
    update_running_max(*args[:3], args[3].fill_(-math.inf))


failing = raising(OSError("no C compiler"))


@pytest.mark.filterwarnings("error")
class TestTrust:
    """With torch's operations in the kernel's place."""

    @pytest.fixture
    def as_kernel(self, monkeypatch):
        """``as_kernel(fold)``: it stands in the kernel's place, on a CPU too."""
        monkeypatch.setattr(kernels, "_ROWS", 2)
        monkeypatch.setattr(kernels, "_FOLD_DEVICES", {"cpu"})
        return lambda fold: monkeypatch.setitem(sys.modules, TRITON_KERNEL, SimpleNamespace(update_running_max=fold))

    @pytest.mark.parametrize("kind", [KIND, BIASED, KIND._replace(bias=(torch.bfloat16, True))])
    @pytest.mark.parametrize("rounded", [False, True])
    def test_one_that_is_right(self, kind, rounded, as_kernel):
        as_kernel(update_running_max)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rounded):
            assert trusted_fold(kind) is update_running_max

    @pytest.mark.parametrize("kind", [KIND, KIND._replace(dtype=torch.bfloat16)])
    @pytest.mark.parametrize("fold", [slightly_wrong, forgetful, failing])
    def test_one_that_is_wrong_is_told_once(self, kind, fold, as_kernel):
        as_kernel(fold)
        said = "it fails with OSError: no C compiler" if fold is failing else "it gives other numbers"
        with pytest.warns(UserWarning, match=f"is not used on cpu, because {said}"):
            assert trusted_fold(kind) is None
        assert trusted_fold(kind) is None, "without another warning"

    def test_a_full_gpu_says_nothing_about_the_kernel_which_is_tried_once_for_each_kind_of_layer(self, as_kernel):
        """At the first batch there may be no memory for the trial, and at the next one there is."""
        tried = []

        def fold(*args):
            tried.append(args)
            if len(tried) == 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            update_running_max(*args)

        as_kernel(fold)
        assert fold_kernel(handed_over()) is None
        for source in (handed_over(), handed_over(seed=1)):
            assert fold_kernel(source) is fold
        once = len(tried) - 1
        fold_kernel(handed_over(softcap=2.0))
        assert len(tried) - 1 == 2 * once > 0

    def test_without_triton_there_is_none_and_no_warning(self, monkeypatch):
        monkeypatch.delitem(sys.modules, TRITON_KERNEL, raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
        assert trusted_fold(KIND) is None
