"""What ``st-reba encode`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import typer
from sentence_transformers.util import get_device_name

from st_reba.encode import COPYING, HASHING, Encoder, Engine, LocalEngine, RayEngine, encode_file

from ..common import Dtype
from ..encode import EngineName, Precision
from ..printing import Shown, console
from .models import encoder_fastest, placement, usable


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
        runner = _engine(engine, workers, device)
        encoder = Encoder(
            model=model,
            revision=revision,
            batch_size=batch_size,
            prompt_name=prompt_name,
            prompt=prompt,
            truncate_dim=truncate_dim,
            normalize=normalize,
            chunk_tokens=chunk_tokens,
            chunk_overlap=chunk_overlap,
        )

        def settle(encoder: Encoder) -> Encoder:
            if engine is EngineName.local:
                return encoder_fastest(encoder, runner.device, dtype)[0]
            # The model is on other machines: each of their processors would choose for itself.
            asked = Dtype.auto if dtype is Dtype.fastest else dtype
            return replace(encoder, dtype=placement(runner.device, asked)[1].value)

        with _terminable(), Shown() as shown:
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
                    on_progress=_telling(shown),
                    settle=settle,
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


def _engine(engine: EngineName, workers: int | None, device: str | None) -> Engine:
    if engine is EngineName.ray:
        return RayEngine(workers or 1, device)
    return LocalEngine([get_device_name()] if device is None else [name.strip() for name in device.split(",")])


def _telling(shown: Shown) -> Callable[[str, int, int | None], None]:
    """Shows one stage after another, each from what an interrupted run has left on."""
    bar = shown.add_task("Loading", total=None, unit="")
    stage = "Loading"

    def tell(now: str, done: int, total: int | None) -> None:
        nonlocal stage
        if now != stage:
            stage = now
            # What is there already must not count as speed.
            unit = "MB" if now in (COPYING, HASHING) else "texts"
            shown.reset(bar, description=now, total=total, completed=done, unit=unit)
        else:
            shown.update(bar, completed=done, total=total)

    return tell
