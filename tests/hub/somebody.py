"""Somebody who pushes models, encodes to a data set and loads models, in a process of their own: ``somebody.py PLACE``.

It writes to the workplace: ``pushed.json`` with the outcome of each command, and each model's embeddings; once
``cases.json`` is there, ``loaded.json`` with module and embeddings, or the error, of each case: the arguments of
``SentenceTransformer``, or a reference, such as a GGUF file, and model_kwargs; and once ``offline.json`` is there, for
which no Hub is needed, ``read.json`` with the same, and ``gone.json`` with the outcome of a command without a Hub, too.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import CausalTransformer, ReBAModule

workplace = Path(sys.argv[1])
texts = (workplace / "texts.txt").read_text(encoding="utf-8").splitlines()
built = {"two": "reba-2", "three": "reba-3", "echo": "echo-2"}
places = {name: str(workplace / "built" / name) for name in built}


def pipeline(name: str, kind: type[CausalTransformer], **options: Any) -> SentenceTransformer:
    module = kind(name, **options)
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu")


def until(path: Path) -> Any:
    while not path.exists():
        time.sleep(0.02)
    return json.loads(path.read_text())


def write(name: str, found: Any) -> None:
    """All of it at once: somebody waits for it."""
    (workplace / "unfinished").write_text(json.dumps(found))
    (workplace / "unfinished").rename(workplace / name)


outcomes: dict[str, Any] = {}


def command(name: str, *arguments: str, token: str = os.environ["HF_TOKEN"]) -> None:
    """``st-reba``, as a shell runs it."""
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "300", "HF_TOKEN": token})
    # What typer itself did not turn into an exit code would be a trace.
    trace = None if isinstance(result.exception, SystemExit | None) else repr(result.exception)
    outcomes[name] = {"code": result.exit_code, "output": " ".join(result.output.split()), "trace": trace}


def push() -> None:
    for name, recipe in built.items():
        command(f"build {name}", "build", "--model", "base/tiny-llama", "--recipe", recipe, "--out", places[name])
        np.save(workplace / f"{name}.npy", SentenceTransformer(places[name], device="cpu").encode(texts))
    made = pipeline("base/tiny-llama", CausalTransformer)
    np.save(workplace / "made.npy", made.encode(texts))
    made.push_to_hub("org/made")
    command("new", "push", places["two"], "org/built")
    command("again", "push", places["two"], "org/built")
    command("branch", "push", places["three"], "org/built", "--revision", "three-copies", "--message", "Three copies")
    # An adapter of a saved model, whose language model is in a folder.
    adapted = SentenceTransformer("org/built", revision="three-copies", device="cpu")
    adapted.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.push_to_hub("org/adapted")
    command("pull request", "push", places["echo"], "org/built", "--create-pr")
    command("private", "push", places["two"], "org/built-secret", "--private")
    command("private over public", "push", places["two"], "org/built", "--private")
    command("wrong token", "push", places["two"], "org/built-other", token="hf_wrong")
    command("a stranger", "push", places["two"], "org/built", token="hf_stranger")
    at, options = "hf://datasets/org/vectors", ("--dtype", "float32", "--device", "cpu")
    for name, out, *how in (
        ("a file", f"{at}/a.npy"),
        ("in a folder", f"{at}/deep/a.parquet"),
        ("shards", f"{at}/shards", "--chunk-size", "1"),
        ("fewer shards", f"{at}/shards", "--chunk-size", "4", "--overwrite"),
        ("a file again", f"{at}/a.npy"),
        ("nowhere", "hf://datasets/org/none/a.npy"),
    ):
        command(name, "encode", places["two"], str(workplace / "texts.txt"), "--out", out, *options, *how)
    command("a typing error", "build", "--model", "org/modle", "--out", "m", token="")


def loaded(arguments: dict[str, Any] | tuple[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        if isinstance(arguments, dict):
            model = SentenceTransformer(**arguments, device="cpu")
        else:
            model = pipeline(arguments[0], ReBAModule, model_kwargs=arguments[1])
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"module": type(model[0]).__name__, "embeddings": model.encode(texts).tolist()}


push()
write("pushed.json", outcomes)
# Whoever loads has said who they are nowhere but in the arguments.
del os.environ["HF_TOKEN"]
for cases, found in (("cases.json", "loaded.json"), ("offline.json", "read.json")):
    write(found, {case: loaded(arguments) for case, arguments in until(workplace / cases).items()})
# The Hub is gone: nobody waits for it.
with patch("time.sleep"):
    command("no Hub", "build", "--model", "org/model", "--recipe", "prompteol", "--out", "m", token="")
write("gone.json", outcomes)
