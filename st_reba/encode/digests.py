"""What files hold, read whole: their SHA-256, remembered, and whether they are still what was read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..files import atomic_file

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Stamp:
    """A file as it was read. Plain data, for worker processes; the same on every machine that shares the file."""

    path: Path
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """See that the file has not been written since.

        Raises:
            ValueError: If it was.
        """
        if not self.path.is_file() or Stamp.of(self.path) != self:
            raise ValueError(
                f"{self.path} was changed during the run. What is done is kept: if the file is again what it was, the "
                "same command goes on; else begin anew with --overwrite."
            )


class Digests:
    """SHA-256 of whole files. A file that is remembered, and has not been written since, is not read again.

    Args:
        memory: The file to remember in. A file is known by device, inode, size, and times of writing and of change.
        on_bytes: Called with how many bytes of :meth:`read` are read, and of how many.
    """

    def __init__(self, memory: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._memory = memory
        self._on_bytes = on_bytes
        self._known: dict[str, str] = {}
        if memory.is_file():
            self._known = json.loads(memory.read_text("utf-8"))

    def read(self, paths: Iterable[Path]) -> dict[Path, str]:
        """The digest of each file, as hexadecimal digits.

        Raises:
            ValueError: If a file is written while it is read.
        """
        keys = {path: _key(path.stat()) for path in paths}
        missing = {path: path.stat().st_size for path, key in keys.items() if key not in self._known}
        total, done = sum(missing.values()), 0
        for path, size in missing.items():
            self._known[keys[path]] = self._digest(path, keys[path], done, total)
            done += size
        if missing:
            with atomic_file(self._memory) as stream:
                stream.write(json.dumps(self._known, indent=1).encode())
        return {path: self._known[key] for path, key in keys.items()}

    def _digest(self, path: Path, key: str, done: int, total: int) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as stream:
            end = done + os.fstat(stream.fileno()).st_size
            # A file that grows as fast as it is read would have no end.
            while done < end and (count := stream.readinto(block)):
                digest.update(block[:count])
                done += count
                self._on_bytes(done, total)
            if _key(os.fstat(stream.fileno())) != key:
                raise ValueError(f"{path} is being written: begin when it is complete.")
        return digest.hexdigest()


def _key(status: os.stat_result) -> str:
    return "-".join(map(str, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))
