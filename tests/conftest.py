from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import st_reba

from . import backbones

T = TypeVar("T")

#: Whether all is to be tried: ``make test-long``.
LONG = os.environ.get("ST_REBA_TESTS") == "long"


def examples(many: int) -> int:
    """How many examples hypothesis draws: a few by default, all in ``make test-long``."""
    return many if LONG else max(3, many // 10)


def first(values: Iterable[T], number: int) -> list[Any]:
    """Parameters of which ``make test`` takes the first few alone, and ``make test-long`` all."""
    return [
        value if index < number else pytest.param(value, marks=pytest.mark.long) for index, value in enumerate(values)
    ]


@pytest.fixture(scope="session")
def backbone_path(tmp_path_factory):
    """``backbone_path(architecture, tokenizer_kind)``: a directory with a tiny model, made once."""
    made = {}

    def path(name: str = "llama", kind: str = "bytes") -> str:
        if (name, kind) not in made:
            directory = tmp_path_factory.mktemp(f"{name}-{kind}")
            made[name, kind] = backbones.save(backbones.backbone(name), directory, kind)
        return made[name, kind]

    return path


@pytest.fixture(scope="session")
def roomy_path(tmp_path_factory):
    """A tiny Llama with room for long prompts."""
    config = backbones.config("llama")
    config.max_position_embeddings = 2048
    torch.manual_seed(0)
    model = backbones.randomize(AutoModel.from_config(config).eval())
    return backbones.save(model, tmp_path_factory.mktemp("roomy"), model_max_length=2048)


@pytest.fixture(scope="session")
def encoder_paths(tmp_path_factory):
    """``encoder_paths(family)``: directories with two tiny encoders of one shape and one tokenizer, made once."""
    made = {}
    # The training of a tokenizer is not the same each time.
    tokenizer = backbones.tokenizer("bert")

    def paths(name: str = "bert", **settings) -> tuple[str, str]:
        key = (name, *sorted(settings.items()))
        if key not in made:
            made[key] = tuple(str(tmp_path_factory.mktemp(f"{name}-tower")) for _ in range(2))
            for seed, path in enumerate(made[key]):
                backbones.encoder(name, seed, **settings).save_pretrained(path)
                tokenizer.save_pretrained(path)
        return made[key]

    return paths


@pytest.fixture(scope="session")
def eager(backbone_path):
    """``eager(architecture)``: the same weights with the architecture's own eager attention, for the oracles."""
    loaded = {}

    def model(name: str = "llama"):
        if name not in loaded:
            path = backbone_path(name)
            loaded[name] = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        return loaded[name]

    return model


@pytest.fixture(scope="session")
def token_ids(backbone_path):
    tokenizer = AutoTokenizer.from_pretrained(backbone_path())
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def pipeline(module, pooling: str = "mean") -> SentenceTransformer:
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), pooling)], device="cpu")


@contextlib.contextmanager
def forward_passes() -> Iterator[list[PreTrainedModel]]:
    """The language models that run in this block, one for each pass."""
    passes: list[PreTrainedModel] = []

    def note(module, args) -> None:
        if isinstance(module, PreTrainedModel):
            passes.append(module)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield passes
    finally:
        hook.remove()


def relative_error(value, expected) -> float:
    value, expected = torch.as_tensor(value), torch.as_tensor(expected)
    assert value.shape == expected.shape
    return float((value - expected).norm() / expected.norm())


#: What a retrieval model is saved with: text in front of queries, and other text in front of documents.
PROMPTS = {"query": "Find what answers: ", "document": "文本："}


@pytest.fixture(scope="session")
def prompted_path(backbone_path, tmp_path_factory):
    """A saved ReBA model with mean pooling and :data:`PROMPTS`: what the programs that embed texts are given."""
    model = pipeline(st_reba.ReBAModule(backbone_path(), repetitions=2))
    model.prompts = dict(PROMPTS)
    directory = tmp_path_factory.mktemp("prompted")
    model.save_pretrained(str(directory))
    return str(directory)
