"""What a recipe takes beside a plain pass over the tokens that are new: the text, its copies, what stands behind them.

    python benchmarks/prefixes.py --model FILE --name SmolLM2-135M-Instruct --data DIR

What stands before all texts is run once and kept. Ratios of three kinds, on the first sentences of
``DIR/stsb_en_dev.tsv``: each recipe over Classical, which is given as many tokens, in batches as ``encode`` makes them;
Knowledge over PromptEOL; and an instruction of 60 tokens over none. Within a round all take turns, and each round
begins with another one. Time is the processor's, of one thread. What was measured is kept in ``--state``, so that a run
which was broken off goes on where it stopped. When all is there, rows are added to results/cost.csv; ``make tables``
shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import pad

from given import for_one_model
from records import DEMO_MODEL, ROOT, Value, append, machine, versions
from st_reba import CausalTransformer
from st_reba.modules import CausalModule, RefinedThoughtModule
from st_reba.recipes import Recipe, every_row
from st_reba.text.layout import NOT_TEXT, Layout

CLASSICAL = "Classical over as many tokens"
#: Recipes that stand for all others; each is a row's key and a pooling.
RECIPES = (
    ("prompteol", "last"), ("pretended-cot", "last"), ("knowledge", "last"), ("promptreps", "last"),
    ("early-late", "mean"), ("value-aggregation", "last"), ("contrastive-prompting", "last"),
    ("attention-pooling", "last"), ("echo-2", "mean"), ("echo-springer", "mean"), ("reba-2", "last"),
    ("reba-2", "mean"), ("ck", "mean"), ("metaeol", "mean"), ("rt-2", "last"), ("rt-8", "last"),
    ("kv-rerouting", "mean"), ("kv-rerouting", "last"), ("token-prepending", "last"),
    ("token-prepending-blocks", "mean"), ("topic", "last"), ("echo-topic", "mean"),
)  # fmt: skip
#: Those that are also given an instruction.
PROMPTED = ("Echo-2, mean", "ReBA-2, mean", "PromptEOL, last", "Token prepending, last", "Echo topic, mean")
INSTRUCTION = (
    "Instruct: Represent the following sentence so that other sentences that say the same, or nearly the same, in the "
    "words of somebody else, are found by the cosine of the two vectors; look at what is said to happen, to whom, "
    "where, when, why and how.\nQuery: "
)
#: Texts of a batch.
BATCH = 32

#: Seconds of a contender, and of what it is divided by, one right after the other.
Timed = tuple[float, float]


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    with torch.inference_mode():
        run()
    return time.process_time() - start


def beside_classical(module: CausalModule, classical: CausalModule, batches: Sequence[Sequence[str]]) -> Timed:
    """The time of a method, and of a plain pass over the tokens that are new to it."""
    ours = theirs = 0.0
    for texts in batches:
        features = module.preprocess(texts)
        layout = Layout.of(features)
        with torch.inference_mode():
            new, _ = module._behind_prefixes(layout, module.rows_per_text)
        # Each further pass of refined thought reads two tokens more.
        further = 2 * (module.iterations - 1) if isinstance(module, RefinedThoughtModule) else 0
        ids, real = pad(new.input_ids, (0, further)), pad(new.attention_mask, (0, further), value=True)
        plain = Layout(ids, real, torch.where(real, 0, NOT_TEXT)).features()
        ours += seconds(partial(module, features))
        theirs += seconds(partial(classical, plain))
    return ours, theirs


def beside(one: SentenceTransformer, other: SentenceTransformer, texts: Sequence[str], prompt: str | None) -> Timed:
    """The time of ``encode`` with a prompt, and of another model's without one."""
    return (
        seconds(lambda: one.encode([*texts], prompt=prompt, batch_size=BATCH, show_progress_bar=False)),
        seconds(lambda: other.encode([*texts], batch_size=BATCH, show_progress_bar=False)),
    )


def contenders(
    base: CausalModule, texts: Sequence[str], recipes: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Callable[[], Timed]]:
    """What is measured, by its name and that of what it is divided by."""
    rows = {row.key: row for row in every_row()}
    models = {
        f"{rows[key].name}, {pooling}": Recipe(rows[key], pooling).model(base, filtered=False)
        for key, pooling in recipes
    }
    ordered = sorted(texts, key=len, reverse=True)
    batches = [ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)]
    found: dict[tuple[str, str], Callable[[], Timed]] = {
        (name, CLASSICAL): partial(beside_classical, cast(CausalModule, model[0]), base, batches)
        for name, model in models.items()
    }
    knowledge, prompteol = "Knowledge, last", "PromptEOL, last"
    if models.keys() >= {knowledge, prompteol}:
        found[knowledge, prompteol] = partial(beside, models[knowledge], models[prompteol], texts, None)
    prompted = f"a prompt of {len(base.token_ids([INSTRUCTION])[0])} tokens"
    for name in (each for each in PROMPTED if each in models):
        pair = f"{name}; {prompted}", f"{name}; no prompt"
        found[pair] = partial(beside, models[name], models[name], texts, INSTRUCTION)
    return found


def rows_of(found: Mapping[tuple[int, str, str], Timed], options: argparse.Namespace) -> list[dict[str, Value]]:
    """Ratios of each round as their median, the lowest and the highest."""
    how = f"{options.texts} sentences, times of the processor, medians of {options.rounds} interleaved rounds"
    rows: list[dict[str, Value]] = []
    for contender, unit in dict.fromkeys((contender, unit) for _, contender, unit in found):
        ratios = [ours / theirs for (_, *of), (ours, theirs) in found.items() if of == [contender, unit]]
        rows.append(
            {"table": "prefixes", "quantity": "time", "contender": contender, "unit": unit, "model": options.name,
             "precision": "float32", "batch": BATCH, "value": round(median(ratios), 3), "low": round(min(ratios), 3),
             "high": round(max(ratios), 3), "how": how, "date": time.strftime("%Y-%m-%d"),
             "machine": machine("cpu", options.threads), "versions": versions()}
        )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="holds stsb_en_dev.tsv")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--recipes", nargs="+", default=[key for key, _ in RECIPES], help="keys of rows; all if none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "prefixes.jsonl", help="what is measured")
    options = for_one_model(parser, arguments, "a directory or a GGUF file; the demo LM if left out")
    options.name = options.name or "demo LM"
    lines = (options.data / "stsb_en_dev.tsv").read_text("utf-8").splitlines()[1:]
    texts = [*dict.fromkeys(line.split("\t")[0] for line in lines)][: options.texts]
    base = CausalTransformer(options.model or str(DEMO_MODEL), model_kwargs={"dtype": "float32"}).eval()
    measured = contenders(base, texts, [each for each in RECIPES if each[0] in options.recipes])
    options.state.parent.mkdir(parents=True, exist_ok=True)
    options.state.touch()
    found: dict[tuple[int, str, str], Timed] = {}
    for line in options.state.read_text("utf-8").splitlines():
        number, contender, unit, timed = json.loads(line)
        found[number, contender, unit] = tuple(timed)
    turns = list(measured)
    warm: set[tuple[str, str]] = set()
    for number in range(options.rounds):
        # Each goes first in some round: what runs second may find a warmer machine.
        first = number * len(turns) // options.rounds
        for pair in turns[first:] + turns[:first]:
            if (number, *pair) in found:
                continue
            if pair not in warm:
                # What is kept is kept from here on.
                measured[pair]()
                warm.add(pair)
            timed = found[number, *pair] = measured[pair]()
            with options.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, *pair, timed]) + "\n")
            print(f"round {number + 1} of {options.rounds}: {' / '.join(pair)}: {timed[0] / timed[1]:.3f}", flush=True)
    rows = rows_of(found, options)
    append("cost", rows, options.results)
    for row in rows:
        print(f"{row['contender']} / {row['unit']}: {row['value']} ({row['low']} to {row['high']})")


if __name__ == "__main__":
    main()
