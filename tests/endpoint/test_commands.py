"""Commands over a server: which words and filter suit it, and the model that is built of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from st_reba import EndpointTransformer
from st_reba.compare.choice import with_candidates
from st_reba.compare.results import Comparison
from st_reba.recipes.endpoint import on_endpoint, recipes_on

from ..cli import typed
from ..cli.conftest import written
from .server import Server


@pytest.fixture
def server(roomy_path):
    opened = Server(AutoModel.from_pretrained(roomy_path).eval(), AutoTokenizer.from_pretrained(roomy_path))
    yield opened
    opened.close()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with pairs of texts: the more words they share, the higher their score."""
    monkeypatch.chdir(tmp_path)
    words = ("cat", "runs", "home", "fast")
    others = ("sun", "was", "low", "there")
    lines = []
    for number in range(16):
        for score in range(5):
            second = [*words[:score], *others[score:]]
            lines.append(f"the {' '.join(words)} {number}\tthe {' '.join(second)} {number}\t{score}\n")
    Path("pairs.tsv").write_text("".join(lines))
    return tmp_path


def test_compare_prints_a_line_that_builds_what_was_scored(server, desk):
    data = "--data pairs.tsv --no-choose --fit-texts pairs.tsv"
    told = typed(
        f"compare --endpoint {server.url}/api/embed --recipes classical+whitened,prompteol {data} --out report"
    )
    assert "the server's vectors as they are" not in told.partition("server")[0]
    found = Comparison.load(Path("report/comparison.json"))
    assert [each.name for each in found.results if each.control] == ["tf-idf, mean"]
    assert {each.name for each in found.results} == {"Classical, whitened, server", "PromptEOL, server", "tf-idf, mean"}
    assert (found.model, found.settings["form"]) == (f"{server.url}/api/embed", "ollama")
    line = f"build --endpoint {server.url}/api/embed --recipe classical+whitened --fit-texts pairs.tsv --out my-model"
    assert typed(line).startswith("Fitting the filter, whitened, on")
    model = SentenceTransformer("my-model", device="cpu")
    assert [type(part).__name__ for part in model.children()] == [
        "EndpointTransformer", "WhiteningTransform", "Normalize"
    ]  # fmt: skip
    assert model.encode(["the cat", ""]).shape == (2, 32)


def test_compare_chooses_words_on_one_half(server, desk):
    # The server understands one question alone, and gives noise for all else.
    generator, answer = np.random.default_rng(0), server.vector
    server.vector = lambda text: answer(text) if "summary" in text else generator.normal(size=32)
    Path("prompts.txt").write_text('{text}" in summary:"\n')
    told = typed(
        f"compare --endpoint {server.url}/embed --data pairs.tsv --recipes classical,topic --prompts prompts.txt"
    )
    assert "prompt 1" in told
    assert f"{server.url}/embed on 80 pairs of pairs.tsv" in told


def test_a_llama_server_is_compared_by_its_tokens(server, desk):
    Path("few.tsv").write_text("".join(Path("pairs.tsv").read_text().splitlines(keepends=True)[:20]))
    line = f"compare --endpoint {server.url} --form llama.cpp --recipes classical,echo-topic --data few.tsv"
    told = typed(f"{line} --fit-texts few.tsv --no-controls --out report")
    names = {each.name for each in Comparison.load(Path("report/comparison.json")).results}
    assert names == {"Classical, mean", "Classical, last", "Echo topic, standardised sum, mean"}
    assert "Left out" not in told


def test_what_is_tried_over_a_server(server):
    states = recipes_on(EndpointTransformer(server.url, form="llama.cpp"))
    assert {"Classical, whitened, mean", "Classical, last", "Echo-2, mean", "Echo topic, standardised sum, mean"} < {
        recipe.result for recipe in states
    }
    endpoint = EndpointTransformer(server.url)
    vectors = [on_endpoint(recipe, endpoint) for recipe in recipes_on(endpoint)]
    assert {recipe.pooling for recipe in vectors} == {"server"}
    topics = [recipe.name for recipe in vectors if recipe.row.key == "topic"]
    assert topics == [
        "Topic, standardised sum", "Topic", "Topic, centred", "Topic, whitened", "Topic, all but the top"
    ]  # fmt: skip
    [topic] = [recipe for recipe in vectors if recipe.name == "Topic"]
    assert [recipe.wording and recipe.wording.name for recipe in with_candidates(topic, 0)] == [
        None, "meaning", "summary", "domain"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "build --out m",
            "There is no language model: give --model, or --endpoint with a server's URL. To try without",
        ),
        (
            "build --out m --model lm --endpoint {url}",
            "Both --model and --endpoint were given: give --model, or --endp",
        ),
        (
            "build --out m --endpoint {url} --repetitions 3",
            "--endpoint has the language model in a server. Leave ",
        ),
        ("build --out m --endpoint {url} --recipe reba-2", "Give one of classical, prompteol, topic"),
        ("build --out m --endpoint {url} --key-variable SECRET", "it ends in API_KEY"),
        ("build --out m --endpoint {url} --key-variable NO_API_KEY", "the environment variable NO_API_KEY has none"),
        ("build --out m --endpoint {url} --max-seq-length 9", "gives a text one vector, so no tokens are read"),
        ("build --out m --endpoint {url}/nowhere --form ollama", "the server does not list its models"),
        ("compare --data pairs.tsv --form tei", "--form: without --endpoint no server is asked"),
        ("compare --data pairs.tsv --endpoint {url} --device cpu", "--device: --endpoint has the language model"),
        ("compare --data pairs.tsv --endpoint {url} --recipes early-late", "early-late: {url}/v1/embeddings gives one"),
    ],
)
def test_what_a_server_cannot_do_is_refused_and_nothing_is_written(line, said, server, desk):
    before = written(desk)
    found = typed(line.format(url=server.url), expect=2 if "give --model, or" in said else 1)
    assert said.format(url=server.url) in found.replace("│ ", "")
    assert written(desk) == before


def test_a_server_that_stops_leaves_nothing_half_written(server, desk, monkeypatch):
    before = written(desk)
    monkeypatch.setattr("st_reba.lm.endpoint.sleep", lambda seconds: None)
    answer = server.answer
    # It stops while the filter is fitted.
    monkeypatch.setattr(server, "answer", lambda path, sent: (500, {}) if len(server.asked) > 2 else answer(path, sent))
    line = f"build --endpoint {server.url}/embed --recipe classical+whitened --fit-texts pairs.tsv --out m"
    assert "answered 500" in typed(line, expect=1)
    assert written(desk) == before


def test_verify_asks_whether_it_is_still_the_server(server, desk):
    typed(f"build --endpoint {server.url} --form llama.cpp --recipe prompteol --out m")
    line = f"verify {server.url} --form llama.cpp --model m"
    assert f"Equal: {server.url}/embedding serves the model that m was made for." in typed(line)
    states = server.states
    server.states = lambda ids: states(ids)[:, :16]
    told = typed(line, expect=1)
    assert "does not serve the model that m was made for: - another model: its vectors have not 32 values" in told


def test_a_key_goes_with_its_name_alone(server, desk, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    typed(f"build --endpoint {server.url} --recipe classical --key-variable SOME_API_KEY --out m")
    assert {key for _, _, key in server.asked} == {"Bearer sk-secret"}
    files = [path.read_text() for path in Path("m").rglob("*") if path.is_file()]
    assert not any("sk-secret" in file for file in files)
    assert json.loads(Path("m/0_EndpointTransformer/config.json").read_text())["key_variable"] == "SOME_API_KEY"
