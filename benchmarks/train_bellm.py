"""BeLLM trained on a small language model: no bidirectional layer, the last, all (the paper's Table 4).

    python benchmarks/train_bellm.py --data DIR --out build/bellm

``DIR`` holds stsb_en_{train,test}.tsv: text, text, score. The paper trains on NLI; where none is at hand, triplets are
made of the training pairs: those scored 4 or more are positives, and the negative is a partner scored 1 or less of
either text (where there is none, of another pair). Nothing is tuned; the test pairs are read before and after.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Literal

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from records import DEMO_MODEL
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import bootstrap
from st_reba.training import BeLLMTraining, build_bellm, train_bellm

SETTINGS: tuple[Literal["none", "last", "all"], ...] = ("none", "last", "all")


def triplets(pairs: Pairs, seed: int) -> list[tuple[str, str, str]]:
    """Positives and negatives that people have told apart."""
    apart = defaultdict(list)
    for first, second, score in zip(pairs.first, pairs.second, pairs.scores, strict=True):
        if score <= 1:
            apart[first].append(second)
            apart[second].append(first)
    chance = random.Random(seed)
    others = sorted({text for partners in apart.values() for text in partners})
    found = []
    for first, second, score in zip(pairs.first, pairs.second, pairs.scores, strict=True):
        if score >= 4 and first != second:
            negative = chance.choice(apart[first] or apart[second] or others)
            found.append((first, second, negative))
    return found


def cosines(model: SentenceTransformer, pairs: Pairs) -> np.ndarray:
    """One for each pair."""
    first, second = (model.encode(texts, convert_to_tensor=True) for texts in (pairs.first, pairs.second))
    return pairwise_cos_sim(first, second).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--pooling", choices=("mean", "lasttoken"), default="mean")
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    made = triplets(read_pairs(options.data / "stsb_en_train.tsv"), seed=0)
    rows = options.out / "triplets.tsv"
    rows.write_text("\n".join(map("\t".join, made)), encoding="utf-8")
    print(f"{len(made)} triplets")
    test = read_pairs(options.data / "stsb_en_test.tsv")
    found: dict[str, np.ndarray] = {}
    for seed in options.seeds:
        for layers in SETTINGS:
            settings = BeLLMTraining(
                model=options.model,
                triplets=str(rows),
                bidirectional_layers=layers,
                pooling=options.pooling,
                epochs=options.epochs,
                max_steps=options.max_steps,
                batch_size=options.batch_size,
                seed=seed,
            )
            if f"{layers}, before" not in found:
                found[f"{layers}, before"] = cosines(build_bellm(settings), test)
            run = options.out / f"{layers}-{options.pooling}-{seed}"
            finished = run / "model"
            trained = SentenceTransformer(str(finished)) if finished.exists() else train_bellm(settings, run)
            found[f"{layers}, seed {seed}"] = cosines(trained, test)

    statistic = bootstrap.spearman(found, test.scores)
    estimates = bootstrap.estimate(statistic)
    print("\n| bidirectional layers | STS-B test, Spearman x 100 | 95% interval |\n|---|---|---|")
    for name, estimate in estimates.items():
        print(f"| {name} | {100 * estimate.value:.1f} | {100 * estimate.low:.1f} to {100 * estimate.high:.1f} |")
    drawn = dict(zip(found, bootstrap.bootstrap(statistic), strict=True))
    print("\n| difference, x 100 | | 95% interval |\n|---|---|---|")
    for seed in options.seeds:
        for other in ("none", "all"):
            names = f"last, seed {seed}", f"{other}, seed {seed}"
            value = estimates[names[0]].value - estimates[names[1]].value
            low, high = bootstrap.interval(drawn[names[0]] - drawn[names[1]])
            print(f"| last - {other}, seed {seed} | {100 * value:+.1f} | {100 * low:+.1f} to {100 * high:+.1f} |")


if __name__ == "__main__":
    main()
