"""How large the package is, what it needs, and what each extra adds to that.

    python -m pip wheel --no-deps --wheel-dir dist . && python benchmarks/install.py --wheel dist/*.whl

Everything must be installed here: sizes are those of the installed files, each package counted with what it needs in
turn. Rows are added to results/install.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from records import RESULTS, Value, append, versions

PACKAGE = "st-reba"
#: What a user may ask for; the others are for those who change the package.
EXTRAS = ("gguf", "report", "mteb", "data", "train", "serve", "ray")


def needed(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Gather what a package needs, each with the extras that were asked of it.

    Raises:
        PackageNotFoundError: If one of them is not installed.
    """
    name = canonicalize_name(name)
    if name in found and extras <= found[name]:
        return
    found.setdefault(name, set()).update(extras)
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        ):
            needed(requirement.name, frozenset(requirement.extras), found)


def size(name: str) -> int:
    """Bytes of a package's installed files."""
    places = (Path(str(file.locate())) for file in distribution(name).files or [])
    return sum(place.stat().st_size for place in places if place.is_file() and place.suffix != ".pyc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of install.csv")
    options = parser.parse_args()
    base: dict[str, set[str]] = {}
    needed(PACKAGE, frozenset(), base)
    others = base.keys() - {PACKAGE, "torch"}
    found: list[tuple[str, int, int]] = [
        ("the wheel of st_reba", 1, options.wheel.stat().st_size),
        ("PyTorch, for CPUs alone", 1, size("torch")),
        ("what else it needs", len(others), sum(map(size, others))),
    ]
    for extra in EXTRAS:
        more: dict[str, set[str]] = {}
        try:
            needed(PACKAGE, frozenset({extra}), more)
        except PackageNotFoundError as missing:
            print(f"{extra}: {missing} is not installed here; left out", file=sys.stderr)
            continue
        added = more.keys() - base.keys()
        found.append((f"`st-reba[{extra}]`", len(added), sum(map(size, added))))
    where: dict[str, Value] = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}", "system": sys.platform,
        "date": time.strftime("%Y-%m-%d"), "versions": versions(),
    }  # fmt: skip
    rows = [
        {"part": part, "packages": count, "megabytes": round(total / 1e6, 1), **where} for part, count, total in found
    ]
    append("install", rows, options.results)
    for part, count, total in found:
        print(f"{part}: {count} packages, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
