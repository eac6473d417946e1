"""Static models of a language model beside a recipe that runs it: the score, the speed and the size of each.

    python benchmarks/static.py --data DIR

Writes ``benchmarks/results/static.csv``. Weights and whitening are fitted on texts of STS-B's training part; the layer
was chosen on its development part, of which there are rows, too. Speed is in texts a second of processor time of one
thread, so that other work on the machine counts little; the median of several rounds over all texts, after a first one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sentence_transformers import SentenceTransformer

import records
from real.cosines import beside, pair_cosines
from real.models import MODELS
from real.sets import Sets
from runs import options, parser, timed
from st_reba.evaluation import bootstrap
from st_reba.export import static_model, token_vectors, usual_layer
from st_reba.modules import CausalTransformer
from st_reba.recipes import find

#: The best recipe of this model on the development part.
RECIPE = "early-late"
DIMENSIONS = (None, 256, 128)
#: How many texts the language model reads for its speed: its scores are in scores.csv already.
SOME = 128


def speed(model: SentenceTransformer, texts: Sequence[str], rounds: int) -> float:
    """Texts a second of processor time; the first round warms up."""
    encode = timed(partial(model.encode, show_progress_bar=False))
    return len(texts) / statistics.median([encode(list(texts)) for _ in range(1 + rounds)][1:])


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/real", threads=1)
    made.add_argument("--path", type=Path, help="the language model, where it is there already")
    given = options(made, arguments)
    chosen, sets = MODELS["SmolLM2-135M-Instruct"], Sets(given.data)
    path, fit = str(given.path or chosen.located(given.out / "models")), sets.fit_texts("en")
    texts = sets.pairs("en", "test").texts()

    def keep(model: SentenceTransformer, part: str, **found: records.Value) -> None:
        row: records.Record = {
            "model": chosen.name, "set": f"STS-B en {part}", "precision": given.precision,
            "size": sum(weight.nbytes for weight in model.state_dict().values()) / 2**20,
            "dimensions": model.get_embedding_dimension(), "machine": records.machine("cpu", given.threads),
            **records.today(), **found,
        }  # fmt: skip
        print(row, flush=True)
        records.rewrite("static", [row], given.results)

    module = CausalTransformer(path, model_kwargs={"dtype": given.precision})
    for layer in (0, usual_layer(module)):
        vectors = token_vectors(module, layer)
        for dimension in DIMENSIONS:
            static = static_model(module, fit, layer=layer, dimension=dimension, vectors=vectors)
            for part in ("dev", "test"):
                pairs = sets.pairs("en", part)
                scores = beside(bootstrap.spearman({"": pair_cosines(static, pairs)}, pairs.scores), [0])
                took = {"speed": speed(static, texts, rounds=5)} if part == "test" else {}
                keep(static, part, recipe="static", layer=layer, **scores, **took)
    recipe = replace(find(RECIPE), fit_texts=tuple(fit))
    assert recipe.part is not None, "the best recipe has a filter"
    known = records.there(
        "scores", records.RESULTS, model=chosen.name, set="STS-B en test", recipe=recipe.method, layer=None,
        pooling=recipe.pooling, filter=recipe.part.name, weights="trained", precision=given.precision,
    )  # fmt: skip
    if not known:
        raise records.RecordsError(f"scores.csv has no row of {recipe.result}: run benchmarks/real_models.py first.")
    scores = {name: known[-1][name] for name in ("score", "low", "high")}
    whole = recipe.model(module)
    keep(whole, "test", recipe=recipe.name, layer=None, **scores, speed=speed(whole, texts[:SOME], rounds=1))


if __name__ == "__main__":
    main()
