"""Functions that the scripts share: arguments, timing, files that a stopped run resumes from, and models."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import get_device_name
from transformers.utils import logging

import records
from st_reba.files import atomic_file
from st_reba.modules import CausalModule
from st_reba.recipes import every_row
from st_reba.recipes.recipe import POOLINGS

ROWS = {row.name: row for row in every_row()}

Key = TypeVar("Key")
Given = TypeVar("Given")
Found = TypeVar("Found")


def parser(
    about: str | None,
    *,
    out: str = "",
    data: bool = True,
    models: str = "",
    threads: int | None = None,
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that scripts share.

    Args:
        about: Docstring of the script.
        out: Default of ``--out``; empty: the script keeps nothing.
        data: Whether the script reads the public sets.
        models: Default of ``--models``; empty: models are in ``--out``.
        threads: Number of threads of torch; None: its own. Scripts that measure time use one, as several threads are
            slowed down by other programs.
    """
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    made.add_argument("--threads", type=int, default=threads, help=f"of torch; default: {threads or 'its own'}")
    if data:
        made.add_argument("--data", type=Path, required=True, help="directory of the sets")
    if models:
        made.add_argument("--models", type=Path, default=Path(models), help="directory of the models")
    if out:
        made.add_argument("--out", type=Path, default=Path(out), help="directory of models, and of what is kept")
        made.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return made


def options(made: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse arguments, set the number of torch's threads, and silence progress bars."""
    found = made.parse_args(given)
    logging.disable_progress_bar()
    if found.threads:
        torch.set_num_threads(found.threads)
    found.threads = torch.get_num_threads()
    return found


def device() -> str:
    """Return the accelerator, or ``"cpu"``."""
    return str(get_device_name())


def now(place: str = "cpu") -> float:
    """Return seconds of processor time; on an accelerator, wait for its work and return seconds by the clock."""
    if torch.device(place).type == "cpu":
        return time.process_time()
    torch.get_device_module(place).synchronize()
    return time.perf_counter()


def megabytes(key: str = "VmRSS:", process: int | str = "self") -> float:
    """Return the memory of a process from ``/proc``, mapped files included."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(key))


def alone(run: Callable[..., Found], *given: Any) -> Found:
    """Run a function in a new process, and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(run, *given).result()


def timed(run: Callable[[Given], object], place: str = "cpu") -> Callable[[Given], float]:
    """Return a function that runs another one and returns the seconds that it took."""

    def measured(given: Given) -> float:
        start = now(place)
        run(given)
        return now(place) - start

    return measured


def interleaved(contenders: Mapping[Key, Callable[[Given], Found]], rounds: Iterable[Given]) -> dict[Key, list[Found]]:
    """Return the result of each contender in each round.

    Contenders take turns, so that other load slows all of them. Each round begins with another contender.
    """
    found: dict[Key, list[Found]] = {name: [] for name in contenders}
    names = list(contenders)
    for number, given in enumerate(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name](given))
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> records.Record:
    """Return the median of the rounds' ratios, the lowest and the highest."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"value": round(median(ratios), 4), "low": round(min(ratios), 4), "high": round(max(ratios), 4)}


def kept(file: Path, make: Callable[[], Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the arrays of a file by name; ``make`` makes them if the file is missing."""
    if make is not None and not file.is_file():
        made = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as stream:
            np.savez(stream, **made)
        print(f"{time.strftime('%H:%M')} {file}", flush=True)
    with np.load(file) as stream:
        return dict(stream)


def encoding(model: SentenceTransformer, batch: int) -> Callable[[Sequence[str]], object]:
    """Return a function that encodes texts."""
    return lambda texts: model.encode(list(texts), batch_size=batch, show_progress_bar=False)


def contender(name: str, backbone: CausalModule, **settings: Any) -> SentenceTransformer:
    """Return a recipe by its name in tables with its pooling, such as "Echo-2, mean"."""
    recipe, _, pooling = name.rpartition(", ")
    row = ROWS[recipe]
    return pooled(row.module(backbone, **{**row.arguments(pooling), **settings}), pooling)


def pooled(module: CausalModule, *poolings: str) -> SentenceTransformer:
    """Return a module with one pooling, or several side by side, on the device of its language model."""
    pooling = Pooling(module.get_embedding_dimension(), tuple(POOLINGS[each] for each in poolings))
    return SentenceTransformer(modules=[module, pooling], device=str(module.model.device))
