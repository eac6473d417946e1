"""JTCSE, TNCSE and SimCSE on a real encoder, which each of them trains further on texts without labels.

    python benchmarks/train_jtcse.py --data DIR                       # all-MiniLM-L6-v2, from PyPI
    python benchmarks/train_jtcse.py --data DIR --max-steps 30        # of each training, 64 texts a step

Writes ``benchmarks/results/jtcse.csv``. ``DIR`` holds generic_sentences_en.txt (one a line) and
stsb_en_{train,dev,test}.tsv (text, text, score), of whose training set only the texts are used. The encoder was trained
to embed already, by the mean of its tokens; the methods read the first one, as the paper does. So the question is
which of them, trained further alike, is ahead on the test pairs. The similarities of each trained model lie below
``--out``, and a training whose similarities are there is not run again. A row without a seed is the mean over the
seeds, with the interval of that mean over the test pairs.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.utils import logging

import records
from real.cosines import pair_cosines, scored
from real.models import MODELS
from real.texts import Sets
from st_reba import TwinTower
from st_reba.data.tables import read_pairs
from st_reba.evaluation import bootstrap
from st_reba.train import fit
from st_reba.train.losses import JTCSELoss

Array = NDArray[np.float64]

ENCODER = "all-MiniLM-L6-v2"
SEEDS = (0, 1, 2)
#: That SimCSE and JTCSE have on encoders of this family.
LEARNING_RATE = 3e-5
TEXTS_A_STEP = 64
PARTS = ("dev", "test")
#: What the others are held against: the same encoder and texts, and nothing of two towers.
SIMCSE = "SimCSE, one tower"


def single(path: str, pooling: str = "cls") -> SentenceTransformer:
    tower = Transformer(path)
    return SentenceTransformer(modules=[tower, Pooling(tower.get_embedding_dimension(), pooling)])


def twins(path: str, cross_every: int) -> SentenceTransformer:
    towers = TwinTower(path, cross_every=cross_every)
    return SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")])


Made = tuple[SentenceTransformer, torch.nn.Module]


def simcse(path: str, seed: int) -> Made:
    model = single(path)
    return model, MultipleNegativesRankingLoss(model, scale=20.0)


def towers_alone(path: str, seed: int) -> Made:
    model = twins(path, 0)
    return model, JTCSELoss(model, interaction_weight=0, modulus_weight=0, seed=seed)


def tncse(path: str, seed: int) -> Made:
    model = twins(path, 0)
    return model, JTCSELoss(model, seed=seed)


def jtcse(path: str, seed: int) -> Made:
    model = twins(path, 2)
    return model, JTCSELoss(model, seed=seed)


METHODS: dict[str, Callable[[str, int], Made]] = {
    SIMCSE: simcse,
    "InfoNCE alone, two towers": towers_alone,
    "TNCSE": tncse,
    "JTCSE": jtcse,
}


def unlabelled(data: Path) -> list[str]:
    """Every text once, in the order of the files."""
    lines = (data / "generic_sentences_en.txt").read_text(encoding="utf-8").splitlines()
    lines += read_pairs(data / "stsb_en_train.tsv").texts()
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


class Bench:
    """The encoder and the texts, with what was trained before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = str(options.path or MODELS[ENCODER].located(options.out / "models"))
        self.sets = {part: Sets(options.data).pairs("en", part) for part in PARTS}
        self.texts = unlabelled(options.data)
        self.out = options.out / ENCODER
        self.out.mkdir(parents=True, exist_ok=True)

    def trained(self, method: str, seed: int) -> dict[str, Array]:
        """The cosines of each part's pairs, by a model that is trained now, or was before."""
        title = f"{method}, {self.options.max_steps} steps, {LEARNING_RATE:g}, seed {seed}"

        def made() -> SentenceTransformer:
            model, loss = METHODS[method](self.path, seed)
            twice = method == SIMCSE
            rows = Dataset.from_dict({"anchor": self.texts, "positive": self.texts} if twice else {"text": self.texts})
            work = self.out / "running"
            shutil.rmtree(work, ignore_errors=True)
            arguments = {
                "seed": seed, "max_steps": self.options.max_steps, "learning_rate": LEARNING_RATE,
                "per_device_train_batch_size": TEXTS_A_STEP, "warmup_steps": 0.1, "save_strategy": "no",
            }  # fmt: skip
            fit(model, rows, loss, output=work, arguments=arguments, progress=False)
            shutil.rmtree(work, ignore_errors=True)
            return model

        return self.kept(title, made)

    def kept(self, title: str, make: Callable[[], SentenceTransformer]) -> dict[str, Array]:
        """The cosines by a model, which is made where they are not there."""
        file = self.out / f"{title}.npz"
        if not file.is_file():
            model = make()
            cosines: dict[str, Any] = {part: pair_cosines(model, own) for part, own in self.sets.items()}
            np.savez(file, **cosines)
        with np.load(file) as held:
            return {part: held[part] for part in PARTS}

    def row(self, part: str, method: str, steps: int, **given: records.Value) -> records.Record:
        return {
            "model": ENCODER, "precision": "float32", "set": f"STS-B en {part}", "metric": "Spearman", "method": method,
            "steps": steps, "texts": len(self.texts), "date": date.today().isoformat(),
            "versions": records.versions(), **given,
        }  # fmt: skip

    def measure(self, methods: Sequence[str], seeds: Sequence[int]) -> None:
        """Train what is missing, and write the rows of each training when it is there, and the means over the seeds."""
        before = {
            "before, mean of the tokens": self.kept("before, mean", lambda: single(self.path, "mean")),
            "before, first token": self.kept("before, first", lambda: single(self.path)),
        }
        for name, cosines in before.items():
            self._write(name, None, cosines, 0)
        found: dict[tuple[str, int], dict[str, Array]] = {}
        for seed in seeds:
            for method in methods:
                found[method, seed] = self.trained(method, seed)
                self._write(method, seed, found[method, seed], self.options.max_steps)
        self._means(methods, found)

    def _write(self, method: str, seed: int | None, cosines: dict[str, Array], steps: int) -> None:
        rows = [
            self.row(
                part, method, steps, seed=seed,
                **scored(bootstrap.spearman({method: cosines[part]}, self.sets[part].scores), [0]),
            )
            for part in PARTS
        ]  # fmt: skip
        records.rewrite("jtcse", rows, self.options.results)
        print(
            f"{method}, seed {seed}: " + ", ".join(f"{100 * float(row['score'] or 0):.1f}" for row in rows), flush=True
        )

    def _means(self, methods: Sequence[str], found: dict[tuple[str, int], dict[str, Array]]) -> None:
        keys = list(found)
        for part in PARTS:
            cosines = {f"{method}, {seed}": own[part] for (method, seed), own in found.items()}
            scores = bootstrap.spearman(cosines, self.sets[part].scores)
            indices = {method: [i for i, key in enumerate(keys) if key[0] == method] for method in methods}
            for method, own in indices.items():
                base = indices.get(SIMCSE) if method != SIMCSE else None
                mean = self.row(part, method, self.options.max_steps, seed=None, **scored(scores, own, base))
                records.rewrite("jtcse", [mean], self.options.results)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, default=Path("build/jtcse"), help="directory of what is kept")
    parser.add_argument("--path", type=Path, help="the encoder, where it is there already")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--max-steps", type=int, default=60, help=f"of each training, {TEXTS_A_STEP} texts a step")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    Bench(options).measure(options.methods, options.seeds)


if __name__ == "__main__":
    main()
