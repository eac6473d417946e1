"""How much of an embedding is its batch: each text alone, and among texts of any length, in each precision.

For every module, the largest distance between the two, as the norm of the difference over the norm. No two shapes of a
matrix product need round alike, so it is rounding, and what it comes to depends on the precision. What was measured is
added to results/batches.csv; ``make tables`` puts it where it is shown.

    python benchmarks/batches.py                             # the demo LM, a few minutes on one core
    python benchmarks/batches.py --model DIR --device cuda
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from records import DEMO_MODEL, RESULTS, Value, append, machine, versions
from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    ContrastivePromptingModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)

MODULES = {
    "Classical": (CausalTransformer, {}),
    "Bag of input embeddings": (InputEmbeddings, {}),
    "Echo": (EchoModule, {}),
    "Bidirectional last layer": (BidirectionalLastLayer, {}),
    "ReBA": (ReBAModule, {}),
    "ReBA in chunks of 16": (ReBAModule, {"chunk_length": 16}),
    "Refined Thought, 2 passes": (RefinedThoughtModule, {}),
    "Refined Thought, 4 passes": (RefinedThoughtModule, {"iterations": 4}),
    "MetaEOL": (MetaEOLModule, {}),
    "KV re-routing": (KVReroutingModule, {}),
    "Token prepending": (TokenPrependingModule, {}),
    "Token prepending, blocks": (HierarchicalTokenPrependingModule, {}),
    "Value aggregation": (ValueAggregationModule, {}),
    "Contrastive prompting": (ContrastivePromptingModule, {}),
}
TEXTS = [
    "a", "我", "👩‍👩‍👧", "The cat sat on the mat.", "我爱自然语言处理。", "\x00\t\n!", "ﷺ e\u0301 ß", "{text} {0}",
    "1234567890 " * 6, "The quick brown fox jumps over the lazy dog. " * 4, "汉字" * 40, "x" * 200,
]  # fmt: skip


def distances(encode: Callable[[list[str]], Tensor], orders: list[list[str]]) -> Tensor:
    """(orders, T): how far each text's embedding in a batch is from that of the text alone."""
    alone = {text: encode([text]).double()[0] for text in TEXTS}
    together = [dict(zip(order, encode(order).double(), strict=True)) for order in orders]
    return torch.tensor([[(own[text] - alone[text]).norm() / alone[text].norm() for text in TEXTS] for own in together])


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--orders", type=int, default=3, help="In how many orders the texts form one batch.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of batches.csv")
    arguments = parser.parse_args(given)
    warnings.simplefilter("ignore")
    generator = random.Random(0)
    orders = [generator.sample(TEXTS, len(TEXTS)) for _ in range(arguments.orders)]
    shown = "demo LM" if arguments.model == str(DEMO_MODEL) else Path(arguments.model).name
    where: dict[str, Value] = {
        "machine": machine(arguments.device, torch.get_num_threads()),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name, (module_class, settings) in MODULES.items():
        for dtype in arguments.dtypes:
            module = module_class(arguments.model, model_kwargs={"dtype": dtype}, **settings)
            # One part a batch, whatever the device: smaller parts would hide how much a batch can change.
            module.CPU_TOKENS = 2**20
            largest = 0.0
            for pooling in ("mean", "lasttoken"):
                modules = [module, Pooling(module.get_embedding_dimension(), pooling)]
                model = SentenceTransformer(modules=modules, device=arguments.device)

                def encode(texts: list[str], model: SentenceTransformer = model) -> Tensor:
                    return model.encode(texts, batch_size=len(texts), convert_to_tensor=True).cpu()

                largest = max(largest, float(distances(encode, orders).max()))
            row = {"module": name, "model": shown, "precision": dtype, "distance": float(f"{largest:.1e}"), **where}
            append("batches", [row], arguments.results)
            print(f"{name}, {dtype}: {largest:.1e}", flush=True)


if __name__ == "__main__":
    main()
