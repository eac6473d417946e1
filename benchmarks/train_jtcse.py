"""JTCSE, TNCSE and SimCSE on a real encoder, which each of them trains further on texts without labels.

    python benchmarks/train_jtcse.py --data DIR                       # all-MiniLM-L6-v2, from PyPI
    python benchmarks/train_jtcse.py --data DIR --max-steps 30        # of each training, 64 texts a step

Writes ``benchmarks/results/jtcse.csv``. ``DIR`` holds generic_sentences_en.txt (one a line) and
stsb_en_{train,test}.tsv (text, text, score), of whose training set only the texts are used. The encoder was trained
to embed already, by the mean of its tokens; the methods read the first one, as the paper does. So the question is
which of them, trained further alike, is ahead on the test pairs. The similarities of each trained model lie below
``--out``, and a training whose similarities are there is not run again. A row without a seed is the mean over the
seeds, with the interval of that mean over the test pairs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling

import records
from real.cosines import Array, Training, by_seed, kept_cosines
from real.models import MODELS
from real.sets import Sets
from runs import options, parser
from st_reba import TwinTower
from st_reba.data.tables import read_pairs
from st_reba.train import fit
from st_reba.train.losses import JTCSELoss
from st_reba.train.settings import RunSettings

ENCODER = "all-MiniLM-L6-v2"
SEEDS = (0, 1, 2)
#: That SimCSE and JTCSE have on encoders of this family.
LEARNING_RATE = 3e-5
TEXTS_A_STEP = 64
#: What the others are held against: the same encoder and texts, and nothing of two towers.
SIMCSE, TOWERS_ALONE = "SimCSE, one tower", "InfoNCE alone, two towers"
METHODS = (SIMCSE, TOWERS_ALONE, "TNCSE", "JTCSE")


def single(path: str, pooling: str) -> SentenceTransformer:
    """The encoder as it is."""
    tower = Transformer(path)
    return SentenceTransformer(modules=[tower, Pooling(tower.get_embedding_dimension(), pooling)])


def trained(method: str, path: str, seed: int, texts: Sequence[str], steps: int, work: Path) -> SentenceTransformer:
    """The encoder, trained further."""
    columns = {"text": texts}
    loss: torch.nn.Module
    if method == SIMCSE:
        columns, model = {"anchor": texts, "positive": texts}, single(path, "cls")
        loss = MultipleNegativesRankingLoss(model, scale=20.0)
    else:
        towers = TwinTower(path, cross_every=2 if method == "JTCSE" else 0)
        model = SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")])
        weights = {"interaction_weight": 0, "modulus_weight": 0} if method == TOWERS_ALONE else {}
        loss = JTCSELoss(model, seed=seed, **weights)
    shutil.rmtree(work, ignore_errors=True)
    arguments = {
        "seed": seed, "max_steps": steps, "learning_rate": LEARNING_RATE, "per_device_train_batch_size": TEXTS_A_STEP,
        "warmup_steps": 0.1, "save_strategy": "no",
    }  # fmt: skip
    fit(model, Dataset.from_dict(columns), loss, work, RunSettings(arguments=arguments), progress=False)
    shutil.rmtree(work, ignore_errors=True)
    return model


def unlabelled(data: Path) -> list[str]:
    """Every text once, in the order of the files."""
    lines = (data / "generic_sentences_en.txt").read_text(encoding="utf-8").splitlines()
    lines += read_pairs(data / "stsb_en_train.tsv").texts()
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/jtcse", threads=1)
    made.add_argument("--max-steps", type=int, default=60, help=f"of each training, {TEXTS_A_STEP} texts a step")
    given = options(made, arguments)
    path, out, steps = str(MODELS[ENCODER].located(given.out / "models")), given.out / ENCODER, given.max_steps
    texts, pairs = unlabelled(given.data), Sets(given.data).pairs("en", "test")
    found: dict[Training, Array] = {}
    for name, file, pooling in (("mean of the tokens", "mean", "mean"), ("first token", "first", "cls")):
        make = partial(single, path, pooling)
        found[f"before, {name}", None] = kept_cosines(out / f"before, {file}.npz", make, pairs)
    for seed, method in product(SEEDS, METHODS):
        make = partial(trained, method, path, seed, texts, steps, out / "running")
        file = f"{method}, {steps} steps, {LEARNING_RATE:g}, seed {seed}.npz"
        found[method, seed] = kept_cosines(out / file, make, pairs)
    shared: records.Record = {
        "model": ENCODER, "precision": "float32", "set": "STS-B en test", "metric": "Spearman", "texts": len(texts),
        **records.today(),
    }  # fmt: skip
    rows = [
        {**shared, **row, "steps": 0 if str(row["method"]).startswith("before") else steps}
        for row in by_seed(found, pairs.scores, base=SIMCSE)
    ]
    records.rewrite("jtcse", rows, given.results)


if __name__ == "__main__":
    main()
