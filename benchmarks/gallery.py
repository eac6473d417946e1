"""Run the blocks of docs/gallery.md on a language model, and write below each what it printed.

    python benchmarks/gallery.py --model DIR

The plot goes to ``benchmarks/results/clusters.svg``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import matplotlib

import records
from runs import options, parser

PAGE = records.ROOT / "docs" / "gallery.md"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)


def main() -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--model", type=Path, required=True, help="directory of the language model")
    given = options(made)
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "st_reba"
    names: dict[str, Any] = {}
    page, model = PAGE.read_text(encoding="utf-8"), str(given.model.resolve())
    os.chdir(given.results)

    def shown(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1].replace(NAME, model), PAGE.name, "exec"), names)
        text = printed.getvalue()
        return f"```python\n{block[1]}```\n" + (f"\n```text\n{text}```\n" if text else "")

    PAGE.write_text(BLOCK.sub(shown, page), encoding="utf-8")


if __name__ == "__main__":
    main()
