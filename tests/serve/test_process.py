"""The command in a process of its own: many clients at once, clients that leave, and its end."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from .. import processes
from ..backbones import TEXTS
from ..script.installed import Running

#: The command with a model that takes 20 ms for each batch, long enough for a test to see a queue; and with few
#: connections.
PROGRAM = """
import time
from st_reba import ReBAModule
from st_reba.serve import app as served_app
from st_reba_cli import app

forward = ReBAModule.forward

def paced(*arguments, **settings):
    time.sleep(0.02)
    return forward(*arguments, **settings)

ReBAModule.forward = paced
served_app.CONNECTIONS = 20
app()
"""


class Serving(Running):
    """``st-reba serve`` on a free port."""

    def __init__(self, printed, *arguments):
        given = ["serve", *arguments, "--port", "0", "--device", "cpu", "--dtype", "float32"]
        super().__init__(processes.start("-c", PROGRAM, *given, out=printed), printed)
        self.port = int(self.until("/v1").partition("at http://127.0.0.1:")[2].split()[0])

    def ask(self, path, given=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = None if given is None else json.dumps(given)
        connection.request("GET" if given is None else "POST", path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content) if content.startswith(b"{") else content.decode()

    def value(self, name):
        shown = self.ask("/metrics", Authorization="Bearer secret")[1]
        return float(re.search(rf"^{re.escape(name)} (\S+)$", shown, re.MULTILINE)[1])


@pytest.fixture
def running(saved, tmp_path):
    opened = []

    def start(*arguments):
        opened.append(Serving(tmp_path / "printed", saved, *arguments))
        return opened[-1]

    yield start
    for server in opened:
        server.kill()


def embed(server, texts, **more):
    status, answer = server.ask("/v1/embeddings", {"model": "my-model", "input": texts, **more})
    assert status == 200, answer
    return np.float32([row["embedding"] for row in answer["data"]])


def test_many_clients_and_the_end(running, model):
    server = running("--batch-size", "8")
    # They send nothing, and stay.
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    assert server.ask("/health") == (200, {"status": "ok"})
    texts = [f"{text} {number}" for number in range(8) for text in TEXTS]
    expected = model.encode(texts)
    with ThreadPoolExecutor(16) as clients:
        parts = [(first, 1 + first % 5) for first in range(20)]
        found = list(clients.map(lambda part: embed(server, texts[part[0] : sum(part)]), parts))
    for (first, count), own in zip(parts, found, strict=True):
        assert np.array_equal(own, expected[first : first + count])

    # What is on its way when the signal comes is answered.
    with ThreadPoolExecutor(4) as clients:
        late = [clients.submit(embed, server, texts) for _ in range(4)]
        while server.value("st_reba_waiting_texts") < 40:
            time.sleep(0.02)
        server.kill(signal.SIGTERM)
        for own in late:
            assert np.array_equal(own.result(300), expected)
    assert server.wait(300).code == 0, server.output
    assert "Stopped; every request was answered." in server.output
    with pytest.raises(ConnectionRefusedError):
        server.ask("/health")
    for client in silent:
        client.close()


def test_who_leaves_is_not_waited_for(running):
    server = running("--batch-size", "1", "--api-key", "secret")
    body = json.dumps({"model": "my-model", "input": [f"text {number}" for number in range(200)]})
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        deadline = time.monotonic() + 300
        while server.value("st_reba_waiting_texts") == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while server.value("st_reba_waiting_texts") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.value("st_reba_requests_left_total") == 1
    assert server.value("st_reba_batch_texts_sum") < 150
    assert server.ask("/v1/models")[0] == 401
    server.kill(signal.SIGINT)
    assert server.wait(300).code == 0, server.output
