"""Somebody who pushes models or loads them, in a process of their own: ``somebody.py WORKPLACE push``, or ``load``.

``push`` writes what each push gave to ``pushed.json`` in the workplace, and the embeddings of each model beside it.
``load CASES OFFLINE`` writes to ``loaded.json``, for each case, the module's class and the embeddings, or the error. A
case is a name and the arguments of ``SentenceTransformer``, or a reference, such as a GGUF file, and model_kwargs. Once
a file ``the Hub is gone`` lies there, it does the same with the cases that need no Hub, and writes ``offline.json``.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import st_reba  # (all that a user who loads adds)

workplace = Path(sys.argv[1])
texts = json.loads((workplace / "texts.json").read_text())


def push() -> None:
    from huggingface_hub import HfApi
    from typer.testing import CliRunner

    import st_reba_cli as cli

    outcomes: dict[str, dict[str, object]] = {}

    def command(name: str, *arguments: str, token: str = os.environ["HF_TOKEN"]) -> None:
        """``st-reba``, as a shell runs it."""
        result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "300", "HF_TOKEN": token})
        # What typer itself did not turn into an exit code would be a trace.
        trace = None if isinstance(result.exception, SystemExit | None) else repr(result.exception)
        outcomes[name] = {"code": result.exit_code, "output": " ".join(result.output.split()), "trace": trace}

    for name, options in {"two": [], "three": ["--repetitions", "3"], "echo": ["--method", "echo"]}.items():
        directory = str(workplace / "built" / name)
        command(f"build {name}", "build", "--model", "base/tiny-llama", *options, "--out", directory)
        np.save(workplace / f"{name}.npy", SentenceTransformer(directory, device="cpu").encode(texts))
    module = st_reba.CausalTransformer("base/tiny-llama")
    made = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    np.save(workplace / "made.npy", made.encode(texts))
    made.push_to_hub("org/made")
    two, three, echo = (str(workplace / "built" / name) for name in ("two", "three", "echo"))
    command("new", "push", two, "org/built")
    command("again", "push", two, "org/built")
    command("branch", "push", three, "org/built", "--revision", "three-copies", "--message", "Three copies")
    command("pull request", "push", echo, "org/built", "--create-pr")
    command("private", "push", two, "org/built-secret", "--private")
    command("private over public", "push", two, "org/built", "--private")
    command("wrong token", "push", two, "org/built-other", token="hf_wrong")
    command("a stranger", "push", two, "org/built", token="hf_stranger")
    command("half way", "push", two, "org/half-way")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            HfApi().model_info("org/half-way")
            break
        except Exception:
            time.sleep(0.1)
    command("half way, again", "push", two, "org/half-way")
    (workplace / "pushed.json").write_text(json.dumps(outcomes))


def loaded(arguments: dict[str, Any] | tuple[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        if isinstance(arguments, dict):
            model = SentenceTransformer(**arguments, device="cpu")
        else:
            module = st_reba.ReBAModule(arguments[0], model_kwargs=arguments[1])
            model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"module": type(model[0]).__name__, "embeddings": model.encode(texts).tolist()}


def load(cases: str, offline: str) -> None:
    for name, own in (("loaded", cases), ("offline", offline)):
        while name == "offline" and not (workplace / "the Hub is gone").exists():
            time.sleep(0.01)
        outcomes = {case: loaded(arguments) for case, arguments in json.loads(own).items()}
        (workplace / "unfinished.json").write_text(json.dumps(outcomes))
        (workplace / "unfinished.json").rename(workplace / f"{name}.json")


if __name__ == "__main__":
    push() if sys.argv[2] == "push" else load(*sys.argv[3:])
