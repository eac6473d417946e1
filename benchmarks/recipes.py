"""What every recipe costs on a real model, beside the classical embedding of the same texts.

    python benchmarks/recipes.py --model DIR --name SmolLM2-135M-Instruct --language en

Every recipe that ``st-reba compare --recipes all`` shows, under each pooling of its own and behind nothing, takes turns
on the same batches of the package's sentences, each alone, as a user would run it. The time is the processor's. Rows
are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import cast

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers.utils import logging

from records import RESULTS, Value, append, machine, versions
from st_reba import CausalTransformer
from st_reba.compare.cost import timed_batches
from st_reba.data.demo import Language, demo_sentences
from st_reba.recipes import default_recipes

UNIT = "Classical, mean"
ROUNDS = 3


def measured(path: str, dtype: str, language: str, batch_size: int, repetitions: int) -> list[dict[str, Value]]:
    """Each recipe's time over the classical embedding's."""
    backbone = CausalTransformer(path, model_kwargs={"dtype": dtype})
    models = {}
    for recipe in default_recipes(repetitions):
        if recipe.part != recipe.row.around:
            continue
        try:
            models[f"{recipe.method}, {recipe.pooling}"] = recipe.model(backbone, filtered=False)
        except ValueError as error:
            print(f"{recipe.name} is left out: {error}")
    batches = timed_batches(demo_sentences(cast(Language, language)), batch_size)
    for model in models.values():
        model.encode(batches[-1][:2], show_progress_bar=False)
    fastest = dict.fromkeys(itertools.product(models, range(len(batches))), float("inf"))
    for _ in range(ROUNDS):
        for index, batch in enumerate(batches):
            for name, model in models.items():
                start = time.process_time()
                model.encode(batch, batch_size=len(batch), show_progress_bar=False)
                fastest[name, index] = min(fastest[name, index], time.process_time() - start)
    spent = {name: sum(fastest[name, index] for index in range(len(batches))) for name in models}
    how = f"{sum(map(len, batches))} sentences, times of the processor, the fastest of {ROUNDS} rounds in turn"
    return [
        {"quantity": "time", "contender": name, "unit": UNIT, "batch": batch_size, "how": how,
         "value": round(own / spent[UNIT], 3)}
        for name, own in spent.items() if name != UNIT
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory or a GGUF file")
    parser.add_argument("--name", required=True, help="what tables call it")
    parser.add_argument("--language", choices=["en", "zh"], default="en")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=16, help="texts at a time")
    parser.add_argument("--repetitions", type=int, default=3, help="most copies of a text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    where = {
        "table": "recipes", "model": options.name, "precision": options.dtype,
        "machine": machine("cpu", options.threads), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    found = measured(options.model, options.dtype, options.language, options.batch, options.repetitions)
    rows = [{**row, **where} for row in found]
    append("cost", rows, options.results)
    for row in rows:
        print(f"{options.name}: {row['contender']} / {UNIT}: {row['value']}", flush=True)


if __name__ == "__main__":
    main()
