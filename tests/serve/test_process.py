"""The command in a process of its own: many clients at once, some of them malformed or leaving, and its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from st_reba.serve.app import Server, bind, serve

from .. import processes
from ..backbones import TEXTS
from ..script.installed import Running

#: The command with a model that takes 20 ms for each batch, long enough for a test to see a queue.
PROGRAM = """
import time
from st_reba import ReBAModule
from st_reba_cli import app

forward = ReBAModule.forward

def paced(*arguments, **settings):
    time.sleep(0.02)
    return forward(*arguments, **settings)

ReBAModule.forward = paced
app()
"""
KEY = {"Authorization": "Bearer secret"}


class Serving(Running):
    """``st-reba serve`` on a free port."""

    def __init__(self, printed, *arguments):
        given = ["serve", *arguments, "--port", "0", "--device", "cpu", "--dtype", "float32", "--api-key", "secret"]
        super().__init__(processes.start("-c", PROGRAM, *given, out=printed), printed)
        self.port = int(self.until("/v1").partition("at http://127.0.0.1:")[2].split()[0])

    def ask(self, path, given=None, headers=KEY):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = None if given is None else json.dumps(given)
        connection.request("GET" if given is None else "POST", path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content) if content.startswith(b"{") else content.decode()

    def embed(self, texts):
        status, answer = self.ask("/v1/embeddings", {"model": "my-model", "input": texts})
        assert status == 200, answer
        return np.float32([row["embedding"] for row in answer["data"]])

    def send(self, sent):
        """What a client reads that sends some bytes, and then no more; empty: it leaves."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(sent)
            return client.recv(1000) if sent.endswith(b"\r\n\r\n") else b""

    def value(self, name):
        shown = self.ask("/metrics")[1]
        return float(re.search(rf"^{re.escape(name)} (\S+)$", shown, re.MULTILINE)[1])


@pytest.fixture
def server(saved, tmp_path):
    running = Serving(tmp_path / "printed", saved, "--batch-size", "8")
    yield running
    running.kill()


def post(body, length):
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {length}"
    return f"{head}\r\n\r\n{body}".encode()


MANY = json.dumps({"model": "my-model", "input": [f"text {number}" for number in range(200)]})
#: Not HTTP, no head, half a head, half a body, and a whole request whose client does not wait for the answer.
STRANGE = [
    b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
    b"",
    b"GET / HTTP/1.1\r\nHost:",
    post("{", 900),
    post(MANY, len(MANY)),
]


def test_many_clients_and_the_end(server, model, monkeypatch):
    texts = [f"{text} {number}" for number in range(8) for text in TEXTS]
    expected = model.encode(texts)
    # They send nothing, and stay.
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    with ThreadPoolExecutor(32 + len(STRANGE)) as clients:
        strange = [clients.submit(server.send, sent) for sent in STRANGE * 4]
        parts = [(first % 20, first % 20 + 1 + first % 5) for first in range(64)]
        found = list(clients.map(lambda part: server.embed(texts[slice(*part)]), parts))
        assert strange[0].result(300).startswith(b"HTTP/1.1 400")
    for part, own in zip(parts, found, strict=True):
        assert np.array_equal(own, expected[slice(*part)])
    # Texts of clients that left are not run.
    deadline = time.monotonic() + 300
    while server.value("st_reba_waiting_texts") > 0 or server.value("st_reba_requests_left_total") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.value("st_reba_batch_texts_sum") < len(texts) + 64 * 5 + 600
    assert server.ask("/v1/models", headers={})[0] == 401

    # The image asks for its health, whatever proxy its environment has.
    image = (Path(__file__).parents[2] / "docker" / "Dockerfile").read_text(encoding="utf-8")
    check = json.loads(re.search(r"HEALTHCHECK .*\\\n\s*CMD (.*)", image)[1])
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_PROXY": ""}
    subprocess.run([part.replace("8000", str(server.port)) for part in check], env=env, check=True)

    # What is on its way when the signal comes is answered.
    with ThreadPoolExecutor(4) as clients:
        late = [clients.submit(server.embed, texts) for _ in range(4)]
        while server.value("st_reba_waiting_texts") < 40 and not any(own.done() for own in late):
            time.sleep(0.02)
        server.kill(signal.SIGTERM)
        for own in late:
            assert np.array_equal(own.result(300), expected)
    assert server.wait().code == 0, server.output
    assert "Stopped; every request was answered." in server.output
    with pytest.raises(ConnectionRefusedError):
        server.ask("/health")
    for client in silent:
        client.close()


def test_a_signal_right_behind_the_address_ends_it():
    """uvicorn does not handle signals yet then."""
    last = threading.Timer(60, signal.raise_signal, [signal.SIGINT])
    last.start()
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    with bind("127.0.0.1", 0) as listener:
        serve(Server(), listener, started=lambda: signal.raise_signal(signal.SIGTERM))
    for number, handler in before:
        signal.signal(number, handler)
    assert last.is_alive()
    last.cancel()
