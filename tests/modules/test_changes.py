"""Any module takes changes: whatever goes together equals a naive composition, alone or in a batch, saved or not."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    EchoModule,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
)
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.run import PassChange
from st_reba.modules.changes import (
    AttendBothWays,
    Change,
    EarlyExit,
    Prepend,
    Reroute,
    Steer,
    register,
)
from st_reba.text.layout import PREPENDED
from st_reba.text.templates import normalized

from .. import oracles
from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import long, pipeline, relative_error
from .methods import RECIPES, Naive, expected, read, vector

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")

TOLERANCE = 1e-5

TURN, EXIT, PREPEND, REROUTE, STEER = (
    AttendBothWays(1), EarlyExit(2), Prepend(2, seed=3), Reroute([1], prefix_bias=0.5),
    Steer(1, 0.5, 'Not so: "{text}" but'),
)  # fmt: skip
ALL = [TURN, EXIT, PREPEND, REROUTE, STEER]

#: Each alone, each pair of those that change what a token knows, and all at once.
SETS = [
    *([change] for change in ALL),
    *map(list, itertools.combinations([change for change in ALL if change != EXIT], 2)),
    ALL,
]


#: The layouts: one copy, a prompt, several copies, EOS, several prompts.
METHODS = {
    **{name: RECIPES[name] for name in (
        "classical", "prompteol", "echo-3 repeated", "reba-2", "reba-3 last", "metaeol",
        "value aggregation", "early and late", "layer states", "contrastive prompting",
    )},
    "thought": (RefinedThoughtModule, {"iterations": 3}),
    "prepending": (TokenPrependingModule, {"prepend_layers": 2}),
    "re-routed": (KVReroutingModule, {"layers": [1], "prefix_bias": 0.5}),
}  # fmt: skip

#: What does not go together, and what is said of it.
REFUSED = {
    ("prepending", PREPEND): "TokenPrependingModule is given the change 'prepend' with .*, and makes it already",
    ("re-routed", REROUTE): "KVReroutingModule is given the change 'reroute' with .*, and makes it already",
    ("contrastive prompting", STEER): "ContrastivePromptingModule is given the change 'steer' .*, and makes it already",
}


@pytest.fixture(scope="module")
def loaded(backbone_path):
    return {name: CausalTransformer(backbone_path(name)) for name in ("llama", "gemma3")}


@contextlib.contextmanager
def changed(architecture, changes, eager, token_ids):
    """A plain eager model with all of these changes, each written out."""
    model = eager(architecture)
    kinds = {type(change): change for change in changes}
    with contextlib.ExitStack() as stack, torch.no_grad():
        if EarlyExit in kinds:
            model = oracles.shortened(model, kinds[EarlyExit].output_layer)
        slot = ()
        if Prepend in kinds:
            model, number = oracles.with_slot(model, vector(Naive(model, token_ids), kinds[Prepend].seed))
            slot = (number,)
            stack.enter_context(oracles.prepended(model, architecture, number, kinds[Prepend].prepend_layers))
        if AttendBothWays in kinds:
            stack.enter_context(oracles.both_ways(model, kinds[AttendBothWays].bidirectional_layers))
        if Reroute in kinds:
            stack.enter_context(oracles.rerouted(model, kinds[Reroute].layers, kinds[Reroute].prefix_bias))
        yield Naive(model, token_ids, architecture, slot, kinds.get(Steer))


#: All at once that go together under every method, and each alone under one; ``make test-long`` takes all sets.
CASES = [
    *((method, "llama", [change for change in ALL if (method, change) not in REFUSED]) for method in METHODS),
    *(("prompteol", "llama", [change]) for change in ALL),
    *((method, "gemma3", ALL) for method in ("reba-2", "value aggregation")),
    *(long(method, "llama", changes) for method, changes in itertools.product(METHODS, SETS)
      if not any((method, change) in REFUSED for change in changes)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "architecture", "changes"),
    CASES,
    ids=lambda given: given if isinstance(given, str) else " + ".join(change.key for change in given),
)
def test_equals_a_naive_composition(method, architecture, changes, loaded, eager, token_ids, tmp_path):
    kind, settings = METHODS[method]
    module = kind(loaded[architecture], changes=changes, **settings)
    texts = [TEXTS[0], TEXTS[2], ""]
    together, alone = read(module, texts), read(module, texts[:1])
    assert not together[-1].any()
    assert relative_error(alone[0], together[0]) < TOLERANCE
    with changed(architecture, changes, eager, token_ids) as naive:
        for text, states in zip(texts[:-1], together, strict=False):
            # These make a change of their own, which the other prompt is read under, too.
            own = method in ("prepending", "re-routed")
            as_read = normalized(text) if module.normalize_text else text
            with contextlib.nullcontext() if own else naive.steered(as_read, module.tokenization == "whole"):
                wanted = expected(naive, kind, settings, text)
            assert relative_error(states, wanted) < TOLERANCE, text
    module.save(str(tmp_path))
    again = kind.load(str(tmp_path))
    assert again.changes == module.changes
    assert all(map(torch.equal, together, read(again, texts)))


@pytest.mark.parametrize(("method", "change"), REFUSED, ids=str)
def test_what_does_not_go_together(method, change, loaded):
    kind, settings = METHODS[method]
    with pytest.raises(ValueError, match=REFUSED[method, change]):
        kind(loaded["llama"], changes=[change], **settings)


class TestASlotInATemplate:
    """Wherever the change Prepend is made, ``{prepend}`` says where the slot stands; else nothing fills it."""

    @pytest.mark.parametrize(
        ("kind", "templates"),
        [
            (CausalTransformer, ['So {prepend} This: "{text}" means:']),
            (MetaEOLModule, ['{prepend} This: "{text}" means:', "So {text} is"]),
        ],
    )
    def test_in_prompts(self, kind, templates, loaded, eager, token_ids, tmp_path):
        """The last token's state, by the oracle of token prepending; without a place, a slot is right before a text."""
        given = {"templates": templates} if kind is MetaEOLModule else {"template": templates[0], "rows": "last"}
        module = kind(loaded["llama"], pool_over="all", changes=[PREPEND], **given)
        settings = {"prepend_layers": 2, "seed": 3, "final_norm": True, "rows": "last"}
        found = read(module, TEXTS)
        for text, states in zip(TEXTS, found, strict=True):
            with torch.no_grad():
                wanted = [
                    expected(Naive(eager(), token_ids), TokenPrependingModule, {**settings, "template": own}, text)
                    for own in templates
                ]
            assert relative_error(states, torch.cat(wanted)) < TOLERANCE
        module.save(str(tmp_path))
        assert all(map(torch.equal, read(kind.load(str(tmp_path)), TEXTS), found))

    def test_before_the_first_of_several_copies(self, loaded):
        usual = EchoModule(loaded["llama"], template="Of {text}, {text}", changes=[PREPEND])
        placed = EchoModule(loaded["llama"], template="Of {prepend}{text}, {text}", changes=[PREPEND])
        assert all(map(torch.equal, read(placed, TEXTS), read(usual, TEXTS)))
        first = EchoModule(loaded["llama"], template="{prepend}Of {text}, {text}", changes=[PREPEND])
        assert first.preprocess(TEXTS[:1])["copy_index"][0, 0] == PREPENDED

    def test_in_the_prompt_that_is_steered_away_from(self, loaded):
        steer = Steer(1, 0.5, 'Not {prepend} so: "{text}" but')
        module = EchoModule(loaded["llama"], changes=[PREPEND, steer])
        assert (module.preprocess(TEXTS)["copy_index_of_steer"] == PREPENDED).sum(dim=1).tolist() == [1] * len(TEXTS)
        with pytest.raises(ValueError, match=r"has \{prepend\}, and nothing is prepended"):
            EchoModule(loaded["llama"], changes=[steer])


class TestSaved:
    def saved(self, module, path):
        pipeline(module).save_pretrained(str(path))
        return path / f"0_{type(module).__name__}" / "sentence_bert_config.json"

    def test_by_its_key(self, loaded, tmp_path):
        module = EchoModule(loaded["llama"], changes=[TURN, EXIT, PREPEND, REROUTE, Steer()])
        config = json.loads(self.saved(module, tmp_path).read_text())
        assert (config["bidirectional_layers"], config["output_layer"]) == (1, 2)
        irrelevant = 'The irrelevant information of this sentence : "{text}" means in one word:"'
        assert config["changes"] == [
            {"key": "prepend", "prepend_layers": 2, "seed": 3},
            {"key": "reroute", "layers": [1], "prefix_bias": 0.5},
            {"key": "steer", "contrast_layer": 0, "scale": 2.0, "auxiliary_template": irrelevant},
        ]
        assert SentenceTransformer(str(tmp_path), device="cpu")[0].changes == module.changes

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                [{"key": "os.system"}],
                "'os.system' is not the key of a change that is registered; these are .*'reroute'",
            ),
            ([{"key": "reroute", "layer": 1}], "'reroute' has no setting layer; it has layers, prefix_bias"),
            ({"key": "reroute"}, "changes={'key': 'reroute'}: give a list of changes"),
            ([{"key": "prepend", "seed": "1"}], "seed='1': give a whole number"),
        ],
    )
    def test_others_are_refused_before_anything_is_loaded(self, changes, message, loaded, tmp_path, monkeypatch):
        file = self.saved(EchoModule(loaded["llama"]), tmp_path)
        file.write_text(json.dumps({**json.loads(file.read_text()), "changes": changes}))
        monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("the backbone is loaded"))
        with pytest.raises(ValueError, match=message):
            SentenceTransformer(str(tmp_path), device="cpu")

    def test_of_somebody_else(self, loaded, tmp_path):
        module = EchoModule(loaded["llama"], changes=[NoMask(2)])
        self.saved(module, tmp_path)
        again = EchoModule.load(str(tmp_path))
        assert again.changes == (NoMask(2),)
        expected = read(EchoModule(loaded["llama"], bidirectional_layers=2), TEXTS)
        assert all(map(torch.equal, read(again, TEXTS), expected))
        with pytest.raises(ValueError, match="'attend-both-ways' and 'unmasked': both replace the masks of a layer"):
            EchoModule(loaded["llama"], bidirectional_layers=1, changes=[NoMask(2)])

    def test_two_of_one_key(self):
        with pytest.raises(ValueError, match="Other has the key 'unmasked', which is that of NoMask: give it another"):
            register(type("Other", (Change,), {"key": "unmasked"}))


@register
@dataclass(frozen=True)
class NoMask(Change):
    """Somebody else's change: layers from one on have no causal mask."""

    last: int
    key: ClassVar[str] = "unmasked"
    replaces: ClassVar[Literal["masks"]] = "masks"

    def on(self, model, depth):
        model.set_attn_implementation("st_reba")
        return self

    def effect(self, model, layout):
        layers = range(model.config.num_hidden_layers - self.last, model.config.num_hidden_layers)
        return PassChange(masking=Bidirectional(layers, layout.attention_mask.bool()))


def test_texts_with_prompts_of_their_own_are_steered_alike(loaded):
    module = CausalTransformer(loaded["llama"], changes=[STEER])
    texts = [{"prompt": "a: ", "text": TEXTS[0]}, {"prompt": "b c: ", "text": TEXTS[1]}]
    for text, found in zip(texts, read(module, texts), strict=True):
        assert relative_error(found, read(module, [text])[0]) < TOLERANCE


def test_the_feed_forward_part_runs_for_the_tokens_that_are_read_alone(backbone_path):
    module = CausalTransformer(backbone_path(), rows="last")
    seen = []
    part = module.layer(-1).mlp.down_proj
    part.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel()))
    read(module, TEXTS)
    assert set(seen) == {len(TEXTS)}
    # The layers are run a second time for their gradients, when no hook is called.
    module.model.train().gradient_checkpointing_enable()
    module(module.preprocess(TEXTS))
    assert seen[-1] > len(TEXTS)


@pytest.mark.parametrize(("module_class", "dtype"), [(BidirectionalLastLayer, "bfloat16"), (ReBAModule, "float16")])
def test_a_small_effect_in_half_precision_is_an_effect(module_class, dtype):
    """In the demo model, one bidirectional layer moves the first token by less than bfloat16's rounding might."""
    module = module_class(str(DEMO_MODEL), bidirectional_layers=1, model_kwargs={"dtype": dtype})
    assert module.bidirectional_layers == 1
