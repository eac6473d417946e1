from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import META_TASKS, TEMPLATES, CausalTransformer, MetaEOLModule, encode_words
from st_reba.lm import anatomy

from .. import oracles
from ..backbones import TEXTS, third
from ..conftest import pipeline, relative_error

TASKS = ['Topic of "{text}":"', "{text} sounds", 'In one word, this text: "{text}" means:"', "promptsth"]
TOLERANCE = 1e-5


def whole_prompts(token_ids, text, before=""):
    return [token_ids(before + TEMPLATES.get(task, task).replace("{text}", text)) for task in TASKS]


@pytest.mark.parametrize("architecture", third(0))
def test_oracle(architecture, shared, eager, token_ids):
    model = pipeline(MetaEOLModule(shared(architecture), templates=TASKS))
    vectors = model.encode(TEXTS, batch_size=len(TEXTS))
    encoded = model.encode(TEXTS, output_value="token_embeddings", batch_size=2)
    for text, vector, tokens in zip(TEXTS, vectors, encoded, strict=True):
        expected = oracles.meta_eol(eager(architecture), whole_prompts(token_ids, text))
        assert relative_error(tokens, expected) < TOLERANCE, text
        assert relative_error(vector, expected.mean(dim=0)) < TOLERANCE, text


def test_a_prompt_stands_before_each(shared, eager, token_ids):
    model = pipeline(MetaEOLModule(shared(), templates=TASKS))
    expected = oracles.meta_eol(eager(), whole_prompts(token_ids, "the cat", before="query: "))
    vector = model.encode("the cat", prompt="query: ")
    assert relative_error(vector, expected.mean(dim=0)) < TOLERANCE


def test_one_batch(shared, monkeypatch):
    """What stands before the texts once, then all prompts of all texts in one call where that is fastest."""
    module = MetaEOLModule(shared(), templates=TASKS)
    monkeypatch.setattr(MetaEOLModule, "CPU_TOKENS", 10**6)
    shapes = []
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    with torch.no_grad():
        features = module(module.preprocess(TEXTS))
    [(prompts, _), (rows, _)] = shapes
    assert prompts == len(TASKS)
    assert rows == len(TASKS) * len(TEXTS)
    assert features["token_embeddings"].shape == (len(TEXTS), len(TASKS), 32)
    assert features["attention_mask"].tolist() == [[1] * len(TASKS)] * len(TEXTS)
    assert features["input_ids"].shape == (len(TEXTS), len(TASKS))


def test_what_stands_before_the_texts_runs_once(shared, token_ids):
    module = MetaEOLModule(shared(), templates=TASKS)
    shapes = []
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    model = pipeline(module)
    model.encode(["a", "a", "a"])
    before = [token_ids(TEMPLATES.get(task, task).split("{text}")[0]) for task in TASKS[::2]]
    after = [token_ids(TEMPLATES.get(task, task).split("{text}")[1]) for task in TASKS]
    assert shapes[0] == (len(TASKS), max(map(len, [*before, token_ids('This sentence : "')])))
    assert {columns for _, columns in shapes[1:]} == {len(token_ids("a")) + max(map(len, after))}
    shapes.clear()
    model.encode(["a"])
    assert shapes == [(len(TASKS), len(token_ids("a")) + max(map(len, after)))]


@pytest.mark.parametrize("settings", [{"bidirectional_layers": 1}, {"templates": ["{text} sounds", "{text}:"]}])
def test_whole_prompts_run_where_they_must(settings, shared):
    """Where what stands before a text sees it, or nothing does."""
    module = MetaEOLModule(shared(), **{"templates": TASKS, **settings})
    shapes = []
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    vectors = pipeline(module).encode(TEXTS[:2], batch_size=2)
    whole = module.preprocess(TEXTS[:2])["input_ids"].shape[1]
    assert max(columns for _, columns in shapes) == whole
    for text, vector in zip(TEXTS[:2], vectors, strict=True):
        assert relative_error(pipeline(module).encode(text), vector) < TOLERANCE


def test_what_stands_before_the_texts_differs_at_its_end(shared):
    """Where a quotation mark and a text's first letter are one token, that text's prefix is shorter."""
    model = pipeline(MetaEOLModule(shared("llama", "greedy"), templates=TASKS))
    model[0]._warned_empty = True
    texts = ["", *TEXTS, "", "Ink", "1"]
    starts = [model[0].preprocess([text])["copy_index"].ge(0).int().argmax(dim=1).tolist() for text in texts if text]
    assert len({tuple(of_text) for of_text in starts}) > 1
    together = model.encode(texts, batch_size=len(texts))
    for text, vector in zip(texts, together, strict=True):
        assert np.linalg.norm(vector - model.encode(text)) <= TOLERANCE * max(np.linalg.norm(vector), 1e-6), text


def test_a_cache_that_cannot_be_reused(backbone_path, monkeypatch):
    expected = pipeline(MetaEOLModule(backbone_path(), templates=TASKS)).encode(TEXTS)
    # As where a model makes a cache of its own.
    monkeypatch.setattr(anatomy, "DynamicCache", lambda: None)
    module = MetaEOLModule(backbone_path(), templates=TASKS)
    assert not module.keeps_prefixes
    assert relative_error(pipeline(module).encode(TEXTS), expected) < TOLERANCE


def test_a_model_whose_masks_are_its_own_is_left_as_it_was(backbone_path):
    module = MetaEOLModule(backbone_path("bloom"), templates=TASKS)
    assert not module.keeps_prefixes
    assert (
        module.model.config._attn_implementation
        == CausalTransformer(backbone_path("bloom")).model.config._attn_implementation
    )
    assert "each over the text and a prompt around it" in module.cost


def test_empty_texts(shared):
    model = pipeline(MetaEOLModule(shared(), templates=TASKS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vectors = model.encode(["", "the cat", ""])
    assert not vectors[[0, 2]].any()
    assert relative_error(vectors[1], model.encode("the cat")) < TOLERANCE


def test_room_is_that_of_the_longest_prompt(backbone_path):
    path = backbone_path("gpt2")
    short, long = "{text}", "a rather long prompt for so small a model: {text}"
    alone = {task: MetaEOLModule(path, templates=[task]).max_seq_length for task in (short, long)}
    assert alone[long] < alone[short] == 256
    both = MetaEOLModule(path, templates=[short, long])
    assert both.max_seq_length == alone[long]
    features = both.preprocess(["word " * 3_000], prompt="query: ")
    assert features["input_ids"].shape == (2, 256)
    # All prompts are given the same tokens.
    assert len(set((features["copy_index"] == 0).sum(dim=1).tolist())) == 1
    assert np.isfinite(pipeline(both).encode("word " * 3_000)).all()


def test_the_papers_prompts(roomy_path):
    assert len(META_TASKS) == len(set(META_TASKS)) == 8
    assert all(task.startswith("In this task, you're ") for task in META_TASKS)
    assert all('this sentence : "{text}" ' in task and task.endswith(' in one word:"') for task in META_TASKS)
    module = MetaEOLModule(roomy_path)
    assert module.templates == list(META_TASKS)
    assert "8 passes, in one batch" in module.cost
    assert module(module.preprocess(TEXTS[:2]))["token_embeddings"].shape == (2, 8, 32)


def test_ck(roomy_path, tmp_path):
    """Pretended CoT and Knowledge, each as its authors read it; saved, it is so again."""
    model = pipeline(MetaEOLModule(roomy_path, templates="ck"))
    module = model[0]
    assert module.templates == [TEMPLATES["pretended-cot"], TEMPLATES["knowledge"]]
    assert (module.output_layer, module.final_norm, module.normalize_text) == (2, False, True)
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded[0].get_config_dict() == module.get_config_dict()
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))


def test_the_paper_changes_the_texts_a_list_of_ones_own_does_not(roomy_path):
    assert MetaEOLModule(roomy_path).normalize_text
    assert not MetaEOLModule(roomy_path, templates=list(META_TASKS)).normalize_text
    assert not MetaEOLModule(roomy_path, normalize_text=False).normalize_text


def test_no_word_embeddings(shared):
    """Even where a sentence has as many tokens as there are prompts."""
    model = pipeline(MetaEOLModule(shared(), templates=["{text}"]))
    with pytest.raises(ValueError, match="MetaEOLModule hands on one vector a prompt, not one a token"):
        encode_words(model, ["a"], ["a"])


def test_gradients_reach_the_backbone(backbone_path):
    model = pipeline(MetaEOLModule(backbone_path(), templates=TASKS))
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    assert model[0].model.layers[0].self_attn.q_proj.weight.grad.norm() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"templates": []}, "templates: 0 of them given; give a list of 1 to 64 templates"),
        ({"templates": ["{text}"] * 65}, "templates: 65 of them given; give a list of 1 to 64"),
        ({"templates": "prompteol"}, "templates: 'prompteol' given; give a list"),
        (
            {"templates": "kc"},
            r"templates: 'kc' given; give a list .* or one of \['ck', 'ck-zh', 'meta-tasks'\], or None",
        ),
        ({"templates": 8}, "templates: 8 given; give a list"),
        ({"templates": ["{text}", "springer"]}, "The template .* has 2 slots: MetaEOLModule reads one copy"),
        ({"templates": ["{text}", "no slot"]}, r"'no slot' has no \{text\}"),
        ({"templates": [3]}, "template must be a string, but 3 was given"),
        ({"templates": ["x" * 40_000 + "{text}"] * 2}, "80,012 characters of templates were given, and at most 65,536"),
        ({"pool_over": "text"}, "pool_over='text': MetaEOL reads each prompt at its end"),
        ({"templates": ["{text}", "word " * 300 + "{text}"]}, "leave no room for 1 copies of a text"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        MetaEOLModule(shared(), **settings)
