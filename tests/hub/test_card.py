"""The model card: true, complete, and written without running the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from st_reba import CausalTransformer, EchoModule, ReBAModule, build
from st_reba.hub import card
from st_reba.modules import CausalModule, PromptRepsModule

from ..backbones import TEXTS, backbone, save
from ..conftest import pipeline
from ..modules.methods import PUBLIC_MODULES


def written(model: SentenceTransformer, directory: Path) -> str:
    model.save_pretrained(str(directory))
    return (directory / "README.md").read_text(encoding="utf-8")


def metadata(text: str) -> dict:
    """As the Hub's client reads it: strictly."""
    return ModelCard(text, ignore_metadata_errors=False).data.to_dict()


#: Modules that a Pooling follows.
POOLED = [own for own in PUBLIC_MODULES if issubclass(own, CausalModule) and own is not PromptRepsModule]


@pytest.mark.parametrize("module_class", POOLED)
def test_each_class_has_its_own(module_class, roomy, roomy_path, tmp_path):
    module = module_class(roomy)
    text = written(pipeline(module), tmp_path)
    rows = [f"`st_reba.modules.{module_class.__name__}` |", f"| dimensions | {module.get_embedding_dimension()} |"]
    cost = module.cost or "the classical embedding."
    for expected in (module.method, module.equation, cost, module.citation, *rows, "pip install st-reba"):
        assert expected in text, expected
    assert ("gives word embeddings" in text) == (module.has_token_vectors and module.rows == "all")
    assert not any(unfilled in text for unfilled in ("{{", "{%", "Undefined", str(Path(roomy_path).parent)))
    data = metadata(text)
    assert (data["library_name"], data["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert {"sentence-transformers", "feature-extraction", "st-reba"} <= set(data["tags"])
    assert "base_model" not in data


def test_cost(roomy, tmp_path):
    text = written(pipeline(EchoModule(roomy, repetitions=5)), tmp_path)
    assert "**Cost.** One pass over 5 copies of a text and its prompts: for long texts 5 times the" in text
    assert "**Cost.** One pass over a text and its prompts: for long texts as" in written(pipeline(roomy), tmp_path)


def test_a_class_of_another_package_names_that_package(roomy, tmp_path):
    class Own(CausalTransformer):
        __module__ = "their_package.modules"

    text = written(pipeline(Own(roomy)), tmp_path)
    assert "\nimport their_package  #" in text
    assert "Without `import their_package`, but with it installed" in text
    assert "| module | `their_package.modules.Own` |" in text


def test_a_recipe_is_named(roomy, tmp_path):
    """PromptEOL is no module of its own, and its card says what it is and whose."""
    text = written(build(roomy, "prompteol", device="cpu"), tmp_path)
    assert "Recipe **PromptEOL** (`st-reba build --recipe prompteol`). The last token of a prompt that asks" in text
    assert "- Ting Jiang et al.: Scaling Sentence Embeddings" in text


@pytest.mark.parametrize("family", [SentenceTransformer, MultiVectorEncoder])
def test_the_name_of_a_model_is_filled_in(family, roomy, tmp_path):
    """Of a new model, and of one that was saved without a name."""
    model = family(modules=[*pipeline(EchoModule(roomy))][: 1 + (family is SentenceTransformer)], device="cpu")
    open_id = written(model, tmp_path / "open")
    for one in (model, family(str(tmp_path / "open"), device="cpu")):
        one.save_pretrained(str(tmp_path / "named"), model_name="me/mine")
        text = (tmp_path / "named" / "README.md").read_text(encoding="utf-8")
        assert f'model = {family.__name__}("me/mine")' in text
        assert text == re.sub(r'(?<=\(")\w+_model_id', "me/mine", open_id)


def test_settings_are_rows_of_a_table_and_the_backbone_does_not_run(backbone_path, tmp_path, monkeypatch):
    module = ReBAModule(backbone_path(), repetitions=3, layers=[-1])
    monkeypatch.setattr(module.model, "forward", lambda *args, **kwargs: pytest.fail("the backbone ran"))
    text = written(pipeline(module), tmp_path)
    for row in ("**ReBA-3**", "`layers` | `[-1]`", "`repetitions` | `3`", "at most | 85"):
        assert row in text, row
    text = written(pipeline(CausalTransformer(module, template="a | b\n`{text}`")), tmp_path)
    assert r"`template` | `` a \| b\n`{text}` ``" in text


def test_other_models_keep_sts_card(backbone_path, tmp_path):
    model = pipeline(Transformer(backbone_path("llama", "bert")))
    text = written(model, tmp_path)
    assert "### Model Description" in text
    assert "st-reba" not in text


class TestBaseModel:
    @pytest.fixture
    def base(self, tmp_path):
        """A backbone with a card beside it."""
        directory = tmp_path / "base"
        save(backbone("llama", num_hidden_layers=1), directory)
        (directory / "README.md").write_text("---\nlicense: llama2\nlanguage: zh\n---\n# A tiny llama\n")
        return directory

    def test_licence_and_languages_come_from_its_card(self, base, tmp_path, monkeypatch):
        module = ReBAModule(str(base))
        text = written(pipeline(module), tmp_path / "model")
        data = metadata(text)
        assert (data["license"], data["language"]) == ("llama2", ["zh"])
        assert "(licence: `llama2`)" in text
        # It is a directory of this machine, and nobody knows its id.
        assert "base_model" not in data
        assert "on `base`" in text
        # What the user says is stronger.
        model = pipeline(module)
        model.model_card_data.license, model.model_card_data.language = "mit", ["en"]
        data = metadata(written(model, tmp_path / "model"))
        assert (data["license"], data["language"]) == ("mit", ["en"])
        # From the cache when the Hub is out of reach.
        monkeypatch.setattr(card, "try_to_load_from_cache", lambda name, file: str(base / file))
        module.model.config._name_or_path = "org/tiny-llama"
        data = metadata(written(pipeline(module), tmp_path / "again"))
        assert (data["base_model"], data["license"]) == ("org/tiny-llama", "llama2")
        # A model of no name takes nothing of the working directory.
        monkeypatch.chdir(base)
        module.model.config._name_or_path = ""
        assert "license" not in metadata(written(pipeline(module), tmp_path / "nameless"))

    def test_a_card_of_somebody_else_is_words_and_no_markup(self, base, tmp_path, caplog):
        """Nor does one that is no card fail the save."""
        module = ReBAModule(str(base))
        (base / "README.md").write_text("---\nlicense: [unclosed\n---\n")
        assert "license" not in metadata(written(pipeline(module), tmp_path / "model"))
        assert not caplog.messages
        for licence, shown in (
            ("mit\n\n# Free money\n<script>", r"`mit\n\n# Free money\n<script>`"),
            ("mit`` ) ` [free](money", "``` mit`` ) ` [free](money ```"),
        ):
            (base / "README.md").write_text(f"---\n{yaml.safe_dump({'license': licence})}---\n")
            text = written(pipeline(module), tmp_path / "model")
            assert f"(licence: {shown})" in text
            assert not [line for line in text.splitlines() if line.startswith(("# Free", "<script>"))]
            assert metadata(text)["license"] == licence


def test_scores_of_evaluators_also_of_a_model_that_was_loaded(backbone_path, tmp_path):
    """Built, saved, loaded, evaluated, saved: the card is the one it came with."""
    model = pipeline(EchoModule(backbone_path()))
    EmbeddingSimilarityEvaluator(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.0, 1.0], name="tiny")(model)
    first = written(model, tmp_path / "built")
    [result] = ModelCard(first).data.eval_results[:1]
    assert result.dataset_name == "tiny"
    (tmp_path / "built" / "README.md").write_text(first + "\nA line of mine.\n")
    text = written(SentenceTransformer(str(tmp_path / "built"), device="cpu"), tmp_path / "again")
    assert "A line of mine." in text
    assert metadata(text)["tags"] == metadata(first)["tags"]
