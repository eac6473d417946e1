"""A real model in other precisions: how fast it is, and whether its scores stay what they were.

    python benchmarks/precision.py --data DIR                      # SmolLM2-135M, 500 pairs of STS-B; half an hour
    python benchmarks/precision.py --data DIR --forms float32 bfloat16 --pairs 100
    python benchmarks/precision.py --data DIR --forms bfloat16 --compile    # torch.compile beside none

Texts go through ``SentenceTransformer.encode`` in parts. All recipes in all forms take turns on each part, so that what
is scored is what was timed; a form's recipes share its weights. Time is the processor's, because machines are shared.
``DIR`` has STS-B under the name that ``real/texts.py`` gives it. Rows are added to results/cost.csv; ``make tables``
shows them. The forms of torchao need it installed (``pip install torchao``), compiling a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import pairwise_cos_sim
from torch import nn

from given import for_one_model
from real.models import MODELS
from real.texts import Sets
from records import Value, append, machine, versions
from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.data.tables import Pairs
from st_reba.evaluation.bootstrap import difference, spearman
from st_reba.modules import CausalModule

BATCH = 32
AS_IT_IS = "float32"
PAIRS = "STS-B en test"
SPEED, SCORE, CHANGE = "tokens of text/s", "Spearman x 100", "change of Spearman x 100"

Prepare = Callable[[nn.Module], object]


def quantized_by_torch(model: nn.Module) -> None:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)


def quantized_by_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())


def weights_quantized_by_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


@dataclass(frozen=True)
class Form:
    """What a backbone is made into.

    Attributes:
        dtype: What it is loaded in.
        prepare: What is done to it then.
        shared: Whether recipes may share its weights: torchao's cannot be moved while several hold them.
    """

    dtype: str
    prepare: Prepare = lambda model: None
    shared: bool = True


FORMS: dict[str, Form] = {
    AS_IT_IS: Form("float32"),
    "bfloat16": Form("bfloat16"),
    "int8 by torch, dynamic": Form("float32", quantized_by_torch),
    "int8 by torchao, dynamic": Form("bfloat16", quantized_by_torchao, shared=False),
    "int8 by torchao, weights alone": Form("bfloat16", weights_quantized_by_torchao, shared=False),
}
COMPILED = ", compiled"

#: (module, settings, pooling).
RECIPES: dict[str, tuple[Callable[..., CausalModule], dict[str, Any], str]] = {
    "Classical, mean": (CausalTransformer, {}, "mean"),
    "PromptEOL, last": (CausalTransformer, {"template": "prompteol"}, "lasttoken"),
    "Echo-2, mean": (EchoModule, {}, "mean"),
    "ReBA-2, mean": (ReBAModule, {}, "mean"),
}


def load(path: str, form: Form, recipes: Sequence[str], compiled: bool = False) -> dict[str, SentenceTransformer]:
    """Recipes in one form."""
    modules: dict[str, CausalModule] = {}
    for name in recipes:
        kind, settings, _ = RECIPES[name]
        if form.shared and modules:
            modules[name] = kind(next(iter(modules.values())), **settings)
        else:
            modules[name] = kind(path, model_kwargs={"dtype": form.dtype}, **settings)
            form.prepare(modules[name].model)
    loaded = {}
    for name, module in modules.items():
        # When all views are made: what is compiled has none.
        if compiled:
            module.model = cast(Any, torch.compile(module.model, dynamic=True))
        pooling = Pooling(module.get_embedding_dimension(), RECIPES[name][2])
        loaded[name] = SentenceTransformer(modules=[module, pooling], device="cpu")
    return loaded


def unit(form: str) -> str:
    """What a form is held against: compiled against not, and any other against float32."""
    return form.removesuffix(COMPILED) if form.endswith(COMPILED) else AS_IT_IS


@dataclass
class Measured:
    """What came of one recipe in one form.

    Attributes:
        seconds: Of the processor, of each part.
        cosines: Of each pair, in the pairs' order.
    """

    seconds: list[float]
    cosines: NDArray[np.float32]


def measure(
    models: Mapping[tuple[str, str], SentenceTransformer], pairs: Pairs, parts: int
) -> dict[tuple[str, str], Measured]:
    """All contenders in turn on each part of the pairs."""
    found = {key: Measured([], np.full(len(pairs), np.nan, dtype=np.float32)) for key in models}
    for first in range(parts):
        # Sorted, so that each contender's batches hold texts of about one length.
        places = range(first, len(pairs), parts)
        own = pairs.part(places)
        for key, model in models.items():
            start = time.process_time()
            both = model.encode([*own.first, *own.second], batch_size=BATCH, convert_to_tensor=True)
            found[key].seconds.append(time.process_time() - start)
            left, right = both.float().chunk(2)
            found[key].cosines[places] = pairwise_cos_sim(left, right).numpy()
    return found


def rows(
    found: Mapping[tuple[str, str], Measured], labels: Sequence[float], tokens: int, how: str
) -> list[dict[str, Value]]:
    """Speed, the time beside that of float32, the score, and how far it is from that of float32."""
    made: list[dict[str, Value]] = []
    forms = list(dict.fromkeys(form for form, _ in found))
    for recipe in dict.fromkeys(recipe for _, recipe in found):
        own = {form: found[form, recipe] for form in forms}
        statistic = spearman({form: own[form].cosines for form in forms}, labels)
        scores = dict(zip(forms, statistic.scores, strict=True))
        for form in forms:
            shared = {"contender": recipe, "precision": form, "how": how}
            spent, beside = sum(own[form].seconds), unit(form)
            made.append({**shared, "quantity": SPEED, "unit": "", "value": round(tokens / spent)})
            made.append({**shared, "quantity": SCORE, "unit": "", "value": round(100 * scores[form], 2)})
            if form == beside or beside not in own:
                continue
            ratios = [a / b for a, b in zip(own[form].seconds, own[beside].seconds, strict=True)]
            made.append({**shared, "quantity": "time", "unit": beside,
                         "value": round(spent / sum(own[beside].seconds), 4),
                         "low": round(min(ratios), 4), "high": round(max(ratios), 4)})  # fmt: skip
            low, high = difference(statistic, form, beside)
            made.append({**shared, "quantity": CHANGE, "unit": beside,
                         "value": round(100 * (scores[form] - scores[beside]), 2),
                         "low": round(100 * low, 2), "high": round(100 * high, 2)})  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--out", type=Path, default=Path("build/real"), help="directory of the models")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--compile", action="store_true", help="hold each form, compiled, against itself")
    parser.add_argument("--pairs", type=int, default=500, help="evenly drawn")
    parser.add_argument("--parts", type=int, default=5)
    options = for_one_model(parser, arguments, "a directory or a GGUF file; SmolLM2-135M-Instruct if left out")
    own = next(iter(MODELS.values()))
    path, name = options.model or str(own.located(options.out / "models")), options.name or own.name
    every = Sets(options.data).pairs("en", "test")
    pairs = every.part(sorted({int(index) for index in np.linspace(0, len(every) - 1, min(options.pairs, len(every)))}))
    models, spent = {}, {}
    for form, compiled in [
        (form, compiled) for form in options.forms for compiled in (False, True)[: 1 + options.compile]
    ]:
        for recipe, model in load(path, FORMS[form], options.recipes, compiled).items():
            start = time.process_time()
            # Of two lengths and two batch sizes: what is compiled for one is compiled for all then.
            model.encode(pairs.first[:1] + sorted(pairs.second, key=len)[-4:], batch_size=4)
            key = form + COMPILED * compiled, recipe
            models[key], spent[key] = model, time.process_time() - start
            print(f"{', '.join(key)}: the first texts took {spent[key]:.0f} s", flush=True)
    first = cast(CausalModule, models[options.forms[0], options.recipes[0]][0])
    counted = first.token_ids([*pairs.first, *pairs.second])
    how = f"{len(pairs)} pairs of {PAIRS}, times of the processor, {options.parts} parts"
    found = rows(measure(models, pairs, options.parts), pairs.scores, sum(map(len, counted)), how)
    found += [
        {"quantity": "seconds for the first texts", "contender": recipe, "precision": form, "unit": "",
         "value": round(seconds, 1), "how": how}
        for (form, recipe), seconds in spent.items() if options.compile
    ]  # fmt: skip
    where = {
        "table": "compiled" if options.compile else "precision", "model": name, "batch": BATCH,
        "machine": machine("cpu", options.threads), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    append("cost", [{**row, **where} for row in found], options.results)
    for row in found:
        print(f"{row['precision']}: {row['contender']}: {row['quantity']}: {row['value']}", flush=True)


if __name__ == "__main__":
    main()
