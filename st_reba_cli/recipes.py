"""``st-reba recipes``."""

from __future__ import annotations

from rich.table import Table

from .options import known_names
from .printing import console


def recipes() -> None:
    """List all recipes and filters.

    --recipe and --recipes take a recipe's key. @LAYER and one filter may follow it: "classical@12",
    "prompteol+whitened". With -zh a recipe has its Chinese prompt: "topic-zh".
    """
    known, filters = known_names()
    for title, tried in (("Recipes that compare tries by default", True), ("Other recipes", False)):
        console.say(title, style="bold")
        table = Table("Key", "Passes", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.columns[0].min_width = max(map(len, known)) + 2
        for column in table.columns[:2]:
            column.no_wrap = True
        for key, row in known.items():
            if row["tried"] == tried:
                description = row["in_brief"] or f"{row['description'][:1].upper()}{row['description'][1:]}"
                table.add_row(f"{key} *" if row["fitted"] else key, row["cost"], description)
        console.print(table)
        console.print()
    console.say("*: fitted on plain texts (--fit-texts). Passes: number of passes over the text.")
    console.print()
    table = Table("Filter", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.columns[0].no_wrap = True
    for key, description in filters.items():
        table.add_row(f"+{key}", description)
    console.print(table)
