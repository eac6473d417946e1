"""Several endings behind one text, in one pass, are what each alone is."""

from __future__ import annotations

import pytest
import torch

from st_reba import CausalTransformer
from st_reba.lm import anatomy
from st_reba.lm.attention.setup import make_cacheable
from st_reba.lm.endings import behind_one_body
from st_reba.lm.prefixes import Prefixes, behind, shared_ids
from st_reba.lm.run import recording, run
from st_reba.text.layout import NOT_TEXT, Layout

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, relative_error

TOLERANCE = 1e-5
#: Some begin alike, and one is what another begins with.
ENDINGS = [
    ' means in one word:"', '"', " and its main topic, said in a few words that everybody knows, is",
    " and its main word", " and its", " is:",
]  # fmt: skip
#: Longer than the windows of the architectures that have them.
PROMPT = "Of this sentence: "


def behind_each(module, body, ending):
    """The last states of an ending that alone stands behind each text, (B, D)."""
    found = []
    for ids, length in zip(body.input_ids, body.lengths, strict=True):
        row = torch.cat([ids[:length], torch.tensor(ending)])[None]
        alone = Layout(row, torch.ones_like(row, dtype=torch.bool), torch.full_like(row, NOT_TEXT))
        found.append(run(module.model, alone)[0, -1])
    return torch.stack(found)


@pytest.fixture(params=[name for name in backbones.ARCHITECTURES if name not in backbones.OWN_ATTENTION])
def module(request, shared):
    made = CausalTransformer(shared(request.param))
    assert make_cacheable(made.model)
    return made


@pytest.fixture
def llama(backbone_path):
    made = CausalTransformer(backbone_path())
    make_cacheable(made.model)
    return made


def test_each_is_as_if_it_stood_alone(module):
    """Also behind a prefix that is kept."""
    body, endings = module.lay_out(TEXTS, PROMPT), module.token_ids(ENDINGS)
    with torch.no_grad():
        expected = torch.stack([behind_each(module, body, ending) for ending in endings], dim=1)
        words = run(module.model, body)[body.copy_index == 0]
        kept = Prefixes.of(module.model, shared_ids(body, 1))
        for prefixes, rest in ((None, body), (kept, kept.rest_of(body))):
            with forward_passes() as passes, behind(prefixes, torch.arange(len(TEXTS))):
                texts, ends = behind_one_body(module.model, rest, endings)
            assert sum(own is module.model for own in passes) == 1
            assert ends.shape == (len(TEXTS), len(ENDINGS), 32)
            assert relative_error(ends, expected) < TOLERANCE
            # And the texts are what they are without endings.
            assert relative_error(texts[rest.copy_index == 0], words) < TOLERANCE


def test_a_text_without_tokens_has_endings_that_stand_alone(llama):
    body, [ending, other] = llama.lay_out(["", "a text"]), llama.token_ids(ENDINGS[:2])
    with torch.no_grad():
        _, ends = behind_one_body(llama.model, body, [ending, other])
        alone = run(llama.model, Layout(*(torch.tensor([ending]) for _ in range(3))))[0, -1]
    assert relative_error(ends[0, 0], alone) < TOLERANCE


def test_endings_that_begin_alike_share_what_they_begin_with(llama):
    body, lengths = llama.lay_out(TEXTS), []
    llama.model.register_forward_pre_hook(
        lambda model, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        behind_one_body(llama.model, body, [[5, 6, 7], [5, 6, 8, 9], [5], [7, 6]])
    assert lengths == [body.input_ids.shape[1] + 7]


def test_all_layers_are_read_in_one_pass_and_gradients_flow(llama):
    body, endings = llama.lay_out(TEXTS), llama.token_ids(ENDINGS)
    layers = anatomy.layer_paths(llama.model)
    with torch.no_grad(), recording(llama.model, layers) as record:
        found = record.split(behind_one_body(llama.model, body, endings)[1])
        for number, ending in enumerate(endings):
            expected = record.split(behind_each(llama, body, ending))
            for own, alone in zip(found, expected, strict=True):
                assert relative_error(own[:, number], alone) < TOLERANCE
    assert len(found) == len(layers) + 1
    behind_one_body(llama.model, body, endings)[1].sum().backward()
    assert llama.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
