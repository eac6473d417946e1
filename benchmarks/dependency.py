"""How much a sentence's tokens share with its last one, layer by layer, and with a bidirectional last layer.

    python benchmarks/dependency.py --data DIR

The dependency analysis of the BeLLM paper (:class:`st_reba.evaluation.DependencyEvaluator`) on sentences of STS-B's
test part, in each language that a model reads. Rows of ``benchmarks/results/dependency.csv``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from real.models import MODELS
from real.texts import Sets
from real_models import Measured
from st_reba.evaluation import DependencyEvaluator
from st_reba.modules import CausalModule, CausalTransformer

#: Of the test part, the first ones.
SENTENCES = 500
QUARTILES = {"low": "first_quartile", "median": "median", "high": "third_quartile"}


def readings(backbone: CausalModule) -> Iterator[tuple[str, CausalModule, Literal["last", "all"]]]:
    """A name, the module, and which layers are read."""
    yield "Classical", CausalTransformer(backbone), "all"
    yield "Bidirectional", CausalTransformer(backbone, bidirectional_layers=1), "last"


def rows(measured: Measured, language: str, sentences: list[str]) -> Iterator[dict[str, Any]]:
    shared = {
        "model": measured.model.name, "weights": measured.weights, "precision": measured.precision,
        "set": f"STS-B {language} test, {len(sentences)} sentences", "date": time.strftime("%Y-%m-%d"),
        "versions": records.versions(),
    }  # fmt: skip
    for name, module, layers in readings(measured.backbone):
        evaluator = DependencyEvaluator(sentences, layers=layers)
        found = evaluator(SentenceTransformer(modules=[module], device=str(module.model.device)))
        for layer in range(len(evaluator.correlations)):
            prefix = "" if layers == "last" else f"layer_{layer}_"
            last = layer == len(evaluator.correlations) - 1
            yield {
                **shared, "recipe": name, "layer": None if last else layer,
                **{column: found[f"{prefix}{metric}"] for column, metric in QUARTILES.items()},
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--out", type=Path, default=Path("build/real"), help="directory of the models")
    parser.add_argument("--models", nargs="+", default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    logging.disable_progress_bar()
    for model in map(MODELS.__getitem__, options.models):
        for random in (False, True):
            measured = Measured(model, model.located(options.out / "models"), options.precision, random)
            for language in model.languages:
                sentences = Sets(options.data).pairs(language, "test").texts()[:SENTENCES]
                records.rewrite("dependency", rows(measured, language, sentences))


if __name__ == "__main__":
    main()
