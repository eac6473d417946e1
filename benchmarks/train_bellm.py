"""BeLLM on a real language model: no layer, the last, all of them without the causal mask (the paper's Table 4).

    python benchmarks/train_bellm.py --data DIR --triplets FILE --source "SNLI, dev and test"
    python benchmarks/train_bellm.py --data DIR --triplets FILE --source ... --readings "last token" --seeds 0

Writes ``benchmarks/results/bellm.csv``. ``FILE`` has triplets: a text, one that it entails, one that contradicts it;
``--source`` is what tables call them. ``DIR`` holds stsb_en_test.tsv (text, text, score). Nothing is tuned: the
settings are the paper's, and the test pairs are read before and after. What was trained lies below ``--out``: a run
that was stopped goes on, and one whose cosines are there, in whichever precision, is not run again. A row without a
seed is the mean over the seeds whose cosines are there, with the interval of that mean over the pairs, and says how
many they are; ``ahead`` is how far it is ahead of no layer turned, by the ``ahead_seeds`` that both were trained with.
A mean over more seeds, which is in the file, stays.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

import records
from real.cosines import Array, kept_cosines, scored
from real.models import MODELS
from real.texts import Sets
from runs import device, options, parser
from st_reba import CausalTransformer
from st_reba.evaluation import bootstrap
from st_reba.recipes import find
from st_reba.train import BeLLMTraining, build_bellm, train_bellm

TURNED = ("none", "last", "all")
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


class Bench:
    """One model and its triplets, with what was trained before."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.path = str(given.path or MODELS[given.model].located(given.out / "models"))
        self.pairs = Sets(given.data).pairs("en", "test")
        self.out = given.out / f"{given.model}, {given.source}, {given.preset}"
        self.method = "BeLLM" if given.preset == "paper" else "BeLLM, the released command's settings"

    def settings(self, turned: str, reading: str, seed: int | None) -> BeLLMTraining:
        """As the paper has them, or the released command."""
        batch = {"per_device_train_batch_size": self.given.batch_size} if self.given.batch_size else {}
        every: dict[str, Any] = {
            "model": self.path, "triplets": str(self.given.triplets), "bidirectional_layers": turned,
            **READINGS[reading], "model_kwargs": {"dtype": self.given.precision},
            "arguments": {
                "seed": seed or 0, "max_steps": self.given.max_steps, "save_steps": SAVED, "report_to": "none", **batch,
            },
        }  # fmt: skip
        return BeLLMTraining(**every) if self.given.preset == "paper" else BeLLMTraining.of_preset("released", **every)

    def file(self, name: str) -> Path:
        """Where the cosines of this name are, in whichever precision, or will be."""
        there = [file for file in (self.out / f"{name}, {each}.npz" for each in PRECISIONS) if file.is_file()]
        return there[0] if there else self.out / f"{name}, {self.given.precision}.npz"

    def cosines(self, name: str, make: Callable[[], SentenceTransformer]) -> Array:
        """Those of the test pairs, by a model that is made now, or was before."""
        return kept_cosines(self.file(name), make, {"test": self.pairs})["test"]

    def untrained(self) -> SentenceTransformer:
        """The prompt that needs no training."""
        backbone = CausalTransformer(self.path, model_kwargs={"dtype": self.given.precision})
        return find("prompteol").model(backbone.to(device()))

    def trained(self, turned: str, reading: str, seed: int | None) -> tuple[str, Array]:
        """One training; without a seed, the model as it was before: its name and cosines."""
        settings = self.settings(turned, reading, seed)
        name = f"{turned}, {reading}, {'before' if seed is None else f'seed {seed}'}"
        work = self.out / f"{name}, running"

        def make() -> SentenceTransformer:
            if seed is None:
                return build_bellm(settings)
            if (work / "model").exists():
                return SentenceTransformer(str(work / "model"), model_kwargs={"dtype": self.given.precision})
            return train_bellm(settings, work, progress=False)

        found = self.cosines(name, make)
        shutil.rmtree(work, ignore_errors=True)
        return name, found

    def write(self, method: str, cosines: dict[str, Array], *places: Sequence[int], **more: records.Value) -> None:
        """The row of some cosines, unless the same was measured before, of as many seeds: it keeps date and versions.

        Args:
            method: As tables call it.
            cosines: By the names of their files.
            places: Which of them are averaged, and which these are ahead of.
            more: Other fields.
        """
        used = [list(cosines)[place] for place in places[0]]
        precisions = {self.file(name).stem.rpartition(", ")[2] for name in used}
        row: records.Record = {
            "model": self.given.model, "precision": " and ".join(sorted(precisions)), "triplets": self.given.source,
            "set": "STS-B en test", "metric": "Spearman", "method": method, "turned": "", "reading": "",
            **scored(bootstrap.spearman(cosines, self.pairs.scores), *places), **records.today(), **more,
        }  # fmt: skip
        print(f"{method}, {', '.join(used)}: {row['score']:.3f}", flush=True)
        same, counts = {key: row.get(key) for key in records.KEYS["bellm"]}, ("seeds", "ahead_seeds")
        for known in records.there("bellm", self.given.results, **same):
            if all(int(known[key] or 0) >= int(row.get(key) or 0) for key in counts):
                return
        records.rewrite("bellm", [row], self.given.results)

    def means(self, reading: str) -> None:
        """The rows of the means over the seeds that have been trained, each layer's beside that of none."""
        runs = [
            (turned, seed)
            for turned in TURNED
            for seed in SEEDS
            if self.file(f"{turned}, {reading}, seed {seed}").is_file()
        ]
        cosines = dict(self.trained(turned, reading, seed) for turned, seed in runs)
        for turned in dict.fromkeys(turned for turned, _ in runs):
            # Of the seeds that both have: a seed draws the order of the rows and LoRA's weights for both.
            shared = {seed for own, seed in runs if own == turned} & {seed for own, seed in runs if own == "none"}
            own, paired, base = (
                [place for place, (name, seed) in enumerate(runs) if name == which and seed in seeds]
                for which, seeds in ((turned, SEEDS), (turned, shared), ("none", shared))
            )
            more: records.Record = {"turned": turned, "reading": reading, "seeds": len(own)}
            if turned != "none" and shared:
                beside = scored(bootstrap.spearman(cosines, self.pairs.scores), paired, base)
                more |= {key: value for key, value in beside.items() if key.startswith("ahead")}
                more["ahead_seeds"] = len(shared)
            self.write(self.method, cosines, own, **more)

    def measure(self) -> None:
        """Train what is missing, and write the row of each training when it is there, and the means by seed."""
        embedder = str(self.given.embedder or MODELS[EMBEDDER].located(self.given.out / "models"))
        references: dict[str, Callable[[], SentenceTransformer]] = {
            UNTRAINED: self.untrained,
            EMBEDDER: partial(SentenceTransformer, embedder),
        }
        for name, make in references.items():
            title = f"{name}, untrained" if name == UNTRAINED else name
            self.write(title, {name: self.cosines(name, make)}, [0])
        for reading in self.given.readings:
            for seed in (None, *self.given.seeds):
                method = self.method if seed is not None else f"{self.method}, before"
                for turned in self.given.turned:
                    found = dict([self.trained(turned, reading, seed)])
                    self.write(method, found, [0], turned=turned, reading=reading, seed=seed)
            self.means(reading)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/bellm", threads=1)
    made.add_argument("--triplets", type=Path, required=True, help="a file, as st-reba train bellm takes it")
    made.add_argument("--source", required=True, help="what tables call the triplets")
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--path", type=Path, help="the language model, where it is there already")
    made.add_argument("--embedder", type=Path, help=f"{EMBEDDER}, where it is there already")
    made.add_argument("--preset", choices=["paper", "released"], default="paper")
    made.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    made.add_argument("--turned", nargs="+", choices=TURNED, default=list(TURNED), help="which layers")
    made.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    made.add_argument("--max-steps", type=int, default=-1, help="of each training; default: one pass")
    made.add_argument("--batch-size", type=int, help="default: that of the preset")
    Bench(options(made, arguments)).measure()


if __name__ == "__main__":
    main()
