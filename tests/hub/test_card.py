"""The model card: true, complete, and written without running the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.hub import card
from st_reba.modules import CausalModule, PromptRepsModule, RerankModule
from st_reba.modules.changes import Reroute, Steer
from st_reba.recipes import find

from ..backbones import TEXTS, backbone, save
from ..catalogued import PUBLIC_MODULES
from ..conftest import pipeline
from ..logged import logged


def written(model: SentenceTransformer, directory: Path) -> str:
    model.save_pretrained(str(directory))
    return (directory / "README.md").read_text(encoding="utf-8")


def metadata(text: str) -> dict:
    """As the Hub's client reads it: strictly."""
    return ModelCard(text, ignore_metadata_errors=False).data.to_dict()


#: What the body of a class' card says, in so many words.
SAYS = {
    CausalTransformer: ("**Classical**", "e_i = v_i", "One pass over the text, as for the classical embedding."),
    InputEmbeddings: ("**Bag of input embeddings**", "E[w_i]", "One look-up per token"),
    LayerStates: ("**Layer states**", "h^{(l)}_n", "One pass over the text, as for the classical embedding."),
    EchoModule: ("**Echo-2**", "v_{(k-1)n+i}", "2 copies of the text: about 2 times the classical embedding."),
    ReBAModule: ("**ReBA-2**", "a_{ij} v_j", "2 copies of the text: about 2 times the classical embedding."),
    BidirectionalLastLayer: (
        "**Bidirectional last layer**",
        "without the causal mask",
        "One pass over the text, as for the classical embedding.",
    ),
    RefinedThoughtModule: (
        "**Refined Thought**",
        r"m_t = \sum_j",
        "and 1 pass of two tokens over its cached keys and values: little more than the classical embedding.",
    ),
    MetaEOLModule: (
        "**MetaEOL**",
        "v^{(p)}_{N_p}",
        "8 passes, in one batch, each over the text and what stands behind it",
    ),
    TokenPrependingModule: (
        "**Token prepending**",
        r"h^{(l)}_s \leftarrow h^{(l)}_n",
        "One pass over the text, up to the output layer: no more than the classical embedding.",
    ),
    HierarchicalTokenPrependingModule: (
        "**Hierarchical token prepending**",
        r"\leftarrow h^{(l)}_{n_b}",
        "One pass over the text and two slots a block",
    ),
    ValueAggregationModule: (
        "**Value aggregation**",
        "W_O^{(l)}",
        "One pass over the text, up to the last layer that counts",
    ),
    ContrastivePromptingModule: (
        "**Contrastive prompting**",
        r"\alpha \, (v_n - v'_{n'})",
        "and one over its first 1 layers under the auxiliary prompt, of 3 that are run",
    ),
    EarlyLateModule: (
        "**Early and late**",
        r"h^{(1)}_i ; v_N",
        "One pass over the text and the template around it",
    ),
    KVReroutingModule: (
        "**KV re-routing**",
        r"\tilde K = [k_n; K]",
        "One pass over the text and the template;",
    ),
}


def test_word_embeddings_are_promised_where_there_are_some(shared, tmp_path):
    for made in (CausalTransformer, EchoModule, ReBAModule):
        assert "gives word embeddings" in written(pipeline(made(shared())), tmp_path)
    assert "word embeddings" not in written(pipeline(ReBAModule(shared(), rows="last"), "lasttoken"), tmp_path)


def test_what_a_change_costs_is_told(roomy_path, tmp_path):
    module = CausalTransformer(roomy_path, changes=[Steer(1), Reroute()])
    assert (
        "One pass over the text, as for the classical embedding. Before it, one pass over the first 2 layers, under "
        "another prompt."
    ) in written(pipeline(module), tmp_path)


#: Those that stand before a Pooling: what reads the head is a model of another family, whose card is ST's.
HEADED = (PromptRepsModule, RerankModule)
POOLED = [each for each in PUBLIC_MODULES if issubclass(each, CausalModule) and not issubclass(each, HEADED)]


@pytest.fixture(scope="module")
def roomy(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.mark.parametrize("module_class", POOLED)
def test_each_class_has_its_own(module_class, roomy, roomy_path, tmp_path):
    module = module_class(roomy)
    text = written(pipeline(module), tmp_path)
    for expected in (
        *SAYS.get(module_class, ()),
        module.method,
        module.equation,
        module.cost,
        f"| module | `st_reba.modules.{module_class.__name__}` |",
        "import st_reba",
        "trust_remote_code=True",
        "pip install st-reba",
        f"| dimensions | {module.get_embedding_dimension()} |",
        f"{module_class.__name__} → Pooling",
        "## Limits",
        "## Citation",
    ):
        assert expected in text, expected
    assert module_class.citation in text
    if module.no_chunks:
        assert "word embeddings" not in text
    assert not any(unfilled in text for unfilled in ("{{", "{%", "Undefined"))
    assert str(Path(roomy_path).parent) not in text
    data = metadata(text)
    assert data["library_name"] == "sentence-transformers"
    assert data["pipeline_tag"] == "sentence-similarity"
    assert {"sentence-transformers", "feature-extraction", "st-reba"} <= set(data["tags"])
    assert "base_model" not in data


def test_a_class_of_another_package_names_that_package(roomy, tmp_path):
    class Own(CausalTransformer):
        __module__ = "their_package.modules"

    text = written(pipeline(Own(roomy)), tmp_path)
    assert "\nimport their_package  #" in text
    assert "Without `import their_package`, but with it installed" in text
    assert "| module | `their_package.modules.Own` |" in text


def test_a_recipe_is_named(roomy_path, tmp_path):
    """PromptEOL is no module of its own, and its card says what it is and whose."""
    recipe = find("prompteol")
    model = recipe.model(CausalTransformer(roomy_path))
    card.add_recipe(model, recipe.name, recipe.key, recipe.says, recipe.row.citation)
    text = written(model, tmp_path)
    assert "Recipe **PromptEOL** (`st-reba build --recipe prompteol`). The last token of a prompt that asks" in text
    assert "- Ting Jiang et al.: Scaling Sentence Embeddings" in text


@pytest.mark.parametrize(
    ("module_class", "settings", "cost"),
    [
        (EchoModule, {"repetitions": 5}, "5 copies of the text: about 5 times"),
        (ReBAModule, {"repetitions": 1}, "One pass over the text, as for"),
        (ReBAModule, {"chunk_length": 8}, "2 copies of each of its chunks of 8 tokens: up to about 3 times"),
        (ReBAModule, {"chunk_length": 8, "repetitions": 1}, "One pass over the text, as for"),
        (RefinedThoughtModule, {"iterations": 1}, "One pass over the text, as for"),
        (RefinedThoughtModule, {"iterations": 8}, "and 7 passes of two tokens over its cached"),
        (RefinedThoughtModule, {"iterations": 3, "bidirectional_layers": 1}, "3 passes over the text: about 3 times"),
    ],
)
def test_cost(module_class, settings, cost, shared):
    assert cost in module_class(shared(), **settings).cost


def test_chunks(shared, tmp_path):
    text = written(pipeline(ReBAModule(shared(), chunk_length=32)), tmp_path)
    for expected in ("**ReBA-2**", r"j \in C(i)", "| `chunk_length` | `32` |", "| tokens per text, at most | 256 |"):
        assert expected in text, expected


def test_settings(shared, tmp_path):
    text = written(pipeline(ReBAModule(shared(), repetitions=3, layers=[-1]), "lasttoken"), tmp_path)
    assert "| `layers` | `[-1]` |" in text
    assert "| `repetitions` | `3` |" in text
    assert "| tokens per text, at most | 85 |" in text


@pytest.mark.parametrize(
    ("template", "cell"),
    [
        ("a | b: {text}", r"`a \| b: {text}`"),
        ("first line\n{text}", r"`first line\n{text}`"),
        ("`{text}` means", "`` `{text}` means ``"),
    ],
)
def test_a_template_does_not_break_the_table(template, cell, shared, tmp_path):
    text = written(pipeline(CausalTransformer(shared(), template=template)), tmp_path)
    assert f"| `template` | {cell} |\n" in text


def test_the_backbone_does_not_run_for_it(backbone_path, tmp_path, monkeypatch):
    model = pipeline(ReBAModule(backbone_path()))
    monkeypatch.setattr(model[0].model, "forward", lambda *args, **kwargs: pytest.fail("the backbone ran"))
    assert "**ReBA-2**" in written(model, tmp_path)


def test_other_models_keep_sts_card(backbone_path, tmp_path):
    text = written(pipeline(Transformer(backbone_path("llama", "bert"))), tmp_path)
    assert "### Model Description" in text
    assert "st-reba" not in text


def test_what_the_user_said_is_kept(backbone_path, tmp_path):
    data = SentenceTransformerModelCardData(language="zh", license="mit", model_id="org/llama2-zh-reba")
    model = SentenceTransformer(modules=[ReBAModule(backbone_path()), Pooling(32)], model_card_data=data, device="cpu")
    text = written(model, tmp_path)
    assert "license: mit" in text
    assert 'SentenceTransformer("org/llama2-zh-reba")' in text
    assert "licence: `mit`" in text


class TestBaseModel:
    CARD = "---\nlicense: llama2\nlanguage: zh\n---\n# A tiny llama\n"

    @pytest.fixture
    def base(self, tmp_path):
        """A backbone with a card beside it."""
        directory = tmp_path / "base"
        save(backbone("llama", num_hidden_layers=1), directory)
        (directory / "README.md").write_text(self.CARD)
        return directory

    def test_licence_and_languages_come_from_its_card(self, base, tmp_path):
        text = written(pipeline(ReBAModule(str(base))), tmp_path / "model")
        data = metadata(text)
        assert (data["license"], data["language"]) == ("llama2", ["zh"])
        assert "(licence: `llama2`)" in text
        # It is a directory of this machine, and nobody knows its id.
        assert "base_model" not in data
        assert "on `base`" in text

    def test_what_the_user_says_is_stronger(self, base, tmp_path):
        model = pipeline(ReBAModule(str(base)))
        model.model_card_data.set_license("mit")
        model.model_card_data.set_language(["en"])
        data = metadata(written(model, tmp_path / "model"))
        assert (data["license"], data["language"]) == ("mit", ["en"])

    def test_a_card_that_is_no_card_does_not_fail_the_save(self, base, tmp_path):
        (base / "README.md").write_text("---\nlicense: [unclosed\n---\n")
        assert "license" not in metadata(written(pipeline(ReBAModule(str(base))), tmp_path / "model"))

    def test_a_readme_without_metadata_is_no_news(self, base, tmp_path):
        """As that of the demo LM, which everybody builds from first."""
        (base / "README.md").write_text("# A tiny llama\n", encoding="utf-8")
        with logged("huggingface_hub.repocard") as messages:
            assert "license" not in metadata(written(pipeline(ReBAModule(str(base))), tmp_path / "model"))
        assert not messages

    @pytest.mark.parametrize(
        ("licence", "shown"),
        [
            ("mit\n\n# Free money\n<script>", r"`mit\n\n# Free money\n<script>`"),
            ("mit\r\u2028# Free money", r"`mit\r\u2028# Free money`"),
            ("mit`) [free](money", "`` mit`) [free](money ``"),
            ("mit`` ) ` [free](money", "``` mit`` ) ` [free](money ```"),
        ],
    )
    def test_a_licence_is_words_and_no_markup(self, licence, shown, base, tmp_path):
        """Somebody else wrote it."""
        (base / "README.md").write_text(f"---\n{yaml.safe_dump({'license': licence})}---\n")
        text = written(pipeline(ReBAModule(str(base))), tmp_path / "model")
        assert f"(licence: {shown})" in text
        assert not [line for line in text.splitlines() if line.startswith(("# Free", "<script>"))]
        assert metadata(text)["license"] == licence

    def test_a_model_of_no_name_takes_nothing_of_the_working_directory(self, base, tmp_path, monkeypatch):
        module = ReBAModule(str(base))
        module.model.config._name_or_path = ""
        monkeypatch.chdir(base)
        assert "license" not in metadata(written(pipeline(module), tmp_path / "model"))

    def test_from_the_cache_when_the_hub_is_out_of_reach(self, base, tmp_path, monkeypatch):
        monkeypatch.setattr(card, "try_to_load_from_cache", lambda name, file: str(base / file))
        module = ReBAModule(str(base))
        module.model.config._name_or_path = "org/tiny-llama"
        data = metadata(written(pipeline(module), tmp_path / "model"))
        assert (data["base_model"], data["license"]) == ("org/tiny-llama", "llama2")


def mteb_result(name: str = "STSB", score: float = 0.5):
    task = SimpleNamespace(type="STS", dataset={"path": "C-MTEB/STSB"}, main_score="cosine_spearman")
    return SimpleNamespace(
        task_name=name,
        dataset_revision="0cde68302b3541bb8b3c340dc0644b0b745b3dc0",
        scores={"test": [{"hf_subset": "default", "main_score": score, "languages": ["cmn-Hans"]}]},
        task=SimpleNamespace(metadata=task),
    )


class TestScores:
    def index(self, text: str) -> list[EvalResult]:
        data: Any = ModelCard(text, ignore_metadata_errors=False).data
        return data.eval_results

    def evaluate(self, model) -> None:
        EmbeddingSimilarityEvaluator(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.0, 1.0], name="tiny")(model)

    def test_of_evaluators(self, backbone_path, tmp_path):
        model = pipeline(EchoModule(backbone_path()))
        self.evaluate(model)
        text = written(model, tmp_path)
        assert "### Semantic Similarity (tiny)" in text
        assert {"spearman_cosine", "pearson_cosine"} <= {result.metric_type for result in self.index(text)}

    def test_of_mteb(self, backbone_path, tmp_path):
        model = pipeline(EchoModule(backbone_path()))
        card.add_mteb_results(model, [mteb_result()])
        (result,) = self.index(written(model, tmp_path))
        assert (result.task_type, result.dataset_type, result.dataset_name) == ("STS", "C-MTEB/STSB", "MTEB STSB")
        assert (result.metric_type, result.metric_value) == ("cosine_spearman", 0.5)
        assert (result.dataset_config, result.dataset_split) == ("default", "test")

    def test_of_both(self, backbone_path, tmp_path):
        model = pipeline(EchoModule(backbone_path()))
        self.evaluate(model)
        card.add_mteb_results(model, [mteb_result()])
        text = written(model, tmp_path)
        assert {"spearman_cosine", "cosine_spearman"} <= {result.metric_type for result in self.index(text)}
        assert "### Semantic Similarity (tiny)" in text

    def test_of_a_model_that_was_loaded(self, backbone_path, tmp_path):
        """Built, saved, loaded, evaluated, saved: the card is the one it came with, and the scores."""
        first = written(pipeline(EchoModule(backbone_path())), tmp_path / "built")
        (tmp_path / "built" / "README.md").write_text(first + "\nA line of mine.\n")
        model = SentenceTransformer(str(tmp_path / "built"), device="cpu")
        card.add_mteb_results(model, [mteb_result(score=0.1), mteb_result("AFQMC", 0.3)])
        card.add_mteb_results(model, [mteb_result(score=0.2)])
        text = written(model, tmp_path / "again")
        assert "A line of mine." in text
        assert "**Echo-2**" in text
        # One dataset and split, whatever the task is called: the later score stands.
        assert [result.metric_value for result in self.index(text)] == [0.2]
        assert metadata(text)["tags"] == metadata(first)["tags"]

    def test_of_models_that_are_not_ours(self, backbone_path):
        with pytest.raises(ValueError, match="Transformer is not a module of st_reba"):
            card.add_mteb_results(pipeline(Transformer(backbone_path("llama", "bert"))), [mteb_result()])

    def test_of_a_real_evaluation(self, backbone_path, tmp_path):
        """What mteb itself returns has what we read."""
        results = pytest.importorskip("mteb.results")
        result = results.TaskResult(
            task_name="STSBenchmark",
            dataset_revision="b0fddb56ed78048fa8b90373c8a3cfc37b684831",
            mteb_version="2.0.0",
            scores={"test": [{"hf_subset": "default", "main_score": 0.7, "languages": ["eng-Latn"]}]},
            evaluation_time=1.0,
        )
        model = pipeline(EchoModule(backbone_path()))
        card.add_mteb_results(model, [result])
        (found,) = self.index(written(model, tmp_path))
        assert (found.task_type, found.dataset_type) == ("STS", "mteb/stsbenchmark-sts")
        assert (found.dataset_name, found.metric_type) == ("MTEB STSBenchmark", "cosine_spearman")

    def test_the_private_name_is_there(self, backbone_path, tmp_path):
        """Guards ``_model_card_text``, where ST keeps the card that a model was loaded with."""
        model = pipeline(EchoModule(backbone_path()))
        assert not model._model_card_text
        text = written(model, tmp_path)
        assert SentenceTransformer(str(tmp_path), device="cpu")._model_card_text == text


def test_the_front_matter_is_yaml_that_the_hub_reads(backbone_path, tmp_path):
    text = written(pipeline(ReBAModule(backbone_path())), tmp_path)
    assert text.startswith("---\n")
    front = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(front, dict)
    assert ModelCardData(**front).library_name == "sentence-transformers"
