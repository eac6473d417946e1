"""A two-way choice between statements of a query and a document, through sentence-transformers' CrossEncoder."""

from __future__ import annotations

import functools

import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from st_reba import PromptRepsModule, RerankModule
from st_reba.modules.reranking import cross_encoder

from .. import backbones
from ..backbones import TEXTS, own
from .methods import language_model

QUERY = "Who chased the cat?"
SETTINGS = {"gemma2_softcap": {"final_logit_softcapping": 3.0}}
#: As short as the tiny models have positions for.
SHORT = {"template": "Query: {query}\nDocument: {document}\nIs it so? A or B:", "choices": (" A", " B")}

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(architecture, tied)``: a language model with its head, and its directory."""

    @functools.cache
    def make(architecture="llama", tied=False):
        path = tmp_path_factory.mktemp("reranking")
        model = language_model(path, architecture, tie_word_embeddings=tied, **SETTINGS.get(architecture, {}))
        # Answers with their blank are one token.
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_tokens([" A", " B"])
        tokenizer.save_pretrained(path)
        return model, str(path)

    return make


def naive(model, path, query, document, template=SHORT["template"]):
    """The whole language model on the whole prompt: the logit of one answer less that of the other."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(template.replace("{query}", query).replace("{document}", document), return_tensors="pt")
    yes, no = (tokenizer(f"so:{choice}")["input_ids"][-1] for choice in SHORT["choices"])
    with torch.no_grad():
        logits = model(input_ids=ids["input_ids"]).logits[0, -1]
    return float(logits[yes] - logits[no])


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("gemma2_softcap", True),
                                                    ("gpt2", True)])  # fmt: skip
def test_equals_the_language_model(architecture, tied, saved):
    model, path = saved(architecture, tied)
    reranker = cross_encoder(RerankModule(path, **SHORT), device="cpu")
    pairs = [(query, text) for query in (QUERY, "谁？") for text in TEXTS[:3]]
    for (query, text), score in zip(pairs, reranker.predict(pairs), strict=True):
        assert score == pytest.approx(naive(model, path, query, text), abs=1e-4)


def test_the_rows_of_a_shared_head_are_ones_own(saved):
    """Another module's are those of other tokens, or of all."""
    _, path = saved()
    first = RerankModule(path, **SHORT)
    turned = RerankModule(first, **{**SHORT, "choices": SHORT["choices"][::-1]})
    assert torch.equal(turned.head.weight, first.head.weight.flip(0))
    every = PromptRepsModule(first, template="{text} in a word:")
    assert every.get_embedding_dimension() == first.model.config.vocab_size
    assert torch.equal(RerankModule(every, **SHORT).head.weight, first.head.weight)


def test_the_batch_does_not_matter(saved):
    _, path = saved()
    reranker = cross_encoder(RerankModule(path, **SHORT), device="cpu")
    pairs = [(QUERY, text) for text in [*TEXTS, ""]]
    together = reranker.predict(pairs)
    assert together[-1] == 0
    for pair, score in zip(pairs, together, strict=True):
        assert reranker.predict([pair])[0] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_without_a_flag(tied, saved, tmp_path):
    _, path = saved(tied=tied)
    reranker = cross_encoder(RerankModule(path, **SHORT), device="cpu")
    reranker.save_pretrained(str(tmp_path / "model"))
    again = CrossEncoder(str(tmp_path / "model"), device="cpu")
    pairs = [(QUERY, text) for text in TEXTS]
    assert (again.predict(pairs) == reranker.predict(pairs)).all()
    assert isinstance(again.activation_fn, torch.nn.Identity)
    # Of the head, two rows.
    assert (own(tmp_path / "model") / "choices.safetensors").stat().st_size < 1000


def test_a_long_document_is_cut_and_nothing_else(saved):
    _, path = saved()
    module = RerankModule(path, **SHORT)
    tokenizer = AutoTokenizer.from_pretrained(path)
    features = module.preprocess([(QUERY, "chased " * 500), (QUERY, "a")])
    assert features["input_ids"].shape[1] <= backbones.POSITIONS
    whole = tokenizer.decode(features["input_ids"][0])
    assert whole.startswith(f"Query: {QUERY}\nDocument: chased chased")
    assert whole.endswith("chased \nIs it so? A or B:") or whole.endswith("chased\nIs it so? A or B:")
    module.max_seq_length = 4
    short = module.preprocess([(QUERY, "chased " * 500)])
    assert int((short["copy_index"] == 0).sum()) <= 4
    assert tokenizer.decode(short["input_ids"][0]).startswith(f"Query: {QUERY}\nDocument: ")
    with pytest.raises(ValueError, match="leave no room for 1 copies of a text"):
        module.preprocess([("who " * 500, "a")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{document} {query} so:"}, "one {query}, behind it one {document}, and behind that"),
        ({"template": "{query} {document} {x}"}, "no other braces"),
        ({"choices": (" A", " A")}, "each is to add one token, another than the other"),
        ({"choices": (" unlikely", " B")}, "each is to add one token"),
        ({"rows": "all"}, "reads the last token of its prompt"),
    ],
)
def test_what_is_refused(settings, message, saved):
    _, path = saved()
    with pytest.raises(ValueError, match=message):
        RerankModule(path, **{**SHORT, **settings})


@pytest.mark.parametrize("given", ["a text", ("a", "b", "c"), ("a", 3)])
def test_what_is_no_pair(given, saved):
    _, path = saved()
    with pytest.raises(ValueError, match="Input 0 is .*: give pairs of a query and a document, two strings"):
        RerankModule(path, **SHORT).preprocess([given])
