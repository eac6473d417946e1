"""Which kernels are trusted; and what an accelerator's way launches.

There each operation is a launch of its own. That way is taken on a CPU here, and the operations are counted as torch
dispatches them. That no number is asked for, test_methods.py holds for every module.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from st_reba.lm.attention import kernels, weights
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.attention.weights import LayerWeights


@pytest.fixture
def candidates(monkeypatch):
    """``candidates(kernels)``: those that are tried on a CPU from here on."""
    kernels.trusted_kernel.cache_clear()

    def put(*tried):
        kernels.trusted_kernel.cache_clear()
        monkeypatch.setitem(kernels._CANDIDATES, "cpu", tried)

    yield put
    kernels.trusted_kernel.cache_clear()


def trusted(dtype=torch.float32, with_bias=False, groups=2):
    return kernels.trusted_kernel("cpu", dtype, 16, groups, with_bias)


def wrong(*args):
    output, lse = kernels.explicit_attention(*args)
    return output, lse + 1


def missing(*args):
    raise AttributeError("no such operator")


def full(*args):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def without_bias(query, key, value, bias, causal, scale):
    """As those of CUDA are."""
    return kernels.explicit_attention(query, key, value, None, causal, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_private_cpu_kernel_is_there_and_right(dtype, with_bias, candidates):
    """Guards the private operator: without it everything still works, slower."""
    assert trusted(dtype, with_bias) is kernels._cpu_flash
    candidates(without_bias, kernels._cpu_flash)
    assert trusted(dtype, with_bias) is (kernels._cpu_flash if with_bias else without_bias)


@pytest.mark.parametrize("kernel", [wrong, missing, kernels._varlen])
def test_a_kernel_that_is_wrong_is_not_used(kernel, candidates):
    """Nor one that does not run here; and a device that has none takes the plain way."""
    candidates(kernel)
    assert trusted() is kernels.explicit_attention
    candidates(kernel, kernels._cpu_flash)
    assert trusted() is kernels._cpu_flash
    assert kernels.trusted_kernel("meta", torch.float32, 16, 1, False) is kernels.explicit_attention


def test_a_full_gpu_says_nothing_about_a_kernel(candidates):
    candidates(full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trusted()


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_the_public_kernel_is_given_texts_in_a_row(causal, groups, heads_first, monkeypatch):
    """It runs on CUDA alone; here the formula takes its place, and which way its log-sum-exp lies is left open."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch is too old to have it")
    if groups > 1 and "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("torch is too old to have it for heads that share keys")
    query, key, value = (torch.randn(3, heads, 9, 8) for heads in (2 * groups, 2, 2))
    scale, batch = 0.3, len(query)

    def in_a_row(query, key, value, ends, ends_of_keys, longest, longest_key, **given):
        called = inspect.signature(given_signature).bind(query, key, value, ends, ends_of_keys, 9, 9, **given)
        assert called.arguments.get("enable_gqa", False) is (groups > 1)
        assert called.arguments["window_size"] == ((-1, 0) if causal else (-1, -1))
        assert ends.tolist() == list(range(0, 9 * batch + 1, 9))
        cut = [states.unflatten(0, (batch, 9)).transpose(1, 2) for states in (query, key, value)]
        output, lse = kernels.explicit_attention(*cut, None, causal, given["scale"])
        lse = lse.transpose(1, 2).flatten(0, 1)
        return output.transpose(1, 2).flatten(0, 1), lse.mT if heads_first else lse

    given_signature = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", in_a_row)
    expected, expected_lse = kernels.explicit_attention(query, key, value, None, causal, scale)
    output, lse = kernels._varlen(query, key, value, None, causal, scale)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_the_signatures_of_the_private_operators():
    """The CUDA kernel cannot run everywhere the tests do; what it is called with can be compared everywhere."""
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)
    assert schema.startswith(
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp,"
    )


#: What launches nothing: memory is reserved.
FREE = ("empty", "new_empty", "detach", "_unsafe_view", "promote_types")
TEXTS, HEADS, GROUPS, LENGTH, SIZE = 3, 8, 2, 40, 16


class Launches(TorchDispatchMode):
    """Notes every operation that does something on the device: no views, no reserved memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns)
        name = func.overloadpacket.__name__
        if not views and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launched(observer, dtype, monkeypatch, softcap=None, bias=None):
    """By the second layer that is seen: the first reserves the result. A layer is as Llama's attention hands it over:
    queries of one token lie side by side in memory."""
    monkeypatch.setattr(weights, "_SCRATCH_BYTES", {})
    query, key = (torch.randn(TEXTS, LENGTH, count, SIZE).to(dtype).transpose(1, 2) for count in (HEADS, GROUPS))
    source = LayerWeights(0, query, key, torch.randn(TEXTS, HEADS, LENGTH), SIZE**-0.5, bias, softcap)
    # In inference_mode, "to" and "contiguous" are not told from views.
    with torch.no_grad():
        observer.observe(source)
        with Launches() as launches:
            observer.observe(source)
    return launches.names


LAST, BLOCK = torch.tensor([11, 5, 19]), slice(3, 35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("keys", "block", "given", "most"),
    [
        (LAST, 128, {}, 7),
        (BLOCK, 16, {}, 2 * 6),
        (BLOCK, 128, {"softcap": 2.0, "bias": torch.randn(1, HEADS, LENGTH, LENGTH)}, 11),
    ],
)
def test_launches_of_a_layer_are_few(dtype, keys, block, given, most, monkeypatch):
    """For the last token, and for the mean, a block of keys; soft caps and biases add no loop."""
    monkeypatch.setattr(weights, "_KEY_BLOCK", block)
    names = launched(RunningMaximum(keys, slice(3, LENGTH)), dtype, monkeypatch, **given)
    assert len(names) <= most, names
