"""A server on loopback that speaks OpenAI's ``/v1/embeddings``, as a test wants it."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np

WIDTH = 32


def hashed(texts: Sequence[str], seed: int = 0) -> np.ndarray:
    """Vectors of length 1 that depend on the text and the seed alone."""
    rows = [np.random.default_rng([seed, zlib.crc32(text.encode())]).normal(size=WIDTH) for text in texts]
    return np.array([row / np.linalg.norm(row) for row in rows])


class Server:
    """Embeds by a function; the last text comes first in its answers, with its index.

    Attributes:
        asked: Path, body and key of each request.
        fails: Number of next requests that are answered with ``status``.
        spoil: Changes an answer before it is sent.
        wait: Seconds before an answer.
        lists: Whether it lists its models.
    """

    def __init__(self, embed: Callable[[Sequence[str]], Any] = hashed) -> None:
        self.embed = embed
        self.asked: list[tuple[str, Any, str | None]] = []
        self.fails, self.status, self.wait, self.lists = 0, 503, 0.0, True
        self.headers: dict[str, str] = {}
        self.spoil: Callable[[Any], Any] = lambda answer: answer
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def do_GET(self) -> None:
                self.answer(None)

            def answer(self, sent: Any) -> None:
                outer.asked.append((self.path, sent, self.headers.get("Authorization")))
                time.sleep(outer.wait)
                status, found = outer.answer(urlsplit(self.path).path, sent)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in {**outer.headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, sent: Any) -> tuple[int, Any]:
        if self.fails:
            self.fails -= 1
            return self.status, {"error": "busy"}
        if path == "/v1/models" and self.lists:
            return 200, {"data": [{"id": "tiny"}]}
        if path != "/v1/embeddings":
            return 404, {}
        rows = np.asarray(self.embed(sent["input"]), dtype=np.float64).tolist()
        data = [{"index": place, "embedding": row} for place, row in enumerate(rows)]
        return 200, self.spoil({"data": data[::-1]})
