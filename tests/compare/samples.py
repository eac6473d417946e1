"""Comparisons to show: two tasks with controls, and a model for which a recipe is advised."""

from __future__ import annotations

from st_reba.compare.results import Comparison, Control, Result
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure

#: Recipe, pooling, STS, word sense, cost, texts a second.
_DEMO = """
Bag of input embeddings | mean | 11.3 | 25.0 | 0.03 | 11982
Random weights, Classical | mean | 3.1 | 20.0 | 0.98 | 376
Classical | mean | -0.1 | 25.0 | 1.00 | 368
Echo-2 | mean | 9.7 | 32.5 | 2.18 | 169
Echo-3 | mean | 11.1 | 35.0 | 3.78 | 97
Echo-2, bidirectional | mean | 2.5 | 30.0 | 2.10 | 177
Bidirectional, prompt | last | -0.5 | | 2.13 | 174
RT-8 | last | -4.6 | | 2.92 | 127
"""
_REAL = """
tf-idf | mean | 59.2 | | |
Bag of input embeddings | mean | 37.5 | | 0.031 | 12400
Random weights, Value aggregation | last | 12.2 | | |
Classical | mean | 37.2 | | 1.0 | 31
Classical | last | 30.8 | | 1.0 | 32
PromptEOL | last | 67.1 | | 1.9 | 17
Knowledge | last | 70.1 | | 3.6 | 8.8
Value aggregation | last | 68.7 | | 1.6 | 20
Early and late, partwise whitened | mean | 72.5 | | 1.9 | 16
"""


def _estimate(value: float, spread: float, tied: bool, corrected: float | None = None) -> Estimate:
    centre = (value if corrected is None else corrected) / 100
    return Estimate(
        value / 100, centre - spread, centre + 0.9 * spread, tied, None if corrected is None else corrected / 100
    )


def _results(table: str, tied_above: float, best: str) -> list[Result]:
    results = []
    for line in table.strip().splitlines():
        recipe, pooling, sts, sense, cost, speed = (part.strip() for part in line.split("|"))
        control = recipe.startswith(("tf-idf", "Bag", "Random"))
        corrected = float(sts) - 0.8 if recipe == best else None
        scores = {"STS": _estimate(float(sts), 0.043, not control and float(sts) > tied_above, corrected)}
        if sense:
            scores["Word sense"] = _estimate(float(sense), 0.14, not control and float(sense) > 26)
        untrained = Control("random", f"Random weights, {recipe}, {pooling}")
        rate, share = (float(speed), float(cost)) if cost else (None, None)
        own = () if control else (untrained,)
        halves = {"as it is": 4, "@27": 6} if recipe == "PromptEOL" else {}
        results.append(
            Result(recipe, pooling, control, scores, rate, share, controls=own, chosen=halves,
                   read_at="@27" if halves else "",
                   by_layer={"27": float(sts) / 100, "29": 0.5, "30": 0.45} if halves else {})
        )  # fmt: skip
    return results


def demo() -> Comparison:
    """The demo LM on the demo texts."""
    return Comparison(
        model="the demo LM",
        data="the demo texts: 130 pairs, 40 word-sense questions",
        tasks=[
            Measure("STS", "Spearman × 100", note="Cosine similarity of 130 pairs against their labels."),
            Measure("Word sense", "accuracy, %", chance=0.25, note="40 questions: which uses a word in another sense."),
        ],
        results=_results(_DEMO, 1, "Echo-3"),
        verdict=["Echo-3 (mean): 10.3 [6.0, 14.2], 11.1 before the correction for being the best of 6 recipes."],
        skipped=[("Bidirectional, chunked (mean)", "DemoLM computes attention in code of its own.")],
        lengths=[3, 9, 13, 15],
        settings={"batch size": "32", "device": "cpu"},
        versions={"st_reba": "0.1.0", "torch": "2.13.0"},
        command="st-reba compare --out out",
        date="2026-11-20",
        answer="None is surely ahead of the −0.1 that you have without a recipe: the best, Echo-3 (mean), has 10.3.",
    )


def real() -> Comparison:
    """What a model of some hundred million parameters gives on 400 pairs: a recipe is to be used."""
    return Comparison(
        model="a small model",
        data="400 pairs of pairs.tsv",
        tasks=[Measure("STS", "Spearman x 100", note="Correlation of cosine similarities with the labels.")],
        results=_results(_REAL, 68, "Early and late, partwise whitened"),
        verdict=["Early and late, partwise whitened (mean): 71.7 [67.4, 75.6], 72.5 before the correction."],
        skipped=[*((f"RT-{passes}, last", "no cache") for passes in (2, 4, 8)), ("CK, mean", "no room")],
        lengths=[4, 9, 13, 15],
        settings={"precision": "bfloat16", "device": "cpu"},
        command="st-reba compare --model a-small-model --data pairs.tsv --out out",
        date="2026-11-20",
        answer="Use Early and late, partwise whitened (mean): 71.7, against 37.2 without a recipe.",
        use="Early and late, partwise whitened, mean",
        build="st-reba build --model a-small-model --recipe early-late --out my-early-late",
    )
