"""docs/private-names.md is complete, and what it says is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "private-names.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
PACKAGES = ("st_reba", "st_reba_cli")
SOURCES = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")}

#: A private name asked of anything but oneself, or written as a string, as for getattr.
FOREIGN = re.compile(r"(?:(?<!self)(?<!cls)(?<!super\(\))\.|(?<=\"))(_[a-z]\w*)\b(?<!_)")
#: Documented, in spite of its underscore: of named tuples, and of os; what documents of a data set are known by; how
#: the names of a configuration's parts end.
PUBLIC = {"_replace", "_exit", "_id", "_config"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_row(row):
    name, _, where, _, guards = row
    path = where.strip(" `")
    assert re.findall(r"`(?:\w+\.)*(\w+)`", name)[0] in SOURCES[ROOT / path]
    for guard in guards.split(","):
        file, test = guard.strip(" `").split("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


def test_none_is_missing():
    own = set(re.findall(r"(?:self\.|cls\.|def )(_[a-z]\w*)", "\n".join(SOURCES.values())))
    used = {name for source in SOURCES.values() for name in FOREIGN.findall(source)}
    documented = {name for row in ROWS for name in re.findall(r"\b_[a-z]\w*", row[0])}
    assert used & documented
    assert not used - own - PUBLIC - documented
