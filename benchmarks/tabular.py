"""Markdown tables of rows of results: the cell of each row, and its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

Row = Mapping[str, Any]
Show = Callable[[Row], str]
#: Index among the columns of a table, and title.
Column = tuple[int, str]

#: Trained embedders that are measured for comparison.
REFERENCES = ("all-MiniLM-L6-v2", "all-mpnet-base-v2", "m3e-small")
CAPTIONS = {
    "batch": "batches of {}", "tokens": "texts of {} tokens", "max_tokens": "documents cut after {} tokens",
    "queries": "{} queries", "documents": "{} documents", "pairs": "{} labelled pairs", "texts": "{} texts",
}  # fmt: skip


def cells(rows: pl.DataFrame, title: str, show: Show | None = None, bold: str = "") -> pl.DataFrame:
    """Return rows as cells of a column; if several rows have one cell, the last is shown.

    Args:
        rows: Rows of one file.
        title: Title of the column; ``{name}`` is the value of a field, so that there may be several columns.
        show: Function from a row to the text of its cell; None: a score with its interval.
        bold: Field whose highest value in the column is bold; empty: none.
    """
    every = rows.to_dicts()
    return rows.with_columns(
        pl.Series("column", [filled(title, row) for row in every], pl.String),
        pl.Series("text", [(show or score)(row) for row in every], pl.String),
        value=pl.col(bold) if bold else pl.lit(None, pl.Float64),
    )


def table(
    columns: Sequence[pl.DataFrame],
    labels: Mapping[str, str],
    split: Sequence[str] = (),
    caption: Sequence[str] = ("precision", "date"),
) -> str:
    """Return a table, or one for each combination of values of ``split``, without empty columns and rows.

    Args:
        columns: Columns of :func:`cells`, from left to right.
        labels: Titles and texts of the columns to the left of the cells; ``{name}`` is the value of a field. Rows with
            the same texts are one line; lines have the order of the file.
        split: Fields that begin the caption.
        caption: Fields whose values in the cells end the caption.
    """
    # Columns may have the same title.
    every = pl.concat([own.with_columns(place=pl.lit(place)) for place, own in enumerate(columns)], how="diagonal")
    titles = list(dict.fromkeys(every.select("place", "column").iter_rows()))
    every = every.sort("at", maintain_order=True)
    of_column, value = [*split, "place", "column"], pl.col("value")
    # The highest of several values of a column.
    best = (value == value.max().over(of_column)) & (value.count().over(of_column) > 1)
    bold = pl.col("text").str.replace(r"^(\S+)", "**$1**")
    every = every.with_columns(text=pl.when(best).then(bold).otherwise(pl.col("text")))
    tables = []
    for part in every.partition_by(split, maintain_order=True) if split else [every]:
        lines: dict[tuple[str, ...], dict[Column, Row]] = {}
        for row in part.to_dicts():
            label = tuple(filled(text, row) for text in labels.values())
            lines.setdefault(label, {})[row["place"], row["column"]] = row
        tables.append(_rendered(lines, titles, list(labels), split, caption))
    return "\n\n".join(filter(None, tables))


def _rendered(
    lines: dict[tuple[str, ...], dict[Column, Row]],
    titles: list[Column],
    heads: list[str],
    split: Sequence[str],
    caption: Sequence[str],
) -> str:
    lines = {label: line for label, line in lines.items() if any(row["text"] for row in line.values())}
    kept = [title for title in titles if any(title in line and line[title]["text"] for line in lines.values())]
    named = [place for place in range(len(heads)) if any(label[place] for label in lines)]
    if not kept:
        return ""
    shown = [[*(heads[place] for place in named), *(title for _, title in kept)]]
    for label, line in lines.items():
        texts = (line[title]["text"] if title in line else "" for title in kept)
        shown.append([*(label[place] for place in named), *texts])
    used = [line[title] for line in lines.values() for title in titles if title in line]
    values = [str(used[0][name]) for name in split if used[0][name] not in ("", None)]
    said = [", ".join([f"**{values[0]}**", *values[1:]])] if values else []
    for name in caption:
        values = list(dict.fromkeys(str(row[name]) for row in used if row[name] not in ("", None)))
        if name == "date" and len(values) > 1:
            values = [f"{min(values)} to {max(values)}"]
        if values:
            said.append(CAPTIONS.get(name, "{}").format(" and ".join(values)))
    return f"{'; '.join(said)}\n\n{markdown(shown)}".strip()


def markdown(lines: list[list[str]]) -> str:
    """Return a table whose first line is the head, with the text of cells escaped."""
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    rows = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def filled(template: str, row: Row) -> str:
    """Fill ``{name}`` with the value of a field; None becomes empty, and no filter "as it is"."""

    def value(match: re.Match[str]) -> str:
        found = row[match[1]]
        if match[1] == "filter":
            return found or "as it is"
        return "" if found is None else f"{found:,}" if isinstance(found, int) else str(found)

    return re.sub(r"\{(\w+)\}", value, template)


def percent(value: float | None) -> str:
    """Return a fraction as tables show it: 73.8, with a true minus."""
    # Adding 0 turns -0.0 into 0.0.
    return "" if value is None else f"{round(100 * value, 1) + 0:.1f}".replace("-", "−")


def fraction(row: Row, value: str, low: str, high: str) -> str:
    """Return a fraction with its interval, if it has one."""
    if None in (row[value], row[low], row[high]):
        return percent(row[value])
    return f"{percent(row[value])} [{percent(row[low])}, {percent(row[high])}]"


def score(row: Row) -> str:
    return fraction(row, "score", "low", "high")


def difference(row: Row, value: str = "difference", low: str = "low", high: str = "high") -> str:
    """Return a paired difference: bold if its interval is above 0, with = if it holds 0."""
    text = fraction(row, value, low, high)
    if None in (row[value], row[low], row[high]):
        return text
    if row[low] > 0:
        return f"**{percent(row[value])}** {text.partition(' ')[2]}"
    return f"{text} =" if row[high] >= 0 else text


def ahead(row: Row) -> str:
    return difference(row, "ahead", "ahead_low", "ahead_high")


def cost(row: Row) -> str:
    """Return a ratio of times or another quantity, with its range."""
    digits = ".2f" if row["unit"] else ",.0f"
    value, low, high = ("" if row[name] is None else f"{row[name]:{digits}}" for name in ("value", "low", "high"))
    range_ = f"{low} to {high}" if low and high else ""
    return f"{value} ({range_})" if value and range_ else value or range_


def removed(row: Row) -> str:
    """Return a figure of removed.csv: a score or difference, or a ratio of times."""
    return fraction(row, "value", "low", "high") if row["unit"] == "points" else cost(row)


def number(name: str, form: str = ",.0f") -> Show:
    """Return a function that shows a field, a number, in a format of Python."""
    return lambda row: "" if row[name] is None else format(row[name], form)
