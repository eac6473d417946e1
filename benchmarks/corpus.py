"""``st-reba encode`` on a corpus of short texts, beside a bare loop over the model.

    python benchmarks/corpus.py                           # 200,000 texts and a Llama of 2 layers, width 128
    python benchmarks/corpus.py --texts 20000             # the same memory?
    python benchmarks/corpus.py --table workers           # two workers beside one, and two loops beside one

"corpus": one job over one file. Whenever it says that a chunk is done, the bare loop has its turn: the same texts, in
the same batches, with nothing around the model. Time is the processor's, that of the threads that read and write
included. "workers": by the clock, from the first chunk that is done to the last, so that no start is in it. Rows are
added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.utils import logging

from cost import SIZES, WORDS, make_backbone, memory_mib
from records import RESULTS, Value, append, machine, versions
from st_reba import CausalTransformer
from st_reba.encode import Encoder, LocalEngine, encode_file

SIZES["tiny"] = (2, 4, 128, 344)
JOB, LOOP = "`st-reba encode`", "bare loop over the model"
SHORTEST, LONGEST = 4, 24
BATCH = 32
# Texts of a chunk, where the job and the loop take turns.
CHUNK = 256


def write_texts(path: Path, count: int) -> None:
    source = random.Random(0)
    words = [f"w{word}" for word in range(1, WORDS)]
    with path.open("w") as file:
        for _ in range(count):
            print(*source.choices(words, k=source.randint(SHORTEST, LONGEST)), file=file)


def save_model(directory: Path) -> Path:
    module = CausalTransformer(str(make_backbone("tiny", directory, "float32")))
    model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device="cpu")
    model.save_pretrained(str(directory / "model"), create_model_card=False)
    return directory / "model"


def batches(texts: Sequence[str]) -> list[list[str]]:
    """As ``SentenceTransformer.encode`` has them."""
    ordered = sorted(texts, key=len, reverse=True)
    return [ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)]


def bare(model: SentenceTransformer, own: Sequence[list[str]]) -> None:
    with torch.inference_mode():
        for batch in own:
            model(model.preprocess(batch))["sentence_embedding"].numpy()


@dataclass(frozen=True)
class Loaded(Encoder):
    """One that is loaded already, so that loading is in no figure."""

    def load(self, device: str) -> SentenceTransformer:
        return MODELS[self.model]


MODELS: dict[str, SentenceTransformer] = {}


@dataclass
class Turns:
    """The bare loop's turns within a job.

    Attributes:
        seconds: Of the processor, in all of them.
        aside: The same, with what made the batches: neither the loop's nor the job's.
    """

    model: SentenceTransformer
    texts: Path
    seconds: float = 0.0
    aside: float = 0.0
    done: int = 0
    _at_it: bool = False
    _lines: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = map(str.rstrip, self.texts.open())

    def take(self, stage: str, done: int, total: int | None) -> None:
        # By the chunk; and the bare loop runs the same model, of whose batches the job tells.
        if stage != "Encoding" or self._at_it or (done - self.done < CHUNK and done != total):
            return
        self._at_it = True
        # Of this thread alone: what the job reads and writes meanwhile is the job's.
        begun = time.thread_time()
        own = batches([next(self._lines) for _ in range(done - self.done)])
        self.done = done
        start = time.thread_time()
        bare(self.model, own)
        end = time.thread_time()
        self.seconds += end - start
        self.aside += end - begun
        self._at_it = False


def corpus(directory: Path, options: argparse.Namespace) -> list[dict[str, Value]]:
    path, texts = save_model(directory), directory / "texts.txt"
    write_texts(texts, options.texts)
    model = MODELS[str(path)] = SentenceTransformer(str(path), device="cpu")
    bare(model, batches(["w1 w2 w3", "w1"] * BATCH))
    turns = Turns(model, texts)
    whole, of_this_thread = time.process_time(), time.thread_time()
    encode_file(Loaded(str(path), batch_size=BATCH), texts, directory / "a.npy", on_progress=turns.take)
    whole, of_this_thread = time.process_time() - whole, time.thread_time() - of_this_thread
    job = whole - turns.aside
    tokens = sum(len(line.split()) for line in texts.open())
    how = f"texts of {SHORTEST} to {LONGEST} tokens, times of the processor, chunk by chunk in turn"
    of_so_many = f"{JOB}, {options.texts:,} texts"
    measured: list[tuple[str, str, str, float]] = [
        ("tokens of text/s", of_so_many, "", tokens / job),
        ("tokens of text/s", LOOP, "", tokens / turns.seconds),
        ("time", of_so_many, LOOP, job / turns.seconds),
        (
            "percent of the job's time in the threads that read and write",
            of_so_many,
            "the job",
            100 * (whole - of_this_thread) / job,
        ),
        ("peak memory of the process, MiB", of_so_many, "", memory_mib("VmHWM:")),
    ]
    return [
        {
            "quantity": quantity,
            "contender": contender,
            "unit": unit,
            "value": round(value, 4 if unit else 0),
            "how": how,
        }
        for quantity, contender, unit, value in measured
    ]


def looping(path: str, texts: Sequence[str], start: Barrier, spent: multiprocessing.SimpleQueue[float]) -> None:
    """A process with a loop of its own."""
    torch.set_num_threads(1)
    model, own = SentenceTransformer(path, device="cpu"), batches(texts)
    bare(model, own[:2])
    start.wait()
    begun = time.perf_counter()
    bare(model, own)
    spent.put(time.perf_counter() - begun)


def loops(path: Path, texts: Path, count: int) -> float:
    """Texts a second of so many loops at once, each over all texts."""
    lines = texts.read_text().splitlines()
    context = multiprocessing.get_context("spawn")
    start, spent = context.Barrier(count), context.SimpleQueue()
    processes = [context.Process(target=looping, args=(str(path), lines, start, spent)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(len(lines) / spent.get() for _ in processes)


def workers(path: Path, texts: Path, count: int) -> float:
    """Texts a second of a job on so many workers, from its first chunk to its last."""
    told: list[tuple[float, int]] = []

    def tell(stage: str, done: int, total: int | None) -> None:
        if stage == "Encoding" and done:
            told.append((time.perf_counter(), done))

    out = texts.with_suffix(".npy")
    # A process of its own even for one: the start of each is left out alike.
    engine = LocalEngine(["cpu"] * count)
    encode_file(Encoder(str(path), batch_size=BATCH), texts, out, chunk_size=CHUNK, engine=engine, overwrite=True,
                on_progress=tell)  # fmt: skip
    # The first chunk of each worker.
    (begun, before), (ended, after) = next(each for each in told if each[1] >= count * CHUNK), told[-1]
    return (after - before) / (ended - begun)


def two(directory: Path, options: argparse.Namespace) -> list[dict[str, Value]]:
    path, texts = save_model(directory), directory / "texts.txt"
    write_texts(texts, options.texts)
    contenders: dict[str, Callable[[Path, Path, int], float]] = {LOOP: loops, JOB: workers}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            found[name].append(run(path, texts, 2) / run(path, texts, 1))
            print(f"{name}: {found[name][-1]:.2f}", flush=True)
    how = f"{options.texts:,} texts, by the clock, median of {options.rounds} rounds"
    return [
        {"quantity": "speed of two", "contender": name, "unit": "one", "value": round(median(ratios), 4),
         "low": round(min(ratios), 4), "high": round(max(ratios), 4), "how": how}
        for name, ratios in found.items()
    ]  # fmt: skip


TABLES = {"corpus": corpus, "workers": two}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="corpus")
    parser.add_argument("--texts", type=int, help="200,000; for the workers 8,000")
    parser.add_argument("--rounds", type=int, default=5, help="of the workers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    options = parser.parse_args(arguments)
    options.texts = options.texts or {"corpus": 200_000, "workers": 8_000}[options.table]
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    layers, heads, width, _ = SIZES["tiny"]
    where = {
        "table": options.table, "model": f"Llama, {layers} layers x {heads} heads, width {width}",
        "precision": "float32", "batch": BATCH, "machine": machine("cpu", 1), "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        rows = TABLES[options.table](Path(directory), options)
    append("cost", [{**row, **where} for row in rows], options.results)
    for row in rows:
        print(f"{row['quantity']}: {row['contender']} / {row['unit']}: {row['value']}", flush=True)


if __name__ == "__main__":
    main()
