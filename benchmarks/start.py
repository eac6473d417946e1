"""How long the command takes before it has anything to do, what ``import st_reba`` adds, and how large it all is.

    python benchmarks/start.py
    python -m pip wheel --no-deps --wheel-dir dist . && python benchmarks/start.py --wheel dist/*.whl

Each line runs in processes of its own, in turn with the others. Time is the processor's, of all threads, from the
start of Python to its end. With ``--wheel``: how large the package is, what it needs, and what each extra adds to that;
everything must be installed here, as sizes are those of the installed files, each package counted with what it needs in
turn. Rows are added to results/cost.csv, or results/install.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from statistics import median

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from records import Record, append, today
from runs import add_costs, interleaved, options, parser, ratio

#: What a user types that needs no model, and what ends at once because it is wrong.
LINES = (
    "--help", "--version", "recipes", "compare --help", "build --help-all", "push no-such-directory org/name",
    "compare --nonsense",
)  # fmt: skip
#: The installed program, which is known by its name.
COMMAND = str(Path(sys.executable).parent / "st-reba")
IMPORT = "import st_reba after sentence_transformers"
IMPORTS = """
import time
import sentence_transformers
start = time.process_time()
import st_reba
print(time.process_time() - start)
"""
PACKAGE = "st-reba"
#: Of the packages that an import takes, so many are named.
LARGEST = 9
#: What a user may ask for; the others are for those who change the package.
EXTRAS = ("gguf", "report", "mteb", "data", "train", "serve", "ray")


def importing(number: int) -> float:
    """Milliseconds of the processor that the import adds."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    return 1000 * float(done.stdout)


def shares(rounds: int) -> Iterator[Record]:
    """Milliseconds that each package takes of ``import st_reba``, without what it imports of others; and all of it."""
    found: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import st_reba"], capture_output=True, text=True, check=True
        )
        own: dict[str, float] = defaultdict(float)
        for took, name in re.findall(r"^import time: +(\d+) \|[ \d]+\| +([\w.]+)$", done.stderr, re.MULTILINE):
            own[name.partition(".")[0]] += int(took) / 1000
        found.append(own)
    means = {name: [own[name] for own in found[1:]] for name in found[-1]}
    largest = sorted(means, key=lambda name: median(means[name]), reverse=True)[:LARGEST]
    for name in dict.fromkeys([*largest, "st_reba"]):
        yield {
            "quantity": "processor time, ms", "contender": f"of import st_reba: {name}", "unit": "",
            **ratio(means[name], [1] * rounds, 0), "how": f"medians of {rounds} rounds, by -X importtime",
        }  # fmt: skip
    yield {
        "quantity": "processor time, ms", "contender": "of import st_reba: all of it", "unit": "",
        **ratio([sum(own.values()) for own in found[1:]], [1] * rounds, 0),
        "how": f"medians of {rounds} rounds, by -X importtime",
    }  # fmt: skip


def started(line: str, number: int) -> float:
    """Milliseconds of the processor that the command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, COMMAND, *line.split()], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def starts(rounds: int) -> Iterator[Record]:
    """The first round reads files that the disk had not been asked for, and does not count."""
    contenders = {f"st-reba {line}": partial(started, line) for line in LINES} | {IMPORT: importing}
    for name, own in interleaved(contenders, range(rounds + 1)).items():
        yield {
            "quantity": "processor time, ms", "contender": name, "unit": "", **ratio(own[1:], [1] * rounds, 0),
            "how": f"medians of {rounds} interleaved rounds, processes of their own",
        }  # fmt: skip


def needed(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> set[str]:
    """Gather what a package needs, each with the extras that were asked of it.

    Raises:
        PackageNotFoundError: If one of them is not installed.
    """
    name = canonicalize_name(name)
    if name not in found or not extras <= found[name]:
        found.setdefault(name, set()).update(extras)
        for each in map(Requirement, distribution(name).requires or []):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                needed(each.name, frozenset(each.extras), found)
    return set(found)


def megabytes(*names: str) -> float:
    """Of installed files."""
    every = (Path(str(file.locate())) for name in names for file in distribution(name).files or [])
    return round(sum(place.stat().st_size for place in every if place.is_file() and place.suffix != ".pyc") / 1e6, 1)


def sizes(wheel: Path) -> Iterator[Record]:
    base = needed(PACKAGE, frozenset(), {})
    others = base - {PACKAGE, "torch"}
    yield {"part": "the wheel of st_reba", "packages": 1, "megabytes": round(wheel.stat().st_size / 1e6, 1)}
    yield {"part": "PyTorch, for CPUs alone", "packages": 1, "megabytes": megabytes("torch")}
    yield {"part": "what else it needs", "packages": len(others), "megabytes": megabytes(*others)}
    for extra in EXTRAS:
        try:
            added = needed(PACKAGE, frozenset({extra}), {}) - base
        except PackageNotFoundError as missing:
            print(f"{extra}: {missing} is not installed here; left out", file=sys.stderr)
            continue
        yield {"part": f"`st-reba[{extra}]`", "packages": len(added), "megabytes": megabytes(*added)}


def main() -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--wheel", type=Path)
    given = options(made)
    os.environ["COLUMNS"] = "120"
    if not given.wheel:
        add_costs(chain(starts(given.rounds), shares(given.rounds)), given, table="start")
        return
    where = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "system": sys.platform, **today()}
    for row in sizes(given.wheel):
        append("install", [{**row, **where}], given.results)
        print(f"{row['part']}: {row['packages']} packages, {row['megabytes']} MB")


if __name__ == "__main__":
    main()
