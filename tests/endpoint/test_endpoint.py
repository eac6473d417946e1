"""Texts embedded by a server: the local module's vectors on the same weights, and what is wrong said in a sentence."""

from __future__ import annotations

import json
import pickle
import re
from functools import cache

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoModel, AutoTokenizer

import st_reba
from st_reba import CausalTransformer, EchoModule, EndpointTransformer, TopicModule, WhiteningTransform
from st_reba.lm import endpoint as client
from st_reba.lm.endpoint import EndpointError
from st_reba.text.templates import normalized
from st_reba.verify import Endpoint, verify

from .. import backbones
from ..backbones import TEXTS
from .server import Server

STATES = {"form": "llama.cpp"}


@pytest.fixture
def open_server():
    """``open_server(directory)``: one that is closed at the end."""
    opened = []

    def start(path):
        opened.append(Server(AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def server(backbone_path, open_server):
    return open_server(backbone_path())


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """How long it was waited before requests were sent again; nobody waits."""
    found: list[float] = []
    monkeypatch.setattr(client, "sleep", found.append)
    return found


def pooled(module, pooling="mean"):
    parts = [module, Pooling(module.get_embedding_dimension(), pooling)]
    return SentenceTransformer(modules=parts, device="cpu")


# States of tokens

ALIKE = {
    "classical": ({}, CausalTransformer, {}),
    "classical, to its end": ({"pool_over": "all"}, CausalTransformer, {"pool_over": "all"}),
    "prompteol": ({"template": "prompteol"}, CausalTransformer, {"template": "prompteol"}),
    "echo-2": ({"template": "{text}{text}"}, EchoModule, {}),
    "topic": ({"template": "topic"}, TopicModule, {"template": "topic", "lower_layers": ()}),
    "echo-topic": ({"template": "echo-topic", "with_end": True}, TopicModule, {"lower_layers": ()}),
    "cut": ({"max_seq_length": 5}, CausalTransformer, {"max_seq_length": 5}),
}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """``roomy(tokenizer_kind)``: a directory with a tiny Llama that has room for long prompts, made once."""
    model = backbones.backbone("llama", max_position_embeddings=2048)

    @cache
    def made(kind):
        return backbones.save(model, tmp_path_factory.mktemp(kind), kind, model_max_length=2048)

    return made


# The vocabulary of the last tokenizer has not all letters of the prompts, and no byte for what it does not know.
KINDS = [
    *((recipe, kind) for recipe in ALIKE for kind in ("bytes", "greedy")),
    ("classical", "sentencepiece"),
    ("echo-2", "sentencepiece"),
]


@pytest.mark.parametrize(("recipe", "kind"), KINDS)
@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_states_of_a_server_give_the_vectors_of_the_local_module(recipe, kind, roomy, open_server):
    settings, module_class, own = ALIKE[recipe]
    path = roomy(kind)
    there = pooled(EndpointTransformer(open_server(path).url, **STATES, **settings))
    here = pooled(module_class(path, prefix_caching=False, **own))
    for prompt in (None, "The dog "):
        # The server runs texts one by one.
        texts = [*(TEXTS[:4] if kind == "sentencepiece" else TEXTS), ""]
        found, expected = (model.encode(texts, prompt=prompt, batch_size=1) for model in (there, here))
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
    assert there.get_embedding_dimension() == here.get_embedding_dimension()


def test_a_batch_is_one_request_in_the_order_of_its_texts(server):
    model = pooled(EndpointTransformer(server.url, **STATES))
    alone = [model.encode([text])[0] for text in TEXTS]
    server.asked.clear()
    np.testing.assert_array_equal(model.encode(TEXTS), np.stack(alone))
    assert [path for path, *_ in server.asked].count("/embedding") == 1


def test_the_words_of_a_template_are_tokenised_once(server):
    module = EndpointTransformer(server.url, template="prompteol", **STATES)
    module.preprocess([TEXTS[0]])
    server.asked.clear()
    module.preprocess([TEXTS[1]])
    asked = [sent["content"] for path, sent, _ in server.asked if path == "/tokenize"]
    assert asked
    assert all(TEXTS[1] in string for string in asked)


def test_what_is_not_given_of_a_server_is_asked(server):
    """A dimension alone does not tell one model from another."""
    module = EndpointTransformer(f"{server.url}/embed", dimension=32)
    assert module.fingerprint == EndpointTransformer(f"{server.url}/embed").fingerprint


def test_a_text_fits_what_the_server_reads(server):
    server.n_ctx = 20
    module = EndpointTransformer(server.url, template="prompteol", **STATES)
    with pytest.raises(ValueError, match="leave no room for 1 copies of a text in the model's 20 positions"):
        module.preprocess(["a"])
    server.n_ctx = 120
    features = module.preprocess([" ".join(TEXTS)])
    assert features["attention_mask"].sum() <= 120
    # What is cut is the text, not the prompt behind it.
    end = server.tokenizer('" means in one word:"')["input_ids"]
    assert features["input_ids"][0].tolist()[-len(end) + 1 :] == end[1:]


# One vector a text

FORMS = {"openai": "/v1/embeddings", "tei": "/embed", "ollama": "/api/embed"}


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_stands_before_and_behind_each_text(form, server):
    module = EndpointTransformer(f"{server.url}{FORMS[form]}", template='"{text}" in one word:"', normalize_text=True)
    assert (module.form, module.dimension, module.gives_states) == (form, 32, False)
    server.asked.clear()
    model = SentenceTransformer(modules=[module], device="cpu")
    found = model.encode([*TEXTS, "  "], prompt="Query: ")
    expected = [server.vector(f'Query: "{normalized(text)}" in one word:"') for text in TEXTS]
    np.testing.assert_allclose(found, [*expected, np.zeros(32)], atol=1e-6)
    # What has no text is not sent: some servers refuse a list with an empty one.
    assert [len(sent.get("input", sent.get("inputs"))) for _, sent, _ in server.asked] == [len(TEXTS)]


def test_a_text_is_cut_and_not_the_prompt_behind_it(server):
    module = EndpointTransformer(server.url, template='{text}" is:"', max_characters=10)
    assert module.preprocess(["0123456789abc"])["texts"] == ['0123456789" is:"']


def test_a_filter_stands_behind(server):
    module = EndpointTransformer(server.url)
    plain = SentenceTransformer(modules=[module], device="cpu")
    texts = [f"The {what} number {number}." for what in ("cat", "dog") for number in range(30)]
    model = SentenceTransformer(modules=[module, WhiteningTransform.fit(plain, texts), Normalize()], device="cpu")
    np.testing.assert_allclose(np.linalg.norm(model.encode(TEXTS), axis=1), 1, atol=1e-6)


# On disk

KEY = "sk-not-for-files"


def test_a_saved_model_calls_the_server_and_has_no_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", KEY)
    module = EndpointTransformer(server.url, template="prompteol", key_variable="MY_API_KEY", timeout=5)
    model = SentenceTransformer(modules=[module, Normalize()], device="cpu")
    expected = model.encode(TEXTS)
    model.save_pretrained(str(tmp_path))
    assert {key for _, _, key in server.asked} == {f"Bearer {KEY}"}
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in pickle.dumps(module)
    assert KEY not in repr(model)
    server.asked.clear()
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    # To load it, and to look at it, no server is needed.
    assert (server.asked, loaded.get_embedding_dimension()) == ([], 32)
    np.testing.assert_array_equal(loaded.encode(TEXTS), expected)
    assert loaded[0].get_config_dict() == module.get_config_dict()
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(ValueError, match="the environment variable MY_API_KEY has none: set it"):
        SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)


def saved_with(server, directory, **changes):
    """A saved model whose file somebody has changed."""
    SentenceTransformer(modules=[EndpointTransformer(server.url)], device="cpu").save_pretrained(str(directory))
    file = backbones.own(directory) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(directory)


def test_a_saved_model_sends_no_text_to_a_stranger(server, tmp_path, monkeypatch):
    path = saved_with(server, tmp_path, url="https://collects.example/embed")
    model = SentenceTransformer(path, device="cpu")
    with pytest.raises(ValueError, match="ST_REBA_ENDPOINTS=collects.example"):
        model.encode("a secret")
    sent = []
    monkeypatch.setattr(client.Endpoint, "embed", lambda self, texts: sent.append(texts) or [np.ones(32)] * len(texts))
    monkeypatch.setenv("ST_REBA_ENDPOINTS", "another.example, collects.example")
    with pytest.raises(EndpointError, match="serves another model"):
        model.encode("a secret")
    assert sent == [[st_reba.modules.endpoint.FINGERPRINTED]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "file:///etc/passwd"}, "give a server's URL"),
        ({"url": "http://name:password@127.0.0.1/embed"}, "without a password"),
        ({"key_variable": "HOME"}, "it ends in API_KEY"),
        ({"fingerprint": None}, "it has no fingerprint. Save the model again"),
        ({"retries": 10**9}, "give a whole number from 0 to 20"),
        ({"shell": "rm"}, "sets shell, which is no setting of EndpointTransformer"),
        ({"template": "{text}" * 2000}, "give a whole number from 1 to 1024"),
    ],
)
def test_a_file_is_held_to_what_it_may_set(changes, said, server, tmp_path):
    path = saved_with(server, tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        SentenceTransformer(path, device="cpu")


# What is wrong


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"form": "llama"}, 'form=\'llama\': use "auto", "openai", "tei", "ollama" or "llama.cpp".'),
        ({"key_variable": KEY}, "give the name of the environment variable that has the key, not the key"),
        ({"template": "no slot"}, "has no {text}"),
        ({"timeout": 0}, "give the seconds that an answer may take"),
        ({"rows": "last"}, "gives a text one vector, so no tokens are read"),
        ({"with_end": True}, "gives a text one vector"),
        ({**STATES, "max_characters": 9}, "use max_seq_length"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings, said, server):
    with pytest.raises(ValueError, match=re.escape(said)):
        EndpointTransformer(server.url, **settings)


def test_what_is_no_string_is_refused(server):
    with pytest.raises(ValueError, match="Input 1 is a dict: EndpointTransformer embeds strings"):
        EndpointTransformer(server.url).preprocess(["a", {"text": "b"}])


def first_row(change):
    """Does something to the first vector of an answer in TEI's form, or the first states of a llama-server's."""

    def spoil(found):
        if isinstance(found[0], dict):
            found[0]["embedding"] = change(found[0]["embedding"])
            return found
        return [change(found[0]), *found[1:]]

    return spoil


SPOILED = {
    "no number": (first_row(lambda row: [float("nan"), *row[1:]]), "a value that is no number"),
    "null": (first_row(lambda row: [None, *row[1:]]), "no number|no vector"),
    "another dimension": (lambda found: [row[:16] for row in found], "a vector of 16 values, and 32 before"),
    "ragged": (first_row(lambda row: row[:16]), "a vector of 16 values, and 32 before"),
    "fewer": (lambda found: found[1:], "no vector for each of 5 texts"),
    "more": (lambda found: [*found, found[0]], "no vector for each of 5 texts"),
    "words": (lambda found: b"<html>welcome</html>", "something else than JSON"),
    "an error": (lambda found: {"error": "out of memory"}, "no vector for each"),
    "nothing": (lambda found: b"", "something else than JSON"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_nonsense_of_a_server_is_a_sentence(how, server, waited):
    spoil, said = SPOILED[how]
    model = SentenceTransformer(modules=[EndpointTransformer(f"{server.url}/embed")], device="cpu")
    server.spoil = spoil
    with pytest.raises(EndpointError, match=said):
        model.encode(TEXTS)
    assert waited == []


def test_states_of_other_tokens_are_a_sentence(server):
    model = pooled(EndpointTransformer(server.url, **STATES))
    server.spoil = first_row(lambda states: [*states, states[0]])
    with pytest.raises(EndpointError, match="start llama-server with --embeddings --pooling none"):
        model.encode(TEXTS)


def test_a_server_that_is_busy_is_asked_again(server, waited):
    model = SentenceTransformer(modules=[EndpointTransformer(f"{server.url}/embed")], device="cpu")
    expected = model.encode(TEXTS)
    server.fails = 3
    np.testing.assert_array_equal(model.encode(TEXTS), expected)
    assert waited == [0.5, 1, 2]
    server.fails, server.headers = 1, {"Retry-After": "7"}
    model.encode(TEXTS)
    assert waited[3:] == [7]
    server.fails, server.headers = 99, {}
    with pytest.raises(EndpointError, match="answered 503"):
        model.encode(TEXTS)
    assert len(waited) == 8
    # What would be refused again is not sent again.
    server.fails, server.status = 1, 400
    with pytest.raises(EndpointError, match="answered 400"):
        model.encode(TEXTS)
    assert len(waited) == 8


def test_a_server_that_is_slow_or_gone_is_a_sentence(server):
    module = EndpointTransformer(f"{server.url}/embed", timeout=0.2, retries=1)
    model = SentenceTransformer(modules=[module], device="cpu")
    server.wait = 1.0
    with pytest.raises(EndpointError, match="no answer within 0.2 seconds"):
        model.encode(TEXTS)
    server.close()
    with pytest.raises(EndpointError, match="check the URL, and that the server runs"):
        model.encode(TEXTS)


@pytest.mark.parametrize("settings", [{}, STATES])
def test_a_saved_model_refuses_a_server_of_another_model(settings, server, tmp_path):
    SentenceTransformer(modules=[EndpointTransformer(server.url, **settings)], device="cpu").save_pretrained(
        str(tmp_path)
    )
    trained = server.lm
    # As quantised weights are: nearly the same.
    server.lm = backbones.backbone("llama")
    with torch.no_grad():
        for parameter in server.lm.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    SentenceTransformer(str(tmp_path), device="cpu")[0].preprocess(TEXTS)
    server.lm = backbones.backbone("llama", seed=1)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    with pytest.raises(EndpointError, match="serves another model than when this one was made"):
        model[0](model.preprocess(TEXTS))
    server.lm = trained
    model[0](model.preprocess(TEXTS))


# Beside the saved model


@pytest.mark.parametrize("settings", [{}, STATES])
def test_verify_tells_whether_it_is_the_server(settings, server):
    module = EndpointTransformer(server.url, **settings)
    model = SentenceTransformer(modules=[module], device="cpu")
    endpoint = Endpoint(module.url)
    assert verify(endpoint, model).equal
    server.lm = backbones.backbone("llama", seed=1)
    [cause] = verify(endpoint, model).causes
    assert cause.startswith("another model")
    other = "/v1/embeddings" if settings else "/embedding"
    with pytest.raises(EndpointError, match="give --form"):
        verify(Endpoint(f"{server.url}{other}", "tiny"), model)


def test_verify_tells_a_server_whose_batches_are_in_disorder(server):
    module = EndpointTransformer(f"{server.url}/embed")
    server.spoil = lambda rows: rows[::-1]
    [cause] = verify(Endpoint(module.url), SentenceTransformer(modules=[module], device="cpu")).causes
    assert cause.startswith("order")


def test_a_directory_is_not_served(server, tmp_path):
    from st_reba.serve.models import Embedder

    model = SentenceTransformer(modules=[EndpointTransformer(server.url)], device="cpu")
    with pytest.raises(ValueError, match="what stands before a server is not served here"):
        Embedder("m", model)
