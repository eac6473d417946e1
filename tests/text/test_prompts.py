"""A text in its prompt is one string to the tokenizer, or pieces where its tokens are to be the same in several places.

The tokenizer of these tests makes tokens that straddle the borders of a text.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from st_reba import (
    TEMPLATES,
    CausalTransformer,
    ContrastivePromptingModule,
    EchoModule,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.text.templates import PRESETS

from ..backbones import TEXTS
from ..conftest import PROMPTS, pipeline, relative_error

#: Modules that read a text once.
ONCE = {
    "prompteol": (CausalTransformer, {"template": "prompteol"}),
    "contrastive prompting": (ContrastivePromptingModule, {"contrast_layer": 1}),
    "token prepending": (TokenPrependingModule, {"template": 'Of {prepend}"{text}"'}),
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


@pytest.mark.parametrize("recipe", ONCE)
def test_a_long_text_is_cut_and_its_prompt_is_not(recipe, greedy, shared):
    module_class, settings = ONCE[recipe]
    module = module_class(shared("llama", "greedy"), **settings)
    tokenizer, positions = greedy[2], 256
    for text in ("I love " * 200, "自然语言" * 200, "🥊" * 300):
        features = module.preprocess([text], prompt="query: ")
        names = [name for name in ("", "_of_steer") if "input_ids" + name in features]
        longest = max(int(features["attention_mask" + name].sum(dim=1).max()) for name in names)
        assert positions - 20 <= longest <= positions
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


@pytest.mark.parametrize("module_class", [EchoModule, ReBAModule])
def test_repeated_texts_are_in_pieces(module_class, shared):
    assert module_class(shared()).tokenization == "pieces"
    with pytest.raises(ValueError, match='tokenization="whole": .* same tokens of a text in several places'):
        module_class(shared(), tokenization="whole")
    with pytest.raises(ValueError, match='tokenization=\'all\': use "whole" or "pieces"'):
        CausalTransformer(shared(), tokenization="all")


def test_a_prompt_of_each_side_is_read_and_not_pooled(prompted_path, token_ids):
    model = SentenceTransformer(prompted_path, device="cpu")
    for side in ("query", "document"):
        vectors = getattr(model, f"encode_{side}")(TEXTS)
        assert np.array_equal(vectors, model.encode(TEXTS, prompt=PROMPTS[side]))
        assert not np.allclose(vectors, model.encode(TEXTS), atol=1e-2)
    words = model.encode_query(TEXTS, output_value="token_embeddings")
    assert [len(vectors) for vectors in words] == [len(token_ids(text)) for text in TEXTS]


# A template's name brings how its authors read it; what the caller or a saved model says comes first.

#: Of PromptEOL's family, in both languages.
FAMILY = [
    *("prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum"),
    *("prompteol-zh", "pretended-cot-zh", "knowledge-zh", "promptsth-zh", "promptsum-zh"),
    *("promptreps", "promptreps-zh", "ponte", "ponte-aspect-first", "ponte-zh", "ponte-aspect-first-zh"),
    *("topic", "topic-zh"),
]


def reading(module):
    return module.pool_over, module.rows, module.normalize_text, module.output_layer, module.final_norm


def test_a_prompt_is_read_at_its_end(shared):
    assert [name for name, preset in PRESETS.items() if preset.rows == "last"] == FAMILY
    for template in FAMILY:
        module = CausalTransformer(shared(), template=template)
        layer, norm = (2, False) if template.startswith(("pretended-cot", "knowledge")) else (None, True)
        assert module.template == TEMPLATES[template]
        # PromptReps asks for a word that is to be found as it is written, and PonTE's paper says nothing of changes.
        assert reading(module) == ("all", "last", not template.startswith(("promptreps", "ponte")), layer, norm)


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
@pytest.mark.parametrize("template", ["prompteol", "promptsum-zh"])
def test_the_very_last_token_is_read(kind, template, shared):
    """Of the template, or the special token that the tokenizer puts behind it, as it does for everybody."""
    module = CausalTransformer(shared("llama", kind), template=template)
    literal = module.tokenizer(TEMPLATES[template].split("{text}")[1], add_special_tokens=False)["input_ids"]
    expected = 3 if kind == "bert" else literal[-1]
    for prompt in (None, "query: "):
        features = module.preprocess(TEXTS, prompt=prompt)
        ends = features["input_ids"][torch.arange(len(TEXTS)), features["attention_mask"].sum(dim=1) - 1]
        assert ends.tolist() == [expected] * len(TEXTS)
        assert module(features)["input_ids"].tolist() == [[expected]] * len(TEXTS)


def test_what_the_caller_says_comes_first(shared):
    given = {"pool_over": "text", "rows": "all", "normalize_text": False, "output_layer": -1, "final_norm": True}
    module = CausalTransformer(shared(), template="pretended-cot", **given)
    assert reading(module) == ("text", "all", False, 3, True)
    assert reading(CausalTransformer(shared(), template="knowledge", output_layer=1)) == ("all", "last", True, 1, False)
    # A model of one layer has no last but one.
    backbone = CausalTransformer(shared(), output_layer=1)
    assert CausalTransformer(backbone, template="pretended-cot").output_layer == 1


def test_a_text_is_read_as_any_template(shared):
    """Also that of a preset: saved models have texts."""
    module = CausalTransformer(shared(), template=TEMPLATES["pretended-cot"])
    assert reading(module) == ("text", "all", False, None, True)


def test_what_each_module_takes_of_a_preset(shared):
    """What every layer, or the attention in it, gives is not read at the last but one; a hybrid reads more than the
    last token."""
    states = LayerStates(shared(), template="pretended-cot")
    assert (states.depth, states.pool_over, states.normalize_text, states.final_norm) == (3, "all", True, True)
    values = ValueAggregationModule(shared(), template="pretended-cot")
    assert (values.output_layer, values.pool_over, values.normalize_text) == (None, "all", True)
    hybrid = KVReroutingModule(shared(), template="prompteol")
    assert (hybrid.hybrid, hybrid.rows, hybrid.pool_over, hybrid.normalize_text) == (True, "all", "all", True)
    assert KVReroutingModule(shared(), template="prompteol", hybrid=False).rows == "last"
    contrast = ContrastivePromptingModule(shared(), template="knowledge")
    assert (contrast.output_layer, contrast.final_norm, contrast.scale) == (2, False, 3.0)
    assert reading(TokenPrependingModule(shared())) == ("all", "last", True, 3, False)
    own = TokenPrependingModule(shared(), template='Of {prepend} "{text}":')
    assert reading(own) == ("all", "all", False, 3, False)
    # Several prompts take what all agree on.
    for templates, expected in (
        (["pretended-cot", "knowledge"], (2, False, True)),
        (["prompteol", "pretended-cot"], (None, True, True)),
        (["prompteol", "{text} sounds"], (None, True, False)),
    ):
        module = MetaEOLModule(shared(), templates=templates)
        assert (module.output_layer, module.final_norm, module.normalize_text) == expected
