"""st_reba beside plain sentence-transformers, beside the bare matrix products, and beside itself, each text alone.

    python benchmarks/plain.py                                     # the demo LM and a Llama of 12 layers, width 512
    python benchmarks/plain.py --model DIR --name SmolLM2-135M-Instruct --texts 200 --dtype bfloat16
    python benchmarks/plain.py --table short                       # one text of 12 tokens
    python benchmarks/plain.py --table alone                       # what deterministic=True costs, by length
    python benchmarks/plain.py --table limit                       # what is left between a pass and its matrix products

"plain": texts of mixed lengths, log-uniform from 5 to 400 tokens, go through ``SentenceTransformer.encode`` as a user
calls it. Contenders take turns on parts of the texts, in the batches that ``encode`` makes of all of them, each with
weights of its own; what is compared is the time of the processor, because machines are shared. "limit": one batch of
equal lengths beside the products of its tokens with the weights of every linear layer, and nothing else; the rest is
told apart by torch's profiler. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerBase

from cost import make_backbone, named
from cost import texts as of_length
from records import DEMO_MODEL, Record
from runs import add_costs, contender, encoding, interleaved, options, parser, timed, times
from st_reba import CausalTransformer
from st_reba.data.demo import demo_sentences

PLAIN, CLASSICAL, ALONE = "sentence-transformers, mean", "Classical, mean", "Classical, mean, each text alone"
LIMIT = "its matrix products alone"
SHORTEST, LONGEST = 5, 400
BATCH = 32
#: Tokens of a batch beside texts that stand alone: as many texts as make so many, but no more than a batch.
TOKENS = 2048

Run = Callable[[Sequence[str]], object]

CONTENDERS = (CLASSICAL, ALONE, "Classical, last", "Echo-2, mean", "Echo-2, last", "ReBA-2, mean", "ReBA-2, last")
#: Besides, for one short text.
MORE = ("PromptEOL, last", "Bidirectional, mean", "RT-2, last", "KV re-routing, mean")
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
    """A contender, with weights of its own."""
    if name != PLAIN:
        backbone = CausalTransformer(path, model_kwargs={"dtype": dtype})
        if name == ALONE:
            return contender(CLASSICAL, backbone, deterministic=True)
        return contender(name, backbone, **({"rows": "last"} if name in ("Classical, last", "Echo-2, last") else {}))
    module = Transformer(path, model_kwargs={"dtype": dtype})
    tokenizer = cast(PreTrainedTokenizerBase, module.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device="cpu")


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
        share = len(self.words) / self.tokens(" ".join(self.words))
        lengths = (SHORTEST * (LONGEST / SHORTEST) ** self.source.random() for _ in range(count))
        return [" ".join(self.source.choices(self.words, k=max(1, round(share * length)))) for length in lengths]


def dealt(texts: Sequence[str], batch: int, parts: int) -> list[list[str]]:
    """Texts in parts of whole batches, those that ``encode`` makes of all of them: nobody pads more for taking turns.

    It sorts them by their characters, and each part again as it stands.
    """
    ordered = sorted(texts, key=len, reverse=True)
    batches = [ordered[first : first + batch] for first in range(0, len(ordered), batch)]
    return [[text for own in batches[part::parts] for text in own] for part in range(min(parts, len(batches)))]


def beside(
    contenders: Mapping[str, Run], unit: str, parts: Sequence[Sequence[str]], what: str, batch: int
) -> Iterator[Record]:
    """The time of each contender over that of one of them."""
    for run in contenders.values():
        run(parts[0][:8])
    spent = interleaved({name: timed(run) for name, run in contenders.items()}, parts)
    how = f"{what}, times of the processor, medians of {len(parts)} interleaved rounds"
    for row in times(spent, [(name, unit) for name in contenders if name != unit], how):
        yield {**row, "batch": batch}


def mixed(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Texts of mixed lengths."""
    contenders = {name: encoding(load(name, path, given.dtype), BATCH) for name in (PLAIN, *CONTENDERS)}
    parts = dealt(Texts(path).mixed(given.texts), BATCH, given.rounds)
    what = f"{given.texts} texts of {SHORTEST} to {LONGEST} tokens"
    return beside(contenders, PLAIN, parts, what, BATCH)


def short(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """One text at a time."""
    contenders = {name: encoding(load(name, path, given.dtype), 1) for name in (PLAIN, *CONTENDERS, *MORE)}
    for row in beside(contenders, PLAIN, [[Texts(path).of(12)]] * 30, "one text of 12 tokens", 1):
        yield {**row, "low": None, "high": None, "tokens": 12}


def alone(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Each text alone beside batches, by length."""
    source, models = Texts(path), {name: load(name, path, given.dtype) for name in (ALONE, CLASSICAL)}
    for length in given.lengths:
        texts = [source.of(length) for _ in range(max(1, min(BATCH, TOKENS // length)))]
        contenders = {name: encoding(model, len(texts)) for name, model in models.items()}
        for row in beside(contenders, CLASSICAL, [texts] * given.rounds, "texts of equal length", len(texts)):
            yield {**row, "tokens": length}


def products(module: CausalTransformer, tokens: int) -> Callable[[], None]:
    """The products of so many tokens with the weights of every linear layer, and nothing else."""
    layers = [layer for layer in module.model.modules() if isinstance(layer, nn.Linear)]
    inputs = {layer.in_features: torch.randn(tokens, layer.in_features, dtype=layer.weight.dtype) for layer in layers}

    def run() -> None:
        with torch.inference_mode():
            for layer in layers:
                nn.functional.linear(inputs[layer.in_features], layer.weight)

    return run


def account(run: Callable[[], object], times: int = 5) -> dict[str, float]:
    """Shares of the time of one run by what it is spent on."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.process_time()
        for _ in range(times):
            run()
        whole = time.process_time() - start
    spent: dict[str, float] = {}
    for event in found.key_averages():
        if event.key.startswith("aten::"):
            name = event.key.removeprefix("aten::")
            part = next((part for part, marks in PARTS if any(mark in name for mark in marks)), OTHER)
            spent[part] = spent.get(part, 0.0) + event.self_cpu_time_total / 1e6
    spent[BETWEEN] = max(0.0, whole - sum(spent.values()))
    return {part: value / sum(spent.values()) for part, value in spent.items()}


def limit(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """One batch beside its matrix products, and what the rest is."""
    length, batch = given.lengths[0], given.batch
    texts, model = of_length(length, batch), load(CLASSICAL, path, given.dtype)
    bare, whole = products(cast(CausalTransformer, model[0]), length * batch), encoding(model, batch)
    contenders: dict[str, Run] = {CLASSICAL: whole, LIMIT: lambda texts: bare()}
    what = "one batch beside its matrix products"
    for row in beside(contenders, CLASSICAL, [texts] * given.rounds, what, batch):
        yield {**row, "tokens": length, "quantity": "share of the time"}
    for part, share in sorted(account(lambda: whole(texts)).items(), key=lambda item: -item[1]):
        yield {
            "quantity": "share of the time by the profiler", "contender": part, "unit": CLASSICAL, "tokens": length,
            "batch": batch, "value": round(share, 4), "how": "torch's profiler, 5 runs",
        }  # fmt: skip


TABLES = {"plain": mixed, "short": short, "alone": alone, "limit": limit}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=TABLES, default="plain")
    made.add_argument("--model", help="a directory or a GGUF file; the demo LM and a random Llama if left out")
    made.add_argument("--name", help="what tables call it")
    made.add_argument("--texts", type=int, default=2000)
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--lengths", nargs="+", type=int, help="tokens of a text, where all have as many")
    made.add_argument("--batch", type=int, default=8, help="texts at a time, for the limit")
    made.add_argument("--dtype", default="float32")
    given = options(made, arguments)
    if given.model and not given.name:
        made.error("--model needs --name, what tables call it.")
    given.lengths = given.lengths or {"alone": [12, 32, 128, 512]}.get(given.table, [128])
    with tempfile.TemporaryDirectory() as directory:
        models = {given.name: given.model}
        if not given.model:
            models = {named("small"): str(make_backbone("small", Path(directory), given.dtype))}
            # Its tokens are not those of the texts for the limit.
            models |= {} if given.table == "limit" else {"demo LM": str(DEMO_MODEL)}
        for name, path in models.items():
            found = TABLES[given.table](path, given)
            add_costs(found, given, table=given.table, model=name, precision=given.dtype)


if __name__ == "__main__":
    main()
