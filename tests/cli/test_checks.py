"""What every command refuses: a sentence with the name of the thing and what to do, and nothing is written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

from st_reba import TEMPLATES, files
from st_reba.compare import report as page
from st_reba.data import sources
from st_reba.data.sources import ALL
from st_reba.hub.push import check_saved_model
from st_reba.recipes import default_recipes, find
from st_reba.text.templates import Template
from st_reba_cli import checks

from . import typed

refused = partial(typed, expect=1)

pytestmark = pytest.mark.usefixtures("quick_commands")


@pytest.fixture
def backbone_path(shallow_path):
    """How many layers there are does not matter to what is refused."""
    return lambda: shallow_path


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    rows = [f"a cat {number}\ta dog {number * 7}\t{number % 5}" for number in range(20)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


@pytest.fixture
def commands(tmp_path, pairs):
    """``commands(model, device)``: every command that loads a model, by name."""

    def lines(model, device=None):
        texts, config = tmp_path / "texts.txt", tmp_path / "freeze.yaml"
        texts.write_text("a\nb\n", encoding="utf-8")
        config.write_text(f"model: '{model}'\npairs: {pairs}\nepochs: 1\n", encoding="utf-8")
        on = () if device is None else ("--device", device)
        return {
            "compare": ("compare", "--model", model, "--data", pairs, *on),
            "layers": ("layers", "--model", model, "--data", pairs, "--out", tmp_path / "out", *on),
            "encode": ("encode", model, texts, "--out", tmp_path / "out.npy", *on),
            "build": ("build", "--model", model, "--out", tmp_path / "out"),
            "train": ("train", "freeze", "--config", config, "--out", tmp_path / "out"),
        }

    return lines


def test_the_hubs_own_word_is_passed_on(commands, monkeypatch):
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})()

    def fail(*args, **kwargs):
        try:
            raise RepositoryNotFoundError("404 Client Error\nmore", response=response)
        except RepositoryNotFoundError as error:
            raise OSError("long") from error

    monkeypatch.setattr("st_reba.modules.CausalTransformer", fail)
    assert "it cannot be had from the Hub (404 Client Error). Check the name" in refused(
        *commands("org/name")["compare"]
    )


class TestBothSayTheSame:
    """What a command refuses at once, by the standard library alone, st_reba refuses in the same words."""

    @pytest.mark.parametrize("name", ["no.tsv", "no.JSONL", "no.gz", "no*.tsv", "/no", "a/b/c"])
    def test_no_such_table(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert said_by(checks.check_source, name) == said_by(sources.files_here, name, ALL)

    @pytest.mark.parametrize("name", ["org/name", "name:subset:split", "s3://a/no.tsv"])
    def test_what_may_be_elsewhere(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        checks.check_source(name)
        assert sources.files_here(name, ALL) is None

    def test_every_kind_of_table_is_known(self):
        assert {*checks._TABLES} == {*sources.KINDS, *sources.COMPRESSIONS}

    def test_a_place_that_is_taken(self, pairs):
        assert said_by(checks.check_free, pairs.parent, "--out") == said_by(files.check_free, pairs.parent, "--out")

    def test_a_directory_that_is_not_there(self, tmp_path):
        assert said_by(check_saved_model, tmp_path / "no") in refused("push", tmp_path / "no", "org/name")

    def test_a_template_without_its_text(self):
        shared = "The template 'echoo' has no {text}"
        assert said_by(checks.check_template, "echoo").startswith(shared)
        assert said_by(Template.parse, "echoo").startswith(shared)
        assert {*checks.names()["templates"]} == TEMPLATES.keys()

    def test_a_recipe_that_does_not_exist(self, tmp_path, monkeypatch):
        shared = "There is no recipe 'eccho-2'. Near it: echo-2"
        assert said_by(find, "eccho-2").startswith(shared)
        # Where st_reba is imported, its own word is waited for.
        monkeypatch.delitem(sys.modules, "st_reba")
        assert said_by(checks.check_recipes, ["eccho-2"], str(tmp_path)).startswith(shared)


def said_by(refuses: Callable[..., object], *arguments: object) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        refuses(*arguments)
    return str(refused.value)


class TestDiskFull:
    @pytest.fixture
    def line(self, backbone_path, pairs, tmp_path, monkeypatch):
        def few(names, repetitions, fit_texts):
            return [recipe for recipe in default_recipes(1, fit_texts) if recipe.name == "Classical"]

        monkeypatch.setattr("st_reba.recipes.asked_for", few)
        paths = ("--out", tmp_path / "report", "--save-best", tmp_path / "best")
        return ("compare", "--model", backbone_path(), "--data", pairs, "--device", "cpu", *paths)

    def test_the_report(self, line, tmp_path, monkeypatch):
        """Its scores have been shown, nothing is left of it, and the best recipe is written."""
        monkeypatch.setattr(page, "write_csv", full)
        said = refused(*line)
        assert f"{tmp_path / 'report'} could not be written: there is no room left on the disk" in said
        assert "choose another --out" in said
        assert "Best on STS" in said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "pairs.tsv", "report.partial"]

    def test_the_best_recipe(self, line, tmp_path, monkeypatch):
        def fail(*args, **kwargs):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(SentenceTransformer, "save_pretrained", fail)
        said = refused(*line)
        assert f"{tmp_path / 'best'} could not be written: there is no room left on the disk" in said
        assert "choose another --save-best" in said
        assert (tmp_path / "report" / "results.csv").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.tsv", "report"]

    def test_embeddings_on_their_way(self, line, tmp_path, monkeypatch):
        monkeypatch.setattr("st_reba.evaluation.embedded.save", full)
        said = refused(*[part for part in line if part not in ("--out", tmp_path / "report")])
        assert "the disk is full. Embeddings lie there while they are scored" in said
        assert "TMPDIR" in said

    def test_layers(self, commands, backbone_path, tmp_path, monkeypatch):
        monkeypatch.setattr("st_reba.evaluation.DependencyEvaluator.draw", full)
        said = refused(*commands(backbone_path(), "cpu")["layers"])
        assert f"{tmp_path / 'out'} could not be written: there is no room left on the disk" in said
        assert not (tmp_path / "out").exists()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_results_need_neither_matplotlib_nor_jinja(backbone_path, pairs, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "out"
    said = refused(
        "compare", "--model", backbone_path(), "--data", pairs, "--device", "cpu", "--out", out,
        "--recipes", "classical", expect=0,
    )  # fmt: skip
    assert {path.name for path in out.iterdir()} == {"results.csv", "comparison.json"}
    assert said.startswith("--out will be results.csv and comparison.json, without a page.")
    assert 'pip install "st-reba[report]"' in said
    assert f"Report: {out / 'results.csv'}" in said
