"""Any module takes changes: whatever goes together equals a naive composition, alone or in a batch, saved or not."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from st_reba import (
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
)
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.run import PassChange
from st_reba.modules.changes import AttendBothWays, Change, EarlyExit, Fitted, Prepend, Reroute, Steer, register
from st_reba.text.layout import PREPENDED

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import LONG, long, pipeline, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")

TOLERANCE = 1e-5

TURN, EXIT, PREPEND, REROUTE, STEER = (
    AttendBothWays(1), EarlyExit(2), Prepend(2, seed=3), Reroute([1], prefix_bias=0.5),
    Steer(1, 0.5, 'Not so: "{text}" but'),
)  # fmt: skip
ALL = [TURN, EXIT, PREPEND, REROUTE, STEER]

#: Each alone, each pair of those that change what a token knows, and all at once.
SETS = [*([change] for change in ALL), *map(list, itertools.combinations([TURN, PREPEND, REROUTE, STEER], 2)),
        ALL]  # fmt: skip


@dataclass
class Naive:
    """A plain eager model, changed; the id of the slot before a text, if there is one; and whether it steers."""

    model: Any
    slot: list[int]
    token_ids: Any
    architecture: str
    steers: bool = False

    def whole(self, head: str, text: str, tail: str, tokenization: str = "whole") -> list[int]:
        """The ids of a template of one copy: a slot splits the string, and so does the text if it is in pieces."""
        if tokenization == "whole" and not self.slot:
            return self.token_ids(head + text + tail)
        rest = [text + tail] if tokenization == "whole" else [text, tail]
        parts = [self.token_ids(part) if part else [] for part in (head, *rest)]
        return [*parts[0], *self.slot, *itertools.chain(*parts[1:])]

    def steered(self, text: str, tokenization: str = "whole"):
        """A block in which the last token is steered away from what it is in the other prompt, if it is."""
        if not self.steers:
            return contextlib.nullcontext()
        head, _, tail = STEER.auxiliary_template.partition("{text}")
        other = self.whole(head, text, tail, tokenization)
        return oracles.steered(self.model, self.architecture, other, STEER.contrast_layer, STEER.scale)

    @property
    def depth(self) -> int:
        return self.model.config.num_hidden_layers


def classical(naive, text):
    return oracles.classical(naive.model, naive.token_ids(text), before=naive.slot)


def prompt(naive, text):
    return oracles.run(naive.model, naive.whole('This: "', text, '" means:'))[0][-1:]


def echo(naive, text):
    return oracles.echo(naive.model, naive.token_ids(text), 3, before=naive.slot, first_copy=1)


def reba(naive, text):
    return oracles.algorithm_2(naive.model, naive.token_ids(text), 2, before=naive.slot)


def reba_last(naive, text):
    return reba(naive, text)[-1:]


def chunks(naive, text):
    return oracles.chunked(naive.model, naive.token_ids(text), 2, 5)


def thought(naive, text):
    return oracles.refined_thought(naive.model, [*naive.token_ids(text), 0], 3, before=naive.slot)


TASKS = ['This: "{text}" means:', "So {text} is"]


def meta_eol(naive, text):
    return oracles.meta_eol(naive.model, [naive.whole(*task.split("{text}")[:1], text, task.split("{text}")[1])
                                          for task in TASKS])  # fmt: skip


def values(naive, text):
    ids = naive.whole('This: "', text, '" means:')
    return oracles.value_aggregation(naive.model, naive.architecture, ids, range(naive.depth))[None]


def early_late(naive, text):
    ids, first = naive.whole("", text, " means:"), len(naive.slot)
    found = slice(first, first + len(naive.token_ids(text)))
    return oracles.early_and_late(naive.model, ids, found, 1)


def layer_states(naive, text):
    return oracles.layer_states(naive.model, [*naive.slot, *naive.token_ids(text)])


def contrasted(naive, text):
    both = [naive.whole(head, text, '":"') for head in ('This: "', 'Not this: "')]
    return oracles.contrastive_prompting(naive.model, naive.architecture, *both, 1, naive.depth, 2)[None]


def hybrid(naive, text):
    with oracles.rerouted(naive.model, [1], 0.5), naive.steered(text):
        states = oracles.run(naive.model, naive.whole("", text, " means:"))[0][len(naive.slot) :]
    return torch.stack([states.mean(dim=0), states[-1]])


def vector(model, seed):
    """What enters a slot."""
    width = model.get_input_embeddings().weight.shape[1]
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def prepending(naive, text):
    model, slot = oracles.with_slot(naive.model, vector(naive.model, 0))
    own = replace(naive, model=model, slot=[slot])
    with oracles.prepended(model, naive.architecture, slot, 2), own.steered(text):
        return prompt(own, text)


WORDS = {"template": 'This: "{text}" means:'}
#: Module, settings, what it comes to. The layouts: one copy, a prompt, several copies, chunks, EOS, several prompts.
METHODS = {
    "classical": (CausalTransformer, {}, classical),
    "prompt": (CausalTransformer, {**WORDS, "pool_over": "all", "rows": "last"}, prompt),
    "echo": (EchoModule, {"repetitions": 3, "pool_copies": "repeated"}, echo),
    "reba": (ReBAModule, {}, reba),
    "reba, last": (ReBAModule, {"rows": "last"}, reba_last),
    "reba in chunks": (ReBAModule, {"chunk_length": 5}, chunks),
    "thought": (RefinedThoughtModule, {"iterations": 3}, thought),
    "meta eol": (MetaEOLModule, {"templates": TASKS}, meta_eol),
    "values": (ValueAggregationModule, WORDS, values),
    "early and late": (EarlyLateModule, {"template": "{text} means:", "early_layer": 1}, early_late),
    "layer states": (LayerStates, {}, layer_states),
    "contrasted": (
        ContrastivePromptingModule,
        {"template": 'This: "{text}":"', "auxiliary_template": 'Not this: "{text}":"', "contrast_layer": 1,
         "output_layer": -1, "scale": 2},
        contrasted,
    ),
    "prepending": (
        TokenPrependingModule,
        {"template": 'This: "{prepend}{text}" means:', "prepend_layers": 2, "output_layer": -1, "final_norm": True,
         "rows": "last"},
        prepending,
    ),
    "re-routed": (KVReroutingModule, {"template": "{text} means:", "layers": [1], "prefix_bias": 0.5}, hybrid),
}  # fmt: skip

#: Those that bring a change of their own, and one that brings none.
SAVED = ("prompt", "contrasted", "prepending", "re-routed")

#: What does not go together, and what is said of it.
REFUSED = {
    ("reba in chunks", TURN): "chunk_length=5 with bidirectional_layers=1: where tokens see what follows",
    ("reba in chunks", PREPEND): "chunk_length=5 with prepend_layers=2, seed=3: where tokens see what follows",
    ("reba in chunks", REROUTE): "chunk_length=5 with layers=.*: where tokens see what follows",
    ("prepending", PREPEND): "TokenPrependingModule is given the change 'prepend' with .*, and makes it already",
    ("re-routed", REROUTE): "KVReroutingModule is given the change 'reroute' with .*, and makes it already",
    ("reba in chunks", STEER): "chunk_length=5 with contrast_layer=1, .*: it is about the last token of a whole text",
    ("contrasted", STEER): "ContrastivePromptingModule is given the change 'steer' with .*, and makes it already",
}


@pytest.fixture(scope="module")
def loaded(backbone_path):
    return {name: CausalTransformer(backbone_path(name)) for name in ("llama", "gemma3")}


@contextlib.contextmanager
def changed(architecture, changes, eager, token_ids):
    """A plain eager model with all of these changes, each written out."""
    model = eager(architecture)
    kinds = {type(change): change for change in changes}
    with contextlib.ExitStack() as stack:
        if EarlyExit in kinds:
            model = oracles.shortened(model, kinds[EarlyExit].output_layer)
        slot = []
        if Prepend in kinds:
            model, number = oracles.with_slot(model, vector(model, kinds[Prepend].seed))
            slot = [number]
            stack.enter_context(oracles.prepended(model, architecture, number, kinds[Prepend].prepend_layers))
        if AttendBothWays in kinds:
            stack.enter_context(oracles.both_ways(model, kinds[AttendBothWays].bidirectional_layers))
        if Reroute in kinds:
            stack.enter_context(oracles.rerouted(model, kinds[Reroute].layers, kinds[Reroute].prefix_bias))
        yield Naive(model, slot, token_ids, architecture, Steer in kinds)


def read(module, texts):
    """What a module hands on of each text, one batch."""
    with torch.no_grad():
        features = module.eval()(module.preprocess(texts))
    if isinstance(module, LayerStates):
        return list(features["layer_states"])
    return [states[mask.bool()] for states, mask in zip(features["token_embeddings"], features["attention_mask"],
                                                        strict=True)]  # fmt: skip


def settings_without(settings, changes):
    """The settings of a method, without the argument that a change stands for."""
    return {name: value for name, value in settings.items() if name != "output_layer" or EXIT not in changes}


#: Where a change is refused, so are all at once: there, all the others show what goes together.
REFUSING = {method: [change for change in ALL if (method, change) not in REFUSED] for method, _ in REFUSED}


def usual(method, architecture, changes) -> bool:
    """All at once under every method; each alone under one; what is refused, which takes no time."""
    if architecture != "llama":
        return method in ("reba", "values")
    if (method == "prompt" and len(changes) == 1) or changes in (ALL, REFUSING.get(method)):
        return True
    return len(changes) == 1 and (method, changes[0]) in REFUSED


CASES = [
    case if usual(*case) else long(*case)
    for case in [
        *itertools.product(METHODS, ["llama"], SETS),
        *((method, "llama", changes) for method, changes in REFUSING.items() if changes not in SETS),
        *itertools.product(METHODS, ["gemma3"], [ALL]),
    ]
]


@pytest.mark.parametrize(
    ("method", "architecture", "changes"),
    CASES,
    ids=lambda given: given if isinstance(given, str) else " + ".join(change.key for change in given),
)
def test_equals_a_naive_composition(method, architecture, changes, loaded, eager, token_ids, tmp_path):
    kind, given, expected = METHODS[method]
    settings = settings_without(given, changes)
    for (name, change), why in REFUSED.items():
        if name == method and change in changes:
            with pytest.raises(ValueError, match=why):
                kind(loaded[architecture], changes=changes, **settings)
            return
    module = kind(loaded[architecture], changes=changes, **settings)
    texts = [*TEXTS[:3], ""] if LONG else [TEXTS[0], TEXTS[2], ""]
    together, alone = read(module, texts), read(module, texts[:1])
    assert not together[-1].any()
    assert relative_error(alone[0], together[0]) < TOLERANCE
    with changed(architecture, changes, eager, token_ids) as naive:
        for text, states in zip(texts[:-1], together, strict=False):
            # These make a change of their own, which the other prompt is read under, too.
            own = method in ("prepending", "re-routed")
            with contextlib.nullcontext() if own else naive.steered(text, module.tokenization):
                wanted = expected(naive, text)
            assert relative_error(states, wanted) < TOLERANCE, text
    if not LONG and (len(changes) == 2 or method not in SAVED):
        return
    module.save(str(tmp_path))
    again = kind.load(str(tmp_path))
    assert again.changes == module.changes
    for states, same in zip(together, read(again, texts), strict=True):
        assert torch.equal(states, same)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("kind", "settings", "message"),
        [
            (
                EchoModule,
                {"changes": [Reroute(), Reroute([0])]},
                "EchoModule is given the change 'reroute' with layers=.0",
            ),
            (
                CausalTransformer,
                {"changes": [TURN], "bidirectional_layers": 2},
                "makes it already, with bidirectional_l",
            ),
            (
                CausalTransformer,
                {"changes": [EXIT], "output_layer": 1},
                "already, with output_layer=1. Leave one of the",
            ),
            (
                BidirectionalLastLayer,
                {"changes": [TURN]},
                "BidirectionalLastLayer is given the change 'attend-both-ways'",
            ),
            (TokenPrependingModule, {"changes": [PREPEND]}, "TokenPrependingModule is given the change 'prepend'"),
            (HierarchicalTokenPrependingModule, {"changes": [PREPEND]}, "makes it already, with prepend_layers=None"),
            (InputEmbeddings, {"changes": [REROUTE]}, "InputEmbeddings with layers=.*: it runs no layer"),
            (EchoModule, {"changes": ["reroute"]}, "changes has 'reroute': give changes, such as"),
            (EchoModule, {"changes": "reroute"}, "changes='reroute': give a list of changes"),
            (KVReroutingModule, {"changes": 5}, "changes=5: give a list of changes"),
            (TokenPrependingModule, {"changes": "reroute"}, "changes='reroute': give a list of changes"),
            (ContrastivePromptingModule, {"changes": {"key": "reroute"}}, "give a list of changes"),
            (EchoModule, {"bidirectional_layers": 10**30}, "use 0 to 3"),
            (EchoModule, {"changes": [AttendBothWays(9)]}, "bidirectional_layers=9: LlamaModel has 3 layers"),
            (EchoModule, {"changes": [Prepend(9)]}, "prepend_layers=9: 3 layers of LlamaModel are run"),
            (EchoModule, {"changes": [Prepend(3), EXIT]}, "prepend_layers=3: 2 layers of LlamaModel are run"),
            (EchoModule, {"changes": [Reroute([3])]}, "the model has 3 layers; give a list"),
            (EchoModule, {"changes": [EarlyExit(0)]}, "output_layer=0"),
            (EchoModule, {"changes": [Steer(2), EXIT]}, "contrast_layer=2: 2 layers of LlamaModel are run"),
            (
                EchoModule,
                {"changes": [Steer(auxiliary_template="x " * 300 + "{text}")]},
                "leave no room for 1 copies of a text",
            ),
            (InputEmbeddings, {"changes": [STEER]}, "InputEmbeddings with contrast_layer=1, .*: it runs no layer"),
        ],
    )
    def test_when_it_is_made(self, kind, settings, message, loaded):
        with pytest.raises(ValueError, match=message):
            kind(loaded["llama"], **settings)

    @pytest.mark.parametrize("layers", [0, -1, True, 1.0])
    def test_numbers_of_layers(self, layers):
        with pytest.raises(ValueError, match="give the number of last layers"):
            AttendBothWays(layers)

    def test_an_architecture_whose_attention_is_its_own(self, shared):
        with pytest.raises(ValueError, match="cannot be re-routed"):
            EchoModule(shared("bloom"), changes=[REROUTE])

    def test_gradient_checkpointing(self, backbone_path):
        module = EchoModule(backbone_path(), changes=[PREPEND]).train()
        module.model.gradient_checkpointing_enable()
        message = "Gradient checkpointing .* to train through EchoModule with prepend_layers=2, seed=3\\."
        with pytest.raises(ValueError, match=message):
            module(module.preprocess(TEXTS))


class TestASlotInATemplate:
    """Wherever the change Prepend is made, ``{prepend}`` says where the slot stands; else nothing fills it."""

    TASKS: ClassVar = ['{prepend} This: "{text}" means:', "So {text} is"]

    def expected(self, template, text, eager, token_ids):
        """The last token's state (D,), by the oracle of token prepending; a template without a slot has it right before
        the text."""
        model, slot = oracles.with_slot(eager("llama"), vector(eager("llama"), PREPEND.seed))
        before, behind = template.split("{prepend}") if "{prepend}" in template else template.split("{text}")
        behind = behind if "{text}" in behind else "{text}" + behind
        front = token_ids(before) if before else []
        ids = [*front, slot, *token_ids(behind.replace("{text}", text))]
        states = oracles.token_prepending(model, "llama", ids, {len(front): -1}, PREPEND.prepend_layers, 3)
        return model.norm(states)[-1]

    def test_in_a_prompt(self, loaded, eager, token_ids, tmp_path):
        template = 'So {prepend} This: "{text}" means:'
        module = CausalTransformer(loaded["llama"], template=template, pool_over="all", rows="last", changes=[PREPEND])
        found = read(module, TEXTS)
        for text, states in zip(TEXTS, found, strict=True):
            assert relative_error(states[0], self.expected(template, text, eager, token_ids)) < TOLERANCE
        named = TokenPrependingModule(loaded["llama"], template=template, prepend_layers=2, seed=3, output_layer=-1,
                                      final_norm=True, rows="last")  # fmt: skip
        assert all(map(torch.equal, read(named, TEXTS), found))
        module.save(str(tmp_path))
        again = CausalTransformer.load(str(tmp_path))
        assert again.template == template
        assert all(map(torch.equal, read(again, TEXTS), found))

    def test_in_several_prompts(self, loaded, eager, token_ids):
        module = MetaEOLModule(loaded["llama"], templates=self.TASKS, changes=[PREPEND])
        for text, states in zip(TEXTS, read(module, TEXTS), strict=True):
            expected = torch.stack([self.expected(task, text, eager, token_ids) for task in self.TASKS])
            assert relative_error(states, expected) < TOLERANCE

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

    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            (CausalTransformer, {"template": "{prepend}{text}"}),
            (EchoModule, {"template": "{prepend}{text}{text}"}),
            (MetaEOLModule, {"templates": ["{text}", "{prepend}{text}"]}),
        ],
    )
    def test_that_nothing_fills_is_refused_before_anything_is_loaded(self, kind, settings):
        with pytest.raises(ValueError, match=r"nothing is prepended: give changes=\[Prepend\(\)\]"):
            kind("no/such-model", **settings)


class TestSaved:
    def saved(self, module, path):
        pipeline(module).save_pretrained(str(path))
        return path / f"0_{type(module).__name__}" / "sentence_bert_config.json"

    def test_by_its_key(self, loaded, tmp_path):
        config = json.loads(self.saved(EchoModule(loaded["llama"], changes=[TURN, EXIT, PREPEND, REROUTE]), tmp_path)
                            .read_text())  # fmt: skip
        assert (config["bidirectional_layers"], config["output_layer"]) == (1, 2)
        assert config["changes"] == [
            {"key": "prepend", "prepend_layers": 2, "seed": 3},
            {"key": "reroute", "layers": [1], "prefix_bias": 0.5},
        ]
        loaded_again = SentenceTransformer(str(tmp_path), device="cpu")
        assert loaded_again[0].changes == (EXIT, TURN, PREPEND, REROUTE)

    def test_one_that_steers(self, loaded, tmp_path):
        config = json.loads(self.saved(EchoModule(loaded["llama"], changes=[Steer()]), tmp_path).read_text())
        irrelevant = 'The irrelevant information of this sentence : "{text}" means in one word:"'
        assert config["changes"] == [
            {"key": "steer", "contrast_layer": 0, "scale": 2.0, "auxiliary_template": irrelevant}
        ]

    def test_without_changes_nothing_is_said_of_them(self, loaded, tmp_path):
        kinds = [EchoModule, KVReroutingModule, TokenPrependingModule, BidirectionalLastLayer,
                 ContrastivePromptingModule]  # fmt: skip
        for kind in kinds:
            assert "changes" not in json.loads(self.saved(kind(loaded["llama"]), tmp_path / kind.__name__).read_text())

    def test_the_vector_of_a_slot(self, loaded, tmp_path):
        module = EchoModule(loaded["llama"], changes=[PREPEND])
        state = module.change(Prepend).initial_state
        state += 1
        self.saved(module, tmp_path)
        assert torch.equal(EchoModule.load(str(tmp_path)).change(Prepend).initial_state, state)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                [{"key": "os.system"}],
                "'os.system' is not the key of a change that is registered; these are .*'reroute'",
            ),
            ([{"layers": [1]}], "None is not the key"),
            ([{"key": ["reroute"]}], "is not the key of a change"),
            ([{"key": "reroute", "layer": 1}], "'reroute' has no setting layer; it has layers, prefix_bias"),
            (["reroute"], "changes has 'reroute': give changes, such as"),
            ({"key": "reroute"}, "changes={'key': 'reroute'}: give a list of changes"),
            ([{"key": "prepend", "seed": "1"}], "seed='1': give a whole number"),
        ],
    )
    def test_others_are_refused_before_anything_is_loaded(self, changes, message, loaded, tmp_path, monkeypatch):
        file = self.saved(EchoModule(loaded["llama"]), tmp_path)
        file.write_text(json.dumps({**json.loads(file.read_text()), "changes": changes}))

        def load(*args, **kwargs):
            raise AssertionError("the backbone is loaded")

        monkeypatch.setattr(AutoModel, "from_pretrained", load)
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


class Turned(Fitted):
    def __init__(self, change, model):
        super().__init__()
        self.change = change.on(model, model.config.num_hidden_layers)

    def effect(self, model, layout):
        return self.change.effect(model, layout)


@register
@dataclass(frozen=True)
class FormerNoMask(Change):
    """The same as changes were written until version 0.7."""

    last: int
    key: ClassVar[str] = "unmasked-formerly"

    def fitted(self, model):
        return Turned(NoMask(self.last), model)


def test_a_change_with_the_former_method(loaded, tmp_path):
    texts = TEXTS[:2]
    expected = read(EchoModule(loaded["llama"], changes=[NoMask(2)]), texts)
    with pytest.warns(DeprecationWarning, match="FormerNoMask has the method fitted, .* give it on and effect"):
        module = EchoModule(loaded["llama"], changes=[FormerNoMask(2)])
    assert all(map(torch.equal, read(module, texts), expected))
    module.save(str(tmp_path))
    with pytest.warns(DeprecationWarning, match="has the method fitted"):
        again = EchoModule.load(str(tmp_path))
    assert again.changes == (FormerNoMask(2),)
    assert all(map(torch.equal, read(again, texts), expected))


def test_texts_with_prompts_of_their_own_are_steered_alike(loaded):
    module = CausalTransformer(loaded["llama"], changes=[STEER])
    texts = [{"prompt": prompt, "text": text} for prompt, text in zip(("a: ", "b c: "), TEXTS, strict=False)]
    both = read(module, texts)
    for text, found in zip(texts, both, strict=True):
        assert relative_error(found, read(module, [text])[0]) < TOLERANCE


def test_the_text_is_cut_alike_for_a_steered_one(tmp_path):
    module = EchoModule(backbones.save(backbones.backbone("gpt2"), tmp_path), changes=[Steer()])
    features = module.preprocess(["word " * 3_000, "a"], prompt="query: ")
    texts = [[row[copy == 0].tolist() for row, copy in zip(features["input_ids" + of], features["copy_index" + of],
                                                           strict=True)] for of in ("", "_of_steer")]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == module.max_tokens("query: ")
    # What ST's trainer takes for a text of its own.
    assert [name for name in features if name.endswith("input_ids")] == ["input_ids"]


def test_a_shared_backbone_is_not_changed(loaded):
    before = read(loaded["llama"], TEXTS)
    EchoModule(loaded["llama"], changes=ALL)
    assert all(map(torch.equal, read(loaded["llama"], TEXTS), before))
