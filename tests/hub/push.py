"""Somebody who builds models and pushes them: ``push.py WORKPLACE``, in a process of its own.

Writes what each push gave to ``pushed.json`` in the workplace, and the embeddings of each model beside it.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from huggingface_hub import HfApi
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.modules import CausalModule

workplace = Path(sys.argv[1])
texts = json.loads((workplace / "texts.json").read_text())
outcomes: dict[str, dict[str, object]] = {}


def build(module: CausalModule, name: str) -> SentenceTransformer:
    parts = [module, Pooling(module.get_embedding_dimension(), "lasttoken"), Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    np.save(workplace / f"{name}.npy", model.encode(texts))
    return model


def command(name: str, *arguments: str, token: str = os.environ["HF_TOKEN"]) -> None:
    """``st-reba``, as a shell runs it."""
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "300", "HF_TOKEN": token})
    # What typer itself did not turn into an exit code would be a trace.
    trace = None if isinstance(result.exception, SystemExit | None) else repr(result.exception)
    outcomes[name] = {"code": result.exit_code, "output": " ".join(result.output.split()), "trace": trace}


def build_by_command(name: str, *options: str) -> str:
    directory = str(workplace / "built" / name)
    command(f"build {name}", "build", "--model", "base/tiny-llama", *options, "--out", directory)
    np.save(workplace / f"{name}.npy", SentenceTransformer(directory, device="cpu").encode(texts))
    return directory


def push_from_python() -> None:
    base = ReBAModule("base/tiny-llama")
    three = build(ReBAModule(base, repetitions=3), "three")
    outcomes["new"] = {"url": build(base, "two").push_to_hub("org/llama2-zh-reba")}
    three.push_to_hub("org/llama2-zh-reba", revision="three-copies", exist_ok=True, replace_model_card=True)
    pull_request = build(EchoModule(base), "echo").push_to_hub("org/llama2-zh-reba", create_pr=True)
    outcomes["pull request"] = {"url": pull_request}
    build(CausalTransformer(base), "classical").push_to_hub("org/secret", private=True)


def push_by_command() -> None:
    two = build_by_command("built-two")
    three = build_by_command("built-three", "--repetitions", "3")
    echo = build_by_command("built-echo", "--method", "echo")
    command("new", "push", two, "org/built")
    command("again", "push", two, "org/built")
    command("branch", "push", three, "org/built", "--revision", "three-copies", "--message", "Three copies")
    command("pull request", "push", echo, "org/built", "--create-pr")
    command("private", "push", two, "org/built-secret", "--private")
    command("private over public", "push", two, "org/built", "--private")
    command("wrong token", "push", two, "org/built-other", token="hf_wrong")
    command("no token", "push", two, "org/built-other", token="")
    command("a stranger", "push", two, "org/built", token="hf_stranger")
    command("no namespace of ours", "push", two, "somebody/new")
    command("large files refused", "push", two, "org/full")
    command("half way", "push", two, "org/half-way")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            HfApi().model_info("org/half-way")
        except Exception:
            time.sleep(0.1)
        else:
            break
    command("half way, again", "push", two, "org/half-way")


if __name__ == "__main__":
    push_from_python()
    from_python, outcomes = outcomes, {}
    push_by_command()
    (workplace / "pushed.json").write_text(json.dumps([from_python, outcomes]))
