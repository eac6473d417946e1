"""A table of how much depends on the words of a prompt: how the scores of many wordings are spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles

from pivot import Conditions, Store, markdown
from records import Record, Value


@dataclass(frozen=True)
class Spread:
    """Two lines for each setting, of similarity and of classification: quartiles over its wordings, and some by name.

    A wording's score is the mean over the tasks of its line.

    Attributes:
        chosen: The wording that was chosen in each language.
        compared: The wording that it is compared with in each language.
        where: Which rows of the file.
        file: A key of ``records.COLUMNS``.
        by: Its column that has the wordings.
        setting: Its columns of which each combination has lines of its own: model and language first.
        title: The head of what is compared.
    """

    chosen: Mapping[str, str]
    compared: Mapping[str, str]
    where: Conditions = field(default_factory=dict)
    file: str = "wordings"
    by: str = "ending"
    setting: tuple[str, ...] = ("model", "language", "copies", "stage")
    title: str = "PromptEOL's"

    def render(self, store: Store, page: Path) -> str:
        """Markdown; empty where nothing was measured."""
        settings: dict[tuple[Value, ...], list[Record]] = defaultdict(list)
        for record in store.select(self.file, self.where):
            kind = "similarity" if str(record["task"]).startswith("STS-B") else "classification"
            settings[(*(record[name] for name in self.setting), kind)].append(record)
        if not settings:
            return ""
        head = [
            *self.setting[:3], "wordings", "tasks (texts)", "lowest", "quartiles", "best", "chosen", self.title,
            "the best is",
        ]  # fmt: skip
        return markdown([head, *(self._line(setting, records) for setting, records in settings.items())])

    def _line(self, setting: tuple[Value, ...], records: Sequence[Record]) -> list[str]:
        scores: dict[str, list[float]] = defaultdict(list)
        for record in records:
            scores[str(record[self.by])].append(float(record["score"]))  # type: ignore[arg-type]
        means = {ending: fmean(own) for ending, own in scores.items()}
        best = max(means, key=means.__getitem__)
        language = str(setting[1])
        named = [means.get(each[language]) for each in (self.chosen, self.compared)]
        return [
            *map(str, setting[: min(3, len(self.setting))]),
            str(len(means)),
            ", ".join(dict.fromkeys(f"{record['task']} ({record['texts']})" for record in records)),
            _shown(min(means.values())),
            " / ".join(map(_shown, quantiles(means.values(), n=4))),
            _shown(means[best]),
            *map(_shown, named),
            f"`{best}`",
        ]


def _shown(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.1f}"
