"""``st-reba recipes``."""

from __future__ import annotations

from typing import Annotated

from rich.table import Table

from .options import argument, check_recipes, complete_recipe, known_names
from .printing import console


def recipes(
    key: Annotated[
        str | None, argument("Of one recipe, to be told all of it.", "[KEY]", autocompletion=complete_recipe)
    ] = None,
) -> None:
    """List the recipes and filters that there are.

    A recipe's key is what --recipe and --recipes take. It may go on with @LAYER, and with one filter: "classical@12",
    "prompteol+whitened".
    """
    names = known_names()
    if key is not None:
        check_recipes([key], "")
        row = names.recipes.get(key)
        if row is None:
            raise ValueError(f"{key}: give a recipe's key alone, without layer and filter, such as reba-2.")
        fitted = "on plain texts, as --fit-texts gives them" if row.fitted else "on nothing"
        console.say(f"{key}: {row.name}. {row.says[:1].upper()}{row.says[1:]}.")
        console.say(f"Passes over the text: {row.cost}. Fitted {fitted}. Build it with: st-reba build --recipe {key}")
        return
    table = Table("Key", "Passes", "Fitted", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.columns[0].no_wrap = True
    for each, row in names.recipes.items():
        table.add_row(each, row.cost, "yes" if row.fitted else "", row.says)
    console.print(table)
    told = Table("Filter", "What it does", box=None, padding=(0, 1, 0, 0), header_style="bold")
    told.columns[0].no_wrap = True
    for each, says in names.filters.items():
        told.add_row(f"+{each}", says)
    console.print()
    console.print(told)
