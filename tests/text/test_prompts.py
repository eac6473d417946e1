"""The PromptEOL family: CausalTransformer with a template that is read at its very end."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from st_reba import (
    TEMPLATES,
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
    encode_words,
)
from st_reba.compare.sweep import RecipeSweep
from st_reba.text.templates import normalized

from .. import oracles
from ..backbones import TEXTS, own, third
from ..conftest import paired, pipeline, relative_error

RECIPE = {"pool_over": "all", "rows": "last", "normalize_text": True}


@pytest.mark.parametrize(("architecture", "template"), paired(third(1), ["prompteol", "promptsum-zh"]))
def test_oracle(architecture, template, shared, eager, token_ids):
    model = pipeline(CausalTransformer(shared(architecture), template=template, **RECIPE), "lasttoken")
    vectors = model.encode(TEXTS, batch_size=len(TEXTS))
    for text, vector in zip(TEXTS, vectors, strict=True):
        states, _ = oracles.run(eager(architecture), token_ids(TEMPLATES[template].replace("{text}", normalized(text))))
        assert relative_error(vector, states[-1]) < 1e-5, text


@pytest.mark.parametrize(
    ("template", "kind"),
    paired(
        ["prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum-zh"], ["bytes", "bert", "sentencepiece"]
    ),
)
def test_the_very_last_token_is_read(kind, template, shared):
    """Of the template, or the special token that the tokenizer puts behind it, as it does for everybody."""
    module = CausalTransformer(shared("llama", kind), template=template, **RECIPE)
    for prompt in (None, "query: "):
        features = module.preprocess(TEXTS, prompt=prompt)
        ends = features["input_ids"][torch.arange(len(TEXTS)), features["attention_mask"].sum(dim=1) - 1]
        literal = module.tokenizer(TEMPLATES[template].split("{text}")[1], add_special_tokens=False)["input_ids"]
        expected = 3 if kind == "bert" else literal[-1]
        assert ends.tolist() == [expected] * len(TEXTS)
        assert module(features)["input_ids"].tolist() == [[expected]] * len(TEXTS)


@pytest.mark.parametrize("module_class", [CausalTransformer, EchoModule, ReBAModule])
def test_normalised_texts(module_class, shared):
    texts = ['He said "sit"', "Did it sit?", "你爱猫吗？", "the cat", ""]
    model = pipeline(module_class(shared(), normalize_text=True))
    with pytest.warns(UserWarning, match="A text without tokens"):
        vectors = model.encode(texts, batch_size=len(texts))
    plain = pipeline(module_class(shared()))
    with pytest.warns(UserWarning, match="A text without tokens"):
        expected = plain.encode([normalized(text) for text in texts], batch_size=len(texts))
    assert np.array_equal(vectors, expected)
    assert not vectors[-1].any()


@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_normalised_or_not(value, backbone_path):
    with pytest.raises(ValueError, match=f"normalize_text={value!r}: use True or False"):
        CausalTransformer(backbone_path(), normalize_text=value)


#: Modules that read a text once, with tokens that straddle the borders of the text.
ONCE = {
    "classical": (CausalTransformer, {}),
    "prompteol": (CausalTransformer, {"template": "prompteol", **RECIPE}),
    "bag": (InputEmbeddings, {"template": "sentence {text}"}),
    "layer states": (LayerStates, {"template": 'Of "{text}"'}),
    "bidirectional": (BidirectionalLastLayer, {}),
    "value aggregation": (ValueAggregationModule, {}),
    "contrastive prompting": (ContrastivePromptingModule, {"contrast_layer": 1}),
    "early and late": (EarlyLateModule, {}),
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
    """A Llama's path, itself run eagerly, and its tokenizer, whose tokens straddle the borders of a text."""
    path = backbone_path("llama", "greedy")
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    return path, model, AutoTokenizer.from_pretrained(path)


class TestWholes:
    """A text in its prompt is one string to the tokenizer: plain transformers on that string gives the embedding."""

    @pytest.mark.parametrize(
        ("template", "prompt"),
        paired(["prompteol", "representative-word", "compress", "sentence {text}", "{text}"], ["", "query: "]),
    )
    def test_oracle(self, template, prompt, greedy):
        path, plain, tokenizer = greedy
        before, behind = TEMPLATES.get(template, template).split("{text}")
        whole = pipeline(CausalTransformer(path, template=template, pool_over="all"), "lasttoken")
        pieces = pipeline(
            CausalTransformer(path, template=template, pool_over="all", tokenization="pieces"), "lasttoken"
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

    def test_sts_own_transformer(self, greedy):
        """A prompt and a text, embedded as ST does, are the same."""
        from sentence_transformers.base.modules import Transformer

        path, _, _ = greedy
        plain = Transformer(path, processor_kwargs={"padding_side": "right"})
        plain.tokenizer.pad_token = plain.tokenizer.eos_token
        expected = pipeline(plain, "lasttoken").encode(TEXTS, prompt="query: ")
        ours = pipeline(CausalTransformer(path, pool_over="all"), "lasttoken").encode(TEXTS, prompt="query: ")
        assert relative_error(ours, expected) < 1e-5

    @pytest.mark.parametrize("recipe", ONCE)
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

    @pytest.mark.parametrize("recipe", ONCE)
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
                    kept = tokenizer.decode(ids[copies == 0])
                    assert "\ufffd" not in kept
                    assert (copies == 0).sum() <= module.max_seq_length

    def test_not_one_character_fits(self, greedy):
        """Its first tokens stand in pieces then: a text is not lost."""
        module = CausalTransformer(greedy[0], template="sentence {text}", max_seq_length=1)
        tokenizer = greedy[2]
        layout = module.preprocess(["🥊🥊"])
        literal, text = (tokenizer(part)["input_ids"] for part in ("sentence ", "🥊🥊"))
        assert layout["input_ids"].tolist() == [[*literal, text[0]]]

    def test_words(self, greedy):
        """A token that holds a quotation mark and the text's first letter is the first word's."""
        path, plain, tokenizer = greedy
        template = 'This sentence : "{text}" means'
        model = pipeline(CausalTransformer(path, template=template))
        model.prompts, model.default_prompt_name = {"x": "query: "}, "x"
        ids = tokenizer(f"query: {template.replace('{text}', TEXTS[0])}", return_offsets_mapping=True)
        begin = len('query: This sentence : "')
        with torch.no_grad():
            states = plain(input_ids=torch.tensor([ids["input_ids"]])).last_hidden_state[0]
        for word in ("I", "love", "processing."):
            first = begin + TEXTS[0].index(word)
            own = [i for i, (a, b) in enumerate(ids["offset_mapping"]) if a < first + len(word) and b > first]
            assert relative_error(encode_words(model, [TEXTS[0]], [word])[0], states[own].mean(dim=0)) < 1e-5

    @pytest.mark.filterwarnings("ignore:A text without tokens")
    @pytest.mark.parametrize("prompt", [None, "query: "])
    def test_all_recipes_from_one_pass(self, prompt, greedy):
        """Classical reads the prompt and the text as a whole, and Echo and ReBA in pieces."""
        backbone = CausalTransformer(greedy[0], max_seq_length=20)
        sweep = RecipeSweep(backbone, 2, ("mean", "lasttoken"))
        found = sweep.encode([*TEXTS, ""], prompt=prompt, batch_size=6)
        modules = {"Classical": CausalTransformer(backbone), "Echo-2": EchoModule(backbone)}
        modules |= {f"ReBA-{k}": ReBAModule(backbone, repetitions=k) for k in (1, 2)}
        for recipe, module in modules.items():
            for pooling in ("mean", "lasttoken"):
                expected = pipeline(module, pooling).encode([*TEXTS, ""], prompt=prompt)
                assert relative_error(found[recipe, pooling], expected) < 1e-5, recipe
        words = list(sweep.token_embeddings(TEXTS, prompt=prompt))
        expected = pipeline(modules["Classical"]).encode(TEXTS, prompt=prompt, output_value="token_embeddings")
        for of_text, alone in zip(words, expected, strict=True):
            assert relative_error(of_text["Classical"], alone) < 1e-5


class TestTokenization:
    def test_saved_and_loaded(self, greedy, tmp_path):
        for tokenization in ("whole", "pieces"):
            module = CausalTransformer(greedy[0], template="prompteol", tokenization=tokenization, **RECIPE)
            model = pipeline(module, "lasttoken")
            model.save_pretrained(str(tmp_path / tokenization))
            loaded = SentenceTransformer(str(tmp_path / tokenization), device="cpu")
            assert loaded[0].tokenization == tokenization
            assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))

    @pytest.mark.parametrize("module_class", [CausalTransformer, RefinedThoughtModule, EchoModule])
    def test_what_0_1_saved_is_in_pieces(self, module_class, greedy, tmp_path):
        model = pipeline(module_class(greedy[0], tokenization="pieces"), "lasttoken")
        model.save_pretrained(str(tmp_path))
        path = own(tmp_path) / "sentence_bert_config.json"
        config = json.loads(path.read_text())
        del config["tokenization"]
        path.write_text(json.dumps(config))
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert loaded[0].tokenization == "pieces"
        assert np.array_equal(loaded.encode(TEXTS, prompt="query: "), model.encode(TEXTS, prompt="query: "))

    @pytest.mark.parametrize("module_class", [EchoModule, ReBAModule])
    def test_repeated_texts_are_in_pieces(self, module_class, greedy):
        assert module_class(greedy[0]).tokenization == "pieces"
        with pytest.raises(ValueError, match='tokenization="whole": .* same tokens of a text in several places'):
            module_class(greedy[0], tokenization="whole")

    def test_a_wrong_one(self, greedy):
        with pytest.raises(ValueError, match='tokenization=\'all\': use "whole" or "pieces"'):
            CausalTransformer(greedy[0], tokenization="all")

    def test_the_tokenizer_is_left_as_it_is(self, greedy):
        module = TokenPrependingModule(greedy[0])
        before = copy.deepcopy(module.tokenizer).backend_tokenizer.to_str()
        module.preprocess(["I love " * 300, *TEXTS], prompt="query: ")
        assert module.tokenizer.backend_tokenizer.to_str() == before
