"""Every recipe and its controls on real language models. Hours on a CPU; a run that was stopped goes on.

    python benchmarks/real_models.py embed --model DIR --name NAME --data DIR --out DIR
    python benchmarks/real_models.py score --model DIR --name NAME --data DIR --out DIR

Vectors are kept below ``--out``: scores, poolings, layers and filters are then computed from them, and written to
``benchmarks/results``, from which ``make tables`` makes the tables. ``DIR`` of the data holds the public sets under
the names that ``real/texts.py`` has; they are no part of this repository. bfloat16 is several times as fast as float32
on processors with units for it (AMX, AVX-512 BF16), and slower on others.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import records
import torch
from real import scores
from real.filtered import Kept
from real.passes import PASSES
from real.texts import LISTS, Sets
from real.titles import TASKS
from real.vectors import Vectors
from transformers.utils import logging

from st_reba.modules import CausalModule, CausalTransformer, EmbeddingFilter
from st_reba.recipes import random_weights

BATCH = 32
#: What is scored: the pairs of a language, word senses, titles.
WHAT = ("en", "zh", "slpwc", "wsd", *TASKS)


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
            print(
                f"{time.strftime('%H:%M')} {options.name} {weights} {list_name} {pass_name}: {seconds:.0f} s",
                flush=True,
            )


def score(options: argparse.Namespace) -> None:
    """Score what was kept, and write the results."""
    logging.disable_progress_bar()
    sets = Sets(options.data)
    weights = "random" if options.random else "trained"
    backbone = CausalTransformer(str(options.model))
    head = None if options.random else EmbeddingFilter.from_language_model(backbone)
    kept = Kept(options.out / f"{options.name}, {options.precision}, {weights}", head)
    shared = {
        "model": options.name,
        "weights": weights,
        "precision": options.precision,
        "date": time.strftime("%Y-%m-%d"),
        "versions": records.versions(),
    }
    for what in options.what:
        if what in ("en", "zh"):
            rows = scores.pair_rows(scores.pairs(kept, sets, what, backbone))
        elif what in TASKS:
            rows = scores.title_rows(kept, sets, what)
        else:
            rows = scores.word_rows(kept, sets, what)
        found = [{**shared, **row} for row in rows]
        records.rewrite("scores", found)
        print(f"{time.strftime('%H:%M')} {what}: {len(found)} scores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["embed", "score"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS), help="what to embed")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="how to read it")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="what to score")
    options = parser.parse_args()
    {"embed": embed, "score": score}[options.step](options)


if __name__ == "__main__":
    main()
