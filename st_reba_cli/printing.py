"""What commands print: escaped; and how far they are, on a terminal as a bar and elsewhere as a line now and then."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.segment import Segment
from rich.text import Text

from .options import STAND_IN

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
    if model == STAND_IN:
        return "random weights that stand in for a model"
    path = Path(model)
    return path.name if path.is_file() else model


class Shown(Progress):
    """How far a command is: a bar on a terminal; elsewhere, such as in a log, a line every :attr:`EVERY` seconds.

    Work that an interrupted run has left is no part of the rate.

    Args:
        what: What is done.
        unit: What is counted.
        total: How many there are; None: nobody knows yet.
    """

    #: Seconds between two lines.
    EVERY = 30.0

    def __init__(self, what: str, unit: str, total: float | None = None) -> None:
        # A task's or a model's name is no markup here either.
        described = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), described, BarColumn(), _Told(), TimeElapsedColumn())
        # The bar is drawn in a thread, whose time is taken from what is measured: four times a second are enough. A
        # step may take minutes on a slow machine, and the rate is that of the last ten.
        super().__init__(*columns, console=notes, transient=True, refresh_per_second=4, speed_estimate_period=600)
        self._bar = self.add_task(what, total=total, unit=unit)
        self._ended = Event()
        self._teller = Thread(target=self._tell, daemon=True)

    def start(self) -> None:
        if self.console.is_terminal:
            super().start()
        else:
            self._teller.start()

    def stop(self) -> None:
        self._ended.set()
        if self.console.is_terminal:
            super().stop()

    def more(self, count: float, what: str | None = None) -> None:
        """So many more are done."""
        self.update(self._bar, advance=count, description=what)

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """So many of one stage are done, which begins with what an interrupted run has left."""
        if name != self.tasks[0].description:
            # What is there already must not count as speed.
            self.reset(self._bar, description=name, total=total, completed=done, unit=unit)
        self.update(self._bar, completed=done, total=total)

    def _tell(self) -> None:
        while not self._ended.wait(self.EVERY):
            (task,) = self.tasks
            told = [*filter(None, [_told(task)]), f"{round(task.elapsed or 0)} s since it began"]
            self.console.print(f"{task.description}: {', '.join(told)}.", soft_wrap=True)


class _Told(ProgressColumn):
    def render(self, task: Bar) -> Text:
        return Text(_told(task), style="progress.download")


def _told(task: Bar) -> str:
    """How much of what is done, how much of it in a second and, from the first step on, how long the rest takes."""
    unit, told = task.fields["unit"], []
    of = "" if task.total is None else f" of {task.total:,.0f}"
    if task.completed or of:
        told.append(f"{task.completed:,.0f}{of} {unit}")
    if rate := task.finished_speed or task.speed:
        told.append(f"{rate:,.{0 if rate >= 10 else 1}f} {unit}/s")
    if task.time_remaining is not None and not task.finished:
        told.append(f"about {task.time_remaining // 60:.0f}:{task.time_remaining % 60:02.0f} left")
    return ", ".join(told)
