"""FREEZE on a real language model: the paper's table, and how few labelled pairs are enough.

    python benchmarks/train_freeze.py --data DIR                                 # SmolLM2-135M, English
    python benchmarks/train_freeze.py --data DIR --model "Gemma 3 270M" --language zh
    python benchmarks/train_freeze.py --data DIR --methods "MLP on cosines" --counts 100 300

Writes ``benchmarks/results/freeze.csv``. ``DIR`` holds stsb_{en,zh}_{train,test}.tsv (text, text, score from 0 to 5).
Everything is trained on train, all texts of which are seen without labels by methods that need such texts; test is
only reported. The language model reads each text once: its states, and the similarities of each trained model, are
kept below ``--out``, and a run whose rows are in the file is not run again. A row without a seed is the mean over the
seeds, with the interval of that mean over the pairs of the test set.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

import records
from real.cosines import AHEAD, Array, beside, kept_cosines
from real.models import MODELS
from real.sets import Sets
from runs import device, kept, options, parser
from st_reba import CausalTransformer, LayerStates, build
from st_reba.data.tables import read_pairs
from st_reba.evaluation import PairScoreEvaluator, bootstrap
from st_reba.modules import layerwise_autoencoder
from st_reba.train import FreezeTraining, train_freeze
from st_reba.train.freeze import ModelOnStates, StatesCache

SEEDS = (0, 1, 2)
#: Passes over all pairs, and steps at least, where fewer pairs make few steps of a pass.
EPOCHS, STEPS, BATCH = 12, 300, 64
#: The recipe without labels that the methods are held against.
UNTRAINED = "early-late"
#: Scores of a pair: the trained similarity, and that of a vector store.
READINGS = {"score": "its own similarity", "cosine": "cosine"}
METRICS = {"Pearson": bootstrap.pearson, "Spearman": bootstrap.spearman}


class PaperHead(layerwise_autoencoder.SimilarityHead):
    """The paper's own: the sigmoid of an MLP, by which two identical sentences score anything."""

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.mlp(1 - distances)[..., 0])


class Method(NamedTuple):
    """A way to train: arguments of :class:`FreezeTraining`, and the class of the head."""

    stage: Any
    loss: Any = "mse"
    head: type = layerwise_autoencoder.SimilarityHead


#: Ahead of the paper's methods: starts from a whitening of the last layer at the end of a prompt, in 256 dimensions.
WHITENED, RATE = "whitened, prompt, last, 256, 0.0001", 1e-4
#: The rows of the paper's table, and its loss with its own head, by which two identical sentences differ.
METHODS = {
    "MLP on cosines": Method("cosines"),
    "siamese": Method("siamese"),
    "autoencoder": Method("autoencoder"),
    "autoencoder, log-variance": Method("autoencoder", "log-variance"),
    "autoencoder, log-variance, the paper's head": Method("autoencoder", "log-variance", PaperHead),
    WHITENED: Method("whitened", "cosent"),
}


class Run(NamedTuple):
    """One training: a key of :data:`METHODS`, the number of labelled pairs, and the seed."""

    name: str
    pairs: int
    seed: int


class Bench:
    """One model and language, with the states and the trainings that are kept."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.language = given, given.language
        self.path = str(MODELS[given.model].located(given.out / "models"))
        self.train = read_pairs(given.data / f"stsb_{given.language}_train.tsv")
        self.test = Sets(given.data).pairs(given.language, "test")
        self.out, self.states = given.out / f"{given.model}, {given.language}", given.out / "states"
        self.out.mkdir(parents=True, exist_ok=True)
        self.prompt = "prompteol-zh" if given.language == "zh" else "prompteol"
        self.kwargs = {"dtype": given.precision}

    def module(self, name: str) -> LayerStates:
        """Return the language model with the template of a method."""
        template = self.prompt if name == WHITENED else "{text}"
        return LayerStates(self.path, template=template, model_kwargs=self.kwargs).to(device())

    def written(self, name: str, lines: Sequence[str]) -> str:
        file = self.out / name
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(file)

    def similarities(self, run: Run) -> Mapping[str, Array]:
        """Return those of the test pairs by reading, by a model that is trained now, or was before."""
        count = "all" if run.pairs == len(self.train) else run.pairs
        return kept(self.out / f"{run.name}, {count} pairs, seed {run.seed}.npz", lambda: self._trained(run))

    def _layers(self, run: Run, states: LayerStates) -> dict[str, Any]:
        return {"layers": (states.depth,), "bottlenecks": (256,)} if run.name == WHITENED else {}

    def _trained(self, run: Run) -> dict[str, Array]:
        method, states = METHODS[run.name], self.module(run.name)
        chosen = self.train.part(random.Random(run.seed).sample(range(len(self.train)), run.pairs))
        columns = zip(chosen.first, chosen.second, chosen.scores, strict=True)
        pairs = [f"{one}\t{two}\t{score}" for one, two, score in columns]
        more: dict[str, Any] = self._layers(run, states)
        if method.stage in ("autoencoder", "whitened"):
            more["sentences"] = self.written("sentences.txt", self.train.texts())
        settings = FreezeTraining(
            model=self.path, pairs=self.written(f"pairs-{run.pairs}-{run.seed}.tsv", pairs), cache=str(self.states),
            model_kwargs=self.kwargs, template=states.template, stage=method.stage, loss=method.loss,
            arguments={
                "seed": run.seed, "per_device_train_batch_size": BATCH,
                "learning_rate": RATE if run.name == WHITENED else 10 * RATE,
                "num_train_epochs": max(EPOCHS, -(-STEPS // -(-run.pairs // BATCH))), "save_steps": 100_000,
            },
            **more,
        )  # fmt: skip
        known = StatesCache(self.states, states)
        known.add(self.test.texts())
        work = self.out / "running"
        shutil.rmtree(work, ignore_errors=True)
        with mock.patch.object(layerwise_autoencoder, "SimilarityHead", method.head):
            trained = ModelOnStates.of(train_freeze(settings, work, progress=False)[-1], known)
        shutil.rmtree(work)
        own = self.test
        return dict(PairScoreEvaluator(own.first, own.second, own.scores, batch_size=256).similarities(trained))

    @cached_property
    def untrained(self) -> Array:
        """The cosines of the test pairs by the recipe without labels."""
        fit = Sets(self.given.data).fit_texts(self.language)

        def make() -> Any:
            backbone = CausalTransformer(self.path, model_kwargs=self.kwargs).to(device())
            return build(backbone, UNTRAINED, fit, language=self.language)

        return kept_cosines(self.out / "untrained.npz", make, {"test": self.test})["test"]

    def rows(self, runs: Sequence[Run]) -> Iterator[records.Record]:
        """Yield rows of one training, or of the mean of several, with its interval and its lead over the recipe without
        labels."""
        found, run = [self.similarities(each) for each in runs], runs[0]
        method, states, last = METHODS[run.name], self.module(run.name), run.name == WHITENED
        encoders, width = method.stage != "cosines", states.get_embedding_dimension()
        layers = self._layers(run, states)
        autoencoder = layerwise_autoencoder.LayerwiseAutoencoder(states.depth, width, encoders=encoders, **layers)
        about: records.Record = {
            "model": self.given.model, "precision": self.given.precision, "method": run.name,
            "layers": "last" if last else "all", "width": ("256" if last else "a quarter, a half") if encoders else "",
            "dimensions": autoencoder.get_embedding_dimension(), "loss": method.loss,
            "rate": RATE if last else 10 * RATE, "pairs": run.pairs, "set": f"STS-B {self.language} test",
            "seed": run.seed if len(runs) == 1 else None, **records.today(),
        }  # fmt: skip
        for (reading, called), (metric, statistic) in product(READINGS.items(), METRICS.items()):
            each = {str(place): own[reading] for place, own in enumerate(found)}
            row, places = {**about, "reading": called, "metric": metric}, range(len(runs))
            if len(runs) == 1:
                yield {**row, "score": float(statistic(each, self.test.scores).scores[0])}
                continue
            whole = statistic({**each, "untrained": self.untrained}, self.test.scores)
            ahead = beside(whole, places, [len(runs)], AHEAD) if metric == "Spearman" else {}
            yield {**row, **beside(whole, places), **ahead}

    def measure(self, runs: Sequence[Run]) -> None:
        """Train the seeds of one method that are not kept; write the rows of each, and of their mean."""
        for run in runs:
            records.rewrite("freeze", self.rows([run]), self.given.results)
        records.rewrite("freeze", self.rows(runs), self.given.results)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/freeze", threads=1)
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--language", choices=["en", "zh"], default="en")
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    made.add_argument("--counts", nargs="+", type=int, default=[], help="labelled pairs; default: all there are")
    given = options(made, arguments)
    bench = Bench(given)
    for name in given.methods:
        for count in given.counts or [len(bench.train)]:
            bench.measure([Run(name, count, seed) for seed in SEEDS])


if __name__ == "__main__":
    main()
