"""Every recipe and its controls on real language models. Hours on a CPU; a run that was stopped goes on.

    python benchmarks/real_models.py embed --model DIR --name NAME --data DIR --out DIR --passes ... --lists ...

Vectors are kept below ``--out``: scores, poolings, layers and filters are then computed from them, and cost nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from real.passes import PASSES
from real.texts import LISTS
from real.vectors import Vectors
from transformers.utils import logging

from st_reba.modules import CausalModule, CausalTransformer
from st_reba.recipes import random_weights

BATCH = 32


def embed(options: argparse.Namespace) -> None:
    """Run passes over lists, and keep what comes out."""
    logging.disable_progress_bar()
    backbone: CausalModule | None = None
    for list_name in options.lists:
        texts_of = LISTS[list_name]
        for pass_name in options.passes:
            chosen = PASSES[pass_name]
            weights = "random" if options.random else "trained"
            kept = Vectors(options.out / f"{options.name}, {options.precision}, {weights}" / list_name / pass_name)
            if kept.done or texts_of.language not in chosen.languages or (texts_of.words and not chosen.words):
                continue
            if backbone is None:
                backbone = CausalTransformer(str(options.model), model_kwargs={"dtype": options.precision})
                backbone = random_weights(backbone) if options.random else backbone
            texts = texts_of.read(options.data)
            words = texts_of.words(options.data).inputs()[1] if texts_of.words else None
            run = chosen.make(backbone, texts_of.language)
            order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
            start = time.perf_counter()
            with torch.inference_mode():
                for first in range(0, len(order), BATCH):
                    batch = order[first : first + BATCH]
                    own = None if words is None else [words[index] for index in batch]
                    found = run([texts[index] for index in batch], own)
                    kept.put(len(texts), batch, {name: each.float().cpu().numpy() for name, each in found.items()})
            seconds = time.perf_counter() - start
            notes = {
                "texts": len(texts),
                "seconds": round(seconds, 1),
                "threads": torch.get_num_threads(),
                "date": time.strftime("%Y-%m-%d"),
                "versions": {name: version(name) for name in ("sentence-transformers", "transformers", "torch")},
            }
            kept.finish(notes)
            print(f"{time.strftime('%H:%M')} {options.name} {weights} {list_name} {pass_name}: {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["embed"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lists", nargs="+", choices=LISTS, required=True)
    parser.add_argument("--passes", nargs="+", choices=PASSES, required=True)
    embed(parser.parse_args())


if __name__ == "__main__":
    main()
