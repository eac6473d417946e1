from __future__ import annotations

import errno
import json
import socket
from statistics import fmean

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import (
    BinaryClassificationEvaluator,
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    RerankingEvaluator,
)

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.compare.mteb.run import run_tasks

from ...conftest import LONG, long, pipeline

mteb = pytest.importorskip("mteb")

from . import demo  # noqa: E402

VARIANTS = {"Echo-2, mean": "Echo-2__mean", "ReBA-2, last": "ReBA-2__last"}
SETTINGS = {"model": "models/demo-lm", "revision": "7"}
#: Two differ from others of their kind in what is resampled alone, which test_intervals.py looks at.
TASKS = [task for task in demo.TASKS if LONG or task not in (demo.DemoPairsInOneRow, demo.DemoClassificationF1)]
NAMES = [task.metadata.name for task in TASKS]


@pytest.fixture(scope="module")
def models(shallow_path):
    backbone = CausalTransformer(shallow_path)
    found = [pipeline(EchoModule(backbone)), pipeline(ReBAModule(backbone), "lasttoken")]
    return dict(zip(VARIANTS, found, strict=True))


@pytest.fixture(scope="module")
def embed(models):
    """All variants at once; notes what it was asked for."""

    def embed(texts, prompt):
        embed.asked += [(prompt, text) for text in texts]
        return {
            variant: model.encode(list(texts), prompt=prompt, convert_to_tensor=True)
            for variant, model in models.items()
        }

    embed.asked = []
    return embed


class Outcome:
    def __init__(self, embed, output):
        self.output, self.steps = output, []
        embed.asked.clear()
        tasks = [task() for task in TASKS]
        found = run_tasks(
            tasks,
            list(VARIANTS),
            embed,
            output=output,
            on_step=lambda step: self.steps.append((step, list(embed.asked))),
            **SETTINGS,
        )
        self.scores = {scores.task.name: scores for scores in found}
        assert not any(task.data_loaded for task in tasks)

    def entry(self, task, variant, split="test", subset="default"):
        (found,) = (e for e in self.scores[task].scores[variant].result.scores[split] if e["hf_subset"] == subset)
        return found


@pytest.fixture(scope="module")
def outcome(embed, tmp_path_factory):
    return Outcome(embed, tmp_path_factory.mktemp("output"))


@pytest.fixture
def no_embedding():
    def embed(texts, prompt):
        raise AssertionError("nothing was to be embedded")

    return embed


#: Of each kind one; what sentence-transformers itself scores is compared with that below.
LIKE_ANOTHER = (demo.DemoPairs, demo.DemoClassification, demo.DemoRetrieval)


@pytest.mark.parametrize("task", [long(task) if task in LIKE_ANOTHER else task for task in TASKS], ids=NAMES)
def test_scores_are_those_of_mteb_on_the_model_itself(task, outcome, models):
    (expected,) = mteb.evaluate(models["ReBA-2, last"], task(), cache=None, show_progress_bar=False).task_results
    scores = outcome.scores[task.metadata.name]
    found = scores.scores["ReBA-2, last"]
    assert found.value == pytest.approx(expected.get_score(), abs=1e-5)
    paper = expected.get_score(getter=lambda entry: entry[scores.paper_metric])
    assert found.paper == pytest.approx(paper, abs=1e-5)


def test_each_text_is_embedded_once_and_shared_by_the_variants(outcome):
    assert [step for step, _ in outcome.steps] == [f"{name}, {variant}" for name in NAMES for variant in VARIANTS]
    before = 0
    for first in range(0, len(outcome.steps), len(VARIANTS)):
        counts = [len(asked) for _, asked in outcome.steps[first : first + len(VARIANTS)]]
        assert counts == counts[:1] * len(VARIANTS)
        texts = outcome.steps[first][1][before:]
        assert len(texts) == len(set(texts)) > 0
        before = counts[0]
    assert len(outcome.steps[1][1]) == len(demo.PAIRS.texts())


def test_results_are_in_mtebs_format_and_layout(outcome):
    cache = mteb.ResultCache(outcome.output)
    for variant, folder in VARIANTS.items():
        path = outcome.output / "results" / f"st_reba__demo-lm__{folder}" / "7"
        assert {file.stem for file in path.glob("*.json")} == {*NAMES, "model_meta"}
        assert json.loads((path / "model_meta.json").read_text())["name"] == f"st_reba/demo-lm__{folder}"
        result = cache.load_task_result("DemoSTS", f"st_reba/demo-lm__{folder}", "7")
        assert result.get_score() == pytest.approx(outcome.scores["DemoSTS"].scores[variant].value, abs=1e-6)


def test_columns(outcome):
    scores = outcome.scores["DemoSTS"]
    assert [sample.unit for sample in scores.scores["Echo-2, mean"].samples] == ["pair"] * 4
    assert (scores.type, scores.metric, scores.paper_metric) == ("STS", "cosine_spearman", "cosine_pearson")
    assert scores.task.metric == "cosine_spearman x 100"
    assert scores.task.note == "mteb's STS task DemoSTS, validation and test."


def test_what_is_there_is_not_run_again(outcome, no_embedding):
    loads = [task.loads for task in TASKS]
    again = run_tasks([task() for task in TASKS], list(VARIANTS), no_embedding, output=outcome.output, **SETTINGS)
    assert [task.loads for task in TASKS] == loads
    for scores in again:
        for variant, score in scores.scores.items():
            first = outcome.scores[scores.task.name].scores[variant]
            # mteb writes six digits.
            assert (score.value, score.paper) == pytest.approx((first.value, first.paper), abs=1e-6)
            assert len(score.samples) == len(first.samples) > 0
            for sample, known in zip(score.samples, first.samples, strict=True):
                assert (sample.split, sample.subset, sample.statistic) == (known.split, known.subset, known.statistic)
                assert np.allclose(sample.values, known.values, atol=1e-6)
                assert (sample.labels is None) == (known.labels is None)


def test_what_is_missing_is_run(embed, models, tmp_path):
    def run(variants, **settings):
        return run_tasks([demo.DemoReranking()], variants, embed, output=tmp_path, **{**SETTINGS, **settings})[0]

    first = run(["Echo-2, mean"]).scores["Echo-2, mean"]
    embed.asked.clear()
    second = run(["Echo-2, mean", "ReBA-2, last"])
    assert embed.asked
    assert second.scores["Echo-2, mean"].value == first.value
    assert second.scores["Echo-2, mean"].result.date == first.result.date
    embed.asked.clear()
    assert run(["Echo-2, mean"], revision="8").scores["Echo-2, mean"].value == first.value
    assert embed.asked


def test_a_result_that_was_cut_short_is_made_again(embed, tmp_path):
    """By a full disk, or a kill while mteb wrote it."""
    (first,) = run_tasks([demo.DemoPairs()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)
    (path,) = (tmp_path / "results").rglob("DemoPairs.json")
    path.write_text(path.read_text()[:200])
    embed.asked.clear()
    (again,) = run_tasks([demo.DemoPairs()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)
    assert embed.asked
    assert again.scores["Echo-2, mean"].value == first.scores["Echo-2, mean"].value


def test_a_result_that_a_newer_mteb_has_written_is_kept(embed, tmp_path):
    run_tasks([demo.DemoPairs()], list(VARIANTS), embed, output=tmp_path, **SETTINGS)
    path = next((tmp_path / "results").rglob("DemoPairs.json"))
    newer = json.dumps({**json.loads(path.read_text(encoding="utf-8")), "mteb_version": "9.0.0", "scores": [1]})
    path.write_text(newer, encoding="utf-8")
    with pytest.raises(
        ValueError, match=rf"DemoPairs.json is no result that mteb {mteb.__version__} reads, and another"
    ):
        run_tasks([demo.DemoPairs()], list(VARIANTS), embed, output=tmp_path, **SETTINGS)
    assert path.read_text(encoding="utf-8") == newer


def test_a_full_disk(embed, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mteb.ResultCache, "save_to_cache", full)
    with pytest.raises(OSError, match=rf"{tmp_path} cannot take the results of DemoPairs: the disk is full"):
        run_tasks([demo.DemoPairs()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)


def test_revisions_of_single_variants(embed, tmp_path):
    revisions = {"Echo-2, mean": "a", "ReBA-2, last": "b"}
    run_tasks([demo.DemoPairs()], list(revisions), embed, model="m", revision=revisions, output=tmp_path)
    assert {path.parent.name for path in (tmp_path / "results").rglob("DemoPairs.json")} == {"a", "b"}


def test_without_samples_there_is_nothing_to_resample(embed, no_embedding, tmp_path):
    run_tasks([demo.DemoPairs()], ["Echo-2, mean"], embed, output=tmp_path, **SETTINGS)
    (path,) = (tmp_path / "samples").rglob("DemoPairs.json")
    path.unlink()
    (scores,) = run_tasks([demo.DemoPairs()], ["Echo-2, mean"], no_embedding, output=tmp_path, **SETTINGS)
    assert scores.scores["Echo-2, mean"].samples == []
    assert scores.scores["Echo-2, mean"].value > 0


def test_an_aggregate_is_made_of_its_parts(embed, outcome):
    (scores,) = run_tasks([demo.DemoAll()], ["Echo-2, mean"], embed, **SETTINGS)
    parts = [outcome.scores[name].scores["Echo-2, mean"].value for name in ("DemoReranking", "DemoClusteringSets")]
    assert scores.scores["Echo-2, mean"].value == pytest.approx(fmean(parts), abs=1e-5)
    assert scores.scores["Echo-2, mean"].samples == []


def test_a_task_without_data_is_left_out_and_no_network_is_tried(embed, monkeypatch, recwarn, capfd):
    def connect(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    skipped = {}
    scores = run_tasks(
        [demo.DemoNowhere(), demo.DemoReranking()],
        ["Echo-2, mean"],
        embed,
        on_skip=lambda task, reason: skipped.update({task: reason}),
        **SETTINGS,
    )
    assert [found.task.name for found in scores] == ["DemoReranking"]
    (reason,) = skipped.values()
    assert reason.startswith("The data of the mteb task DemoNowhere cannot be loaded (")
    assert "fetch it once where the Hub can be reached" in reason
    assert "\n" not in reason
    assert capfd.readouterr() == ("", "")
    assert not [str(warning.message) for warning in recwarn if "mteb" in str(warning.filename)]


def test_variants_that_would_share_a_folder(no_embedding):
    with pytest.raises(ValueError, match=r"variants \['a b', 'a\+b'\] would share a folder of results"):
        run_tasks([demo.DemoSTS()], ["a b", "a+b"], no_embedding, **SETTINGS)


# The same figures from ST's own evaluators, on the models themselves.


def test_sts_is_sts_evaluator(outcome, models):
    rows = demo.DemoSTS().splits()["zh"]["test"]
    evaluator = EmbeddingSimilarityEvaluator(
        rows["sentence1"], rows["sentence2"], rows["score"], main_similarity="cosine", write_csv=False
    )
    for variant, model in models.items():
        expected = evaluator(model)
        entry = outcome.entry("DemoSTS", variant, subset="zh")
        assert entry["cosine_spearman"] == pytest.approx(expected["spearman_cosine"], abs=1e-5)
        assert entry["cosine_pearson"] == pytest.approx(expected["pearson_cosine"], abs=1e-5)


def test_pair_classification_is_sts_evaluator(outcome, models):
    rows = demo.DemoPairs().splits()["test"]
    evaluator = BinaryClassificationEvaluator(
        list(rows["sentence1"]), list(rows["sentence2"]), list(rows["labels"]), write_csv=False
    )
    for variant, model in models.items():
        expected = evaluator(model)
        entry = outcome.entry("DemoPairs", variant)
        assert entry["cosine_accuracy"] == pytest.approx(expected["cosine_accuracy"], abs=1e-5)
        assert entry["cosine_ap"] == pytest.approx(expected["cosine_ap"], abs=1e-5)


def test_retrieval_and_reranking_are_sts_evaluators(outcome, models):
    data = demo.DemoRetrieval().splits()["default"]["test"]
    queries, corpus = (dict(zip(data[part]["id"], data[part]["text"], strict=True)) for part in ("queries", "corpus"))
    relevant = {query: set(found) for query, found in data["relevant_docs"].items()}
    retrieval = InformationRetrievalEvaluator(queries, corpus, relevant, write_csv=False)
    candidates = demo.DemoReranking().splits()["default"]["test"]["top_ranked"]
    reranking = RerankingEvaluator(
        [
            {
                "query": queries[query],
                "positive": [corpus[document] for document in found if document in relevant[query]],
                "negative": [corpus[document] for document in found if document not in relevant[query]],
            }
            for query, found in candidates.items()
        ],
        write_csv=False,
    )
    for variant, model in models.items():
        found = retrieval(model)
        assert outcome.entry("DemoRetrieval", variant)["ndcg_at_10"] == pytest.approx(found["cosine_ndcg@10"], abs=1e-4)
        assert outcome.entry("DemoReranking", variant)["map_at_1000"] == pytest.approx(
            reranking(model)["map"], abs=1e-4
        )


def test_prompts_reach_the_model(shallow_path, tmp_path):
    like = pipeline(CausalTransformer(shallow_path))
    like.prompts = {"query": "ask: ", "document": "read: ", "STS": "same? "}
    asked = []

    def embed(texts, prompt):
        asked.extend((prompt, text) for text in texts)
        return {"only": like.encode(list(texts), prompt=prompt, convert_to_tensor=True).to(torch.float32)}

    (scores,) = run_tasks([demo.DemoReranking()], ["only"], embed, like=like, **SETTINGS)
    assert {prompt for prompt, _ in asked} == {"ask: ", "read: "}
    (expected,) = mteb.evaluate(like, demo.DemoReranking(), cache=None, show_progress_bar=False).task_results
    assert scores.scores["only"].value == pytest.approx(expected.get_score(), abs=1e-5)
    asked.clear()
    run_tasks([demo.DemoSTSInOneSplit()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
    assert {prompt for prompt, _ in asked} == {"same? "}
    # Results under other prompts are others.
    asked.clear()
    run_tasks([demo.DemoSTSInOneSplit()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
    assert not asked
    like.prompts = {**like.prompts, "STS": "alike? "}
    run_tasks([demo.DemoSTSInOneSplit()], ["only"], embed, like=like, output=tmp_path, **SETTINGS)
    assert {prompt for prompt, _ in asked} == {"alike? "}
