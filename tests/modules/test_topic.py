"""Topic: the end of a prompt at several layers, and the mean over the text's second copy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import OPTConfig, OPTModel

from st_reba import CausalTransformer, EchoModule, StandardizedSum, TopicModule, encode_words
from st_reba.text.templates import PRESETS, normalized

from .. import backbones
from ..backbones import TEXTS, third
from ..conftest import paired, pipeline, relative_error

TOLERANCE = 1e-5
CORPUS = [f"{number}: {text}" for number in range(8) for text in TEXTS]
TWICE = 'This : "{text}" can be rewritten as : "{text}" and its topic in one word is:"'
ONCE = 'This sentence : "{text}" and its topic in one word is:"'


def pieces(token_ids, template, text):
    """The ids of a layout, and where its last copy lies."""
    ids, own = [], token_ids(text)
    literals = template.split("{text}")
    for literal in literals[:-1]:
        ids += [*token_ids(literal), *own]
    return [*ids, *token_ids(literals[-1])], slice(len(ids) - len(own), len(ids))


@pytest.mark.parametrize(("architecture", "pool_over"), paired(third(2), ["text", "all"]))
def test_oracle(architecture, pool_over, shared, eager, token_ids):
    module = TopicModule(shared(architecture), template=TWICE, lower_layers=[-2, 0.4], pool_over=pool_over)
    assert (module.lower_layers, module.shares) == ([2, 1], (0.25,) * 4)
    means = pipeline(module).encode(TEXTS, batch_size=len(TEXTS))
    assert module.get_embedding_dimension() == means.shape[1] == 4 * 32
    for text, found in zip(TEXTS, means, strict=True):
        ids, copy = pieces(token_ids, TWICE, text)
        with torch.no_grad():
            states = eager(architecture)(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        last = slice(copy.start, None) if pool_over == "all" else copy
        expected = [states[-1][0, last].mean(dim=0), *(states[layer][0, -1] for layer in (-1, 2, 1))]
        for own, part in zip(np.split(found, 4), expected, strict=True):
            assert relative_error(own, part) < TOLERANCE, text


def test_one_copy_is_read_at_its_end(shared):
    """As the prompt's own recipe, and as that is read after a layer below."""
    path = shared()
    found = pipeline(TopicModule(path, template=ONCE)).encode(TEXTS)
    last = CausalTransformer(path, template=ONCE, pool_over="all", rows="last")
    lower = CausalTransformer(path, template=ONCE, pool_over="all", rows="last", output_layer=2, final_norm=False)
    assert relative_error(found[:, :32], pipeline(last).encode(TEXTS)) < TOLERANCE
    assert relative_error(found[:, 32:], pipeline(lower).encode(TEXTS)) < TOLERANCE
    assert pipeline(TopicModule(path, template=ONCE)).encode(TEXTS[0], output_value="token_embeddings").shape == (1, 64)


def test_the_mean_is_that_of_echo(shared):
    path = shared()
    found = pipeline(TopicModule(path, template=TWICE, lower_layers=())).encode(TEXTS)
    assert relative_error(found[:, :32], pipeline(EchoModule(path, template=TWICE)).encode(TEXTS)) < TOLERANCE
    alone = pipeline(TopicModule(path, template=TWICE, lower_layers=(), mean=False)).encode(TEXTS)
    assert relative_error(found[:, 32:], alone) < TOLERANCE
    whole = pipeline(TopicModule(path, template=ONCE, lower_layers=(), mean=True)).encode(TEXTS)
    assert whole.shape == (len(TEXTS), 64)


def test_a_template_brings_how_its_texts_are_read(roomy_path):
    module = TopicModule(roomy_path)
    assert (str(module.template), module.mean, module.normalize_text) == (PRESETS["echo-topic"].template, True, True)
    assert (module.rows, module.tokenization, module.copies) == ("all", "pieces", 2)
    once = TopicModule(roomy_path, template="topic-zh")
    assert (once.mean, once.normalize_text, once.rows, once.tokenization) == (False, True, "last", "whole")
    assert not TopicModule(roomy_path, template="{text} is").normalize_text
    text = normalized("the cat")
    assert module.token_ids(["the cat"]) == module.token_ids([text])


@pytest.mark.parametrize(
    ("layers", "output_layer", "lower"),
    [(3, None, 2), (18, None, 17), (28, None, 26), (30, None, 28), (30, 10, 9), (1, None, 1)],
)
def test_a_share_of_the_layers_that_are_run(layers, output_layer, lower, tmp_path):
    config = backbones.config("llama")
    config.num_hidden_layers = layers
    path = backbones.save(backbones.AutoModel.from_config(config), tmp_path)
    assert TopicModule(path, template=ONCE, output_layer=output_layer).lower_layers == [lower]


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize("template", [ONCE, TWICE])
def test_alone_and_in_a_batch_behind_its_sum(template, shared):
    pooled = pipeline(TopicModule(shared(), template=template))
    model = SentenceTransformer(modules=[*pooled, StandardizedSum.fit(pooled, CORPUS)], device="cpu")
    together = model.encode([*TEXTS, ""], batch_size=6)
    assert together.shape == (len(TEXTS) + 1, 32)
    assert not together[-1].any()
    for text, vector in zip(TEXTS, together, strict=False):
        assert relative_error(vector, model.encode(text)) < 1e-4


@pytest.mark.parametrize("template", [ONCE, TWICE])
def test_save_load_and_pickle(template, backbone_path, tmp_path):
    pooled = pipeline(TopicModule(backbone_path("gemma3"), template=template, lower_layers=[1, 0.9]))
    model = SentenceTransformer(modules=[*pooled, StandardizedSum.fit(pooled, CORPUS), Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path))
    for other in (SentenceTransformer(str(tmp_path), device="cpu"), pickle.loads(pickle.dumps(model))):
        assert (other[0].lower_layers, other[0].mean, other[0].template) == ([1, 2], template == TWICE, template)
        assert np.array_equal(other.encode(TEXTS), model.encode(TEXTS))
    assert "TopicModule → Pooling → StandardizedSum → Normalize" in (tmp_path / "README.md").read_text()


def test_gradients_are_those_of_the_definition(backbone_path, eager, token_ids):
    text = TEXTS[0]
    model = pipeline(TopicModule(backbone_path(), template=TWICE, lower_layers=[2])).train()
    model(model.preprocess([text]))["sentence_embedding"].sum().backward()
    reference = eager()
    reference.zero_grad()
    ids, copy = pieces(token_ids, TWICE, text)
    states = reference(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.cat([states[-1][0, copy].mean(dim=0), states[-1][0, -1], states[2][0, -1]]).sum().backward()
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.v_proj", "layers.2.mlp.up_proj"):
        ours, expected = (model.get_submodule(name).weight.grad for model in (model[0].model, reference))
        assert relative_error(ours, expected) < 1e-4
    reference.zero_grad()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TWICE, r"same parts behind the first \(which alone is that of EchoModule .*\): it has no word embeddings"),
        (ONCE, "gives a text as a whole its vector, and its tokens none"),
    ],
)
def test_words_are_refused(template, message, shared):
    with pytest.raises(ValueError, match=message):
        encode_words(pipeline(TopicModule(shared(), template=template)), ["the cat"], ["cat"])


def test_another_pooling_is_warned_of_where_there_is_a_mean(shared, recwarn):
    with pytest.warns(UserWarning, match=r'TopicModule stands before Pooling\("lasttoken"\): .* Pooling\("mean"\)'):
        pipeline(TopicModule(shared(), template=TWICE), "lasttoken")
    recwarn.clear()
    pipeline(TopicModule(shared(), template=ONCE), "lasttoken")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lower_layers": [0]}, r"lower_layers=\[0\]: give a list of at most 64 layers, each counted from 1"),
        ({"lower_layers": [1.5]}, r"lower_layers=\[1.5\]"),
        ({"lower_layers": [True]}, r"lower_layers=\[True\]"),
        ({"lower_layers": 2}, "lower_layers=2"),
        ({"lower_layers": [1] * 65}, "give a list of at most 64"),
        ({"lower_layers": [4]}, "lower_layers has 4: LlamaModel runs 3 layers here; give 1 to 3, -3 to -1, or a share"),
        ({"lower_layers": [3], "output_layer": 2}, "lower_layers has 3: LlamaModel runs 2 layers here"),
        ({"lower_layers": [-4]}, "lower_layers has -4"),
        ({"mean": 1}, "mean=1: use True or False"),
        ({"template": "in a word:"}, "text"),
        ({"template": "{text}" * 1025}, "repetitions=1025: give a whole number from 1 to 1024"),
        ({"tokenization": "whole"}, 'tokenization="whole": TopicModule places the same tokens'),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        TopicModule(shared(), **{"template": TWICE, **settings})


def test_a_model_that_projects_its_last_states(tmp_path):
    """As OPT-350m does: parts would be of two widths."""
    sizes = {**backbones.SIZE, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
    model = OPTModel(OPTConfig(**backbones.IDS, **sizes, max_position_embeddings=backbones.POSITIONS))
    path = backbones.save(model, tmp_path)
    with pytest.raises(ValueError, match="from 32 values to 16, .*: use final_norm=False, which leaves the projection"):
        TopicModule(path, template=ONCE)
    assert pipeline(TopicModule(path, template=ONCE, final_norm=False)).encode(TEXTS).shape == (len(TEXTS), 64)
