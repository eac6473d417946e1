"""st_reba beside plain sentence-transformers, and beside the bare matrix products.

    python benchmarks/plain.py                                     # the demo LM and a Llama of 12 layers, width 512
    python benchmarks/plain.py --model DIR --name SmolLM2-135M-Instruct --texts 200 --dtype bfloat16
    python benchmarks/plain.py --table short                       # one text of 12 tokens
    python benchmarks/plain.py --table limit                       # what is left between a pass and its matrix products

"plain": texts of mixed lengths, log-uniform from 5 to 400 tokens, go through ``SentenceTransformer.encode`` as a user
calls it. Contenders take turns on parts of the texts, in the batches that ``encode`` makes of all of them, each with
weights of its own; what is compared is the time of the processor, because machines are shared. "limit": one batch of
equal lengths beside the products of its tokens with the weights of every linear layer, and nothing else; the rest is
told apart by torch's profiler. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerBase

from cost import SIZES, make_backbone
from cost import texts as of_length
from given import for_one_model
from records import DEMO_MODEL, Value, append, machine, versions
from st_reba import CausalTransformer, EchoModule, KVReroutingModule, ReBAModule, RefinedThoughtModule
from st_reba.data.demo import demo_sentences
from st_reba.modules import CausalModule

PLAIN = "sentence-transformers, mean"
LIMIT = "its matrix products alone"
SHORTEST, LONGEST = 5, 400
BATCH = 32

Run = Callable[[Sequence[str]], object]
Make = Callable[[str, str], Transformer]


def plain(path: str, dtype: str) -> Transformer:
    module = Transformer(path, model_kwargs={"dtype": dtype})
    tokenizer = cast(PreTrainedTokenizerBase, module.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return module


def ours(kind: Callable[..., CausalModule], **settings: Any) -> Make:
    return lambda path, dtype: kind(path, model_kwargs={"dtype": dtype}, **settings)


CONTENDERS: dict[str, tuple[Make, str]] = {
    PLAIN: (plain, "mean"),
    "Classical, mean": (ours(CausalTransformer), "mean"),
    "Classical, mean, each text alone": (ours(CausalTransformer, deterministic=True), "mean"),
    "Classical, last": (ours(CausalTransformer, rows="last"), "lasttoken"),
    "Echo-2, mean": (ours(EchoModule), "mean"),
    "Echo-2, last": (ours(EchoModule, rows="last"), "lasttoken"),
    "ReBA-2, mean": (ours(ReBAModule), "mean"),
    "ReBA-2, last": (ours(ReBAModule, rows="last"), "lasttoken"),
}
#: Besides, for one short text.
MORE: dict[str, tuple[Make, str]] = {
    "PromptEOL, last": (ours(CausalTransformer, template="prompteol"), "lasttoken"),
    "Bidirectional, mean": (ours(CausalTransformer, bidirectional_layers=1), "mean"),
    "RT-2, last": (ours(RefinedThoughtModule, iterations=2), "lasttoken"),
    "KV re-routing, mean": (ours(KVReroutingModule), "mean"),
}

#: What an operation is for, by a part of its name; the first that fits.
PARTS = (
    ("matrix products", ("mm", "linear")),
    ("attention", ("attention", "softmax", "tril", "triu")),
    ("norms", ("pow", "mean", "rsqrt", "norm")),
    ("feed-forward part's product", ("silu", "gelu")),
    ("copies", ("copy", "cat", "clone", "contiguous", "_to_copy", "index", "gather", "stack", "embedding")),
)
OTHER, BETWEEN = "other operations (rotary positions, sums)", "between operations (Python, tokenizer)"


def load(name: str, path: str, dtype: str) -> SentenceTransformer:
    make, pooling = {**CONTENDERS, **MORE}[name]
    module = make(path, dtype)
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), pooling)], device="cpu")


class Texts:
    """Random words of the demo's sentences, or of the made-up vocabulary of a random model.

    Args:
        path: Of the model whose tokens are counted.
    """

    def __init__(self, path: str) -> None:
        self.tokenizer = cast(PreTrainedTokenizerBase, CausalTransformer(path).tokenizer)
        known = [word for word in self.tokenizer.get_vocab() if word.startswith("w") and word[1:].isdigit()]
        self.words = sorted(known) or " ".join(demo_sentences("en")).split()
        self.source = random.Random(0)

    def tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def of(self, tokens: int) -> str:
        """One of exactly so many tokens."""
        text = self.source.choice(self.words)
        while (missing := tokens - self.tokens(text)) > 0:
            text = " ".join([text, *self.source.choices(self.words, k=max(1, missing // 2))])
        return text if missing == 0 else self.of(tokens)

    def mixed(self, count: int) -> list[str]:
        ratio = len(self.words) / self.tokens(" ".join(self.words))
        lengths = (SHORTEST * (LONGEST / SHORTEST) ** self.source.random() for _ in range(count))
        return [" ".join(self.source.choices(self.words, k=max(1, round(ratio * length)))) for length in lengths]


def rounds(contenders: Mapping[str, Run], parts: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Seconds of the processor, of every part of the texts; contenders take turns."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for part in parts:
        for name, run in contenders.items():
            start = time.process_time()
            run(part)
            spent[name].append(time.process_time() - start)
    return spent


def dealt(texts: Sequence[str], batch: int, parts: int) -> list[list[str]]:
    """Texts in parts of whole batches, those that ``encode`` makes of all of them: nobody pads more for taking turns.

    It sorts them by their characters, and each part again as it stands.
    """
    ordered = sorted(texts, key=len, reverse=True)
    batches = [ordered[first : first + batch] for first in range(0, len(ordered), batch)]
    return [[text for own in batches[part::parts] for text in own] for part in range(min(parts, len(batches)))]


def encoding(model: SentenceTransformer, batch: int) -> Run:
    return lambda texts: model.encode(list(texts), batch_size=batch, show_progress_bar=False)


def ratio_rows(spent: Mapping[str, list[float]], unit: str, how: str) -> list[dict[str, Value]]:
    """Each contender's time over the unit's: of all parts together, and the lowest and the highest part."""
    rows: list[dict[str, Value]] = []
    for name, own in spent.items():
        ratios = [a / b for a, b in zip(own, spent[unit], strict=True)]
        if name != unit:
            rows.append(
                {"quantity": "time", "contender": name, "unit": unit, "value": round(sum(own) / sum(spent[unit]), 4),
                 "low": round(min(ratios), 4), "high": round(max(ratios), 4), "how": how}
            )  # fmt: skip
    return rows


def beside_plain(path: str, options: argparse.Namespace) -> list[dict[str, Value]]:
    texts = Texts(path).mixed(options.texts)
    parts = dealt(texts, BATCH, options.rounds)
    contenders = {name: encoding(load(name, path, options.dtype), BATCH) for name in CONTENDERS}
    for run in contenders.values():
        run(texts[:8])
    how = f"{options.texts} texts of {SHORTEST} to {LONGEST} tokens, times of the processor, {len(parts)} parts"
    return [{**row, "batch": BATCH} for row in ratio_rows(rounds(contenders, parts), PLAIN, how)]


def short(path: str, options: argparse.Namespace) -> list[dict[str, Value]]:
    """One text at a time."""
    texts = [Texts(path).of(12)]
    contenders = {name: encoding(load(name, path, options.dtype), 1) for name in (*CONTENDERS, *MORE)}
    for run in contenders.values():
        run(texts)
    spent = rounds(contenders, [texts] * 30)
    how = "one text of 12 tokens, times of the processor, 30 rounds"
    rows = ratio_rows({name: [median(own)] for name, own in spent.items()}, PLAIN, how)
    return [{**row, "low": None, "high": None, "tokens": 12, "batch": 1} for row in rows]


def products(module: CausalTransformer, tokens: int) -> Callable[[], object]:
    """The products of so many tokens with the weights of every linear layer, and nothing else."""
    layers = [layer for layer in module.model.modules() if isinstance(layer, nn.Linear)]
    inputs = {layer.in_features: torch.randn(tokens, layer.in_features, dtype=layer.weight.dtype) for layer in layers}

    def run() -> None:
        with torch.inference_mode():
            for layer in layers:
                nn.functional.linear(inputs[layer.in_features], layer.weight)

    return run


def part_of(name: str) -> str:
    return next((part for part, marks in PARTS if any(mark in name for mark in marks)), OTHER)


def account(run: Callable[[], object], times: int = 5) -> dict[str, float]:
    """Seconds of one run by what they are spent on."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.process_time()
        for _ in range(times):
            run()
        whole = time.process_time() - start
    spent: dict[str, float] = {}
    for event in found.key_averages():
        if event.key.startswith("aten::"):
            part = part_of(event.key.removeprefix("aten::"))
            spent[part] = spent.get(part, 0.0) + event.self_cpu_time_total / 1e6
    spent[BETWEEN] = max(0.0, whole - sum(spent.values()))
    return {part: value / times for part, value in spent.items()}


def limit(path: str, options: argparse.Namespace) -> list[dict[str, Value]]:
    """One batch beside its matrix products, and what the rest is."""
    length, batch = options.length, options.batch
    texts = of_length(length, batch)
    model = load("Classical, mean", path, options.dtype)
    first = model[0]
    assert isinstance(first, CausalTransformer)
    bare, whole = products(first, length * batch), encoding(model, batch)
    contenders: dict[str, Run] = {"Classical, mean": whole, LIMIT: lambda texts: bare()}
    for run in contenders.values():
        run(texts)
    spent = rounds(contenders, [texts] * options.rounds)
    shares = [a / b for a, b in zip(spent[LIMIT], spent["Classical, mean"], strict=True)]
    how = f"times of the processor, median of {options.rounds} interleaved rounds"
    shared = {"tokens": length, "batch": batch}
    rows: list[dict[str, Value]] = [
        {**shared, "quantity": "share of the time", "contender": LIMIT, "unit": "Classical, mean",
         "value": round(median(shares), 4), "low": round(min(shares), 4), "high": round(max(shares), 4), "how": how}
    ]  # fmt: skip
    parts = account(lambda: whole(texts))
    for part, value in sorted(parts.items(), key=lambda item: -item[1]):
        rows.append(
            {**shared, "quantity": "share of the time by the profiler", "contender": part, "unit": "Classical, mean",
             "value": round(value / sum(parts.values()), 4), "how": "torch's profiler, 5 runs"}
        )  # fmt: skip
    return rows


TABLES = {"plain": beside_plain, "short": short, "limit": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="plain")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text, for the limit")
    parser.add_argument("--batch", type=int, default=8, help="texts at a time, for the limit")
    parser.add_argument("--dtype", default="float32")
    options = for_one_model(parser, None, "a directory or a GGUF file; the demo LM and a random Llama if left out")
    where = {
        "table": options.table, "precision": options.dtype, "machine": machine("cpu", options.threads),
        "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        if options.model:
            models = {options.name: options.model}
        else:
            layers, heads, width, _ = SIZES["small"]
            llama = str(make_backbone("small", Path(directory), options.dtype))
            models = {f"Llama, {layers} layers x {heads} heads, width {width}": llama}
            if options.table != "limit":
                models["demo LM"] = str(DEMO_MODEL)
        for name, path in models.items():
            rows = [{**row, **where, "model": name} for row in TABLES[options.table](path, options)]
            append("cost", rows, options.results)
            for row in rows:
                print(f"{name}: {row['quantity']}: {row['contender']} / {row['unit']}: {row['value']}", flush=True)


if __name__ == "__main__":
    main()
