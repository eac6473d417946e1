"""A batch of texts is tokenised in a few calls, and what a tokenizer adds is asked for anew each time."""

from __future__ import annotations

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

from .. import backbones
from ..backbones import TEXTS
from ..conftest import long

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
def test_a_batch_is_tokenised_in_a_few_calls(kind, roomy, calls):
    module = MODULES[kind](roomy)
    for prompt in (None, "query: "):
        for texts in (TEXTS, ["", *TEXTS] * 8, ["one", "word " * 1_500]):
            calls.clear()
            features = module.preprocess(texts, prompt=prompt)
            # Two for special tokens, and one each for what stands around texts, the texts, and the two together; one
            # for what splits a string at a slot; and what stands around chunks is asked for twice more.
            assert len(calls) <= {"chunks": 11, "token prepending": 6, "prepending in blocks": 6}.get(kind, 5)
        calls.clear()
        with torch.inference_mode():
            module(features)
        assert not any("word" in string for strings in calls for string in strings)


def eos(module):
    module.tokenizer.eos_token = "c"
    return [*module.tokenizer("a cat")["input_ids"], module.tokenizer.convert_tokens_to_ids("c")]


def ends(module):
    module.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 0)]
    )
    return module.tokenizer("a cat")["input_ids"]


def entry(module):
    before = module.tokenizer("a cat")["input_ids"]
    module.tokenizer.add_tokens([" cat"])
    after = module.tokenizer("a cat")["input_ids"]
    assert after != before
    return [*after, 0]


def another(module):
    module.processor = backbones.tokenizer("bert", eos_token="[SEP]")
    return module.tokenizer("a cat")["input_ids"]


@pytest.mark.parametrize("change", [eos, ends, entry, another])
def test_what_is_changed_of_a_tokenizer_is_seen_at_once(change, roomy_path):
    module = RefinedThoughtModule(roomy_path)
    assert module.lay_out(["a cat"]).input_ids[0, -1] == 0
    expected = change(module)
    assert module.lay_out(["a cat"]).input_ids[0].tolist() == expected


def test_settings_of_the_layout_are_among_what_may_change(roomy_path):
    module = HierarchicalTokenPrependingModule(roomy_path, whole_sentences=False)
    assert (module.preprocess(["cat " * 60])["copy_index"] == -3).sum() == 2
    module.block_length = 200
    assert not (module.preprocess(["cat " * 60])["copy_index"] == -3).any()
    reba = ReBAModule(roomy_path)
    assert ReBAModule(reba, repetitions=3).preprocess(["a cat"])["copy_index"].max() == 2
    assert reba.preprocess(["a cat"])["copy_index"].max() == 1
    module = CausalTransformer(roomy_path, template="prompteol", max_seq_length=9)
    longest = module.preprocess(["a cat " * 60])["copy_index"]
    assert (longest == 0).sum() == 9
    module.max_seq_length = 3
    module.tokenization = "pieces"
    assert (module.preprocess(["a cat " * 60])["copy_index"] == 0).sum() == 3
