"""``st-reba recipes``."""

from __future__ import annotations

from rich.table import Table

from .options import known_names
from .printing import console


def recipes() -> None:
    """List the recipes and filters that there are.

    A recipe's key is what --recipe and --recipes take. It may go on with @LAYER, and with one filter: "classical@12",
    "prompteol+whitened". With -zh behind it a prompt's key asks in Chinese: "topic-zh".
    """
    known, filters = known_names()
    for title, tried in (("Recipes that compare tries by itself", True), ("Other recipes", False)):
        console.say(title, style="bold")
        table = Table("Key", "Passes", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.columns[0].min_width = max(map(len, known)) + 2
        for column in table.columns[:2]:
            column.no_wrap = True
        for each, row in known.items():
            if row["tried"] == tried:
                says = row["in_brief"] or f"{row['says'][:1].upper()}{row['says'][1:]}"
                table.add_row(f"{each} *" if row["fitted"] else each, row["cost"], says)
        console.print(table)
        console.print()
    console.say("*: fitted on plain texts, which --fit-texts gives. Passes: how often the text is run.")
    console.print()
    told = Table("Filter", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
    told.columns[0].no_wrap = True
    for each, says in filters.items():
        told.add_row(f"+{each}", says)
    console.print(told)
