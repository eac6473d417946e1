"""FREEZE's three stages on STS-B, with the demo LM or any other: does the order of the paper's results hold?

    python benchmarks/train_freeze.py --data DIR --out build/freeze               # English, three seeds
    python benchmarks/train_freeze.py --data DIR --out build/freeze --language zh

``DIR`` holds stsb_{en,zh}_{train,dev,test}.tsv (text, text, score from 0 to 5) and, for English, the texts that the
autoencoders are pretrained on, generic_sentences_en.txt. Everything is trained on train; what was chosen was chosen on
dev; test is only reported. The states of the model lie in the output and are read once. Written: a Markdown table, and
all scores as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import pairwise_cos_sim
from transformers.utils import logging

from records import DEMO_MODEL
from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import PairScoreEvaluator, bootstrap
from st_reba.modules.trained import layerwise_autoencoder
from st_reba.training import FreezeTraining, train_freeze
from st_reba.training.states import ModelOnStates, StatesCache


class PaperHead(layerwise_autoencoder.SimilarityHead):
    """The paper's own: the sigmoid of an MLP, by which two identical sentences score anything."""

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.mlp(1 - distances)[..., 0])


#: By name: the paper's Pearson and Spearman (GPT-2 medium, English), what is asked for, and the head.
STAGES: dict[str, tuple[str, dict[str, Any], type]] = {
    "MLP on raw cosines": ("39.2, 42.1", {"stage": "cosines"}, layerwise_autoencoder.SimilarityHead),
    "siamese, MSE": ("71.6, 69.7", {"stage": "siamese"}, layerwise_autoencoder.SimilarityHead),
    "siamese, log-variance": (
        "", {"stage": "siamese", "loss": "log-variance"}, layerwise_autoencoder.SimilarityHead
    ),
    "autoencoder, MSE": ("75.4, 73.2", {"loss": "mse"}, layerwise_autoencoder.SimilarityHead),
    "autoencoder, log-variance": ("76.9, 75.0", {}, layerwise_autoencoder.SimilarityHead),
    "siamese, MSE, the paper's head": ("71.6, 69.7", {"stage": "siamese"}, PaperHead),
    "autoencoder, MSE, the paper's head": ("75.4, 73.2", {"loss": "mse"}, PaperHead),
    "autoencoder, log-variance, the paper's head": ("76.9, 75.0", {}, PaperHead),
}  # fmt: skip


def classical(model: str, pairs: Pairs) -> dict[str, np.ndarray]:
    """The cosines of plain embeddings, by pooling."""
    module = CausalTransformer(model, model_kwargs={"dtype": "float32"})
    pipeline = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), ("mean", "lasttoken"))])
    texts = pairs.texts()
    rows = {text: index for index, text in enumerate(texts)}
    halves = pipeline.encode(texts, convert_to_tensor=True).cpu().chunk(2, dim=1)
    first, second = ([rows[text] for text in side] for side in (pairs.first, pairs.second))
    return {
        f"classical cosine, {name}": pairwise_cos_sim(half[first], half[second]).numpy()
        for name, half in zip(("mean", "last"), halves, strict=True)
    }


def run(
    name: str, seed: int, options: argparse.Namespace, cache: StatesCache, sets: dict[str, Pairs]
) -> dict[str, Any]:
    """Train one stage with one seed: its similarities of dev and test, and what two identical sentences score."""
    _, changes, head = STAGES[name]
    data, out = options.data, options.out / f"{name}-{seed}"
    pretrains = changes.get("stage", "autoencoder") == "autoencoder"
    generic = data / f"generic_sentences_{options.language}.txt"
    settings = FreezeTraining(
        model=options.model,
        pairs=str(data / f"stsb_{options.language}_train.tsv"),
        sentences=str(generic) if pretrains and generic.is_file() else None,
        cache=str(cache.directory.parent),
        dtype="float32",
        seed=seed,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        checkpoint_steps=100_000,
        **changes,
    )
    with mock.patch.object(layerwise_autoencoder, "SimilarityHead", head):
        trained = ModelOnStates.of(train_freeze(settings, out, progress=False)[-1], cache)
    found = {
        split: PairScoreEvaluator(pairs.first, pairs.second, pairs.scores, batch_size=256).similarities(trained)
        for split, pairs in sets.items()
    }
    embeddings = trained.encode(sets["test"].first, batch_size=256)
    return {**found, "identical": cast(LayerwiseAutoencoder, trained[-1]).score_pairs(embeddings, embeddings).numpy()}


def correlations(values: np.ndarray, labels: list[float]) -> tuple[float, float]:
    """Pearson's and Spearman's, x 100."""
    pearson, spearman = (
        100 * float(statistic({"": values}, labels).values()[0])
        for statistic in (bootstrap.pearson, bootstrap.spearman)
    )
    return pearson, spearman


def interval(values: np.ndarray, labels: list[float]) -> str:
    """The 95% bootstrap intervals of Pearson's and Spearman's, x 100."""
    shown = []
    for statistic in (bootstrap.pearson, bootstrap.spearman):
        (found,) = bootstrap.estimate(statistic({"": values}, labels)).values()
        shown.append(f"[{100 * found.low:.1f}, {100 * found.high:.1f}]")
    return " ".join(shown)


def spread(values: list[float]) -> str:
    """Mean, and the lowest and highest of several seeds."""
    return f"{np.mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def row(name: str, runs: list[dict[str, Any]], sets: dict[str, Pairs]) -> str:
    dev = [correlations(one["dev"]["score"], sets["dev"].scores)[0] for one in runs]
    test = [correlations(one["test"]["score"], sets["test"].scores) for one in runs]
    cosine = [correlations(one["test"]["cosine"], sets["test"].scores)[1] for one in runs]
    identical = np.concatenate([one["identical"] for one in runs])
    cells = [
        name, STAGES[name][0], spread(dev), spread([pearson for pearson, _ in test]),
        spread([spearman for _, spearman in test]), interval(runs[0]["test"]["score"], sets["test"].scores),
        spread(cosine), f"{identical.min():.2f} to {identical.max():.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| | paper: Pearson, Spearman | dev Pearson | test Pearson | test Spearman | 95% intervals, first seed | "
    "Spearman of the embeddings' cosine | identical sentences score |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, required=True, help="directory for states, models and tables")
    parser.add_argument("--language", choices=["en", "zh"], default="en")
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    sets = {split: options.data / f"stsb_{options.language}_{split}.tsv" for split in ("train", "dev", "test")}
    if missing := [str(path) for path in sets.values() if not path.is_file()]:
        parser.error(f"{', '.join(missing)}: there is no such file.")
    logging.disable_progress_bar()
    pairs = {split: read_pairs(path) for split, path in sets.items() if split != "train"}
    options.out = options.out / options.language
    start = time.process_time()
    cache = StatesCache(options.out / "states", LayerStates(options.model, model_kwargs={"dtype": "float32"}))
    cache.add([text for split in pairs.values() for text in split.texts()])
    lines = [HEADER]
    plain = {split: classical(options.model, own) for split, own in pairs.items()}
    for name, values in plain["test"].items():
        dev, _ = correlations(plain["dev"][name], pairs["dev"].scores)
        pearson, spearman = correlations(values, pairs["test"].scores)
        shown = interval(values, pairs["test"].scores)
        lines.append(f"| {name} | | {dev:.1f} | {pearson:.1f} | {spearman:.1f} | {shown} | {spearman:.1f} | 1.00 |")
    print("\n".join(lines), flush=True)
    scores = {}
    for name in options.stages:
        runs = []
        for seed in options.seeds:
            runs.append(run(name, seed, options, cache, pairs))
            found = [correlations(runs[-1][split]["score"], own.scores) for split, own in pairs.items()]
            print(f"{name}, seed {seed}: Pearson and Spearman of {list(pairs)}: {found}", flush=True)
        scores[name] = {split: [correlations(one[split]["score"], own.scores) for one in runs]
                        for split, own in pairs.items()}  # fmt: skip
        lines.append(row(name, runs, pairs))
        print(f"{lines[-1]}   {time.process_time() - start:.0f} s of processor time", flush=True)
    (options.out / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")
    (options.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
