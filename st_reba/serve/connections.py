"""Connections: how long one may be open without a request, and how many there may be.

uvicorn closes a connection that is idle after an answer. One that never sends a request, or never the whole head of
one, it keeps for ever, and counts. It has no setting for that.
"""

from __future__ import annotations

import asyncio
import sys

from uvicorn.protocols.http.h11_impl import H11Protocol

if sys.platform != "win32":
    import resource

#: Open at a time. For a further one, some are closed: those that have been sending their request for longest.
CONNECTIONS = 1024
#: Seconds for the head of a request to arrive, after the connection or the last answer.
HEAD_SECONDS = 30
# Files that are no connections. A process that may open too few cannot accept any connection.
_OTHER_FILES = 256


def raise_file_limit() -> None:
    """Let this process open as many files as connections need, and as may come before the first is closed."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4 * CONNECTIONS + _OTHER_FILES
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many there may be: as many as the files that this process may open allow."""
    if sys.platform == "win32":
        return CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, files - _OTHER_FILES))


class Connection(H11Protocol):
    """uvicorn's connection, with these limits.

    A connection whose request is here as a whole is never closed for another one. If there are only such, requests of a
    further connection find ``request.state.too_many``.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unsent = 0
        self._wait_for_head()
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._is_late)

    def _is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self.transport.close()
        elif unsent != self._unsent:
            # The last answer is large, and its reader slow.
            self._unsent = unsent
            self._wait_for_head()
        else:
            self.transport.abort()

    @property
    def _is_arriving(self) -> bool:
        """Whether it has no request that is here as a whole, and no answer on its way."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        own = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        arriving = sorted((other for other in own if other._is_arriving), key=lambda other: other._since)
        # To look at all takes a millisecond or two: too long for each of thousands that come at once.
        for other in arriving[: 1 + most_connections() // 16]:
            other.transport.abort()
            # As :meth:`connection_lost` does, which comes after others of these connections.
            self.connections.discard(other)
        if not arriving:
            self.app_state = {**self.app_state, "too_many": True}
