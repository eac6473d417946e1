"""A language model's parts are found once, and leave the model as it was; hooks act in one pass, and are undone."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoTokenizer, ByT5Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from st_reba import CausalTransformer
from st_reba.fingerprint import fingerprint, fingerprint_of_weight
from st_reba.lm.attention import function
from st_reba.lm.attention.function import ATTENTION
from st_reba.lm.attention.hooks import Bidirectional, RunningMaximum
from st_reba.lm.model import LanguageModel, resolve_output_layer
from st_reba.lm.parts import parts_of
from st_reba.lm.passes import Capture, Hook, Replace, Stop, active_pass, hooks_at_module
from st_reba.lm.prefixes import PrefixCache
from st_reba.lm.views import PER_LAYER
from st_reba.text.layout import NOT_TEXT, Layout

from .. import backbones, oracles
from ..backbones import ARCHITECTURES, DEMO_MODEL, FEW, MLP, OWN_ATTENTION, SIZE, TEXTS, config, randomize
from ..conftest import forward_passes, pipeline, relative_error, reloaded

TOKENS = torch.tensor([[5, 6, 7, 3], [5, 6, 10, 0]])
MASK = torch.tensor([[True] * 4, [True, True, True, False]])
#: Two tokens before each text, which all rows share.
LAYOUT = Layout(TOKENS, MASK, torch.where(torch.arange(4) < 2, NOT_TEXT, 0).expand(2, 4).masked_fill(~MASK, NOT_TEXT))


def run(lm, *hooks, layout=LAYOUT, **inputs):
    with torch.no_grad():
        return lm.run(layout, *hooks, **inputs)


def real(states, mask=MASK):
    return states[mask]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(backbones.backbone("llama"))


# Parts


def test_a_model_is_run_when_it_is_loaded_and_its_views_are_not():
    for architecture, count in (("llama", 2), ("bloom", 4)):
        model = backbones.backbone(architecture)
        with forward_passes() as passes:
            first = LanguageModel(model)
        assert len(passes) == count
        continues = first.continues_past
        with forward_passes() as passes:
            assert LanguageModel(first.model).continues_past == continues
            LanguageModel(first.model, 3)
        assert not passes
        # Of the short one: what it should give, and what it gives; and then it is known, too.
        with forward_passes() as passes:
            LanguageModel(first.model, 2)
        assert len(passes) == 1 + count
        with forward_passes() as passes:
            LanguageModel(first.model, 2)
        assert not passes


def state_of(model):
    """All that a trial could leave: configuration, modes, parts, hooks."""
    return model.config.to_dict(), model.config._attn_implementation, [
        (name, id(part), part.training, dict(part._forward_hooks), dict(part._forward_pre_hooks))
        for name, part in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parts_of_every_architecture(architecture):
    model = backbones.backbone(architecture).train()
    # A layer that its user froze by eval().
    next(part for part in model.modules() if isinstance(part, nn.ModuleList))[1].eval()
    before = state_of(model)
    lm = LanguageModel(model)
    calls_ours = architecture not in OWN_ATTENTION
    assert lm.attention_layers == ((0, 1, 2) if calls_ours else ())
    assert len(lm.layers) == 3
    assert [type(part) for part in lm.final_norm] == [type(oracles.final_norm(architecture, model))]
    assert lm.widths == (32, 32, 32, 32)
    assert lm.continues_past == calls_ours
    names = {module: name for name, module in lm.model.named_modules()}
    assert [names[lm.projection(layer)] for layer in range(3)] == [
        oracles.projection_name(architecture, layer) for layer in range(3)
    ]
    lm.model.eval()
    last, whole = (torch.arange(2), torch.tensor([3, 2])), run(lm)
    for positions, read in ((last[1], last), (slice(1, None), (slice(None), slice(1, None)))):
        hooks = lm.feed_forward_at(positions, 4)
        assert len(hooks) == (architecture not in ("opt", "falcon", "bloom", "mpt"))
        assert relative_error(run(lm, *hooks)[read], whole[read]) < 1e-5
    assert lm.positions == (None if architecture == "bloom" else 256)
    assert state_of(model) == before
    in_half = LanguageModel(backbones.backbone(architecture).to(torch.bfloat16))
    assert parts_of(in_half.model).projections == parts_of(lm.model).projections


def test_facts_do_not_keep_a_model_nor_the_layers_above():
    whole = LanguageModel(backbones.backbone("llama"))
    weights = [layer.mlp.up_proj.weight for layer in whole.layers]
    below, *gone = (weakref.ref(part) for part in (weights[0], weights[2], whole.model, whole.layers[0].mlp))
    short = LanguageModel(whole.model, 1)
    del whole, weights
    gc.collect()
    assert not any(part() for part in gone)
    assert any(weight is below() for weight in short.model.parameters())


def test_in_half_precision_the_parts_are_found_too():
    """In its own bfloat16, the demo model's first layer reads less off other tokens than is rounded away."""
    model = AutoModel.from_pretrained(DEMO_MODEL)
    assert model.dtype == torch.bfloat16
    parts = parts_of(model)
    assert parts.projections == {layer: f"layers.{layer}.self_attn.o_proj" for layer in range(8)}
    assert parts.calls_ours


def test_a_projection_beside_the_attention_is_not_taken_for_one():
    model = backbones.backbone("llama")
    for layer in model.layers:
        layer.self_attn.o_proj = nn.Identity()
    with pytest.raises(ValueError, match="output projection of the attention in layer 0 of LlamaModel was not found"):
        LanguageModel(model).projection(0)


def test_long_range_rotary_embeddings_limit_positions():
    """One text beyond the length of the first training would change how all others are read."""
    phi3 = config("phi3")
    half = phi3.hidden_size // phi3.num_attention_heads // 2
    phi3.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32, "short_factor": [1.0] * half, "long_factor": [4.0] * half,
    }  # fmt: skip
    phi3.original_max_position_embeddings = 32
    assert LanguageModel(AutoModel.from_config(phi3).eval()).positions == 32


def test_a_part_of_a_text_limits_positions():
    """xLSTM calls each layer once for each part, which would be taken for the whole."""
    xlstm = transformers.xLSTMConfig(
        vocab_size=384, hidden_size=128, num_heads=2, num_hidden_layers=2, max_inference_chunksize=32
    )
    assert LanguageModel(AutoModel.from_config(xlstm).eval()).positions == 32


T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}


NO_DECODERS = [
    ("BertConfig", {**SIZE, **MLP}, "In BertModel a token sees later tokens: it is an encoder. Use a decoder-only"),
    # Its first token sees the same tokens at the same positions, if two of them change places.
    ("RobertaConfig", {**SIZE, **MLP, "pad_token_id": 1}, "In RobertaModel a token sees later tokens"),
    ("LlamaConfig", {**SIZE, **MLP, "is_causal": False}, "In LlamaModel a token sees later tokens"),
    ("ReformerConfig", {"is_decoder": True, "vocab_size": 64}, "ReformerModel draws random numbers to read"),
    ("T5Config", T5, "In T5Model a token sees later tokens"),
    ("ViTConfig", {"hidden_size": 32, "num_attention_heads": 4}, "ViTModel cannot be run on token ids alone"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), NO_DECODERS)
def test_models_that_are_no_decoders(kind, settings, message):
    model = randomize(AutoModel.from_config(getattr(transformers, kind)(**settings)).eval())
    with pytest.raises(ValueError, match=message):
        LanguageModel(model)


CHOICES = [
    ("llama", None, False, "sdpa"), ("gemma2_softcap", None, False, ATTENTION), ("qwen3", "eager", False, "eager"),
    ("qwen3", "eager", True, ATTENTION), ("llama", "flex_attention", False, "flex_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "chosen", "watches", "expected"), CHOICES)
def test_the_choice_of_attention_stays_until_hooks_need_ours(architecture, chosen, watches, expected):
    """A soft cap is dropped by some versions of sdpa: there ours takes its place."""
    model = AutoModel.from_config(config(architecture), attn_implementation=chosen).eval()
    model.config._attn_implementation = chosen or "sdpa"
    lm = LanguageModel(model)
    if watches:
        lm.resolve("all", "watched")
    assert lm.model.config._attn_implementation == expected
    assert lm.continues_past == (chosen != "flex_attention")
    assert model.config._attn_implementation == (chosen or "sdpa")


@pytest.mark.parametrize(("trick", "gives", "harmless"), [(1, 1, True), (1, 1.5, False), (torch.ones(1), 1, False)])
def test_arguments_that_are_new_to_us(trick, gives, harmless, monkeypatch):
    """A number that changes nothing is passed over. What gives other results, or may in longer texts, is not used."""
    model = backbones.backbone("llama")
    kind = type(model.layers[0].self_attn)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: original(*args, **kwargs, new_trick=trick))

    def deaf(*args, **kwargs):
        output, nothing = function.attention(*args, **kwargs)
        return output * gives, nothing

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, ATTENTION, deaf)
    assert bool(LanguageModel(model).attention_layers) == harmless


# Shorter models


def test_lists_that_are_as_long_as_the_model_is_deep():
    """Those that describe layers are cut with them; the ids of end tokens are not."""
    model = backbones.backbone("gemma3")
    model.config.eos_token_id = [5, 6, 7]
    short = LanguageModel(model, 2).model.config
    assert short.eos_token_id == [5, 6, 7]
    assert short.layer_types == model.config.layer_types[:2]
    assert len(model.config.layer_types) == 3


@pytest.mark.long
def test_every_list_of_transformers_that_grows_with_the_depth_is_known():
    """A new architecture's list that is not known would be saved too long for its model."""
    unknown = {}
    for kind in {CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}:
        # Some can have no such depth, whatever their own checks raise.
        with contextlib.suppress(Exception):
            shallow, deep = (vars(kind(num_hidden_layers=depth)) for depth in (7, 11))
            lists = [name for name, value in shallow.items() if isinstance(value, list) and "layer" not in name]
            grown = {name for name in lists if (len(shallow[name]), len(deep.get(name) or ())) == (7, 11)}
            unknown |= dict.fromkeys(grown - {*PER_LAYER}, kind.__name__)
    assert unknown == {}


def test_layers_that_there_are_not():
    assert [resolve_output_layer(3, layer) for layer in (None, 2, -1, -3, 0.5, 0.01)] == [None, 2, 3, 1, 2, 1]
    for layer in (0, 4, -4, True, 1.5, "2"):
        with pytest.raises(ValueError, match=r"output_layer=.*the model has 3 layers; give 1 to 3"):
            resolve_output_layer(3, layer)


def test_a_short_model_that_computes_something_else_is_refused(monkeypatch):
    model = backbones.backbone("llama")
    kind = type(model.layers[0])
    forward = kind.forward

    def by_the_depth(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + self.self_attn.config.num_hidden_layers

    monkeypatch.setattr(kind, "forward", by_the_depth)
    with pytest.raises(ValueError, match="cannot be shortened to 1 layers: it then computes something else"):
        LanguageModel(model, 1)


@pytest.mark.parametrize("name", FEW)
def test_a_short_model_is_saved_without_the_layers_above(name, shared, tmp_path):
    model = pipeline(CausalTransformer(shared(name), output_layer=2))
    again = reloaded(model, tmp_path)
    assert again[0].output_layer == again[0].model.config.num_hidden_layers == len(again[0].lm.layers) == 2
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()


# Passes


class Failing(Hook):
    def before(self, module, states):
        raise KeyError


def test_hooks_act_in_one_pass_and_are_undone_after_an_error(lm):
    before = run(lm)
    doubled = Replace([lm.layers[0]], outputs=lambda states: 2 * states)
    assert not torch.allclose(run(lm, doubled), before)
    failing = Failing()
    failing.modules = [lm.layers[1]]
    with pytest.raises(KeyError):
        run(lm, failing)
    assert not hooks_at_module(lm.layers[1])
    assert torch.equal(run(lm), before)


def test_a_pass_hides_the_hooks_around_it(lm):
    seen = []
    note = Replace([lm.layers[0]], lambda states: seen.append(len(states)) or states)
    with active_pass([note]):
        assert hooks_at_module(lm.layers[0]) == [note]
        with active_pass([]):
            assert not hooks_at_module(lm.layers[0])
        assert hooks_at_module(lm.layers[0]) == [note]
    assert not hooks_at_module(lm.layers[0])


@pytest.mark.parametrize("positions", [None, torch.tensor([2, 0])])
def test_states_are_captured_as_hooks_before_left_them(positions, lm):
    hidden = lm.model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    entering, leaving = Capture(lm.layers[1:], "before", positions), Capture(lm.layers[:2], "after", positions)
    assert torch.equal(run(lm, entering, leaving), run(lm))
    for capture in (entering, leaving):
        for states, layer in zip(capture.states, hidden[1:3], strict=True):
            assert torch.equal(states, layer if positions is None else layer[torch.arange(2), positions])
    changed = Capture(lm.layers[:1], "after", positions)
    run(lm, Replace([lm.layers[0]], outputs=lambda states: 2 * states), changed)
    assert torch.equal(changed.states[0], 2 * leaving.states[0])


def test_a_pass_ends_when_all_states_have_been_seen(lm):
    ran = []
    notes = [Replace([layer], lambda states, n=n: ran.append(n) or states) for n, layer in enumerate(lm.layers)]
    states = lm.states_at(LAYOUT, lm.layers[:2], "after", None, *notes)
    assert ran == [0, 1]
    assert torch.equal(states[1], run_layers(lm)[2])
    with pytest.raises(Stop):
        run(lm, Capture(lm.layers[:1], stops=True))


def run_layers(lm, **settings):
    with torch.no_grad():
        return lm.run_layers(LAYOUT, **settings)


@pytest.mark.parametrize("final_norm", [True, False])
def test_all_layers_in_one_pass(final_norm, lm):
    hidden = lm.model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    layers = run_layers(lm, final_norm=final_norm)
    assert all(torch.equal(*pair) for pair in zip(layers[:-1], hidden[:-1], strict=True))
    assert torch.equal(layers[-1], run(lm, final_norm=final_norm))
    assert torch.allclose(lm.final_norm(layers[-1]) if not final_norm else layers[-1], hidden[-1])


def test_gradient_checkpointing_keeps_masks_and_refuses_what_it_would_repeat():
    model = backbones.backbone("llama").train()
    lm = LanguageModel(model)
    both = Bidirectional(lm.resolve([2], "made bidirectional"), MASK)
    gradients = []
    for checkpoints in (False, True):
        lm.model.train()
        if checkpoints:
            lm.model.gradient_checkpointing_enable({"use_reentrant": True})
        lm.model.zero_grad()
        real(lm.run(LAYOUT, both)).pow(2).sum().backward()
        gradients.append(lm.layers[0].self_attn.q_proj.weight.grad.clone())
    assert relative_error(gradients[1], gradients[0]) < 1e-5
    assert lm.feed_forward_at(torch.tensor([1, 1]), 4) == []
    for hook in (
        Replace([lm.layers[0]], outputs=lambda states: 2 * states),
        Capture(lm.layers[:1]),
        RunningMaximum(slice(0, 3), slice(0, 3)),
    ):
        with pytest.raises(ValueError, match="Gradient checkpointing runs each layer a second time"):
            lm.run(LAYOUT, hook)
    for module in lm.model.modules():
        vars(module).pop("_gradient_checkpointing_func", None)
    with pytest.raises(RuntimeError, match="LlamaModel has no _gradient_checkpointing_func"):
        lm.run(LAYOUT, both)


def test_tokens_that_the_model_does_not_have(lm):
    lm.check_ids(LAYOUT)
    with pytest.raises(ValueError, match="gives the id 384, and LlamaModel has embeddings for 384 tokens"):
        lm.check_ids(Layout.of([[(384, 0)]]))


# Prefixes


@pytest.mark.parametrize("architecture", ["llama", "mistral_window", "gemma3", "gpt2", "gpt_oss_sinks"])
def test_behind_a_prefix_as_in_the_whole_text(architecture):
    lm = LanguageModel(backbones.backbone(architecture))
    length = 24
    ids = torch.cat([torch.arange(40, 40 + length).expand(2, -1), TOKENS], dim=1)
    mask = torch.cat([torch.ones(2, length, dtype=torch.bool), MASK], dim=1)
    copies = torch.cat([torch.full((2, length), NOT_TEXT), torch.zeros(2, 4, dtype=torch.long)], dim=1)
    layout = Layout(ids, mask, copies.masked_fill(~mask, NOT_TEXT))
    with torch.no_grad():
        for _ in range(2):
            [behind] = lm.behind_prefix(layout, least=0)
            assert behind.input_ids.shape == (2, 4)
            states, watched = lm.run(behind), RunningMaximum(slice(0, 4), slice(0, 4), lm.resolve("all", "watched"))
            assert relative_error(real(states), real(lm.run(layout)[:, length:])) < 1e-5
            assert relative_error(real(lm.run(behind, watched)), real(states)) < 1e-5
        whole = RunningMaximum(slice(length, length + 4), slice(length, length + 4), lm.attention_layers)
        lm.run(layout, whole)
    later = torch.ones(4, 4).triu().bool() & MASK[:, None]
    torch.testing.assert_close(watched.maximum[later], whole.maximum[later], rtol=1e-4, atol=1e-4)


def test_a_prefix_is_run_once_and_dropped_with_its_weights(monkeypatch):
    monkeypatch.setattr(PrefixCache, "MOST", 2)
    lm = LanguageModel(backbones.backbone("llama"))
    assert lm.continues_past

    def passes_for(*firsts):
        with forward_passes() as passes, torch.no_grad():
            for first in firsts:
                layout = Layout(TOKENS.clone().index_fill(1, torch.tensor([0]), first), MASK, LAYOUT.copy_index)
                assert lm.behind_prefix(layout, least=1)[0].past is not None
        return len(passes)

    # The second was dropped, as the first had been asked for since.
    assert passes_for(11, 12, 11, 13, 11, 12) == 4
    assert len(copy.deepcopy(lm.prefixes)) == 0
    lm.layers[0].self_attn.k_proj.weight.detach().mul_(2)
    assert passes_for(11) == 1
    assert [*map(id, lm.behind_prefix(LAYOUT, least=1))] == [id(LAYOUT)], "gradients are wanted"
    with torch.no_grad():
        assert lm.behind_prefix(LAYOUT, least=2)[0] is LAYOUT
        lm.model.train()
        assert lm.behind_prefix(LAYOUT, least=1)[0] is LAYOUT
    assert len(lm.prefixes) == 0


# Fingerprints


def test_a_fingerprint_shows_every_change_and_not_where_a_model_is(tmp_path):
    path = backbones.save(backbones.backbone("llama"), tmp_path / "first")
    model, tokenizer = AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    mark = fingerprint(model, tokenizer, 10)
    assert (len(mark), int(mark, 16) >= 0) == (16, True)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "second")
    again = AutoModel.from_pretrained(tmp_path / "second"), AutoTokenizer.from_pretrained(tmp_path / "second")
    assert fingerprint(*again, 10) == mark
    marks = {mark, fingerprint(model, tokenizer, 11), fingerprint(model.bfloat16(), tokenizer, 10)}
    model.float()
    weight = model.layers[1].mlp.up_proj.weight
    of_weight = fingerprint_of_weight("name", weight.split(9))
    with torch.no_grad():
        weight.view(-1)[1] += 0.5
    assert fingerprint_of_weight("name", weight.split(9)) != of_weight
    marks.add(fingerprint(model, tokenizer, 10))
    # What a tokenizer was last told is no part of it.
    tokenizer("one more text", truncation=True, max_length=2)
    marks.add(fingerprint(model, tokenizer, 10))
    tokenizer.add_tokens(["cat"])
    marks |= {fingerprint(model, own, 10) for own in (tokenizer, ByT5Tokenizer(extra_ids=0), ByT5Tokenizer())}
    assert len(marks) == 7
