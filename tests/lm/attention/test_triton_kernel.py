"""The Triton kernel in Triton's interpreter, on a CPU; that it compiles for GPUs; and that nothing needs it."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from st_reba.lm.attention import kernels, weights
from st_reba.lm.attention.kernels import FoldKind, fold_kernel, trusted_fold
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.attention.weights import LayerWeights

CPU = torch.device("cpu")
TRITON_KERNEL = "st_reba.lm.attention.triton_kernel"
TEXTS, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 70, 24


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
        kernel.fold(*args)

    monkeypatch.setattr(kernels, "_FOLD_DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "trusted_fold", lambda kind: fold)
    return runs


def layer(dtype=torch.float32, heads=HEADS, groups=GROUPS, size=SIZE, softcap=None, bias=None, seed=0):
    """A layer as an architecture hands it over, with the log-sum-exp of attention written out in float64."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randn(TEXTS, LENGTH, count, size, generator=generator).to(dtype).transpose(1, 2)
        for count in (heads, groups)
    )
    source = LayerWeights(0, query, key, torch.zeros(TEXTS, heads, LENGTH), size**-0.5, bias, softcap)
    lse = written_out(source).logsumexp(-1)
    return LayerWeights(0, query, key, lse.float(), size**-0.5, bias, softcap)


def written_out(source):
    """The oracle: log weights (B, H, queries, keys), causal, one operation after the other, in float64."""
    key = source.key.double().repeat_interleave(source.query.shape[1] // source.key.shape[1], dim=1)
    scores = source.query.double() @ key.mT * source.scale
    if source.softcap is not None:
        scores = source.softcap * torch.tanh(scores / source.softcap)
    if source.bias is not None:
        scores = scores + source.bias.double()
    scores = scores - source.log_sum_exp.double()[..., None]
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)


def window(size, heads=1):
    """A sliding window, for some heads another."""
    one = [torch.ones(LENGTH, LENGTH).tril().triu(1 - size - head).log() for head in range(heads)]
    return torch.stack(one)[None]


def biases(texts, heads):
    return torch.linspace(-3, 3, texts * heads * LENGTH**2).view(texts, heads, LENGTH, LENGTH)


LAYERS = {
    "grouped queries": {},
    "one head for all": {"heads": 3, "groups": 1, "size": 16},
    "a bias for each head, in bfloat16": {"bias": biases(1, HEADS).bfloat16()},
    "a bias for each text": {"bias": biases(TEXTS, 1)},
    "a soft cap in a window": {"softcap": 1.5, "bias": window(9, HEADS)},
    "bfloat16 with a soft cap in a window": {"dtype": torch.bfloat16, "softcap": 1.5, "bias": window(9).bfloat16()},
    "large heads": {"dtype": torch.bfloat16, "size": 136, "heads": 2, "groups": 1},
}


@pytest.mark.parametrize("case", LAYERS)
class TestBesideTheOracle:
    """Of the kernel alone. The keys are two blocks, and so are the queries; the second ones are not full."""

    KEYS, QUERIES = slice(1, 67), slice(3, 69)
    #: What a layer before may have left.
    BEFORE = -3.5

    def test_a_rectangle(self, kernel, case):
        source = layer(**LAYERS[case])
        maximum = torch.full((TEXTS, 66, 66), self.BEFORE)
        kernel.fold(source, self.KEYS, self.QUERIES, maximum)
        expected = written_out(source).amax(dim=1)[:, self.QUERIES, self.KEYS].mT.clamp(min=self.BEFORE)
        asked = torch.arange(3, 69) >= torch.arange(1, 67)[:, None]
        assert (expected[:, asked] > self.BEFORE).float().mean() > 0.2
        torch.testing.assert_close(maximum[:, asked].double(), expected[:, asked], rtol=0, atol=1e-5)

    def test_one_key_a_text(self, kernel, case):
        keys = torch.tensor([60, 4])
        maximum = torch.full((TEXTS, 1, 66), self.BEFORE)
        source = layer(**LAYERS[case])
        kernel.fold(source.at_keys(keys), slice(0, 1), self.QUERIES, maximum)
        for text, key in enumerate(keys):
            expected = written_out(source)[text, :, key:69, key].amax(dim=0).clamp(min=self.BEFORE)
            torch.testing.assert_close(maximum[text, 0, key - 3 :].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65])
def test_lengths_around_those_of_blocks(length, kernel):
    """Nothing beside the rectangle is written: a part of a larger tensor would show it."""
    source = layer(heads=2, groups=1, size=8)
    around = torch.full((TEXTS, length + 3, length + 5), -9.0)
    maximum = around[:, :length, :length].fill_(-math.inf)
    whole = slice(0, length)
    kernel.fold(source, whole, whole, maximum)
    expected = written_out(source).amax(dim=1)[:, whole, whole].mT
    asked = torch.ones(length, length).triu().bool()
    torch.testing.assert_close(maximum[:, asked].double(), expected[:, asked], rtol=0, atol=5e-6)
    maximum.fill_(-9)
    assert (around == -9).all()


def test_a_query_that_sees_nothing_has_no_weights(kernel):
    """Its log-sum-exp is -inf; torch's operations give NaN, and so does the kernel."""
    bias = window(9)
    bias[..., 20, :] = -math.inf
    found = torch.full((TEXTS, 30, 40), -math.inf)
    kernel.fold(layer(bias=bias), slice(0, 30), slice(0, 40), found)
    assert found[:, :, 20].isnan().all()
    assert not found[:, :, torch.arange(40) != 20].isnan().any()


def test_layers_that_it_cannot_take_are_taken_otherwise(used):
    """In float64, or with gradients: in one model beside those that it takes."""
    source = layer()
    assert fold_kernel(replace(source, backward=source)) is None
    assert fold_kernel(replace(source, query=source.query.double(), key=source.key.double())) is None
    for keys in (slice(0, 30), torch.tensor([20, 11])):
        observer, gradients = RunningMaximum(keys, slice(0, 30)), RunningMaximum(keys, slice(0, 30))
        gradients.observe(source)
        with torch.no_grad():
            for each in (source, source):
                observer.observe(each)
        expected = written_out(source).amax(dim=1)[:, :30].mT
        expected = expected[:, :30] if isinstance(keys, slice) else expected[torch.arange(2), keys, None]
        seen = expected > -math.inf
        torch.testing.assert_close(observer.result()[seen].double(), expected[seen], rtol=0, atol=1e-5)
    assert len(used) == 4


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_gpus_that_are_not_here(dtype, capability, kernel, monkeypatch, tmp_path):
    """Down to the machine's code, which has a place for all it holds."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = triton.JITFunction(kernel._kernel.fn, do_not_specialize=kernel._OF_LENGTHS)
    settings = {"groups": 8, "sharing": 4, "head_size": 64, "width": 64, "keys_are_positions": True}
    block = 64 if dtype != "fp32" else 32
    constants = {**settings, "key_block": block, "query_block": block, "bias": None}
    pointers = {"query": f"*{dtype}", "key": f"*{dtype}", "lse": "*fp32", "maximum": "*fp32"}
    kinds = {**dict.fromkeys(constants, "constexpr"), **pointers, "scale": "fp32", "softcap": "fp32"}
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in pointers or (signature[name] == "i32" and name not in kernel._OF_LENGTHS)
    }
    compiled = triton.compile(
        ASTSource(function, signature, constants, divisible), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8, "num_stages": 2},
    )  # fmt: skip
    assert compiled.asm["cubin"]
    # Half precision on the units made for it; float32 as it is.
    assert ("mma" in compiled.asm["ptx"]) == (dtype != "fp32")
    assert "tf32" not in compiled.asm["ptx"]
    # What a consumer's GPU has.
    assert compiled.metadata.shared <= 99 * 1024


KIND = FoldKind(CPU, torch.float32, 4, 2, 8, False, None, True)
OF_A_KEY = KIND._replace(keys_are_positions=False)
BIASED = KIND._replace(softcap=True, bias=(torch.float32, False))


def slightly_wrong(*args):
    """In one entry, by less than TF32 would be."""
    weights.fold(*args)
    args[3][-1, -1, -1] += 1e-4


def forgetful(*args):
    """In the entries that the layer before leaves as they are."""
    weights.fold(*args[:3], args[3].fill_(-math.inf))


def failing(*args):
    raise OSError("no C compiler")


class TestTrust:
    """With torch's operations in the kernel's place."""

    @pytest.fixture
    def as_kernel(self, monkeypatch):
        """``as_kernel(fold)``: it stands in the kernel's place, on a CPU too."""
        monkeypatch.setattr(kernels, "_TEXTS", 2)
        monkeypatch.setattr(kernels, "_FOLD_DEVICES", {"cpu"})
        return lambda fold: monkeypatch.setitem(sys.modules, TRITON_KERNEL, SimpleNamespace(fold=fold))

    @pytest.mark.parametrize("kind", [KIND, BIASED, OF_A_KEY._replace(bias=(torch.bfloat16, True))])
    @pytest.mark.parametrize("rounded", [False, True])
    def test_one_that_is_right(self, kind, rounded, as_kernel):
        as_kernel(weights.fold)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rounded):
            assert trusted_fold(kind) is weights.fold

    @pytest.mark.parametrize("kind", [KIND, OF_A_KEY, KIND._replace(dtype=torch.bfloat16)])
    @pytest.mark.parametrize("fold", [slightly_wrong, forgetful, failing])
    def test_one_that_is_wrong_is_told_once(self, kind, fold, as_kernel):
        as_kernel(fold)
        said = "it fails with OSError: no C compiler" if fold is failing else "it gives other numbers"
        with pytest.warns(UserWarning, match=f"is not used on cpu, because {said}"):
            assert trusted_fold(kind) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trusted_fold(kind) is None

    def test_a_full_gpu_says_nothing_about_the_kernel_which_is_tried_once_for_each_kind_of_layer(self, as_kernel):
        """At the first batch there may be no memory for the trial, and at the next one there is."""
        tried = []

        def fold(*args):
            tried.append(args)
            if len(tried) == 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            weights.fold(*args)

        as_kernel(fold)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fold_kernel(layer()) is None
            for source in (layer(), layer(seed=1)):
                assert fold_kernel(source) is fold
        once = len(tried) - 1
        fold_kernel(layer(softcap=2.0))
        assert len(tried) - 1 == 2 * once > 0

    def test_without_triton_there_is_none_and_no_warning(self, monkeypatch):
        monkeypatch.delitem(sys.modules, TRITON_KERNEL, raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trusted_fold(KIND) is None
