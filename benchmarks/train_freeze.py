"""FREEZE on a real language model: the paper's table, and how few labelled pairs are enough.

    python benchmarks/train_freeze.py --data DIR                                 # SmolLM2-135M, English
    python benchmarks/train_freeze.py --data DIR --model "Gemma 3 270M" --language zh
    python benchmarks/train_freeze.py --data DIR --methods "MLP on cosines" --counts 100 300

Writes ``benchmarks/results/freeze.csv``. ``DIR`` holds stsb_{en,zh}_{train,test}.tsv (text, text, score from 0 to 5).
Everything is trained on train, all texts of which are seen without labels by methods that need such texts; test is
only reported. The states of the training texts, and the similarities of each trained model, are kept below ``--out``,
and what is kept is not run again. A row without a seed is the mean over the seeds, with the interval of that mean over
the pairs of the test set.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from sentence_transformers import SentenceTransformer

import records
from real.cosines import Array, Training, by_seed, kept_cosines
from real.models import MODELS
from real.sets import Sets
from runs import device, kept, options, parser
from st_reba import CausalTransformer, LayerStates, build
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import PairScoreEvaluator, bootstrap
from st_reba.modules import layerwise_autoencoder
from st_reba.train import FreezeTraining, train_freeze

SEEDS = (0, 1, 2)
#: Passes over all pairs, and steps at least, where fewer pairs make few steps of a pass.
EPOCHS, STEPS, BATCH = 12, 300, 64
#: The recipe without labels that the methods are compared with.
UNTRAINED = "early-late"
#: Scores of a pair: the trained similarity, and that of a vector store.
READINGS = {"score": "its own similarity", "cosine": "cosine"}
METRICS = {"Pearson": bootstrap.pearson, "Spearman": bootstrap.spearman}


class PaperHead(layerwise_autoencoder.SimilarityHead):
    """Head of the paper: the sigmoid of an MLP, by which two identical sentences may have any score."""

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.mlp(1 - distances)[..., 0])


#: The paper's loss with its head.
PAPERS_HEAD = "autoencoder, log-variance, the paper's head"
#: Ahead of the paper's methods: starts from a whitening of the last layer at the end of a prompt.
WHITENED = "whitened, prompt, last, 256, 0.0001"
#: Settings of each method. The first five are the rows of the paper's table.
METHODS: dict[str, dict[str, Any]] = {
    "MLP on cosines": {"stage": "cosines"},
    "siamese": {"stage": "siamese"},
    "autoencoder": {"stage": "autoencoder", "loss": "mse"},
    "autoencoder, log-variance": {"stage": "autoencoder"},
    PAPERS_HEAD: {"stage": "autoencoder"},
    WHITENED: {"stage": "whitened", "bottlenecks": (256,)},
}


def trained(name: str, pairs: Pairs, seed: int, test: Pairs, path: str, given: argparse.Namespace) -> dict[str, Array]:
    """Return the similarities of the test pairs by reading, by a model that is trained on some pairs."""
    work, kwargs, more = given.out / "running", {"dtype": given.precision}, dict(METHODS[name])
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    scored, sentences = work / "pairs.tsv", work / "sentences.txt"
    rows = zip(pairs.first, pairs.second, pairs.scores, strict=True)
    scored.write_text("".join(f"{first}\t{second}\t{score}\n" for first, second, score in rows), encoding="utf-8")
    if more["stage"] in ("autoencoder", "whitened"):
        sentences.write_text("\n".join(train_pairs(given).texts()) + "\n", encoding="utf-8")
        more["sentences"] = str(sentences)
    if name == WHITENED:
        more["layers"] = (LayerStates(path, model_kwargs=kwargs).depth,)
        more["template"] = "prompteol-zh" if given.language == "zh" else "prompteol"
    settings = FreezeTraining(
        model=path, pairs=str(scored), cache=str(given.out / "states"), model_kwargs=kwargs,
        arguments={
            "seed": seed, "per_device_train_batch_size": BATCH, "learning_rate": 1e-4 if name == WHITENED else 1e-3,
            "num_train_epochs": max(EPOCHS, -(-STEPS // -(-len(pairs) // BATCH))), "save_steps": 100_000,
        },
        **more,
    )  # fmt: skip
    head = PaperHead if name == PAPERS_HEAD else layerwise_autoencoder.SimilarityHead
    with mock.patch.object(layerwise_autoencoder, "SimilarityHead", head):
        model = train_freeze(settings, work / "run", progress=False)
        found = PairScoreEvaluator(test.first, test.second, test.scores, batch_size=256).similarities(model)
    shutil.rmtree(work)
    return dict(found)


def untrained(path: str, given: argparse.Namespace) -> SentenceTransformer:
    """Return the recipe without labels."""
    backbone = CausalTransformer(path, model_kwargs={"dtype": given.precision}).to(device())
    return build(backbone, UNTRAINED, Sets(given.data).fit_texts(given.language), language=given.language)


def train_pairs(given: argparse.Namespace) -> Pairs:
    return read_pairs(given.data / f"stsb_{given.language}_train.tsv")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/freeze", threads=1)
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--language", choices=["en", "zh"], default="en")
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    made.add_argument("--counts", nargs="+", type=int, default=[], help="labelled pairs; default: all there are")
    given = options(made, arguments)
    path, out = str(MODELS[given.model].located(given.out / "models")), given.out / f"{given.model}, {given.language}"
    train, test = train_pairs(given), Sets(given.data).pairs(given.language, "test")
    without_labels = kept_cosines(out / "untrained.npz", partial(untrained, path, given), test)
    for count in given.counts or [len(train)]:
        found: dict[Training, Mapping[str, Array]] = {}
        for name, seed in product(given.methods, SEEDS):
            pairs = train.part(random.Random(seed).sample(range(len(train)), count))
            file = out / f"{name}, {'all' if count == len(train) else count} pairs, seed {seed}.npz"
            found[name, seed] = kept(file, partial(trained, name, pairs, seed, test, path, given))
        about: records.Record = {
            "model": given.model, "precision": given.precision, "pairs": count, "set": f"STS-B {given.language} test",
            **records.today(),
        }  # fmt: skip
        for (reading, called), (metric, statistic) in product(READINGS.items(), METRICS.items()):
            read = {key: own[reading] for key, own in found.items()} | {(UNTRAINED, None): without_labels}
            every = [
                {**about, **row, "reading": called, "metric": metric}
                for row in by_seed(read, test.scores, UNTRAINED, statistic)
            ]
            records.rewrite("freeze", (row for row in every if row["method"] != UNTRAINED), given.results)


if __name__ == "__main__":
    main()
