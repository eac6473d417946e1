"""Texts embedded by a server: its vectors in the order of the texts, and a sentence for all that is wrong."""

from __future__ import annotations

import pickle
import re
from functools import partial

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from st_reba import EndpointTransformer, WhiteningTransform
from st_reba.modules import endpoint as client
from st_reba.modules.endpoint import FINGERPRINTED, EndpointError
from st_reba.text.presets import normalized

from ..backbones import TEXTS, own
from ..conftest import change
from .server import WIDTH, Server, hashed

KEY = "sk-not-for-files"


@pytest.fixture
def server():
    opened = Server()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """Seconds that would have been waited before requests were sent again."""
    found: list[float] = []
    monkeypatch.setattr(client, "sleep", found.append)
    return found


def model_of(server, **settings):
    return SentenceTransformer(modules=[EndpointTransformer(server.url, **settings)], device="cpu")


@pytest.mark.parametrize("path", ["", "/v1", "/v1/embeddings"])
def test_a_template_stands_around_each_text(path, server):
    """And each vector is that of its text, though the server answers in another order."""
    module = EndpointTransformer(f"{server.url}{path}/", template='"{text}" in one word:"', normalize_text=True)
    assert (module.url, module.served_name) == (f"{server.url}/v1/embeddings", "tiny")
    server.asked.clear()
    found = SentenceTransformer(modules=[module], device="cpu").encode([*TEXTS, "  "], prompt="Query: ")
    expected = hashed([f'Query: "{normalized(text)}" in one word:"' for text in TEXTS])
    np.testing.assert_allclose(found, [*expected, np.zeros(WIDTH)], atol=1e-6)
    # A text without characters is not sent: some servers refuse a list with one.
    assert [len(sent["input"]) for _, sent, _ in server.asked] == [len(TEXTS)]


def test_a_long_text_is_cut_and_a_filter_stands_behind(server):
    with pytest.raises(ValueError, match="nothing is prepended, so leave {prepend} out"):
        EndpointTransformer(server.url, template="{prepend} {text}")
    module = EndpointTransformer(server.url, template='{text}" is:"', max_characters=10)
    with pytest.raises(ValueError, match="Input 1 of its batch is a dict: give strings"):
        module.preprocess(["a", {"text": "b"}])
    assert module.preprocess(["0123456789abc"])["texts"] == ['0123456789" is:"']
    plain = SentenceTransformer(modules=[module], device="cpu")
    texts = [f"The {what} number {number}." for what in ("cat", "dog") for number in range(30)]
    whitening = WhiteningTransform.fit(plain, texts)
    expected = whitening({"sentence_embedding": plain.encode(TEXTS, convert_to_tensor=True)})["sentence_embedding"]
    assert SentenceTransformer(modules=[module, whitening], device="cpu").encode(TEXTS) == pytest.approx(expected)


def test_a_proxy_is_for_other_machines_alone(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    model_of(server).encode(TEXTS)
    monkeypatch.setenv("http_proxy", server.url)
    # This one lists no models, and is asked without a name.
    server.lists = False
    EndpointTransformer("http://elsewhere.example")
    assert server.asked[-1][0] == "http://elsewhere.example/v1/embeddings"
    assert server.asked[-1][1]["model"] is None


def test_a_saved_model_calls_the_server_and_has_no_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", KEY)
    model = model_of(server, template="prompteol", key_variable="MY_API_KEY", timeout=5)
    expected = model.encode(TEXTS)
    model.save_pretrained(str(tmp_path))
    assert {key for _, _, key in server.asked} == {f"Bearer {KEY}"}
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in pickle.dumps(model[0])
    assert KEY not in repr(model)
    server.asked.clear()
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    # To load it, and to look at it, no server is needed.
    assert (server.asked, loaded.get_embedding_dimension()) == ([], WIDTH)
    np.testing.assert_array_equal(loaded.encode(TEXTS), expected)
    assert loaded[0].get_config_dict() == model[0].get_config_dict()
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(ValueError, match="the variable MY_API_KEY has none: set it"):
        loaded.encode(TEXTS)


def saved_with(server, directory, **changes):
    """A saved model whose file somebody has changed."""
    model_of(server).save_pretrained(str(directory))
    change(own(directory) / "config.json", **changes)
    return str(directory)


def test_a_saved_model_sends_no_text_to_a_stranger(server, tmp_path, monkeypatch):
    model = SentenceTransformer(saved_with(server, tmp_path, url="https://collects.example/embed"), device="cpu")
    with pytest.raises(ValueError, match="ST_REBA_ENDPOINTS=collects.example"):
        model.encode("a secret")
    sent = []
    monkeypatch.setattr(client.Endpoint, "embed", lambda _, texts: sent.append(texts) or np.ones((len(texts), WIDTH)))
    monkeypatch.setenv("ST_REBA_ENDPOINTS", "another.example, collects.example")
    with pytest.raises(EndpointError, match="serves another model"):
        model.encode("a secret")
    assert sent == [[FINGERPRINTED]]


def test_a_saved_model_refuses_a_server_of_another_model(server, tmp_path):
    path = saved_with(server, tmp_path)
    # As quantised weights are: nearly the same.
    server.embed = lambda texts: hashed(texts) + 0.01
    SentenceTransformer(path, device="cpu").encode(TEXTS)
    model = SentenceTransformer(path, device="cpu")
    for another in (partial(hashed, seed=1), lambda texts: hashed(texts)[:, :16]):
        server.embed = another
        with pytest.raises(EndpointError, match="serves another model than when this one was made"):
            model.encode(TEXTS)


FORBIDDEN_SETTINGS = [
    ({"url": "file:///etc/passwd"}, "give a server's URL"),
    ({"url": "http://name:password@127.0.0.1/v1"}, "without a password"),
    ({"url": "http://127.0.0.1:port"}, "give a server's URL"),
    ({"key_variable": "HOME"}, "it ends in API_KEY"),
    ({"fingerprint": None}, "it has no fingerprint. Save the model again"),
    ({"retries": 10**9}, "give a whole number from 0 to 20"),
    ({"shell": "rm"}, "sets shell, which is no setting of EndpointTransformer"),
    ({"template": "{text}" * 2000}, "give a whole number from 1 to 1024"),
    ({"form": "ollama"}, "sets form to 'ollama', a setting of EndpointTransformer, removed in 1.0: load it with"),
    ({"with_end": True}, "sets with_end to True, a setting of EndpointTransformer, removed in 1.0"),
]


@pytest.mark.parametrize(("changes", "said"), FORBIDDEN_SETTINGS)
def test_a_file_is_held_to_what_it_may_set(changes, said, server, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        SentenceTransformer(saved_with(server, tmp_path, **changes), device="cpu")


def rows(change):
    """Changes the list of vectors in an answer."""
    return lambda answer: {"data": change(answer["data"])}


def first(**values):
    return rows(lambda data: [{**data[0], **values}, *data[1:]])


SPOILED = {
    "no number": (first(embedding=[float("nan")] * WIDTH), "a value that is no number"),
    "another dimension": (rows(lambda data: [{**row, "embedding": [1.0] * 16} for row in data]), "had 32 values"),
    "another size": (first(embedding=[1.0] * 16), "no vector for each of 5 texts, of one size"),
    "fewer": (rows(lambda data: data[1:]), "no vector for each of 5 texts"),
    "more": (rows(lambda data: [*data, data[0]]), "no vector for each of 5 texts"),
    "an index twice": (first(index=0), "no vector for each of 5 texts"),
    "no index": (first(index=None), "no vector for each of 5 texts"),
    "beyond a float": (first(embedding=[10**400] * WIDTH), "no vector for each of 5 texts"),
    "beyond half of one": (first(embedding=[1e39] * WIDTH), "a value that is no number"),
    "words": (lambda answer: b"<html>welcome</html>", "something else than JSON"),
    "an error": (lambda answer: {"error": "out of memory"}, "no vector for each"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_nonsense_of_a_server_is_a_sentence(how, server, waited):
    model = model_of(server)
    server.spoil, said = SPOILED[how]
    with pytest.raises(EndpointError, match=said):
        model.encode(TEXTS)
    assert waited == []


def test_a_server_that_is_busy_is_asked_again(server, waited):
    model = model_of(server)
    server.fails = 3
    np.testing.assert_allclose(model.encode(TEXTS), hashed(TEXTS), atol=1e-6)
    assert waited == [0.5, 1, 2]
    server.fails, server.headers = 1, {"Retry-After": "7"}
    model.encode(TEXTS)
    assert waited[3:] == [7]
    server.fails, server.headers = 99, {}
    with pytest.raises(EndpointError, match="answered 503"):
        model.encode(TEXTS)
    # What would be refused again is not sent again.
    server.fails, server.status = 1, 400
    with pytest.raises(EndpointError, match="answered 400"):
        model.encode(TEXTS)
    assert len(waited) == 8
    # Nor is an error whose text is cut short.
    server.fails, server.headers = 1, {"Transfer-Encoding": "chunked"}
    with pytest.raises(EndpointError, match="answered 400: $"):
        model.encode(TEXTS)


def test_a_server_that_is_slow_or_gone_is_a_sentence(server):
    model = model_of(server, retries=1)
    model[0].timeout, server.wait = 0.2, 0.4
    with pytest.raises(EndpointError, match="nothing within 0.2 seconds"):
        model.encode(TEXTS)
    server.close()
    with pytest.raises(EndpointError, match="check the URL, and that the server runs"):
        model.encode(TEXTS)
