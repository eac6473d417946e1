"""Chat on the weights that embed: what it answers, and that neither changes nor holds up the other."""

from __future__ import annotations

import asyncio
import http.client
import json
import runpy
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from starlette.testclient import TestClient
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from st_reba import CausalTransformer, EchoModule
from st_reba.modules import AttentionReranker, AttentionRerankModule

from ..backbones import FEW, TEXTS, save_talking
from ..conftest import pipeline
from .conftest import serving
from .test_process import Serving

chat = pytest.importorskip("st_reba.serve.chat")
from st_reba.serve.app import Server, make_app  # noqa: E402
from st_reba.serve.models import Embedder, ListReranker, share  # noqa: E402
from st_reba.serve.requests import Limits  # noqa: E402

MESSAGES = [{"role": "user", "content": "Who chased the mouse?"}]
GREEDY = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def whole_path(tmp_path_factory):
    return save_talking(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def untied_path(tmp_path_factory):
    return save_talking(tmp_path_factory.mktemp("untied"), tied=False)


def embedder(path, kind=EchoModule, **settings):
    module = kind(path, **settings)
    pooling = Pooling(module.get_embedding_dimension(), "mean")
    return Embedder("m", SentenceTransformer(modules=[module, pooling, Normalize()], device="cpu"))


@pytest.fixture(scope="module")
def server(whole_path):
    made = embedder(whole_path, deterministic=True)
    talking = chat.Chat(made)
    # Its answers are as long as asked for.
    talking.lm.generation_config.eos_token_id = None
    return Server(made, limits=Limits(batch_texts=4, body_bytes=2**21), keys=["secret"], chat=talking)


@pytest.fixture(scope="module")
def client(server):
    headers = {"Authorization": "Bearer secret"}
    with TestClient(make_app(server), raise_server_exceptions=False, headers=headers) as client:
        yield client


def parts(answer):
    """The objects of a stream."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def streamed(client, **more):
    pieces = parts(client.post("/v1/chat/completions", json={**GREEDY, "stream": True, **more}))
    return "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces), pieces[-1]


def test_the_private_names_are_there_and_a_sentence_says_so_if_not(monkeypatch):
    assert all(callable(own) for own in chat.OVERRIDDEN)
    with monkeypatch.context() as patched:
        patched.delattr("transformers.cli.serving.model_manager.ModelManager.load_model_and_processor")
        with pytest.raises(ImportError, match=r'pip install "st-reba\[serve-chat\]" transformers==5'):
            runpy.run_module("st_reba.serve.chat")
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.completion", None)
    with pytest.raises(ImportError, match="Chat needs openai and the server of transformers"):
        runpy.run_module("st_reba.serve.chat")


@pytest.mark.parametrize("name", FEW)
def test_the_head_is_put_on_the_same_weights(name, tmp_path):
    if name == "gpt_j":
        pytest.skip("its head has weights of its own")
    path = save_talking(tmp_path, name)
    made = embedder(path, CausalTransformer)
    vectors = made.model.encode(TEXTS)
    lm, whole = chat.with_head(made), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = {weight.data_ptr() for weight in made.model.parameters()}
    assert {weight.data_ptr() for weight in lm.parameters()} <= own
    ids = torch.tensor([[5, 9, 200, 31, 7]])
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, whole(ids).logits)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(lm.generate(ids, **settings), whole.generate(ids, **settings))
    assert np.array_equal(made.model.encode(TEXTS), vectors)


def test_answers_are_those_of_generate(client, whole_path):
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(whole_path), AutoTokenizer.from_pretrained(whole_path)

    def generated(text, count):
        inputs = tokenizer(text, return_tensors="pt")
        tokens = lm.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    expected = generated("user: Who chased the mouse?\nassistant:", 24)
    answer = client.post("/v1/chat/completions", json=GREEDY).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert (answer["model"].partition("@")[0], answer["choices"][0]["finish_reason"]) == ("m", "length")
    text, last = streamed(client)
    # A stream ends before bytes that are no character.
    assert len(text) > 9
    assert expected.startswith(text)
    assert last["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == 24
    form = {"model": "m", "prompt": "The dog", "temperature": 0, "max_tokens": 9}
    assert client.post("/v1/completions", json=form).json()["choices"][0]["text"] == generated("The dog", 9)
    sampled = {client.post("/v1/completions", json={**form, "temperature": 2}).text for _ in range(3)}
    assert len({json.loads(own)["choices"][0]["text"] for own in sampled}) > 1
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["m", "m:query", "m:document"]


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"model": "gpt"}, 404, 'There is no model "gpt" here that chats: give "m".'),
        ({"messages": []}, 400, "'messages': give a list of objects with a role and a content."),
        ({"messages": [{"content": "a"}]}, 400, "(KeyError: 'role')"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, 400, "prompt and answer may have 256: send less."),
        ({"messages": [{"role": "user", "content": "a" * 2**20}]}, 400, "more than 1,048,576 characters"),
        ({"messages": [{"role": "user", "content": "a" * 2**21}]}, 413, "larger than the limit"),
        ({"generation_config": "{}"}, 400, "Unknown parameter: 'generation_config'."),
        ({"chat_template_kwargs": {"chat_template": "a"}}, 400, "Unknown parameter: 'chat_template'."),
        ({"chat_template_kwargs": 5}, 400, "'chat_template_kwargs': input should be an object."),
        ({"max_tokens": 0}, 400, "max_new_tokens"),
        ({"colour": "red"}, 422, "Unexpected fields in the request: {'colour'}"),
    ],
)
def test_refusals(client, change, status, told):
    answer = client.post("/v1/chat/completions", json={**GREEDY, **change})
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text


def test_keys_templates_and_positions(client, whole_path, client_of):
    assert client.post("/v1/chat/completions", json=GREEDY, headers={"Authorization": ""}).status_code == 401
    full = client.post("/v1/chat/completions", json={**GREEDY, "max_tokens": 9999}).json()
    assert (full["usage"]["total_tokens"], full["choices"][0]["finish_reason"]) == (256, "length")
    plain = embedder(whole_path, deterministic=True)
    plain.tokenizer.tokenizer.chat_template = None
    answer = client_of(plain, chat=chat.Chat(plain)).post("/v1/chat/completions", json=GREEDY)
    assert answer.json()["error"]["message"] == "m has no chat template: send a prompt to /v1/completions."


def embed(client, texts=TEXTS):
    answer = client.post("/v1/embeddings", json={"model": "m", "input": texts})
    assert answer.status_code == 200, answer.text
    return np.float32([row["embedding"] for row in answer.json()["data"]])


def test_neither_changes_the_other(client, server):
    expected, text = server.models["m"][0].model.encode(TEXTS), streamed(client, max_tokens=200)[0]
    with ThreadPoolExecutor(6) as clients:
        chats = [clients.submit(streamed, client, max_tokens=200) for _ in range(3)]
        vectors = [clients.submit(embed, client) for _ in range(12)]
        assert all(own.result()[0] == text for own in chats)
        np.testing.assert_allclose([own.result() for own in vectors], [expected] * 12, rtol=0, atol=1e-6)


def test_a_first_token_waits_for_one_batch_at_most(client, server, monkeypatch):
    """Batches are counted: at most the one that has begun ends before a chat's first token, and all end after it."""
    ended, entered = [], threading.Event()
    run = server.batches._run
    monkeypatch.setattr(server.batches, "_run", lambda batch: (run(batch), ended.append(len(batch)))[0])
    counts = []

    def prefill(*given):
        if not counts:
            counts.append(len(ended))
            entered.set()
            # Batches of the request below could run meanwhile.
            time.sleep(0.5)
            counts.append(len(ended))

    hook = server.chat.lm.register_forward_pre_hook(prefill)
    with ThreadPoolExecutor(2) as clients:
        talking = clients.submit(streamed, client)
        assert entered.wait(60)
        embedding = clients.submit(embed, client, TEXTS * 8)
        talking.result()
        embedding.result()
    hook.remove()
    before, after = counts
    assert after - before <= 1
    assert len(ended) == before + 10


def test_a_chat_whose_client_leaves_ends(server):
    passes, entered, go_on = [], threading.Event(), threading.Event()

    def note(*given):
        passes.append(given)
        entered.set()
        assert go_on.wait(60)

    async def leave():
        form = chat.ChatForm(model="m", messages=MESSAGES, max_tokens=200)
        task = asyncio.ensure_future(server.chat.answer(form))
        await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await server.chat.answer(form.model_copy(update={"max_tokens": 1}))

    hook = server.chat.lm.register_forward_pre_hook(note)
    asyncio.run(leave())
    hook.remove()
    assert len(passes) == 2


def test_a_stream_whose_client_leaves_ends(whole_path):
    made = embedder(whole_path)
    talking, passes = chat.Chat(made), []
    talking.lm.generation_config.eos_token_id = None
    talking.lm.register_forward_pre_hook(lambda *given: (passes.append(given), time.sleep(0.02))[0])
    with serving(Server(made, chat=talking)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps({**GREEDY, "max_tokens": 200, "stream": True}))
        assert b"chatcmpl" in connection.getresponse().read(60)
        connection.close()
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert answer.status == 200
    # The server has waited for what ran.
    count = len(passes)
    time.sleep(0.1)
    assert len(passes) - count <= 1
    assert count < 100


def test_what_is_no_whole_language_model_is_refused(whole_path, untied_path, tmp_path, encoder_paths):
    """``--lm`` names the whole one, whose weights the recipe then reads; another one is refused."""
    encoder = Embedder("m", SentenceTransformer(encoder_paths()[0], device="cpu"))
    with pytest.raises(ValueError, match="m begins with Transformer, which has no language model of transformers"):
        chat.Chat(encoder)
    for path, settings, told in (
        (whole_path, {"output_layer": 2}, "m lacks the layers after 2 of its language model"),
        (untied_path, {}, "m lacks the output head of its language model"),
    ):
        embedder(path, **settings).model.save_pretrained(str(tmp_path / str(len(told))))
        saved = Embedder("m", SentenceTransformer(str(tmp_path / str(len(told))), device="cpu"))
        with pytest.raises(ValueError, match=told) as refused:
            chat.Chat(saved)
        assert "--lm PATH" in str(refused.value)
        vectors = saved.model.encode(TEXTS)
        lm = chat.load_whole(path, saved)
        assert {own.data_ptr() for own in saved.model.parameters()} <= {own.data_ptr() for own in lm.parameters()}
        assert np.array_equal(saved.model.encode(TEXTS), vectors)
        assert chat.Chat(saved, lm).lm is lm
    with pytest.raises(ValueError, match="is not the language model of m: embed_tokens.weight differs"):
        chat.load_whole(whole_path, saved)
    AutoModel.from_pretrained(untied_path).save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="lacks lm_head.weight: give a whole language model"):
        chat.load_whole(str(tmp_path / "headless"), saved)


def test_a_reranker_of_the_same_language_model_shares_its_weights(whole_path, untied_path):
    made, reranker = embedder(whole_path), AttentionReranker(modules=[AttentionRerankModule(whole_path)], device="cpu")
    scores = reranker.predict([("mouse", text) for text in TEXTS])
    assert share(ListReranker("r", reranker).model[0], made.model[0]) == ""
    assert {own.data_ptr() for own in reranker.parameters()} <= {own.data_ptr() for own in made.model.parameters()}
    assert np.array_equal(reranker.predict([("mouse", text) for text in TEXTS]), scores)
    assert share(CausalTransformer(untied_path), made.model[0]) == "model.embed_tokens.weight"


@pytest.mark.long
def test_a_minute_of_chats_and_embeddings(whole_path, tmp_path):
    """16 clients of each kind, by the command: every answer is the one that is given alone, and none is a 5xx."""
    pipeline(EchoModule(whole_path, deterministic=True)).save_pretrained(str(tmp_path / "my-model"))
    serving = Serving(tmp_path / "printed", str(tmp_path / "my-model"), "--chat", "--batch-size", "8")
    own, seen = {**GREEDY, "model": "my-model"}, {"chat": 0, "embed": 0}
    status, alone = serving.ask("/v1/chat/completions", own)
    assert status == 200, alone
    expected, end = serving.embed(TEXTS), time.monotonic() + 60

    def work(number):
        while time.monotonic() < end:
            if number % 2:
                status, answer = serving.ask("/v1/chat/completions", own)
                assert (status, answer["choices"]) == (200, alone["choices"])
            else:
                np.testing.assert_allclose(serving.embed(TEXTS), expected, rtol=0, atol=1e-6)
            seen["chat" if number % 2 else "embed"] += 1

    with ThreadPoolExecutor(32) as clients:
        list(clients.map(work, range(32)))
    assert min(seen.values()) > 16
    serving.kill()
