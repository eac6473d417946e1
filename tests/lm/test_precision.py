"""In which dtype things are computed: under autocast, with another default dtype, in float64."""

from __future__ import annotations

import ast
import contextlib
import functools
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import AutoModel

import st_reba
from st_reba import CausalTransformer, ReBAModule, RefinedThoughtModule, TwinTower
from st_reba.lm.attention import kernels

from .. import oracles
from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import long, paired, pipeline, relative_error
from ..modules.methods import FURTHER, RECIPES

EOS = 0

#: What each module and each kind of attention has of its own.
CASES = [
    *(long(("llama", recipe)) if recipe in FURTHER else ("llama", recipe) for recipe in RECIPES),
    *((architecture, "reba-2") for architecture in ("gemma2_softcap", "gpt_oss_sinks", "mistral_window", "bloom")),
    ("gemma2_softcap", "kv re-routing"),
    ("mistral_window", "thought-4"),
]
#: What computes with numbers that it makes itself; that those name their dtype, another test reads off the sources.
OF_ITS_OWN = (
    "reba-2", "reba-2 chunks", "thought-4", "metaeol", "kv re-routing", "token prepending", "token prepending, blocks",
    "contrastive prompting",
)  # fmt: skip
MAKERS = [
    case if hasattr(case, "marks") or case[0] != "llama" or case[1] in OF_ITS_OWN else long(case) for case in CASES
]


@pytest.fixture(scope="module")
def module(shared):
    """``module(architecture, recipe)``: in float32, made once."""
    made = {}

    def get(architecture, recipe):
        key = (architecture, recipe)
        if key not in made:
            module_class, arguments = RECIPES[recipe]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*in its own code")
                made[key] = module_class(shared(architecture), **arguments)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def no_kernel_is_trusted_yet():
    kernels.trusted_kernel.cache_clear()


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def distance(value, expected) -> float:
    value, expected = (torch.as_tensor(vectors).float() for vectors in (value, expected))
    return float((1 - torch.cosine_similarity(value, expected)).max())


#: A batch of several lengths.
FEW = [TEXTS[2], TEXTS[1], TEXTS[3]]


class TestAutocast:
    @pytest.mark.parametrize(("case", "trusted_before"), paired(MAKERS, [False, True]))
    def test_encoding_is_near(self, case, trusted_before, module):
        """Whether the kernels were first tried outside autocast or within it."""
        encode = pipeline(module(*case)).encode
        expected = encode(FEW)
        if not trusted_before:
            kernels.trusted_kernel.cache_clear()
        with in_bfloat16():
            found = encode(FEW)
        assert distance(found, expected) < 1e-2
        assert relative_error(encode(FEW), expected) < 1e-6

    def test_a_kernel_first_met_under_autocast_is_trusted(self):
        with in_bfloat16():
            found = kernels.trusted_kernel("cpu", torch.bfloat16, 8, 2, False)
        assert found is kernels.trusted_kernel("cpu", torch.bfloat16, 8, 2, True) is kernels._cpu_flash

    @pytest.mark.parametrize("recipe", ["reba-2", "thought-4", "kv re-routing", long("reba-2 chunks"), long("metaeol")])
    def test_gradients_are_near(self, recipe, backbone_path):
        module_class, arguments = RECIPES[recipe]
        model = pipeline(module_class(backbone_path(), **arguments))
        weight = model[0].model.layers[0].mlp.up_proj.weight

        def gradient():
            weight.grad = None
            vectors = model(model.preprocess(FEW))["sentence_embedding"]
            (vectors.float() @ torch.linspace(-1, 1, vectors.shape[1])).sum().backward()
            return weight.grad.flatten()[None]

        expected = gradient()
        with in_bfloat16():
            found = gradient()
        assert distance(found, expected) < 1e-2

    @pytest.mark.parametrize(("architecture", "recipe"), [("falcon", "reba-2"), ("llama", "thought-2")])
    def test_a_module_made_under_autocast_is_the_same(self, architecture, recipe, module, shared):
        """What a backbone can do is tried out, and rounding must not change the answer."""
        expected = module(architecture, recipe)
        module_class, arguments = RECIPES[recipe]
        with warnings.catch_warnings(), in_bfloat16():
            warnings.filterwarnings("ignore", ".*in its own code")
            made = module_class(shared(architecture), **arguments)
        assert relative_error(pipeline(made).encode(TEXTS), pipeline(expected).encode(TEXTS)) < 1e-6

    def test_twin_tower(self, encoder_paths):
        towers = TwinTower(*encoder_paths())
        encode = pipeline(towers, "cls").encode
        expected = encode(TEXTS)
        with in_bfloat16():
            assert distance(encode(TEXTS), expected) < 1e-2

    def test_the_trainer_evaluates(self, backbone_path, tmp_path):
        """With kernels that were trusted before it began."""
        model = pipeline(ReBAModule(backbone_path()))
        model.encode(TEXTS)
        rows = {"anchor": TEXTS, "positive": [*TEXTS[1:], TEXTS[0]]}
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
            use_cpu=True, bf16=True, disable_tqdm=True, eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        evaluator = EmbeddingSimilarityEvaluator(TEXTS[:3], TEXTS[1:4], [0.1, 0.5, 0.9], write_csv=False)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(rows),
            loss=MultipleNegativesRankingLoss(model),
            evaluator=evaluator,
        )
        trainer.train()
        logged = [entry["step"] for entry in trainer.state.log_history if "eval_spearman_cosine" in entry]
        assert logged == [1, 2]


@contextlib.contextmanager
def by_default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def loaded_under(backbone_path):
    """``loaded_under(dtype, architecture)``: a backbone that was loaded when that was the default, once."""

    @functools.cache
    def loaded(dtype, architecture):
        with by_default(dtype):
            return CausalTransformer(backbone_path(architecture))

    return loaded


@pytest.mark.parametrize(("case", "dtype"), paired(MAKERS, [torch.bfloat16, torch.float64]))
@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_the_default_dtype_changes_nothing(case, dtype, module, loaded_under):
    architecture, recipe = case
    expected = pipeline(module(architecture, recipe)).encode(FEW)
    module_class, arguments = RECIPES[recipe]
    kernels.trusted_kernel.cache_clear()
    with by_default(dtype):
        found = pipeline(module_class(loaded_under(dtype, architecture), **arguments)).encode(FEW)
    assert relative_error(found, expected) < 1e-6


def test_new_tensors_name_their_dtype():
    """Of functions whose result would have the default dtype."""
    factories = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
    package = Path(st_reba.__file__).parent
    silent = [
        f"{path.relative_to(package)}, line {call.lineno}: {ast.unparse(call)}"
        for path in package.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in factories
        and ast.unparse(call.func) == f"torch.{call.func.attr}"
        and "dtype" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not silent


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_nothing_is_rounded_to_float32_in_a_float64_model(architecture, backbone_path, token_ids):
    """Of these two, transformers' own eager attention does not round either."""
    path = backbone_path(architecture)
    reference = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float64).eval()
    settings = {"model_kwargs": {"dtype": torch.float64}}
    cases = [
        (ReBAModule(path, **settings), lambda ids: oracles.algorithm_2(reference, ids, 2)),
        (ReBAModule(path, chunk_length=6, **settings), lambda ids: oracles.chunked(reference, ids, 2, 6)),
    ]
    if architecture == "gpt2":
        cases += [
            (RefinedThoughtModule(path, **settings), lambda ids: oracles.refined_thought(reference, [*ids, EOS], 2)),
        ]
    for module, oracle in cases:
        encode = pipeline(module).encode
        for text in TEXTS[:1]:
            expected = oracle(token_ids(text))
            assert expected.dtype == torch.float64
            assert relative_error(encode(text, output_value="token_embeddings"), expected) < 1e-12


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_what_a_batch_changes_is_rounding(dtype, allowed):
    """The README says how much, on trained weights."""
    module = ReBAModule(str(DEMO_MODEL), model_kwargs={"dtype": dtype})
    module.CPU_TOKENS = 2**20
    encode = pipeline(module).encode
    texts = [*TEXTS[1:4], "我爱自然语言处理。 " * 3]
    together = encode(texts, batch_size=len(texts), convert_to_tensor=True).float()
    alone = torch.stack([encode(text, convert_to_tensor=True).float() for text in texts])
    found = ((together - alone).norm(dim=1) / alone.norm(dim=1)).max()
    assert found < allowed
