"""Loading of training data as ``datasets.Dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from ..data.columns import CONDITIONAL, PAIRS, SENTENCES, TRIPLETS, Schema, read_table
from ..data.sources import TO_TRAIN
from ..optional import require


def read_triplets(source: str | Path) -> Any:
    """Read (anchor, positive, hard negative), as from NLI: premise, entailment, contradiction.

    Args:
        source: A file, with named columns or with columns in this order; a folder of shards; a remote path; or a
            dataset of ``datasets.load_dataset``: see :func:`st_reba.data.sources.files_of`. The default split is
            ``train``.

    Returns:
        A ``datasets.Dataset`` with the columns anchor, positive and negative.

    Raises:
        ValueError: If a row is malformed, there are no rows, or ``source`` is neither a readable file nor a dataset.
            The message has the file, the line and the expected columns.
        ImportError: If ``datasets`` is not installed.
    """
    return _read(source, TRIPLETS)


def read_scored_pairs(source: str | Path) -> Any:
    """Read pairs of texts with a similarity: columns sentence1, sentence2 and score.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, PAIRS)


def read_conditional_pairs(source: str | Path) -> Any:
    """Read rows of conditional similarity (C-STS): columns sentence1, sentence2, condition and score, 1 to 5.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, CONDITIONAL)


def read_sentences(source: str | Path) -> Any:
    """Read texts: the column sentence. A .txt file has one text per line; other columns of a table are ignored.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, SENTENCES)


def pairs_evaluator(source: str | None, **options: Any) -> EmbeddingSimilarityEvaluator | None:
    """Return an evaluator on the scored pairs of a source, see :func:`read_scored_pairs`; None without a source."""
    if source is None:
        return None
    pairs = read_scored_pairs(source)[:]
    return EmbeddingSimilarityEvaluator(pairs["sentence1"], pairs["sentence2"], pairs["score"], **options)


def dataset(columns: Mapping[str, Any]) -> Any:
    """Return a ``datasets.Dataset`` of columns in memory.

    Raises:
        ImportError: If ``datasets`` is not installed.
    """
    return require("datasets", "train", "Training data").Dataset.from_dict(columns)


def _read(source: str | Path, schema: Schema) -> Any:
    # Training has no --columns option to mention in errors.
    return dataset(read_table(source, [replace(schema, option="")], splits=TO_TRAIN).values)
