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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def settings(path: str, turned: str, reading: str, seed: int, given: argparse.Namespace) -> BeLLMTraining:
    """Return the paper's settings."""
    every: dict[str, Any] = {
        "model": path, "triplets": str(given.triplets), "bidirectional_layers": turned, **READINGS[reading],
        "model_kwargs": {"dtype": given.precision},
        "arguments": {"seed": seed, "max_steps": given.max_steps, "save_steps": SAVED, "report_to": "none"},
    }  # fmt: skip
    return BeLLMTraining(**every)


def trained(settings: BeLLMTraining, work: Path) -> SentenceTransformer:
    """Return the model of one training, which goes on where it was stopped."""
    if (work / "model").exists():
        return SentenceTransformer(str(work / "model"), model_kwargs=dict(settings.model_kwargs))
    return train_bellm(settings, work, progress=False)


def untrained(path: str, precision: str) -> SentenceTransformer:
    """The prompt that needs no training."""
    return find("prompteol").model(CausalTransformer(path, model_kwargs={"dtype": precision}).to(device()))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/bellm", threads=1)
    made.add_argument("--triplets", type=Path, required=True, help="a file, as st-reba train bellm takes it")
    made.add_argument("--source", required=True, help="what tables call the triplets")
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--path", type=Path, help="the language model, where it is there already")
    made.add_argument("--embedder", type=Path, help=f"{EMBEDDER}, where it is there already")
    made.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    made.add_argument("--turned", nargs="+", choices=TURNED, default=list(TURNED), help="which layers")
    made.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    made.add_argument("--max-steps", type=int, default=-1, help="of each training; default: one pass")
    given = options(made, arguments)
    path = str(given.path or MODELS[given.model].located(given.out / "models"))
    sets = {"test": Sets(given.data).pairs("en", "test")}
    out = given.out / f"{given.model}, {given.source}"
    shared: records.Record = {
        "model": given.model, "precision": given.precision, "triplets": given.source, "set": "STS-B en test",
        "metric": "Spearman", "turned": "", "reading": "", **records.today(),
    }  # fmt: skip

    def write(found: Mapping[Training, Array], method: str, **about: records.Value) -> None:
        """The rows of some trainings; what is called ``method`` there is which layers."""
        rows = []
        for row in by_seed(found, sets["test"].scores, base="none"):
            turned = {"turned": row["method"]} if about else {}
            rows.append({**shared, **about, **row, **turned, "method": method})
            print(f"{method}, {turned}, {about}, seed {row['seed']}: {row['score']:.3f}", flush=True)
        records.rewrite("bellm", rows, given.results)

    embedder = str(given.embedder or MODELS[EMBEDDER].located(given.out / "models"))
    references: dict[str, Callable[[], SentenceTransformer]] = {
        UNTRAINED: partial(untrained, path, given.precision), EMBEDDER: partial(SentenceTransformer, embedder),
    }  # fmt: skip
    for name, make in references.items():
        write({(name, None): kept_cosines(out / f"{name}, {given.precision}.npz", make, sets)["test"]}, name)
    for reading in given.readings:
        found: dict[Training, Array] = {}
        for seed in SEEDS:
            for turned in TURNED:
                name = f"{turned}, {reading}, seed {seed}"
                file, work = out / f"{name}, {given.precision}.npz", out / f"{name}, running"
                if file.is_file() or (turned in given.turned and seed in given.seeds):
                    make = partial(trained, settings(path, turned, reading, seed, given), work)
                    found[turned, seed] = kept_cosines(file, make, sets)["test"]
                    shutil.rmtree(work, ignore_errors=True)
        write(found, "BeLLM", reading=reading)


if __name__ == "__main__":
    main()
