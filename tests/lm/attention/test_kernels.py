from __future__ import annotations

import inspect

import pytest
import torch

from st_reba.lm.attention import kernels


def naive(query, key, value, bias, causal, scale):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def problem(groups=2, length=9, size=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, heads, length, size, generator=generator) for heads in (2 * groups, 2, 2)]


def window(length=9):
    mask = torch.ones(length, length).tril().triu(-3).log()
    return mask[None, None]


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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_formula(groups, with_bias):
    query, key, value = problem(groups)
    bias = window() if with_bias else None
    expected, expected_lse = naive(query, key, value, bias, not with_bias, 0.3)
    kernel = kernels.trusted_kernel("cpu", query.dtype, query.shape[-1], groups, with_bias)
    for each in (kernel, kernels.explicit_attention):
        output, lse = each(query, key, value, bias, not with_bias, 0.3)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_private_cpu_kernel_is_there_and_right(dtype, with_bias, candidates):
    """Guards the private operator: without it everything still works, slower."""
    assert trusted(dtype, with_bias) is kernels._cpu_flash
    candidates(without_bias, kernels._cpu_flash)
    assert trusted(dtype, with_bias) is (kernels._cpu_flash if with_bias else without_bias)


@pytest.mark.parametrize("kernel", [wrong, missing, kernels._varlen])
def test_a_kernel_that_is_wrong_is_not_used(kernel, candidates):
    """Nor one that does not run here."""
    candidates(kernel)
    assert trusted() is kernels.explicit_attention
    candidates(kernel, kernels._cpu_flash)
    assert trusted() is kernels._cpu_flash


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
    query, key, value = problem(groups)
    scale, batch = 0.3, len(query)

    def in_a_row(query, key, value, ends, ends_of_keys, longest, longest_key, **given):
        called = inspect.signature(given_signature).bind(query, key, value, ends, ends_of_keys, 9, 9, **given)
        assert called.arguments.get("enable_gqa", False) is (groups > 1)
        assert called.arguments["window_size"] == ((-1, 0) if causal else (-1, -1))
        assert ends.tolist() == list(range(0, 9 * batch + 1, 9))
        cut = [states.unflatten(0, (batch, 9)).transpose(1, 2) for states in (query, key, value)]
        output, lse = naive(*cut, None, causal, given["scale"])
        lse = lse.transpose(1, 2).flatten(0, 1)
        return output.transpose(1, 2).flatten(0, 1), lse.mT if heads_first else lse

    given_signature = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", in_a_row)
    expected, expected_lse = naive(query, key, value, None, causal, scale)
    output, lse = kernels._varlen(query, key, value, None, causal, scale)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_an_unknown_device_takes_the_plain_way():
    assert kernels.trusted_kernel("meta", torch.float32, 16, 1, False) is kernels.explicit_attention


def test_the_signatures_of_the_private_operators():
    """The CUDA kernel cannot run everywhere the tests do; what it is called with can be compared everywhere."""
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)
    assert schema.startswith(
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp,"
    )
