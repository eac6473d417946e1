"""A server's process: its socket, its signals, its end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from .app import Server, make_app
from .connections import HEAD_SECONDS, Connection, raise_file_limit


def bound(host: str, port: int) -> socket.socket:
    """A socket of an address, taken before a model is loaded; nobody is heard there yet.

    Args:
        host: A name or an address.
        port: 0: any that is free.

    Raises:
        OSError: If it is taken, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = socket.socket(family, kind, protocol)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} cannot be used ({error.strerror or error}): give an address of this machine, "
            "and a port that is free."
        ) from error
    return own


def url_of(own: socket.socket) -> str:
    """Where a socket is to be found."""
    host, port, *_ = own.getsockname()
    return f"http://[{host}]:{port}" if own.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(server: Server, own: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or SIGINT; then answer those that are there, and return.

    Args:
        server: What answers.
        own: From :func:`bound`.
        started: Is called when requests are heard.
    """
    raise_file_limit()
    config = uvicorn.Config(
        make_app(server),
        log_level="warning",
        access_log=False,
        server_header=False,
        http=Connection,
        timeout_keep_alive=HEAD_SECONDS,
        lifespan="on",
        ws="none",
    )
    # Uvicorn ends in order and then raises the signal once more, for whoever had it before: that is nobody.
    before: dict[int, Any] = {number: signal.signal(number, _nothing) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _Told(config, started).run(sockets=[own])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Told(uvicorn.Server):
    """Says when it has started."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()


def _nothing(number: int, frame: object) -> None:
    pass
