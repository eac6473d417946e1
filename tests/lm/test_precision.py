"""In which dtype things are computed: under autocast, with another default dtype, in float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModel

from st_reba import (
    ContrastivePromptingModule,
    KVReroutingModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
)
from st_reba.lm.attention import kernels

from .. import oracles
from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import pipeline, relative_error

#: What computes with numbers that it makes itself, and what each kind of attention has of its own.
CASES = {
    "reba": ("llama", ReBAModule, {}),
    "reba, soft cap": ("gemma2_softcap", ReBAModule, {}),
    "thought, window": ("mistral_window", RefinedThoughtModule, {"iterations": 4}),
    "kv re-routing": ("gemma2_softcap", KVReroutingModule, {"layers": [0, 1], "prefix_bias": 1.0}),
    "token prepending": ("llama", TokenPrependingModule, {}),
    "contrastive prompting": ("llama", ContrastivePromptingModule, {"contrast_layer": 1}),
}
#: A batch of several lengths.
FEW = [TEXTS[2], TEXTS[1], TEXTS[3]]


@pytest.fixture(scope="module")
def vectors(shared):
    """``vectors(case)``: a model, and what it gives in float32; made once."""
    made = {}

    def get(case):
        if case not in made:
            architecture, module_class, settings = CASES[case]
            model = pipeline(module_class(shared(architecture), **settings))
            made[case] = model, model.encode(FEW)
        return made[case]

    return get


@pytest.fixture(autouse=True)
def no_kernel_is_trusted_yet():
    kernels.trusted_kernel.cache_clear()


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def distance(value, expected) -> float:
    value, expected = (torch.as_tensor(vectors).float() for vectors in (value, expected))
    return float((1 - torch.cosine_similarity(value, expected)).max())


class TestAutocast:
    @pytest.mark.parametrize("case", CASES)
    def test_encoding_is_near(self, case, vectors, shared):
        """Whether the kernels were first tried outside autocast or within it."""
        model, expected = vectors(case)
        architecture, module_class, settings = CASES[case]
        with in_bfloat16():
            # What a backbone can do is tried out when a module is made, and rounding must not change the answer.
            made = pipeline(module_class(shared(architecture), **settings))
        assert relative_error(made.encode(FEW), expected) < 1e-6
        for first_tried in (contextlib.nullcontext, in_bfloat16):
            kernels.trusted_kernel.cache_clear()
            with first_tried():
                model.encode(FEW)
            with in_bfloat16():
                assert distance(model.encode(FEW), expected) < 1e-2
        assert relative_error(model.encode(FEW), expected) < 1e-6

    def test_a_kernel_first_met_under_autocast_is_trusted(self):
        with in_bfloat16():
            found = kernels.trusted_kernel("cpu", torch.bfloat16, 8, 2, False)
        assert found is kernels.trusted_kernel("cpu", torch.bfloat16, 8, 2, True) is kernels._cpu_flash


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(case, dtype, vectors, backbone_path):
    """Neither when a backbone is loaded, nor when a text is read."""
    architecture, module_class, settings = CASES[case]
    try:
        torch.set_default_dtype(dtype)
        found = pipeline(module_class(backbone_path(architecture), **settings)).encode(FEW)
    finally:
        torch.set_default_dtype(torch.float32)
    assert relative_error(found, vectors(case)[1]) < 1e-6


def test_nothing_is_rounded_to_float32_in_a_float64_model(backbone_path, token_ids):
    """Of GPT-2, transformers' own eager attention does not round either."""
    path = backbone_path("gpt2")
    plain = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float64).eval()
    ids = token_ids(TEXTS[0])
    cases = [
        (ReBAModule, lambda: oracles.algorithm_2(plain, ids, 2)),
        (RefinedThoughtModule, lambda: oracles.refined_thought(plain, [*ids, 0], 2)),
    ]
    for module_class, oracle in cases:
        module = module_class(path, model_kwargs={"dtype": torch.float64})
        found, expected = pipeline(module).encode(TEXTS[0], output_value="token_embeddings"), oracle()
        assert expected.dtype == torch.float64
        assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_what_a_batch_changes_is_rounding(dtype, allowed):
    """The README says how much, on trained weights."""
    module = ReBAModule(str(DEMO_MODEL), model_kwargs={"dtype": dtype})
    module.CPU_TOKENS = 2**20
    encode = pipeline(module).encode
    texts = [*TEXTS[1:4], "我爱自然语言处理。 " * 3]
    together = encode(texts, batch_size=len(texts), convert_to_tensor=True).float()
    alone = torch.stack([encode(text, convert_to_tensor=True).float() for text in texts])
    assert ((together - alone).norm(dim=1) / alone.norm(dim=1)).max() < allowed
