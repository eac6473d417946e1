"""The state before the last feed-forward part, read by any method."""

from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import (
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    InputEmbeddings,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    ValueAggregationModule,
)
from st_reba.modules.changes import BeforeFeedForward
from st_reba.recipes import find

from .. import oracles
from ..backbones import TELLING, TEXTS
from ..conftest import long, paired, pipeline, relative_error

TOLERANCE = 1e-5
#: Those whose feed-forward part is no module of its own, or knows of the residual stream, or is added to in place.
NOT_APART = ("opt", "falcon", "bloom", "mpt")


def read(module, texts):
    with torch.no_grad():
        features = module.eval()(module.preprocess(texts))
    return [states[mask.bool()] for states, mask in zip(features["token_embeddings"], features["attention_mask"],
                                                        strict=True)]  # fmt: skip


@pytest.mark.parametrize("architecture", TELLING)
def test_equals_a_hook_on_every_architecture(architecture, shared, eager, token_ids):
    if architecture in NOT_APART:
        with pytest.raises(ValueError, match='The feed-forward part of the last layer of .* Use readout="layer"'):
            CausalTransformer(shared(architecture), readout="before_mlp")
        return
    module = CausalTransformer(shared(architecture), readout="before_mlp")
    with oracles.before_mlp(eager(architecture), architecture):
        for text, states in zip(TEXTS, read(module, TEXTS), strict=True):
            wanted = oracles.classical(eager(architecture), token_ids(text))
            assert relative_error(states, wanted) < TOLERANCE
    plain = read(shared(architecture), TEXTS)
    assert all(relative_error(states, other) > 1e-2 for states, other in zip(read(module, TEXTS), plain, strict=True))


def test_the_feed_forward_part_runs_for_the_tokens_that_are_read_alone(shared):
    last, all_of_them = (CausalTransformer(shared("llama"), rows=rows) for rows in ("last", "all"))
    seen = []
    last.layer(-1).mlp.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    wanted = [states[-1:] for states in read(all_of_them, TEXTS)]
    assert all(relative_error(*pair) < 1e-6 for pair in zip(read(last, TEXTS), wanted, strict=True))
    assert seen == [1]
    # The layers are run a second time for their gradients, when no hook is called.
    last.model.train().gradient_checkpointing_enable()
    last(last.preprocess(TEXTS))
    assert seen[1] > 1


METHODS = [
    (CausalTransformer, {"template": "prompteol"}),
    (CausalTransformer, {"rows": "last"}),
    long((EchoModule, {"repetitions": 2})),
    long((ReBAModule, {"rows": "last"})),
    (ReBAModule, {"chunk_length": 5}),
    (RefinedThoughtModule, {"iterations": 3}),
    (MetaEOLModule, {"templates": ['This: "{text}" means:']}),
    (EarlyLateModule, {"early_layer": 1}),
]


@pytest.mark.parametrize(("method", "final_norm"), paired(METHODS, [True, False, True]), ids=str)
def test_of_any_method_it_is_what_a_model_without_that_part_gives(method, final_norm, shared, backbone_path, tmp_path):
    """Alone and in a batch, after an early exit too, saved and loaded."""
    kind, settings = method
    module = kind(shared(), readout="before_mlp", output_layer=2, final_norm=final_norm, **settings)
    without = kind(backbone_path(), output_layer=2, final_norm=final_norm, **settings)
    with torch.no_grad():
        without.model.layers[-1].mlp.down_proj.weight.zero_()
    found, wanted = read(module, TEXTS), read(without, TEXTS)
    for text, states, other in zip(TEXTS, found, wanted, strict=True):
        assert relative_error(states, other) < TOLERANCE
        assert relative_error(read(module, [text])[0], states) < TOLERANCE
    module.save(str(tmp_path))
    again = kind.load(str(tmp_path))
    assert again.readout == "before_mlp"
    assert all(map(torch.equal, found, read(again, TEXTS)))


def test_the_part_is_not_run(backbone_path):
    module = CausalTransformer(backbone_path(), readout="before_mlp", rows="last")
    tokens = []
    hook = module.model.layers[-1].mlp.down_proj.register_forward_hook(
        lambda module, args, output: tokens.append(args[0].shape[:-1].numel())
    )
    read(module, TEXTS)
    hook.remove()
    assert set(tokens) == {1}


def test_it_is_saved_where_it_is_asked_for(shared, tmp_path):
    for readout in ("layer", "before_mlp"):
        pipeline(CausalTransformer(shared(), readout=readout)).save_pretrained(str(tmp_path / readout))
    settings = "0_CausalTransformer/sentence_bert_config.json"
    configs = [json.loads((tmp_path / name / settings).read_text()) for name in ("layer", "before_mlp")]
    assert "readout" not in configs[0]
    assert configs[1]["readout"] == "before_mlp"
    assert "changes" not in configs[1]
    module = SentenceTransformer(str(tmp_path / "before_mlp"), device="cpu")[0]
    assert module.changes == (BeforeFeedForward(),)


def test_as_a_recipe(shared):
    recipe = find("prompteol-before-mlp")
    assert (recipe.name, recipe.pooling) == ("PromptEOL, before-mlp", "last")
    assert recipe.build(shared()).readout == "before_mlp"
    assert "arXiv:2307.16645" in recipe.row.citation
    assert "arXiv:2509.24621" in recipe.row.citation
    assert find("early-late-before-mlp+partwise-whitened").build(shared()).readout == "before_mlp"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (CausalTransformer, {"readout": "before"}, 'readout=\'before\': use "layer" or "before_mlp"'),
        (CausalTransformer, {"readout": "before_mlp", "changes": [BeforeFeedForward()]}, "makes it already, with read"),
        (InputEmbeddings, {"readout": "before_mlp"}, 'InputEmbeddings with readout="before_mlp": it runs no layer'),
        (ValueAggregationModule, {"readout": "before_mlp"}, "reads what attention gives"),
        (LayerStates, {"readout": "before_mlp"}, "hands on what every layer leaves behind its feed-forward part"),
        (LayerStates, {"changes": [BeforeFeedForward()]}, "hands on what every layer leaves behind its feed-forward"),
    ],
)
def test_what_is_refused(kind, settings, message, shared):
    with pytest.raises(ValueError, match=message):
        kind(shared(), **settings)
