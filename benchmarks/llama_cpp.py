"""GGUF files in llama.cpp beside the same files unpacked by transformers: vectors, memory, time.

    python benchmarks/llama_cpp.py --data DIR --models DIR    # SmolLM2-135M; half an hour on one core
    python benchmarks/llama_cpp.py --data DIR --models DIR --model "Gemma 3 270M" --parts cosines memory

"cosines": each text's embedding beside that of transformers in float32. "memory": growth of a process that loads the
model, each contender in a process of its own. "times": texts a second; contenders take turns. With one thread, time
is the processor's; with more, it is the clock's, and the fastest of the rounds counts. Rows are added to
results/llama_cpp.csv.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from real.models import MODELS
from real.sets import Sets
from records import Record, machine, rewrite, today
from runs import alone, contender, encoding, interleaved, megabytes, options, parser
from st_reba import CausalTransformer, LlamaCppTransformer
from st_reba.modules import CausalModule

LLAMA_CPP, FLOAT32, BFLOAT16 = "llama.cpp", "transformers, float32", "transformers, bfloat16"
CONTENDERS = (LLAMA_CPP, FLOAT32, BFLOAT16)
RECIPES = ("Classical, mean", "PromptEOL, last", "Echo-2, mean")
#: By name, the tokens and the number of the texts of a round.
LENGTHS = {"texts of 16 tokens": (16, 16), "texts of 256 tokens": (256, 2)}


def loaded(kind: str, file: Path) -> CausalModule:
    """Load the language model of a file, as a contender runs it."""
    if kind == LLAMA_CPP:
        return LlamaCppTransformer(str(file))
    return CausalTransformer(str(file), model_kwargs={"dtype": kind.rpartition(" ")[2]})


def cosines(file: Path, given: argparse.Namespace) -> Iterator[Record]:
    """Yield the median and the lowest cosine of a text's two embeddings, by recipe."""
    texts = random.Random(0).sample(Sets(given.data).pairs("en", "test").texts(), given.texts)
    ours, theirs = loaded(LLAMA_CPP, file), loaded(FLOAT32, file)
    for recipe in RECIPES:
        one, other = (
            contender(recipe, module).encode(texts, batch_size=8, convert_to_tensor=True).float()
            for module in (ours, theirs)
        )
        found = torch.cosine_similarity(one, other).tolist()
        row: Record = {"quantity": "cosine to transformers, float32", "contender": recipe, "texts": len(texts)}
        yield {**row, "value": round(median(found), 4), "low": round(min(found), 4)}


def memory_of(kind: str, file: Path) -> list[float]:
    """Return the megabytes before a model is loaded, and when it has embedded texts."""
    before = megabytes()
    model = contender("PromptEOL, last", loaded(kind, file))
    encoding(model, 8)(["A man is playing a guitar on the stage."] * 16 + ["word " * 256])
    return [before, megabytes()]


def memory(file: Path, given: argparse.Namespace) -> Iterator[Record]:
    """Yield the growth of a process by contender; the first only reads the file."""
    for kind in CONTENDERS:
        alone(memory_of, kind, file)
        before, after = alone(memory_of, kind, file)
        row: Record = {"quantity": "resident memory, MB", "contender": kind, "value": round(after - before)}
        yield {**row, "high": round(after)}


def times(file: Path, given: argparse.Namespace) -> Iterator[Record]:
    """Yield texts a second of the classical embedding, by contender and length."""
    now = time.process_time if given.threads == 1 else time.perf_counter
    models = {kind: contender("Classical, mean", loaded(kind, file)) for kind in CONTENDERS}
    words, draw = " ".join(Sets(given.data).fit_texts("en")).split(), random.Random(0)

    def speed(kind: str, part: Sequence[str]) -> float:
        start = now()
        encoding(models[kind], 16)(part)
        return len(part) / (now() - start)

    for name, (tokens, count) in LENGTHS.items():
        # A word has 1.3 tokens.
        texts = [
            [" ".join(draw.choices(words, k=round(tokens / 1.3))) for _ in range(count)] for _ in range(given.rounds)
        ]
        for model in models.values():
            encoding(model, 16)(texts[0][:1])
        for kind, found in interleaved({kind: partial(speed, kind) for kind in CONTENDERS}, texts).items():
            typical = median(found) if given.threads == 1 else max(found)
            row: Record = {"quantity": "texts/s", "set": name, "contender": kind, "threads": given.threads}
            yield {**row, "texts": count, "value": round(typical, 2), "low": round(min(found), 2)}


PARTS = {"cosines": cosines, "memory": memory, "times": times}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, models="build/models", threads=1)
    names = [name for name, model in MODELS.items() if not model.embedder]
    made.add_argument("--model", default="SmolLM2-135M-Instruct", choices=names)
    made.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    made.add_argument("--texts", type=int, default=40, help="whose cosines are measured")
    made.add_argument("--rounds", type=int, default=5)
    given = options(made, arguments)
    file = MODELS[given.model].located(given.models)
    shared = {"model": given.model, "size": round(file.stat().st_size / 1e6)}
    shared |= {"machine": machine("cpu", given.threads), **today()}
    for part in given.parts:
        for row in PARTS[part](file, given):
            rewrite("llama_cpp", [{**row, **shared}], given.results)
            print(row, flush=True)


if __name__ == "__main__":
    main()
