"""How much of an embedding is its batch: each text alone, and among texts of any length, in each precision.

    python benchmarks/batches.py                             # the demo LM, a few minutes on one core
    python benchmarks/batches.py --model DIR --device cuda

For every module, the largest distance between the two, as the norm of the difference over the norm. No two shapes of a
matrix product need round alike, so it is rounding, and what it comes to depends on the precision. What was measured is
added to results/batches.csv; ``make tables`` puts it where it is shown.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path

from sentence_transformers import SentenceTransformer
from torch import Tensor

import st_reba
from records import DEMO_MODEL, append, machine, today
from runs import options, parser, pooled

MODULES = {
    "Classical": ("CausalTransformer", {}),
    "Bag of input embeddings": ("InputEmbeddings", {}),
    "Echo": ("EchoModule", {}),
    "Bidirectional last layer": ("BidirectionalLastLayer", {}),
    "ReBA": ("ReBAModule", {}),
    "Refined Thought, 2 passes": ("RefinedThoughtModule", {}),
    "Refined Thought, 4 passes": ("RefinedThoughtModule", {"iterations": 4}),
    "MetaEOL": ("MetaEOLModule", {}),
    "KV re-routing": ("KVReroutingModule", {}),
    "Token prepending": ("TokenPrependingModule", {}),
    "Value aggregation": ("ValueAggregationModule", {}),
    "Contrastive prompting": ("ContrastivePromptingModule", {}),
}
#: Number of orders in which the texts form one batch.
ORDERS = 3
TEXTS = [
    "a", "我", "👩‍👩‍👧", "The cat sat on the mat.", "我爱自然语言处理。", "\x00\t\n!", "ﷺ e\u0301 ß", "{text} {0}",
    "1234567890 " * 6, "The quick brown fox jumps over the lazy dog. " * 4, "汉字" * 40, "x" * 200,
]  # fmt: skip


def largest_distance(model: SentenceTransformer, orders: Sequence[list[str]]) -> float:
    """How far a text's embedding in a batch is from that of the text alone, at most."""

    def encode(texts: list[str]) -> Tensor:
        return model.encode(texts, batch_size=len(texts), convert_to_tensor=True).cpu().double()

    alone = {text: encode([text])[0] for text in TEXTS}
    together = [(text, own) for order in orders for text, own in zip(order, encode(order), strict=True)]
    return max(float((own - alone[text]).norm() / alone[text].norm()) for text, own in together)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False)
    made.add_argument("--model", default=str(DEMO_MODEL))
    made.add_argument("--device", default="cpu")
    given = options(made, arguments)
    warnings.simplefilter("ignore")
    draw = random.Random(0)
    orders = [draw.sample(TEXTS, len(TEXTS)) for _ in range(ORDERS)]
    shown = "demo LM" if given.model == str(DEMO_MODEL) else Path(given.model).name
    where = {"model": shown, "machine": machine(given.device, given.threads), **today()}
    for name, (kind, settings) in MODULES.items():
        for dtype in ("float32", "bfloat16"):
            module = getattr(st_reba, kind)(given.model, model_kwargs={"dtype": dtype}, **settings).to(given.device)
            # One part a batch, whatever the device: smaller parts would hide how much a batch can change.
            module.CPU_TOKENS = 2**20
            distance = float(f"{max(largest_distance(pooled(module, end), orders) for end in ('mean', 'last')):.1e}")
            append("batches", [{**where, "module": name, "precision": dtype, "distance": distance}], given.results)
            print(f"{name}, {dtype}: {distance}", flush=True)


if __name__ == "__main__":
    main()
