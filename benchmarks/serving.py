"""``st-reba serve`` under load: many clients at once, each of which sends its next request when it has its answer.

Every vector is compared with the one that ``encode`` gives of the same text alone, so an answer that was not the
text's own would show. Latencies are what clients see. The server is a process of its own on the same machine, which
the clients share. What was measured is added to results/serving.csv.

    python benchmarks/serving.py                                  # ReBA-2 on the demo LM, 200 clients, 60 s
    python benchmarks/serving.py --model my-model --clients 50
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from records import DEMO_MODEL, RESULTS, Value, append, machine, versions
from st_reba import ReBAModule
from st_reba.data.demo import demo_sentences

#: Texts of a request, at most.
TEXTS = 4
#: How far a vector may be from that of its text alone, where the promise is 1e-6 of its length.
ALLOWED = 1e-4


@dataclass
class Seen:
    """What the clients have seen."""

    seconds: list[float] = field(default_factory=list)
    texts: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    farthest: float = 0.0


def saved_model(directory: str) -> str:
    """ReBA-2 on the demo LM."""
    head = ReBAModule(str(DEMO_MODEL), repetitions=2)
    pooling = Pooling(head.get_embedding_dimension(), "mean")
    SentenceTransformer(modules=[head, pooling, Normalize()], device="cpu").save_pretrained(directory)
    return directory


def started(model: str, device: str, log: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The server's process, which loads its model, and what it prints to."""
    program = "from st_reba_cli import app\napp()"
    command = [sys.executable, "-c", program, "serve", model, "--port", "0", "--device", device, "--dtype", "float32"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"})
    return process, log


def found(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """Where the server is, and what it calls the model."""
    while not (line := re.search(r"^([^,\s]+).* at (http://\S+)$", log.read_text(encoding="utf-8"), re.MULTILINE)):
        if process.poll() is not None:
            raise RuntimeError(log.read_text(encoding="utf-8"))
        time.sleep(0.1)
    return line[2], line[1]


async def client(
    number: int,
    session: httpx2.AsyncClient,
    name: str,
    texts: Sequence[str],
    expected: np.ndarray,
    until: float,
    seen: Seen,
) -> None:
    """Sends until the time is up."""
    choose = random.Random(number)
    while time.monotonic() < until:
        chosen = [choose.randrange(len(texts)) for _ in range(choose.randint(1, TEXTS))]
        given = {"model": name, "input": [texts[index] for index in chosen], "encoding_format": "base64"}
        begun = time.perf_counter()
        try:
            answer = await session.post("/v1/embeddings", json=given)
        except httpx2.HTTPError as error:
            seen.answers[type(error).__name__] += 1
            continue
        seen.answers[str(answer.status_code)] += 1
        if answer.status_code != 200:
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
            continue
        seen.seconds.append(time.perf_counter() - begun)
        seen.texts += len(chosen)
        rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer.json()["data"]]
        distances = np.linalg.norm(np.stack(rows) - expected[chosen], axis=1)
        distances /= np.linalg.norm(expected[chosen], axis=1)
        seen.farthest = max(seen.farthest, float(distances.max()))


async def load(
    clients: int, seconds: float, url: str, name: str, texts: Sequence[str], expected: np.ndarray
) -> tuple[Seen, float]:
    """What all have seen, and how long it took until the last had its answer."""
    # A connection for each, and one set of certificates for all: to read it takes a while.
    limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as session:
        seen, begun = Seen(), time.monotonic()
        until = begun + seconds
        await asyncio.gather(
            *(client(number, session, name, texts, expected, until, seen) for number in range(clients))
        )
        return seen, time.monotonic() - begun


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a saved SentenceTransformer; ReBA-2 on the demo LM by default")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of serving.csv")
    arguments = parser.parse_args(given)
    texts = demo_sentences("en")[:100]
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or saved_model(f"{directory}/model")
        process, log = started(model, arguments.device, Path(directory, "log"))
        try:
            # Alone: no text beside it can be mistaken for it.
            alone = SentenceTransformer(model, device=arguments.device, model_kwargs={"dtype": "float32"})
            expected = alone.encode(texts, batch_size=1)
            url, name = found(process, log)
            seen, took = asyncio.run(load(arguments.clients, arguments.seconds, url, name, texts, expected))
        finally:
            process.send_signal(signal.SIGTERM)
        ended = process.wait(120)
    slow, middle, fast = (float(np.percentile(seen.seconds, part)) for part in (99, 90, 50))
    figures = {
        "seconds": took,
        "requests": seen.answers["200"],
        "errors": sum(count for answer, count in seen.answers.items() if answer != "200"),
        "requests/s": seen.answers["200"] / took,
        "texts/s": seen.texts / took,
        "latency p50, s": fast,
        "latency p90, s": middle,
        "latency p99, s": slow,
        "largest distance": seen.farthest,
    }
    where: dict[str, Value] = {
        "model": "ReBA-2, mean, demo LM" if arguments.model is None else Path(model).name,
        "clients": arguments.clients,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine(arguments.device, torch.get_num_threads())}, shared with the clients and other work",
        "versions": versions(),
    }
    print(figures, dict(seen.answers), f"the server ended with {ended}", flush=True)
    if seen.farthest > ALLOWED or ended:
        raise SystemExit("A vector was not its text's, or the server did not end in order.")
    rows = [{**where, "quantity": name, "value": float(f"{value:.4g}")} for name, value in figures.items()]
    append("serving", rows, arguments.results)


if __name__ == "__main__":
    main()
