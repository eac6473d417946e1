"""How far our vectors are from those of llemb, which reads the same prompts: rows of ``benchmarks/results/llemb.csv``.

    pip install llemb
    python benchmarks/beside_llemb.py --model DIR

Both embed 30 sentences of the package in float32: llemb one by one and in batches, ours in batches. Our names for
prompts stand for the papers' wordings; ``llemb's words`` gives our module llemb's prompt instead.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import records
from runs import options, parser
from st_reba import CausalTransformer
from st_reba.data.demo import demo_sentences

TEXTS = 30
#: llemb's arguments, and what the same is here: the module's settings, and the pooling.
SAME: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "mean of all tokens": ({"pooling_method": "mean"}, {"pool_over": "all"}, "mean"),
    "last token": ({"pooling_method": "last_token"}, {"pool_over": "all"}, "lasttoken"),
    "prompteol, by its name": ({"prompt_template": "prompteol"}, {"template": "prompteol"}, "lasttoken"),
    "pcoteol, by its name": ({"prompt_template": "pcoteol"}, {"template": "pretended-cot"}, "lasttoken"),
    "ke, by its name": ({"prompt_template": "ke"}, {"template": "knowledge"}, "lasttoken"),
    "prompteol, llemb's words": (
        {"prompt_template": "prompteol"},
        {"template": 'This Sentence : "{text}" means in one word:"', "pool_over": "all", "rows": "last"},
        "lasttoken",
    ),
    "pcoteol, llemb's words": (
        {"prompt_template": "pcoteol"},
        {
            "template": 'After thinking step by step, this sentence : "{text}" means in one word:"',
            "pool_over": "all", "rows": "last", "output_layer": -2, "final_norm": False,
        },
        "lasttoken",
    ),
}  # fmt: skip


def main() -> None:
    import llemb

    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--model", type=Path, required=True, help="directory of the language model")
    made.add_argument("--name", default="SmolLM2-135M-Instruct", help="its name in the table")
    given = options(made)
    texts = demo_sentences("en")[:TEXTS]
    encoder = llemb.Encoder(str(given.model), device="cpu", dtype=torch.float32)
    versions = f"llemb {version('llemb')}, {records.today()['versions']}"
    rows: list[records.Record] = []
    for what, (theirs, settings, pooling) in SAME.items():
        module = CausalTransformer(str(given.model), model_kwargs={"dtype": torch.float32}, **settings)
        pooled = Pooling(module.get_embedding_dimension(), pooling)
        model = SentenceTransformer(modules=[module, pooled], device="cpu")
        own = model.encode(texts, convert_to_tensor=True)
        alone = torch.cat([encoder.encode(text, **theirs) for text in texts])
        together = encoder.encode(texts, batch_size=16, **theirs)
        row: records.Record = {
            "model": given.name,
            "texts": TEXTS,
            "read": what,
            **records.today(),
            "versions": versions,
        }
        for beside, vectors in (("one by one", alone), ("in batches of 16", together)):
            cosines = torch.nn.functional.cosine_similarity(own, vectors)
            distance = float((own - vectors).abs().max() / vectors.abs().max())
            lowest = float(cosines.min().clip(max=1))
            rows.append({**row, "beside": beside, "low": lowest, "distance": distance, "versions": versions})
    records.rewrite("llemb", rows, given.results)


if __name__ == "__main__":
    main()
