"""Somebody who builds models and pushes them: ``push.py WORKPLACE``, in a process of its own.

Writes what each push gave to ``pushed.json`` in the workplace, and the embeddings of each model beside it.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import HfApi, HfFileSystem
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import CausalTransformer, EchoModule, ReBAModule

workplace = Path(sys.argv[1])
texts = json.loads((workplace / "texts.json").read_text())
outcomes: dict[str, dict[str, Any]] = {}


def build(module: CausalTransformer | EchoModule | ReBAModule, name: str) -> SentenceTransformer:
    parts = [module, Pooling(module.get_embedding_dimension(), "lasttoken"), Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    np.save(workplace / f"{name}.npy", model.encode(texts))
    return model


def attempt(name: str, push: Callable[[], str]) -> None:
    try:
        outcomes[name] = {"url": push()}
    except Exception as error:
        outcomes[name] = {"error": type(error).__name__, "message": str(error)}
    (workplace / "pushed.json").write_text(json.dumps(outcomes))


def command(name: str, *arguments: str, token: str | None = None) -> None:
    """``st-reba``, as a shell runs it; without another token, the one that this process was given."""
    environment = {"COLUMNS": "300", **({"HF_TOKEN": token} if token is not None else {})}
    result = CliRunner().invoke(cli.app, arguments, env=environment)
    # What typer itself did not turn into an exit code would be a trace.
    trace = None if isinstance(result.exception, SystemExit | None) else repr(result.exception)
    outcomes[name] = {"code": result.exit_code, "output": " ".join(result.output.split()), "trace": trace}
    (workplace / "pushed.json").write_text(json.dumps(outcomes))


def build_by_command(name: str, *options: str) -> str:
    directory = str(workplace / "built" / name)
    command(f"build {name}", "build", "--model", "base/tiny-llama", *options, "--out", directory)
    np.save(workplace / f"{name}.npy", SentenceTransformer(directory, device="cpu").encode(texts))
    return directory


def push_by_command() -> None:
    two = build_by_command("built-two")
    command("command", "push", two, "org/built")
    command("command, again", "push", two, "org/built")
    three = build_by_command("built-three", "--repetitions", "3")
    command("command, branch", "push", three, "org/built", "--revision", "three-copies", "--message", "Three copies")
    echo = build_by_command("built-echo", "--method", "echo")
    command("command, pull request", "push", echo, "org/built", "--create-pr")
    command("command, private", "push", two, "org/built-secret", "--private")
    command("command, private over public", "push", two, "org/built", "--private")

    command("command, wrong token", "push", two, "org/built-other", token="hf_wrong")
    command("command, no token", "push", two, "org/built-other", token="")
    command("command, a stranger", "push", two, "org/built", token="hf_stranger")
    command("command, no namespace of ours", "push", two, "somebody/new")
    command("command, no repository of ours", "push", two, "somebody/theirs")
    command("command, large files refused", "push", two, "org/full")

    command("command, half way", "push", two, "org/built-half-way")
    wait_for_the_hub()
    command("command, half way, again", "push", two, "org/built-half-way")


def wait_for_the_hub(seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            HfApi().whoami()
        except Exception:
            time.sleep(0.1)
        else:
            return


def look_around(repo_id: str) -> dict[str, Any]:
    """What the client's other calls say of a repository."""
    api = HfApi()
    api.create_branch(repo_id, branch="scratch/pad")
    api.delete_file("README.md", repo_id, revision="scratch/pad")
    information, refs = api.model_info(repo_id), api.list_repo_refs(repo_id, include_pull_requests=True)
    return {
        "user": api.whoami()["name"],
        "tags": information.tags,
        "pipeline_tag": information.pipeline_tag,
        "files": api.list_repo_files(repo_id),
        "files after deletion": api.list_repo_files(repo_id, revision="scratch/pad"),
        "folders": [entry.path for entry in api.list_repo_tree(repo_id) if not hasattr(entry, "size")],
        "references": sorted(ref.ref for ref in [*refs.branches, *refs.tags, *(refs.pull_requests or ())]),
        "bytes 8 to 12": HfFileSystem().cat_file(f"{repo_id}/0_ReBAModule/model.safetensors", start=8, end=12).decode(),
    }


if __name__ == "__main__":
    base = ReBAModule("base/tiny-llama")
    two = build(base, "two")
    attempt("new", lambda: two.push_to_hub("org/llama2-zh-reba"))
    attempt("already there", lambda: two.push_to_hub("org/llama2-zh-reba"))
    HfApi().create_tag("org/llama2-zh-reba", tag="v1")

    three = build(ReBAModule(base, repetitions=3), "three")
    attempt(
        "branch",
        lambda: three.push_to_hub(
            "org/llama2-zh-reba", revision="three-copies", exist_ok=True, replace_model_card=True
        ),
    )
    echo = build(EchoModule(base), "echo")
    attempt("pull request", lambda: echo.push_to_hub("org/llama2-zh-reba", create_pr=True))
    classical = build(CausalTransformer(base), "classical")
    outcomes["looked around"] = look_around("org/llama2-zh-reba")
    attempt("private", lambda: classical.push_to_hub("org/secret", private=True))

    attempt("wrong token", lambda: two.push_to_hub("org/other", token="hf_wrong"))
    attempt("no namespace of ours", lambda: two.push_to_hub("somebody/new"))
    attempt("no repository of ours", lambda: two.push_to_hub("somebody/theirs", exist_ok=True))

    attempt("half way", lambda: two.push_to_hub("org/half-way"))
    wait_for_the_hub()
    attempt("half way, again", lambda: two.push_to_hub("org/half-way", exist_ok=True))

    push_by_command()
