"""Why a recipe is ahead, or is not: its parts changed one at a time, on pairs of the development part.

    python benchmarks/ablations.py --data DIR

Each row of ``benchmarks/results/ablations.csv`` is a recipe with one setting changed, beside PromptEOL read at its own
end on the same pairs: the difference is paired. Vectors are kept below ``--out``; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import records
from real.claims import differences
from real.cosines import cosines_of, places
from real.models import MODELS
from real.passes import Pass, own_end
from real.texts import Sets, TextList
from real.vectors import Vectors
from real_models import Measured, keep
from runs import options, parser
from st_reba.evaluation import bootstrap
from st_reba.lm import backbone as facts
from st_reba.modules import (
    CausalModule,
    CausalTransformer,
    ContrastivePromptingModule,
    TokenPrependingModule,
    ValueAggregationModule,
)

#: Pairs of the development part. The prompts of these recipes are English.
PAIRS = 500

Build = Callable[[CausalModule], CausalModule]


#: What every other row is held against.
REFERENCE = ("PromptEOL", "as it is")


def variants(depth: int) -> Mapping[tuple[str, str], Build]:
    """By recipe and what is changed, for a model of so many layers."""
    exit_layer = round(27 / 32 * depth)
    all_layers: dict[str, Any] = {"output_layer": depth, "final_norm": True}
    prompteol = partial(CausalTransformer, template="prompteol")
    return {
        REFERENCE: prompteol,
        ("PromptEOL", f"after layer {exit_layer}"): partial(prompteol, output_layer=exit_layer),
        ("PromptEOL", f"after layer {exit_layer}, without the final norm"): partial(
            prompteol, output_layer=exit_layer, final_norm=False
        ),
        ("Contrastive prompting", "as it is"): ContrastivePromptingModule,
        ("Contrastive prompting", "all layers, final norm"): partial(ContrastivePromptingModule, **all_layers),
        **{
            ("Contrastive prompting", f"contrast in layer {layer}"): partial(
                ContrastivePromptingModule, contrast_layer=layer
            )
            for layer in sorted({1, depth // 4, depth // 2, exit_layer - 2})
        },
        ("Contrastive prompting", "scale 1"): partial(ContrastivePromptingModule, scale=1.0),
        ("Contrastive prompting", "scale norm"): partial(ContrastivePromptingModule, scale="norm"),
        ("Token prepending", "as it is"): TokenPrependingModule,
        ("Token prepending", "all layers, final norm"): partial(TokenPrependingModule, **all_layers),
        **{
            ("Token prepending", f"prepended to {layers} layer{'s' if layers > 1 else ''}"): partial(
                TokenPrependingModule, prepend_layers=layers
            )
            for layers in (1, 2, depth // 2)
        },
        ("Value aggregation", "as it is"): ValueAggregationModule,
    }


def at_its_end(recipe: str, build: Build) -> Pass:
    """A recipe, read at its last token."""
    return own_end(recipe, lambda backbone, language: build(backbone), ("last",))


def run(measured: Measured, given: argparse.Namespace) -> None:
    """Embed under every variant, and write how each stands beside the reference."""
    sets = Sets(given.data)
    labelled = sets.pairs("en", "dev").head(PAIRS)
    texts, sides = places(labelled)
    texts_of = TextList(f"stsb-en-dev-{PAIRS}", "en", lambda sets: texts)
    found = {}
    for (recipe, change), build in variants(facts.depth(measured.backbone.model)).items():
        kept = Vectors(measured.directory(given.out) / texts_of.name / f"{recipe}, {change}")
        if not kept.done:
            keep(kept, at_its_end(recipe, build).make(measured.backbone, "en"), texts_of, sets)
        [variant] = kept.variants()
        found[recipe, change] = cosines_of(kept.read(variant), *sides)
    named = {str(number): each for number, each in enumerate(found.values())}
    statistic = bootstrap.spearman(named, labelled.scores)
    reference = str(list(found).index(REFERENCE))
    beside = differences(statistic, [(each, reference) for each in named])
    shared: records.Record = {
        "model": measured.model.name, "precision": measured.precision, "set": f"STS-B en dev, {PAIRS}",
        **records.today(),
    }  # fmt: skip
    rows: list[records.Record] = [
        {**shared, "recipe": recipe, "change": change, "score": float(score), **difference}
        for (recipe, change), score, difference in zip(found, statistic.scores, beside, strict=True)
    ]
    records.rewrite("ablations", rows, given.results)


def main() -> None:
    made = parser(__doc__, out="build/real")
    made.add_argument("--models", nargs="+", default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    given = options(made)
    for model in map(MODELS.__getitem__, given.models):
        run(Measured(model, model.located(given.out / "models"), given.precision, random=False), given)


if __name__ == "__main__":
    main()
