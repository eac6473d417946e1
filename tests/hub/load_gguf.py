"""Somebody who loads GGUF files: ``load_gguf.py WORKPLACE CASES``, in a process of its own.

Each case is a name, a reference and ``model_kwargs``. Writes what each gave to ``loaded.json`` in the workplace: the
embeddings, or the error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import ReBAModule


def load(reference: str, model_kwargs: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    try:
        module = ReBAModule(reference, repetitions=2, model_kwargs=model_kwargs)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device="cpu")
    return {"embeddings": model.encode(texts).tolist()}


if __name__ == "__main__":
    workplace = Path(sys.argv[1])
    texts = json.loads((workplace / "texts.json").read_text())
    cases = json.loads(sys.argv[2]).items()
    outcomes = {name: load(reference, model_kwargs, texts) for name, (reference, model_kwargs) in cases}
    (workplace / "loaded.json").write_text(json.dumps(outcomes))
