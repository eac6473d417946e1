"""The command that ``compare`` prints builds the model that it has scored; and the language of its prompts."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer, SparseEncoder
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import TEMPLATES
from st_reba.compare.results import Comparison
from st_reba.compare.search import searched
from st_reba.data.demo import demo_pairs, demo_sentences

from ..backbones import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("quick_commands")

CHINESE = ["我爱自然语言处理。", "天气很好，我们去公园。", "猫在睡觉。"]
TOLD = "The texts are in Chinese, and so "


def run(*arguments, expect: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "900"})
    assert result.exit_code == expect, (result.output, result.exception)
    return result.output


@pytest.fixture
def texts(tmp_path):
    """Some of the package's sentences in a language, as a file to fit on."""

    def write(language: str):
        path = tmp_path / f"{language}.txt"
        path.write_text("\n".join(demo_sentences(language)[:60]), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("recipe", "options", "fitted_on", "expected"),
    [
        # On the demo LM, whose weights are bfloat16: in the precision of the comparison all the same.
        ("early-late", ("--model", DEMO_MODEL), None, "--recipe early-late"),
        ("early-late", ("--max-seq-length", 7), "en", "--recipe early-late"),
        ("early-late", ("--language", "zh"), None, "--recipe early-late-zh"),
        ("early-late", ("--language", "zh", "--prompt-language", "en"), "zh", "--prompt-language en"),
        ("prompteol+whitened", ("--prompt-language", "zh"), "en", "--recipe prompteol-zh+whitened"),
        # Its authors' prompts for queries and documents are not what was scored.
        ("promptreps", (), None, "--query-prompt '' --document-prompt ''"),
    ],
)
def test_the_printed_command_builds_what_was_scored(
    recipe, options, fitted_on, expected, texts, shallow_path, tmp_path, monkeypatch
):
    on = () if fitted_on is None else ("--fit-texts", texts(fitted_on))
    best, built, out = (tmp_path / name for name in ("best", "built", "out"))
    # These models are too small for any recipe to be advised.
    monkeypatch.setattr("st_reba.compare.answer._Held.against_controls", lambda *args: None)
    monkeypatch.setattr("st_reba.compare.answer._Held.against_nothing", lambda *args: None)
    run(
        "compare", "--model", shallow_path, "--device", "cpu", "--dtype", "float32", "--no-controls",
        "--recipes", recipe, *options, *on, "--save-best", best, "--out", out,
    )  # fmt: skip
    line = Comparison.load(out / "comparison.json").build
    assert expected in line
    *command, _ = shlex.split(line)[1:]
    run(*command, built)
    saved, again = (SentenceTransformer(str(path), device="cpu") for path in (best, built))
    for encode in ("encode", "encode_query", "encode_document"):
        first, second = (getattr(model, encode)([*CHINESE, "a cat"]) for model in (saved, again))
        np.testing.assert_allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ((), ["early-late", "prompteol"], ""),
        (("--language", "zh"), ["early-late-zh", "prompteol-zh"], "ask Early and late, PromptEOL;"),
        (("--data", "zh.tsv"), ["early-late-zh", "prompteol-zh"], "ask Early and late, PromptEOL;"),
        (("--language", "zh", "--prompt-language", "en"), ["early-late", "prompteol"], ""),
        (("--prompt-language", "zh"), ["early-late-zh", "prompteol-zh"], ""),
    ],
)
def test_compare_asks_in_the_language_of_the_texts(options, asked, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zh.tsv").write_bytes(demo_pairs("zh").read_bytes())

    def stop(backbone, recipes, *args, **settings):
        stop.recipes = [recipe.key for recipe in recipes]
        raise ValueError("enough")

    monkeypatch.setattr("st_reba.compare.run.work", stop)
    output = run("compare", "--model", DEMO_MODEL, "--recipes", "early-late,prompteol", *options, expect=1)
    assert stop.recipes == asked
    assert (TOLD in output) == bool(told)
    assert told in output


def test_a_search_asks_in_the_language_of_the_texts(monkeypatch):
    def stop(layers, rows):
        stop.rows = [row.key for row in rows]
        raise ValueError("enough")

    monkeypatch.setattr("st_reba.compare.search.candidates", stop)
    english = [row.key for row in searched()]
    assert TOLD not in run("search", "--model", DEMO_MODEL, "--device", "cpu", expect=1)
    assert stop.rows == english
    output = run("search", "--model", DEMO_MODEL, "--device", "cpu", "--language", "zh", expect=1)
    assert f"{TOLD}ask PromptEOL, Pretended CoT, Knowledge; --prompt-language en keeps" in output
    assert {"prompteol-zh", "pretended-cot-zh", "knowledge-zh-prepended"} < {*stop.rows}
    assert not {"prompteol", "pretended-cot", "knowledge-prepended"} & {*stop.rows}
    assert len(stop.rows) == len(set(stop.rows))
    run("search", "--model", DEMO_MODEL, "--device", "cpu", "--language", "zh", "--prompt-language", "en", expect=1)
    assert stop.rows == english


@pytest.mark.parametrize(
    ("options", "template", "told"),
    [
        (("--recipe", "early-late"), "prompteol", False),
        (("--recipe", "early-late", "--fit-texts", "zh"), "prompteol-zh", True),
        (("--method", "early-late", "--fit-texts", "en"), "prompteol", False),
        (("--recipe", "early-late", "--fit-texts", "zh", "--prompt-language", "en"), "prompteol", False),
        (("--recipe", "early-late", "--fit-texts", "zh", "--template", "prompteol"), "prompteol", False),
        (("--method", "prompteol", "--prompt-language", "zh"), "prompteol-zh", False),
        (("--recipe", "value-aggregation", "--prompt-language", "zh"), "prompteol-zh", False),
        (("--recipe", "promptreps", "--prompt-language", "zh"), "promptreps-zh", False),
        (("--sparse", "--prompt-language", "zh"), "promptreps-zh", False),
    ],
)
def test_build_asks_in_the_language_of_its_texts(options, template, told, texts, tmp_path):
    options = [texts(option) if option in ("en", "zh") and before == "--fit-texts" else option
               for before, option in zip(("", *options), options, strict=False)]  # fmt: skip
    output = run("build", "--model", DEMO_MODEL, "--out", tmp_path / "built", *options)
    family = SparseEncoder if "--sparse" in options else SentenceTransformer
    assert family(str(tmp_path / "built"), device="cpu")[0].template == TEMPLATES[template]
    assert (TOLD in output) == told
    card = (tmp_path / "built" / "README.md").read_text(encoding="utf-8")
    assert ("-zh" in card) == (template.endswith("-zh") and "--sparse" not in options)
