"""Several layouts of a text in one pass are what each alone is, and what they begin alike with runs once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st_reba import CausalTransformer
from st_reba.lm import anatomy
from st_reba.lm.attention.setup import make_cacheable
from st_reba.lm.prefixes import Prefixes, behind, shared_ids
from st_reba.lm.run import StatesAt, recording, run
from st_reba.lm.trees import Trees
from st_reba.text.layout import Layout

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, long, relative_error

TOLERANCE = 1e-5
#: Behind a beginning longer than the windows of the architectures that have them. Some endings begin alike, and one is
#: what another begins with.
TEMPLATES = [
    f'Of this sentence: "{{text}}{ending}'
    for ending in ('" means in one word:"', '"', '" and its main topic, said in words that all know, is', '" and its')
]
#: Windows, and no windows.
CACHEABLE = [
    name if name in ("llama", "gemma2_softcap", "gpt2") else long(name)
    for name in backbones.ARCHITECTURES
    if name not in backbones.OWN_ATTENTION
]


@pytest.fixture(scope="module")
def model():
    made = backbones.backbone("llama")
    assert make_cacheable(made)
    return made


def rows(*texts):
    """A layout of token ids."""
    longest = max(1, *map(len, texts))
    real = torch.tensor([[place < len(text) for place in range(longest)] for text in texts])
    return Layout(torch.tensor([[*text, *(longest - len(text)) * [0]] for text in texts]), real, real.long() - 1)


def assert_as_alone(model, layouts, states, trees):
    for place, layout in enumerate(layouts):
        alone = run(model, layout)
        if layout.attention_mask.any():
            own = trees.of_layout(place, states)
            assert relative_error(own[layout.attention_mask], alone[layout.attention_mask]) < TOLERANCE


@pytest.mark.parametrize("architecture", CACHEABLE)
def test_each_layout_is_as_if_it_stood_alone(architecture, shared):
    """Also behind a prefix that is kept, where the states of the other tokens are as they were."""
    modules = [CausalTransformer(shared(architecture), template=template) for template in TEMPLATES]
    model = modules[0].model
    assert make_cacheable(model)
    layouts = [module.lay_out([*TEXTS, ""]) for module in modules]
    with torch.no_grad():
        kept = Prefixes.of(model, shared_ids(Layout.interleaved(layouts), 1))
        alone = [run(model, layout) for layout in layouts]
        for prefixes, before in ((None, 0), (kept, int(kept.lengths))):
            trees = Trees.of(layouts if prefixes is None else [prefixes.rest_of(layout) for layout in layouts])
            with forward_passes() as passes, behind(prefixes, torch.arange(len(TEXTS) + 1)):
                states = trees.run(model)
            assert sum(own is model for own in passes) == 1
            for place, layout in enumerate(layouts):
                found, real = trees.of_layout(place, states), layout.attention_mask[:, before:]
                assert relative_error(found[real], alone[place][:, before:][real]) < TOLERANCE
    longest = max(layout.input_ids.shape[1] for layout in layouts)
    assert trees.layout.input_ids.shape[1] < longest - before + 40


# Few tokens, so that many begin alike.
TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.lists(st.lists(TOKENS, min_size=count, max_size=count), min_size=1, max_size=4)
    )
)
def test_what_layouts_begin_alike_with_runs_once(model, texts):
    """Each node stands for one beginning of its row's layouts; all are as if each stood alone."""
    layouts = [rows(*own) for own in zip(*texts, strict=True)]
    trees = Trees.of(layouts)
    beginnings = [{tuple(one[: end + 1]) for one in text for end in range(len(one))} for text in texts]
    assert trees.layout.lengths.tolist() == [len(own) for own in beginnings]
    with torch.no_grad():
        assert_as_alone(model, layouts, trees.run(model), trees)


def test_one_layout_needs_no_masks(shared):
    """So any model runs it."""
    module = CausalTransformer(shared("bloom"))
    assert not make_cacheable(module.model)
    layout = module.lay_out(TEXTS)
    trees = Trees.of([layout])
    assert torch.equal(trees.layout.input_ids, layout.input_ids)
    with torch.no_grad():
        assert_as_alone(module.model, [layout], trees.run(module.model), trees)


def test_all_layers_are_read_in_one_pass_and_gradients_flow(model):
    layouts = [rows([5, 6, 7], [8]), rows([5, 6, 9, 10], [8, 7])]
    trees, paths = Trees.of(layouts), anatomy.layer_paths(model)
    first = StatesAt([model.layers[0]], "after")
    with torch.no_grad(), recording(model, paths) as record:
        found = record.split(trees.run(model, changes=[first.as_change()]))
        assert torch.equal(found[1], first.states()[0])
        for place, layout in enumerate(layouts):
            for states, alone in zip(found, record.split(run(model, layout)), strict=True):
                own, real = trees.of_layout(place, states), layout.attention_mask
                assert relative_error(own[real], alone[real]) < TOLERANCE
    assert len(found) == len(paths) + 1
    trees.run(model).sum().backward()
    assert model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
