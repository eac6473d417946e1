"""A real model in other precisions: how fast it is, and whether its scores stay what they were.

    python benchmarks/precision.py --data DIR                      # SmolLM2-135M, 500 pairs of STS-B; half an hour
    python benchmarks/precision.py --data DIR --forms float32 bfloat16 --pairs 100
    python benchmarks/precision.py --data DIR --forms bfloat16 --compile    # torch.compile beside none

Texts go through ``SentenceTransformer.encode`` in parts. All recipes in all forms take turns on each part, so that what
is scored is what was timed; a form's recipes share its weights. Time is the processor's, because machines are shared.
``DIR`` has STS-B under the name that ``real/sets.py`` gives it. Rows are added to results/cost.csv; ``make tables``
shows them. The forms of torchao need it installed (``pip install torchao``), compiling a C++ compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim
from torch import nn

from real.models import MODELS
from real.sets import Sets
from records import Record
from runs import add_costs, contender, interleaved, options, parser, ratio
from st_reba import CausalTransformer
from st_reba.data.tables import Pairs
from st_reba.evaluation.bootstrap import difference, spearman
from st_reba.modules import CausalModule

BATCH = 32
AS_IT_IS, COMPILED = "float32", ", compiled"
PAIRS = "STS-B en test"
SPEED, SCORE, CHANGE = "tokens of text/s", "Spearman x 100", "change of Spearman x 100"
RECIPES = ("Classical, mean", "PromptEOL, last", "Echo-2, mean", "ReBA-2, mean")
#: A recipe in a form.
Key = tuple[str, str]
#: The seconds of a part of the pairs, where its pairs stand, and their cosines.
Part = tuple[float, range, NDArray[np.float32]]


def quantized_by_torch(model: nn.Module) -> None:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)


def quantized_by_torchao(name: str, model: nn.Module) -> None:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, name)())


class Form(NamedTuple):
    """A backbone's precision, what is done to it, and whether recipes share its weights: torchao's cannot move."""

    dtype: str
    prepare: Callable[[nn.Module], object] = lambda model: None
    shared: bool = True


FORMS: dict[str, Form] = {
    AS_IT_IS: Form("float32"),
    "bfloat16": Form("bfloat16"),
    "int8 by torch, dynamic": Form("float32", quantized_by_torch),
    "int8 by torchao, dynamic": Form(
        "bfloat16", partial(quantized_by_torchao, "Int8DynamicActivationInt8WeightConfig"), shared=False
    ),
    "int8 by torchao, weights alone": Form(
        "bfloat16", partial(quantized_by_torchao, "Int8WeightOnlyConfig"), shared=False
    ),
}


def load(path: str, form: Form, recipes: Sequence[str], compiled: bool) -> dict[str, SentenceTransformer]:
    """Recipes in one form."""
    models: dict[str, SentenceTransformer] = {}
    for name in recipes:
        if not (form.shared and models):
            backbone = CausalTransformer(path, model_kwargs={"dtype": form.dtype})
        models[name] = contender(name, backbone)
        if not (form.shared and len(models) > 1):
            form.prepare(cast(CausalModule, models[name][0]).model)
    for model in models.values() if compiled else ():
        # When all views are made: what is compiled has none.
        module = cast(CausalModule, model[0])
        module.model = cast(Any, torch.compile(module.model, dynamic=True))
    return models


def encoding(model: SentenceTransformer, pairs: Pairs, parts: int) -> Callable[[int], Part]:
    """Embed one part of the pairs: sorted, so that each contender's batches hold texts of about one length."""

    def measured(first: int) -> Part:
        places = range(first, len(pairs), parts)
        own = pairs.part(places)
        start = time.process_time()
        both = model.encode([*own.first, *own.second], batch_size=BATCH, convert_to_tensor=True)
        seconds = time.process_time() - start
        left, right = both.float().chunk(2)
        return seconds, places, pairwise_cos_sim(left, right).numpy()

    return measured


def rows(found: Mapping[Key, Sequence[Part]], pairs: Pairs, tokens: int, how: str) -> Iterator[Record]:
    """Speed, the time beside that of float32, the score, and how far it is from that of float32; what is compiled is
    held against what is not."""
    forms = list(dict.fromkeys(form for form, _ in found))
    for recipe in dict.fromkeys(recipe for _, recipe in found):
        seconds = {form: [part[0] for part in found[form, recipe]] for form in forms}
        cosines = {form: np.empty(len(pairs), dtype=np.float32) for form in forms}
        for form in forms:
            for _, places, own in found[form, recipe]:
                cosines[form][places] = own
        statistic = spearman(cosines, pairs.scores)
        scores = dict(zip(forms, (100 * statistic.scores).tolist(), strict=True))
        for form in forms:
            unit = form.removesuffix(COMPILED) if form.endswith(COMPILED) else AS_IT_IS
            row: Record = {"contender": recipe, "precision": form, "how": how, "unit": ""}
            yield {**row, "quantity": SPEED, "value": round(tokens / sum(seconds[form]))}
            yield {**row, "quantity": SCORE, "value": round(scores[form], 2)}
            if form != unit and unit in scores:
                yield {**row, "quantity": "time", "unit": unit, **ratio(seconds[form], seconds[unit])}
                low, high = (round(100 * end, 2) for end in difference(statistic, form, unit))
                change = round(scores[form] - scores[unit], 2)
                yield {**row, "quantity": CHANGE, "unit": unit, "value": change, "low": low, "high": high}


def main(arguments: Sequence[str] | None = None) -> None:
    own = next(iter(MODELS.values()))
    made = parser(__doc__, threads=1)
    made.add_argument("--out", type=Path, default=Path("build/real"), help="directory of the models")
    made.add_argument("--model", help=f"a directory or a GGUF file; {own.name} if left out")
    made.add_argument("--name", default=own.name, help="what tables call it")
    made.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    made.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    made.add_argument("--compile", action="store_true", help="hold each form, compiled, against itself")
    made.add_argument("--pairs", type=int, default=500, help="evenly drawn")
    made.add_argument("--parts", type=int, default=5)
    given = options(made, arguments)
    path = given.model or str(own.located(given.out / "models"))
    every = Sets(given.data).pairs("en", "test")
    pairs = every.part(sorted({int(place) for place in np.linspace(0, len(every) - 1, min(given.pairs, len(every)))}))
    how = f"{len(pairs)} pairs of {PAIRS}, times of the processor, {given.parts} parts"
    models: dict[Key, SentenceTransformer] = {}
    found: list[Record] = []
    for form in given.forms:
        for compiled in (False, True) if given.compile else (False,):
            for recipe, model in load(path, FORMS[form], given.recipes, compiled).items():
                start = time.process_time()
                # Of two lengths and two batch sizes: what is compiled for one is compiled for all then.
                model.encode(pairs.first[:1] + sorted(pairs.second, key=len)[-4:], batch_size=4)
                key = form + COMPILED * compiled, recipe
                models[key] = model
                found.append({
                    "quantity": "seconds for the first texts", "contender": recipe, "precision": key[0], "unit": "",
                    "value": round(time.process_time() - start, 1), "how": how,
                })  # fmt: skip
    counted = cast(CausalModule, next(iter(models.values()))[0]).token_ids([*pairs.first, *pairs.second])
    measured = interleaved(
        {key: encoding(model, pairs, given.parts) for key, model in models.items()}, range(given.parts)
    )
    found = [*rows(measured, pairs, sum(map(len, counted)), how), *(found if given.compile else [])]
    add_costs(found, given, table="compiled" if given.compile else "precision", model=given.name, batch=BATCH)


if __name__ == "__main__":
    main()
