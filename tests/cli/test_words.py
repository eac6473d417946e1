"""Nothing that a user gave or an error says is markup: brackets and colons are printed as they are."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from huggingface_hub import HfApi
from typer.testing import CliRunner

import st_reba
import st_reba_cli as cli
from st_reba import CausalTransformer
from st_reba.recipes import default_recipes
from st_reba_cli.common import clear_errors

from ..backbones import TEXTS
from ..conftest import pipeline

pytestmark = pytest.mark.usefixtures("quick_commands")

# Read as markup, the first is lost, the second closes what was never opened, the third becomes a sign.
ODD = Path("[report] a", "[", "red] :warning: b")


@pytest.fixture
def odd(tmp_path):
    (tmp_path / ODD).mkdir(parents=True)
    return tmp_path / ODD


@pytest.fixture
def pairs(odd):
    path = odd / "pairs.tsv"
    rows = [f"a cat {number}\ta dog {number * 7}\t{number % 5}" for number in range(20)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def model(backbone_path):
    return ("--model", backbone_path(), "--device", "cpu")


def run(*arguments, expect: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "900"})
    assert result.exit_code == expect, (result.output, result.exception)
    return result.output


class TestEveryCommand:
    def test_build(self, odd, backbone_path):
        out = odd / "model"
        assert f'Wrote {out}. Load it with: import st_reba; SentenceTransformer("{out}")' in run(
            "build", "--model", backbone_path(), "--out", out
        )
        assert f"{out} exists and is not an empty directory" in run(
            "build", "--model", backbone_path(), "--out", out, expect=1
        )

    def test_compare(self, odd, pairs, model, monkeypatch):
        def few(names, repetitions, fit_texts):
            return [recipe for recipe in default_recipes(1, fit_texts) if recipe.name == "Classical"]

        monkeypatch.setattr("st_reba_cli.running.compare.asked_for", few)
        report, best = odd / "report", odd / "best"
        renamed = pairs.rename(odd / "[data].tsv")
        shown = run("compare", *model, "--data", renamed, "--out", report, "--save-best", best)
        assert "20 pairs of [data].tsv" in shown
        assert f'to {best}. Load it with: import st_reba; SentenceTransformer("{best}")' in shown
        assert f"Report: {report / 'report.html'}" in shown
        assert f"{odd / 'no.tsv'}" in run("compare", *model, "--data", odd / "no.tsv", expect=1)

    def test_layers(self, odd, pairs, model):
        out = odd / "layers"
        shown = run("layers", *model, "--data", pairs, "--out", out)
        assert f"{pairs}: 20 pairs" in shown
        assert f"dependency.png to {out}" in shown
        assert f"{odd / 'no.tsv'}" in run("layers", *model, "--data", odd / "no.tsv", expect=1)

    def test_encode(self, odd, backbone_path):
        pipeline(CausalTransformer(backbone_path())).save_pretrained(str(odd / "model"))
        texts, out = odd / "texts.txt", odd / "out.npy"
        texts.write_text("\n".join(TEXTS), encoding="utf-8")
        assert f"vectors to {out}" in run("encode", odd / "model", texts, "--out", out, "--device", "cpu")
        assert f"{odd / 'no.txt'}" in run(
            "encode", odd / "model", odd / "no.txt", "--out", odd / "o.npy", "--device", "cpu", expect=1
        )

    def test_push(self, odd, backbone_path, monkeypatch):
        commit = SimpleNamespace(commit_url="https://hub/[a]")
        monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **options: None)
        monkeypatch.setattr(HfApi, "create_commit", lambda self, *args, **options: commit)
        pipeline(CausalTransformer(backbone_path())).save_pretrained(str(odd / "model"))
        assert f"Pushed {odd / 'model'} to org/name: https://hub/[a]" in run("push", odd / "model", "org/name")
        assert f"{odd / 'no'}: there is no such directory" in run("push", odd / "no", "org/name", expect=1)

    def test_train(self, odd, backbone_path):
        config = odd / "freeze.yaml"
        config.write_text(f"model: {backbone_path()}\npairs: '{odd / 'no.tsv'}'\nepochs: 1\n", encoding="utf-8")
        assert f"{odd / 'no.tsv'}" in run("train", "freeze", "--config", config, "--out", odd / "run", expect=1)
        assert f"{odd / 'no.yaml'}" in run(
            "train", "freeze", "--config", odd / "no.yaml", "--out", odd / "run", expect=1
        )

    def test_a_choice_that_is_none(self):
        assert "[red]x[/blue]" in run("build", "--out", "x", "--model", "x", "--method", "[red]x[/blue]", expect=1)


def _hints():
    """Every ``require_...`` of the package: what says that something is not installed."""
    found = {}
    for module in pkgutil.walk_packages(st_reba.__path__, "st_reba."):
        # The one module that cannot be imported without what it needs, and is imported where that is caught.
        if module.name == "st_reba.lm.attention.triton_kernel":
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.startswith("require_") and getattr(value, "__module__", None) == module.name:
                found[f"{module.name}.{name}"] = value
    return found


HINTS = _hints()
_OPTIONAL = (
    "matplotlib", "jinja2", "gguf", "mteb", "pyarrow", "ray", "peft", "datasets", "accelerate", "fastapi", "uvicorn",
    "prometheus_client",
)  # fmt: skip


#: What says that something is not installed: one place, what hands on the sentence of a file system of fsspec's, and
#: what transformers' other quantisers need.
REFUSING = {
    ("optional.py", "require"), ("sources.py", "_asking"), ("quantization.py", "_read"),
}  # fmt: skip


def test_every_refusal_for_a_missing_package_is_among_them():
    for path in Path(st_reba.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source if "ImportError" in source else "")
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if "raise ImportError" in ast.unparse(function):
                assert (path.name, function.name) in REFUSING, f"{path}: {function.name}"
    assert {"require_report", "require_pyarrow", "require_ray", "require_mteb", "require_gguf", "require_peft"} <= {
        name.rpartition(".")[2] for name in HINTS
    }


@pytest.mark.parametrize("hint", HINTS)
def test_an_install_hint_names_the_extra(hint, monkeypatch, capsys, tmp_path):
    for name in list(sys.modules):
        if name.partition(".")[0] in _OPTIONAL:
            monkeypatch.setitem(sys.modules, name, None)
    for name in _OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    needed = [
        tmp_path / "out" for each in inspect.signature(HINTS[hint]).parameters.values() if each.default is each.empty
    ]
    with pytest.raises(typer.Exit), clear_errors():
        HINTS[hint](*needed)
    said = capsys.readouterr().err
    (extra,) = re.findall(r"""pip install ['"]st[-_]reba\[(\w+)\]['"]""", said)
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras = text.partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    assert re.search(rf"^{extra} = ", extras, flags=re.MULTILINE)
