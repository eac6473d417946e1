"""Fill the tables of README.md, benchmarks/RESULTS.md and docs/ from benchmarks/results/*.csv and the rows of recipes,
and write the names that the command refuses mistyped ones by, before it imports anything large.

    python benchmarks/tables.py            # writes them, and the picture
    python benchmarks/tables.py --check    # names those that are stale, and exits with 1

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is that of a function in ``blocks.py``, which
says what is in it. What was not measured is an empty cell; rows and columns that have nothing at all are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import picture
from blocks import BLOCKS, Block, Results
from records import RESULTS, ROOT, RecordsError, shown
from st_reba.recipes import every_row, rows
from st_reba.recipes.rows import IN_BRIEF, POST_PROCESSORS
from st_reba_cli.options import NAMES


class TablesError(Exception):
    """A page whose marks cannot be understood."""


MARKED = re.compile(r"(<!-- table: (?P<name>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL)
BEGIN = "<!-- table:"


def pages(root: Path) -> list[Path]:
    """All pages that may have tables."""
    some = [root / "README.md", root / "benchmarks" / "RESULTS.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in some if page.is_file()]


def filled(text: str, page: Path, results: Results, blocks: Mapping[str, Block]) -> tuple[str, list[str]]:
    """The page with its tables as they should be, and the names of those that were not.

    Raises:
        TablesError: If a name is unknown, or a mark is not closed.
        RecordsError: If a file of results is missing or cannot be read.
    """
    stale = []

    def fill(match: re.Match[str]) -> str:
        name, body = match["name"], match["body"]
        if name not in blocks:
            raise TablesError(f"{shown(page)}: there is no table {name!r}; those there are: {', '.join(blocks)}.")
        if BEGIN in body:
            raise TablesError(f"{shown(page)}: the table {name!r} has no {match['end']} before the next one begins.")
        made = blocks[name](results, page)
        made = f"\n{made}\n\n" if made else ""
        if body != made:
            stale.append(name)
        return f"{match[1]}{made}{match['end']}"

    result = MARKED.sub(fill, text)
    if text.count(BEGIN) != len(MARKED.findall(text)):
        raise TablesError(
            f"{shown(page)}: a mark is broken; a table is '{BEGIN} NAME -->', a line, and '<!-- end -->'."
        )
    return result, stale


def known_names() -> str:
    """What :data:`st_reba_cli.options.NAMES` has to say."""
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
    blocks: dict[str, Block] = {**BLOCKS, "held-out-picture": picture.image}
    try:
        made = {
            page: filled(page.read_text(encoding="utf-8"), page, results, blocks)
            for page in pages(options.root.resolve())
        }
        undrawn = picture.is_stale(results)
    except (TablesError, RecordsError) as error:
        print(error, file=sys.stderr)
        return 1
    stale = [f"{shown(page)}: {name}" for page, (_, names) in made.items() for name in names]
    stale += [shown(results.directory / picture.FILE)] if undrawn else []
    if NAMES.read_text(encoding="utf-8") != known_names():
        stale.append(shown(NAMES))
    if options.check:
        for name in stale:
            print(f"{name} is stale; `make tables` makes it anew", file=sys.stderr)
        return 1 if stale else 0
    for page, (text, names) in made.items():
        if names:
            page.write_text(text, encoding="utf-8")
    if undrawn:
        picture.write(results)
    if shown(NAMES) in stale:
        NAMES.write_text(known_names(), encoding="utf-8")
    for name in stale:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
