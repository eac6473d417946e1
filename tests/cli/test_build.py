"""``st-reba build``; and the command that ``compare`` prints builds the model that it has scored, in its language."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

import st_reba
from st_reba import TEMPLATES, AttentionReranker
from st_reba.build import RECOMMENDED
from st_reba.compare.results import Comparison
from st_reba.data.demo import demo_sentences
from st_reba_cli.build import DEFAULT

from ..backbones import TEXTS
from . import typed

TOLD = "The texts are in Chinese, and so "


def built(options: str = "", model: str = "demo", family: type = SentenceTransformer):
    line = typed(f"build --model {model} --out out {options}").partition("Load it with: ")[2].strip()
    named: dict[str, Any] = {}
    # As it is printed.
    imports, _, call = line.rpartition("; ")
    exec(f"{imports}; loaded = {call}", named)
    assert type(named["loaded"]) is family
    return family("out", device="cpu")


def test_a_ready_directory(desk):
    """The same as st_reba.build's: see tests/test_build.py."""
    Path("texts.txt").write_text("\n".join(f"{number}: {text}" for number in range(9) for text in TEXTS))
    options = "--recipe 'Echo-2, layer 2, whitened' --template springer --fit-texts texts.txt"
    typed(f"build --model roomy --out deep/model {options}")
    module = SentenceTransformer("deep/model", device="cpu")[0]
    assert (module.repetitions, module.output_layer, module.template) == (2, 2, TEMPLATES["springer"])
    assert [path.name for path in Path("deep").iterdir()] == ["model"]


def test_the_default_is_that_of_python(desk):
    assert DEFAULT == RECOMMENDED
    expected = st_reba.build("demo", device="cpu").encode(TEXTS)
    assert np.allclose(built().encode(TEXTS), expected, atol=1e-6)


def test_sparse(desk):
    model = built("--sparse --recipe prompteol --query-prompt 'find '", family=SparseEncoder)
    assert model.prompts["query"] == "find "
    assert model.encode_query(TEXTS[:2]).shape == (2, model.get_embedding_dimension())
    assert model[0].template == TEMPLATES["prompteol"]


def test_rerank(desk, monkeypatch):
    """And its card and push name the class that loads it."""
    model = built("--rerank --max-seq-length 32", family=AttentionReranker)
    assert model[0].max_seq_length == 32
    assert len(model.rank("what chases a cat", TEXTS[:2])) == 2
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert "from st_reba import AttentionReranker" in card
    assert 'model = AttentionReranker("' in card
    assert " CrossEncoder(" not in card
    monkeypatch.setattr("st_reba.hub.push.push", lambda directory, repo_id, **options: f"https://hub/{repo_id}")
    assert 'Load it with: import st_reba; st_reba.AttentionReranker("org/lists")' in typed("push out org/lists")


def test_a_vector_for_each_token(desk):
    model = built("--multi-vector --recipe reba-2@2 --dimensions 8 --document-prompt x", "lm", MultiVectorEncoder)
    marks, word = model.encode_document(["?", "a"])
    assert (word.shape, len(marks)) == ((1, 8), 0)
    assert model.prompts["document"] == "x"
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert "A document's tokens that are nothing but punctuation have no vector." in card


def test_what_is_fitted_is_told(desk):
    texts = [f"{number}: {text}" for number in range(9) for text in TEXTS]
    Path("own.txt").write_text("\n".join(texts))
    output = typed("build --model lm --out own --recipe early-late --fit-texts own.txt")
    assert f"Fitting the filter, partwise whitened, on {len(texts)} texts. Wrote" in output
    output = typed("build --model lm --out demo-texts --recipe early-late")
    assert re.search(r"on \d+ sentences of the package. .*: --fit-texts\.", output)
    # Nothing is fitted before the model is loaded.
    assert "Fitting" not in typed("build --model no/such-model --out other --recipe early-late", expect=1)


def sentences(language: str) -> None:
    """Some of the package's own, as a file to fit on."""
    Path(f"{language}.txt").write_text("\n".join(demo_sentences(language)[:60]), encoding="utf-8")


PRINTED = [
    # On the demo LM, whose weights are bfloat16: in the precision of the comparison all the same.
    ("--recipes early-late --model demo", "--recipe early-late"),
    ("--recipes early-late --data zh.tsv --prompt-language en --fit-texts zh.txt", "--prompt-language en"),
    # Its authors' prompts for queries and documents are not what was scored.
    ("--recipes promptreps --max-seq-length 7", "--query-prompt '' --document-prompt ''"),
]


@pytest.mark.parametrize(("options", "expected"), PRINTED)
def test_the_printed_command_builds_what_was_scored(options, expected, desk, monkeypatch):
    # These models are too small for any recipe to be surely ahead.
    monkeypatch.setattr("st_reba.compare.answer.Replicated.ahead", lambda *given: True)
    sentences("zh")
    fixed = "--model shallow --data pairs.tsv --device cpu --dtype float32 --no-controls --save-best best --out out"
    assert TOLD not in typed(f"compare {fixed} {options}")
    line = Comparison.load(Path("out/comparison.json")).build
    assert expected in line
    typed(shlex.join([*shlex.split(line)[1:-1], "built"]))
    saved, again = (SentenceTransformer(path, device="cpu") for path in ("best", "built"))
    for encode in ("encode", "encode_query", "encode_document"):
        first, second = (getattr(model, encode)([*TEXTS, "a cat"]) for model in (saved, again))
        np.testing.assert_allclose(first, second, atol=1e-6)


LANGUAGES = [
    ("--recipe early-late --fit-texts zh.txt", "prompteol-zh", True),
    ("--recipe early-late --fit-texts zh.txt --prompt-language en", "prompteol", False),
]


@pytest.mark.parametrize(("options", "template", "told"), LANGUAGES)
def test_build_asks_in_the_language_of_its_texts(options, template, told, desk):
    sentences("zh")
    assert (TOLD in typed(f"build --model shallow --out out {options}")) == told
    assert SentenceTransformer("out", device="cpu")[0].template == TEMPLATES[template]
