"""A table of how much depends on the words of a prompt: how the scores of many wordings are spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles

from pivot import Conditions, Store, markdown
from records import Record, Value

#: What has a line of its own.
SETTING = ("model", "language", "copies", "stage")


@dataclass(frozen=True)
class Spread:
    """Two lines for each setting, of similarity and of classification: quartiles over its wordings, and some by name.

    A wording's score is the mean over the tasks of its line.

    Attributes:
        where: Which rows of wordings.csv.
        chosen: The wording that was chosen in each language.
        compared: The wording that it is compared with in each language.
    """

    chosen: Mapping[str, str]
    compared: Mapping[str, str]
    where: Conditions = field(default_factory=dict)

    def render(self, store: Store, page: Path) -> str:
        """Markdown; empty where nothing was measured."""
        settings: dict[tuple[Value, ...], list[Record]] = defaultdict(list)
        for record in store.select("wordings", self.where):
            kind = "similarity" if str(record["task"]).startswith("STS-B") else "classification"
            settings[(*(record[name] for name in SETTING), kind)].append(record)
        if not settings:
            return ""
        head = [
            "model", "language", "copies", "wordings", "tasks (texts)", "lowest", "quartiles", "best", "chosen",
            "PromptEOL's", "the best is",
        ]  # fmt: skip
        return markdown([head, *(self._line(setting, records) for setting, records in settings.items())])

    def _line(self, setting: tuple[Value, ...], records: Sequence[Record]) -> list[str]:
        scores: dict[str, list[float]] = defaultdict(list)
        for record in records:
            scores[str(record["ending"])].append(float(record["score"]))  # type: ignore[arg-type]
        means = {ending: fmean(own) for ending, own in scores.items()}
        best = max(means, key=means.__getitem__)
        language = str(setting[1])
        named = [means.get(each[language]) for each in (self.chosen, self.compared)]
        return [
            *map(str, setting[:3]),
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
