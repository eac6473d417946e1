"""Tables of recipes, from their rows: what they are called, what they read, what they cost, how they scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pivot import Store, Table
from st_reba.recipes import Row, every_row


@dataclass(frozen=True)
class Listing:
    """A table of the recipes that a page is about.

    Attributes:
        chosen: Which of them, by the page.
    """

    chosen: Callable[[Row, Path], bool]

    def render(self, store: Store, page: Path) -> str:
        """Markdown; empty where there are none."""
        return markdown([row for row in every_row() if self.chosen(row, page)])


@dataclass(frozen=True)
class Measured:
    """The scores of the recipes that a page is about, beside the classical embedding.

    Attributes:
        table: Of all recipes.
    """

    table: Table

    def render(self, store: Store, page: Path) -> str:
        """Markdown; empty where none of them was measured."""
        names = tuple(row.name for row in every_row() if row.page == page.stem)
        if not store.select(self.table.file, {**self.table.where, "recipe": names}):
            return ""
        return replace(self.table, where={**self.table.where, "recipe": ("Classical", *names)}).render(store, page)


def markdown(rows: Sequence[Row], link: str = "") -> str:
    """A table with a line for each recipe.

    Args:
        rows: Which.
        link: What stands before a page's name where the recipes' names are links to their pages.
    """
    if not rows:
        return ""
    lines = [
        "| recipe | `--recipe` | module | pooling | what is read | cost beside Classical |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"[{row.name}]({link}{row.page}.md)" if link else row.name
        cells = (name, f"`{row.key}`", f"`{row.module.__name__}`", ", ".join(row.poolings), row.says, row.cost)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: In a method's page: the recipes that it is about.
OF_THE_PAGE = Listing(lambda row, page: row.page == page.stem)
#: Those that ``compare`` runs by default.
WORTH_TRYING = Listing(lambda row, page: bool(row.tried))
