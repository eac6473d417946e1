"""Servers with faults: each is served by a model that has the fault, and named by what is looked for."""

from __future__ import annotations

import copy
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from tokenizers import processors

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.export import static_model
from st_reba.verify import Endpoint, EndpointError, verify

from .. import backbones, processes
from ..cli import typed

PROMPTS = {"query": "Find what answers: ", "document": "文本："}
#: Positions of the models.
ROOM = 64


class Stub:
    """Embeds whatever it is sent, in both forms."""

    def __init__(self, encode, refuses=lambda text: False, forms=("openai", "tei")):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                texts = given.get("input", given.get("inputs"))
                known = {"/v1/embeddings": "openai", "/embed": "tei"}.get(self.path)
                if known not in forms:
                    return self.answer(404, {})
                if texts is None or any(refuses(text) for text in texts):
                    return self.answer(422, {"error": "no"})
                try:
                    found = encode(texts)
                except RuntimeError as error:
                    return self.answer(500, {"error": str(error)})
                if isinstance(found, bytes):
                    return self.answer(200, found)
                rows = np.asarray(found, dtype=np.float64).tolist()
                data = [{"index": place, "embedding": row} for place, row in enumerate(rows)]
                return self.answer(200, rows if known == "tei" else {"data": data})

            def do_GET(self):
                self.answer(200, {"data": [{"id": "stub"}]})

            def answer(self, status, content):
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def stub():
    opened = []

    def start(*args, **kwargs):
        opened.append(Stub(*args, **kwargs))
        return opened[-1].url

    yield start
    for server in opened:
        server.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One model twice: with a tokenizer that ends texts with its end token, and with one that does not.

    Of one layer, since each fault that is looked for is a pass.
    """
    model = backbones.backbone("llama", num_hidden_layers=1)
    found = {}
    for name in ("ends", "open"):
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        tokenizer = backbones.tokenizer(model_max_length=40)
        tokenizer.pad_token = "<|end|>"
        if name == "ends":
            end = tokenizer.eos_token_id
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="$A <|end|>", special_tokens=[("<|end|>", end)]
            )
        tokenizer.save_pretrained(directory)
        found[name] = str(directory)
    return found


def piped(head, pooling, *behind, **settings):
    modules = [head, Pooling(head.get_embedding_dimension(), pooling), *behind, Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, **settings)


@pytest.fixture(scope="module")
def models(paths):
    """By what they are: the pooling, and what is told apart beside it."""
    ends, opened = (CausalTransformer(paths[name], pool_over="all") for name in ("ends", "open"))
    head, query = CausalTransformer(paths["open"]), {"default_prompt_name": "query"}
    found = {
        "last, ends, query": piped(ends, "lasttoken", **query),
        "last, ends": piped(ends, "lasttoken"),
        "last, query": piped(opened, "lasttoken", **query),
        "last": piped(opened, "lasttoken"),
        "mean, ends": piped(ends, "mean"),
        "last of words": piped(head, "lasttoken"),
        "mean": piped(head, "mean"),
        "first": piped(head, "cls"),
        "one row": piped(CausalTransformer(paths["open"], rows="last"), "lasttoken"),
        "dense": piped(head, "mean", Dense(32, 32, bias=False)),
        "ReBA": piped(ReBAModule(paths["open"], repetitions=2), "mean"),
    }
    bare = [*found["last, ends, query"].children()][:2]
    return {**found, "bare": SentenceTransformer(modules=bare, device="cpu", prompts=PROMPTS, **query)}


@pytest.fixture(scope="module")
def last(models):
    """Read at the end token, behind a prompt."""
    return models["last, ends, query"]


@pytest.fixture(scope="module")
def reba(models):
    return models["ReBA"]


def causes(url, model, **settings):
    return verify(Endpoint(url), model, **settings).causes


def test_equal(stub, last, reba):
    for model in (last, reba):
        seen = verify(Endpoint(stub(model.encode)), model)
        assert seen.equal
        assert {row.probe.name for row in seen.rows} == {"word", "sentence", "Chinese", "other marks", "empty", "long"}
        assert max(row.distance for row in seen.rows) < 1e-5
        assert next(row.probe.tokens for row in seen.rows if row.probe.name == "long") > model[0].max_seq_length
    document = stub(last.encode_document)
    assert causes(document, last) == ['the prompt is that of "document"']
    assert causes(document, last, prompt_name="document") == []


@pytest.mark.parametrize(
    ("served", "own", "expected"),
    [
        ("last, query", "last, ends, query", ["the end token (EOS) is missing"]),
        ("last, ends", "last", ["an end token (EOS) is added"]),
        ("last, ends", "last, ends, query", ["the prompt is missing"]),
        ("mean", "last of words", ["pooling is the mean of all tokens, and the model's is the last token"]),
        ("first", "mean", ["pooling is the first token, and the model's is the mean of all tokens"]),
        ("mean", "one row", ["pooling is the mean of all tokens, and the model's is the last token"]),
        ("mean", "dense", ["Dense, which stands behind the pooling, is missing"]),
        ("last, ends, query", "bare", ["normalisation: the vectors have length 1, and the model's have not"]),
        ("bare", "last, ends, query", ["normalisation: the model's vectors have length 1, and these "]),
    ],
)
def test_a_fault_is_named(served, own, expected, stub, models):
    found = causes(stub(models[served].encode), models[own])
    assert len(found) == len(expected)
    assert all(cause.startswith(said) for cause, said in zip(found, expected, strict=True)), found


def padded(texts):
    return [text + "!" * (max(map(len, texts)) - len(text)) for text in texts]


@pytest.mark.parametrize(
    ("own", "encode", "expected"),
    [
        ("last", lambda own, texts: own.encode(sorted(texts)), "order: the vectors of a list are not in the order"),
        ("last", lambda own, texts: own.encode(padded(texts)), "batch: a text's vector depends on the texts beside"),
        ("last", lambda own, texts: 3 * own.encode(texts), "normalisation: the model's vectors have length 1, and"),
        ("bare", lambda own, texts: 3 * own.encode(texts), "normalisation: the vectors are 3 to 3 times as long"),
        ("last", lambda own, texts: own.encode(texts)[:, :8], "vectors have 8 values, and the model's 32: another"),
        ("last", lambda own, texts: np.eye(32)[[len(text) % 5 for text in texts]], "no fault that is known explains"),
    ],
)
def test_what_is_done_to_the_vectors_is_named(own, encode, expected, stub, models):
    (cause,) = causes(stub(partial(encode, models[own])), models[own])
    assert cause.startswith(expected)


@pytest.mark.parametrize("length", [13, 32])
def test_texts_are_cut_earlier(stub, paths, length):
    own, served = (piped(CausalTransformer(paths["open"]), "mean") for _ in range(2))
    served.max_seq_length = length
    # 13 tokens are what is left of 16 by three that stand around a text.
    assert causes(stub(served.encode), own) == [f"texts are cut after {length} tokens, and the model reads 40"]
    own.max_seq_length, served.max_seq_length = 20, ROOM
    (cause,) = causes(stub(served.encode), own, max_tokens=25)
    assert cause == "texts are not cut, and the model reads 20 tokens"


def test_texts_lose_their_beginning(stub, models):
    own = models["mean"]

    def encode(texts):
        offsets = [own.tokenizer(text, return_offsets_mapping=True)["offset_mapping"] for text in texts]
        return own.encode(
            [text[row[-40][0] :] if len(row) > 40 else text for text, row in zip(texts, offsets, strict=True)]
        )

    assert causes(stub(encode), own) == ["a text that is too long loses its beginning and not its end"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precision(stub, reba, dtype):
    coarse = copy.deepcopy(reba).to(getattr(torch, dtype))
    # The zeros of an empty text have no direction in float16.
    served = stub(coarse.encode, refuses=lambda text: not text)
    (cause,) = causes(served, reba)
    assert cause.startswith(f"precision: as in {dtype} (")
    assert causes(served, reba, tolerance=0.1) == []


def test_a_recipe_that_the_server_does_not_know(stub, roomy_path):
    """What an engine does with the weights and the pooling that lie in the model's directory."""
    head = Transformer(roomy_path)
    head.tokenizer.pad_token = head.tokenizer.eos_token
    for module, pooling in ((ReBAModule, "mean"), (EchoModule, "lasttoken")):
        (cause,) = causes(stub(piped(head, pooling).encode), piped(module(roomy_path), pooling), max_tokens=128)
        assert cause.startswith(f"the recipe ({module.__name__}) is missing")


def test_an_empty_text(stub, last, reba):
    assert causes(stub(reba.encode, refuses=lambda text: not text), reba) == []
    served = stub(lambda texts: [row if text else row + 1 for text, row in zip(texts, reba.encode(texts), strict=True)])
    assert causes(served, reba) == ["empty text: the model gives zeros and the other a vector"]


def test_forms(stub, reba):
    tei, both = stub(reba.encode, forms=("tei",)), stub(reba.encode)
    assert Endpoint(tei).form == Endpoint(f"{tei}/embed").form == Endpoint(both, form="tei").form == "tei"
    assert Endpoint(both).form == Endpoint(f"{both}/v1").form == Endpoint(f"{both}/v1/embeddings").form == "openai"
    assert Endpoint(both).model == "stub"
    for url in (tei, f"{both}/v1/"):
        assert verify(Endpoint(url), reba).equal


def test_a_static_model(stub, paths, tmp_path):
    """Its tokenizer is none of transformers', and nothing cuts its texts."""
    path = str(tmp_path / "static")
    static_model(CausalTransformer(paths["open"]), backbones.TEXTS * 5, layer=0).save_pretrained(path)
    static = SentenceTransformer(path, device="cpu", prompts=PROMPTS)
    served = stub(lambda texts: static.encode(texts, prompt_name="query"))
    assert causes(served, static) == ['the prompt is that of "query"']
    cut = copy.deepcopy(static)
    cut.tokenizer.enable_truncation(16)
    assert causes(stub(cut.encode), static) == ["texts are cut after 16 tokens, and the model reads all"]
    assert "another model" in causes(stub(lambda texts: static.encode([text[::-1] for text in texts])), static)[0]
    assert "Equal: http://127.0.0.1:" in typed(f"verify {stub(static.encode)} --model {path} --device cpu")


def test_servers_that_are_none(stub, reba):
    with pytest.raises(EndpointError, match="does not answer .*: check the URL, and that the server runs"):
        Endpoint("http://127.0.0.1:9", timeout=5)
    with pytest.raises(ValueError, match="The API key has other characters than printable ASCII"):
        Endpoint("http://127.0.0.1:9/embed", key="密钥")
    for url in ("http://127.0.0.1:port/v1/embeddings", "http://hóst.invalid/pâth/embed"):
        with pytest.raises(EndpointError, match="does not answer|is no URL"):
            Endpoint(url).embed(["a"])
    for encode, timeout, message in (
        (lambda texts: time.sleep(1), 0.3, "within 0.3 seconds: .* give --timeout more seconds, .* --max-tokens"),
        (lambda texts: [], 60, "gave no vector for each of 1 texts"),
        (lambda texts: b"[" * 200_000, 60, "answered with something else than JSON"),
        (lambda texts: b"\xff", 60, "answered with something else than JSON"),
    ):
        with pytest.raises(EndpointError, match=message):
            Endpoint(f"{stub(encode)}/embed", timeout=timeout).embed(["a"])
    with pytest.raises(EndpointError, match="answered 422"):
        verify(Endpoint(stub(reba.encode, refuses=lambda text: True)), reba)
    with pytest.raises(ValueError, match='the model has "query", "document"'):
        verify(Endpoint(stub(reba.encode)), reba, prompt_name="no")


def test_the_command(stub, last, tmp_path):
    path = str(tmp_path / "model")
    last.save_pretrained(path, create_model_card=False)
    assert "Equal: http://127.0.0.1:" in typed(f"verify {stub(last.encode)} --model {path} --device cpu")
    fault = stub(lambda texts: last.encode(texts, prompt=""))
    assert "- the prompt is missing" in typed(f"verify {fault} --model {path} --device cpu", expect=1)
    assert "begins with http:// or https://" in typed(f"verify localhost --model {path}", expect=1)


def test_it_needs_none_of_the_servers_packages(tmp_path):
    hidden = "import sys; sys.modules |= dict.fromkeys(('fastapi', 'uvicorn', 'prometheus_client', 'starlette'))"
    done = processes.run("-c", f"{hidden}; import st_reba.verify", out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
