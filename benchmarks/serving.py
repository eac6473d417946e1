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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from records import DEMO_MODEL, Record, append, machine, today
from runs import options, parser, pooled
from st_reba import ReBAModule
from st_reba.data.demo import demo_sentences

#: Texts of a request, at most.
TEXTS = 4
#: How far a vector may be from that of its text alone, where the promise is 1e-6 of its length.
ALLOWED = 1e-4

Matrix = np.ndarray


@contextmanager
def server(model: str, device: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Run a server; yield its address and its name for the model.

    Raises:
        SystemExit: If it does not end in order.
    """
    program, log = "from st_reba_cli import app\napp()", directory / "log"
    command = [sys.executable, "-c", program, "serve", model, "--port", "0", "--device", device, "--dtype", "float32"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"})
    says = re.compile(r"^([^,\s]+).* at (http://\S+)$", re.MULTILINE)
    try:
        while not (line := says.search(log.read_text(encoding="utf-8"))) and process.poll() is None:
            time.sleep(0.1)
        if line is None:
            raise SystemExit(log.read_text(encoding="utf-8"))
        yield line[2], line[1]
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(120)
    if ended:
        raise SystemExit(f"The server ended with {ended}.")


async def load(given: argparse.Namespace, url: str, name: str, texts: Sequence[str], expected: Matrix) -> Record:
    """Return what all clients have seen by when the last had its answer."""
    # A connection for each, and one set of certificates for all: to read it takes a while.
    limits = httpx2.Limits(max_connections=given.clients, max_keepalive_connections=given.clients)
    begun, answers = time.monotonic(), Counter[str]()
    # The seconds, the texts and the largest distance of each answer.
    seen: list[tuple[float, int, float]] = []

    async def client(session: httpx2.AsyncClient, number: int) -> None:
        """Send until the time is up."""
        choose = random.Random(number)
        while time.monotonic() < begun + given.seconds:
            chosen = [choose.randrange(len(expected)) for _ in range(choose.randint(1, TEXTS))]
            asked = {"model": name, "input": [texts[place] for place in chosen], "encoding_format": "base64"}
            start = time.perf_counter()
            try:
                answer = await session.post("/v1/embeddings", json=asked)
            except httpx2.HTTPError as error:
                answers[type(error).__name__] += 1
                continue
            answers[str(answer.status_code)] += 1
            if answer.status_code != 200:
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
                continue
            took = time.perf_counter() - start
            rows = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer.json()["data"]])
            own = expected[chosen]
            distance = (np.linalg.norm(rows - own, axis=1) / np.linalg.norm(own, axis=1)).max()
            seen.append((took, len(chosen), float(distance)))

    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as session:
        await asyncio.gather(*(client(session, number) for number in range(given.clients)))
    took, answered = time.monotonic() - begun, answers["200"]
    seconds, counts, distances = zip(*seen, strict=True)
    latencies = np.percentile(seconds, (50, 90, 99)).tolist()
    print(dict(answers), flush=True)
    return {
        "seconds": took, "requests": answered, "errors": answers.total() - answered,
        "requests/s": answered / took, "texts/s": sum(counts) / took,
        **dict(zip(("latency p50, s", "latency p90, s", "latency p99, s"), latencies, strict=True)),
        "largest distance": max(distances),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False)
    made.add_argument("--model", help="a saved SentenceTransformer; ReBA-2 on the demo LM by default")
    made.add_argument("--clients", type=int, default=200)
    made.add_argument("--seconds", type=float, default=60)
    made.add_argument("--device", default="cpu")
    given = options(made, arguments)
    texts = random.Random(0).sample(demo_sentences("en"), 100)
    with tempfile.TemporaryDirectory() as directory:
        model = given.model or f"{directory}/model"
        if not given.model:
            saved = pooled(ReBAModule(str(DEMO_MODEL), repetitions=2), "mean")
            saved.append(Normalize())
            saved.save_pretrained(model)
        # Alone: no text beside it can be mistaken for it.
        alone = SentenceTransformer(model, device=given.device, model_kwargs={"dtype": "float32"})
        expected = alone.encode(texts, batch_size=1)
        with server(model, given.device, Path(directory)) as (url, name):
            figures = asyncio.run(load(given, url, name, texts, expected))
    if float(figures["largest distance"] or 0) > ALLOWED:
        raise SystemExit("A vector was not its text's.")
    where = {
        "model": Path(model).name if given.model else "ReBA-2, mean, demo LM", "clients": given.clients, **today(),
        "machine": f"{machine(given.device, given.threads)}, shared with the clients and other work",
    }  # fmt: skip
    rows = [{**where, "quantity": name, "value": float(f"{value:.4g}")} for name, value in figures.items()]
    append("serving", rows, given.results)
    print(figures)


if __name__ == "__main__":
    main()
