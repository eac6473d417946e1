"""Tests of st_reba.build, which makes the models that the command writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

import st_reba
from st_reba.compare import RecipeSweep
from st_reba.data.demo import demo_sentences
from st_reba.encode import Encoder, encode_file
from st_reba.modules.multi_vector import multi_vector_encoder
from st_reba.text.presets import TEMPLATES
from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining

from .backbones import TEXTS
from .cli import typed as run

CORPUS = [f"{number}: {text}" for number in range(50) for text in TEXTS]


def test_every_public_name_is_there():
    assert not [name for name in st_reba.__all__ if not hasattr(st_reba, name)]


WRITTEN = [
    ("topic", "texts", {}, ()),
    ("classical+whitened", "texts", {"pooling": "last"}, ("--pooling", "last")),
    ("echo-3", None, {"max_seq_length": 5}, ("--max-seq-length", 5)),
    ("promptreps", None, {}, ()),
    ("reba-1", None, {"prompts": {"query": "Q: "}}, ("--query-prompt", "Q: ")),
]


@pytest.mark.parametrize(("recipe", "given", "settings", "options"), WRITTEN)
def test_it_is_what_the_command_writes(recipe, given, settings, options, roomy_path, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(CORPUS))
    if given:
        options = (*options, "--fit-texts", tmp_path / "texts.txt")
    words = ("build", "--model", roomy_path, "--recipe", recipe, "--out", tmp_path / "by-command", *options)
    run(shlex.join(map(str, words)))
    typed = SentenceTransformer(str(tmp_path / "by-command"), device="cpu")
    built = st_reba.build(roomy_path, recipe, CORPUS if given else None, device="cpu", **settings)
    assert [type(part) for part in built] == [type(part) for part in typed]
    assert built.prompts == typed.prompts
    assert np.allclose(built.encode(TEXTS), typed.encode(TEXTS), atol=1e-6)
    built.save_pretrained(str(tmp_path / "by-call"))
    for file in (path.relative_to(tmp_path / "by-command") for path in (tmp_path / "by-command").rglob("*.json")):
        assert (tmp_path / "by-call" / file).read_text() == (tmp_path / "by-command" / file).read_text(), file
    cards = [(tmp_path / name / "README.md").read_text().replace(name, "") for name in ("by-call", "by-command")]
    assert cards[0] == cards[1]


def test_a_path_is_any_path(roomy_path, encoder_paths, tmp_path):
    """Accept every path-like object as a path."""
    (tmp_path / "texts.txt").write_text("a text")
    model, towers = Path(roomy_path), map(Path, encoder_paths())
    built = st_reba.build(model, "classical", device="cpu")
    assert np.array_equal(built.encode(TEXTS), st_reba.build(roomy_path, "classical", device="cpu").encode(TEXTS))
    for made in (
        st_reba.EchoModule(model), st_reba.TwinTower(*towers),
        st_reba.TokenPrependingModule(model), st_reba.CausalTransformer(model), st_reba.IdfWeights(torch.ones(9)),
    ):  # fmt: skip
        place = tmp_path / type(made).__name__
        place.mkdir()
        made.save(place)
        assert type(type(made).load(place)) is type(made)
    assert RecipeSweep(model, 1).recipes
    for of_head in (st_reba.EmbeddingFilter.from_language_model, st_reba.PromptRepsModule):
        with pytest.raises(ValueError, match="has no weight named lm_head"):
            of_head(model)
    built.save_pretrained(str(tmp_path / "built"))
    assert encode_file(Encoder(tmp_path / "built"), tmp_path / "texts.txt", tmp_path / "out.npy").rows == 1
    for settings in (
        BeLLMTraining(model=model, triplets=model, evaluation=model), FreezeTraining(model=model, pairs=model),
        JTCSETraining(model=model, texts=model, second_model=model),
    ):  # fmt: skip
        assert settings.model == roomy_path


def test_a_topic_is_summed_behind_its_pooling(roomy_path):
    model = st_reba.build(roomy_path, "topic", CORPUS, device="cpu")
    assert [type(part) for part in model] == [st_reba.TopicModule, Pooling, st_reba.StandardizedSum, Normalize]
    assert model.get_embedding_dimension() == 32
    # Evenly drawn, so many as are enough.
    pooled = SentenceTransformer(modules=[*model][:2], device="cpu")
    few = st_reba.StandardizedSum.fit(pooled, [CORPUS[number * len(CORPUS) // 200] for number in range(200)])
    assert np.allclose(model[2].mean, few.mean, atol=1e-6)


def test_without_texts_it_says_what_it_is_fitted_on(roomy_path, caplog):
    alone = st_reba.build(roomy_path, "classical+whitened", device="cpu")
    st_reba.build(roomy_path, "classical", device="cpu")
    (said,) = [message for name, _, message in caplog.record_tuples if name == "st_reba.build"]
    assert re.fullmatch(r"Classical, whitened is fitted on \d+ sentences of the package. .* texts=\[\.\.\.\]\.", said)
    given = st_reba.build(roomy_path, "classical+whitened", iter(demo_sentences()), device="cpu")
    assert np.allclose(alone.encode(TEXTS), given.encode(TEXTS), atol=1e-6)


def test_the_prompt_is_in_the_language_of_the_texts(roomy_path):
    def template(*args, **settings):
        return st_reba.build(roomy_path, "prompteol", *args, device="cpu", **settings)[0].template

    assert template() == template(["the cat"] * 3) == TEMPLATES["prompteol"]
    assert template(["我爱自然语言处理。"] * 3) == template(language="zh") == TEMPLATES["prompteol-zh"]
    assert template(["我爱自然语言处理。"] * 3, language="en") == TEMPLATES["prompteol"]
    assert template(["我爱自然语言处理。"] * 3, template="{text} is") == "{text} is"


REFUSED = [
    ("topic", {"texts": "one text"}, "texts is one string, or has something else"),
    ("topic", {"texts": ["one text", None]}, "something else than strings: give an iterable of texts"),
    (None, {}, "There is no recipe 'None'."),
    ("classical", {"pooling": ["mean", "last"]}, "Invalid pooling mode: 'last'."),
    ("classical", {"language": "zh"}, "language='zh': classical asks in no language of its own. Leave language"),
    ("topic", {"language": "fr"}, "language='fr': topic asks in 'en' or 'zh'."),
    ("topic", {"language": "zh", "template": "{text} is"}, "template and language both say which prompt is read"),
    ("early-late", {"pooling": "max"}, "pooling='max': Early and late, partwise whitened is pooled by mean; use"),
    ("classical", {"pooling": 3}, "pooling=3: give a name, such as"),
    ("prompteol", {"template": ["{text} is", "{text}:"]}, "is', '{text}:']: give one text with {text}, or a name"),
    ("classical", {"prompts": {"query": 3}}, "prompts={'query': 3}: give strings by their names, such as"),
    ("classical", {"prompts": "query: "}, "prompts='query: ': give strings by their names, such as"),
]


@pytest.mark.parametrize(("recipe", "settings", "message"), REFUSED)
def test_what_is_refused(recipe, settings, message, roomy_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        st_reba.build(roomy_path, recipe, **settings)


def test_a_model_or_a_template_of_another_type(roomy_path):
    for model, kind in ((None, "NoneType"), (3, "int"), ([roomy_path], "list")):
        with pytest.raises(ValueError, match=f"A {kind} was given: give a path, a Hub id, a language model"):
            st_reba.build(model, "classical")
    with pytest.raises(ValueError, match=r"template must be a string, but \[\] was given"):
        st_reba.CausalTransformer(roomy_path, template=[])
    assert st_reba.build(roomy_path, "echo-2", template=None)[0].template == "{text}{text}"


HUB = r" \(HF_HUB_OFFLINE is set, .* a directory\.$"
PATH = r" directory\. Check the path, or give a Hub id \(org/name\)\.$"


NOT_TO_BE_HAD = [
    (st_reba.build, "org/name", HUB),
    (st_reba.build, "./nowhere", PATH),
    (st_reba.EchoModule, "a/b/c", PATH),
    (st_reba.TwinTower, "org/name", HUB),
    (st_reba.LlamaCppTransformer, "org/name:Q4_K_M", HUB),
    (st_reba.EmbeddingFilter.from_language_model, "org/name", HUB),
]


@pytest.mark.parametrize(("build", "name", "said"), NOT_TO_BE_HAD)
def test_a_model_that_is_not_to_be_had(build, name, said):
    """Check that the error is one sentence, without a traceback of transformers."""
    with pytest.raises(OSError, match=f"^The model {re.escape(name)}: there is no such.*{said}") as raised:
        build(name)
    assert raised.value.__suppress_context__


def test_a_fit_says_how_far_it_is(roomy_path, monkeypatch, capsys):
    monkeypatch.setattr(st_reba.moments, "LOG_SECONDS", 0.0)
    st_reba.build(roomy_path, "topic", CORPUS, device="cpu")
    shown = capsys.readouterr().err
    multi_vector_encoder(st_reba.EchoModule(roomy_path), dimension=4, fit_texts=CORPUS[:40])
    for said, texts in ((shown, 200), (capsys.readouterr().err, 40)):
        assert re.search(rf"\rFitting: +\d+%.* 32/{texts} ", said), said
