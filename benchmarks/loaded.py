"""Cost of embeddings beside a language model that a program has loaded: rows of ``benchmarks/results/loaded.csv``.

    python benchmarks/loaded.py --models DIR --model "Gemma 3 270M"

The model is loaded once, by transformers, and generates a text; then ``st_reba.build`` puts Echo topic on it, which
embeds, generates beside it in another thread, and embeds meanwhile.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import records
import st_reba
from real.models import MODELS
from runs import megabytes, options, parser
from st_reba.data.demo import demo_sentences

#: Texts that are embedded at a time beside the generation, and tokens that are generated.
TEXTS, TOKENS = 16, 64
QUESTION = "Which rivers flow through Europe?"


def measure(given: argparse.Namespace) -> dict[str, float]:
    """Return the figures by quantity."""
    path: Path = MODELS[given.model].located(given.models)
    file = {"gguf_file": path.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **file)
    lm: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=given.precision, **file)
    question = tokenizer(QUESTION, return_tensors="pt")

    def generated() -> torch.Tensor:
        tokens: torch.Tensor = lm.generate(**question, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
        return tokens

    def settings() -> list[Any]:
        return [lm.config.to_dict(), lm.generation_config.to_dict(), lm.config._attn_implementation]

    before, sentences, was = generated(), demo_sentences("en"), settings()
    weights = sum(weight.nbytes for weight in lm.parameters()) / 1e6
    held, start = megabytes(), time.process_time()
    model = st_reba.build(lm, "classical", tokenizer=tokenizer)
    made, grown = time.process_time() - start, megabytes() - held
    own = {weight.data_ptr() for weight in lm.parameters()}
    copied = sum(weight.nbytes for weight in model.parameters() if weight.data_ptr() not in own) / 1e6
    model = st_reba.build(lm, "echo-topic", sentences, tokenizer=tokenizer)
    texts = random.Random(0).sample(sentences, TEXTS)
    alone, found, batches = model.encode(texts), [], []
    thread = threading.Thread(target=lambda: found.append(generated()))
    thread.start()
    while thread.is_alive():
        batches.append(model.encode(texts))
    return {
        "MB of weights": weights, "MB of weights copied": copied, "MB more in memory": grown,
        "seconds to build it": made,
        "tokens generated beside it that differ": int((found[0] != before).sum() + (generated() != before).sum()),
        "batches embedded meanwhile": len(batches),
        "largest difference of these": max((float(np.abs(each - alone).max()) for each in batches), default=0.0),
        "settings of the model that differ": sum(one != other for one, other in zip(was, settings(), strict=True)),
    }  # fmt: skip


def main() -> None:
    made = parser(__doc__, out="build/loaded", data=False, models="build/models", threads=1)
    made.add_argument("--model", choices=MODELS, default="SmolLM2-135M-Instruct")
    given = options(made)
    about = {"model": given.model, "precision": given.precision, "threads": given.threads, **records.today()}
    rows = [{**about, "quantity": what, "value": round(value, 7)} for what, value in measure(given).items()]
    records.rewrite("loaded", rows, given.results)


if __name__ == "__main__":
    main()
