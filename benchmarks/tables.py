"""Fill the tables of README.md, benchmarks/RESULTS.md and docs/, and write the list of recipes of the command.

    python benchmarks/tables.py            # writes them, and the picture
    python benchmarks/tables.py --check    # names the files that are stale, and exits with 1

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``, and ``blocks.py`` has a function for each NAME. Data
are benchmarks/results/*.csv and the rows of recipes. Cells without a measurement are empty.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import picture
from blocks import BLOCKS, IN_BRIEF, Block, Results
from records import RESULTS, ROOT
from st_reba.recipes import every_row, rows
from st_reba.recipes.rows import POST_PROCESSORS
from st_reba_cli.options import NAMES

MARKED = re.compile(r"(<!-- table: (?P<name>[^\n]*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
BEGIN = "<!-- table:"


def pages(root: Path) -> list[Path]:
    """Return all pages that may have tables."""
    some = [root / "README.md", root / "benchmarks" / "RESULTS.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in some if page.is_file()]


def filled(text: str, page: Path, results: Results, blocks: Mapping[str, Block]) -> str:
    """Return the page with its tables as they should be.

    Raises:
        KeyError: If there is no table of a name.
        ValueError: If a mark is broken or not closed.
    """

    def fill(match: re.Match[str]) -> str:
        made = blocks[match["name"]](results, page)
        return f"{match[1]}\n{made}\n\n{match['end']}" if made else f"{match[1]}{match['end']}"

    result, count = MARKED.subn(fill, text)
    if text.count(BEGIN) != count:
        raise ValueError(f"{page}: a mark is broken; a table is '{BEGIN} NAME -->', a line, and '<!-- end -->'.")
    return result


def known_names() -> str:
    """Return the content of :data:`st_reba_cli.options.NAMES`."""
    made = {
        "recipes": {
            row.key: {
                "description": row.description,
                "in_brief": IN_BRIEF.get(row.key, ""),
                "cost": row.cost,
                "fitted": bool(row.post_processor),
                "tried": bool(row.tried),
            }
            for row in (*every_row(), rows.BAG)
        },
        "filters": {part.key: part.description for part in POST_PROCESSORS.values()},
    }
    return json.dumps(made, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the pages")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    options = parser.parse_args(arguments)
    results = Results(options.results.resolve())
    blocks: dict[str, Block] = {**BLOCKS, "picture": picture.image}
    texts = {page: filled(page.read_text(encoding="utf-8"), page, results, blocks) for page in pages(options.root)}
    texts[NAMES] = known_names()
    stale = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    drawing = [results.directory / picture.FILE] if picture.is_stale(results) else []
    for path in [*stale, *drawing]:
        print(f"{path} is stale; `make tables` makes it anew" if options.check else path, file=sys.stderr)
    if options.check:
        return 1 if stale or drawing else 0
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    if drawing:
        picture.write(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
