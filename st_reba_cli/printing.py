"""What commands print: escaped; and how far they are, on a terminal as a bar and elsewhere as a line now and then."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from tqdm import tqdm

#: What a terminal obeys instead of showing it: all control characters but line ends and tabs, and what turns the
#: direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""The same text with each control character as its escape, ``\x1b``: names in data and files may hold any."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class EscapingConsole(Console):
    """Prints control characters as their escapes, whatever holds them.

    What is printed is never markup, nor an emoji: paths and messages have brackets and colons. Styles are rich's Text.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def say(self, sentence: str | Text, style: str | None = None) -> None:
        """Print a sentence as one line, which a terminal breaks where it ends."""
        self.print(sentence, style=style, soft_wrap=True)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Of a string, before its width is taken: a cell of a table has room for the escapes."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Of all else, such as a Text: its segments. Those that rich itself moves the cursor by stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


#: Where results go. The first line of the output is the answer.
console = EscapingConsole()
#: What is no result: errors, and what is told on the way.
notes = EscapingConsole(stderr=True)


def best_in_bold(text: str, best: bool) -> Text:
    """A cell of a table, which stands out if it is the best."""
    return Text(text, style="bold green" if best else "")


def model_name(model: str) -> str:
    """What to call a model: as it was given, a file by its name."""
    path = Path(model)
    return path.name if path.is_file() else model


def loading_line(kind: str, model: object, revision: str | None = None, imports: str = "import st_reba; ") -> str:
    """Return a line of Python that loads a saved model, with its imports.

    Args:
        kind: Name of its class in sentence-transformers, or with its package.
        model: Directory or Hub id.
        revision: Branch, tag or commit on the Hub.
        imports: What makes its modules known.
    """
    if "." not in kind:
        imports += f"from sentence_transformers import {kind}; "
    branch = "" if revision is None else f', revision="{revision}"'
    return f'{imports}{kind}("{model}"{branch})'


def write_json(command: str, **found: Any) -> None:
    """Print the result of a command as one object, with the name of its schema first."""
    sys.stdout.write(json.dumps({"schema": f"st-reba/{command}/1", **found}, ensure_ascii=False, indent=1) + "\n")


class Shown:
    """A bar of progress; where there is no terminal, such as in a log, a line at most every ten seconds.

    Args:
        what: The work.
        unit: What is counted.
        total: How many there are; None: unknown.
    """

    def __init__(self, what: str, unit: str, total: float | None = None) -> None:
        self._bar = self._begun(what, 0, total, unit)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def more(self, count: float, what: str) -> None:
        """So many more are done."""
        self._bar.set_description_str(printable(what), refresh=False)
        self._bar.update(count)

    def stage(self, what: str, done: float, total: float | None, unit: str) -> None:
        """So many of one stage are done, which begins with those of an interrupted run."""
        if self._bar.desc != printable(what):
            self._bar.close()
            self._bar = self._begun(what, done, total, unit)
        self._bar.update(done - self._bar.n)

    @staticmethod
    def _begun(what: str, done: float, total: float | None, unit: str) -> tqdm:
        from st_reba.progress import bar

        return bar(printable(what), total, unit, done=done, file=notes.file)
