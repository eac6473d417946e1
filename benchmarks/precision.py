"""A real model in other precisions: its speed, and how far its scores change.

    python benchmarks/precision.py --data DIR                      # SmolLM2-135M, 500 pairs of STS-B; half an hour
    python benchmarks/precision.py --data DIR --forms float32 bfloat16 --pairs 100

Texts go through ``SentenceTransformer.encode`` in parts. All recipes in all forms take turns on each part, so that
time and score are of the same run; a form's recipes share its weights. Time is the processor's, because machines are
shared. ``DIR`` has STS-B under the name that ``real/sets.py`` gives it. Rows are added to results/cost.csv. The forms
of torchao need it installed (``pip install torchao``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim
from torch import nn

from real.cosines import beside
from real.models import MODELS
from real.sets import Sets
from records import Record
from runs import add_costs, contender, interleaved, options, parser, ratio
from st_reba import CausalTransformer
from st_reba.data.tables import Pairs
from st_reba.evaluation.bootstrap import spearman
from st_reba.modules import CausalModule
from st_reba.reading.words import tokens_of

BATCH = 32
AS_IT_IS = "float32"
RECIPES = ("Classical, mean", "PromptEOL, last", "Echo-2, mean", "ReBA-2, mean")
#: A form, and a recipe in it.
Key = tuple[str, str]
#: The seconds of a part of the pairs, the places of its pairs, and their cosines.
Part = tuple[float, range, NDArray[np.float32]]


def quantized_by_torch(model: nn.Module) -> None:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)


def quantized_by_torchao(name: str, model: nn.Module) -> None:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, name)())


class Form(NamedTuple):
    """A precision, a change of the backbone, and whether recipes share its weights: torchao's cannot move."""

    dtype: str
    prepare: Callable[[nn.Module], object] = lambda model: None
    shared: bool = True


DYNAMIC = partial(quantized_by_torchao, "Int8DynamicActivationInt8WeightConfig")
FORMS: dict[str, Form] = {
    AS_IT_IS: Form("float32"),
    "bfloat16": Form("bfloat16"),
    "int8 by torch, dynamic": Form("float32", quantized_by_torch),
    "int8 by torchao, dynamic": Form("bfloat16", DYNAMIC, shared=False),
    "int8 by torchao, weights alone": Form("bfloat16", partial(quantized_by_torchao, "Int8WeightOnlyConfig"), False),
}


def load(path: str, form: Form) -> dict[str, SentenceTransformer]:
    """Return recipes in one form."""
    models: dict[str, SentenceTransformer] = {}
    for name in RECIPES:
        if not (form.shared and models):
            backbone = CausalTransformer(path, model_kwargs={"dtype": form.dtype})
        models[name] = contender(name, backbone)
        if not (form.shared and len(models) > 1):
            form.prepare(cast(CausalModule, models[name][0]).model)
    return models


def encoding(model: SentenceTransformer, pairs: Pairs, parts: int) -> Callable[[int], Part]:
    """Embed one part of the pairs."""

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
    """Yield the speed, the time over that of float32, the score, and its change."""
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
            row: Record = {"contender": recipe, "precision": form, "how": how, "unit": ""}
            yield {**row, "quantity": "tokens of text/s", "value": round(tokens / sum(seconds[form]))}
            yield {**row, "quantity": "Spearman x 100", "value": round(scores[form], 2)}
            if form != AS_IT_IS and AS_IT_IS in scores:
                row["unit"] = AS_IT_IS
                yield {**row, "quantity": "time", **ratio(seconds[form], seconds[AS_IT_IS])}
                ours, theirs = ([forms.index(each)] for each in (form, AS_IT_IS))
                change = beside(statistic, ours, theirs, ("value", "low", "high"))
                numbers = {name: round(100 * cast(float, number), 2) for name, number in change.items()}
                yield {**row, "quantity": "change of Spearman x 100", **numbers}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, threads=1)
    made.add_argument("--out", type=Path, default=Path("build/real"), help="directory of the models")
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    made.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    made.add_argument("--pairs", type=int, default=500, help="drawn from STS-B's test part")
    made.add_argument("--parts", type=int, default=5)
    given = options(made, arguments)
    pairs = Sets(given.data, given.pairs).pairs("en", "test")
    path = str(MODELS[given.model].located(given.out / "models"))
    how = f"{len(pairs)} pairs of STS-B en test, times of the processor, {given.parts} parts"
    models = {(form, name): model for form in given.forms for name, model in load(path, FORMS[form]).items()}
    for model in models.values():
        model.encode(pairs.first[:2])
    contenders = {key: encoding(model, pairs, given.parts) for key, model in models.items()}
    module = cast(CausalModule, next(iter(models.values()))[0])
    tokens = sum(len(own.ids) for own in tokens_of(module, [*pairs.first, *pairs.second]))
    found = rows(interleaved(contenders, range(given.parts)), pairs, tokens, how)
    add_costs(found, given, table="precision", model=given.model, batch=BATCH)


if __name__ == "__main__":
    main()
