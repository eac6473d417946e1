"""FREEZE on a real language model: the paper's table, which layers and widths, and how few labelled pairs are enough.

    python benchmarks/train_freeze.py --data DIR                                 # SmolLM2-135M, English
    python benchmarks/train_freeze.py --data DIR --model "Gemma 3 270M" --language zh
    python benchmarks/train_freeze.py --data DIR --parts labels --methods "whitened, prompt"

Writes ``benchmarks/results/freeze.csv``. ``DIR`` holds stsb_{en,zh}_{train,dev,test}.tsv (text, text, score from 0 to
5). Everything is trained on train, of which all texts are seen without labels where a method looks at such texts; what
was chosen was chosen on dev; test is only reported. The language model reads each text once: its states, and the
similarities of each trained model, lie below ``--out``, and a run whose rows are in the file is not run again. A row
without a seed is the mean over the seeds, with the interval of that mean over the pairs of the test set.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import records
from real.cosines import AHEAD, Array, beside, kept_cosines
from real.models import MODELS
from real.sets import Sets
from runs import device, kept, options, parser
from st_reba import CausalTransformer, LayerStates
from st_reba.data.tables import read_pairs
from st_reba.evaluation import PairScoreEvaluator, bootstrap
from st_reba.modules import layerwise_autoencoder
from st_reba.recipes import find
from st_reba.train import FreezeTraining, train_freeze
from st_reba.train.states import ModelOnStates, StatesCache

SEEDS = (0, 1, 2)
#: Labelled pairs; None: all there are.
COUNTS = (100, 300, 1000, None)
#: Passes over all pairs, and steps at least, where fewer pairs make few steps of a pass.
EPOCHS, STEPS, BATCH = 12, 300, 64
#: The best recipe on the development pairs that needs no labels.
UNTRAINED = "early-late"
#: What scores a pair: the trained similarity, and what a vector store sees.
READINGS = {"score": "its own similarity", "cosine": "cosine"}
METRICS = {"Pearson": bootstrap.pearson, "Spearman": bootstrap.spearman}
ALL = "all"
PAPERS = "a quarter, a half"
PLAIN = "{text}"


class PaperHead(layerwise_autoencoder.SimilarityHead):
    """The paper's own: the sigmoid of an MLP, by which two identical sentences score anything."""

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.mlp(1 - distances)[..., 0])


class Method(NamedTuple):
    """A way to train.

    Attributes:
        stage: As :class:`FreezeTraining` has it.
        loss: Likewise.
        prompt: Whether the states are those at the end of PromptEOL; else the text's last token's.
        layers: A key of :func:`layers_of`.
        width: Of each layer's encoding; None: the paper's.
        rate: Learning rate at its highest.
        head: What makes a similarity of the layers' cosines.
    """

    stage: Any
    loss: Any
    prompt: bool = False
    layers: str = ALL
    width: int | None = None
    rate: float = 1e-3
    head: type = layerwise_autoencoder.SimilarityHead

    @property
    def bottlenecks(self) -> tuple[int] | None:
        return None if self.width is None else (self.width,)


#: The rows of the paper's table, and its loss with its own head, which two identical sentences tell apart.
PAPER = {
    "MLP on cosines": Method("cosines", "mse"),
    "siamese": Method("siamese", "mse"),
    "autoencoder": Method("autoencoder", "mse"),
    "autoencoder, log-variance": Method("autoencoder", "log-variance"),
    "autoencoder, log-variance, the paper's head": Method("autoencoder", "log-variance", head=PaperHead),
}
#: Ahead of it: what is trained, from where it starts, and on which states.
BEYOND = {
    "siamese, cosine": Method("siamese", "cosent"),
    "autoencoder, cosine": Method("autoencoder", "cosent"),
    "whitened": Method("whitened", "cosent"),
    "MLP on cosines, prompt": Method("cosines", "mse", prompt=True),
    "autoencoder, log-variance, prompt": Method("autoencoder", "log-variance", prompt=True),
    "siamese, cosine, prompt": Method("siamese", "cosent", prompt=True),
    "autoencoder, cosine, prompt": Method("autoencoder", "cosent", prompt=True),
    "whitened, prompt": Method("whitened", "cosent", prompt=True),
}
#: Which layers, which width and which rate: read on the development pairs.
CHOICE = {
    f"whitened, prompt, {layers}, {width}, {rate:g}": Method("whitened", "cosent", True, layers, width, rate)
    for layers, width in (("last", 256), ("upper three", 64), ("upper three", 128), ("four", 64), (ALL, 64))
    for rate in (1e-3, 1e-4)
}
METHODS = PAPER | BEYOND | CHOICE
#: Of which the curve is drawn.
FEW = (
    "whitened, prompt, last, 256, 0.0001", "whitened, prompt, last, 256, 0.001", "autoencoder, log-variance",
    "autoencoder, log-variance, prompt",
)  # fmt: skip


def layers_of(name: str, depth: int) -> tuple[int, ...] | None:
    """Behind which layers of a model, counted from 1; None for all."""
    return {
        ALL: None,
        "last": (depth,),
        "four": tuple(round(depth * part / 4) for part in (1, 2, 3, 4)),
        "upper three": tuple(round(depth * part / 10) for part in (8, 9, 10)),
    }[name]


class Run(NamedTuple):
    """One training: a key of :data:`METHODS`; how many labelled pairs, None for all; and the seed, also of which pairs
    are drawn."""

    name: str
    pairs: int | None
    seed: int


class Bench:
    """One model and language, with what was read and trained before."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.language = given, given.language
        self.path = str(given.path or MODELS[given.model].located(given.out / "models"))
        self.train = read_pairs(given.data / f"stsb_{given.language}_train.tsv")
        self.sets = {part: Sets(given.data).pairs(given.language, part) for part in ("dev", "test")}
        self.out, self.states = given.out / f"{given.model}, {given.language}", given.states or given.out / "states"
        self.out.mkdir(parents=True, exist_ok=True)
        self.prompt = "prompteol-zh" if given.language == "zh" else "prompteol"
        # Loaded once for each template.
        kwargs = {"dtype": given.precision}
        self.module = cache(
            lambda template: LayerStates(self.path, template=template, model_kwargs=kwargs).to(device())
        )

    def written(self, name: str, lines: Sequence[str]) -> str:
        file = self.out / name
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(file)

    def similarities(self, run: Run) -> Mapping[str, Array]:
        """Those of dev and test, by part and reading, by a model that is trained now, or was before."""
        title = f"{run.name}, {run.pairs or 'all'} pairs, seed {run.seed}"
        return kept(self.out / f"{title}.npz", lambda: self._trained(run))

    def _trained(self, run: Run) -> dict[str, Array]:
        method, template = METHODS[run.name], self.prompt if METHODS[run.name].prompt else PLAIN
        states, count = self.module(template), run.pairs or len(self.train)
        chosen = self.train.part(random.Random(run.seed).sample(range(len(self.train)), count))
        pairs = [
            f"{one}\t{two}\t{score}" for one, two, score in zip(chosen.first, chosen.second, chosen.scores, strict=True)
        ]
        more: dict[str, Any] = {}
        if method.stage in ("autoencoder", "whitened"):
            more["sentences"] = self.written("sentences.txt", self.train.texts())
        if method.stage == "autoencoder":
            name = f"pretraining, {template}, {method.layers}, {method.width or PAPERS}, {run.seed}"
            more["pretraining"] = str(self.out / name.replace("{text}", "plain"))
        settings = FreezeTraining(
            model=self.path, pairs=self.written(f"pairs-{count}-{run.seed}.tsv", pairs), cache=str(self.states),
            model_kwargs={"dtype": self.given.precision}, template=template, stage=method.stage, loss=method.loss,
            layers=layers_of(method.layers, states.depth),
            bottlenecks=method.bottlenecks,
            arguments={
                "seed": run.seed, "per_device_train_batch_size": BATCH, "learning_rate": method.rate,
                "num_train_epochs": max(EPOCHS, -(-STEPS // -(-count // BATCH))), "save_steps": 100_000,
            },
            **more,
        )  # fmt: skip
        known = StatesCache(self.states, states)
        known.add([text for own in self.sets.values() for text in own.texts()])
        work = self.out / "running"
        shutil.rmtree(work, ignore_errors=True)
        with mock.patch.object(layerwise_autoencoder, "SimilarityHead", method.head):
            trained = ModelOnStates.of(train_freeze(settings, work, progress=False)[-1], known)
        shutil.rmtree(work)
        found: dict[str, Array] = {}
        for part, own in self.sets.items():
            scores = PairScoreEvaluator(own.first, own.second, own.scores, batch_size=256).similarities(trained)
            found |= {f"{part} {name}": each for name, each in scores.items()}
        return found

    def untrained(self) -> Array:
        """The cosines of the test pairs by the best recipe without labels."""
        recipe = replace(find(UNTRAINED), fit_texts=tuple(Sets(self.given.data).fit_texts(self.language)))
        if self.language == "zh":
            own = {**recipe.row.settings, "template": self.prompt}
            recipe = replace(recipe, row=replace(recipe.row, settings=own))

        def make() -> Any:
            kwargs = {"dtype": self.given.precision}
            return recipe.model(CausalTransformer(self.path, model_kwargs=kwargs).to(device()))

        return kept_cosines(self.out / "untrained.npz", make, {"test": self.sets["test"]})["test"]

    def described(self, run: Run) -> records.Record:
        """What a run is."""
        method, template = METHODS[run.name], self.prompt if METHODS[run.name].prompt else PLAIN
        states, encoders = self.module(template), method.stage != "cosines"
        autoencoder = layerwise_autoencoder.LayerwiseAutoencoder(
            states.depth, states.get_embedding_dimension(), layers=layers_of(method.layers, states.depth),
            encoders=encoders, bottlenecks=method.bottlenecks,
        )  # fmt: skip
        return {
            "model": self.given.model, "precision": self.given.precision, "method": run.name, "template": template,
            "layers": method.layers, "width": str(method.width or PAPERS) if encoders else "",
            "dimensions": autoencoder.get_embedding_dimension(), "loss": method.loss, "rate": method.rate,
            "pairs": run.pairs or len(self.train), **records.today(),
        }  # fmt: skip

    def rows(self, runs: Sequence[Run]) -> Iterator[records.Record]:
        """Of each set, reading and metric, the score of one training, or the mean of several: on the test set with its
        interval, and how far it is ahead of the recipe without labels."""
        found, described = [self.similarities(run) for run in runs], self.described(runs[0])
        for (part, pairs), (reading, called), (metric, statistic) in product(
            self.sets.items(), READINGS.items(), METRICS.items()
        ):
            each = {str(place): own[f"{part} {reading}"] for place, own in enumerate(found)}
            row = {**described, "set": f"STS-B {self.language} {part}", "reading": called, "metric": metric}
            row["seed"] = runs[0].seed if len(runs) == 1 else None
            if part == "test" and len(runs) > 1:
                whole = statistic({**each, "untrained": self.untrained()}, pairs.scores)
                row |= beside(whole, range(len(runs)))
                if metric == "Spearman":
                    row |= beside(whole, range(len(runs)), [len(runs)], AHEAD)
                yield row
            else:
                yield {**row, "score": float(np.mean(statistic(each, pairs.scores).scores))}

    def measure(self, runs: Sequence[Run]) -> None:
        """Train what has no rows yet, the seeds of one method; write the rows of each, and of their mean."""

        def there(run: Run, seed: int | None) -> bool:
            same = {"model": self.given.model, "method": run.name, "set": f"STS-B {self.language} test", "seed": seed}
            return bool(records.there("freeze", self.given.results, **same, pairs=run.pairs or len(self.train)))

        missing = [run for run in runs if not there(run, run.seed)]
        for run in missing:
            start = time.process_time()
            self.similarities(run)
            seconds = round(time.process_time() - start)
            records.rewrite("freeze", [{**row, "seconds": seconds} for row in self.rows([run])], self.given.results)
            print(f"{run.name}, {run.pairs or 'all'} pairs, seed {run.seed}: {seconds} s", flush=True)
        if len(runs) > 1 and (missing or not there(runs[0], None)):
            records.rewrite("freeze", self.rows(runs), self.given.results)


#: Parts of the benchmark: which methods, with which numbers of pairs and seeds.
PARTS: dict[str, tuple[tuple[str, ...], tuple[int | None, ...], tuple[int, ...]]] = {
    "labels": (FEW, COUNTS, SEEDS),
    "paper": (tuple(PAPER), (None,), SEEDS),
    "ahead": (tuple(BEYOND), (None,), SEEDS),
    "choice": (tuple(CHOICE), (1000,), SEEDS[:1]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/freeze", threads=1)
    made.add_argument("--states", type=Path, help="directory of the states; default: below --out")
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--path", type=Path, help="the language model, where it is there already")
    made.add_argument("--language", choices=["en", "zh"], default="en")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--methods", nargs="+", choices=METHODS, help="some of those of the parts")
    given = options(made, arguments)
    bench = Bench(given)
    for names, counts, seeds in (PARTS[part] for part in given.parts):
        for name in (each for each in names if not given.methods or each in given.methods):
            for count in counts:
                bench.measure([Run(name, count, seed) for seed in seeds])


if __name__ == "__main__":
    main()
