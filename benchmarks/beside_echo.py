"""What ReBA costs beside Echo, in this tree and in others: the price of looking back.

    git archive v0.7.1 | tar x -C DIR
    python benchmarks/beside_echo.py --trees 0.7.1=DIR
    python benchmarks/beside_echo.py --trees 0.7.1=DIR before=DIR --model FILE --name SmolLM2-135M-Instruct

Each recipe of each tree lives in a process of its own, which imports that tree and stays. In a round each of them
encodes one batch, Echo right before ReBA of the same tree or right after it, so that both meet the same machine. Time
is the processor's, of one thread; a ratio is that of two batches of one round. Rows are added to results/cost.csv;
``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from records import DEMO_MODEL, RESULTS, ROOT, Record, append, machine, versions
from trees import Contender, vocabulary

ENDS = ("last", "mean")
RECIPES = tuple(f"{method}, {end}" for end in ENDS for method in ("Echo-2", "ReBA-2"))
#: The name of this tree.
HERE = "this version"

#: A tree's name, a recipe.
Name = tuple[str, str]


def words(count: int, seed: int) -> str:
    """A text of so many words, the same one in every process."""
    return " ".join(random.Random(seed).choices(vocabulary(), k=count))


def encode_when_asked(recipe: str, path: str, tokens: int) -> None:
    """Encode a batch of texts of each length that standard input has, and print the seconds that it took."""
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
    for line in sys.stdin:
        # Each text is longer, and cut to so many tokens.
        model.max_seq_length = length = int(line)
        texts = [words(length, seed) for seed in range(max(1, tokens // length))]
        assert model.preprocess(texts)["attention_mask"].sum(1).min() >= 2 * length
        start = time.process_time()
        model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        print(time.process_time() - start, flush=True)


def rows_of(
    found: Mapping[int, Mapping[Name, Sequence[float]]], names: Sequence[str], options: argparse.Namespace
) -> list[Record]:
    """Ratios of the rounds, as their median and quartiles: ReBA's time over Echo's in each tree, and the time of each
    recipe over that of the same in another tree.
    """
    pairs = [((name, f"ReBA-2, {end}"), (name, f"Echo-2, {end}")) for end in ENDS for name in names]
    pairs += [((HERE, recipe), (name, recipe)) for recipe in RECIPES for name in names[1:]]
    how = f"times of the processor, medians and quartiles of {options.rounds} rounds, contenders in turn"
    rows: list[Record] = []
    for ours, theirs in pairs:
        for length, times in found.items():
            ratios = [one / other for one, other in zip(times[ours], times[theirs], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            rows.append(
                {"table": "beside-echo", "quantity": "time", "contender": f"{ours[1]}, {ours[0]}",
                 "unit": f"{theirs[1]}, {theirs[0]}", "model": options.name, "precision": "float32", "tokens": length,
                 "batch": max(1, options.tokens // length), "value": round(median(ratios), 3),
                 "low": round(low, 3), "high": round(high, 3), "how": how,
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
    parser.add_argument("--rounds", type=int, default=9, help="2 or more; one more warms up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        encode_when_asked(options.measure, options.model, options.tokens)
        return
    trees = {HERE: ROOT}
    for tree in options.trees:
        name, _, place = tree.partition("=")
        trees[name] = Path(place).resolve()
    # Echo beside ReBA, of one tree: what is divided is measured one right after the other.
    turns = [(name, f"{method}, {end}") for end in ENDS for name in trees for method in ("Echo-2", "ReBA-2")]
    found: dict[int, dict[Name, list[float]]] = {length: {turn: [] for turn in turns} for length in options.lengths}
    with ExitStack() as running:
        contenders = {}
        for name, recipe in turns:
            given = ("--measure", recipe, "--model", options.model, "--tokens", str(options.tokens))
            contenders[name, recipe] = running.enter_context(Contender(trees[name], __file__, *given))
        for number in range(options.rounds + 1):
            # Each goes first in some round: what runs second may find a warmer machine.
            first = number % len(turns)
            for length, times in found.items():
                for turn in turns[first:] + turns[:first]:
                    seconds = float(contenders[turn].asked(str(length)))
                    if number:
                        times[turn].append(seconds)
            print(f"round {number} of {options.rounds}", flush=True)
    rows = rows_of(found, list(trees), options)
    append("cost", rows, options.results)
    for row in rows:
        ratio = f"{row['contender']} / {row['unit']}"
        print(f"n = {row['tokens']}: {ratio}: {row['value']} ({row['low']} to {row['high']})")


if __name__ == "__main__":
    main()
