"""The folder beside the output in which a run keeps what it has done, until all of it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import durable, remove_scratch
from .outputs import part_number

Settings = dict[str, str | int | bool | None]


@dataclass(frozen=True)
class Workspace:
    """``OUT.partial``: what was asked for, and the parts that are done. Plain data, for worker processes."""

    path: Path

    @classmethod
    def beside(cls, out: Path) -> Workspace:
        return cls(out.with_name(f"{out.name}.partial"))

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def index(self) -> Path:
        return self.path / "index.npy"

    @property
    def schema(self) -> Path:
        return self.path / "schema.arrow"

    @property
    def digests(self) -> Path:
        # Hidden: it is there before the manifest, which makes the folder a run's.
        return self.path / ".digests.json"

    @property
    def input(self) -> Path:
        """Copies of what is not on this machine; hidden, as the digests are."""
        return self.path / ".input"

    @property
    def ranges(self) -> Path:
        return self.path / "ranges.npy"

    @property
    def _manifest(self) -> Path:
        return self.path / "manifest.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder alone. A run that fails before its first part leaves none.

        Raises:
            ValueError: If another process is at it, or if the folder is something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._is_ours():
            raise ValueError(f"{self.path} is not an interrupted run's: remove it, or choose another --out.")
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{self.path} is in use: another process is writing this output.") from None
        try:
            yield
        finally:
            empty = not self.done()
            lock.release()
            if empty:
                self.remove()

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Begin a run, or go on with an interrupted one of the same settings.

        Raises:
            ValueError: If other settings were used (``overwrite`` begins anew).
        """
        remove_scratch(self.path)
        if self._manifest.is_file():
            before = json.loads(self._manifest.read_text("utf-8"))
            if before != settings:
                if not overwrite:
                    raise ValueError(self._difference(before, settings))
                self._manifest.unlink()
        if not self._manifest.is_file():
            shutil.rmtree(self.parts, ignore_errors=True)
            for path in (self.index, self.schema, self.ranges):
                path.unlink(missing_ok=True)
            with durable(self._manifest) as stream:
                stream.write(json.dumps(settings, indent=1).encode())
        self.parts.mkdir(exist_ok=True)
        remove_scratch(self.parts)

    def done(self) -> set[int]:
        """The chunks that need not be encoded again."""
        if not self.parts.is_dir():
            return set()
        return {part_number(path) for path in self.parts.iterdir() if not path.name.startswith(".")}

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _is_ours(self) -> bool:
        return self._manifest.is_file() or all(path.name.startswith(".") for path in self.path.iterdir())

    def _difference(self, before: Settings, now: Settings) -> str:
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        told = ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names)
        return (
            f"{self.path} holds an interrupted run of other settings: {told}. Go on with those, choose another --out, "
            "or begin anew with --overwrite."
        )
