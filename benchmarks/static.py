"""Static models of a language model beside a recipe that runs it: the score, the speed and the size of each.

    python benchmarks/static.py --data DIR

Writes ``benchmarks/results/static.csv``. Weights and whitening are fitted on texts of STS-B's training part; the layer
was chosen on its development part, of which there are rows, too. Speed is in texts a second of processor time of one
thread, so that other work on the machine counts little; the median of several rounds over all texts, after a first one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from polars import col as c
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from blocks import Results
from real.cosines import pair_cosines
from real.models import MODELS
from real.texts import Sets
from st_reba.evaluation import bootstrap
from st_reba.export import static_model, token_vectors, usual_layer
from st_reba.modules import CausalTransformer
from st_reba.recipes import find

#: The best recipe of this model on the development part.
RECIPE = "early-late"
DIMENSIONS = (None, 256, 128)
#: How many texts the language model reads for its speed: its scores are in scores.csv already.
SOME = 128


def score(model: SentenceTransformer, sets: Sets, part: str) -> records.Record:
    """What a model reaches on the pairs of a part."""
    labelled = sets.pairs("en", part)
    cosines = pair_cosines(model, labelled)
    [sure] = bootstrap.estimate(bootstrap.spearman({"": cosines}, labelled.scores)).values()
    return {"score": sure.value, "low": sure.low, "high": sure.high}


def speed(model: SentenceTransformer, texts: Sequence[str], rounds: int) -> float:
    """Texts a second of processor time."""
    took = []
    for _ in range(1 + rounds):
        start = time.process_time()
        model.encode(list(texts), show_progress_bar=False)
        took.append(time.process_time() - start)
    return len(texts) / statistics.median(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the public sets")
    parser.add_argument("--out", type=Path, default=Path("build/real"), help="directory of models")
    parser.add_argument("--path", type=Path, help="the language model, where it is there already")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="bfloat16", help="of the language model"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    chosen = MODELS["SmolLM2-135M-Instruct"]
    path = str(options.path or chosen.located(options.out / "models"))
    sets = Sets(options.data)
    fit = sets.fit_texts("en")
    shared = {
        "model": chosen.name, "date": date.today().isoformat(), "machine": records.machine("cpu", 1),
        "versions": records.versions(),
    }  # fmt: skip

    texts = sets.pairs("en", "test").texts()

    def keep(model: SentenceTransformer, part: str, **found: records.Value) -> None:
        size = sum(weight.nbytes for weight in model.state_dict().values()) / 2**20
        row: records.Record = {**shared, "set": f"STS-B en {part}", "size": size, **found}
        print(row, flush=True)
        records.rewrite("static", [row])

    module = CausalTransformer(path, model_kwargs={"dtype": options.precision})
    for layer in (0, usual_layer(module)):
        vectors = token_vectors(module, layer)
        for dimension in DIMENSIONS:
            static = static_model(module, fit, layer=layer, dimension=dimension, vectors=vectors)
            width = static.get_embedding_dimension()
            named: records.Record = {
                "recipe": "static", "layer": layer, "dimensions": width, "precision": options.precision,
            }  # fmt: skip
            keep(static, "dev", **named, **score(static, sets, "dev"))
            keep(static, "test", **named, **score(static, sets, "test"), speed=speed(static, texts, rounds=5))
    recipe = replace(find(RECIPE), fit_texts=tuple(fit))
    assert recipe.part is not None, "the best recipe has a filter"
    known = Results().of(
        "scores", c.model == chosen.name, c.set == "STS-B en test", c.recipe == recipe.method, c.layer.is_null(),
        c.pooling == recipe.pooling, c.filter == recipe.part.name, c.weights == "trained",
        c.precision == options.precision,
    )  # fmt: skip
    if known.is_empty():
        raise records.RecordsError(f"scores.csv has no row of {recipe.result}: run benchmarks/real_models.py first.")
    known_score = known.select("score", "low", "high").row(-1, named=True)
    whole = recipe.model(module)
    keep(
        whole, "test", recipe=recipe.name, layer=None, dimensions=whole.get_embedding_dimension(),
        precision=options.precision, **known_score,
        speed=speed(whole, texts[:SOME], rounds=1),
    )  # fmt: skip


if __name__ == "__main__":
    main()
