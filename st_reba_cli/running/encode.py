"""What ``st-reba encode`` does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers.utils import logging as transformers_logging

from st_reba.encoding import COPYING, HASHING, Encoder, Engine, LocalEngine, RayEngine, encode_file

from ..common import Dtype, console
from ..encode import EngineName, Precision
from .models import placement, usable


def run(
    *,
    model: str,
    texts: str,
    out: Path,
    column: str | None,
    keep: list[str] | None,
    precision: Precision,
    calibration_rows: int,
    ranges: Path | None,
    truncate_dim: int | None,
    normalize: bool,
    prompt_name: str | None,
    prompt: str | None,
    chunk_tokens: int | None,
    chunk_overlap: int,
    batch_size: int,
    chunk_size: int | None,
    revision: str | None,
    dtype: Dtype,
    device: str | None,
    engine: EngineName,
    workers: int | None,
    overwrite: bool,
) -> None:
    """Embed a file, with a progress bar, and tell where the vectors are."""
    with usable(model, device if engine is EngineName.local else None):
        transformers_logging.disable_progress_bar()
        runner, dtype = _engine(engine, workers, device, dtype)
        encoder = Encoder(
            model=model,
            revision=revision,
            dtype=dtype.value,
            batch_size=batch_size,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate_dim=truncate_dim,
            normalize=normalize,
            chunk_tokens=chunk_tokens,
            chunk_overlap=chunk_overlap,
        )
        with _terminable(), _Shown() as shown:
            try:
                made = encode_file(
                    encoder,
                    texts,
                    out,
                    column=column,
                    keep=keep or (),
                    precision=precision.value,
                    calibration_rows=calibration_rows,
                    ranges=ranges,
                    chunk_size=chunk_size,
                    engine=runner,
                    overwrite=overwrite,
                    on_progress=shown,
                )
            except KeyboardInterrupt as stop:
                shown.stop()
                console.print(f"Stopped. The same command goes on from {out}.partial.", soft_wrap=True)
                number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
                raise typer.Exit(128 + number) from None
    resumed = f"{made.resumed:,} of them from an interrupted run"
    if chunk_tokens is None:
        found = f", {resumed}" if made.resumed else ""
    else:
        found = f", the chunks of {made.texts:,} texts" + (f" ({resumed})" if made.resumed else "")
    beside = "" if made.ranges is None else f" Their ranges are in {made.ranges.name}."
    console.print(f"Wrote {made.rows:,} vectors to {out}{found}.{beside}", soft_wrap=True)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send to end a job."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that worker processes are closed; a second one ends it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _engine(engine: EngineName, workers: int | None, device: str | None, dtype: Dtype) -> tuple[Engine, Dtype]:
    if engine is EngineName.ray:
        runner = RayEngine(workers or 1, device)
        return runner, placement(runner.device, dtype)[1]
    first, dtype = placement(None if device is None else device.split(",")[0].strip(), dtype)
    return LocalEngine([first] if device is None else [name.strip() for name in device.split(",")]), dtype


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = "MB/s" if task.description in (COPYING, HASHING) else "texts/s"
        return Text("" if speed is None else f"{speed:,.0f} {unit}" if speed >= 10 else f"{speed:.1f} {unit}")


class _Shown(Progress):
    """A bar with rate and time left, for one stage after another."""

    def __init__(self) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # A chunk may take minutes on a slow machine, and the rate is that of the chunks within this time.
            speed_estimate_period=600,
        )
        self._bar = self.add_task("Loading", total=None)
        self._stage = "Loading"

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._stage = stage
            # What an interrupted run has left must not count as speed.
            self.reset(self._bar, description=stage, total=total, completed=done)
        else:
            self.update(self._bar, completed=done, total=total)
