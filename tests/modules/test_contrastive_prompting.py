from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import TEMPLATES, CausalTransformer, ContrastivePromptingModule
from st_reba.text.templates import normalized

from .. import backbones, oracles
from ..backbones import TEXTS, own, third
from ..conftest import long, paired, pipeline, relative_error
from ..reading.test_layers import final_norm

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def prompts(token_ids):
    """Ids of a text under both prompts."""
    fronts = ("This", "The irrelevant information of this")
    return lambda text: [token_ids(f'{front} sentence : "{normalized(text)}" means in one word:"') for front in fronts]


@pytest.mark.parametrize(
    ("architecture", "settings"), paired(third(2), [(0, 3, 0.5), (1, 2, "norm"), (1, 2, 2), (2, 3, 0.5)])
)
def test_oracle(architecture, settings, shared, eager, prompts):
    layer, output_layer, scale = settings
    module = ContrastivePromptingModule(
        shared(architecture), contrast_layer=layer, output_layer=output_layer, scale=scale
    )
    model = eager(architecture)
    vectors = pipeline(module, "lasttoken").encode(TEXTS, batch_size=len(TEXTS))
    for text, vector in zip(TEXTS, vectors, strict=True):
        expected = oracles.contrastive_prompting(model, architecture, *prompts(text), layer, output_layer, scale)
        assert relative_error(vector, expected) < TOLERANCE, text


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_with_the_final_norm(architecture, shared):
    settings = {"contrast_layer": 1, "output_layer": 2}
    plain, normed = (
        pipeline(ContrastivePromptingModule(shared(architecture), **settings, final_norm=norm), "lasttoken")
        for norm in (False, True)
    )
    expected = final_norm(architecture, plain[0].model)(torch.tensor(plain.encode(TEXTS)))
    assert relative_error(normed.encode(TEXTS), expected.detach()) < TOLERANCE


def test_the_second_pass_ends_where_it_is_read(shared):
    module = ContrastivePromptingModule(shared(), contrast_layer=1, output_layer=-1)
    # What stands before the text in either prompt is run here, once.
    pipeline(module, "lasttoken").encode(TEXTS[0])
    ran = []
    for name, part in module.model.named_modules():
        part.register_forward_hook(lambda module, args, output, name=name: ran.append(name))
    pipeline(module, "lasttoken").encode(TEXTS[0])
    assert ran.count("layers.0.mlp") == ran.count("layers.1.self_attn.v_proj") == 2
    assert ran.count("layers.1.self_attn.o_proj") == ran.count("layers.1.mlp") == ran.count("layers.2") == 1


def test_where_both_prompts_say_the_same_nothing_is_left(shared, eager):
    for scale in (0.5, "norm"):
        module = ContrastivePromptingModule(
            shared(), template="x {text}", auxiliary_template="x {text}", contrast_layer=2, scale=scale
        )
        ids = module.tokenizer("x the cat")["input_ids"]
        with oracles.changed(eager(), "layers.2.self_attn.o_proj", before=lambda states: states * 0):
            expected = oracles.seen(eager(), "layers.2", ids, "after")[-1]
        assert relative_error(pipeline(module, "lasttoken").encode("the cat"), expected) < TOLERANCE


def test_both_prompts_see_the_same_tokens(tmp_path):
    path = backbones.save(backbones.backbone("gpt2"), tmp_path)
    module = ContrastivePromptingModule(path)
    assert module.max_seq_length < CausalTransformer(path, template='This sentence : "{text}"').max_seq_length
    features = module.preprocess(["word " * 3_000, "a"], prompt="query: ")
    assert features["input_ids_of_steer"].shape[1] == 256 > features["input_ids"].shape[1]
    texts = []
    for of in ("", "_of_steer"):
        ids, copies = features["input_ids" + of], features["copy_index" + of]
        texts.append([row[copy >= 0].tolist() for row, copy in zip(ids, copies, strict=True)])
    assert texts[0] == texts[1]
    assert "input_ids_of_steer" not in module(features)
    assert module.preprocess([]) == {}


@pytest.mark.parametrize(
    ("template", "layer", "scale", "output_layer"),
    [
        ("prompteol", 4, 2.0, 27),
        long("prompteol-zh", 4, 2.0, 27),
        long("pretended-cot", 6, 3.0, 31),
        ("knowledge", 6, 3.0, 31),
        ('Of "{text}":', 4, 2.0, 27),
    ],
)
def test_what_is_usual(template, layer, scale, output_layer, deep):
    """The paper's layers 5 and 7 of 32, counted from 1, and its strengths."""
    module = ContrastivePromptingModule(deep, template=template)
    assert (module.contrast_layer, module.scale) == (layer, scale)
    assert (module.output_layer, module.final_norm) == (output_layer, False)
    assert f"{layer + 1} layers under the auxiliary prompt, of {output_layer} that are run" in module.cost


def test_the_prompt_that_is_usual(deep):
    module = ContrastivePromptingModule(deep)
    assert (module.template, module.normalize_text) == (TEMPLATES["prompteol"], True)


@pytest.mark.parametrize(
    ("layers", "settings", "expected"),
    [
        (3, {}, 0),
        (3, {"template": "knowledge"}, 0),
        (12, {}, 1),
        (12, {"template": "knowledge"}, 2),
        (16, {"template": "knowledge", "output_layer": 2}, 1),
        (1, {}, 0),
    ],
)
def test_the_same_share_of_a_shallower_model(layers, settings, expected, deep):
    """And never above what is run."""
    shallow = CausalTransformer(deep, output_layer=layers)
    assert ContrastivePromptingModule(shallow, **settings).contrast_layer == expected


def test_a_model_of_version_0_1_is_steered_as_it_was(shared, tmp_path):
    """It has its layer and its scale, resolved, and the prompt's text."""
    settings = {"template": TEMPLATES["prompteol"], "contrast_layer": 0, "scale": 0.5, "normalize_text": False}
    model = pipeline(ContrastivePromptingModule(shared(), **settings, output_layer=2), "lasttoken")
    model.save_pretrained(str(tmp_path))
    config = json.loads((own(tmp_path) / "sentence_bert_config.json").read_text())
    assert settings.items() <= config.items()
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert (loaded[0].contrast_layer, loaded[0].scale, loaded[0].output_layer) == (0, 0.5, 2)
    assert relative_error(loaded.encode(TEXTS), model.encode(TEXTS)) < 1e-6


def test_gradients_reach_both_passes(backbone_path):
    model = pipeline(ContrastivePromptingModule(backbone_path(), contrast_layer=1), "lasttoken").train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    for name, parameter in model[0].model.layers.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contrast_layer": 3}, "contrast_layer=3: 3 layers of LlamaModel are run; use -3 to 2"),
        ({"contrast_layer": 2, "output_layer": 2}, "contrast_layer=2: 2 layers of LlamaModel are run; use -2 to 1"),
        ({"contrast_layer": 1.0}, "contrast_layer=1.0: give the index of a layer, or None for the paper's"),
        ({"scale": 0}, 'scale=0: give a number above 0, or "norm"'),
        ({"scale": "half"}, "scale='half': give a number above 0"),
        ({"scale": True}, "scale=True: give a number above 0"),
        ({"scale": float("nan")}, "scale=nan: give a number above 0"),
        ({"final_norm": 1}, "final_norm=1: use True or False"),
        ({"pool_over": "text"}, "pool_over='text': the last token answers the prompt"),
        ({"auxiliary_template": "{text}{text}"}, "has 2 slots: the other prompt has the text once"),
        ({"auxiliary_template": "word"}, r"'word' has no \{text\}"),
        ({"auxiliary_template": "word " * 300 + "{text}"}, "leave no room for 1 copies of a text"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        ContrastivePromptingModule(shared(), **settings)
