"""What makes a module's layouts is made once, and a batch of texts is tokenised in at most two calls."""

from __future__ import annotations

import pickle

import pytest
import torch
from tokenizers import processors

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.text.builder import LayoutBuilder

from .. import backbones
from ..backbones import TEXTS
from ..conftest import long, paired

MODULES = {
    "classical": CausalTransformer,
    "a prompt": lambda path: CausalTransformer(path, template="prompteol"),
    "pieces": lambda path: CausalTransformer(path, template="prompteol", tokenization="pieces"),
    "bag": InputEmbeddings,
    "echo": EchoModule,
    "springer": lambda path: EchoModule(path, template="springer", pool_over="all"),
    "reba": ReBAModule,
    "chunks": lambda path: ReBAModule(path, chunk_length=4),
    "both ways": BidirectionalLastLayer,
    "kv re-routing": KVReroutingModule,
    "refined thought": RefinedThoughtModule,
    "values": ValueAggregationModule,
    "early and late": EarlyLateModule,
    "layer states": LayerStates,
    "token prepending": TokenPrependingModule,
    "prepending in blocks": HierarchicalTokenPrependingModule,
    "contrastive prompting": ContrastivePromptingModule,
    "meta-eol": MetaEOLModule,
}


@pytest.fixture
def calls(monkeypatch):
    """The strings of each call of a tokenizer."""
    seen = []
    kind = type(backbones.tokenizer("bytes"))
    original = kind.__call__

    def counted(self, text, *args, **kwargs):
        seen.append(text)
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    return seen


#: Of which others stand for how their layouts are made.
FURTHER = ("springer", "both ways", "bag")


@pytest.fixture(scope="module")
def roomy(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize("kind", [long(kind) if kind in FURTHER else kind for kind in MODULES])
def test_a_batch_is_tokenised_in_two_calls(kind, roomy, calls, monkeypatch):
    module = MODULES[kind](roomy)
    made = []
    original = LayoutBuilder.__init__
    monkeypatch.setattr(LayoutBuilder, "__init__", lambda self, *a, **kw: made.append(1) or original(self, *a, **kw))
    for prompt in (None, "query: "):
        # A prompt is tokenised on its own when it first comes.
        module.preprocess(["a"], prompt=prompt)
        for texts in (TEXTS, ["", *TEXTS]) if prompt is None else (TEXTS, ["one", "word " * 1_500]):
            calls.clear()
            module.preprocess(texts, prompt=prompt)
            assert 1 <= len(calls) <= 2
        features = module.preprocess(TEXTS, prompt=prompt)
        calls.clear()
        with torch.inference_mode():
            module(features)
        assert not calls
    assert not made


def eos(module):
    module.tokenizer.eos_token = "c"


def ends(module):
    module.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 0)]
    )


def another(module):
    module.processor = backbones.tokenizer("bert")


def entry(module):
    module.tokenizer.add_tokens(["cat"])


def length(module):
    module.max_seq_length = 3


def pieces(module):
    module.tokenization = "pieces"


@pytest.mark.parametrize(
    ("change", "kind"),
    paired(
        [eos, ends, another, entry, length, pieces],
        ["refined thought", "classical", "both ways", "meta-eol", "prepending in blocks"],
    ),
)
def test_they_are_made_again_where_something_has_changed(kind, change, roomy_path):
    module = MODULES[kind](roomy_path)
    module.preprocess(TEXTS)
    change(module)
    found = module.preprocess(TEXTS)
    module._made = None
    expected = module.preprocess(TEXTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_settings_of_the_layout_are_among_what_may_change(roomy_path):
    module = HierarchicalTokenPrependingModule(roomy_path, whole_sentences=False)
    assert (module.preprocess(["cat " * 60])["copy_index"] == -3).sum() == 2
    module.block_length = 200
    assert not (module.preprocess(["cat " * 60])["copy_index"] == -3).any()
    reba = ReBAModule(roomy_path)
    assert ReBAModule(reba, repetitions=3).preprocess(["a cat"])["copy_index"].max() == 2
    assert reba.preprocess(["a cat"])["copy_index"].max() == 1


def test_they_travel_to_a_worker(roomy_path, calls):
    module = pickle.loads(pickle.dumps(CausalTransformer(roomy_path, template="prompteol")))
    calls.clear()
    module.preprocess(TEXTS)
    assert len(calls) <= 2
