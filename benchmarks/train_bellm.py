"""BeLLM on a real language model: no layer, the last, all of them without the causal mask (the paper's Table 4).

    python benchmarks/train_bellm.py --data DIR --triplets FILE --source "SNLI, dev and test"
    python benchmarks/train_bellm.py --data DIR --triplets FILE --source ... --readings "last token" --seeds 0

Writes ``benchmarks/results/bellm.csv``. ``FILE`` has triplets: a text, one that it entails, one that contradicts it;
``--source`` is what tables call them. ``DIR`` holds stsb_en_test.tsv (text, text, score). Nothing is tuned: the
settings are the paper's, and the test pairs are read before and after. What was trained lies below ``--out``: a run
that was stopped goes on, and one whose cosines are there, in whichever precision, is not run again. A row without a
seed is the mean over the seeds so far, with the interval of that mean over the pairs, and says how many they are;
``ahead`` is how far it is ahead of no layer turned, by the ``ahead_seeds`` that both were trained with.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from devices import device
from real.cosines import pair_cosines, scored
from real.models import MODELS
from real.texts import Sets
from st_reba import CausalTransformer
from st_reba.evaluation import bootstrap
from st_reba.recipes import find
from st_reba.train import BeLLMTraining, build_bellm, train_bellm

Array = NDArray[np.float64]
Turned = Literal["none", "last", "all"]

TURNED: tuple[Turned, ...] = ("none", "last", "all")
#: What is read: from the text to the prompt's end, every token as the authors' command does, or the last token.
READINGS: dict[str, dict[str, Any]] = {
    "from the text on": {"pool_over": "all"},
    "every token": {"pool_over": "whole"},
    "last token": {"pooling": "lasttoken"},
}
#: What the rows are beside: the best known prompt on the same model untrained, and a trained embedder.
UNTRAINED, EMBEDDER = "PromptEOL", "all-MiniLM-L6-v2"
SEEDS = (0, 1, 2)
#: Steps between checkpoints.
SAVED = 20
#: Of the frozen weights, which were released in bfloat16: in float32 they are the same.
PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Run:
    """One training; without a seed, the model as it was before."""

    turned: Turned
    reading: str
    seed: int | None

    @property
    def title(self) -> str:
        return f"{self.turned}, {self.reading}, {'before' if self.seed is None else f'seed {self.seed}'}"


class Bench:
    """One model and its triplets, with what was trained before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = str(options.path or MODELS[options.model].located(options.out / "models"))
        self.pairs = Sets(options.data).pairs("en", "test")
        self.out = options.out / f"{options.model}, {options.source}, {options.preset}"
        self.out.mkdir(parents=True, exist_ok=True)

    def settings(self, run: Run) -> BeLLMTraining:
        """As the paper has them, or the released command."""
        given: dict[str, Any] = {
            "model": self.path,
            "triplets": str(self.options.triplets),
            "bidirectional_layers": run.turned,
            **READINGS[run.reading],
            "model_kwargs": {"dtype": self.options.precision},
            "arguments": {
                "seed": run.seed or 0,
                "max_steps": self.options.max_steps,
                "save_steps": SAVED,
                "report_to": "none",
                **({"per_device_train_batch_size": self.options.batch_size} if self.options.batch_size else {}),
            },
        }
        return (
            BeLLMTraining(**given) if self.options.preset == "paper" else BeLLMTraining.of_preset("released", **given)
        )

    def cosines(self, run: Run) -> Array:
        """Those of the test pairs, by a model that is trained now, or was before."""
        if run.seed is None:
            return self._kept(run.title, lambda: build_bellm(self.settings(run)))
        work = self.out / f"{run.title}, running"
        found = self._kept(run.title, lambda: self._trained(run, work))
        shutil.rmtree(work, ignore_errors=True)
        return found

    def _trained(self, run: Run, work: Path) -> SentenceTransformer:
        finished = work / "model"
        if finished.exists():
            return SentenceTransformer(str(finished), model_kwargs={"dtype": self.options.precision})
        return train_bellm(self.settings(run), work, progress=False)

    def untrained(self) -> Array:
        """By a prompt that needs no training."""

        def made() -> SentenceTransformer:
            backbone = CausalTransformer(self.path, model_kwargs={"dtype": self.options.precision})
            return find("prompteol").model(backbone.to(device()))

        return self._kept(UNTRAINED, made)

    def embedder(self) -> Array:
        """By a model that others have trained to embed."""
        path = self.options.embedder or MODELS[EMBEDDER].located(self.options.out / "models")
        return self._kept(EMBEDDER, lambda: SentenceTransformer(str(path)))

    def _is_there(self, name: str) -> bool:
        return self._file(name, self.precision(name)).is_file()

    def precision(self, name: str) -> str:
        """That in which the cosines of this name were made, or will be."""
        there = (each for each in PRECISIONS if self._file(name, each).is_file())
        return next(there, self.options.precision)

    def _file(self, name: str, precision: str) -> Path:
        return self.out / f"{name}, {precision}.npy"

    def _kept(self, name: str, make: Callable[[], SentenceTransformer]) -> Array:
        file = self._file(name, self.precision(name))
        if not self._is_there(name):
            np.save(file, pair_cosines(make(), self.pairs))
        return np.asarray(np.load(file))

    def row(self, method: str, names: Sequence[str], **given: records.Value) -> records.Record:
        """A row, which is made of the cosines of these names."""
        options = self.options
        used = {self.precision(name) for name in names}
        return {
            "model": options.model, "precision": " and ".join(sorted(used)), "triplets": options.source,
            "set": "STS-B en test", "metric": "Spearman", "method": method, "turned": "", "reading": "", "seeds": None,
            "date": date.today().isoformat(), "versions": records.versions(), **given,
        }  # fmt: skip

    def _add(self, rows: Sequence[records.Record]) -> None:
        """Those that are not there: what was measured before keeps its date and versions."""
        file = self.options.results / "bellm.csv"
        there = records.read("bellm", self.options.results) if file.is_file() else []
        known = {tuple(row[key] for key in records.KEYS["bellm"]) for row in there}
        new = [row for row in rows if tuple(row.get(key) for key in records.KEYS["bellm"]) not in known]
        records.rewrite("bellm", new, self.options.results)

    def measure(self, readings: Sequence[str], seeds: Sequence[int]) -> None:
        """Train what is missing, and write the row of each training when it is there, and the means by seed."""
        references = {UNTRAINED: self.untrained(), EMBEDDER: self.embedder()}
        rows = [
            self.row(f"{name}{', untrained' if name == UNTRAINED else ''}", [name], **scored(bootstrap.spearman(
                {name: cosines}, self.pairs.scores), [0]
            ))
            for name, cosines in references.items()
        ]  # fmt: skip
        self._add(rows)
        method = "BeLLM" if self.options.preset == "paper" else "BeLLM, the released command's settings"
        for reading in readings:
            for seed in (None, *seeds):
                for turned in self.options.turned:
                    run = Run(turned, reading, seed)
                    self._write(
                        method if seed is not None else f"{method}, before", run, {run.title: self.cosines(run)}
                    )
                if seed is not None:
                    self._means(method, reading)

    def _means(self, method: str, reading: str) -> None:
        """The rows of the means over the seeds that have been trained, each layer's beside that of none."""
        every = (Run(turned, reading, seed) for turned in TURNED for seed in SEEDS)
        runs = [run for run in every if self._is_there(run.title)]
        scores = bootstrap.spearman({run.title: self.cosines(run) for run in runs}, self.pairs.scores)
        indices = {turned: [i for i, run in enumerate(runs) if run.turned == turned] for turned in TURNED}
        for turned, own in indices.items():
            if not own:
                continue
            given: records.Record = {**scored(scores, own), "seeds": len(own)}
            if turned != "none":
                # Of the seeds that both have: a seed draws the order of the rows and LoRA's weights for both.
                shared = {runs[index].seed for index in own} & {runs[index].seed for index in indices["none"]}
                paired = [[i for i in part if runs[i].seed in shared] for part in (own, indices["none"])]
                given = {**scored(scores, *paired), **given, "ahead_seeds": len(shared)} if shared else given
            names = [runs[index].title for index in own]
            mean = self.row(method, names, turned=turned, reading=reading, seed=None, **given)
            records.rewrite("bellm", [self._with_others(mean)], self.options.results)

    def _with_others(self, mean: records.Record) -> records.Record:
        """The mean over all rows there are, also of seeds that were trained where the cosines were not kept.

        Its interval is then the mean of theirs, which is no narrower than that of their mean. A difference stays that
        of the most seeds that were ever compared pair by pair.
        """
        same = [key for key in records.KEYS["bellm"] if key != "seed"]
        rows = [
            row for row in records.read("bellm", self.options.results) if all(row[key] == mean[key] for key in same)
        ]
        seeds = [row for row in rows if row["seed"] is not None]
        known = next((row for row in rows if row["seed"] is None), None)
        if known is None or len(seeds) == mean["seeds"]:
            return mean
        if len(seeds) == known["seeds"]:
            return known
        ends = {key: float(np.mean([float(row[key] or 0) for row in seeds])) for key in ("score", "low", "high")}
        compared = max(mean, known, key=lambda row: int(row.get("ahead_seeds") or 0))
        ahead = {key: compared.get(key) for key in ("ahead", "ahead_low", "ahead_high", "ahead_seeds")}
        precision = " and ".join(sorted({str(row["precision"]) for row in seeds}))
        return {**mean, **ends, **ahead, "seeds": len(seeds), "precision": precision}

    def _write(self, method: str, run: Run, cosines: dict[str, Array]) -> None:
        """The row of one model."""
        given = scored(bootstrap.spearman(cosines, self.pairs.scores), [0])
        row = self.row(method, [run.title], turned=run.turned, reading=run.reading, seed=run.seed, **given)
        self._add([row])
        print(f"{run.title}: {100 * float(row['score'] or 0):.1f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--triplets", type=Path, required=True, help="a file, as st-reba train bellm takes it")
    parser.add_argument("--source", required=True, help="what tables call the triplets")
    parser.add_argument("--out", type=Path, default=Path("build/bellm"), help="directory of what is kept")
    parser.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    parser.add_argument("--path", type=Path, help="the language model, where it is there already")
    parser.add_argument("--embedder", type=Path, help=f"{EMBEDDER}, where it is there already")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--preset", choices=["paper", "released"], default="paper")
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    parser.add_argument("--turned", nargs="+", choices=TURNED, default=list(TURNED), help="which layers")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--max-steps", type=int, default=-1, help="of each training; default: one pass")
    parser.add_argument("--batch-size", type=int, help="default: that of the preset")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    Bench(options).measure(options.readings, options.seeds)


if __name__ == "__main__":
    main()
