"""What the benchmarks on a CPU that take one model are given, beside their own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging

from records import RESULTS


def for_one_model(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, model: str) -> argparse.Namespace:
    """Add what they share, read all of it, and let torch have as many threads as asked for.

    Args:
        parser: With a benchmark's own arguments.
        arguments: Of the command; None: of this process.
        model: What ``--model`` is, and what is taken if it is left out.
    """
    parser.add_argument("--model", help=model)
    parser.add_argument("--name", help="what tables call it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    options = parser.parse_args(arguments)
    if options.model and not options.name:
        parser.error("--model needs --name, what tables call it.")
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    return options
