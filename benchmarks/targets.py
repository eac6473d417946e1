"""A table of what speed was asked for, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pivot import Conditions, Store, markdown, show_cost
from records import Record

#: What a figure is measured on: each has a line of its own.
SETTING = ("model", "precision", "machine")


@dataclass(frozen=True)
class Target:
    """A figure of cost.csv, and what it should be.

    Attributes:
        figure: What it is, in words; ``{contender}`` and ``{tokens}`` are those of the row that is shown.
        where: Which rows. Of several in one setting, that which is furthest from the target is shown.
        most: The highest value that is as asked.
        least: The lowest.
        distance: Whether it is the size alone that counts, not the sign.
    """

    figure: str
    where: Conditions
    most: float | None = None
    least: float | None = None
    distance: bool = False

    @property
    def asked(self) -> str:
        if self.most is not None:
            return f"at most {self.most:g}"
        return "" if self.least is None else f"at least {self.least:g}"

    def worst(self, records: Sequence[Record]) -> Record:
        return (min if self.least is not None else max)(records, key=self._value)

    def met(self, record: Record) -> str:
        value = self._value(record)
        if self.most is None and self.least is None:
            return ""
        return (
            "yes" if (self.most is None or value <= self.most) and (self.least is None or value >= self.least) else "no"
        )

    def _value(self, record: Record) -> float:
        value = float(record["value"])  # type: ignore[arg-type]
        return abs(value) if self.distance else value


@dataclass(frozen=True)
class Targets:
    """One line for each target and each setting that it was measured in; none for what was not measured."""

    targets: tuple[Target, ...] = field(default_factory=tuple)

    def render(self, store: Store, page: Path) -> str:
        lines = [["figure", "asked", "seen", "as asked", "measured on"]]
        for target in self.targets:
            by_setting: dict[tuple[object, ...], list[Record]] = {}
            for record in store.select("cost", target.where):
                if record["value"] is not None:
                    by_setting.setdefault(tuple(record[name] for name in SETTING), []).append(record)
            for records in by_setting.values():
                record = target.worst(records)
                shown, _ = show_cost(store, record, True)
                figure = target.figure.format(**{name: f"{value}" for name, value in record.items()})
                measured_on = ", ".join(str(record[name]) for name in SETTING if record[name])
                lines.append([figure, target.asked, shown, target.met(record), measured_on])
        return markdown(lines) if len(lines) > 1 else ""


def measured(table: str, quantity: str, contender: object = None, **more: object) -> Conditions:
    where: dict[str, object] = {"table": table, "quantity": quantity, **more}
    return where if contender is None else {**where, "contender": contender}


def on_an_accelerator(value: object) -> bool:
    return "NVIDIA" in str(value)


def of_the_command(value: object) -> bool:
    return str(value).startswith("st-reba ")


PLAIN = {"unit": "sentence-transformers, mean"}
SPEED = Targets(
    (
        Target("`{contender}`: {quantity}, the slowest of those that run no model",
               measured("start", "processor time, ms", of_the_command), most=1000),
        Target("`{contender}`: {quantity}",
               measured("start", "processor time, ms", "import st_reba after sentence_transformers"), most=300),
        Target("{contender} / plain sentence-transformers, texts of mixed lengths",
               measured("plain", "time", "Classical, mean", **PLAIN), most=0.75),
        *(
            Target("{contender} / plain sentence-transformers, texts of mixed lengths",
                   measured("plain", "time", contender, **PLAIN), most=1.6)
            for contender in ("Echo-2, mean", "ReBA-2, mean", "ReBA-2, last")
        ),
        Target("a pass's matrix products, as a share of its time, n = {tokens}",
               measured("limit", "share of the time"), least=0.7),
        *(
            Target("{contender} / {unit}, n = {tokens}",
                   measured("repetition", "time", contender, machine=on_an_accelerator), most=1.1)
            for contender in ("ReBA-2, last", "ReBA-2, mean")
        ),
        Target("{contender} / plain sentence-transformers, one text of {tokens} tokens: the slowest recipe",
               measured("short", "time", **PLAIN), most=1.5),
        Target("Spearman x 100 in bfloat16, less that in float32: {contender}, which changes most",
               measured("precision", "change of Spearman x 100", precision="bfloat16"), most=0.2, distance=True),
        Target("{contender} / {unit}, n = {tokens}", measured("passes", "time", "RT-8, last", tokens=512), most=1.1),
        Target("{contender} / {unit}, n = {tokens}",
               measured("repetition", "time", "ReBA-2 with all maps stored, mean", tokens=512), least=3),
        *(
            Target("{contender} / {unit}, n = {tokens}", measured("alone", "time", tokens=tokens))
            for tokens in (12, 128)
        ),
        Target("{contender} / {unit}", measured("corpus", "time"), most=1.05),
        *(
            Target("{contender}: {quantity}",
                   measured("corpus", "peak memory of the process, MiB", f"`st-reba encode`, {texts} texts"))
            for texts in ("20,000", "200,000")
        ),
        *(
            Target("{contender}: two at once / one, by the clock", measured("workers", "speed of two", contender),
                   least=1.8)
            for contender in ("bare loop over the model", "`st-reba encode`")
        ),
    )
)  # fmt: skip
