"""A table out of rows of results: which rows it takes, what its lines and columns are, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from records import RESULTS, Record, Value, read

#: Of each field, what it has to be: a value, one of a tuple, what a function says, or :class:`Best`.
Conditions = Mapping[str, object]


@dataclass(frozen=True)
class Best:
    """A field left open: of all rows that fit, the one with the highest score is taken.

    Attributes:
        allowed: Says of a value whether it may be taken.
    """

    allowed: Callable[[Value], bool] = lambda value: True


ANY = Best()
#: A model that is measured for comparison has no table of its own, but a row in others'.
REFERENCES = ("all-MiniLM-L6-v2",)
#: The fields that nearly every question names: files of tens of thousands of rows are not searched whole for each cell.
NARROWING = ("model", "set", "recipe")


class Store:
    """The files of results, each read once."""

    def __init__(self, directory: Path = RESULTS) -> None:
        self.directory = directory
        self._narrowed: dict[tuple[str, ...], list[Record]] = {}

    def select(self, file: str, conditions: Conditions) -> list[Record]:
        """The rows of a file that fit, in its order.

        Raises:
            RecordsError: If the file is missing or cannot be read.
        """
        given = (conditions.get(name) for name in NARROWING)
        records = self._narrow(file, *(value if isinstance(value, str) else "" for value in given))
        return [record for record in records if fits(record, conditions)]

    def _narrow(self, file: str, *values: str) -> list[Record]:
        """The rows that have these values of the first of :data:`NARROWING`; an empty one stands for all."""
        key = (file, *values)
        if key not in self._narrowed:
            if values:
                name, value = NARROWING[len(values) - 1], values[-1]
                found = [
                    record for record in self._narrow(file, *values[:-1]) if not value or record.get(name) == value
                ]
            else:
                found = read(file, self.directory)
            self._narrowed[key] = found
        return self._narrowed[key]

    def find(self, file: str, conditions: Conditions, chosen: str = "") -> Record | None:
        """The one row that fits, or the best of those that do; None if there is none.

        Args:
            chosen: The set to choose on; the set itself if empty.
        """
        free = [name for name, condition in conditions.items() if isinstance(condition, Best)]
        if not free:
            return next(reversed(self.select(file, conditions)), None)
        asked = dict(conditions)
        if chosen:
            asked["set"] = chosen
        scored = [record for record in self.select(file, asked) if record["score"] is not None]
        if not scored:
            return None
        best = max(scored, key=lambda record: record["score"])  # type: ignore[arg-type,return-value]
        return self.find(file, {**conditions, **{name: best[name] for name in free}})

    def precision(self, file: str, conditions: Conditions) -> str:
        """The precision that most of the rows that fit are in; float32 where as many are in another.

        A table shows one for all rows of a model, so that none is ahead by its rounding.
        """
        found = Counter(str(record["precision"]) for record in self.select(file, conditions))
        return max(sorted(found, reverse=True), key=lambda name: found[name], default="")


def fits(record: Record, conditions: Conditions) -> bool:
    for name, condition in conditions.items():
        value = record[name]
        if isinstance(condition, Best):
            good = condition.allowed(value)
        elif callable(condition):
            good = condition(value)
        elif isinstance(condition, tuple):
            good = value in condition
        else:
            good = value == condition
        if not good:
            return False
    return True


def percent(value: Value) -> str:
    """A fraction as tables show it: 73.8, with a true minus."""
    # Adding 0 makes -0.0 what it is.
    return "" if value is None else f"{round(100 * float(value), 1) + 0:.1f}".replace("-", "−")


def interval(low: Value, high: Value) -> str:
    return f" [{percent(low)}, {percent(high)}]" if low is not None and high is not None else ""


def described(record: Record, names: Iterable[str]) -> str:
    """What a row is in these fields: ``Echo-2, mean, layer 12, whitened``."""
    parts = []
    for name in names:
        value = record[name]
        parts.append(f"layer {value}" if name == "layer" and value is not None else str(value or ""))
    return ", ".join(filter(None, parts))


class Cell(NamedTuple):
    text: str
    record: Record | None
    value: float | None


@dataclass(frozen=True)
class Column:
    """A column, named by hand.

    Attributes:
        title: Its head.
        where: What its cells have in common.
        show: A key of :data:`SHOWS`.
        chosen: The set that what is :class:`Best` is chosen on; that of the cell if empty.
        interval: Whether cells show theirs.
        bold: Whether the highest stands out.
    """

    title: str
    where: Conditions = field(default_factory=dict)
    show: str = "score"
    chosen: str = ""
    interval: bool = True
    bold: bool = True


@dataclass(frozen=True)
class Row:
    """A row, named by hand; ``{choice}`` in its title is what was :class:`Best`."""

    title: str
    where: Conditions
    chosen: str = ""


@dataclass(frozen=True)
class Each:
    """A row, or a column, for each combination of values that the file has.

    Attributes:
        fields: Whose combinations.
        titles: For rows, the heads and texts of the label's columns; for columns, one text, whose head is not used.
            ``{name}`` is the value of a field. The field's own name and value if None.
        where: Restricts the rows of the file that are looked at.
        sort: Whether by value; by first appearance if not.
    """

    fields: tuple[str, ...]
    titles: tuple[tuple[str, str], ...] | None = None
    where: Conditions = field(default_factory=dict)
    sort: bool = False

    def heads(self) -> tuple[tuple[str, str], ...]:
        return self.titles or tuple((name, f"{{{name}}}") for name in self.fields)

    def combinations(self, records: Iterable[Record]) -> list[Record]:
        found = dict.fromkeys(
            tuple(record[name] for name in self.fields) for record in records if fits(record, self.where)
        )
        keys = sorted(found, key=lambda key: [(part is not None, part or 0) for part in key]) if self.sort else found
        return [dict(zip(self.fields, key, strict=True)) for key in keys]

    def texts(self, combination: Record) -> list[str]:
        values = {name: self._named(name, value) for name, value in combination.items()}
        return [text.format(**values) for _, text in self.heads()]

    @staticmethod
    def _named(name: str, value: Value) -> str:
        if name == "filter":
            return str(value or "as it is")
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


class Line(NamedTuple):
    """A row of a table that is being made."""

    labels: list[str]
    where: Conditions
    chosen: str = ""
    reference: bool = False


@dataclass(frozen=True)
class Table:
    """Rows by columns of one file, and, with ``split``, one such table for each value.

    Attributes:
        file: A key of ``records.COLUMNS``.
        where: What all cells have in common.
        rows: By hand or from the file.
        columns: Likewise.
        split: The fields of which each combination has a table of its own.
        caption: The fields that are said of each table.
        label: The head of the rows' names, where they are given by hand.
        references: Whether the models of :data:`REFERENCES` get a row each.
        whole: Whether a table is left out where a column has nothing.
    """

    file: str
    rows: Each | tuple[Row, ...]
    columns: Each | tuple[Column, ...]
    where: Conditions = field(default_factory=dict)
    split: tuple[str, ...] = ()
    caption: tuple[str, ...] = ("precision", "date")
    label: str = "recipe"
    references: bool = False
    whole: bool = False

    def render(self, store: Store, page: Path) -> str:
        matching = [
            record for record in store.select(self.file, self.where) if not self.split or not self._is_reference(record)
        ]
        tables = [
            self._render_one(store, part, [record for record in matching if fits(record, part)])
            for part in Each(self.split).combinations(matching)
        ]
        return "\n\n".join(filter(None, tables))

    def _render_one(self, store: Store, part: Record, records: list[Record]) -> str:
        common = {**self.where, **part}
        precision = cache(lambda model: store.precision(self.file, {**self.where, "model": model}))
        columns = self._columns(records)
        cells: list[tuple[Line, list[Cell]]] = []
        for line in [*self._lines(records), *self._reference_lines(store)]:
            row = [
                self._cell(store, {**common, **line.where, **column.where}, column, line, precision)
                for column in columns
            ]
            if any(cell.text for cell in row):
                cells.append((line, row))
        kept = [index for index in range(len(columns)) if any(row[index].text for _, row in cells)]
        if not kept or (self.whole and len(kept) < len(columns)):
            return ""
        self._mark_best(columns, cells)
        heads = [head for head, _ in self.rows.heads()] if isinstance(self.rows, Each) else [self.label]
        labels = [self._labels(line, row) for line, row in cells]
        named = [index for index in range(len(heads)) if any(label[index] for label in labels)]
        lines = [[heads[index] for index in named] + [columns[index].title for index in kept]]
        lines += [
            [label[index] for index in named] + [row[index].text for index in kept]
            for label, (_, row) in zip(labels, cells, strict=True)
        ]
        used = [cell.record for _, row in cells for cell in row if cell.record is not None]
        return f"{self._caption(part, used)}\n\n{markdown(lines)}".strip()

    def _columns(self, records: list[Record]) -> tuple[Column, ...]:
        if isinstance(self.columns, tuple):
            return self.columns
        show = SHOW_OF[self.file]
        return tuple(
            Column(self.columns.texts(values)[0], values, show, bold=False)
            for values in self.columns.combinations(records)
        )

    def _lines(self, records: list[Record]) -> list[Line]:
        if isinstance(self.rows, Each):
            return [Line(self.rows.texts(values), values) for values in self.rows.combinations(records)]
        return [Line([row.title], row.where, row.chosen) for row in self.rows]

    def _reference_lines(self, store: Store) -> list[Line]:
        if not self.references:
            return []
        blank = [""] * (len(self.rows.heads()) - 1 if isinstance(self.rows, Each) else 0)
        return [Line([f"{model}, for reference", *blank], {"model": model}, reference=True) for model in REFERENCES]

    def _cell(
        self, store: Store, conditions: Conditions, column: Column, line: Line, precision: Callable[[object], str]
    ) -> Cell:
        if "precision" not in conditions and self.file in ("scores", "claims"):
            conditions = {**conditions, "precision": precision(conditions["model"])}
        record = store.find(self.file, conditions, column.chosen or line.chosen)
        if record is None:
            return Cell("", None, None)
        text, value = SHOWS[column.show](store, record, column.interval)
        free = [name for name in ("recipe", "pooling", "layer", "filter") if isinstance(column.where.get(name), Best)]
        if text and free:
            text += f" ({described(record, free) or 'own end'})"
        return Cell(text, record, value)

    def _labels(self, line: Line, row: list[Cell]) -> list[str]:
        record = next((cell.record for cell in row if cell.record is not None), None)
        free = [name for name, condition in line.where.items() if isinstance(condition, Best)]
        choice = "" if record is None else described(record, free) or "own end"
        return [label.replace("{choice}", choice) for label in line.labels]

    @staticmethod
    def _mark_best(columns: Sequence[Column], cells: list[tuple[Line, list[Cell]]]) -> None:
        own = [row for line, row in cells if not line.reference and not any(map(Table._is_reference, records_of(row)))]
        for index, column in enumerate(columns):
            values = [row[index].value for row in own]
            best = max((value for value in values if value is not None), default=None)
            if not column.bold or best is None or sum(value is not None for value in values) < 2:
                continue
            for row in own:
                if row[index].value == best:
                    figure, _, rest = row[index].text.partition(" ")
                    row[index] = row[index]._replace(text=f"**{figure}** {rest}".strip())

    @staticmethod
    def _is_reference(record: Record) -> bool:
        return record.get("model") in REFERENCES

    def _caption(self, part: Record, used: list[Record]) -> str:
        values = [str(value) for value in part.values() if value]
        said = [", ".join([f"**{values[0]}**", *values[1:]])] if values else []
        for name in self.caption:
            values = list(dict.fromkeys(str(record[name]) for record in used if record[name] not in ("", None)))
            if name == "date" and len(values) > 1:
                values = [f"{min(values)} to {max(values)}"]
            if values:
                said.append(CAPTIONS.get(name, "{}").format(" and ".join(values)))
        return "; ".join(said)


CAPTIONS = {
    "batch": "batches of {}", "tokens": "texts of {} tokens", "max_tokens": "documents cut after {} tokens",
    "queries": "{} queries", "documents": "{} documents", "pairs": "{} labelled pairs", "texts": "{} texts",
}  # fmt: skip


def records_of(row: Iterable[Cell]) -> list[Record]:
    return [cell.record for cell in row if cell.record is not None]


def markdown(lines: list[list[str]]) -> str:
    """A table whose first line is the head; what stands in a cell stays in it."""
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    rows = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


Shown = tuple[str, float | None]


def show_fraction(value: str, low: str, high: str, store: Store, record: Record, with_interval: bool) -> Shown:
    if record[value] is None:
        return "", None
    after = interval(record[low], record[high]) if with_interval else ""
    return percent(record[value]) + after, float(record[value])  # type: ignore[arg-type]


def show_difference(value: str, low: str, high: str, store: Store, record: Record, with_interval: bool) -> Shown:
    """A paired difference: bold where the first is ahead, with = where its interval holds 0."""
    text, found = show_fraction(value, low, high, store, record, with_interval)
    least, most = record[low], record[high]
    if not isinstance(least, float) or not isinstance(most, float):
        return text, found
    figure, _, rest = text.partition(" ")
    if least > 0:
        return f"**{figure}** {rest}".strip(), found
    return (f"{text} =" if most >= 0 else text), found


def show_cost(store: Store, record: Record, with_interval: bool) -> Shown:
    """Time of a row, as a ratio, or another quantity; with the range of what was seen."""
    digits = ".2f" if record["unit"] else ",.0f"
    value, low, high = (
        None if record[name] is None else f"{record[name]:{digits}}" for name in ("value", "low", "high")
    )
    range_ = f"{low} to {high}" if low and high else ""
    if value is None:
        return range_, None
    return value + (f" ({range_})" if range_ else ""), None


def show_points(store: Store, record: Record, with_interval: bool) -> Shown:
    """A score, or a difference of scores, times 100 already."""
    value, low, high = (
        None if record[name] is None else f"{round(float(record[name]), 2) + 0:.2f}".replace("-", "−")  # type: ignore[arg-type]
        for name in ("value", "low", "high")
    )
    if value is None:
        return "", None
    return value + (f" [{low}, {high}]" if low and high else ""), None


def show_field(name: str, store: Store, record: Record, with_interval: bool) -> Shown:
    return str(record[name] or ""), None


def show_number(name: str, store: Store, record: Record, with_interval: bool) -> Shown:
    value = record[name]
    return ("", None) if value is None else (f"{value:,.0f}", float(value))


SHOWS: dict[str, Callable[[Store, Record, bool], Shown]] = {
    "score": partial(show_fraction, "score", "low", "high"),
    "beyond overlap": partial(show_fraction, "beyond_overlap", "beyond_low", "beyond_high"),
    "difference": partial(show_difference, "difference", "low", "high"),
    "ahead": partial(show_difference, "ahead", "ahead_low", "ahead_high"),
    "median": partial(show_fraction, "median", "low", "high"),
    "cost": show_cost,
    "points": show_points,
    "distance": lambda store, record, _: (f"{record['distance']:.1e}", None),
    "value": lambda store, record, _: (f"{record['value']:,.4g}", None),
    "date": partial(show_field, "date"),
    "seconds": partial(show_number, "seconds"),
    "seeds": partial(show_number, "seeds"),
    "ahead_seeds": partial(show_number, "ahead_seeds"),
    "speed": partial(show_number, "speed"),
    "size": partial(show_number, "size"),
    "share": partial(show_fraction, "share", "share_low", "share_high"),
    "agreement": lambda store, record, _: show_fraction("agreement", "low", "high", store, record, False),
    "neighbours": lambda store, record, _: show_fraction("neighbours", "low", "high", store, record, False),
    "dimensions": partial(show_number, "dimensions"),
    "packages": partial(show_number, "packages"),
    "megabytes": lambda store, record, _: (f"{record['megabytes']:,.1f}", None),
}
#: What the cells of a file show where columns come from it.
SHOW_OF = {"scores": "score", "claims": "difference", "cost": "cost", "batches": "distance", "serving": "value"}
