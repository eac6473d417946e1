"""Training data: files of rows, or a data set by its name, as ``datasets.Dataset`` with known columns."""

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
        source: A file, with a header that names the columns or else in this order; a folder of shards; a remote path;
            or a data set that ``datasets.load_dataset`` knows: see :func:`st_reba.data.sources.files_of`. The split is
            ``train`` unless it is given.

    Returns:
        A ``datasets.Dataset`` with the columns anchor, positive and negative.

    Raises:
        ValueError: If a row is malformed, naming file, line and what is expected; or there is none; or ``source`` is
            neither a file that can be read nor a data set.
        ImportError: If ``datasets`` is not installed.
    """
    return _read(source, TRIPLETS)


def read_scored_pairs(source: str | Path) -> Any:
    """Read pairs of texts and how similar they are: columns sentence1, sentence2 and score.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, PAIRS)


def read_conditional_pairs(source: str | Path) -> Any:
    """Read rows of conditional similarity (C-STS): columns sentence1, sentence2, condition and score, 1 to 5.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, CONDITIONAL)


def read_sentences(source: str | Path) -> Any:
    """Read texts: the column sentence. A .txt file holds one a line; of other tables further columns are passed over.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, SENTENCES)


def pairs_evaluator(source: str | None, **options: Any) -> EmbeddingSimilarityEvaluator | None:
    """ST's evaluator of cosines on scored pairs: see :func:`read_scored_pairs`; None where there are none."""
    if source is None:
        return None
    pairs = read_scored_pairs(source)[:]
    return EmbeddingSimilarityEvaluator(pairs["sentence1"], pairs["sentence2"], pairs["score"], **options)


def dataset(columns: Mapping[str, Any]) -> Any:
    """A ``datasets.Dataset`` of columns in memory.

    Raises:
        ImportError: If ``datasets`` is not installed.
    """
    return require("datasets", "train", "Training data").Dataset.from_dict(columns)


def _read(source: str | Path, schema: Schema) -> Any:
    # Nothing but its own names says what a column of training data is.
    return dataset(read_table(source, [replace(schema, option="")], splits=TO_TRAIN).values)
