"""On an accelerator each operation is a launch of its own, and asking for a number makes the host wait.

The accelerator's way is taken on a CPU here, and the operations are counted as torch dispatches them.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.lm.attention import observers, weights
from st_reba.lm.attention.observers import RunningMaximum
from st_reba.lm.attention.weights import LayerWeights

#: What makes the host wait for a number.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
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


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(weights, "_SCRATCH_BYTES", {})


def layer(dtype, softcap=None, bias=None):
    """A layer as Llama's attention hands it over: queries of one token lie side by side in memory."""
    query = torch.randn(TEXTS, LENGTH, HEADS, SIZE).to(dtype).transpose(1, 2)
    key = torch.randn(TEXTS, LENGTH, GROUPS, SIZE).to(dtype).transpose(1, 2)
    lse = torch.randn(TEXTS, HEADS, LENGTH)
    return LayerWeights(0, query, key, lse, SIZE**-0.5, bias, softcap)


def launched(observer, source):
    """By the second layer that is seen: the first reserves the result."""
    # In inference_mode, "to" and "contiguous" are not told from views.
    with torch.no_grad():
        observer.observe(source)
        with Launches() as launches:
            observer.observe(source)
    return launches.names


ONE, EACH_HEAD = torch.randn(1, 1, LENGTH, LENGTH), torch.randn(1, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("is_last", "block", "given", "most"),
    [
        (True, 128, {}, 7),
        (False, 128, {}, 6),
        (False, 16, {}, 2 * 6),
        (False, 128, {"softcap": 2.0, "bias": ONE}, 11),
        (False, 128, {"softcap": 2.0, "bias": EACH_HEAD}, 11),
    ],
)
def test_launches_of_a_layer_are_few(dtype, is_last, block, given, most, monkeypatch):
    """For the last token, and for the mean, a block of keys; soft caps and biases add no loop."""
    monkeypatch.setattr(weights, "_KEY_BLOCK", block)
    keys = torch.tensor([11, 5, 19]) if is_last else slice(3, 35)
    names = launched(RunningMaximum(keys, slice(3, LENGTH)), layer(dtype, **given))
    assert len(names) <= most, names


def test_a_fused_kernel_is_launched_alone(monkeypatch):
    """For the last token, its key is gathered before."""
    runs = []
    monkeypatch.setattr(observers, "fold_kernel", lambda *args: lambda *args: runs.append(args))
    assert launched(RunningMaximum(slice(3, 35), slice(3, LENGTH)), layer(torch.bfloat16)) == []
    assert launched(RunningMaximum(torch.tensor([11, 5, 19]), slice(3, LENGTH)), layer(torch.bfloat16)) == ["gather"]
    assert len(runs) == 4


@pytest.fixture(scope="module")
def backbone(backbone_path):
    return CausalTransformer(backbone_path())


class NoWaiting(TorchDispatchMode):
    """Refuses what a host would have to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        assert name not in WAITING, name
        assert not by_mask, f"{name} by a boolean mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (CausalTransformer, {"rows": "last"}),
        (CausalTransformer, {"bidirectional_layers": 2}),
        (EchoModule, {"rows": "last"}),
        (EchoModule, {"pool_over": "all"}),
        (ReBAModule, {"rows": "last"}),
        (ReBAModule, {}),
        (ReBAModule, {"normalize_weights": True, "bidirectional_layers": 1}),
    ],
)
def test_the_host_does_not_wait_while_the_language_model_runs(made, settings, backbone):
    module = made(backbone, **settings).eval()
    features = module.preprocess(["one text", "and a longer one, with padding beside it"])
    ran = []

    def enter(layer, args):
        ran.append(NoWaiting())
        ran[-1].__enter__()

    def leave(norm, args, output):
        ran[-1].__exit__(None, None, None)

    hooks = [
        module.model.layers[0].register_forward_pre_hook(enter), module.model.norm.register_forward_hook(leave)
    ]  # fmt: skip
    with torch.no_grad():
        module(features)
    for hook in hooks:
        hook.remove()
    assert ran
