"""Nothing that a user gave or an error says is markup: brackets and colons are printed as they are."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

import st_reba
import st_reba_cli as cli
from st_reba import CausalTransformer
from st_reba.recipes import default_recipes

from ..backbones import TEXTS
from ..conftest import pipeline
from . import typed

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


class TestEveryCommand:
    def test_build(self, odd, backbone_path):
        out = odd / "model"
        assert f'Wrote {out}. Load it with: import st_reba; SentenceTransformer("{out}")' in typed(
            "build", "--model", backbone_path(), "--out", out
        )
        assert f"{out} exists and is not an empty directory" in typed(
            "build", "--model", backbone_path(), "--out", out, expect=1
        )

    def test_compare(self, odd, pairs, model, monkeypatch):
        def few(names, repetitions, fit_texts):
            return [recipe for recipe in default_recipes(1, fit_texts) if recipe.name == "Classical"]

        monkeypatch.setattr("st_reba.recipes.asked_for", few)
        report, best = odd / "report", odd / "best"
        renamed = pairs.rename(odd / "[data].tsv")
        shown = typed("compare", *model, "--data", renamed, "--out", report, "--save-best", best)
        assert "20 pairs of [data].tsv" in shown
        assert f'to {best}. Load it with: import st_reba; SentenceTransformer("{best}")' in shown
        assert f"Report: {report / 'report.html'}" in shown
        assert f"{odd / 'no.tsv'}" in typed("compare", *model, "--data", odd / "no.tsv", expect=1)

    def test_layers(self, odd, pairs, model):
        out = odd / "layers"
        shown = typed("layers", *model, "--data", pairs, "--out", out)
        assert f"{pairs}: 20 pairs" in shown
        assert f"dependency.png to {out}" in shown
        assert f"{odd / 'no.tsv'}" in typed("layers", *model, "--data", odd / "no.tsv", expect=1)

    def test_encode(self, odd, backbone_path):
        pipeline(CausalTransformer(backbone_path())).save_pretrained(str(odd / "model"))
        texts, out = odd / "texts.txt", odd / "out.npy"
        texts.write_text("\n".join(TEXTS), encoding="utf-8")
        assert f"vectors to {out}" in typed("encode", odd / "model", texts, "--out", out, "--device", "cpu")
        assert f"{odd / 'no.txt'}" in typed(
            "encode", odd / "model", odd / "no.txt", "--out", odd / "o.npy", "--device", "cpu", expect=1
        )

    def test_push(self, odd, backbone_path, monkeypatch):
        commit = SimpleNamespace(commit_url="https://hub/[a]")
        monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **options: None)
        monkeypatch.setattr(HfApi, "create_commit", lambda self, *args, **options: commit)
        pipeline(CausalTransformer(backbone_path())).save_pretrained(str(odd / "model"))
        assert f"Pushed {odd / 'model'} to org/name: https://hub/[a]" in typed("push", odd / "model", "org/name")
        assert f"{odd / 'no'}: there is no such directory" in typed("push", odd / "no", "org/name", expect=1)

    def test_train(self, odd, backbone_path):
        config = odd / "freeze.yaml"
        config.write_text(
            f"model: {backbone_path()}\npairs: '{odd / 'no.tsv'}'\narguments: {{num_train_epochs: 1}}\n",
            encoding="utf-8",
        )
        assert f"{odd / 'no.tsv'}" in typed("train", "freeze", "--config", config, "--out", odd / "run", expect=1)
        assert f"{odd / 'no.yaml'}" in typed(
            "train", "freeze", "--config", odd / "no.yaml", "--out", odd / "run", expect=1
        )


def _asked():
    """Every extra that ``require`` names, and the package that it is to bring where it is written beside it."""
    for path in [*Path(st_reba.__file__).parent.rglob("*.py"), *Path(cli.__file__).parent.rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "require":
                name, extra, *_ = (getattr(argument, "value", None) for argument in call.args)
                yield str(extra), str(name or "").partition(".")[0]


#: What says that something is not installed: one place, what hands on the sentence of a file system of fsspec's, and
#: what transformers' other quantisers need.
REFUSING = {
    ("optional.py", "require"), ("sources.py", "_asking"), ("settings.py", "_quantization"),
}  # fmt: skip


def test_every_refusal_for_a_missing_package_is_among_them():
    for path in Path(st_reba.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source if "ImportError" in source else "")
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if "raise ImportError" in ast.unparse(function):
                assert (path.name, function.name) in REFUSING, f"{path}: {function.name}"


def test_an_install_hint_names_the_extra():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    asked = set(_asked())
    assert {"report", "ray", "mteb", "gguf", "train", "serve", "data"} <= {extra for extra, _ in asked}
    for extra, package in asked:
        assert package in " ".join(extras[extra])
