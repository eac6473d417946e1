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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from cost import WORDS, make_backbone, memory_mib, named
from records import Record
from runs import add_costs, interleaved, options, parser, pooled, ratio
from st_reba import CausalTransformer
from st_reba.encode import Encoder, LocalEngine, encode_file

JOB, LOOP = "`st-reba encode`", "bare loop over the model"
SHORTEST, LONGEST = 4, 24
BATCH = 32
# Texts of a chunk, where the job and the loop take turns.
CHUNK = 256
TEXTS = {"corpus": 200_000, "workers": 8_000}


def write_texts(path: Path, count: int) -> None:
    source = random.Random(0)
    words = [f"w{word}" for word in range(1, WORDS)]
    with path.open("w") as file:
        for _ in range(count):
            print(*source.choices(words, k=source.randint(SHORTEST, LONGEST)), file=file)


def bare(model: SentenceTransformer, texts: Sequence[str]) -> None:
    """Batches as ``SentenceTransformer.encode`` has them."""
    ordered = sorted(texts, key=len, reverse=True)
    with torch.inference_mode():
        for first in range(0, len(ordered), BATCH):
            model(model.preprocess(ordered[first : first + BATCH]))["sentence_embedding"].numpy()


@dataclass(frozen=True)
class Loaded(Encoder):
    """One that is loaded already, so that loading is in no figure."""

    def load(self, device: str) -> SentenceTransformer:
        return MODELS[self.model]


MODELS: dict[str, SentenceTransformer] = {}


def corpus(path: Path, texts: Path, given: argparse.Namespace) -> Iterator[Record]:
    """A job, and the bare loop in its pauses."""
    model = MODELS[str(path)] = SentenceTransformer(str(path), device="cpu")
    bare(model, ["w1 w2 w3", "w1"] * BATCH)
    lines = list(map(str.rstrip, texts.open()))
    looped, at_it, turned = 0.0, False, 0

    def take_a_turn(stage: str, done: int, total: int | None) -> None:
        nonlocal looped, at_it, turned
        # By the chunk; and the bare loop runs the same model, of whose batches the job tells.
        if stage != "Encoding" or at_it or (done - turned < CHUNK and done != total):
            return
        # Of this thread alone: what the job reads and writes meanwhile is the job's.
        at_it, start = True, time.thread_time()
        bare(model, lines[turned:done])
        looped, turned, at_it = looped + time.thread_time() - start, done, False

    whole, of_this_thread = time.process_time(), time.thread_time()
    encode_file(Loaded(str(path), batch_size=BATCH), texts, texts.with_suffix(".npy"), on_progress=take_a_turn)
    whole, of_this_thread = time.process_time() - whole, time.thread_time() - of_this_thread
    job, of_so_many = whole - looped, f"{JOB}, {given.texts:,} texts"
    tokens = sum(len(line.split()) for line in lines)
    threads = "percent of the job's time in the threads that read and write"
    for quantity, contender, unit, value in (
        ("tokens of text/s", of_so_many, "", round(tokens / job)),
        ("tokens of text/s", LOOP, "", round(tokens / looped)),
        ("time", of_so_many, LOOP, round(job / looped, 4)),
        (threads, of_so_many, "the job", round(100 * (whole - of_this_thread) / job, 4)),
        ("peak memory of the process, MiB", of_so_many, "", round(memory_mib("VmHWM:"))),
    ):
        how = f"texts of {SHORTEST} to {LONGEST} tokens, times of the processor, chunk by chunk in turn"
        yield {"quantity": quantity, "contender": contender, "unit": unit, "value": value, "how": how}


def looping(path: str, texts: Sequence[str], start: Barrier, spent: multiprocessing.SimpleQueue[float]) -> None:
    """A process with a loop of its own."""
    torch.set_num_threads(1)
    model = SentenceTransformer(path, device="cpu")
    bare(model, texts[: 2 * BATCH])
    start.wait()
    begun = time.perf_counter()
    bare(model, texts)
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

    # A process of its own even for one: the start of each is left out alike.
    engine, encoder = LocalEngine(["cpu"] * count), Encoder(str(path), batch_size=BATCH)
    out = texts.with_suffix(".npy")
    encode_file(encoder, texts, out, chunk_size=CHUNK, engine=engine, overwrite=True, on_progress=tell)
    # The first chunk of each worker.
    (begun, before), (ended, after) = next(each for each in told if each[1] >= count * CHUNK), told[-1]
    return (after - before) / (ended - begun)


def two(path: Path, texts: Path, given: argparse.Namespace) -> Iterator[Record]:
    """Two at once beside one."""
    contenders = {
        (name, count): lambda number, run=run, count=count: run(path, texts, count)
        for name, run in ((LOOP, loops), (JOB, workers))
        for count in (2, 1)
    }
    found = interleaved(contenders, range(given.rounds))
    how = f"{given.texts:,} texts, by the clock, median of {given.rounds} rounds"
    for name in (LOOP, JOB):
        row: Record = {"quantity": "speed of two", "contender": name, "unit": "one", "how": how}
        yield row | ratio(found[name, 2], found[name, 1])


TABLES = {"corpus": corpus, "workers": two}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=TABLES, default="corpus")
    made.add_argument("--texts", type=int, help="200,000; for the workers 8,000")
    made.add_argument("--rounds", type=int, default=5, help="of the workers")
    given = options(made, arguments)
    given.texts = given.texts or TEXTS[given.table]
    with tempfile.TemporaryDirectory() as directory:
        path, texts = Path(directory, "model"), Path(directory, "texts.txt")
        module = CausalTransformer(str(make_backbone("tiny", Path(directory), "float32")))
        pooled(module, "mean").save_pretrained(str(path), create_model_card=False)
        write_texts(texts, given.texts)
        found = TABLES[given.table](path, texts, given)
        add_costs(found, given, table=given.table, model=named("tiny"), precision="float32", batch=BATCH)


if __name__ == "__main__":
    main()
