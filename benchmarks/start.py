"""How long the command takes before it has anything to do, and what ``import st_reba`` adds to a program.

    python benchmarks/start.py

Each line runs in processes of its own, in turn with the others. Time is the processor's, of all threads, from the
start of Python to its end. Rows are added to results/cost.csv; ``make tables`` shows them.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from records import RESULTS, Value, append, machine, versions

#: What a user types that needs no model, and what ends at once because it is wrong.
LINES = ("--help", "--version", "compare --help", "push no-such-directory org/name", "compare --nonsense")

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


def spent(*arguments: str) -> tuple[float, str]:
    """Seconds of the processor that a Python process takes, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    options = parser.parse_args()
    os.environ["COLUMNS"] = "120"
    found: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for line in LINES:
            seconds, _ = spent(COMMAND, *line.split())
            found.setdefault(f"st-reba {line}", []).append(seconds)
        found.setdefault(IMPORT, []).append(float(spent("-c", IMPORTS)[1]))
        if number == 0:
            # The first round reads files that the disk had not been asked for.
            found.clear()
    rows: list[dict[str, Value]] = [
        {
            "table": "start",
            "quantity": "processor time, ms",
            "contender": what,
            "unit": "",
            "value": round(1000 * median(seconds)),
            "low": round(1000 * min(seconds)),
            "high": round(1000 * max(seconds)),
            "how": f"medians of {options.rounds} interleaved rounds, processes of their own",
            "machine": machine("cpu", 1),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%d"),
        }
        for what, seconds in found.items()
    ]
    append("cost", rows, options.results)
    for row in rows:
        print(f"{row['contender']}: {row['value']} ms ({row['low']} to {row['high']})")


if __name__ == "__main__":
    main()
