"""A Hub that runs in a thread, stops, and runs again where it was, with what it had."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import uvicorn

from .app import make_app
from .storage import Storage


class RunningHub:
    """The server, on 127.0.0.1 and a free port that it keeps.

    Attributes:
        storage: What it serves.
        endpoint: For ``HF_ENDPOINT``.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        # Large files come from another host than the Hub, as on the real one: clients then send it no token.
        self._app = make_app(storage, self.endpoint, f"http://localhost:{self.port}")
        self._breaking_point: tuple[str, str] | None = None

    def start(self) -> None:
        config = uvicorn.Config(
            self._serve, host="127.0.0.1", port=self.port, log_level="error", lifespan="off", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("The loopback Hub did not start.")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=30)

    def break_at(self, method: str, path: str) -> None:
        """Let the next request of this kind be the last: its connection closes without an answer, and so does all."""
        self._breaking_point = (method, path)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == self._breaking_point:
            self._breaking_point = None
            # A connection that is closed before all was read is reset, which the client sees as another error.
            while (await receive()).get("more_body", False):
                pass
            self._server.should_exit = self._server.force_exit = True
            for server in self._server.servers:
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(3600)
        # Revisions contain slashes ("refs/pr/1"), which only the path as it was sent keeps apart from its own.
        await self._app({**scope, "path": scope["raw_path"].decode("ascii")}, receive, send)
