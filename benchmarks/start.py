"""Time that the command takes before it has anything to do, and that ``import st_reba`` adds.

    python benchmarks/start.py

Each line runs in processes of its own, in turn with the others. Time is the processor's, of all threads, from the
start of Python to its end. Rows are added to results/cost.csv.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

from runs import add_costs, interleaved, options, parser, ratio

#: Lines that need no model, and lines that are wrong and end at once.
LINES = (
    "--help", "--version", "recipes", "compare --help", "push no-such-directory org/name", "compare --nonsense",
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


def importing(number: int) -> float:
    """Return the milliseconds of the processor that the import adds."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    return 1000 * float(done.stdout)


def started(line: str, number: int) -> float:
    """Return the milliseconds of the processor that the command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, COMMAND, *line.split()], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--rounds", type=int, default=7)
    given = options(made)
    os.environ["COLUMNS"] = "120"
    contenders = {f"st-reba {line}": partial(started, line) for line in LINES} | {IMPORT: importing}
    how = f"medians of {given.rounds} interleaved rounds, processes of their own"
    about = {"quantity": "processor time, ms", "unit": "", "how": how}
    # The first round reads files that the disk was not asked for yet, and does not count.
    found = interleaved(contenders, range(given.rounds + 1)).items()
    rows = [{**about, "contender": name, **ratio(own[1:], [1] * given.rounds, 0)} for name, own in found]
    add_costs(rows, given, table="start")


if __name__ == "__main__":
    main()
