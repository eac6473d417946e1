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
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from real import claims, scores
from real.filtered import Kept
from real.passes import PASSES, Run
from real.texts import LISTS, Sets, TextList
from real.titles import TASKS
from real.vectors import Vectors
from st_reba.modules import CausalModule, CausalTransformer, EmbeddingFilter
from st_reba.recipes import random_weights

BATCH = 32
#: What is scored: the pairs of a language, word senses, titles.
WORDS = ("slpwc", "wsd")
WHAT = ("en", "zh", *WORDS, *TASKS)


def embed(options: argparse.Namespace) -> None:
    """Run passes over lists, and keep what comes out."""
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
            keep(kept, chosen.make(backbone, texts_of.language), texts_of, options.data)


def embed_reference(options: argparse.Namespace) -> None:
    """Run a trained embedder over the lists, as it is."""
    model = SentenceTransformer(str(options.model), model_kwargs={"dtype": options.precision}, device="cpu")

    def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, torch.Tensor]:
        return {options.name: model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)}

    for list_name in options.lists:
        kept = Vectors(options.out / f"{options.name}, {options.precision}, trained" / list_name / "as it is")
        if not kept.done and not LISTS[list_name].words:
            keep(kept, run, LISTS[list_name], options.data)


def keep(kept: Vectors, run: Run, texts_of: TextList, data: Path) -> None:
    """One pass over one list."""
    texts = texts_of.read(data)
    words = texts_of.words(data).inputs()[1] if texts_of.words else None
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    start = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            own = None if words is None else [words[index] for index in batch]
            found = run([texts[index] for index in batch], own)
            kept.put(len(texts), batch, {name: each.float().cpu().numpy() for name, each in found.items()})
    seconds = round(time.perf_counter() - start, 1)
    kept.finish({"texts": len(texts), "seconds": seconds, "threads": torch.get_num_threads()})
    print(f"{time.strftime('%H:%M')} {kept.directory}: {seconds:.0f} s", flush=True)


def score(options: argparse.Namespace) -> None:
    """Score what was kept, and write the results."""
    sets = Sets(options.data)
    weights = "random" if options.random else "trained"
    backbone = CausalTransformer(str(options.tokenizer or options.model))
    head = None if options.random or options.tokenizer else EmbeddingFilter.from_language_model(backbone)
    kept = Kept(options.out / f"{options.name}, {options.precision}, {weights}", head)
    shared = {
        "model": options.name,
        "weights": weights,
        "precision": options.precision,
        "date": time.strftime("%Y-%m-%d"),
        "versions": records.versions(),
    }
    of_claims = {name: value for name, value in shared.items() if name not in ("weights", "versions")}
    for what in options.what:
        claimed: Iterable[scores.Row] = ()
        if what in ("en", "zh"):
            pairs = scores.pairs(kept, sets, what, backbone)
            rows, claimed = scores.pair_rows(pairs), claims.pair_claims(pairs)
        elif what in TASKS:
            rows = scores.title_rows(kept, sets, what)
        else:
            rows = scores.word_rows(kept, sets, what)
            claimed = claims.word_claims(kept, sets, [what, next(each for each in WORDS if each != what)])
        # Without any model, tf-idf is a score of none but the model whose tokens it counts.
        found = [{**shared, **row} for row in rows if not options.tokenizer or row["recipe"] == options.name]
        records.rewrite("scores", found)
        if weights == "trained" and not options.tokenizer:
            records.rewrite("claims", [{**of_claims, **row} for row in claimed])
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
    parser.add_argument("--reference", action="store_true", help="embed: the model is an embedder, run as it is")
    parser.add_argument("--tokenizer", type=Path, help="score: an embedder was run; whose tokens overlap is counted in")
    options = parser.parse_args()
    logging.disable_progress_bar()
    steps = {"embed": embed_reference if options.reference else embed, "score": score}
    steps[options.step](options)


if __name__ == "__main__":
    main()
