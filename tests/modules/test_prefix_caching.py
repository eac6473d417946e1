"""What stands before all texts is run once, and each text behind it is what it is behind the whole of it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    InputEmbeddings,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    TopicModule,
)
from st_reba.lm.prefixes import KeptPrefixes
from st_reba.lm.run import PassChange
from st_reba.modules.changes import Change, Steer
from st_reba.recipes import every_row

from .. import backbones
from ..backbones import DEMO_MODEL, EACH, TEXTS
from ..conftest import long, pipeline, relative_error
from .test_changes import SETS

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens", "ignore:.*in its own code")

TOLERANCE = 1e-5
#: Longer than the windows of the architectures that have them.
PROMPT = "Represent this sentence so that others are found that say the same: "
NAMES = ("input_ids", "token_embeddings")
BATCH = [*TEXTS[:3], ""]


def encoded(module, texts=BATCH, prompt=PROMPT):
    return pipeline(module).encode(texts, prompt=prompt, batch_size=len(texts), convert_to_tensor=True)


@contextlib.contextmanager
def shapes_of(module):
    """The rows and columns of every pass in this block."""
    shapes = []
    embeddings = module.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    try:
        yield shapes
    finally:
        hook.remove()


ROWS = {row.key: row for row in every_row()}
#: Those that read or change what stands before a text, in all their forms.
WHOLE = (
    "rt-2",
    "rt-4",
    "rt-8",
    "kv-rerouting",
    "bag-of-input-embeddings",
)
CASES = [(key, []) for key in ROWS] + [long(key, changes) for key in ROWS for changes in SETS]


@pytest.mark.parametrize(("key", "changes"), CASES, ids=lambda given: given if isinstance(given, str) else str(given))
def test_every_recipe_under_every_change(key, changes, roomy_path):
    backbone = CausalTransformer(roomy_path)
    row = ROWS[key]
    settings = {**row.settings, "changes": [*row.settings.get("changes", ()), *changes]}
    if changes and "output_layer" in str(changes):
        settings.pop("output_layer", None)
    try:
        module = row.module(backbone, **settings)
    except ValueError:
        pytest.skip("what does not go together is refused: see test_changes")
    expected = encoded(row.module(backbone, prefix_caching=False, **settings))
    assert relative_error(encoded(module), expected) < TOLERANCE
    # Again, with what is kept.
    assert relative_error(encoded(module), expected) < TOLERANCE
    spared = all(change.spares_prefixes for change in module.changes)
    assert module.keeps_prefixes == (spared and key not in WHOLE)
    assert bool(module._kept_prefixes) == module.keeps_prefixes


METHODS = {
    "prompt": (CausalTransformer, {"template": 'This sentence : "{text}" means:', "pool_over": "all", "rows": "last"}),
    "all": (CausalTransformer, {"pool_over": "all"}),
    "echo": (EchoModule, {"template": "Rewrite {text}, that is {text}"}),
    "reba": (ReBAModule, {}),
    "reba, last": (ReBAModule, {"rows": "last"}),
    "reba in chunks": (ReBAModule, {"chunk_length": 5}),
    "steered": (CausalTransformer, {"template": 'This: "{text}" means:', "changes": [Steer(1)], "rows": "last"}),
    "topic": (TopicModule, {"template": 'This: "{text}", again "{text}", is about:', "lower_layers": [1]}),
    "slots": (TokenPrependingModule, {"template": 'This: {prepend} "{text}" means:', "output_layer": -1}),
    "several prompts": (MetaEOLModule, {"templates": ['This: "{text}" means:', "{text} is", "In a word, {text}:"]}),
}


@pytest.mark.parametrize("architecture", EACH)
def test_every_architecture(architecture, shared):
    backbone, used = shared(architecture), set()
    for name, (kind, settings) in METHODS.items():
        if name == "steered" and architecture in ("mpt", "gpt_neo"):
            continue
        module = kind(backbone, **settings)
        assert relative_error(encoded(module), encoded(kind(backbone, prefix_caching=False, **settings))) < TOLERANCE
        used.add(bool(module._kept_prefixes))
    assert used == {architecture not in backbones.OWN_ATTENTION}


@pytest.mark.parametrize("name", METHODS)
def test_all_layers(name, shared):
    kind, settings = METHODS[name]
    if not kind.reads_hidden_states or name.startswith("reba"):
        pytest.skip("it does not read them")
    found = []
    for caching in (True, False):
        module = kind(shared(), prefix_caching=caching, **settings)
        with torch.no_grad():
            features = module.forward_all_layers(module.preprocess(BATCH, prompt=PROMPT))
        mask = features["attention_mask"].bool()
        found.append(torch.stack([layer[mask] for layer in features["all_layer_embeddings"]]))
    assert relative_error(*found) < TOLERANCE


def test_what_is_handed_on_is_the_same_but_for_rounding(shared):
    """The tokens too, and special ones where they alone precede a text."""
    for prompt in (PROMPT, ""):
        both = []
        for caching in (True, False):
            module = CausalTransformer(shared("llama", "bert"), pool_over="all", prefix_caching=caching)
            with torch.no_grad():
                both.append(module(module.preprocess(TEXTS, prompt=prompt)))
        found, expected = ({name: own[name][own["attention_mask"].bool()] for name in NAMES} for own in both)
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert relative_error(found["token_embeddings"], expected["token_embeddings"]) < TOLERANCE


def test_a_prompt_is_run_once(shared, token_ids):
    module = EarlyLateModule(shared())
    prefix = len(token_ids('This sentence : "'))
    with shapes_of(module) as shapes:
        encoded(module, TEXTS, "")
        encoded(module, TEXTS[:2], "")
        encoded(module, TEXTS[:1], "")
    assert shapes[0] == (1, prefix)
    whole = [module.preprocess(texts)["input_ids"].shape for texts in (TEXTS, TEXTS[:2], TEXTS[:1])]
    assert shapes[1:] == [(rows, columns - prefix) for rows, columns in whole]


def test_where_the_prompts_last_token_holds_a_letter_of_some_texts(shared):
    """A prefix is what all texts of a batch have; alone, a text may have another."""
    texts = [*TEXTS, "Ink", "1", "The end"]
    module = CausalTransformer(shared("llama", "greedy"), template='A sentence: "{text}" means:', rows="last")
    starts = module.preprocess(texts)["copy_index"].ge(0).int().argmax(dim=1)
    assert len(starts.unique()) > 1
    expected = encoded(
        CausalTransformer(shared("llama", "greedy"), template=module.template, rows="last", prefix_caching=False), texts
    )
    assert relative_error(encoded(module, texts), expected) < TOLERANCE
    for text, vector in zip(texts, expected, strict=True):
        assert relative_error(encoded(module, [text])[0], vector) < TOLERANCE
    assert len(module._kept_prefixes) > 1


def test_texts_with_prompts_of_their_own(shared):
    inputs = [{"prompt": f"Given {what}: ", "text": text} for what, text in zip("abc", TEXTS, strict=False)]
    expected = encoded(ReBAModule(shared(), rows="last", prefix_caching=False), inputs[:1], None)
    module = CausalTransformer(shared())
    together = encoded(module, inputs, PROMPT)
    for text, vector in zip(inputs, together, strict=True):
        alone = encoded(CausalTransformer(shared(), prefix_caching=False), [text], PROMPT)[0]
        assert relative_error(vector, alone) < TOLERANCE
    assert relative_error(encoded(ReBAModule(shared(), rows="last"), inputs[:1], None), expected) < TOLERANCE


def test_only_the_last_few_are_kept(shared, monkeypatch):
    monkeypatch.setattr(KeptPrefixes, "MOST", 2)
    module = EchoModule(shared())
    with shapes_of(module) as shapes:
        for prompt in ("one: ", "two: ", "one: ", "three: ", "one: ", "two: "):
            encoded(module, prompt=prompt)
            assert len(module._kept_prefixes) <= 2
    # The second was dropped, as the first had been asked for since.
    assert sum(rows == 1 for rows, _ in shapes) == 4


def test_a_pass_leaves_what_is_kept_as_it_was(shared):
    module = EchoModule(shared())
    encoded(module)
    [prefixes] = module._kept_prefixes._found.values()
    before = [values.clone() for layer in prefixes.layers for values in layer]
    encoded(module, TEXTS)
    after = [values for layer in prefixes.layers for values in layer]
    assert all(map(torch.equal, before, after))


def test_it_is_neither_copied_nor_pickled_nor_saved(backbone_path, tmp_path):
    model = pipeline(EchoModule(backbone_path()))
    vectors = model.encode(BATCH, prompt=PROMPT)
    assert model[0]._kept_prefixes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other[0]._kept_prefixes
        assert relative_error(other.encode(BATCH, prompt=PROMPT), vectors) < TOLERANCE
    model.save_pretrained(str(tmp_path))
    assert "prefix_caching" not in model[0].get_config_dict()
    assert SentenceTransformer(str(tmp_path), device="cpu")[0].prefix_caching


def test_turned_off_it_is_saved_so(shared, tmp_path):
    module = CausalTransformer(shared(), template="knowledge", prefix_caching=False)
    encoded(module)
    assert not module._kept_prefixes
    pipeline(module).save_pretrained(str(tmp_path))
    assert not SentenceTransformer(str(tmp_path), device="cpu")[0].prefix_caching


def test_it_is_checked(shared):
    with pytest.raises(ValueError, match="prefix_caching='no': use True or False"):
        CausalTransformer(shared(), prefix_caching="no")


def doubled(module):
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.mul_(2)


def loaded_anew(module):
    module.load_state_dict({name: weight * 1.5 for name, weight in module.state_dict().items()})


def rounded(module):
    module.half().float()


def widened(module):
    module.double()


def replaced(module):
    weight = module.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 2


@pytest.mark.parametrize("change", [doubled, loaded_anew, rounded, widened, replaced])
def test_other_weights_have_other_prefixes(change, backbone_path):
    module = CausalTransformer(backbone_path(), template="prompteol")
    before = encoded(module, TEXTS)
    change(module)
    after = encoded(module, TEXTS)
    assert not torch.equal(before, after)
    module.prefix_caching = False
    assert relative_error(after, encoded(module, TEXTS)) < TOLERANCE


def test_weights_that_another_module_changes(backbone_path):
    backbone = CausalTransformer(backbone_path())
    module = EchoModule(backbone)
    encoded(module)
    doubled(backbone)
    expected = encoded(EchoModule(backbone, prefix_caching=False))
    assert relative_error(encoded(module), expected) < TOLERANCE


def test_training_reads_whole_prompts_and_drops_what_is_kept(backbone_path):
    module = CausalTransformer(backbone_path(), template="prompteol")
    features = module.preprocess(TEXTS)
    encoded(module, TEXTS, "")
    with shapes_of(module) as shapes:
        module(dict(features))["token_embeddings"].sum().backward()
        assert module._kept_prefixes
        module.train()
        with torch.no_grad():
            module(dict(features))
    assert not module._kept_prefixes
    assert {columns for _, columns in shapes} == {features["input_ids"].shape[1]}
    assert module.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0


def test_with_an_adapter_prompts_are_run_whole(backbone_path):
    peft = pytest.importorskip("peft")
    module = CausalTransformer(backbone_path(), template="prompteol")
    encoded(module)
    module.model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted = encoded(module)
    module.model.disable_adapters()
    plain = encoded(module)
    assert not torch.allclose(adapted, plain)
    assert relative_error(plain, encoded(CausalTransformer(backbone_path(), template="prompteol"))) < TOLERANCE
    assert not module.keeps_prefixes


def test_attention_that_was_chosen_stays(backbone_path):
    module = CausalTransformer(backbone_path(), template="prompteol")
    module.model.set_attn_implementation("flex_attention")
    assert not module.keeps_prefixes
    assert module.model.config._attn_implementation == "flex_attention"


def test_autocast_has_prefixes_of_its_own(shared):
    module = CausalTransformer(shared(), template="prompteol")
    plain = encoded(module)
    with torch.autocast("cpu", torch.bfloat16):
        rounded_ones = encoded(module)
    assert relative_error(rounded_ones, plain) < 0.05
    assert relative_error(encoded(module), plain) < 1e-6
    assert len(module._kept_prefixes) == 2


@pytest.mark.parametrize("name", ["prompt", "reba"])
def test_in_half_precision(name):
    kind, settings = METHODS[name]
    backbone = CausalTransformer(str(DEMO_MODEL), model_kwargs={"dtype": "bfloat16"})
    module = kind(backbone, **settings)
    found, expected = (
        encoded(own, TEXTS).float() for own in (module, kind(backbone, prefix_caching=False, **settings))
    )
    assert len(module._kept_prefixes) == 1
    assert torch.cosine_similarity(found, expected).min() > 0.99


def test_what_a_caller_gives_the_backbone_is_about_whole_rows(shared):
    module = CausalTransformer(shared(), template="prompteol")
    features = module.preprocess(TEXTS)
    with torch.no_grad():
        positions = torch.arange(features["input_ids"].shape[1])[None]
        given = module(dict(features), position_ids=positions)["token_embeddings"]
        assert not module._kept_prefixes
        assert relative_error(module(dict(features), task="query")["token_embeddings"], given) < TOLERANCE
        assert module._kept_prefixes


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (CausalTransformer, {"pool_over": "whole"}),
        (CausalTransformer, {"deterministic": True}),
        (BidirectionalLastLayer, {}),
        (KVReroutingModule, {}),
        (RefinedThoughtModule, {}),
        (InputEmbeddings, {}),
    ],
)
def test_what_does_not_use_it(kind, settings, shared):
    module = kind(shared(), **settings)
    encoded(module)
    assert not module._kept_prefixes
    assert not module.keeps_prefixes


class Louder(Change):
    """A change of a user's own that alters every state, and looks at none behind it."""

    key = "louder"
    looks_ahead = False

    def effect(self, model, layout):
        from st_reba.lm.run import Hook

        return PassChange(hooks={model.get_input_embeddings(): Hook(after=lambda states: 2 * states)})


def test_a_change_of_ones_own_runs_whole_prompts_unless_it_says_otherwise(shared):
    settings = {"templates": ['This: "{text}" means:', "In a word, {text}:"], "changes": [Louder()]}
    module = MetaEOLModule(shared(), **settings)
    expected = encoded(MetaEOLModule(shared(), prefix_caching=False, **settings))
    assert relative_error(encoded(module), expected) < TOLERANCE
    assert not module.keeps_prefixes


def test_threads_share_what_is_kept(shared):
    module = ReBAModule(shared(), rows="last")
    prompts = ["query: ", "passage: ", PROMPT]
    expected = {prompt: encoded(module, TEXTS, prompt) for prompt in prompts}
    module._kept_prefixes.clear()
    with ThreadPoolExecutor(4) as threads:
        asked = 8 * prompts
        for prompt, found in zip(asked, threads.map(lambda prompt: encoded(module, TEXTS, prompt), asked), strict=True):
            assert relative_error(found, expected[prompt]) < 1e-6
    assert len(module._kept_prefixes) == 3
