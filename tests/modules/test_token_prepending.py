from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, TokenPrependingModule
from st_reba.modules.changes import Prepend

from .. import oracles
from ..backbones import TEXTS, own, third
from ..conftest import paired, pipeline, relative_error
from ..reading.test_layers import final_norm

TOLERANCE = 1e-5


def drawn(module):
    return torch.randn(module.model.get_input_embeddings().weight.shape[1], generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("architecture", "settings"), paired(third(1), [(1, 3), (2, 2), (3, 3)]))
def test_oracle(architecture, settings, shared, eager, token_ids):
    layers, output_layer = settings
    module = TokenPrependingModule(
        shared(architecture), prepend_layers=layers, output_layer=output_layer, rows="all", normalize_text=False
    )
    model, slot = oracles.with_slot(eager(architecture), drawn(module))
    encoded = pipeline(module).encode(TEXTS, output_value="token_embeddings", batch_size=len(TEXTS))
    front = token_ids("This sentence : ")
    for text, value in zip(TEXTS, encoded, strict=True):
        # The slot's token splits the string; a quotation mark and the text's first letter may be one token.
        rest = token_ids(f' "{text}" means in one word:"')
        ids = [*front, slot, *rest]
        states = oracles.token_prepending(model, architecture, ids, {len(front): -1}, layers, output_layer)
        assert relative_error(value, states[len(front) + 1 + len(token_ids(' "')) :]) < TOLERANCE, text


@pytest.mark.parametrize("kind", ["bert", "sentencepiece"])
def test_with_special_tokens_and_a_prompt(kind, shared):
    module = TokenPrependingModule(shared("gpt2", kind), template="{prepend} {text}.", rows="last")
    model, slot = oracles.with_slot(CausalTransformer(shared("gpt2", kind)).model, drawn(module))
    before, after = ([2], [3]) if kind == "bert" else ([1], [])

    # As the authors do it: the slot is an entry that is added to the vocabulary.
    tokenizer = copy.deepcopy(module.tokenizer)
    tokenizer.add_tokens(["<PST>"])
    added = tokenizer.convert_tokens_to_ids("<PST>")

    encode = pipeline(module, "lasttoken").encode
    for text in TEXTS[:3]:
        whole = tokenizer(f"query:<PST> {text}.")["input_ids"]
        assert (whole[: len(before)], whole[len(whole) - len(after) :]) == (before, after)
        ids = [slot if token == added else token for token in whole]
        states = oracles.token_prepending(model, "gpt2", ids, {ids.index(slot): -1}, 2, 3)
        assert relative_error(encode(text, prompt="query:"), states[-1]) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_with_the_final_norm(architecture, shared):
    plain, normed = (
        pipeline(TokenPrependingModule(shared(architecture), output_layer=2, final_norm=norm), "lasttoken")
        for norm in (False, True)
    )
    expected = final_norm(architecture, plain[0].model)(torch.tensor(plain.encode(TEXTS)))
    assert relative_error(normed.encode(TEXTS), expected.detach()) < TOLERANCE


def test_the_last_row_alone_is_the_last_of_all(shared):
    every, last = (pipeline(TokenPrependingModule(shared(), rows=rows), "lasttoken") for rows in ("all", "last"))
    assert relative_error(last.encode(TEXTS), every.encode(TEXTS)) < TOLERANCE
    assert last[0](last.preprocess(TEXTS))["token_embeddings"].shape == (len(TEXTS), 1, 32)


def test_slots_are_not_handed_on(shared):
    module = TokenPrependingModule(shared(), template="{prepend}{text}", pool_over="all")
    item = pipeline(module).encode("the cat", output_value=None)
    assert item["input_ids"].tolist() == module.tokenizer("the cat")["input_ids"]


def test_a_prompt_with_a_slot_is_a_prompt(shared):
    """Only templates have slots: a text or a prompt that looks like one stays text."""
    module = TokenPrependingModule(shared())
    features = module.preprocess(["{prepend}"], prompt="{prepend}")
    assert (features["copy_index"] == -2).sum() == 1


def test_what_is_usual(shared, deep):
    module = TokenPrependingModule(shared())
    assert (module.output_layer, module.prepend_layers, module.final_norm) == (3, 2, False)
    module = TokenPrependingModule(deep)
    assert (module.output_layer, module.prepend_layers) == (27, 8)


class TestOnDisk:
    def test_the_vector_is_saved(self, shared, tmp_path):
        model = pipeline(TokenPrependingModule(shared(), seed=7), "lasttoken")
        other = pipeline(TokenPrependingModule(shared(), seed=8), "lasttoken")
        assert relative_error(model.encode(TEXTS), other.encode(TEXTS)) > 1e-3
        # Not the seed decides what is loaded, but the vector: another release may draw otherwise.
        model[0].initial_state.mul_(-2)
        model.save_pretrained(str(tmp_path))
        assert list(load_file(own(tmp_path) / Prepend.FILE)) == ["initial_state"]
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert torch.equal(loaded[0].initial_state, model[0].initial_state)
        assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))

    @pytest.mark.parametrize("state", [{"initial_state": torch.zeros(5)}, {"other": torch.zeros(32)}])
    def test_a_vector_of_another_model(self, state, shared, tmp_path):
        pipeline(TokenPrependingModule(shared())).save_pretrained(str(tmp_path))
        save_file(state, str(own(tmp_path) / Prepend.FILE))
        with pytest.raises(ValueError, match='under "initial_state", and the model.s input embeddings have 32 values'):
            SentenceTransformer(str(tmp_path), device="cpu")

    def test_a_hostile_template(self, shared, tmp_path):
        pipeline(TokenPrependingModule(shared())).save_pretrained(str(tmp_path))
        path = own(tmp_path) / "sentence_bert_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "template": "{prepend.__class__}{text}"}))
        with pytest.raises(ValueError, match=r"has braces other than \{text\}"):
            SentenceTransformer(str(tmp_path), device="cpu")


def test_the_vector_goes_where_the_model_goes(backbone_path):
    model = pipeline(TokenPrependingModule(backbone_path()), "lasttoken")
    expected = model.encode(TEXTS, convert_to_tensor=True)
    half = model.bfloat16().encode(TEXTS, convert_to_tensor=True).float()
    assert (1 - torch.cosine_similarity(half, expected)).max() < 1e-2


def test_input_embeddings_that_do_more_than_look_up(backbone_path):
    source = CausalTransformer(backbone_path())
    source.model.embed_tokens.register_forward_hook(lambda module, args, output: output.tanh())
    with pytest.raises(ValueError, match="What Embedding makes of the table of input embeddings could not be found"):
        TokenPrependingModule(source)


def test_gradients_reach_the_backbone(backbone_path):
    model = pipeline(TokenPrependingModule(backbone_path(), prepend_layers=3), "lasttoken").train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    for name, parameter in model[0].model.layers.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prepend_layers": 0}, "prepend_layers=0: 3 layers of LlamaModel are run; use 1 to 3"),
        ({"prepend_layers": 3, "output_layer": 2}, "prepend_layers=3: 2 layers of LlamaModel are run; use 1 to 2"),
        ({"prepend_layers": 1.5}, "prepend_layers=1.5: give a number of layers, or None"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or more"),
        ({"seed": "x"}, "seed='x': give a whole number"),
        ({"rows": "first"}, "rows='first': use \"all\""),
        ({"final_norm": "no"}, "final_norm='no': use True or False"),
        ({"template": "{text}"}, r"'\{text\}' must have one \{prepend\}, and have it before \{text\}"),
        ({"template": "{text}{prepend}"}, r"may have one \{prepend\}, and have it before"),
        ({"template": "{prepend}{prepend}{text}"}, r"may have one \{prepend\}"),
        ({"template": "{prepend}{text}{text}"}, "has 2 slots: TokenPrependingModule reads one copy"),
        ({"template": "{prepend}{0}{text}"}, r"has braces other than \{text\}"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        TokenPrependingModule(shared(), **settings)
