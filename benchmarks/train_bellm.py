"""BeLLM on a real language model: no layer, the last, all of them without the causal mask (the paper's Table 4).

    python benchmarks/train_bellm.py --data DIR --triplets FILE --source "SNLI, dev and test"
    python benchmarks/train_bellm.py --data DIR --triplets FILE --source ... --readings "last token" --seeds 0

Writes ``benchmarks/results/bellm.csv``. ``FILE`` has triplets: a text, one that it entails, one that contradicts it;
``--source`` is what tables call them. ``DIR`` holds stsb_en_test.tsv (text, text, score). Nothing is tuned: the
settings are the paper's. What was trained lies below ``--out``: a run
that was stopped goes on, and one whose cosines are there is not run again. A row without a seed is the mean over the
seeds whose cosines are there, with the interval of that mean over the pairs, and says how many they are; ``ahead`` is
how far it is ahead of no layer turned, by the ``ahead_seeds`` that both were trained with.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

import records
from real.cosines import Array, Training, by_seed, kept_cosines
from real.models import MODELS
from real.sets import Sets
from runs import device, options, parser
from st_reba import CausalTransformer
from st_reba.recipes import find
from st_reba.train import BeLLMTraining, train_bellm

TURNED = ("none", "last", "all")
#: What is read: from the text to the prompt's end, every token as the authors' command does, or the last token.
READINGS: dict[str, dict[str, Any]] = {
    "from the text on": {"pool_over": "all"},
    "every token": {"pool_over": "whole"},
    "last token": {"pooling": "lasttoken"},
}
#: What the rows are beside: the best known prompt on the same model untrained, and a trained embedder.
UNTRAINED, EMBEDDER = "PromptEOL, untrained", "all-MiniLM-L6-v2"
SEEDS = (0, 1, 2)
#: Steps between checkpoints.
SAVED = 20


def trained(
    path: str, turned: str, reading: str, seed: int, work: Path, given: argparse.Namespace
) -> SentenceTransformer:
    """Return the model of one training with the paper's settings, which goes on where it was stopped."""
    every: dict[str, Any] = {
        "model": path, "triplets": str(given.triplets), "bidirectional_layers": turned, **READINGS[reading],
        "model_kwargs": {"dtype": given.precision},
        "arguments": {"seed": seed, "save_steps": SAVED, "report_to": "none"},
    }  # fmt: skip
    if (work / "model").exists():
        return SentenceTransformer(str(work / "model"), model_kwargs={"dtype": given.precision})
    return train_bellm(BeLLMTraining(**every), work, progress=False)


def untrained(path: str, precision: str) -> SentenceTransformer:
    """The prompt that needs no training."""
    return find("prompteol").model(CausalTransformer(path, model_kwargs={"dtype": precision}).to(device()))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/bellm", threads=1)
    made.add_argument("--triplets", type=Path, required=True, help="a file, as st-reba train bellm takes it")
    made.add_argument("--source", required=True, help="what tables call the triplets")
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    made.add_argument("--turned", nargs="+", choices=TURNED, default=list(TURNED), help="which layers")
    made.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    given = options(made, arguments)
    path, embedder = (str(MODELS[name].located(given.out / "models")) for name in (given.model, EMBEDDER))
    pairs, out = Sets(given.data).pairs("en", "test"), given.out / f"{given.model}, {given.source}"
    references = {
        UNTRAINED: partial(untrained, path, given.precision),
        EMBEDDER: partial(SentenceTransformer, embedder),
    }
    rows: list[records.Record] = []
    for name, make in references.items():
        cosines = kept_cosines(out / f"{name}, {given.precision}.npz", make, pairs)
        rows += ({"turned": "", "reading": "", **row} for row in by_seed({(name, None): cosines}, pairs.scores))
    for reading in given.readings:
        found: dict[Training, Array] = {}
        for seed, turned in product(SEEDS, TURNED):
            name = f"{turned}, {reading}, seed {seed}"
            file, work = out / f"{name}, {given.precision}.npz", out / f"{name}, running"
            if file.is_file() or (turned in given.turned and seed in given.seeds):
                found[turned, seed] = kept_cosines(
                    file, partial(trained, path, turned, reading, seed, work, given), pairs
                )
                shutil.rmtree(work, ignore_errors=True)
        for row in by_seed(found, pairs.scores, base="none"):
            rows.append({**row, "turned": row["method"], "method": "BeLLM", "reading": reading})
    shared: records.Record = {
        "model": given.model, "precision": given.precision, "triplets": given.source, "set": "STS-B en test",
        "metric": "Spearman", **records.today(),
    }  # fmt: skip
    records.rewrite("bellm", [{**shared, **row} for row in rows], given.results)


if __name__ == "__main__":
    main()
