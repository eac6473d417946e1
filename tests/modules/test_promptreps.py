"""Weights of the vocabulary's tokens, as sentence-transformers' SparseEncoder gives and searches them."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from sentence_transformers import SparseEncoder
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from st_reba import PromptRepsModule
from st_reba.text.templates import TEMPLATES, preset
from st_reba.text.words import STOP_WORDS, lower_case_tokens, word_token_ids, words_of

from .. import backbones
from ..backbones import TEXTS, own
from .methods import language_model

PROMPTS = dict(preset("promptreps").prompts)
SETTINGS = {"gemma2_softcap": {"final_logit_softcapping": 3.0}}

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(architecture, tied)``: a language model with its head, and its directory."""

    @functools.cache
    def make(architecture="llama", tied=False):
        path = tmp_path_factory.mktemp("promptreps")
        settings = {"tie_word_embeddings": tied, **SETTINGS.get(architecture, {})}
        return language_model(path, architecture, **settings), str(path)

    return make


@functools.cache
def words_in_lower_case(path):
    """A tokenizer, and those of its tokens that may be added to a text's own."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer, lower_case_tokens(tokenizer, backbones.VOCABULARY)


def naive(model, path, text, prompt="", expansion=0, top_k=128):
    """The definition: the whole language model on the prompt, log1p of relu, one text at a time."""
    tokenizer, lower_case = words_in_lower_case(path)
    ids = tokenizer(prompt + TEMPLATES["promptreps"].replace("{text}", text), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        weights = torch.log1p(torch.relu(model(input_ids=ids).logits[0, -1]))
    own = set()
    for word in words_of(text, STOP_WORDS):
        [mark, *tokens] = tokenizer(f'"{word}', add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([mark]) == '"'
        own |= set(tokens)
    kept = sorted(own, key=lambda token: -weights[token])[:top_k] if own else weights.topk(10).indices.tolist()
    others = [token for token in lower_case if token not in own]
    kept += sorted(others, key=lambda token: -weights[token])[:expansion]
    found = torch.zeros_like(weights)
    found[kept] = weights[kept]
    return found


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (("llama", False), {}),
        (("gemma2_softcap", True), {"expansion": 5}),
        (("gpt2", True), {"top_k": 3, "expansion": 2}),
    ],
)
def test_equals_the_definition(model, settings, saved):
    model, path = saved(*model)
    encoder = SparseEncoder(modules=[PromptRepsModule(path, **settings)], device="cpu", prompts=PROMPTS)
    texts = [*TEXTS[:3], "To be, or not to be?"]
    for encode, prompt in ((encoder.encode, ""), (encoder.encode_query, "Query: ")):
        found = encode(texts).to_dense()
        for text, weights in zip(texts, found, strict=True):
            assert torch.allclose(weights, naive(model, path, text, prompt, **settings), atol=1e-5)
    assert encoder.get_embedding_dimension() == found.shape[1] == backbones.VOCABULARY
    assert encoder.similarity_fn_name == "dot"


@pytest.mark.parametrize("text", ["To be, or not to be?", "who is it", "?!"])
def test_a_text_without_words_of_its_own_has_the_ten_likeliest_tokens(text, saved):
    """And the batch does not matter."""
    _, path = saved()
    encoder = SparseEncoder(modules=[PromptRepsModule(path)], device="cpu")
    together = encoder.encode([text, *TEXTS, ""]).to_dense()
    assert together.count_nonzero(dim=1).tolist()[0] == 10
    assert not together[-1].any()
    for own_text, weights in zip((text, *TEXTS), together, strict=False):
        assert torch.allclose(encoder.encode([own_text]).to_dense()[0], weights, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_without_a_flag(tied, saved, tmp_path):
    _, path = saved(tied=tied)
    encoder = SparseEncoder(modules=[PromptRepsModule(path, expansion=3, stop_words=["dog"])], device="cpu",
                            prompts=PROMPTS)  # fmt: skip
    encoder.save_pretrained(str(tmp_path / "model"))
    assert (own(tmp_path / "model") / "lm_head.safetensors").exists() != tied
    again = SparseEncoder(str(tmp_path / "model"), device="cpu")
    assert again[0].stop_words == ["dog"]
    assert again.prompts == PROMPTS
    for encode in ("encode_query", "encode_document"):
        found = getattr(again, encode)(TEXTS).to_dense()
        assert torch.equal(found, getattr(encoder, encode)(TEXTS).to_dense())
    assert "st_reba" in json.dumps(json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text()))


def test_a_head_of_another_model_is_refused(saved, tmp_path):
    from safetensors.torch import save_file

    _, path = saved()
    SparseEncoder(modules=[PromptRepsModule(path)], device="cpu").save_pretrained(str(tmp_path))
    save_file({"weight": torch.zeros(4, 5)}, str(own(tmp_path) / "lm_head.safetensors"))
    with pytest.raises(ValueError, match="lm_head.safetensors has no head of this model: save the model again"):
        SparseEncoder(str(tmp_path), device="cpu")


class TestWords:
    def test_of_a_text(self):
        assert words_of("The dog, the DOG; and 3 cats' tails.", STOP_WORDS) == ["dog", "3", "cats", "tails"]
        assert words_of("我爱自然语言，处理。") == ["我爱自然语言", "处理"]

    @pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "bert", "greedy"])
    def test_their_tokens_stand_behind_a_quotation_mark(self, kind):
        tokenizer = backbones.tokenizer(kind)
        [found, nothing] = word_token_ids(tokenizer, ["fox chased fox", ""])
        assert nothing == []
        assert len(set(found)) == len(found)
        assert '"' not in "".join(tokenizer.convert_ids_to_tokens(found))

    def test_others_are_letters_of_any_script_in_lower_case_and_no_digits(self):
        vocabulary = ["a", "7", "42", "the", "б", "果", "x1", "The", "Ġa"]
        tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, "a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        assert tokenizer.convert_ids_to_tokens(lower_case_tokens(tokenizer, 9)) == ["a", "the", "б", "果"]


def test_where_there_is_no_head(backbone_path):
    with pytest.raises(ValueError, match="so there is no language model's head"):
        PromptRepsModule(backbone_path())
    with pytest.raises(ValueError, match="GPTJConfig: its head adds a bias"):
        PromptRepsModule(backbone_path("gpt_j"))
