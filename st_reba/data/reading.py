"""Tables of all kinds to columns of values: one way from files to rows, whatever they are and wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from .columns import PAIRS, TEXTS, TRIPLETS, Schema, known, lacking, match_asked
from .records import parquet_file, rows
from .sources import FORMATS, File


@dataclass
class Table:
    """A table that was read.

    Attributes:
        name: What the user calls it.
        schema: What its rows are.
        titles: By the columns' names, what its header calls them; empty without a header.
        unread: What else its header has.
        values: By the columns' names.
        places: Where each row stands: the file's number, and the line, or the row of Parquet.
        files: What was read.
    """

    name: str
    schema: Schema
    titles: dict[str, str]
    unread: list[str]
    files: list[File]
    values: dict[str, list[Any]] = field(default_factory=dict)
    places: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        """Where a row stands, for messages."""
        number, line = self.places[row]
        return place(self.files[number], line)

    @property
    def in_words(self) -> str:
        """Which columns were read, and which were not."""
        names = [name if title == name else f"{title} as {name}" for name, title in self.titles.items()] or [
            f"{', '.join(column.name for column in self.schema.needed)}, in this order: there is no header"
        ]
        left = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"columns: {', '.join(names)}{left}"


def place(file: File, line: int) -> str:
    """Where something stands in a file, for messages."""
    return f"{file.name}, {'row' if file.kind == 'parquet' else 'line'} {line}"


def read_table(name: str, files: Sequence[File], schemas: Sequence[Schema], columns: str | None = None) -> Table:
    """Read files that are shards of one table.

    Args:
        name: What the user calls it.
        files: In order. Each may have a header of its own.
        schemas: What the rows may be: the first that the columns fit is taken.
        columns: What the columns are called, as :meth:`Schema.asked` takes it; None: by their usual names.

    Raises:
        ValueError: If a row is malformed, naming file and line; or there is none; or no schema fits.
    """
    asked = {} if columns is None else match_asked(schemas, columns)
    among = [schema for schema in schemas if columns is None or schema.name in asked]
    table: Table | None = None
    for number, file in enumerate(files):
        part = _Part(file, among, asked)
        if part.schema is None:
            continue
        if table is None:
            table = Table(name, part.schema, part.titles, part.unread, list(files))
            table.values = {column.name: [] for column in part.schema.columns}
            # The other files are of the same kind.
            among = [part.schema]
        for line, values in part.rows(part.schema):
            table.places.append((number, line))
            for column, value in values.items():
                table.values[column].append(value)
    if table is None or not table.places:
        raise ValueError(f"{name} holds no rows. {among[0].expected}")
    return table


class _Part:
    """One file of a table.

    Attributes:
        schema: What its rows are; None if it has none.
        titles: What its header calls the columns; empty without a header.
        unread: What else the header has.
    """

    def __init__(self, file: File, schemas: Sequence[Schema], asked: Mapping[str, dict[str, str]]) -> None:
        if not file.kind:
            raise ValueError(f"{file.name}: of no known format. Give {FORMATS}.")
        self.file = file
        self.titles: dict[str, str] = {}
        self.unread: list[str] = []
        self.schema: Schema | None = None
        self._asked = asked
        self._places: dict[str, int] = {}
        self._count = 0
        # The line of the first row, where there is no header.
        self._first = 0
        if file.kind == "parquet":
            names = parquet_file(file).schema_arrow.names
            self.schema, self.titles = self._named(1, names, schemas)
            self.unread = [title for title in names if title not in self.titles.values()]
            # Others may be large: vectors, images.
            self._rows = rows(file, list(self.titles.values()))
            return
        self._rows = rows(file)
        if file.kind == "txt":
            # Every line is one, also an empty one, which a table has none of.
            self._rows = ((line, text) for line, text in self._rows if text.strip())
        first = next(self._rows, None)
        if first is None:
            return
        line, content = first
        if isinstance(content, dict):
            self.schema, self.titles = self._named(line, list(content), schemas)
            self.unread = [title for title in content if title not in self.titles.values()]
            self._rows = chain([first], self._rows)
            return
        cells = [content] if file.kind == "txt" else content
        found = None if file.kind == "txt" else self._header(line, cells, schemas)
        if found is not None:
            self.schema, self.titles = found
            self.unread = [title for title in cells if title not in self.titles.values()]
            self._places = {name: cells.index(title) for name, title in self.titles.items()}
            self._count = len(cells)
            return
        self._rows = chain([first], self._rows)
        self._first = line
        self.schema, self._places = self._without_header(line, cells, schemas)
        self._count = len(cells) if self._asked else len(self.schema.needed)

    def rows(self, schema: Schema) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line and values of each row, by the columns' names."""
        for line, content in self._rows:
            cells = self._cells(line, content, schema)
            values = {}
            for column in schema.columns:
                try:
                    values[column.name] = column.read(cells.get(column.name))
                except ValueError as error:
                    hint = " If this line names the columns, say with --columns which is what."
                    raise ValueError(
                        f"{place(self.file, line)}: {column.name}: {error}. {schema.expected}"
                        f"{hint if line == self._first else ''}"
                    ) from None
            yield line, values

    def _cells(self, line: int, content: Any, schema: Schema) -> dict[str, Any]:
        """The cells of a row by the columns' names."""
        if isinstance(content, dict):
            titles = self.titles
            if not self._asked and any(title not in content for title in titles.values()):
                # Lines of JSON may differ in what they call things.
                found = {column.name: column.find(content) for column in schema.columns}
                titles = {name: title for name, title in found.items() if title is not None}
            return {name: content[title] for name, title in titles.items() if title in content}
        cells = [content] if isinstance(content, str) else content
        if len(cells) != self._count:
            more = "" if self.titles else " Other columns need a header that names these, or --columns."
            raise ValueError(
                f"{place(self.file, line)}: {len(cells)} columns where {self._count} are expected. "
                f"{schema.expected}{more}"
            )
        return {name: cells[index] for name, index in self._places.items()}

    def _named(self, line: int, header: list[str], schemas: Sequence[Schema]) -> tuple[Schema, dict[str, str]]:
        """What rows are whose cells have names."""
        if self._asked:
            for schema in schemas:
                if set(self._asked[schema.name].values()) <= set(header):
                    return schema, self._asked[schema.name]
            raise lacking(place(self.file, line), header, schemas, self._asked[schemas[0].name])
        for schema in schemas:
            if (found := schema.find(header)) is not None:
                return schema, found
        raise lacking(place(self.file, line), header, schemas)

    def _header(self, line: int, cells: list[str], schemas: Sequence[Schema]) -> tuple[Schema, dict[str, str]] | None:
        """What a first line names; None if it is a row."""
        if self._asked:
            titles = next(iter(self._asked.values()))
            if all(title.isdecimal() and title not in cells for title in titles.values()):
                return None
            stripped = [cell.strip() for cell in cells]
            schema, titles = self._named(line, stripped, schemas)
            return schema, {name: cells[stripped.index(title)] for name, title in titles.items()}
        for schema in schemas:
            if (found := schema.find(cells)) is not None:
                return schema, found
        if len(known(cells, schemas)) > 1:
            raise lacking(place(self.file, line), cells, schemas)
        return None

    def _without_header(self, line: int, cells: list[str], schemas: Sequence[Schema]) -> tuple[Schema, dict[str, int]]:
        if self._asked:
            schema = schemas[0]
            places = {name: int(title) - 1 for name, title in self._asked[schema.name].items()}
            if not all(0 <= index < len(cells) for index in places.values()):
                raise ValueError(f"{place(self.file, line)}: {len(cells)} columns, but --columns asks for others.")
            return schema, places
        fitting = [schema for schema in schemas if len(schema.needed) == len(cells)]
        if not fitting and len(schemas) > 1:
            ways = "; ".join(f"{', '.join(column.name for column in each.needed)} ({each.name})" for each in schemas)
            raise ValueError(
                f"{place(self.file, line)}: {len(cells)} columns, and no header that names them. Rows are {ways}. Say "
                "with --columns which is what."
            )
        schema = fitting[0] if fitting else schemas[0]
        return schema, {column.name: index for index, column in enumerate(schema.needed)}


#: What rows may be that recipes are measured on.
MEASURED = (PAIRS, TRIPLETS, TEXTS)


def sniffed(file: File) -> File:
    """A file whose name does not tell what it is, by its first line that is not empty.

    Raises:
        ValueError: If that line names columns with commas between, which ``.csv`` would tell.
    """
    if file.kind not in ("", "txt"):
        return file
    plain = replace(file, kind="txt")
    line, first = next(((line, text) for line, text in rows(plain) if text.strip()), (1, ""))
    if len(named := known(first.split(","), MEASURED)) > 1:
        raise ValueError(
            f"{place(file, line)}: names columns ({', '.join(named)}) with commas between. Is it CSV? Then end the "
            "file's name in .csv."
        )
    if "\t" in first:
        return replace(file, kind="tsv")
    if not file.kind and first.lstrip().startswith("{"):
        return replace(file, kind="jsonl")
    return plain
