"""``st-reba encode``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated

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

from ..encoding import COPYING, HASHING, Encoder, Engine, LocalEngine, RayEngine, encode_file
from .common import Dtype, DtypeOption, app, clear_errors, console, placement, usable


class Precision(str, Enum):
    float32 = "float32"
    int8 = "int8"
    uint8 = "uint8"
    binary = "binary"
    ubinary = "ubinary"


class EngineName(str, Enum):
    local = "local"
    ray = "ray"


@app.command("encode")
def encode_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A SentenceTransformer: a directory or a Hub id.")],
    texts: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Texts: .txt (one a line), .tsv, .csv, .jsonl or .parquet; a folder of shards; a remote path (s3://, "
            "hf://, https://); a data set of the Hub.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="An .npy, a .parquet, or (no suffix) a directory of Parquet shards.", show_default=False),
    ],
    column: Annotated[str | None, typer.Option(help='Which column has the texts. Default: "text".')] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="A column to keep in a Parquet --out; may be repeated.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="What values are written as.")] = Precision.float32,
    calibration_rows: Annotated[
        int, typer.Option(help="int8, uint8: the ranges are those of so many first texts.", min=1)
    ] = 10_000,
    ranges: Annotated[
        Path | None, typer.Option(help="int8, uint8: ranges from a file, such as an earlier run's OUT.ranges.npy.")
    ] = None,
    truncate_dim: Annotated[int | None, typer.Option(help="Keep a vector's first values.", min=1)] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = False,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, by name.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A prompt in full.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    chunk_size: Annotated[int, typer.Option(help="Texts that are sorted by length and kept as one.", min=1)] = 2048,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    dtype: DtypeOption = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help='cpu, cuda ...; several as "cuda:0,cuda:1". The fastest one by default.')
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="This machine, or a Ray cluster (RAY_ADDRESS).")
    ] = EngineName.local,
    workers: Annotated[int | None, typer.Option(help="ray: copies of the model. Default: 1.", min=1)] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace --out, and other settings' interrupted run.")] = False,
) -> None:
    """Texts of a file of any size to vectors.

    A run that was stopped or killed goes on where it was when it is started again, and the output is the same.
    """
    with clear_errors(), usable(model, device if engine is EngineName.local else None):
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
    found = f", {made.resumed:,} of them from an interrupted run" if made.resumed else ""
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
    if workers is not None:
        raise ValueError("--workers is for --engine ray; on this machine name the devices: --device cuda:0,cuda:1.")
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
