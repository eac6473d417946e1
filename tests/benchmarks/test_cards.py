"""Model cards of measured models show the scores of the CSV files."""

from __future__ import annotations

from pathlib import Path

import blocks
import cards
import records
from st_reba.version import __version__

from ..backbones import DEMO_MODEL
from .test_tables import ROOT

FIELDS: records.Record = {
    "model": blocks.SMOLLM2,
    "precision": "bfloat16",
    "date": "2026-11-28",
    "texts": 300,
    "metric": "Spearman",
}


def test_no_card_is_stale():
    """``make cards`` writes them anew."""
    results, written = blocks.Results(), sorted((ROOT / "docs" / "models").iterdir())
    pages = {cards.page_of(name): name for name in cards.ABOUT}
    assert ROOT / "MODEL_CARD.md" not in pages
    assert (ROOT / "MODEL_CARD.md").read_text("utf-8") == cards.page_of(blocks.SMOLLM2).read_text("utf-8")
    for page in written:
        text = page.read_text("utf-8")
        assert f"`st_reba` {__version__}." in text
        for row in cards.comparison(pages[page], results)["rows"]:
            assert f"| {' | '.join(row)} |" in text


def test_scores_of_the_grid_come_first(tmp_path: Path):
    readings = [
        ("Echo topic", "standardised sum"),
        ("Echo topic", ""),
        ("PromptEOL", ""),
        ("PromptEOL", "standardised"),
    ]
    rows: list[records.Record] = [
        {**FIELDS, "set": name, "recipe": recipe, "filter": own, "fitted_on": blocks.USUAL_FIT if own else "",
         "score": score, "low": score - 0.1, "high": score + 0.1}
        for name in ("STS-B en test", "mean of 2 test parts, en", "STS-B en dev")
        for score, (recipe, own) in zip((0.7, 0.6, 0.5, 0.4), readings, strict=True)
    ]  # fmt: skip
    records.rewrite("grid", rows, tmp_path)
    text = cards.model_card(blocks.SMOLLM2, DEMO_MODEL, blocks.Results(tmp_path))
    assert "**Mean of 2 test parts, en: 70.0 [60.0, 80.0].**" in text
    assert "| set | Echo topic | PromptEOL |" in text
    assert "| STS-B en test | 70.0 [60.0, 80.0] | 50.0 [40.0, 60.0] |" in text
    assert "dev |" not in text
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert "- source_sentence: The bank raised its rates." in text
