"""Connections that do not send a request, or not at once, and those that are too many."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time

import pytest
import uvicorn

from st_reba.serve import app as served_app
from st_reba.serve.app import Connection


class App:
    """Answers with what it was sent, or as many bytes as it is told; ``/hold`` when it is let."""

    def __init__(self):
        self.held = threading.Semaphore(0)
        self.free = threading.Event()

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/hold":
            self.held.release()
            while not self.free.is_set():
                await asyncio.sleep(0.01)
        body = b"a" * 50_000_000 if scope["path"] == "/large" else b"busy" if "too_many" in scope["state"] else body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def served(monkeypatch):
    """``served(seconds)``: the application, its port and its connections, of which there may be five."""
    running = []

    def serve(seconds):
        monkeypatch.setattr(served_app, "CONNECTIONS", 5)
        monkeypatch.setattr(served_app, "HEAD_SECONDS", seconds)
        app, own = App(), socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]})
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.001)
        return app, own.getsockname()[1], server.server_state.connections

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def opened(port, sent=b""):
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(sent)
    return client


def ask(port, path="/", body=b"b"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body)
    answer = connection.getresponse().read()
    connection.close()
    return answer


def is_closed(client):
    """Whether the server closes it without a word."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


UNFINISHED = {
    "nothing": b"",
    "a part of a head": b"GET / HTTP/1.1\r\nHost:",
    "a part of a body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nb",
    "a chunked body": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n",
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
def test_whoever_sends_no_request_makes_room(served, sent):
    _, port, there = served(60)
    clients = [opened(port, sent) for _ in range(20)]
    for number in range(8):
        assert ask(port, body=b"%d" % number) == b"%d" % number
    assert len(there) <= 6
    assert all(is_closed(client) for client in clients[:15])
    for client in clients:
        client.close()


@pytest.mark.parametrize("before", [b"", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nb"])
def test_a_head_has_its_time(served, before):
    _, port, _ = served(0.3)
    client = opened(port, before)
    answer = b""
    while before and not answer.endswith(b"\r\n\r\nb"):
        answer += client.recv(1000)

    def send_slowly():
        for letter in b"GET /" + b"a" * 10_000:
            client.send(bytes([letter]))
            time.sleep(0.01)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_slowly()


def test_an_answer_that_nobody_reads(served):
    _, port, there = served(60)
    client = opened(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    while not there or not (own := next(iter(there))).transport.get_write_buffer_size():
        time.sleep(0.001)
    # What its timer does, when some of the answer was read meanwhile, and when none was.
    for _ in range(2):
        read = 0
        while read < 10_000_000:
            read += len(client.recv(2**20))
        own.loop.call_soon_threadsafe(own._is_late)
        assert ask(port) == b"b"
        assert own in there
    until = time.monotonic() + 60
    while own in there:
        own.loop.call_soon_threadsafe(own._is_late)
        assert time.monotonic() < until
        time.sleep(0.1)
    client.close()


def test_one_too_many(served):
    app, port, there = served(60)
    clients = []
    for _ in range(5):
        clients.append(opened(port, b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert app.held.acquire(timeout=60)
    for _ in range(3):
        assert ask(port) == b"busy"
    assert len([own for own in there if not own.transport.is_closing()]) >= 5
    app.free.set()
    for client in clients:
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.close()
    while there:
        time.sleep(0.001)
    assert ask(port) == b"b"
