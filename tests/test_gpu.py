"""Tests that a GPU gives the results of a CPU, on machines with one: ``pytest tests/test_gpu.py``."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba.lm.attention import kernels

from .backbones import ARCHITECTURES, DEMO_MODEL, OWN_ATTENTION, TEXTS
from .conftest import relative_error
from .modules.methods import RECIPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

#: Of float32, relative. Products are summed in another order there, and refined thought multiplies rounding.
TOLERANCE = 2e-5
SENTENCES = ["The cat sat on the mat.", "我爱自然语言处理。", "a", "The quick brown fox jumps over the lazy dog. " * 3]
HALF = ("classical", "echo-2", "reba-2", "reba-3 last", "thought-2")


@pytest.fixture(scope="module", autouse=True)
def products_of_float32_are_of_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on(device: str, recipe: str, path: str, dtype: str = "float32") -> SentenceTransformer:
    module_class, settings = RECIPES[recipe]
    module = module_class(path, **settings, model_kwargs={"dtype": dtype})
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device=device)


def embedded(model: SentenceTransformer, texts: list[str], batch_size: int = 32) -> torch.Tensor:
    return model.encode(texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False).cpu()


ON_GPU = [
    *(("reba-2", name) for name in ARCHITECTURES if name not in OWN_ATTENTION),
    *((recipe, name) for recipe in RECIPES for name in ("llama", "gpt2")),
]


@pytest.mark.parametrize(("recipe", "name"), ON_GPU)
def test_equals_the_cpu(recipe, name, backbone_path):
    path = backbone_path(name)
    found, expected = (embedded(on(device, recipe, path), TEXTS) for device in ("cuda", "cpu"))
    assert relative_error(found, expected) < 10 * TOLERANCE


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_is_its_texts_and_moves_back(recipe):
    """Use the demo LM, whose trained weights do not amplify rounding."""
    model = on("cuda", recipe, str(DEMO_MODEL))
    there = embedded(model, SENTENCES)
    assert relative_error(there, embedded(model, SENTENCES, 1)) < TOLERANCE
    assert relative_error(there, embedded(model.to("cpu"), SENTENCES)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", HALF)
def test_half_precision_is_near(recipe, dtype):
    expected = embedded(on("cpu", recipe, str(DEMO_MODEL)), SENTENCES)
    found = embedded(on("cuda", recipe, str(DEMO_MODEL), dtype), SENTENCES)
    assert torch.cosine_similarity(found.float(), expected).min() > 0.995


def test_half_precision_has_a_kernel_that_tells_its_sums():
    """Check that the fused kernel is trusted; otherwise each layer's scores are computed twice."""
    for dtype in (torch.bfloat16, torch.float16):
        for size, groups in ((64, 1), (64, 4), (128, 1)):
            assert kernels.trusted_kernel("cuda", dtype, size, groups, False) is not kernels.explicit_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "size"), [(32, 8, 64), (32, 32, 128), (9, 3, 64), (4, 1, 256)])
@pytest.mark.parametrize("bias", [None, (torch.float32, False)], ids=["", "bias"])
def test_the_triton_kernel_is_right(dtype, heads, groups, size, bias):
    pytest.importorskip("triton")
    device = torch.device("cuda", 0)
    kind = kernels.FoldKind(device, dtype, heads, groups, size, False, bias)
    assert kernels.trusted_fold(kind) is not None
