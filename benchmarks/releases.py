"""This tree beside that of a release: importing, loading, one query, many short texts and some long ones.

    git archive v0.7.1 | tar x -C DIR
    python benchmarks/releases.py --release 0.7.1 --tree DIR                  # the demo LM
    python benchmarks/releases.py --release 0.7.1 --tree DIR --model FILE --name SmolLM2-135M-Instruct

Each figure is of a process of its own, which imports one of the two trees; the two take turns. Time is the
processor's, of one thread. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from records import DEMO_MODEL, RESULTS, ROOT, Value, append, machine, versions
from trees import printed_in, vocabulary

IMPORT = "import st_reba after sentence_transformers"
LOADING = "loading Classical"
METHODS = ("Classical, mean", "PromptEOL, last", "Echo-2, mean", "ReBA-2, mean", "RT-2, last", "MetaEOL, mean")
QUERY, SHORT, LONG = "one query", "1,000 short texts", "100 long texts"
#: How many texts, and how many words each has.
WORKLOADS = {QUERY: (1, (5, 12)), SHORT: (1000, (4, 24)), LONG: (100, (150, 350))}


def texts_of(workload: str, share: float = 1.0) -> list[str]:
    """Texts of words that both of the package's languages have, the same ones in every process."""
    number, (shortest, longest) = WORKLOADS[workload]
    draw = random.Random(7)
    pool = vocabulary()
    count = max(1, round(number * share))
    return [" ".join(draw.choices(pool, k=draw.randint(shortest, longest))) for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(what: str, path: str, share: float) -> list[float]:
    """One figure, as the process that is started for it takes it: a list, of workloads that are run again and again."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    if what == IMPORT:
        return [seconds(lambda: __import__("st_reba"))]
    import torch

    import st_reba

    torch.set_num_threads(1)
    if what == LOADING:
        found = []
        for _ in range(3):
            # The model before lies in cycles: to free it is no part of the next one's loading.
            gc.collect()
            found.append(seconds(lambda: st_reba.CausalTransformer(path)))
        return found
    method, workload = what.split("; ")
    make = {
        "Classical, mean": lambda: st_reba.CausalTransformer(path),
        "PromptEOL, last": lambda: st_reba.CausalTransformer(path, template="prompteol"),
        "Echo-2, mean": lambda: st_reba.EchoModule(path),
        "ReBA-2, mean": lambda: st_reba.ReBAModule(path),
        "RT-2, last": lambda: st_reba.RefinedThoughtModule(path, iterations=2),
        "MetaEOL, mean": lambda: st_reba.MetaEOLModule(path),
    }
    module = make[method]()
    pooling = Pooling(module.get_embedding_dimension(), "lasttoken" if method.endswith("last") else "mean")
    model = SentenceTransformer(modules=[module, pooling], device="cpu")
    texts = texts_of(workload, share)
    model.encode(texts[:8])
    times = 15 if workload == QUERY else 1
    return [seconds(lambda: model.encode(texts, batch_size=32)) for _ in range(times)]


def spent(tree: Path, what: str, path: str, share: float) -> float:
    """The median that a process of one tree gives."""
    printed = printed_in(tree, __file__, "--measure", what, "--model", path, "--share", str(share))
    return median(map(float, printed.split()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", help="the version of the other tree")
    parser.add_argument("--tree", type=Path, help="where its sources lie")
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--name", default="demo LM")
    parser.add_argument("--precision", default="bfloat16", help="that the model is loaded in: that of its file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the texts; 0.1 to try it out")
    parser.add_argument("--only", nargs="+", default=[], help="figures whose names begin so")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(*measured(options.measure, options.model, options.share))
        return
    every = [IMPORT, LOADING, *(f"{method}; {workload}" for workload in WORKLOADS for method in METHODS)]
    for what in every:
        if options.only and not what.startswith(tuple(options.only)):
            continue
        found: list[tuple[float, float]] = []
        for number in range(options.rounds):
            trees = (ROOT, options.tree.resolve())
            # Each goes first in every other round: what runs second may find a warmer machine.
            first, second = trees if number % 2 == 0 else trees[::-1]
            pair = {tree: spent(tree, what, options.model, options.share) for tree in (first, second)}
            found.append((pair[ROOT], pair[trees[1]]))
        ratios = [ours / theirs for ours, theirs in found]
        row: dict[str, Value] = {
            "table": "releases",
            "quantity": "time",
            "contender": what,
            "unit": options.release,
            "model": options.name,
            "precision": options.precision,
            "value": round(median(ratios), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
            "how": f"times of the processor, medians of {options.rounds} interleaved rounds, processes of their own",
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine("cpu", 1),
            "versions": versions(),
        }
        if options.share == 1:
            append("cost", [row], options.results)
        seconds_of = ", ".join(f"{ours:.3f}/{theirs:.3f}" for ours, theirs in found)
        print(
            f"{what}: {row['value']} ({row['low']} to {row['high']}) of {options.release}: {seconds_of} s", flush=True
        )


if __name__ == "__main__":
    main()
