"""What ReBA costs beside Echo, in this tree and in others: the price of looking back.

    git archive v0.7.1 | tar x -C DIR
    python benchmarks/beside_echo.py --trees 0.7.1=DIR --state build/beside_echo.jsonl
    python benchmarks/beside_echo.py --trees 0.7.1=DIR before=DIR --model FILE --name SmolLM2-135M-Instruct --state ...

Each recipe of each tree runs in a process of its own, which imports that tree; within a round all of them take turns,
and each round begins with another one. Time is the processor's, of one thread; a ratio is that of one round. What each
process measured is kept in ``--state``, so that a run which was broken off goes on where it stopped. When all is there,
rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from records import DEMO_MODEL, RESULTS, ROOT, Record, append, machine, versions
from trees import printed_in, vocabulary

ENDS = ("last", "mean")
RECIPES = tuple(f"{method}, {end}" for end in ENDS for method in ("Echo-2", "ReBA-2"))
#: The name of this tree.
HERE = "this version"
#: How often a process encodes a batch at least, of which the first time, which warms up, does not count; and for how
#: many seconds. The least time is taken: what disturbs only adds.
TIMES, SECONDS = 3, 3.0


#: A round, a tree's name, a recipe.
Done = tuple[int, str, str]


def words(count: int, seed: int) -> str:
    """A text of so many words, the same one in every process."""
    return " ".join(random.Random(seed).choices(vocabulary(), k=count))


def measured(recipe: str, path: str, lengths: Sequence[int], tokens: int) -> dict[int, float]:
    """Seconds of one batch by the length of its texts, as the process that is started for a recipe takes them."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    import st_reba

    torch.set_num_threads(1)
    reads_last = recipe.endswith("last")
    kind: Any = st_reba.ReBAModule if recipe.startswith("ReBA") else st_reba.EchoModule
    module = kind(path, rows="last" if reads_last else "all", model_kwargs={"dtype": "float32"})
    pooling = Pooling(module.get_embedding_dimension(), "lasttoken" if reads_last else "mean")
    model = SentenceTransformer(modules=[module, pooling], device="cpu")
    found = {}
    for length in lengths:
        # Each text is longer, and cut to so many tokens.
        model.max_seq_length = length
        texts = [words(length, seed) for seed in range(max(1, tokens // length))]
        assert model.preprocess(texts)["attention_mask"].sum(1).min() >= 2 * length
        spent: list[float] = []
        while len(spent) < TIMES or sum(spent) < SECONDS:
            start = time.process_time()
            model.encode(texts, batch_size=len(texts), show_progress_bar=False)
            spent.append(time.process_time() - start)
        found[length] = min(spent[1:])
    return found


def of_a_process(tree: Path, recipe: str, options: argparse.Namespace) -> dict[int, float]:
    """What :func:`measured` gives in a process that imports one tree."""
    printed = printed_in(
        tree, __file__, "--measure", recipe, "--model", options.model, "--tokens", str(options.tokens),
        "--lengths", *map(str, options.lengths),
    )  # fmt: skip
    return {int(length): seconds for length, seconds in json.loads(printed.splitlines()[-1]).items()}


def rows_of(
    found: Mapping[Done, Mapping[int, float]], names: Sequence[str], options: argparse.Namespace
) -> list[Record]:
    """Ratios of each round as their median, the lowest and the highest: ReBA's time over Echo's in each tree, and the
    time of each recipe over that of the same in another tree.
    """
    pairs = [((name, f"ReBA-2, {end}"), (name, f"Echo-2, {end}")) for end in ENDS for name in names]
    pairs += [((HERE, recipe), (name, recipe)) for recipe in RECIPES for name in names[1:]]
    how = f"times of the processor, medians of {options.rounds} interleaved rounds, processes of their own"
    rows: list[Record] = []
    for ours, theirs in pairs:
        for length in options.lengths:
            rounds = range(options.rounds)
            ratios = [found[number, *ours][length] / found[number, *theirs][length] for number in rounds]
            rows.append(
                {"table": "beside-echo", "quantity": "time", "contender": f"{ours[1]}, {ours[0]}",
                 "unit": f"{theirs[1]}, {theirs[0]}", "model": options.name, "precision": "float32", "tokens": length,
                 "batch": max(1, options.tokens // length), "value": round(median(ratios), 3),
                 "low": round(min(ratios), 3), "high": round(max(ratios), 3), "how": how,
                 "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu", 1), "versions": versions()}
            )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="*", default=[], metavar="NAME=DIR", help="other trees than this one")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a directory or a GGUF file")
    parser.add_argument("--name", default="demo LM")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy")
    parser.add_argument("--tokens", type=int, default=512, help="of the texts of a batch, each standing once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "beside_echo.jsonl", help="what is measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measured(options.measure, options.model, options.lengths, options.tokens)))
        return
    trees = {HERE: ROOT}
    for tree in options.trees:
        name, _, place = tree.partition("=")
        trees[name] = Path(place).resolve()
    options.state.parent.mkdir(parents=True, exist_ok=True)
    options.state.touch()
    found: dict[Done, dict[int, float]] = {}
    for line in options.state.read_text("utf-8").splitlines():
        number, name, recipe, seconds = json.loads(line)
        found[number, name, recipe] = {int(length): value for length, value in seconds.items()}
    # Echo beside ReBA, of one tree: what is divided is measured one right after the other.
    turns = [(name, f"{method}, {end}") for end in ENDS for name in trees for method in ("Echo-2", "ReBA-2")]
    for number in range(options.rounds):
        # Each goes first in some round: what runs second may find a warmer machine.
        first = number % len(turns)
        for name, recipe in turns[first:] + turns[:first]:
            if (number, name, recipe) in found:
                continue
            seconds = found[number, name, recipe] = of_a_process(trees[name], recipe, options)
            with options.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, name, recipe, seconds]) + "\n")
            print(f"round {number + 1} of {options.rounds}: {name}: {recipe}: {seconds}", flush=True)
    rows = rows_of(found, list(trees), options)
    append("cost", rows, options.results)
    for row in rows:
        ratio = f"{row['contender']} / {row['unit']}"
        print(f"n = {row['tokens']}: {ratio}: {row['value']} ({row['low']} to {row['high']})")


if __name__ == "__main__":
    main()
