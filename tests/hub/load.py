"""Somebody who loads models: ``load.py WORKPLACE CASES OFFLINE``, in a process of its own.

Each case is a name and the arguments of ``SentenceTransformer``; or a reference, such as a GGUF file, and model_kwargs.
Writes what each gave to ``loaded.json`` in the workplace: the module's class and the embeddings, or the error. Once a
file ``the Hub is gone`` lies there, it does the same with the cases that need no Hub, and writes ``offline.json``.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import st_reba  # (all that a user adds)


def load(arguments: dict[str, Any] | tuple[str, dict[str, Any]], texts: list[str]) -> dict[str, Any]:
    try:
        if isinstance(arguments, dict):
            model = SentenceTransformer(**arguments, device="cpu")
        else:
            reference, model_kwargs = arguments
            module = st_reba.ReBAModule(reference, model_kwargs=model_kwargs)
            model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"module": type(model[0]).__name__, "embeddings": model.encode(texts).tolist()}


if __name__ == "__main__":
    workplace = Path(sys.argv[1])
    texts = json.loads((workplace / "texts.json").read_text())

    def write(name: str, cases: str) -> None:
        outcomes = {case: load(arguments, texts) for case, arguments in json.loads(cases).items()}
        (workplace / "unfinished.json").write_text(json.dumps(outcomes))
        (workplace / "unfinished.json").rename(workplace / f"{name}.json")

    write("loaded", sys.argv[2])
    while len(sys.argv) > 3 and not (workplace / "the Hub is gone").exists():
        time.sleep(0.01)
    if len(sys.argv) > 3:
        write("offline", sys.argv[3])
