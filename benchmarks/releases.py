"""This tree beside that of a release: loading, one query, many short texts and some long ones; and ReBA beside Echo.

    git archive v0.7.1 | tar x -C DIR
    python benchmarks/releases.py --release 0.7.1 --tree DIR                  # the demo LM
    python benchmarks/releases.py --release 0.7.1 --tree DIR --model FILE --name SmolLM2-135M-Instruct
    python benchmarks/releases.py --table beside-echo --release 0.7.1 --tree DIR

Each contender lives in a process of its own, which imports one of the two trees and stays; the two take turns. Time is
the processor's, of one thread. In "beside-echo" Echo encodes right before ReBA of the same tree or right after it, so
that both meet the same machine. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPORT, LOADING = "import st_reba after sentence_transformers", "loading Classical"
#: By the name of a recipe, its class and settings.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Classical, mean": ("CausalTransformer", {}),
    "PromptEOL, last": ("CausalTransformer", {"template": "prompteol"}),
    "Echo-2, mean": ("EchoModule", {}),
    "ReBA-2, mean": ("ReBAModule", {}),
    "RT-2, last": ("RefinedThoughtModule", {"iterations": 2}),
    "MetaEOL, mean": ("MetaEOLModule", {}),
    "Echo-2, last": ("EchoModule", {"rows": "last"}),
    "ReBA-2, last": ("ReBAModule", {"rows": "last"}),
}
#: How many texts, and how many words each has.
WORKLOADS = {"one query": (1, (5, 12)), "1,000 short texts": (1000, (4, 24)), "100 long texts": (100, (150, 350))}
#: Those of the other table.
BESIDE_ECHO = ("Echo-2, last", "ReBA-2, last", "Echo-2, mean", "ReBA-2, mean")
HERE = "this version"


def words(count: int, draw: random.Random) -> str:
    """A text of words of the package's own sentences, the same one in every process."""
    lines = (ROOT / "st_reba/assets/demo_pairs_en.tsv").read_text("utf-8").splitlines()
    return " ".join(draw.choices(" ".join(line.split("\t")[0] for line in lines).split(), k=count))


def spent(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    work()
    return time.process_time() - start


def answer(what: str, given: argparse.Namespace) -> None:
    """In a process of one tree: for each line of standard input, print the seconds that the figure takes.

    Args:
        what: What is imported or loaded, or a recipe; and behind a semicolon the workload, which a line may be instead:
            so many tokens of a text.
        given: As typed.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    imported = spent(lambda: __import__("st_reba"))
    import st_reba

    torch.set_num_threads(1)
    method, _, workload = what.partition("; ")
    if method in METHODS:
        name, settings = METHODS[method]
        module = getattr(st_reba, name)(given.model, model_kwargs={"dtype": given.precision}, **settings)
        pooling = Pooling(module.get_embedding_dimension(), "lasttoken" if method.endswith("last") else "mean")
        model = SentenceTransformer(modules=[module, pooling], device="cpu")
    draw = random.Random(7)
    if workload:
        number, lengths = WORKLOADS[workload]
        texts = [words(draw.randint(*lengths), draw) for _ in range(max(1, round(number * given.share)))]
        model.encode(texts[:8])
    for line in sys.stdin:
        if what == IMPORT:
            print(imported, flush=True)
        elif what == LOADING:
            found = []
            for _ in range(3):
                # The model before lies in cycles: to free it is no part of the next one's loading.
                gc.collect()
                found.append(spent(lambda: st_reba.CausalTransformer(given.model)))
            print(median(found), flush=True)
        elif workload:
            times = 15 if number == 1 else 1
            print(median(spent(partial(model.encode, texts, batch_size=32)) for _ in range(times)), flush=True)
        else:
            # Each text is longer, and cut to so many tokens.
            model.max_seq_length = length = int(line)
            texts = [words(length, random.Random(seed)) for seed in range(max(1, given.tokens // length))]
            assert model.preprocess(texts)["attention_mask"].sum(1).min() >= 2 * length
            print(spent(partial(model.encode, texts, batch_size=len(texts), show_progress_bar=False)), flush=True)


def contender(tree: Path, what: str, given: argparse.Namespace, running: ExitStack) -> Callable[[str], float]:
    """A process of a tree, which answers a line with the seconds that it took.

    Raises:
        SystemExit: If it ended instead.
    """
    command = [sys.executable, __file__, "--measure", what, "--model", given.model, "--share", str(given.share)]
    command += ["--tokens", str(given.tokens), "--precision", given.precision]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = running.enter_context(subprocess.Popen(command, env=environment, **pipes))
    running.callback(process.kill)
    asked, said = process.stdin, process.stdout
    assert asked is not None
    assert said is not None

    def ask(line: str) -> float:
        asked.write(f"{line}\n")
        asked.flush()
        told = said.readline()
        if not told:
            raise SystemExit(f"{tree}: {what}: the process ended with {process.wait()}.")
        return float(told)

    return ask


def releases(given: argparse.Namespace, trees: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Each figure in this tree over the same in the other; every round in processes of their own."""
    from runs import interleaved, times

    methods = [name for name in METHODS if name not in BESIDE_ECHO[:2]]
    every = [IMPORT, LOADING, *(f"{method}; {workload}" for workload in WORKLOADS for method in methods)]
    how = f"times of the processor, medians of {given.rounds} interleaved rounds, processes of their own"

    def once(tree: Path, what: str, number: int) -> float:
        with ExitStack() as running:
            return contender(tree, what, given, running)(str(number))

    for what in every:
        if not given.only or what.startswith(tuple(given.only)):
            runs = {name: partial(once, tree, what) for name, tree in trees.items()}
            for row in times(interleaved(runs, range(given.rounds)), [(HERE, given.release)], how, 3):
                yield {**row, "contender": what}


def beside_echo(given: argparse.Namespace, trees: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """ReBA's time over Echo's in each tree, and the time of each recipe over that of the same in the other tree."""
    from runs import interleaved

    ends = (BESIDE_ECHO[:2], BESIDE_ECHO[2:])
    turns = [(name, recipe) for both in ends for name in trees for recipe in both]
    with ExitStack() as running:
        contenders = {turn: contender(trees[turn[0]], turn[1], given, running) for turn in turns}
        lengths = [str(length) for length in given.lengths]
        # The first round warms up.
        found = interleaved(contenders, [*lengths, *(length for length in lengths for _ in range(given.rounds))])
    pairs = [((name, reba), (name, echo)) for echo, reba in ends for name in trees]
    pairs += [((HERE, recipe), (name, recipe)) for recipe in BESIDE_ECHO for name in trees if name != HERE]
    how = f"times of the processor, medians and quartiles of {given.rounds} rounds, contenders in turn"
    for ours, theirs in pairs:
        for place, length in enumerate(given.lengths):
            start = len(lengths) + place * given.rounds
            both = (found[each][start : start + given.rounds] for each in (ours, theirs))
            ratios = [one / other for one, other in zip(*both, strict=True)]
            low, _, high = (round(each, 3) for each in quantiles(ratios, n=4))
            yield {
                "quantity": "time", "contender": f"{ours[1]}, {ours[0]}", "unit": f"{theirs[1]}, {theirs[0]}",
                "tokens": length, "batch": max(1, given.tokens // length), "value": round(median(ratios), 3),
                "low": low, "high": high, "how": how,
            }  # fmt: skip


TABLES = {"releases": releases, "beside-echo": beside_echo}


def main(arguments: Sequence[str] | None = None) -> None:
    # Processes of other trees import this file, and nothing of this tree.
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--table", choices=TABLES, default="releases")
    made.add_argument("--release", help="the version of the other tree")
    made.add_argument("--tree", type=Path, help="where its sources lie")
    made.add_argument("--model", default=str(ROOT / "tests" / "demo_lm"), help="a directory or a GGUF file")
    made.add_argument("--name", default="demo LM")
    made.add_argument(
        "--precision", help="that the model is loaded in; that of its file, bfloat16; beside Echo float32"
    )
    made.add_argument("--rounds", type=int, default=5, help="2 or more")
    made.add_argument("--share", type=float, default=1.0, help="of the texts; 0.1 to try it out")
    made.add_argument("--only", nargs="+", default=[], help="figures whose names begin so")
    made.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy, beside Echo")
    made.add_argument("--tokens", type=int, default=512, help="of the texts of a batch beside Echo, each standing once")
    made.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="directory of cost.csv")
    made.add_argument("--measure", help=argparse.SUPPRESS)
    given = made.parse_args(arguments)
    given.threads, given.precision = 1, given.precision or ("float32" if given.table == "beside-echo" else "bfloat16")
    if given.measure:
        answer(given.measure, given)
        return
    from runs import add_costs

    trees = {HERE: ROOT} | ({given.release: given.tree.resolve()} if given.tree else {})
    for row in TABLES[given.table](given, trees):
        add_costs([row], given, table=given.table, model=given.name, precision=given.precision)


if __name__ == "__main__":
    main()
