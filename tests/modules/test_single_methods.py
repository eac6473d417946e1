"""What single methods have of their own, besides their oracle; and how texts go in, whatever the method."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

import st_reba
from st_reba import CausalTransformer, EchoModule
from st_reba.lm.model import LanguageModel
from st_reba.modules import CausalModule
from st_reba.modules.reverse_eol import in_reverse
from st_reba.modules.vectors import TokenVectors
from st_reba.recipes import every_row, find
from st_reba.settings import NO_LIMIT

from .. import backbones, oracles
from ..backbones import DEMO_MODEL, TEXTS, own
from ..conftest import pipeline, relative_error, reloaded
from .methods import RECIPES, TOLERANCE, read

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


def test_all_prompts_run_in_one_batch_behind_what_precedes_the_texts(shared, token_ids):
    tasks = ['Topic of "{text}":"', "{text} sounds", 'In one word, this text: "{text}" means:"', "promptsth"]
    module = st_reba.MetaEOLModule(shared(), templates=tasks)
    shapes = []
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    for texts in (["a", "a"], ["a"]):
        with torch.no_grad():
            assert module(module.preprocess(texts))["token_embeddings"].shape == (len(texts), 4, 32)
    literals = [st_reba.TEMPLATES.get(task, task).split("{text}") for task in tasks]
    width = len(token_ids("a")) + max(len(token_ids(after)) for _, after in literals)
    # Before that, each prefix runs once.
    assert shapes[-2:] == [(8, width), (4, width)]


def test_prompts_of_many_texts_run_one_by_one(shared, monkeypatch):
    """A batch of all of them would not fit the caches of a CPU; the vectors are the same."""
    module = st_reba.MetaEOLModule(shared(), templates=["prompteol", "{text} sounds", "promptsth"])
    together = read(module, TEXTS)
    monkeypatch.setattr(st_reba.MetaEOLModule, "TOKENS_PER_THREAD", 400)
    for first, second in zip(together, read(module, TEXTS), strict=True):
        assert relative_error(first, second) < TOLERANCE


def test_room_is_that_of_the_longest_prompt(backbone_path):
    path = backbone_path("gpt2")
    short, long = "{text}", "a rather long prompt for so small a model: {text}"
    alone = {task: st_reba.MetaEOLModule(path, templates=[task]).max_seq_length for task in (short, long)}
    both = st_reba.MetaEOLModule(path, templates=[short, long])
    assert both.max_seq_length == alone[long] < alone[short] == 256
    first, second = both.lay_out([LONG], prompt="query: ")
    assert second.input_ids.shape == (1, 256)
    # All prompts are given the same tokens.
    assert torch.equal(first.input_ids[first.copy_index == 0], second.input_ids[second.copy_index == 0])


def test_the_papers_prompts(roomy_path):
    """They change the texts; a list of one's own does not."""
    module = st_reba.MetaEOLModule(roomy_path)
    assert (module.templates, module.normalize_text) == ([*st_reba.META_TASKS], True)
    assert not st_reba.MetaEOLModule(roomy_path, templates=list(st_reba.META_TASKS)).normalize_text


REVERSED = [
    ("A cat sat.", None, "sat. cat A"),
    ("  two\nlines ", None, "lines two"),
    (" ", [(0, 1)], " "),
    # Cut after the second word, or before it.
    ("one two three", [(0, 3), (3, 7)], "two one"),
    ("one two three", [(3, 7), (7, 13)], "three two"),
    # Tokens that share a character, and a mark that normalization added.
    ("我爱你们", [(0, 1), (0, 1), (1, 2), (2, 4), (4, 5)], "你们爱我"),
    ("我爱你们", None, "们你爱我"),
    ("สวัสดี", [(0, 3), (3, 6)], "สดีสวั"),
    ("用 Python 编程", None, "编程 Python 用"),
]


@pytest.mark.parametrize(("text", "spans", "expected"), REVERSED)
def test_a_text_in_reverse(text, spans, expected):
    assert in_reverse(text, spans) == expected


def test_a_long_text_is_cut_before_it_is_reversed(shared):
    module = st_reba.ReverseEOLModule(shared(), template="{text}")
    layouts = module.lay_out([" ".join("abcdefghij"), {"prompt": "of: ", "text": "a b"}], length=6)
    words = [module.tokenizer.batch_decode(layout.input_ids, skip_special_tokens=True) for layout in layouts]
    (long, own), (turned, other) = ([text.split() for text in texts] for texts in words)
    assert 1 < len(long) < 10
    assert turned == long[::-1]
    assert (own, other) == (["of:", "a", "b"], ["of:", "b", "a"])


def test_its_parts_are_standardised_and_added(shared):
    texts = [f"{word} and {other}" for word in "abcd" for other in "efg"]
    model = st_reba.build(shared(), "reverse-eol", texts)
    parts = pipeline(st_reba.ReverseEOLModule(shared(), average=False), "lasttoken").encode([*texts, "", "a b"])
    fit, some = parts[:12].reshape(12, 2, -1), parts[12:].reshape(2, 2, -1)
    scaled = (some - fit.mean(axis=0)) / fit.std(axis=0)
    summed = (scaled / np.linalg.norm(scaled, axis=2, keepdims=True)).sum(axis=1)[1]
    empty, found = model.encode(["", "a b"])
    assert not empty.any()
    assert relative_error(found, summed / np.linalg.norm(summed)) < TOLERANCE


def ran(module) -> list[str]:
    """The parts of a model that run for one text, behind a prompt whose states are kept already."""
    pipeline(module, "lasttoken").encode(TEXTS[0])
    names: list[str] = []
    for name, part in module.model.named_modules():
        part.register_forward_pre_hook(lambda module, args, name=name: names.append(name))
    pipeline(module, "lasttoken").encode(TEXTS[0])
    return names


def test_no_pass_goes_on_above_where_it_is_read(shared):
    """Value aggregation and contrastive prompting read and change what the output projections of attention do."""
    names = ran(st_reba.ValueAggregationModule(shared(), layers=[0, 1]))
    assert names[-1] == "layers.1.self_attn.o_proj"  # nothing behind it, in its own layer either
    assert "layers.0.mlp" in names
    names = ran(st_reba.ContrastivePromptingModule(shared(), contrast_layer=1, output_layer=-1))
    assert names.count("layers.0.mlp") == names.count("layers.1.self_attn.v_proj") == 2
    assert names.count("layers.1.mlp") == names.count("layers.2") == 1


def test_where_both_prompts_say_the_same_nothing_is_left(shared, eager):
    for scale in (0.5, "norm"):
        settings = {"template": "x {text}", "auxiliary_template": "x {text}", "contrast_layer": 2, "scale": scale}
        module = st_reba.ContrastivePromptingModule(shared(), **settings)
        ids = module.tokenizer("x the cat")["input_ids"]
        nothing = oracles.changed(eager(), "layers.2.self_attn.o_proj", before=lambda states: states * 0)
        with torch.no_grad(), nothing:
            expected = oracles.seen(eager(), "layers.2", ids, "after")[-1]
        assert relative_error(pipeline(module, "lasttoken").encode("the cat"), expected) < TOLERANCE


def test_the_feed_forward_part_runs_for_the_tokens_that_are_read_alone(backbone_path):
    module = st_reba.CausalTransformer(backbone_path(), rows="last")
    seen = []
    part = module.lm.layers[-1].mlp.down_proj
    part.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel()))
    read(module, TEXTS)
    assert set(seen) == {len(TEXTS)}
    # The layers are run a second time for their gradients, when no hook is called.
    module.model.train().gradient_checkpointing_enable()
    module(module.preprocess(TEXTS))
    assert seen[-1] > len(TEXTS)


IN_HALF = [(st_reba.BidirectionalLastLayer, "bfloat16"), (st_reba.ReBAModule, "float16")]


@pytest.mark.parametrize(("module_class", "dtype"), IN_HALF)
def test_a_small_effect_in_half_precision_is_an_effect(module_class, dtype):
    """In the demo model, one bidirectional layer moves the first token by less than bfloat16's rounding might."""
    module = module_class(str(DEMO_MODEL), bidirectional_layers=1, model_kwargs={"dtype": dtype})
    assert module.bidirectional_layers == 1


class TestRefinedThought:
    def test_settled_texts_stop(self, shared):
        model = pipeline(st_reba.RefinedThoughtModule(shared(), iterations=6, tolerance=1.99), "lasttoken")
        assert [int(item["passes"]) for item in model.encode(TEXTS, output_value=None)] == [2] * 5
        models = [pipeline(st_reba.RefinedThoughtModule(shared(), iterations=t), "lasttoken") for t in range(1, 7)]
        steps = [model.encode(TEXTS, convert_to_tensor=True) for model in models]
        moved = torch.stack([1 - torch.cosine_similarity(a, b) for a, b in pairwise(steps)])
        # Between two texts, so that rounding does not decide.
        tolerance = float(moved[2].sort().values[1:3].mean())
        model = pipeline(st_reba.RefinedThoughtModule(shared(), iterations=6, tolerance=tolerance), "lasttoken")
        items = model.encode(TEXTS, output_value=None)
        assert len({int(item["passes"]) for item in items}) > 1
        for text, item in enumerate(items):
            settled = (moved[:, text] < tolerance).nonzero()
            assert item["passes"] == (int(settled[0]) + 2 if len(settled) else 6)
            # Rounding grows with every pass, and the batches differ.
            assert relative_error(item["sentence_embedding"], steps[item["passes"] - 1][text]) < 10 * TOLERANCE

    def test_what_it_needs_of_a_model(self, backbone_path, monkeypatch):
        said = "iterations=2 with bidirectional_layers=1 on LlamaModel: .* causal layers"
        with pytest.raises(ValueError, match=said):
            st_reba.RefinedThoughtModule(backbone_path(), bidirectional_layers=1)
        assert st_reba.RefinedThoughtModule(backbone_path(), bidirectional_layers=1, iterations=1).iterations == 1
        # As where a model makes a cache of its own.
        monkeypatch.setattr(LanguageModel, "continues_past", False)
        with pytest.raises(ValueError, match="further passes continue the keys and values of the text"):
            st_reba.RefinedThoughtModule(backbone_path())

    def test_nothing_that_forward_is_given_reaches_a_pass(self, shared, monkeypatch):
        module, seen = st_reba.RefinedThoughtModule(shared(), iterations=3), []
        forward = module.model.forward
        monkeypatch.setattr(module.model, "forward", lambda **kwargs: seen.append(kwargs) or forward(**kwargs))
        module(module.preprocess(TEXTS), output_attentions=True, task="query")
        assert len(seen) == 3
        assert not any({"output_attentions", "task"} & kwargs.keys() for kwargs in seen)

    def test_a_tokenizer_without_an_end(self, tmp_path):
        """It is refused when the module is made, also where the model has no limit of positions."""
        backbones.backbone("bloom").save_pretrained(tmp_path)
        tokenizer = backbones.tokenizer("bytes")
        tokenizer.eos_token = None
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="has no end-of-sequence token: set tokenizer.eos_token"):
            st_reba.RefinedThoughtModule(str(tmp_path), iterations=1)


def test_the_vector_of_a_slot_is_saved(shared, tmp_path):
    model = pipeline(st_reba.TokenPrependingModule(shared(), seed=7), "lasttoken")
    # Not the seed decides what is loaded, but the vector: another release may draw otherwise.
    model[0].initial_state.mul_(-2)
    model.save_pretrained(str(tmp_path))
    file = own(tmp_path) / st_reba.TokenPrependingModule.FILE
    assert list(load_file(file)) == ["initial_state"]
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))
    for state in ({"initial_state": torch.zeros(5)}, {"other": torch.zeros(32)}):
        save_file(state, file)
        with pytest.raises(ValueError, match="give 32 values, as many as the model's input embeddings"):
            SentenceTransformer(str(tmp_path), device="cpu")


class Title(str):
    """A string with a class of its own, as BeautifulSoup's are."""


def test_whatever_is_a_string_is_a_text(shared):
    encode, plain = pipeline(st_reba.EchoModule(shared())).encode, ["the cat", "a dog"]
    expected = encode(plain)
    for kind in (np.str_, Title):
        texts = list(map(kind, plain))
        assert np.array_equal(encode(texts), expected)
        assert np.array_equal(encode([{"prompt": kind(""), "text": text} for text in texts]), expected)
    column = pytest.importorskip("pandas").Series(plain, index=[7, 9])
    assert np.array_equal(encode(column.to_numpy()), expected)
    with pytest.raises(ValueError, match=r"0 of its batch is a Series: .* Give a column as a list: list\(column\)\.$"):
        encode(column)


def test_one_warning_for_empty_texts(shared):
    encode = pipeline(st_reba.EchoModule(shared())).encode
    with pytest.warns(UserWarning, match="A text without tokens .* zero vector") as caught:
        encode(["", "a", "", ""], batch_size=1)
    assert len([warning for warning in caught if "without tokens" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode([""])


def test_one_warning_for_a_long_text_whose_length_is_nobodys_choice(roomy_path, monkeypatch):
    monkeypatch.setattr(CausalModule, "LONG_TEXT", 50)
    long, message = ("a " * 60, r"A text of \d+ tokens is read as a whole, because max_seq_length is not set.*=50 or")
    module = st_reba.EchoModule(roomy_path)
    with pytest.warns(UserWarning, match=message) as caught:
        pipeline(module).encode(["short", long, long], batch_size=1)
    assert len(caught) == 1
    shared = st_reba.EchoModule(st_reba.CausalTransformer(roomy_path))
    with pytest.warns(UserWarning, match=message):
        shared.preprocess([long])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st_reba.EchoModule(shared).preprocess([long])
        st_reba.EchoModule(roomy_path).preprocess([long], processing_kwargs={"text": {"max_length": 500}})
        st_reba.EchoModule(roomy_path).preprocess(["short"], prompt=long)
        for settings in ({"max_seq_length": 500}, {"processor_kwargs": {"model_max_length": 500}}):
            st_reba.EchoModule(roomy_path, **settings).preprocess([long])
        model = pipeline(st_reba.EchoModule(roomy_path))
        model.max_seq_length = 500
        model.encode([long])


class Both(CausalModule):
    """The sum of a text and of another, the part of the input behind a bar."""

    def __init__(self, backbone, **settings):
        super().__init__(backbone, template=["prompteol", "prompteol"], **settings)

    def lay_out(self, inputs, prompt="", length=None):
        pairs = [text.split("|") for text in inputs]
        return [super(Both, self).lay_out([pair[i] for pair in pairs], prompt, length)[i] for i in (0, 1)]

    def read(self, layout, other):
        first, second = super().read(layout), super().read(other)
        return first._replace(states=first.states + second.states)


def test_a_layout_without_tokens_adds_nothing(shared):
    module, plain = Both(shared()), st_reba.CausalTransformer(shared(), template="prompteol")
    texts = ["a|b", "a|", "|b", "|"]
    a, b = read(plain, ["a", "b"])
    for vector, expected in zip(read(module, texts), [a + b, a, b, 0 * a], strict=True):
        assert torch.allclose(torch.as_tensor(vector), torch.as_tensor(expected), atol=1e-5)


def test_one_vector_for_each_row(shared):
    layout = st_reba.CausalTransformer(shared()).lay_out(["a", ""])[0]
    vectors = TokenVectors.one_each(torch.ones(2, 4), layout, layout.ends)
    assert vectors.states.sum(dim=(1, 2)).tolist() == [4, 0]
    assert vectors.mask.all()
    with pytest.raises(ValueError, match=r"shape \(2, 1, 4\): give one vector for each row, \(B, D\)"):
        TokenVectors.one_each(vectors.states, layout, layout.ends)


@pytest.mark.parametrize(("kind", "before", "after"), [("bert", [2], [3]), ("sentencepiece", [1], [])])
def test_prompt_and_special_tokens_stand_once_around_all_copies(kind, before, after, shared, eager):
    """They are context, never pooled."""
    for method, oracle in ((st_reba.ReBAModule, oracles.algorithm_2), (st_reba.EchoModule, oracles.echo)):
        module = method(shared("llama", kind))
        found = pipeline(module).encode(TEXTS[:3], output_value="token_embeddings", prompt="the fox: ")
        strings = ["the fox: ", *TEXTS[:3]]
        prompt, *texts = (module.tokenizer(own, add_special_tokens=False)["input_ids"] for own in strings)
        for ids, states in zip(texts, found, strict=True):
            expected = oracle(eager(), ids, 2, before + prompt, after).detach()
            assert relative_error(states, expected) < TOLERANCE


def test_pool_over_all_begins_at_the_copy_that_is_read(shared):
    backbone = shared("llama", "bert")
    own, literal = (backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", "fox"))
    repeated = {"template": "{text}{text}fox{text}", "pool_copies": "repeated"}
    cases = [
        (st_reba.CausalTransformer, {}, None, [2, *own, 3]),
        (st_reba.CausalTransformer, {}, "fox ", [*own, 3]),
        (st_reba.CausalTransformer, {"template": "fox {text} fox"}, None, [*own, *literal, 3]),
        (st_reba.EchoModule, repeated, None, [*own, *literal, *own, 3]),
    ]
    for kind, settings, prompt, expected in cases:
        module = kind(backbone, pool_over="all", **settings)
        assert pipeline(module).encode("the cat", prompt=prompt, output_value=None)["input_ids"].tolist() == expected


@pytest.mark.parametrize("recipe", ["reba-2", "metaeol", "contrastive prompting"])
def test_a_batch_with_prompts_of_their_own(recipe, shared):
    kind, settings = RECIPES[recipe]
    encode = pipeline(kind(shared(), **settings)).encode
    alike = [{"prompt": f"{prompt} ", "text": text} for prompt, text in zip(("cat", "dog"), TEXTS, strict=False)]
    longer = [alike[0], {"prompt": "the dog and the cat: ", "text": TEXTS[1]}]
    for texts in (alike, longer):
        assert relative_error(encode(texts), np.concatenate([encode([each]) for each in texts])) < TOLERANCE


LONG = "word " * 3_000


def test_the_length_of_a_text(backbone_path, tmp_path):
    """As much as the model has room for, in every copy and behind a prompt; it may be set, and given for one call."""
    model = pipeline(st_reba.EchoModule(backbone_path("gpt2", "bert")))
    assert model[0].preprocess([LONG])["input_ids"].shape[1] == 256
    assert np.isfinite(model.encode(LONG, prompt="a long enough prompt ")).all()
    for length, expected in ((4, 4), (10_000, 127), (None, 127)):
        model.max_seq_length = length
        assert model.max_seq_length == expected
    features = model[0].preprocess([LONG], processing_kwargs={"text": {"max_length": 3}})
    assert features["input_ids"].shape[1] == 8
    unlimited = st_reba.EchoModule(backbones.save(backbones.backbone("bloom"), tmp_path, model_max_length=NO_LIMIT))
    assert unlimited.max_seq_length is None
    assert unlimited.preprocess(["a " * 700])["input_ids"].shape[1] >= 1400


def test_what_is_changed_of_a_tokenizer_is_seen_at_once(roomy_path):
    module = st_reba.RefinedThoughtModule(roomy_path)
    module.tokenizer.eos_token = "c"
    assert module.lay_out(["a cat"])[0].input_ids[0, -1] == module.tokenizer.convert_tokens_to_ids("c")
    module.processor = backbones.tokenizer("bert", eos_token="[SEP]")
    assert module.lay_out(["a cat"])[0].input_ids[0].tolist() == module.tokenizer("a cat")["input_ids"]


POOLING_ADVICE = [
    ("thought-2", "mean", 'Use Pooling("lasttoken").'),
    ("thought-1", "mean", None),
    ("reba-2", "cls", 'Use Pooling("mean") or Pooling("lasttoken").'),
    ("reba-2", ("mean", "lasttoken"), None),
    ("echo topic", "max", 'Use Pooling("mean").'),
]


@pytest.mark.parametrize(("recipe", "pooling", "advice"), POOLING_ADVICE)
def test_a_pooling_that_a_method_is_not_made_for_is_said_once(recipe, pooling, advice, shared, tmp_path):
    """When the pipeline is complete; and again when it is loaded, whose user may be another."""
    kind, settings = RECIPES[recipe]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = pipeline(kind(shared(), **settings), pooling)
        model.encode(["the cat", "a"])
        reloaded(model, tmp_path)
    messages = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert len(messages) == 2 * bool(advice)
    for message in messages:
        assert message.startswith(f"{kind.__name__} is followed by Pooling(")
        assert message.endswith(advice)


# What stands before all texts is run once, and each text behind it is what it is behind the whole of it

#: Longer than the windows of the architectures that have them.
PROMPT = "Represent this sentence so that others are found that say the same: "
BATCH = [*TEXTS[:3], ""]


def encoded(module, texts=BATCH, prompt=PROMPT):
    return pipeline(module).encode(texts, prompt=prompt, batch_size=len(texts), convert_to_tensor=True)


#: These read or change what stands before a text.
WHOLE = (
    "rt-2", "rt-4", "rt-8", "kv-rerouting", "no-sink", "bidirectional", "bidirectional-prompt", "echo-2-bidirectional",
    "reba-2-bidirectional",
)  # fmt: skip


@pytest.mark.parametrize("key", [row.key for row in every_row()])
def test_every_recipe(key, roomy):
    recipe = find(key)
    module = recipe.build(roomy)
    expected = encoded(recipe.build(roomy, prefix_caching=False))
    assert relative_error(encoded(module), expected) < TOLERANCE
    # Again, with what is kept.
    assert relative_error(encoded(module), expected) < TOLERANCE
    assert bool(module.lm.prefixes) == module.caches_prefixes == (key not in WHOLE)


def test_it_is_neither_copied_nor_pickled_nor_saved(backbone_path, tmp_path):
    model = pipeline(EchoModule(backbone_path()))
    vectors = model.encode(BATCH, prompt=PROMPT)
    assert model[0].lm.prefixes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other[0].lm.prefixes
        assert relative_error(other.encode(BATCH, prompt=PROMPT), vectors) < TOLERANCE
    assert reloaded(model, tmp_path)[0].prefix_caching


@pytest.mark.parametrize("write", ["in place", "loaded anew", "rounded"])
def test_other_weights_have_other_prefixes(write, backbone_path):
    """Of a weight of the backbone, which another module may write, or of the module."""
    backbone = CausalTransformer(backbone_path())
    module = CausalTransformer(backbone, template="prompteol")
    before = encoded(module, TEXTS)
    if write == "in place":
        backbone.model.layers[0].self_attn.k_proj.weight.detach().mul_(2)
    elif write == "loaded anew":
        module.load_state_dict({name: weight * 1.5 for name, weight in module.state_dict().items()})
    else:
        module.half().float()
    after = encoded(module, TEXTS)
    assert not torch.equal(before, after)
    module.prefix_caching = False
    assert relative_error(after, encoded(module, TEXTS)) < TOLERANCE


def test_with_an_adapter_prompts_are_run_whole(backbone_path):
    peft = pytest.importorskip("peft")
    module = CausalTransformer(backbone_path(), template="prompteol")
    expected = encoded(module)
    module.model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert not torch.allclose(encoded(module), expected)
    module.model.disable_adapters()
    rows = set()
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: rows.add(len(args[0])))
    assert relative_error(encoded(module), expected) < TOLERANCE
    assert rows == {len(BATCH)}
