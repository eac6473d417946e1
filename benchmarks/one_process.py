"""One process that chats and embeds, and a chat server with an encoder beside it: rows of results/one_process.csv.

    python benchmarks/one_process.py --models DIR --model SmolLM2-135M-Instruct

Contenders are the commands that a user runs: ``st-reba serve --chat``; ``transformers serve``; and ``st-reba serve`` of
all-MiniLM-L6-v2. Memory is that of the processes after they have answered. Then conversations are made by rule of plain
facts, and each question is to find what was said: see :func:`conversation`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from openai import OpenAI
from sentence_transformers import SentenceTransformer

import records
import st_reba
from real.models import MODELS
from runs import megabytes, options, parser
from st_reba.data.demo import demo_sentences
from st_reba.lm.gguf import converted

ENCODER, TEXTS = "all-MiniLM-L6-v2", 16
ONE, ALONE, TWO = "one process", "chat server alone", f"chat server and {ENCODER}"

#: What is said of a person, the question about it, and what it may be.
FACTS = [
    ("plays the {}", "Which instrument does {} practise?", ["cello", "drums", "flute", "trumpet", "piano", "harp"]),
    ("moved to {}", "In which city is the home of {}?", ["Rome", "Oslo", "Lima", "Delhi", "Cairo", "Perth"]),
    ("works as a {}", "What does {} do for a living?", ["nurse", "baker", "judge", "pilot", "plumber", "tailor"]),
    ("gets a rash from {}", "Which food is bad for {}?", ["nuts", "milk", "shrimp", "eggs", "soy", "wheat"]),
    ("bought a {}", "What does {} drive?", ["van", "pickup", "scooter", "convertible", "tractor", "jeep"]),
    ("was born in {}", "When does {} have a birthday?", ["May", "June", "March", "August", "October", "April"]),
    ("takes lessons in {}", "Which language does {} study?", ["Greek", "Thai", "Polish", "Arabic", "Dutch", "Hindi"]),
    ("is saving for a {}", "What would {} like to own?", ["boat", "camera", "cottage", "telescope", "pool", "loom"]),
]
PEOPLE = ["my sister", "my brother", "my boss", "my neighbour", "my uncle", "my cousin", "my flatmate", "my dentist"]
FRAMES = ["{}.", "By the way, {}.", "Did I tell you that {}?", "I just heard that {}.", "You know, {}, of all people."]
CHATTER = ["How was your day?", "It rained all morning.", "I am tired.", "Thanks, that helps.", "What a long week!"]


def conversation(number: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Return what is said in a conversation: 32 facts of four people among chatter; and questions, each with the index
    of the sentence that answers it."""
    draw = random.Random(number)
    said: list[tuple[str, str]] = [("", text) for text in CHATTER]
    for who, (fact, question, values) in itertools.product(draw.sample(PEOPLE, 4), FACTS):
        sentence = draw.choice(FRAMES).format(f"{who} {fact.format(draw.choice(values))}")
        said.append((question.format(who), sentence[0].upper() + sentence[1:]))
    draw.shuffle(said)
    return [text for _, text in said], [(question, index) for index, (question, _) in enumerate(said) if question]


def found(model: SentenceTransformer, count: int) -> dict[str, float]:
    """Return the shares of questions whose sentence is nearest, and among the three nearest."""
    ranks: list[int] = []
    for texts, questions in map(conversation, range(count)):
        similarities = model.similarity(model.encode([question for question, _ in questions]), model.encode(texts))
        ranks += [int((row > row[right]).sum()) for row, (_, right) in zip(similarities, questions, strict=True)]
    return {f"found among {most}": sum(rank < most for rank in ranks) / len(ranks) for most in (1, 3)}


@contextmanager
def serving(*command: str) -> Iterator[tuple[str, int]]:
    """Run a server within the block; return its URL and the number of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name(command[0])
    with subprocess.Popen([program, *command[1:], "--port", str(port)], stdout=subprocess.DEVNULL) as own:
        while own.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", own.pid
        own.terminate()


def tokens_per_second(client: Any, model: str, given: argparse.Namespace) -> float:
    """Return the tokens a second of some answers, one after the other."""
    start, asked = time.perf_counter(), {"model": model, "max_tokens": given.tokens, "temperature": 0}
    answers = [client.completions.create(prompt=text, **asked) for text in demo_sentences("en")[: given.chats]]
    return sum(answer.usage.completion_tokens for answer in answers) / (time.perf_counter() - start)


def embed(client: Any, until: threading.Event, counts: list[int]) -> None:
    """Embed texts until an event is set, and note their numbers."""
    while not until.is_set():
        client.embeddings.create(model="m", input=demo_sentences("en")[:TEXTS])
        counts.append(TEXTS)


def measure(given: argparse.Namespace, lm: str, saved: str, encoder: str) -> Iterator[tuple[str, str, float]]:
    """Yield quantities, contenders and values."""
    dtype, ours = ["--dtype", given.precision, "--device", "cpu"], ["--model-name", "m", "--device", "cpu"]
    chat, embedding = ["transformers", "serve", lm, *dtype], ["st-reba", "serve", encoder, *ours]
    # A head with weights of its own is not in the recipe.
    both = ["st-reba", "serve", saved, "--chat", "--lm", lm, "--dtype", given.precision, *ours]
    for contender, commands in ((ALONE, [chat]), (TWO, [chat, embedding]), (ONE, [both])):
        with ExitStack() as running:
            servers = [running.enter_context(serving(*command)) for command in commands]
            clients = [OpenAI(base_url=f"{url}/v1", api_key="none") for url, _ in servers]
            name = "m" if contender == ONE else lm
            tokens_per_second(clients[0], name, given)
            yield "tokens/s, chat only", contender, tokens_per_second(clients[0], name, given)
            if contender != ALONE:
                stop, counts, start = threading.Event(), list[int](), time.perf_counter()
                beside = threading.Thread(target=embed, args=(clients[-1], stop, counts))
                beside.start()
                yield "tokens/s, texts embedded meanwhile", contender, tokens_per_second(clients[0], name, given)
                stop.set()
                beside.join()
                yield "texts/s meanwhile", contender, sum(counts) / (time.perf_counter() - start)
            yield "MB in memory", contender, sum(megabytes("VmRSS:", process) for _, process in servers)


def main() -> None:
    made = parser(__doc__, out="build/one_process", data=False, models="build/models", threads=1)
    names = [name for name, model in MODELS.items() if not model.embedder]
    made.add_argument("--model", choices=names, default="SmolLM2-135M-Instruct")
    for name, usual in (("chats", 8), ("tokens", 64), ("conversations", 20)):
        made.add_argument(f"--{name}", type=int, default=usual)
    given = options(made)
    saved, small = (given.out / name for name in (f"{given.model}-echo-topic", ENCODER))
    lm = converted(MODELS[given.model].located(given.models), given.precision)
    recipe = st_reba.build(str(lm), "echo-topic", demo_sentences("en"))
    recipe.save_pretrained(str(saved), create_model_card=False)
    encoder = SentenceTransformer(str(MODELS[ENCODER].located(given.models)), device="cpu")
    encoder.save_pretrained(str(small))
    rows = [(what, ONE, value) for what, value in found(recipe, given.conversations).items()]
    rows += [(what, TWO, value) for what, value in found(encoder, given.conversations).items()]
    rows += measure(given, str(lm), str(saved), str(small))
    about = {"model": given.model, "precision": given.precision, "threads": given.threads, **records.today()}
    for quantity, contender, value in rows:
        print(quantity, contender, round(value, 4), sep="; ")
        row = {"quantity": quantity, "contender": contender, "value": round(value, 4)}
        records.rewrite("one_process", [about | row], given.results)


if __name__ == "__main__":
    main()
