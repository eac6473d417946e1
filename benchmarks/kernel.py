"""The Triton kernel beside the same in torch's operations: the running maximum over the heads of one layer, on a GPU.

    python benchmarks/kernel.py                     # layers of a 1B and a 7B model, bfloat16
    python benchmarks/kernel.py --sizes 7b --lengths 512 --batch 8 --groups 8

Both fold the same layer of random queries and keys, in turns, as ReBA-2 asks for it: of a text of n tokens that stands
twice, the n keys of the first copy and all queries behind them ("mean"), or one key ("last"). A ratio is the median of
the rounds' ratios. Rows are added to results/cost.csv. Which of them st_reba/lm/attention/kernels.py chooses is told
beside. The cost of whole recipes is what cost.py measures.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from cost import SIZES
from records import Record
from runs import add_costs, interleaved, options, parser, timed, times
from st_reba.lm.attention.kernels import Fold, fold_kernel
from st_reba.lm.attention.weights import LayerWeights, fold

KERNEL, WRITTEN_OUT = "Triton kernel", "torch's operations"


def layer(heads: int, groups: int, head_size: int, tokens: int, batch: int, dtype: str, device: str) -> LayerWeights:
    """Of a model whose queries of a token lie side by side."""
    kind = {"dtype": getattr(torch, dtype), "device": device}
    query, key = (torch.randn(batch, tokens, count, head_size, **kind).transpose(1, 2) for count in (heads, groups))
    lse = torch.randn(batch, heads, tokens, dtype=torch.float32, device=device)
    return LayerWeights(0, query, key, lse, head_size**-0.5, None, None)


def rows_of(kernel: Fold, source: LayerWeights, length: int, form: str, given: argparse.Namespace) -> Iterator[Record]:
    """Time and ratio for one layer. ``form``: "mean" or "last"."""
    tokens, device = source.query.shape[2], given.device
    keys, queries = slice(1, 1 + length), slice(1, tokens)
    if form == "last":
        keys, source = slice(0, 1), source.at_keys(torch.full((len(source.query),), length, device=device))
    shape = (len(source.query), keys.stop - keys.start, queries.stop - queries.start)

    def folding(each: Fold) -> Callable[[int], None]:
        into = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

        def runs(number: int) -> None:
            for _ in range(given.runs):
                each(source, keys, queries, into)

        return runs

    folds = {name: timed(folding(each), device) for name, each in ((KERNEL, kernel), (WRITTEN_OUT, fold))}
    with torch.inference_mode():
        # The first round warms up.
        spent = {name: own[1:] for name, own in interleaved(folds, range(given.rounds + 1)).items()}
    how = f"times by the clock, median of {given.rounds} interleaved rounds of {given.runs} runs"
    row: Record = {"tokens": length, "batch": len(source.query), "how": how}
    for time in times(spent, [(KERNEL, WRITTEN_OUT)], how):
        named = {"contender": f"{KERNEL}, {form}", "unit": f"{WRITTEN_OUT}, {form}"}
        yield {**row, **time, **named, "quantity": "time of the maximum in a layer"}
    for name, own in spent.items():
        value = round(1e6 * median(own) / given.runs, 2)
        quantity = "microseconds of the maximum in a layer"
        yield {**row, "quantity": quantity, "contender": f"{name}, {form}", "unit": "", "value": value}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["1b", "7b"])
    made.add_argument("--lengths", nargs="+", type=int, default=[128, 512], help="tokens of one copy")
    made.add_argument("--groups", nargs="+", type=int, default=[8, 32], help="key-value heads")
    made.add_argument("--batch", type=int, default=16, help="texts at a time")
    made.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--runs", type=int, default=20, help="of a round")
    made.add_argument("--device", default="cuda")
    given = options(made, arguments)
    if not torch.cuda.is_available():
        made.error("this compares what runs on a GPU, and PyTorch finds none here.")
    try:
        from st_reba.lm.attention.triton_kernel import fold as triton_fold
    except ImportError:
        made.error("Triton is not installed: pip install triton.")
    for size, groups, length, form in itertools.product(given.sizes, given.groups, given.lengths, ("mean", "last")):
        _, heads, width, _ = SIZES[size]
        if heads % groups == 0:
            model = f"{heads} heads x {width // heads}, {groups} key-value heads"
            source = layer(heads, groups, width // heads, 2 * length + 1, given.batch, given.dtype, given.device)
            found = rows_of(triton_fold, source, length, form, given)
            add_costs(found, given, given.device, table="kernel", precision=given.dtype, model=model)
            print(f"{'kernel' if fold_kernel(source) else 'operations'} chosen", flush=True)


if __name__ == "__main__":
    main()
