"""The Triton kernel beside the same in torch's operations: the running maximum over the heads of one layer, on a GPU.

    python benchmarks/kernel.py                     # layers of a 1B and a 7B model, bfloat16
    python benchmarks/kernel.py --sizes 7b --lengths 512 --batch 8 --groups 8

Both fold the same layer of random queries and keys, in turns, as ReBA-2 asks for it: of a text of n tokens that stands
twice, the n keys of the first copy and all queries behind them ("mean"), or one key ("last"). A ratio is the median of
the rounds' ratios. Rows are added to results/cost.csv. Which of them
st_reba/lm/attention/kernels.py chooses is told beside. The cost of whole recipes is what cost.py measures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from cost import SIZES
from devices import now
from records import RESULTS, Value, append, machine, versions
from st_reba.lm.attention.kernels import Fold, fold_kernel
from st_reba.lm.attention.weights import LayerWeights, fold

KERNEL, WRITTEN_OUT = "Triton kernel", "torch's operations"


def layer(heads: int, groups: int, head_size: int, tokens: int, batch: int, dtype: str, device: str) -> LayerWeights:
    """Of a model whose queries of a token lie side by side."""
    kind = {"dtype": getattr(torch, dtype), "device": device}
    query, key = (torch.randn(batch, tokens, count, head_size, **kind).transpose(1, 2) for count in (heads, groups))
    lse = torch.randn(batch, heads, tokens, dtype=torch.float32, device=device)
    return LayerWeights(0, query, key, lse, head_size**-0.5, None, None)


def seconds(folds: dict[str, Callable[[], None]], device: str, rounds: int, runs: int) -> dict[str, list[float]]:
    """Of one fold, in each round; the first, which warms up, does not count."""
    spent: dict[str, list[float]] = {name: [] for name in folds}
    for measured in range(rounds + 1):
        for name, folding in folds.items():
            start = now(device)
            for _ in range(runs):
                folding()
            taken = now(device) - start
            if measured:
                spent[name].append(taken / runs)
    return spent


def rows_of(
    kernel: Fold, source: LayerWeights, length: int, form: str, device: str, rounds: int, runs: int
) -> list[dict[str, Value]]:
    """Time and ratio for one layer. ``form``: "mean" or "last"."""
    tokens = source.query.shape[2]
    keys_are_positions = form == "mean"
    keys, queries = slice(1, 1 + length) if keys_are_positions else slice(0, 1), slice(1, tokens)
    if not keys_are_positions:
        source = source.at_keys(torch.full((len(source.query),), length, device=device))
    shape = (len(source.query), keys.stop - keys.start, queries.stop - queries.start)
    maximum = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

    def folding(each: Fold, into: Tensor) -> Callable[[], None]:
        return lambda: each(source, keys, queries, into)

    folds = {KERNEL: folding(kernel, maximum), WRITTEN_OUT: folding(fold, maximum.clone())}
    with torch.inference_mode():
        spent = seconds(folds, device, rounds, runs)
    ratios = [a / b for a, b in zip(spent[KERNEL], spent[WRITTEN_OUT], strict=True)]
    how = f"times by the clock, median of {rounds} interleaved rounds of {runs} runs"
    shared: dict[str, Value] = {"tokens": length, "batch": len(source.query), "how": how}
    return [
        {**shared, "quantity": "time of the maximum in a layer", "contender": f"{KERNEL}, {form}",
         "unit": f"{WRITTEN_OUT}, {form}", "value": round(median(ratios), 4), "low": round(min(ratios), 4),
         "high": round(max(ratios), 4)},
        *({**shared, "quantity": "microseconds of the maximum in a layer", "contender": f"{name}, {form}",
           "unit": "", "value": round(1e6 * median(own), 2)} for name, own in spent.items()),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1b", "7b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], help="tokens of one copy")
    parser.add_argument("--groups", nargs="+", type=int, default=[8, 32], help="key-value heads")
    parser.add_argument("--batch", type=int, default=16, help="texts at a time")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=20, help="of a round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this compares what runs on a GPU, and PyTorch finds none here.")
    try:
        from st_reba.lm.attention.triton_kernel import fold as triton_fold
    except ImportError:
        parser.error("Triton is not installed: pip install triton.")
    where = {
        "table": "kernel", "precision": options.dtype, "machine": machine(options.device, 1),
        "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    for size in options.sizes:
        _, heads, width, _ = SIZES[size]
        for groups in (count for count in options.groups if heads % count == 0):
            model = f"{heads} heads x {width // heads}, {groups} key-value heads"
            for length in options.lengths:
                for form in ("mean", "last"):
                    source = layer(
                        heads, groups, width // heads, 2 * length + 1, options.batch, options.dtype, options.device
                    )
                    rows = rows_of(triton_fold, source, length, form, options.device, options.rounds, options.runs)
                    append("cost", [{**row, **where, "model": model} for row in rows], options.results)
                    chosen = "kernel" if fold_kernel(source) else "operations"
                    ratio, kernel, plain = (row["value"] for row in rows)
                    print(
                        f"{model}, n = {length}, {form}: {kernel} us by the kernel, {plain} us by torch's operations, "
                        f"ratio {ratio}; {chosen} chosen",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
