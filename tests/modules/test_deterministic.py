"""deterministic=True: the same to the bit, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import (
    CausalTransformer,
    ContrastivePromptingModule,
    EchoModule,
    MetaEOLModule,
    PartwiseWhitening,
    ReBAModule,
    RefinedThoughtModule,
    WhiteningTransform,
)

from ..backbones import DEMO_MODEL
from ..conftest import long, paired, pipeline

TEXTS = ["a", "The cat sat on the mat.", "我爱自然语言处理。", "", "one two three four five six " * 3, "x" * 20]
RECIPES = {
    "classical": (CausalTransformer, {}),
    "bidirectional": (CausalTransformer, {"bidirectional_layers": 2}),
    "prompteol": (CausalTransformer, {"template": "prompteol", "rows": "last"}),
    "echo-2": (EchoModule, {}),
    "reba-2": (ReBAModule, {}),
    "reba-2 chunks": (ReBAModule, {"chunk_length": 8}),
    "reba-2 last": (ReBAModule, {"rows": "last"}),
    "contrastive prompting": (ContrastivePromptingModule, {}),
    "refined thought": (RefinedThoughtModule, {"iterations": 3}),
    "metaeol": (MetaEOLModule, {"templates": ["{text} is", "in a word, {text}:"]}),
}
#: Others stand for these: rows of the last token, and copies, are read in the same way as all tokens are.
FURTHER = ("prompteol", "echo-2", "classical", "reba-2", "reba-2 last")
EACH_MODULE = [long(recipe) if recipe in FURTHER else recipe for recipe in RECIPES]


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    path = tmp_path_factory.mktemp("shortened")
    CausalTransformer(str(DEMO_MODEL), output_layer=2).save(str(path))
    return {
        # A few layers of it round as all do.
        dtype: CausalTransformer(str(path), model_kwargs={"dtype": dtype})
        for dtype in ("float32", "bfloat16")
    }


def followed(module, *behind) -> SentenceTransformer:
    last = getattr(module, "rows", "all") == "last" or isinstance(module, RefinedThoughtModule)
    pooling = Pooling(module.get_embedding_dimension(), "lasttoken" if last else ("mean", "lasttoken"))
    return SentenceTransformer(modules=[module, pooling, *behind], device="cpu")


def embedded(model, texts, batch):
    return model.encode(texts, batch_size=batch, convert_to_tensor=True, show_progress_bar=False)


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize(("recipe", "dtype"), paired(EACH_MODULE, ["bfloat16", "float32"]))
def test_every_batch_gives_the_same_bits(recipe, dtype, backbones):
    made, settings = RECIPES[recipe]
    model = followed(made(backbones[dtype], deterministic=True, **settings), Normalize())
    alone = torch.cat([embedded(model, [text], 1) for text in TEXTS])
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    assert torch.equal(embedded(model, TEXTS, len(TEXTS)), alone)
    assert torch.equal(embedded(model, [TEXTS[index] for index in order], 4), alone[order])
    usual = followed(made(backbones[dtype], **settings), Normalize())
    torch.testing.assert_close(embedded(usual, TEXTS, 4).float(), alone.float(), rtol=0, atol=0.05)


@pytest.mark.parametrize(("kind", "dtype"), paired([WhiteningTransform, PartwiseWhitening], ["bfloat16", "float32"]))
def test_what_stands_behind_keeps_to_it(kind, dtype, backbones):
    module = CausalTransformer(backbones[dtype], deterministic=True)
    texts = [f"{word} and {other}" for word in "abcd" for other in "efg"]
    fitted = kind.fit(pipeline(module), texts)
    model = SentenceTransformer(
        modules=[module, Pooling(module.get_embedding_dimension(), "mean"), fitted], device="cpu"
    )
    alone = torch.cat([embedded(model, [text], 1) for text in texts])
    assert torch.equal(embedded(model, texts, len(texts)), alone)


def test_without_it_batches_round(backbones):
    """So that the tests above can fail."""
    model = followed(CausalTransformer(backbones["bfloat16"]))
    alone = torch.cat([embedded(model, [text], 1) for text in TEXTS if text])
    assert not torch.equal(embedded(model, list(filter(None, TEXTS)), 6), alone)


def test_it_is_saved(backbones, tmp_path):
    model = followed(EchoModule(backbones["float32"], deterministic=True))
    model.save_pretrained(str(tmp_path))
    assert SentenceTransformer(str(tmp_path), device="cpu")[0].deterministic is True


def test_it_is_checked(backbones):
    with pytest.raises(ValueError, match="deterministic='yes': use True or False"):
        CausalTransformer(backbones["float32"], deterministic="yes")
