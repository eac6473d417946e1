"""How much a sentence's tokens share with its last one, layer by layer, and with a bidirectional last layer.

    python benchmarks/dependency.py --data DIR

The dependency analysis of the BeLLM paper (:class:`st_reba.evaluation.DependencyEvaluator`) on sentences of STS-B's
test part, in each language that a model reads. Rows of ``benchmarks/results/dependency.csv``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sentence_transformers import SentenceTransformer

import records
from real.models import MODELS
from real.texts import Sets
from real_models import Measured
from runs import options, parser
from st_reba.evaluation import DependencyEvaluator
from st_reba.modules import CausalTransformer

#: Of the test part, the first ones.
SENTENCES = 500
QUARTILES = {"low": "first_quartile", "median": "median", "high": "third_quartile"}
#: By recipe, how many layers are bidirectional, and which layers are read.
READINGS: dict[str, tuple[int, Literal["last", "all"]]] = {"Classical": (0, "all"), "Bidirectional": (1, "last")}


def rows(measured: Measured, language: str, sentences: list[str]) -> Iterator[records.Record]:
    for name, (bidirectional, layers) in READINGS.items():
        module = CausalTransformer(measured.backbone, bidirectional_layers=bidirectional)
        evaluator = DependencyEvaluator(sentences, layers=layers)
        found = evaluator(SentenceTransformer(modules=[module], device=str(module.model.device)))
        depth = len(evaluator.correlations)
        for layer in range(depth):
            prefix = "" if layers == "last" else f"layer_{layer}_"
            yield {
                "model": measured.model.name, "weights": measured.weights, "precision": measured.precision,
                "set": f"STS-B {language} test, {len(sentences)} sentences", "recipe": name,
                "layer": None if layer == depth - 1 else layer, **records.today(),
                **{column: found[f"{prefix}{metric}"] for column, metric in QUARTILES.items()},
            }  # fmt: skip


def main() -> None:
    made = parser(__doc__, out="build/real")
    made.add_argument("--models", nargs="+", default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    given = options(made)
    for model in map(MODELS.__getitem__, given.models):
        for random in (False, True):
            measured = Measured(model, model.located(given.out / "models"), given.precision, random)
            for language in model.languages:
                sentences = Sets(given.data).pairs(language, "test").texts()[:SENTENCES]
                records.rewrite("dependency", rows(measured, language, sentences), given.results)


if __name__ == "__main__":
    main()
