from __future__ import annotations

import sys

import pytest

from st_reba.compare.mteb.tasks import PAPER_METRICS, language_of_tasks, resolve_tasks

mteb = pytest.importorskip("mteb")


def test_names():
    tasks = resolve_tasks(["LCQMC", "STSB", "LCQMC", mteb.get_task("BQ")])
    assert [task.metadata.name for task in tasks] == ["LCQMC", "STSB", "BQ"]


@pytest.mark.parametrize("name", ["C-MTEB", "c-mteb", "MTEB(cmn, v1)"])
def test_c_mteb_is_31_tasks(name):
    tasks = resolve_tasks([name, "STSB"])
    assert len(tasks) == 31
    kinds = [task.metadata.type for task in tasks]
    counts = {"Classification": 6, "Clustering": 4, "PairClassification": 2, "Reranking": 4, "Retrieval": 8, "STS": 7}
    assert {kind: kinds.count(kind) for kind in counts} == counts
    assert set(counts) == set(PAPER_METRICS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["STSB", "LCQCM"], r"There is no mteb task 'LCQCM'\. Did you mean LCQMC"),
        (["lcqmc"], r"There is no mteb task 'lcqmc'\. Did you mean LCQMC"),
        (["CMTEB-"], r"There is no mteb task 'CMTEB-'\. Did you mean .*C-MTEB"),
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


def test_the_language_of_tasks():
    chinese, english = (mteb.get_task(name) for name in ("LCQMC", "STS12"))
    assert language_of_tasks([chinese]) == "zh"
    assert language_of_tasks([chinese, english]) == language_of_tasks([english]) == "en"
