"""Comparisons to show: a table of `st-reba compare` with intervals around it, and one of C-MTEB's size."""

from __future__ import annotations

import random

from st_reba.compare.results import Comparison, Result
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import Control

_DEMO = """
Bag of input embeddings | mean | 11.3 | 25.0 | 11982 | 0.03
Random weights, Classical | mean | 3.1 | 20.0 | 376 | 0.98
Random weights, Classical | last | 4.9 | 20.0 | 377 | 0.98
Classical | mean | -0.1 | 25.0 | 368 | 1.00
Echo-2 | mean | 9.7 | 32.5 | 169 | 2.18
Echo-3 | mean | 11.1 | 35.0 | 97 | 3.78
ReBA-2 | mean | 5.5 | 37.5 | 165 | 2.23
ReBA-3 | mean | 6.4 | 32.5 | 103 | 3.56
Bidirectional | mean | 1.2 | 25.0 | 357 | 1.03
Echo-2, bidirectional | mean | 9.9 | 30.0 | 167 | 2.20
ReBA-2, bidirectional | mean | 6.6 | 30.0 | 158 | 2.33
Classical | last | 1.1 | 25.0 | 370 | 1.00
Echo-2 | last | 2.5 | 32.5 | 168 | 2.21
Echo-3 | last | 3.9 | 35.0 | 97 | 3.84
ReBA-2 | last | 7.7 | 37.5 | 165 | 2.25
ReBA-3 | last | 7.9 | 32.5 | 100 | 3.72
Bidirectional | last | 1.1 | 25.0 | 365 | 1.01
Echo-2, bidirectional | last | 2.5 | 30.0 | 177 | 2.10
ReBA-2, bidirectional | last | 7.9 | 30.0 | 166 | 2.23
Bidirectional, prompt | last | -0.5 |  | 174 | 2.13
RT-2 | last | -2.5 |  | 268 | 1.38
RT-4 | last | -3.6 |  | 198 | 1.87
RT-8 | last | -4.6 |  | 127 | 2.92
"""

_CMTEB = """
AFQMC ATEC BQ LCQMC PAWSX QBQTC STSB Cmnli Ocnli AmazonReviewsClassification IFlyTek JDReview
MassiveIntentClassification MassiveScenarioClassification MultilingualSentiment OnlineShopping TNews Waimai
CLSClusteringP2P CLSClusteringS2S ThuNewsClusteringP2P ThuNewsClusteringS2S CMedQAv1-reranking
CMedQAv2-reranking MMarcoReranking T2Reranking CmedqaRetrieval CovidRetrieval DuRetrieval EcomRetrieval
MedicalRetrieval MMarcoRetrieval T2Retrieval VideoRetrieval STS22
"""


def _estimate(value: float, spread: float, tied: bool) -> Estimate:
    return Estimate(value, value - spread, value + 0.9 * spread, tied)


def demo() -> Comparison:
    """The demo LM on the demo texts."""
    results = []
    for line in _DEMO.strip().splitlines():
        recipe, pooling, spearman, odd, speed, cost = (part.strip() for part in line.split("|"))
        control = recipe.startswith(("Bag", "Random"))
        scores = {"STS": _estimate(float(spearman) / 100, 0.085, not control and float(spearman) > 1)}
        if odd:
            scores["Word sense"] = _estimate(float(odd) / 100, 0.14, not control and float(odd) > 26)
        untrained = Control("random", f"Random weights, {recipe}, {pooling}", "itself on random weights")
        results.append(
            Result(
                recipe,
                pooling,
                control,
                scores,
                float(speed),
                float(cost),
                called="the bag of input embeddings" if recipe == "Bag of input embeddings" else "",
                controls=() if control else (untrained,),
            )
        )
    draw = random.Random(0)
    return Comparison(
        model="the demo LM",
        data="the demo texts: 130 pairs, 40 word-sense questions",
        tasks=[
            Measure("STS", "Spearman × 100", note="Cosine similarity of 130 pairs against their labels."),
            Measure(
                "Word sense",
                "accuracy, %",
                chance=0.25,
                note="40 questions: which of four sentences uses a word in another sense.",
            ),
        ],
        results=results,
        verdict=[
            "No recipe beats the control 'Bag of input embeddings' (mean) on these texts: use no recipe of this model "
            "without better evidence.",
            "Echo-3 with mean pooling scores highest among the recipes.",
            "Of the 19 other recipes, 14 cannot be told from it on this data.",
        ],
        skipped=[("Bidirectional, chunked (mean)", "DemoLM computes attention in code of its own.")],
        lengths=[max(3, round(draw.lognormvariate(2.6, 0.45))) for _ in range(260)],
        settings={"batch size": "32", "dtype": "float32", "device": "cpu", "resamples": "1,000", "seed": "0"},
        versions={"st_reba": "0.1.0", "sentence-transformers": "6.2.0", "transformers": "5.23.0", "torch": "2.13.0"},
        command="st-reba compare --report out/",
        date="2026-11-20",
        answer="None: no recipe beats the bag of input embeddings (11.3); the best, Echo-3, mean, has 11.1. A bigger "
        "model, or more labelled pairs, will say more.",
    )


def cmteb() -> Comparison:
    """40 rows on 35 tasks, under a Chinese model name."""
    draw = random.Random(1)
    methods = ["Classical", "Echo-2", "Echo-3", "ReBA-1", "ReBA-2", "ReBA-3", "Bidirectional"]
    methods += ["Echo-2, bidirectional", "ReBA-2, bidirectional"]
    recipes = [(method, pooling, False) for pooling in ("mean", "last", "weightedmean") for method in methods]
    recipes += [("Bidirectional, prompt", "last", False), *((f"RT-{passes}", "last", False) for passes in (2, 4, 8))]
    recipes += [(f"Random weights, {method}", "mean", True) for method in methods[:8]]
    recipes += [("Bag of input embeddings", "mean", True)]
    tasks = [Measure(name, "main score × 100", note=f"{name} of C-MTEB, as mteb scores it.") for name in _CMTEB.split()]
    results = []
    for index, (recipe, pooling, control) in enumerate(recipes):
        level = 0.35 if control else 0.5 + 0.01 * (index % 9)
        values = {task.name: min(0.98, max(0.01, draw.gauss(level, 0.07))) for task in tasks}
        scores = {name: _estimate(value, 0.02, not control and value > 0.6) for name, value in values.items()}
        cost = 0.05 if "Bag" in recipe else 1 + draw.random() + 0.7 * (index % 9)
        results.append(Result(recipe, pooling, control, scores, 300 / cost, cost))
    return Comparison(
        model="智源/悟道-中文语言模型-7B",
        data="C-MTEB, 35 tasks",
        tasks=tasks,
        results=results,
        verdict=["ReBA-2 with mean pooling scores highest on AFQMC.", "It beats every control."],
        lengths=[max(1, round(draw.lognormvariate(4, 1))) for _ in range(5000)],
        command="st-reba compare --model 智源/悟道-中文语言模型-7B --mteb C-MTEB --report out/",
        date="2026-11-20",
    )


def proxies() -> Comparison:
    """Plain texts without labels, and no times."""
    alignment = Measure("Alignment", "mean squared distance", scale=1, greater_is_better=False, proxy=True)
    uniformity = Measure("Uniformity", "log of the mean potential", scale=1, greater_is_better=False, proxy=True)
    rows = [("Classical", False, 0.31, -0.8), ("ReBA-2", False, 0.22, -1.9), ("Bag of input embeddings", True, 0.4, -2)]
    nan = float("nan")
    return Comparison(
        model="org/模型",
        data="texts.txt: 3 texts",
        tasks=[alignment, uniformity],
        results=[
            Result(
                recipe,
                "mean",
                control,
                {"Alignment": Estimate(a, nan, nan, not control), "Uniformity": Estimate(u, nan, nan)},
            )
            for recipe, control, a, u in rows
        ],
        verdict=["These are proxies, measured without labels."],
        lengths=[4, 4, 4],
    )


def real() -> Comparison:
    """What a model of some hundred million parameters gives on 200 pairs: a cheap recipe is advised."""
    rows = """
tf-idf | mean | 59.2 | | | tf-idf, without any model
Bag of input embeddings | mean | 37.5 | 0.031 | 12400 | the bag of input embeddings
Bag of input embeddings, partwise whitened | mean | 60.1 | 0.034 | 11900 | the bag, partwise whitened
Random weights, Value aggregation | last | 12.2 | | |
Classical | mean | 37.2 | 1.0 | 31 |
Classical | last | 30.8 | 1.0 | 32 |
Echo-2 | mean | 47.3 | 2.2 | 14 |
ReBA-2 | mean | 46.4 | 2.3 | 14 |
ReBA-2 | last | 44.8 | 2.1 | 15 |
PromptEOL | last | 67.1 | 1.9 | 17 |
Knowledge | last | 70.1 | 3.6 | 8.8 |
Value aggregation | last | 68.7 | 1.6 | 20 |
Early and late, partwise whitened | mean | 72.5 | 1.9 | 16 |
"""
    results = []
    for line in rows.strip().splitlines():
        recipe, pooling, score, cost, speed, called = (part.strip() for part in line.split("|"))
        control = recipe.startswith(("tf", "Bag", "Random"))
        untrained = Control("random", f"Random weights, {recipe}, {pooling}", "itself on random weights")
        results.append(
            Result(
                recipe,
                pooling,
                control,
                {"STS": _estimate(float(score) / 100, 0.043, not control and float(score) > 68)},
                float(speed) if speed else None,
                float(cost) if cost else None,
                called=called,
                controls=() if control else (untrained,),
            )
        )
    return Comparison(
        model="a small model",
        data="400 pairs of pairs.tsv",
        tasks=[
            Measure("STS", "Spearman x 100", note="Correlation of cosine similarities with the labels of 400 pairs.")
        ],
        results=results,
        verdict=["Best on STS: Early and late, partwise whitened, mean, 72.5 [68.2, 76.4]."],
        skipped=[
            ("RT-2, last", "no cache"),
            ("RT-4, last", "no cache"),
            ("RT-8, last", "no cache"),
            ("CK, mean", "no room"),
        ],
        lengths=[4, 9, 13, 15],
        settings={"precision": "bfloat16", "device": "cpu"},
        command="st-reba compare --model a-small-model --data pairs.tsv --out out",
        date="2026-11-20",
        answer="Three recipes cannot be told apart; use the cheapest, Value aggregation, last token: 68.7 [64.4, "
        "72.6], 31 above what you have (the mean of the last hidden states), ahead of every control.",
        use="Value aggregation, last",
        build="st-reba build --model a-small-model --recipe value-aggregation --out my-model",
    )
