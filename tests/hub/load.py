"""Somebody who loads models: ``load.py WORKPLACE CASES``, in a process of its own.

Each case is a name and the arguments of ``SentenceTransformer``. Writes what each gave to ``loaded.json`` in the
workplace: the module's class and the embeddings, or the error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

import st_reba  # noqa: F401  (all that a user adds)


def load(arguments: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    try:
        model = SentenceTransformer(**arguments, device="cpu")
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"module": type(model[0]).__name__, "embeddings": model.encode(texts).tolist()}


if __name__ == "__main__":
    workplace = Path(sys.argv[1])
    texts = json.loads((workplace / "texts.json").read_text())
    outcomes = {name: load(arguments, texts) for name, arguments in json.loads(sys.argv[2]).items()}
    (workplace / "loaded.json").write_text(json.dumps(outcomes))
