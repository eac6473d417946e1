"""A server on loopback: a llama-server's API over a tiny model, and three forms that give a text one vector."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

#: The paths of the forms that give a text one vector.
POOLED = {"/v1/embeddings": "openai", "/embed": "tei", "/api/embed": "ollama"}


class Server:
    """Answers as such a server does; what a test changes, it answers otherwise.

    Args:
        lm: A language model whose last states tokens have.
        tokenizer: Its tokenizer.

    Attributes:
        asked: The path, what was sent, and the key of every request.
        fails: How many of the next requests are answered with ``status``.
        spoil: What is done to what is answered; None: nothing.
        wait: Seconds before an answer.
    """

    def __init__(self, lm: Any, tokenizer: Any) -> None:
        self.lm, self.tokenizer = lm, tokenizer
        self.asked: list[tuple[str, Any, str | None]] = []
        self.fails, self.status = 0, 503
        self.headers: dict[str, str] = {}
        self.spoil: Callable[[Any], Any] | None = None
        self.wait, self.n_ctx = 0.0, lm.config.max_position_embeddings
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answered(sent)

            def do_GET(self) -> None:
                self.answered(None)

            def answered(self, sent: Any) -> None:
                outer.asked.append((self.path, sent, self.headers.get("Authorization")))
                time.sleep(outer.wait)
                status, found = outer.answer(self.path, sent)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
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
        if path == "/props":
            return 200, {"default_generation_settings": {"n_ctx": self.n_ctx}}
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/api/tags":
            return 200, {"models": [{"name": "tiny:latest"}]}
        if path == "/tokenize":
            return 200, {"tokens": self.pieces(sent["content"], sent["add_special"])}
        if path == "/embedding":
            rows_of_states = [self.states(ids) for ids in sent["content"]]
            if sent.get("embd_normalize", 2) != -1:
                rows_of_states = [own / np.linalg.norm(own, axis=1, keepdims=True) for own in rows_of_states]
            found: Any = [{"index": place, "embedding": own.tolist()} for place, own in enumerate(rows_of_states)]
            # A server need not keep the order.
            found = found[::-1]
        elif path in POOLED:
            texts = sent.get("input", sent.get("inputs"))
            if texts is None:
                return 422, {"error": "no texts"}
            rows = [self.vector(text).tolist() for text in texts]
            found = {
                "openai": {"data": [{"embedding": row} for row in rows]}, "tei": rows, "ollama": {"embeddings": rows},
            }[POOLED[path]]  # fmt: skip
        else:
            return 404, {}
        return 200, found if self.spoil is None else self.spoil(found)

    @torch.inference_mode()
    def states(self, ids: list[int]) -> np.ndarray:
        return self.lm(torch.tensor([ids])).last_hidden_state[0].double().numpy()

    def vector(self, text: str) -> np.ndarray:
        """The mean of a text's states, scaled to length 1."""
        mean = self.states(self.tokenizer(text)["input_ids"]).mean(axis=0)
        return mean / np.linalg.norm(mean)

    def pieces(self, text: str, special: bool) -> list[dict[str, Any]]:
        """As llama-server has them: a piece that is no text is a list of bytes."""
        plain = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(text)["input_ids"] if special else plain
        found = []
        for token in ids:
            spelled = spelling(self.tokenizer, token)
            try:
                found.append({"id": token, "piece": spelled.decode()})
            except UnicodeDecodeError:
                found.append({"id": token, "piece": list(spelled)})
        return found


def spelling(tokenizer: Any, token: int) -> bytes:
    """The bytes of a token of a byte-level or a SentencePiece vocabulary."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece in tokenizer.all_special_tokens:
        return piece.encode()
    table = byte_alphabet()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.replace("▁", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """What a byte-level vocabulary writes for each byte, as GPT-2 has it."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}
