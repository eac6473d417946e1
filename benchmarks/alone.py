"""What ``deterministic=True`` costs: each text alone beside batches, by the length of the texts.

    python benchmarks/alone.py                        # the demo LM and a Llama of 12 layers, width 512
    python benchmarks/alone.py --dtype bfloat16
    python benchmarks/alone.py --model DIR --name SmolLM2-135M-Instruct

Both take turns, each with weights of its own; time is the processor's. Rows are added to results/cost.csv; ``make
tables`` shows them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from cost import SIZES, make_backbone
from given import for_one_model
from plain import Texts, encoding, load, ratio_rows, rounds
from records import DEMO_MODEL, Value, append, machine, versions

ALONE, TOGETHER = "Classical, mean, each text alone", "Classical, mean"
#: Tokens of a batch: as many texts as make so many, but no more than 32.
TOKENS = 2048


def price(path: str, dtype: str, lengths: Sequence[int], times: int) -> list[dict[str, Value]]:
    """For each length, the time of one text at a time over that of batches."""
    source = Texts(path)
    models = {name: load(name, path, dtype) for name in (ALONE, TOGETHER)}
    made: list[dict[str, Value]] = []
    for length in lengths:
        texts = [source.of(length) for _ in range(max(1, min(32, TOKENS // length)))]
        contenders = {name: encoding(model, len(texts)) for name, model in models.items()}
        rounds(contenders, [texts[:2]])
        spent = rounds(contenders, [texts] * times)
        ratios = [a / b for a, b in zip(spent[ALONE], spent[TOGETHER], strict=True)]
        [row] = ratio_rows({name: [median(own)] for name, own in spent.items()}, TOGETHER, "")
        how = f"times of the processor, medians of {times} interleaved rounds"
        made.append(
            {**row, "tokens": length, "batch": len(texts), "low": round(min(ratios), 4), "high": round(max(ratios), 4),
             "how": how}
        )  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[12, 32, 128, 512], help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = for_one_model(parser, arguments, "a directory or a GGUF file; the demo LM and a random Llama if left out")
    where = {
        "table": "alone", "precision": options.dtype, "machine": machine("cpu", options.threads),
        "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        layers, heads, width, _ = SIZES["small"]
        models = {options.name: options.model}
        if not options.model:
            llama = str(make_backbone("small", Path(directory), options.dtype))
            models = {f"Llama, {layers} layers x {heads} heads, width {width}": llama, "demo LM": str(DEMO_MODEL)}
        for name, path in models.items():
            rows = price(path, options.dtype, options.lengths, options.rounds)
            append("cost", [{**row, **where, "model": name} for row in rows], options.results)
            for row in rows:
                print(f"{name}: n = {row['tokens']}: {row['value']} ({row['low']} to {row['high']})", flush=True)


if __name__ == "__main__":
    main()
