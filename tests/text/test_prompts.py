"""A text in its prompt is one string to the tokenizer, or pieces where its tokens are to be the same in several places.

The tokenizer of these tests makes tokens that straddle the borders of a text.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import AutoModel, AutoTokenizer

from st_reba import (
    TEMPLATES,
    CausalTransformer,
    ContrastivePromptingModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
)

from ..backbones import TEXTS, own
from ..conftest import PROMPTS, pipeline, relative_error

#: Modules that read a text once.
ONCE = {
    "prompteol": (CausalTransformer, {"template": "prompteol"}),
    "contrastive prompting": (ContrastivePromptingModule, {"contrast_layer": 1}),
    "token prepending": (TokenPrependingModule, {}),
    "token prepending, blocks": (
        HierarchicalTokenPrependingModule,
        {"block_length": 4, "template": 'Of {prepend}"{text}"'},
    ),
    "kv re-routing": (KVReroutingModule, {}),
    "refined thought": (RefinedThoughtModule, {}),
    "metaeol": (MetaEOLModule, {"templates": ["prompteol", "{text}", "compress"]}),
}


@pytest.fixture(scope="module")
def greedy(backbone_path):
    """A Llama's path, itself run eagerly, and its tokenizer."""
    path = backbone_path("llama", "greedy")
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    return path, model, AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("template", ["prompteol", "sentence {text}", "{text}"])
def test_plain_transformers_on_the_whole_string_gives_the_embedding(template, prompt, greedy):
    path, plain, tokenizer = greedy
    before, behind = TEMPLATES.get(template, template).split("{text}")
    whole, pieces = (
        pipeline(CausalTransformer(path, template=template, pool_over="all", tokenization=way), "lasttoken")
        for way in ("whole", "pieces")
    )
    vectors, others = (model.encode(TEXTS, prompt=prompt, batch_size=5) for model in (whole, pieces))
    differ = 0
    for text, vector, other in zip(whole[0]._texts(TEXTS), vectors, others, strict=True):
        ids = tokenizer(prompt + before + text + behind)["input_ids"]
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        assert relative_error(vector, expected) < 1e-5, text
        differ += relative_error(other, expected) > 1e-3
    assert differ >= 3 or before + prompt == ""


def test_sts_own_transformer(greedy):
    """A prompt and a text, embedded as ST does, are the same."""
    plain = Transformer(greedy[0], processor_kwargs={"padding_side": "right"})
    plain.tokenizer.pad_token = plain.tokenizer.eos_token
    expected = pipeline(plain, "lasttoken").encode(TEXTS, prompt="query: ")
    ours = pipeline(CausalTransformer(greedy[0], pool_over="all"), "lasttoken").encode(TEXTS, prompt="query: ")
    assert relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize("recipe", ONCE)
class TestOnce:
    def test_a_batch_is_its_texts(self, recipe, shared):
        module_class, settings = ONCE[recipe]
        model = pipeline(module_class(shared("llama", "greedy"), **settings))
        model[0]._warned_empty = True
        texts = [TEXTS[1], "", '"', "自然语言" * 80, " a "]
        together = model.encode(texts, batch_size=len(texts), prompt="query: ")
        assert np.isfinite(together).all()
        for text, vector in zip(texts, together, strict=True):
            alone = model.encode([text], prompt="query: ")[0]
            assert np.linalg.norm(vector - alone) <= 1e-5 * max(np.linalg.norm(alone), 1e-6), text
            assert vector.any() == bool(text)

    def test_a_long_text_is_cut_and_its_prompt_is_not(self, recipe, greedy, shared):
        module_class, settings = ONCE[recipe]
        module = module_class(shared("llama", "greedy"), **settings)
        tokenizer, positions = greedy[2], 256
        for text in ("I love " * 200, "自然语言" * 200, "🥊" * 300):
            features = module.preprocess([text], prompt="query: ")
            names = [name for name in ("", "_of_steer") if "input_ids" + name in features]
            longest = max(int(features["attention_mask" + name].sum(dim=1).max()) for name in names)
            # Slots in a text of one sentence take less room than those that were reserved for its blocks.
            assert (positions // 2 if "blocks" in recipe else positions - 20) <= longest <= positions
            for name in names:
                for ids, copies in zip(features["input_ids" + name], features["copy_index" + name], strict=True):
                    assert tokenizer.decode(ids).startswith("query: ")
                    assert "\ufffd" not in tokenizer.decode(ids[copies == 0])
                    assert (copies == 0).sum() <= module.max_seq_length


def test_not_one_character_fits(greedy):
    """Its first tokens stand in pieces then: a text is not lost."""
    module = CausalTransformer(greedy[0], template="sentence {text}", max_seq_length=1)
    literal, text = (greedy[2](part)["input_ids"] for part in ("sentence ", "🥊🥊"))
    assert module.preprocess(["🥊🥊"])["input_ids"].tolist() == [[*literal, text[0]]]


@pytest.mark.parametrize(
    ("module_class", "settings"),
    [
        (CausalTransformer, {"template": "prompteol", "tokenization": "whole"}),
        (CausalTransformer, {"template": "prompteol", "tokenization": "pieces"}),
        (RefinedThoughtModule, {"tokenization": "pieces"}),
        (EchoModule, {"tokenization": "pieces"}),
    ],
)
def test_saved_and_loaded(module_class, settings, greedy, tmp_path):
    """What 0.1 saved says nothing of it, and is in pieces."""
    model = pipeline(module_class(greedy[0], **settings), "lasttoken")
    model.save_pretrained(str(tmp_path))
    vectors = model.encode(TEXTS, prompt="query: ")
    path = own(tmp_path) / "sentence_bert_config.json"
    config = json.loads(path.read_text())
    given = config.pop("tokenization")
    for written in ({"tokenization": given}, {}):
        path.write_text(json.dumps(config | written))
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert loaded[0].tokenization == written.get("tokenization", "pieces")
        assert np.array_equal(loaded.encode(TEXTS, prompt="query: "), vectors) == (loaded[0].tokenization == given)


@pytest.mark.parametrize("module_class", [EchoModule, ReBAModule])
def test_repeated_texts_are_in_pieces(module_class, shared):
    assert module_class(shared()).tokenization == "pieces"
    with pytest.raises(ValueError, match='tokenization="whole": .* same tokens of a text in several places'):
        module_class(shared(), tokenization="whole")
    with pytest.raises(ValueError, match='tokenization=\'all\': use "whole" or "pieces"'):
        CausalTransformer(shared(), tokenization="all")


def test_the_tokenizer_is_left_as_it_is(greedy):
    module = TokenPrependingModule(greedy[0])
    before = copy.deepcopy(module.tokenizer).backend_tokenizer.to_str()
    module.preprocess(["I love " * 300, *TEXTS], prompt="query: ")
    assert module.tokenizer.backend_tokenizer.to_str() == before


@pytest.fixture(scope="module")
def prompted(prompted_path):
    return SentenceTransformer(prompted_path, device="cpu")


@pytest.mark.parametrize("side", ["query", "document"])
def test_each_side_has_its_own(prompted, side):
    vectors = getattr(prompted, f"encode_{side}")(TEXTS)
    assert np.array_equal(vectors, prompted.encode(TEXTS, prompt=PROMPTS[side]))
    assert np.array_equal(vectors, prompted.encode(TEXTS, prompt_name=side))
    assert not np.allclose(vectors, prompted.encode(TEXTS), atol=1e-2)


def test_a_prompt_is_read_once_in_front_of_both_copies(prompted, token_ids, monkeypatch):
    # What stands before all texts is otherwise run on its own, and kept.
    monkeypatch.setattr(prompted[0], "prefix_caching", False)
    seen = []
    embeddings = prompted[0].model.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    try:
        prompted.encode_query(TEXTS[:1])
    finally:
        handle.remove()
    assert seen == [token_ids(PROMPTS["query"]) + 2 * token_ids(TEXTS[0])]


def test_a_prompt_is_not_pooled(prompted, token_ids):
    words = prompted.encode_query(TEXTS, output_value="token_embeddings")
    assert [len(vectors) for vectors in words] == [len(token_ids(text)) for text in TEXTS]
    pooled = prompted.encode_query(TEXTS, convert_to_tensor=True)
    assert torch.allclose(torch.stack([vectors.mean(dim=0) for vectors in words]), pooled, atol=1e-5)
