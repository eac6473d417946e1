"""``st-reba build``; and the command that ``compare`` prints builds the model that it has scored, in its language."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize

from st_reba import META_TASKS, TEMPLATES, EarlyLateModule, PartwiseWhitening
from st_reba.compare.results import Comparison
from st_reba.compare.search import searched
from st_reba.data.demo import demo_pairs, demo_sentences

from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import long, pipeline
from . import typed

pytestmark = pytest.mark.usefixtures("quick_commands")

#: On a few texts, where it does not matter on which.
FITTED = ("--fit-texts", __file__)

CHINESE = ["我爱自然语言处理。", "天气很好，我们去公园。", "猫在睡觉。"]
TOLD = "The texts are in Chinese, and so "


PASSAGES = ["A dog chases a cat.", "It rains in the mountains."]


def of_the_demo(out, *options, expect=0):
    return typed("build", "--model", DEMO_MODEL, "--out", out, "--dtype", "float32", *options, expect=expect)


def test_sparse(tmp_path):
    output = of_the_demo(tmp_path / "m", "--sparse", "--recipe", "promptreps", "--expansion", 2, "--top-k", 50)
    assert "from sentence_transformers import SparseEncoder; SparseEncoder(" in output
    model = SparseEncoder(str(tmp_path / "m"), device="cpu")
    assert {name: model.prompts[name] for name in ("query", "document")} == {
        "query": "Query: ", "document": "Passage: ",
    }  # fmt: skip
    assert (model[0].expansion, model[0].top_k) == (2, 50)
    assert model.encode_query(PASSAGES).shape == (2, model.get_embedding_dimension())


def test_the_dense_half_has_the_same_prompts(tmp_path):
    of_the_demo(tmp_path / "m", "--recipe", "promptreps")
    assert SentenceTransformer(str(tmp_path / "m"), device="cpu").prompts["query"] == "Query: "


def test_of_another_prompt(tmp_path):
    of_the_demo(tmp_path / "m", "--sparse", "--recipe", "prompteol", "--query-prompt", "find ")
    model = SparseEncoder(str(tmp_path / "m"), device="cpu")
    assert model[0].template.startswith("This sentence")
    assert model[0].normalize_text
    assert model.prompts["query"] == "find "


def test_rerank(tmp_path):
    output = of_the_demo(tmp_path / "m", "--rerank", "--max-seq-length", 32)
    assert "from sentence_transformers import CrossEncoder; CrossEncoder(" in output
    model = CrossEncoder(str(tmp_path / "m"), device="cpu")
    assert model[0].max_seq_length == 32
    assert len(model.rank("what chases a cat", PASSAGES)) == 2


class TestBuild:
    def build(self, backbone_path, out, *options, expect=0):
        return typed("build", "--model", backbone_path(), "--out", out, *options, expect=expect)

    def test_prompts(self, backbone_path, tmp_path):
        self.build(backbone_path, tmp_path / "m", "--query-prompt", "find: ", "--document-prompt", "text: ")
        model = SentenceTransformer(str(tmp_path / "m"), device="cpu")
        assert {name: model.prompts[name] for name in ("query", "document")} == {
            "query": "find: ",
            "document": "text: ",
        }
        card = (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
        assert "`find: `" in card
        assert "model.encode_document" in card

    @pytest.mark.parametrize(
        ("options", "kind", "settings"),
        [
            ((), "ReBAModule", {"repetitions": 2, "rows": "all", "layers": "all"}),
            (("--pooling", "last", "--repetitions", 3, "--layers=-1,0"), "ReBAModule",
             {"repetitions": 3, "rows": "last", "layers": [-1, 0]}),
            (("--chunk-length", 8), "ReBAModule", {"repetitions": 2, "chunk_length": 8}),
            (("--method", "echo", "--template", "springer"), "EchoModule", {"repetitions": 2}),
            (("--method", "classical", "--pooling", "weightedmean", "--no-normalize"), "CausalTransformer",
             {"template": "{text}"}),
            (("--method", "prompteol", "--pooling", "last"), "CausalTransformer",
             {"template": TEMPLATES["prompteol"], "pool_over": "all", "rows": "last", "normalize_text": True}),
            long(("--method", "prompteol", "--template", "promptsum-zh"), "CausalTransformer",
             {"template": TEMPLATES["promptsum-zh"], "pool_over": "all", "rows": "last"}),
            (("--method", "metaeol"), "MetaEOLModule", {"templates": list(META_TASKS), "normalize_text": True}),
            long(("--method", "kv-rerouting"), "KVReroutingModule", {"layers": [1], "hybrid": True}),
            (("--method", "kv-rerouting", "--layers=0,-1", "--template", "compress-zh"), "KVReroutingModule",
             {"layers": [0, 2], "template": TEMPLATES["compress-zh"]}),
            (("--method", "token-prepending"), "TokenPrependingModule", {"rows": "last", "normalize_text": True}),
            (("--method", "hierarchical-token-prepending"), "HierarchicalTokenPrependingModule", {"rows": "all"}),
            (("--method", "value-aggregation", "--layers=-1"), "ValueAggregationModule", {"layers": [-1]}),
            long(("--method", "contrastive-prompting"), "ContrastivePromptingModule",
             {"scale": 2.0, "normalize_text": True}),
            (("--method", "contrastive-prompting", "--template", "in one word, {text}:"), "ContrastivePromptingModule",
             {"template": "in one word, {text}:", "normalize_text": True}),
            long(("--method", "prompteol", "--template", "in one word, {text}:"), "CausalTransformer",
             {"template": "in one word, {text}:", "pool_over": "all", "rows": "last", "normalize_text": True}),
            (("--method", "prompteol", "--template", "knowledge"), "CausalTransformer",
             {"template": TEMPLATES["knowledge"], "rows": "last", "output_layer": 2, "final_norm": False}),
            (("--method", "classical", "--template", "prompteol"), "CausalTransformer", {"rows": "last"}),
            (("--method", "early-late", *FITTED), "EarlyLateModule",
             {"template": TEMPLATES["prompteol"], "early_layer": 1, "normalize_text": True}),
            (("--method", "early-late", "--template", "prompteol-zh", *FITTED), "EarlyLateModule",
             {"template": TEMPLATES["prompteol-zh"], "pool_over": "text"}),
            long(("--method", "early-late", "--template", "in one word, {text}:", *FITTED), "EarlyLateModule",
             {"template": "in one word, {text}:", "pool_over": "text", "normalize_text": True}),
            (("--method", "echo-topic", *FITTED), "TopicModule",
             {"template": TEMPLATES["echo-topic"], "mean": True, "lower_layers": [2], "normalize_text": True}),
            (("--method", "topic", "--template", "{text} is about", *FITTED), "TopicModule",
             {"template": "{text} is about", "mean": False, "lower_layers": [2], "normalize_text": True}),
            (("--recipe", "RT-4"), "RefinedThoughtModule", {"iterations": 4}),
            long(("--method", "refined-thought"), "RefinedThoughtModule", {"iterations": 2}),
            (("--method", "bidirectional"), "BidirectionalLastLayer", {"bidirectional_layers": 1, "pool_over": "all"}),
            (("--recipe", "Echo-2, bidirectional"), "EchoModule", {"repetitions": 2, "bidirectional_layers": 1}),
            long(("--recipe", "reba-5", "--pooling", "last"), "ReBAModule", {"repetitions": 5, "rows": "last"}),
            (("--recipe", "Echo-2, layer 2, whitened", *FITTED), "EchoModule",
             {"repetitions": 2, "output_layer": 2}),
            (("--recipe", "classical+idf-weighted", *FITTED), "CausalTransformer", {"output_layer": None}),
            (("--method", "ck"), "MetaEOLModule",
             {"templates": [TEMPLATES["pretended-cot"], TEMPLATES["knowledge"]], "normalize_text": True,
              "output_layer": 2, "final_norm": False}),
        ],
    )  # fmt: skip
    def test_a_ready_directory(self, options, kind, settings, roomy_path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("texts.txt").write_text("\n".join(f"{number}: {text}" for number in range(9) for text in TEXTS))
        out = tmp_path / "deep" / "model"
        self.build(lambda: roomy_path, out, *options, "--max-seq-length", 20)
        model = SentenceTransformer(str(out), device="cpu")
        assert type(model[0]).__name__ == kind
        assert {name: getattr(model[0], name) for name in settings} == settings
        assert model.max_seq_length == 20
        lengths = np.linalg.norm(model.encode(TEXTS), axis=1)
        assert np.allclose(lengths, 1) == ("--no-normalize" not in options)
        assert json.loads((out / "modules.json").read_text())[0]["type"] == f"st_reba.modules.{kind}"
        assert "import st_reba" in (out / "README.md").read_text()
        assert [path.name for path in out.parent.iterdir()] == ["model"]

    @pytest.mark.parametrize(
        ("options", "dimension", "skips"),
        [
            (("--recipe", "echo-2"), 32, True),
            (("--recipe", "reba-2@2", "--dimensions", 8, "--document-prompt", "text: "), 8, True),
            (("--method", "classical", "--keep-punctuation"), 32, False),
        ],
    )
    def test_a_vector_for_each_token(self, options, dimension, skips, backbone_path, tmp_path):
        from sentence_transformers import MultiVectorEncoder

        output = self.build(backbone_path, tmp_path / "m", "--multi-vector", *options)
        assert ("Fitting the projection to 8 dimensions on" in output) == (dimension == 8)
        assert f'import st_reba; MultiVectorEncoder("{tmp_path / "m"}")' in output
        model = MultiVectorEncoder(str(tmp_path / "m"), device="cpu")
        marks, word = model.encode_document(["?", "a"])
        assert word.shape == (1, dimension)
        assert len(marks) == (0 if skips else 1)
        assert (model.prompts["document"] or "") == ("text: " if "--document-prompt" in options else "")
        card = (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
        for expected in (
            "gives each token of a text a vector, for search by late interaction (MaxSim), by **",
            "from sentence_transformers import MultiVectorEncoder",
            f"print(documents[0].shape)  # torch.Size([tokens, {dimension}])",
            "| similarity | MaxSim |",
            f"| dimensions | {dimension} |",
            " --multi-vector`). ",
        ):
            assert expected in card, expected
        assert ("A document's tokens that are nothing but punctuation have no vector." in card) == skips
        assert "SentenceTransformer(" not in card.partition("## Method")[0]
        (tmp_path / "texts.txt").write_text("a")
        output = typed("encode", tmp_path / "m", tmp_path / "texts.txt", "--out", tmp_path / "v.npy", expect=1)
        assert "is a MultiVectorEncoder, and `st-reba encode` writes one vector a text" in output

    def test_early_and_late_is_fitted_on_texts_like_ones_own(self, backbone_path, tmp_path):
        texts = [f"{number}: {text}" for number in range(9) for text in TEXTS]
        (tmp_path / "texts.txt").write_text("\n".join(texts))
        options = ("--method", "early-late", "--fit-texts", tmp_path / "texts.txt")
        output = self.build(backbone_path, tmp_path / "own", *options)
        assert f"Fitting what is partwise whitened on {len(texts)} texts. Wrote" in output
        built = SentenceTransformer(str(tmp_path / "own"), device="cpu")
        pooled = pipeline(EarlyLateModule(backbone_path()))
        whole = SentenceTransformer(modules=[*pooled, PartwiseWhitening.fit(pooled, texts), Normalize()], device="cpu")
        assert [type(part) for part in built] == [type(part) for part in whole]
        assert np.allclose(built.encode(TEXTS), whole.encode(TEXTS), atol=1e-5)
        output = self.build(backbone_path, tmp_path / "demo", "--method", "early-late")
        assert re.search(r"on \d+ texts, sentences inside the package: give --fit-texts with some hundreds", output)
        other = SentenceTransformer(str(tmp_path / "demo"), device="cpu").encode(TEXTS)
        assert not np.allclose(other, built.encode(TEXTS), atol=1e-2)

    def test_a_directory_with_something_in_it_is_left_alone(self, backbone_path, tmp_path):
        (tmp_path / "model").mkdir()
        self.build(backbone_path, tmp_path / "model")
        before = sorted(path.name for path in (tmp_path / "model").iterdir())
        output = self.build(backbone_path, tmp_path / "model", expect=1)
        assert "exists and is not an empty directory: choose another --out" in output
        assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before

    def test_a_build_that_fails_half_way_leaves_nothing(self, backbone_path, tmp_path, monkeypatch):
        def fail(self, path, *args, **kwargs):
            raise OSError("no space left on device")

        monkeypatch.setattr(SentenceTransformer, "save_pretrained", fail)
        assert "no space left on device" in self.build(backbone_path, tmp_path / "model", expect=1)
        assert not list(tmp_path.iterdir())


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
    monkeypatch.setattr("st_reba.compare.answer._refused", lambda *args: "")
    typed(
        "compare", "--model", shallow_path, "--device", "cpu", "--dtype", "float32", "--no-controls",
        "--recipes", recipe, *options, *on, "--save-best", best, "--out", out,
    )  # fmt: skip
    line = Comparison.load(out / "comparison.json").build
    assert expected in line
    *command, _ = shlex.split(line)[1:]
    typed(*command, built)
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

    monkeypatch.setattr("st_reba.compare.Recipes", stop)
    output = typed("compare", "--model", DEMO_MODEL, "--recipes", "early-late,prompteol", *options, expect=1)
    assert stop.recipes == asked
    assert (TOLD in output) == bool(told)
    assert told in output


def test_a_search_asks_in_the_language_of_the_texts(monkeypatch):
    def stop(layers, rows):
        stop.rows = [row.key for row in rows]
        raise ValueError("enough")

    monkeypatch.setattr("st_reba.compare.search.candidates", stop)
    english = [row.key for row in searched()]
    assert TOLD not in typed("search", "--model", DEMO_MODEL, "--device", "cpu", expect=1)
    assert stop.rows == english
    output = typed("search", "--model", DEMO_MODEL, "--device", "cpu", "--language", "zh", expect=1)
    assert f"{TOLD}ask PromptEOL, Pretended CoT, Knowledge; --prompt-language en keeps" in output
    assert {"prompteol-zh", "pretended-cot-zh", "knowledge-zh-prepended"} < {*stop.rows}
    assert not {"prompteol", "pretended-cot", "knowledge-prepended"} & {*stop.rows}
    assert len(stop.rows) == len(set(stop.rows))
    typed("search", "--model", DEMO_MODEL, "--device", "cpu", "--language", "zh", "--prompt-language", "en", expect=1)
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
    output = typed("build", "--model", DEMO_MODEL, "--out", tmp_path / "built", *options)
    family = SparseEncoder if "--sparse" in options else SentenceTransformer
    assert family(str(tmp_path / "built"), device="cpu")[0].template == TEMPLATES[template]
    assert (TOLD in output) == told
    card = (tmp_path / "built" / "README.md").read_text(encoding="utf-8")
    assert ("-zh" in card) == (template.endswith("-zh") and "--sparse" not in options)
