"""Escaped output of commands, and their progress."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from tqdm import tqdm

#: Characters that control a terminal: all control characters but line ends and tabs, and marks of text direction.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return a text with each control character as its escape, such as ``\x1b``; names of files may hold any."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class EscapingConsole(Console):
    """Console that prints control characters as their escapes.

    Strings are never read as markup or emoji codes, because paths and messages have brackets and colons.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def say(self, sentence: str | Text, style: str | None = None) -> None:
        """Print a sentence as one line, which the terminal itself wraps."""
        self.print(sentence, style=style, soft_wrap=True)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape a string before its width is measured, so that cells of tables have room for the escapes."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape the segments of anything else, such as a Text, but for rich's own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


#: Console of results. The first line of the output is the answer.
console = EscapingConsole()
#: Console of errors, warnings and progress, on stderr.
notes = EscapingConsole(stderr=True)


def model_name(model: str) -> str:
    """Return the name of a model for messages: without the folder for a file."""
    path = Path(model)
    return path.name if path.is_file() else model


def loading_line(kind: str, model: object, revision: str | None = None, imports: str = "import st_reba; ") -> str:
    """Return a line of Python that loads a saved model, with its imports.

    Args:
        kind: Name of its class, with the package if that is not sentence-transformers.
        model: Directory or Hub id.
        revision: Branch, tag or commit on the Hub.
        imports: Statements that import its modules.
    """
    if "." not in kind:
        imports += f"from sentence_transformers import {kind}; "
    branch = "" if revision is None else f', revision="{revision}"'
    return f"{imports}{kind}({json.dumps(str(model), ensure_ascii=False)}{branch})"


def write_json(command: str, /, **result: Any) -> None:
    """Print the result of a command as one JSON object, beginning with the name of its schema."""
    sys.stdout.write(json.dumps({"schema": f"st-reba/{command}/1", **result}, ensure_ascii=False, indent=1) + "\n")


class _Lines:
    """File that gets each state of a progress bar as a line."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self.flush = file, file.flush

    def write(self, text: str) -> None:
        if text := text.strip():
            self._file.write(f"{text}\n")


class Shown:
    """Progress bar; without a terminal, such as in a log, a line at most every ten seconds.

    Args:
        what: Description of the work.
        unit: Unit of the counts.
        total: Total count; None: unknown.
    """

    def __init__(self, what: str, unit: str, total: float | None = None) -> None:
        self._bar = self._start(what, 0, total, unit)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def more(self, count: int, what: str) -> None:
        """Add to the count."""
        self._bar.set_description_str(printable(what), refresh=False)
        self._bar.update(count)

    def stage(self, what: str, done: float, total: float | None, unit: str) -> None:
        """Set the count of a stage; a new stage begins with the count of an interrupted run."""
        if self._bar.desc != printable(what):
            self._bar.close()
            self._bar = self._start(what, done, total, unit)
        self._bar.update(done - self._bar.n)

    @staticmethod
    def _start(what: str, done: float, total: float | None, unit: str) -> tqdm:
        file, interval = notes.file, 0.25 if notes.file.isatty() else 10
        return tqdm(
            desc=printable(what), initial=done, total=total, unit=f" {unit}", leave=False, mininterval=interval,
            delay=interval, file=file if file.isatty() else _Lines(file),
        )  # fmt: skip
