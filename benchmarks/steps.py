"""What a step of training takes on a CPU: parts of a batch by length, beside parts as the texts come.

    python benchmarks/steps.py                          # a Llama of 12 layers, width 512
    python benchmarks/steps.py --model DIR --name SmolLM2-135M-Instruct

BeLLM's LoRA and prompt, on texts of different lengths in one batch. Both take turns on one model; time is the
processor's, forward and backward. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from sentence_transformers import SentenceTransformer

from cost import SIZES, make_backbone
from given import for_one_model
from plain import Texts, ratio_rows
from records import Value, append, machine, versions
from st_reba.modules import CausalModule
from st_reba.modules.token_vectors import in_parts
from st_reba.train import BeLLMTraining, build_bellm
from st_reba.train.bellm import add_lora

BY_LENGTH, AS_THEY_COME = "parts of a batch by length", "parts as the texts come"
#: Tokens of a text, each ratio of lengths as frequent as another.
SHORTEST, LONGEST = 5, 60


def lengths(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [round(SHORTEST * (LONGEST / SHORTEST) ** generator.random()) for _ in range(count)]


def step(model: SentenceTransformer, texts: list[str], contender: str) -> float:
    """Processor seconds of a forward and a backward pass."""
    start = time.process_time()
    as_they_come = mock.patch.object(
        CausalModule, "parts", lambda module, layout: in_parts(len(layout.input_ids), module._part_size(layout))
    )
    with as_they_come if contender == AS_THEY_COME else contextlib.nullcontext():
        embeddings = model(model.preprocess(texts))["sentence_embedding"]
    (embeddings * torch.randn_like(embeddings)).sum().backward()
    model.zero_grad()
    return time.process_time() - start


def measure(path: str, dtype: str, batch: int, times: int) -> list[dict[str, Value]]:
    """The time of a step with parts by length over that with parts as the texts come."""
    settings = BeLLMTraining(model=path, triplets="none", model_kwargs={"dtype": dtype})
    model = build_bellm(settings)
    add_lora(model, settings)
    model.train()
    source = Texts(path)
    batches = [[source.of(length) for length in lengths(batch, seed)] for seed in range(times)]
    step(model, batches[0], BY_LENGTH)
    spent: dict[str, list[float]] = {BY_LENGTH: [], AS_THEY_COME: []}
    for texts in batches:
        for contender, own in spent.items():
            own.append(step(model, texts, contender))
    how = f"texts of {SHORTEST} to {LONGEST} tokens, times of the processor, {times} interleaved rounds"
    return [{**row, "batch": batch} for row in ratio_rows(spent, AS_THEY_COME, how)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = for_one_model(parser, arguments, "a directory; a random Llama if left out")
    layers, heads, width, _ = SIZES["small"]
    where = {
        "table": "step", "precision": options.dtype, "machine": machine("cpu", options.threads),
        "model": options.name or f"Llama, {layers} layers x {heads} heads, width {width}",
        "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or str(make_backbone("small", Path(directory), options.dtype))
        rows = [{**row, **where} for row in measure(path, options.dtype, options.batch, options.rounds)]
    append("cost", rows, options.results)
    for row in rows:
        print(f"{row['model']}: {row['contender']}: {row['quantity']}: {row['value']}", flush=True)


if __name__ == "__main__":
    main()
