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
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging

import records
from devices import device
from real.cosines import pair_cosines
from real.models import MODELS
from real.texts import Sets
from st_reba import CausalTransformer, LayerStates
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import PairScoreEvaluator, bootstrap
from st_reba.modules import layerwise_autoencoder
from st_reba.recipes import find
from st_reba.train import FreezeTraining, train_freeze
from st_reba.train.states import ModelOnStates, StatesCache

Array = NDArray[np.float64]
Similarities = dict[str, dict[str, Array]]

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


@dataclass(frozen=True)
class Method:
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

    stage: str
    loss: str
    prompt: bool = False
    layers: str = ALL
    width: int | None = None
    rate: float = 1e-3
    head: type = layerwise_autoencoder.SimilarityHead


#: The rows of the paper's table, and its loss with its own head, which two identical sentences tell apart.
PAPER = {
    "MLP on cosines": Method("cosines", "mse"),
    "siamese": Method("siamese", "mse"),
    "autoencoder": Method("autoencoder", "mse"),
    "autoencoder, log-variance": Method("autoencoder", "log-variance"),
    "autoencoder, log-variance, the paper's head": Method("autoencoder", "log-variance", head=PaperHead),
}
#: Ahead of it: what is trained, from where it starts, and on which states.
AHEAD = {
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
METHODS = PAPER | AHEAD | CHOICE
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


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: A key of :data:`METHODS`.
        count: Labelled pairs; None: all.
        seed: Of the training, and of which pairs are drawn.
    """

    name: str
    count: int | None
    seed: int

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.count or 'all'} pairs, seed {self.seed}"


@dataclass
class Bench:
    """One model and language, with what was read and trained before."""

    model: str
    path: str
    language: str
    data: Path
    out: Path
    states: Path
    precision: str
    results: Path
    modules: dict[bool, LayerStates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.train = read_pairs(self.data / f"stsb_{self.language}_train.tsv")
        self.sets: dict[str, Pairs] = {part: Sets(self.data).pairs(self.language, part) for part in ("dev", "test")}
        self.out = self.out / f"{self.model}, {self.language}"
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def prompt(self) -> str:
        return "prompteol-zh" if self.language == "zh" else "prompteol"

    def template(self, method: Method) -> str:
        return self.prompt if method.prompt else PLAIN

    def module(self, method: Method) -> LayerStates:
        """The language model, loaded once for each template."""
        if method.prompt not in self.modules:
            self.modules[method.prompt] = LayerStates(
                self.path, template=self.template(method), model_kwargs={"dtype": self.precision}
            ).to(device())
        return self.modules[method.prompt]

    def sentences(self) -> Path:
        """All texts of the training part."""
        file = self.out / "sentences.txt"
        file.write_text("\n".join(self.train.texts()) + "\n", encoding="utf-8")
        return file

    def labelled(self, run: Run) -> tuple[Path, int]:
        """A file of the pairs that a run is trained on, and how many there are."""
        count = len(self.train) if run.count is None else run.count
        chosen = self.train.part(random.Random(run.seed).sample(range(len(self.train)), count))
        file = self.out / f"pairs-{count}-{run.seed}.tsv"
        rows = zip(chosen.first, chosen.second, chosen.scores, strict=True)
        file.write_text("".join(f"{first}\t{second}\t{score}\n" for first, second, score in rows), encoding="utf-8")
        return file, count

    def similarities(self, run: Run) -> Similarities:
        """Those of dev and test by a model that is trained now, or was before."""
        kept = self.out / f"{run.title}.npz"
        if not kept.is_file():
            found: dict[str, Any] = {
                f"{part} {name}": each for part, own in self._trained(run).items() for name, each in own.items()
            }
            np.savez(kept, **found)
        with np.load(kept) as held:
            return {part: {name: held[f"{part} {name}"] for name in READINGS} for part in self.sets}

    def _trained(self, run: Run) -> Similarities:
        method = run.method
        states = self.module(method)
        pairs, count = self.labelled(run)
        pretrains = method.stage == "autoencoder"
        more: dict[str, Any] = (
            {"sentences": str(self.sentences())} if method.stage in ("autoencoder", "whitened") else {}
        )
        if pretrains:
            name = f"pretraining, {self.template(method)}, {method.layers}, {method.width or PAPERS}, {run.seed}"
            more["pretraining"] = str(self.out / name.replace("{text}", "plain"))
        settings = FreezeTraining(
            model=self.path,
            pairs=str(pairs),
            cache=str(self.states),
            model_kwargs={"dtype": self.precision},
            template=self.template(method),
            stage=method.stage,  # type: ignore[arg-type]
            loss=method.loss,  # type: ignore[arg-type]
            layers=layers_of(method.layers, states.depth),
            bottlenecks=None if method.width is None else (method.width,),
            arguments={
                "seed": run.seed,
                "per_device_train_batch_size": BATCH,
                "num_train_epochs": max(EPOCHS, -(-STEPS // -(-count // BATCH))),
                "learning_rate": method.rate,
                "save_steps": 100_000,
            },
            **more,
        )
        cache = StatesCache(self.states, states)
        cache.add([text for own in self.sets.values() for text in own.texts()])
        work = self.out / "running"
        shutil.rmtree(work, ignore_errors=True)
        with mock.patch.object(layerwise_autoencoder, "SimilarityHead", method.head):
            trained = ModelOnStates.of(train_freeze(settings, work, progress=False)[-1], cache)
        shutil.rmtree(work)
        return {
            part: PairScoreEvaluator(own.first, own.second, own.scores, batch_size=256).similarities(trained)
            for part, own in self.sets.items()
        }

    def untrained(self) -> Array:
        """The cosines of the test pairs by the best recipe without labels."""
        kept = self.out / "untrained.npy"
        if not kept.is_file():
            sets = Sets(self.data)
            recipe = replace(find(UNTRAINED), fit_texts=tuple(sets.fit_texts(self.language)))
            if self.language == "zh":
                own = {**recipe.row.settings, "template": self.prompt}
                recipe = replace(recipe, row=replace(recipe.row, settings=own))
            backbone = CausalTransformer(self.path, model_kwargs={"dtype": self.precision}).to(device())
            np.save(kept, pair_cosines(recipe.model(backbone), self.sets["test"]))
        return np.asarray(np.load(kept))

    def described(self, run: Run) -> records.Record:
        """What a run is."""
        method = run.method
        states = self.module(method)
        layers = layers_of(method.layers, states.depth)
        autoencoder = layerwise_autoencoder.LayerwiseAutoencoder(
            states.depth, states.get_embedding_dimension(), layers=layers, encoders=method.stage != "cosines",
            bottlenecks=None if method.width is None else (method.width,),
        )  # fmt: skip
        return {
            "model": self.model, "precision": self.precision, "method": run.name, "template": self.template(method),
            "layers": method.layers, "width": "" if method.stage == "cosines" else str(method.width or PAPERS),
            "dimensions": autoencoder.get_embedding_dimension(), "loss": method.loss, "rate": method.rate,
            "pairs": run.count or len(self.train), "date": date.today().isoformat(), "versions": records.versions(),
        }  # fmt: skip

    def of_run(self, run: Run) -> None:
        """The rows of one training."""
        start = time.process_time()
        found = self.similarities(run)
        shared = {**self.described(run), "seed": run.seed, "seconds": round(time.process_time() - start)}
        rows = [
            {**shared, **where, "score": float(values[0])}
            for where, values, _ in self._scores([found])
        ]  # fmt: skip
        records.rewrite("freeze", rows, self.results)
        told = (f"{row['set']}, {row['reading']}, {row['metric']}: {row['score']:.3f}" for row in rows)
        print(f"{run.title}: {shared['seconds']} s", *told, sep="; ", flush=True)

    def of_seeds(self, runs: Sequence[Run]) -> None:
        """The rows of the mean over some trainings, with intervals."""
        rows = []
        for where, values, replicates in self._scores([self.similarities(run) for run in runs]):
            score = float(values.mean())
            row: records.Record = {**self.described(runs[0]), **where, "seed": None, "score": score}
            if where["set"] == f"STS-B {self.language} test":
                mean = replicates[: len(runs)].mean(axis=0)
                row["low"], row["high"] = map(float, bootstrap.interval(mean))
                if where["metric"] == "Spearman":
                    apart = bootstrap.interval(mean - replicates[-1])
                    row |= {"ahead": score - float(self._level), "ahead_low": float(apart[0]),
                            "ahead_high": float(apart[1])}  # fmt: skip
            rows.append(row)
        records.rewrite("freeze", rows, self.results)

    def _scores(self, found: Sequence[Similarities]) -> Iterator[tuple[dict[str, records.Value], Array, Array]]:
        """Of each set, reading and metric, what it is; the scores of several trainings; and these in resamples, with
        those of the recipe without labels at last. Resamples are drawn of the test set alone, of several trainings."""
        for part, pairs in self.sets.items():
            for reading, called in READINGS.items():
                for metric, statistic in METRICS.items():
                    each = {str(index): own[part][reading] for index, own in enumerate(found)}
                    where: dict[str, records.Value] = {
                        "set": f"STS-B {self.language} {part}", "reading": called, "metric": metric,
                    }  # fmt: skip
                    replicates = np.empty((0, 0))
                    if part == "test" and len(found) > 1:
                        whole = statistic({**each, "untrained": self.untrained()}, pairs.scores)
                        replicates, self._level = whole.replicates, whole.scores[-1]
                    yield where, statistic(each, pairs.scores).scores, replicates

    def is_there(self, run: Run, seed: int | None) -> bool:
        """Whether a run with this seed, or the mean over the seeds, has its rows."""
        if not (self.results / "freeze.csv").is_file():
            return False
        return any(
            row["model"] == self.model and row["method"] == run.name and row["seed"] == seed
            and row["set"] == f"STS-B {self.language} test" and row["pairs"] == (run.count or len(self.train))
            for row in records.read("freeze", self.results)
        )  # fmt: skip


#: Parts of the benchmark: which methods, with which numbers of pairs and seeds.
PARTS: dict[str, tuple[tuple[str, ...], tuple[int | None, ...], tuple[int, ...]]] = {
    "labels": (FEW, COUNTS, SEEDS),
    "paper": (tuple(PAPER), (None,), SEEDS),
    "ahead": (tuple(AHEAD), (None,), SEEDS),
    "choice": (tuple(CHOICE), (1000,), SEEDS[:1]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, default=Path("build/freeze"), help="directory of what is kept")
    parser.add_argument("--states", type=Path, help="directory of the states; default: below --out")
    parser.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    parser.add_argument("--path", type=Path, help="the language model, where it is there already")
    parser.add_argument("--language", choices=["en", "zh"], default="en")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="some of those of the parts")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    bench = Bench(
        options.model, str(options.path or MODELS[options.model].located(options.out / "models")), options.language,
        options.data, options.out, options.states or options.out / "states", options.precision, options.results,
    )  # fmt: skip
    for part in options.parts:
        names, counts, seeds = PARTS[part]
        for name in names:
            if options.methods and name not in options.methods:
                continue
            for count in counts:
                runs = [Run(name, count, seed) for seed in seeds]
                missing = [run for run in runs if not bench.is_there(run, run.seed)]
                for run in missing:
                    bench.of_run(run)
                if len(runs) > 1 and (missing or not bench.is_there(runs[0], None)):
                    bench.of_seeds(runs)


if __name__ == "__main__":
    main()
