"""A language model's head, wherever the model lies, and what reads it: weights of the vocabulary's tokens, choices."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from st_reba import CausalTransformer, PromptRepsModule
from st_reba.modules import lm_head
from st_reba.modules.lm_head import head_blocks
from st_reba.text.presets import TEMPLATES, preset
from st_reba.text.tokens import STOP_WORDS, lower_case_tokens, word_token_ids, words_of

from .. import backbones
from ..backbones import TEXTS, language_model, own
from ..conftest import pipeline

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


def head(source):
    return torch.cat(list(head_blocks(source)))


class TestHead:
    HEADS = [("llama", True), ("gemma2_softcap", False), ("gpt2", True), ("phi3", False)]

    @pytest.mark.parametrize(("architecture", "tied"), HEADS)
    def test_it_is_what_the_language_model_has(self, architecture, tied, tmp_path, monkeypatch):
        monkeypatch.setattr(lm_head, "BLOCK", 100)
        model = language_model(tmp_path, architecture, tie_word_embeddings=tied)
        expected = model.get_output_embeddings().weight.detach()
        assert torch.equal(expected, model.get_input_embeddings().weight) == tied
        backbone = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
        module = CausalTransformer(str(tmp_path))
        for source in (model, str(tmp_path), backbone, module, pipeline(module)):
            blocks = list(head_blocks(source))
            assert [len(block) for block in blocks] == [100, 100, 100, 84]
            assert torch.equal(torch.cat(blocks), expected)

    @pytest.mark.parametrize("tied", [True, False])
    def test_one_shard_alone_is_read(self, tied, tmp_path):
        model = language_model(tmp_path / "whole", tie_word_embeddings=tied)
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        others = {*shards.values()} - {shards["model.embed_tokens.weight" if tied else "lm_head.weight"]}
        assert others
        for shard in others:
            (tmp_path / shard).write_bytes(b"not read")
        assert torch.equal(head(str(tmp_path)), model.lm_head.weight)

    REFUSED = [
        ({"words.weight": torch.zeros(384, 32)}, str, "no weight named lm_head.weight or embed_out.weight .* giv"),
        ({"lm_head.weight": torch.zeros(384, 32, dtype=torch.int8)}, str, "is torch.int8 of shape .384, 32"),
        ({}, CausalTransformer, "no weight named lm_head.weight.*the language model that it was made"),
        ({}, lambda path: AutoModel.from_config(backbones.config("llama")), "no language model.s head, and does"),
        ({}, lambda path: Pooling(32), "Pooling has no language model's head"),
    ]

    @pytest.mark.parametrize(("weights", "source", "message"), REFUSED)
    def test_what_is_refused(self, weights, source, message, tmp_path):
        """One of another name, quantised, of an embedder that kept its backbone alone, from nowhere; something else."""
        backbones.save(language_model(tmp_path).model, tmp_path)
        if weights:
            save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            head(source(str(tmp_path)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(architecture, tied)``: a language model with its head, and its directory."""

    @functools.cache
    def make(architecture="llama", tied=False):
        path = tmp_path_factory.mktemp("head")
        capped = {"final_logit_softcapping": 3.0} if architecture == "gemma2_softcap" else {}
        model = language_model(path, architecture, tie_word_embeddings=tied, **capped)
        # Answers with their blank are one token.
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_tokens([" A", " B"])
        tokenizer.save_pretrained(path)
        return model, str(path)

    return make


class TestPromptReps:
    """Weights of the vocabulary's tokens, as sentence-transformers' SparseEncoder gives and searches them."""

    PROMPTS = dict(preset("promptreps").prompts)

    def naive(self, model, path, text, prompt="", expansion=0, top_k=128):
        """The definition: the whole language model on the prompt, log1p of relu, one text at a time."""
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer(prompt + TEMPLATES["promptreps"].replace("{text}", text), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            weights = torch.log1p(torch.relu(model(input_ids=ids).logits[0, -1]))
        own = set()
        for word in words_of(text, STOP_WORDS):
            [mark, *tokens] = tokenizer(f'"{word}', add_special_tokens=False)["input_ids"]
            assert tokenizer.decode([mark]) == '"'
            own |= set(tokens)
        kept = sorted(own, key=lambda token: -weights[token])[:top_k] if own else weights.topk(10).indices.tolist()
        others = [token for token in lower_case_tokens(tokenizer, backbones.VOCABULARY) if token not in own]
        kept += sorted(others, key=lambda token: -weights[token])[:expansion]
        found = torch.zeros_like(weights)
        found[kept] = weights[kept]
        return found

    DEFINED = [
        ("llama", False, {}),
        ("gemma2_softcap", True, {"expansion": 5}),
        ("gpt2", True, {"top_k": 3, "expansion": 2}),
    ]

    @pytest.mark.parametrize(("architecture", "tied", "settings"), DEFINED)
    def test_equals_the_definition(self, architecture, tied, settings, saved):
        """In a batch; the last text has no words of its own."""
        model, path = saved(architecture, tied)
        encoder = SparseEncoder(modules=[PromptRepsModule(path, **settings)], device="cpu", prompts=self.PROMPTS)
        texts = [*TEXTS[:3], "To be, or not to be?", "?!"]
        for encode, prompt in ((encoder.encode, ""), (encoder.encode_query, "Query: ")):
            *found, nothing = encode([*texts, ""]).to_dense()
            assert not nothing.any()
            for text, weights in zip(texts, found, strict=True):
                assert torch.allclose(weights, self.naive(model, path, text, prompt, **settings), atol=1e-5)
        assert encoder.get_embedding_dimension() == len(nothing) == backbones.VOCABULARY
        assert encoder.similarity_fn_name == "dot"

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_saved_head(self, tied, saved, tmp_path):
        SparseEncoder(modules=[PromptRepsModule(saved(tied=tied)[1])]).save_pretrained(str(tmp_path))
        file = own(tmp_path) / "lm_head.safetensors"
        assert file.exists() != tied
        save_file({"weight": torch.zeros(4, 5)}, file)
        with pytest.raises(ValueError, match="lm_head.safetensors has no head of this model: save the model again"):
            SparseEncoder(str(tmp_path), device="cpu")

    @pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "bert", "greedy"])
    def test_words_and_their_tokens_behind_a_quotation_mark(self, kind):
        assert words_of("The dog, the DOG; and 3 cats' tails.", STOP_WORDS) == ["dog", "3", "cats", "tails"]
        assert words_of("我爱自然语言，处理。") == ["我爱自然语言", "处理"]
        tokenizer = backbones.tokenizer(kind)
        [found, nothing] = word_token_ids(tokenizer, ["fox chased fox", ""])
        assert nothing == []
        assert len(set(found)) == len(found)
        assert '"' not in "".join(tokenizer.convert_ids_to_tokens(found))

    def test_other_tokens_are_letters_of_any_script_in_lower_case_and_no_digits(self):
        vocabulary = ["a", "7", "42", "the", "б", "果", "x1", "The", "Ġa"]
        tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, "a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        assert tokenizer.convert_ids_to_tokens(lower_case_tokens(tokenizer, 9)) == ["a", "the", "б", "果"]

    def test_where_there_is_no_head(self, backbone_path):
        with pytest.raises(ValueError, match="so there is no language model's head"):
            PromptRepsModule(backbone_path())
        with pytest.raises(ValueError, match="GPTJConfig has no language model.s head, or its head adds a bias"):
            PromptRepsModule(backbone_path("gpt_j"))
