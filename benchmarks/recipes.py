"""What every recipe costs on a real model, beside the classical embedding, and beside a pass over its new tokens.

    python benchmarks/recipes.py --model DIR --name SmolLM2-135M-Instruct --language en
    python benchmarks/recipes.py --table prefixes --model FILE --name SmolLM2-135M-Instruct --data DIR

"recipes": every recipe that ``st-reba compare --recipes all`` shows, under each pooling of its own and behind nothing,
takes turns on the same batches of the package's sentences, each alone, as a user would run it. "prefixes": what stands
before all texts is run once and kept. Ratios of three kinds, on the first sentences of ``DIR/stsb_en_dev.tsv``: each
recipe over Classical, which is given as many tokens, in batches as ``encode`` makes them; Knowledge over PromptEOL; and
an instruction of 60 tokens over none. The time is the processor's. Rows are added to results/cost.csv; ``make tables``
shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import pad

from real.texts import Sets
from records import DEMO_MODEL, Record
from runs import add_costs, interleaved, options, parser, ratio, timed
from st_reba import CausalTransformer
from st_reba.compare.cost import timed_batches
from st_reba.data.demo import Language, demo_sentences
from st_reba.modules import CausalModule, RefinedThoughtModule
from st_reba.recipes import Recipe, default_recipes, every_row
from st_reba.text.layout import NOT_TEXT, Layout

UNIT, CLASSICAL = "Classical, mean", "Classical over as many tokens"
#: Recipes that stand for all others; each is a row's key and a pooling.
PREFIXED = (
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

#: Says the seconds of a contender, and of what it is divided by, one right after the other.
Both = Callable[[int], tuple[float, float]]


def encoding(model: SentenceTransformer, prompt: str | None, batch: int) -> Callable[[Sequence[str]], float]:
    """The seconds of encoding texts."""
    return timed(lambda texts: model.encode(list(texts), prompt=prompt, batch_size=batch, show_progress_bar=False))


def every_recipe(backbone: CausalModule, given: argparse.Namespace) -> Iterator[Record]:
    """Each recipe's time over the classical embedding's."""
    runs = {}
    for recipe in default_recipes(given.repetitions):
        if recipe.part != recipe.row.around:
            continue
        try:
            model = recipe.model(backbone, filtered=False)
        except ValueError as error:
            print(f"{recipe.name} is left out: {error}")
            continue
        runs[f"{recipe.method}, {recipe.pooling}"] = encoding(model, None, given.batch)
    batches = timed_batches(demo_sentences(cast(Language, given.language)), given.batch)
    for run in runs.values():
        run(batches[-1][:2])
    found = interleaved(runs, batches * given.rounds)
    spent = {name: sum(min(own[place :: len(batches)]) for place in range(len(batches))) for name, own in found.items()}
    number = sum(map(len, batches))
    how = f"{number} sentences, times of the processor, the fastest of {given.rounds} rounds in turn"
    for name, own in spent.items():
        if name != UNIT:
            value = round(own / spent[UNIT], 3)
            yield {"quantity": "time", "contender": name, "unit": UNIT, "value": value, "how": how}


def beside_classical(module: CausalModule, classical: CausalModule, batches: Sequence[Sequence[str]]) -> Both:
    """A method, and a plain pass over the tokens that are new to it."""

    def measured(number: int) -> tuple[float, float]:
        ours = theirs = 0.0
        for texts in batches:
            features = module.preprocess(list(texts))
            with torch.inference_mode():
                new, _ = module.behind_prefixes(Layout.of(features), module.rows_per_text)
                # Each further pass of refined thought reads two tokens more.
                further = 2 * (module.iterations - 1) if isinstance(module, RefinedThoughtModule) else 0
                ids, real = pad(new.input_ids, (0, further)), pad(new.attention_mask, (0, further), value=True)
                plain = Layout(ids, real, torch.where(real, 0, NOT_TEXT)).features()
                ours += timed(module)(features)
                theirs += timed(classical)(plain)
        return ours, theirs

    return measured


def beside(
    one: SentenceTransformer, other: SentenceTransformer, texts: Sequence[str], prompt: str | None, batch: int
) -> Both:
    """``encode`` with a prompt, and another model's without one."""
    return lambda number: (encoding(one, prompt, batch)(texts), encoding(other, None, batch)(texts))


def behind_prefixes(base: CausalModule, given: argparse.Namespace) -> Iterator[Record]:
    """Each recipe beside a pass over what is new to it, and prompts beside none."""
    texts = list(dict.fromkeys(Sets(given.data).pairs("en", "dev").first))[: given.texts]
    rows = {row.key: row for row in every_row()}
    models = {
        f"{rows[key].name}, {pooling}": Recipe(rows[key], pooling).model(base, filtered=False)
        for key, pooling in PREFIXED
        if not given.recipes or key in given.recipes
    }
    ordered = sorted(texts, key=len, reverse=True)
    batches = [ordered[first : first + given.batch] for first in range(0, len(ordered), given.batch)]
    pairs: dict[tuple[str, str], Both] = {
        (name, CLASSICAL): beside_classical(cast(CausalModule, model[0]), base, batches)
        for name, model in models.items()
    }
    knowledge, prompteol = "Knowledge, last", "PromptEOL, last"
    if models.keys() >= {knowledge, prompteol}:
        pairs[knowledge, prompteol] = beside(models[knowledge], models[prompteol], texts, None, given.batch)
    prompted = f"a prompt of {len(base.token_ids([INSTRUCTION])[0])} tokens"
    for name in (each for each in PROMPTED if each in models):
        both = beside(models[name], models[name], texts, INSTRUCTION, given.batch)
        pairs[f"{name}; {prompted}", f"{name}; no prompt"] = both
    for run in pairs.values():
        # What is kept is kept from here on.
        run(0)
    how = f"{given.texts} sentences, times of the processor, medians of {given.rounds} interleaved rounds"
    for (contender, unit), spent in interleaved(pairs, range(given.rounds)).items():
        ours, theirs = zip(*spent, strict=True)
        row: Record = {"quantity": "time", "contender": contender, "unit": unit, "how": how}
        yield row | ratio(ours, theirs, 3)


TABLES = {"recipes": every_recipe, "prefixes": behind_prefixes}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=TABLES, default="recipes")
    made.add_argument("--data", type=Path, metavar="DIR", help="for the prefixes: holds stsb_en_dev.tsv")
    made.add_argument("--model", default=str(DEMO_MODEL), help="a directory or a GGUF file")
    made.add_argument("--name", default="demo LM", help="what tables call it")
    made.add_argument("--language", choices=["en", "zh"], default="en")
    made.add_argument("--dtype", help="bfloat16; for the prefixes float32")
    made.add_argument("--batch", type=int, help="texts at a time; 16, for the prefixes 32")
    made.add_argument("--rounds", type=int, help="3; for the prefixes 5")
    made.add_argument("--repetitions", type=int, default=3, help="most copies of a text")
    made.add_argument("--texts", type=int, default=64, help="for the prefixes")
    made.add_argument("--recipes", nargs="+", help="for the prefixes: keys of rows")
    given = options(made, arguments)
    of_prefixes = given.table == "prefixes"
    if of_prefixes and not given.data:
        made.error("--table prefixes needs --data, the directory of the sets.")
    given.dtype = given.dtype or ("float32" if of_prefixes else "bfloat16")
    given.batch, given.rounds = given.batch or (32 if of_prefixes else 16), given.rounds or (5 if of_prefixes else 3)
    backbone = CausalTransformer(given.model, model_kwargs={"dtype": given.dtype}).eval()
    found = TABLES[given.table](backbone, given)
    add_costs(found, given, table=given.table, model=given.name, precision=given.dtype, batch=given.batch)


if __name__ == "__main__":
    main()
