from __future__ import annotations

import errno
import json
import math
import socket
import sys
from statistics import fmean

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.compare import Recipes, compare_tasks
from st_reba.compare.mteb import PAPER_METRICS, language_of_tasks, mteb_estimates, resolve_tasks, run_tasks
from st_reba.recipes import default_recipes

from ..conftest import pipeline

mteb = pytest.importorskip("mteb")

from . import mteb_tasks as demo  # noqa: E402

VARIANTS = {"Echo-2, mean": "Echo-2__mean", "ReBA-2, last": "ReBA-2__last"}
SETTINGS = {"model": "models/demo-lm", "revision": "7"}
NAMES = [task.metadata.name for task in demo.TASKS]


@pytest.fixture(scope="module")
def models(shallow_path):
    backbone = CausalTransformer(shallow_path)
    found = [pipeline(EchoModule(backbone)), pipeline(ReBAModule(backbone), "lasttoken")]
    return dict(zip(VARIANTS, found, strict=True))


@pytest.fixture(scope="module")
def embed(models):
    """All variants at once; notes what it was asked for."""

    def embed(texts, prompt):
        embed.asked += texts
        found = {name: model.encode(list(texts), prompt=prompt) for name, model in models.items()}
        return {name: torch.from_numpy(vectors) for name, vectors in found.items()}

    embed.asked = []
    return embed


@pytest.fixture(scope="module")
def outcome(embed, tmp_path_factory):
    """All tasks, the steps that were told with what had been embedded by then, and the folder of results."""
    output, steps = tmp_path_factory.mktemp("output"), []
    tasks = [task() for task in demo.TASKS]
    found = run_tasks(
        tasks, list(VARIANTS), embed, output=output, on_step=lambda step: steps.append((step, list(embed.asked))),
        **SETTINGS,
    )  # fmt: skip
    assert not any(task.data_loaded for task in tasks)
    return {scores.task.name: scores for scores in found}, steps, output


@pytest.fixture
def no_embedding():
    def embed(texts, prompt):
        raise AssertionError("nothing was to be embedded")

    return embed


@pytest.mark.parametrize("task", demo.TASKS, ids=NAMES)
def test_scores_are_those_of_mteb_on_the_model_itself(task, outcome, models):
    (expected,) = mteb.evaluate(models["ReBA-2, last"], task(), cache=None, show_progress_bar=False).task_results
    scores = outcome[0][task.metadata.name]
    found = scores.scores["ReBA-2, last"]
    assert found.value == pytest.approx(expected.get_score(), abs=1e-5)
    assert scores.paper_metric == PAPER_METRICS[scores.type]
    paper = expected.get_score(getter=lambda entry: entry[scores.paper_metric])
    assert found.paper == pytest.approx(paper, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("DemoSTS", ["pair"] * 4),
        ("DemoPairs", ["pair"]),
        ("DemoPairsInOneRow", ["pair"]),
        ("DemoClassification", ["text"]),
        ("DemoClustering", ["clustering"]),
        ("DemoClusteringSets", ["clustering"]),
        ("DemoRetrieval", ["query"]),
        ("DemoReranking", ["query"]),
    ],
)
def test_the_samples_make_up_the_score_and_intervals_hold_it(name, units, outcome):
    scores = outcome[0][name]
    values = [score.value for score in scores.scores.values()]
    assert all([sample.unit for sample in score.samples] == units for score in scores.scores.values())
    # mteb rounds the scores of retrieval to five digits.
    assert scores.items.scores == pytest.approx(values, abs=1e-5)
    estimates = mteb_estimates(scores, resamples=200)
    for value, estimate in zip(values, estimates.values(), strict=True):
        assert estimate.value == value
        assert estimate.low - 0.02 <= value <= estimate.high + 0.02
        assert estimate.low < estimate.high or value == 1
    best = max(estimates, key=lambda variant: estimates[variant].value)
    assert estimates[best].tied
    assert not mteb_estimates(scores, controls=[best], resamples=50)[best].tied


def test_each_text_is_embedded_once_and_shared_by_the_variants(outcome):
    _, steps, _ = outcome
    assert [step for step, _ in steps] == [f"{name}, {variant}" for name in NAMES for variant in VARIANTS]
    before = 0
    for first in range(0, len(steps), len(VARIANTS)):
        counts = [len(asked) for _, asked in steps[first : first + len(VARIANTS)]]
        assert counts == counts[:1] * len(VARIANTS)
        texts = steps[first][1][before:]
        assert len(texts) == len(set(texts)) > 0
        before = counts[0]


def test_results_are_in_mtebs_format_and_not_made_again(outcome, no_embedding):
    scores, _, output = outcome
    cache = mteb.ResultCache(output)
    for variant, folder in VARIANTS.items():
        path = output / "results" / f"st_reba__demo-lm__{folder}" / "7"
        assert {file.stem for file in path.glob("*.json")} == {*NAMES, "model_meta"}
        result = cache.load_task_result("DemoSTS", f"st_reba/demo-lm__{folder}", "7")
        assert result.get_score() == pytest.approx(scores["DemoSTS"].scores[variant].value, abs=1e-6)
    loads = [task.loads for task in demo.TASKS]
    again = run_tasks([task() for task in demo.TASKS], list(VARIANTS), no_embedding, output=output, **SETTINGS)
    assert [task.loads for task in demo.TASKS] == loads
    for own in again:
        for variant, score in own.scores.items():
            first = scores[own.task.name].scores[variant]
            # mteb writes six digits.
            assert (score.value, score.paper) == pytest.approx((first.value, first.paper), abs=1e-6)
            for sample, known in zip(score.samples, first.samples, strict=True):
                assert (sample.split, sample.subset, sample.statistic) == (known.split, known.subset, known.statistic)
                assert np.allclose(sample.values, known.values, atol=1e-6)
    assert scores["DemoSTS"].task.note == "mteb's STS task DemoSTS, validation and test."


def test_what_is_missing_or_was_cut_short_is_run(embed, tmp_path):
    def run(variants, **settings):
        embed.asked.clear()
        (found,) = run_tasks([demo.DemoReranking()], variants, embed, output=tmp_path, **{**SETTINGS, **settings})
        return found.scores["Echo-2, mean"].value, bool(embed.asked)

    first, _ = run(["Echo-2, mean"])
    assert run(["Echo-2, mean", "ReBA-2, last"]) == (first, True)
    revisions = {"Echo-2, mean": "8", "ReBA-2, last": "b"}
    assert run(list(revisions), revision=revisions) == (first, True)
    path = next((tmp_path / "results" / "st_reba__demo-lm__Echo-2__mean" / "8").glob("DemoReranking.json"))
    # By a full disk, or a kill while mteb wrote it.
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    assert run(["Echo-2, mean"], revision="8") == (first, True)
    assert run(["Echo-2, mean"], revision="8") == (first, False)
    # A newer mteb has written it: it stays.
    newer = json.dumps({**json.loads(path.read_text(encoding="utf-8")), "mteb_version": "9.0.0", "scores": [1]})
    path.write_text(newer, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"Reranking.json is no result that mteb {mteb.__version__} reads, and"):
        run(["Echo-2, mean"], revision="8")
    assert path.read_text(encoding="utf-8") == newer


def test_without_samples_there_is_nothing_to_resample(embed, no_embedding, outcome, tmp_path):
    run_tasks([demo.DemoSTS()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)
    # What makes one of its four scores is lost.
    path = next((tmp_path / "samples").rglob("DemoSTS.json"))
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))[1:]), encoding="utf-8")
    (scores,) = run_tasks([demo.DemoSTS()], ["Echo-2, mean"], no_embedding, output=tmp_path, **SETTINGS)
    assert scores.scores["Echo-2, mean"].samples == []
    (whole,) = run_tasks([demo.DemoAll()], list(VARIANTS), embed, **SETTINGS)
    for variant, score in whole.scores.items():
        parts = [outcome[0][name].scores[variant].value for name in ("DemoReranking", "DemoClustering")]
        assert score.value == pytest.approx(fmean(parts), abs=1e-5)
    estimates = mteb_estimates(whole)
    assert all(math.isnan(estimate.low) and math.isnan(estimate.high) for estimate in estimates.values())
    best = max(estimates, key=lambda variant: estimates[variant].value)
    assert [variant for variant, estimate in estimates.items() if estimate.tied] == [best]


def test_a_full_disk(embed, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mteb.ResultCache, "save_to_cache", full)
    with pytest.raises(OSError, match=rf"{tmp_path} cannot take the results of DemoPairs: the disk is full"):
        run_tasks([demo.DemoPairs()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)


def test_a_task_without_data_is_left_out_and_no_network_is_tried(embed, monkeypatch, recwarn, capfd):
    def connect(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    skipped = {}
    tasks = [demo.DemoNowhere(), demo.DemoReranking()]
    scores = run_tasks(tasks, ["Echo-2, mean"], embed, on_skip=skipped.__setitem__, **SETTINGS)
    assert [found.task.name for found in scores] == ["DemoReranking"]
    reason = skipped["DemoNowhere"]
    assert reason.startswith("The data of the mteb task DemoNowhere cannot be loaded (")
    assert "fetch it once where the Hub can be reached" in reason
    assert "\n" not in reason
    assert capfd.readouterr() == ("", "")
    assert not [str(warning.message) for warning in recwarn if "mteb" in str(warning.filename)]


def test_variants_that_would_share_a_folder(no_embedding):
    with pytest.raises(ValueError, match=r"variants \['a b', 'a\+b'\] would share a folder of results"):
        run_tasks([demo.DemoSTS()], ["a b", "a+b"], no_embedding, **SETTINGS)


def test_prompts_similarity_and_truncation_of_a_model(shallow_path, tmp_path):
    like = pipeline(CausalTransformer(shallow_path))
    like.prompts = {"query": "ask: ", "passage": "read: ", "STS": "same? "}
    like.similarity_fn_name, like.truncate_dim = "dot", 12
    asked = []

    def embed(texts, prompt):
        asked.append(prompt)
        with like.truncate_embeddings(None):
            return {"only": torch.from_numpy(like.encode(list(texts), prompt=prompt))}

    for task, prompts in ((demo.DemoReranking, {"ask: ", "read: "}), (demo.DemoSTSInOneSplit, {"same? "})):
        (scores,) = run_tasks([task()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
        assert set(asked) == prompts
        (expected,) = mteb.evaluate(like, task(), cache=None, show_progress_bar=False).task_results
        assert scores.scores["only"].value == pytest.approx(expected.get_score(), abs=1e-5)
        asked.clear()
    # Results under other prompts are others.
    run_tasks([demo.DemoSTSInOneSplit()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
    assert not asked
    like.prompts = {**like.prompts, "STS": "alike? "}
    run_tasks([demo.DemoSTSInOneSplit()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
    assert set(asked) == {"alike? "}


# A comparison


def compared(path, tasks, **settings):
    asked = [recipe for recipe in default_recipes(1) if recipe.result == "Classical, mean"]
    return compare_tasks(Recipes(CausalTransformer(path), asked), tasks, model="tiny", **settings)


@pytest.mark.usefixtures("quick")
def test_a_comparison_of_tasks(shallow_path, tmp_path):
    tasks = [demo.DemoSTSInOneSplit(), demo.DemoPairs()]
    found = compared(shallow_path, tasks, output=tmp_path)
    names = [task.metadata.name for task in tasks]
    assert [task.name for task in found.tasks][:3] == ["Mean of tasks", *names]
    for result in found.results:
        assert result.scores["Mean of tasks"].value == pytest.approx(fmean(result.scores[name].value for name in names))
    assert found.lengths
    known = compared(shallow_path, [demo.DemoSTSInOneSplit(), demo.DemoPairs()], output=tmp_path)
    assert known.lengths == []
    for task, score in known.results[0].scores.items():
        # mteb keeps six decimals.
        assert score.value == pytest.approx(found.results[0].scores[task].value, abs=1e-6)
    assert not math.isnan(known.results[0].cost)


@pytest.mark.usefixtures("quick")
def test_a_task_whose_data_do_not_load_once_more(shallow_path, monkeypatch):
    """For the controls on random weights: it stands there without them."""

    class Once(demo.DemoPairs):
        def load_data(self, **kwargs):
            if self.loads:
                raise OSError("the Hub cannot be reached")
            super().load_data(**kwargs)

    monkeypatch.setattr(Once, "loads", 0)
    found = compared(shallow_path, [demo.DemoSTSInOneSplit(), Once()])
    untrained = [result for result in found.results if result.recipe.startswith("Random weights")]
    columns = {"DemoSTSInOneSplit", "DemoSTSInOneSplit, cosine_pearson"}
    assert [{*result.scores} for result in untrained] == [columns] * len(untrained) != []
    trained = next(result for result in found.results if result.name == "Classical, mean")
    assert trained.scores.keys() > {"Mean of tasks", "DemoSTSInOneSplit", "DemoPairs"}
    assert "the Hub cannot be reached" in dict(found.skipped)["DemoPairs"]
    with pytest.raises(ValueError, match="No task could be run. The data of the mteb task DemoNowhere cannot be"):
        compared(shallow_path, [demo.DemoNowhere()])


# Names of tasks


def test_names_of_tasks_and_their_language():
    tasks = resolve_tasks(["LCQMC", "STSB", "LCQMC", mteb.get_task("BQ")])
    assert [task.metadata.name for task in tasks] == ["LCQMC", "STSB", "BQ"]
    for name in ("C-MTEB", "cmteb", "MTEB(cmn, v1)"):
        assert len(resolve_tasks([name, "STSB"])) == 31
    assert {task.metadata.type for task in resolve_tasks(["C-MTEB"])} == set(PAPER_METRICS)
    english = mteb.get_task("STS12")
    assert language_of_tasks(tasks) == "zh"
    assert language_of_tasks([*tasks, english]) == language_of_tasks([english]) == "en"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["STSB", "LCQCM"], r"There is no mteb task 'LCQCM'\. Did you mean: 'LCQMC'\?"),
        (["§§§"], r"There is no mteb task '§§§'\. mteb\.get_tasks\(\) lists"),
        (["CIFAR10"], r"The mteb task CIFAR10 is about image, and a language model embeds texts alone"),
        ([], r"No mteb task was given: name at least one"),
    ],
)
def test_unknown_names(names, message):
    with pytest.raises(ValueError, match=message):
        resolve_tasks(names)


def test_without_mteb(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(ImportError, match=r'Benchmark needs mteb: pip install "st-reba\[mteb\]"'):
        resolve_tasks(["STSB"])
