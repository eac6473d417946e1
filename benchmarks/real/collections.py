"""The retrieval collections, each in BEIR's layout. They are public, and no part of this repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from st_reba.data.tables import Retrieval, read_retrieval

#: What is chosen is chosen on the first, and reported on the second.
PARTS = ("dev", "test")


@dataclass(frozen=True)
class Collection:
    """Documents, and queries in two parts.

    Attributes:
        name: As tables call it.
        folder: As it lies below ``retrieval``, in the directory of the sets.
        language: ``"en"`` or ``"zh"``.
    """

    name: str
    folder: str
    language: str

    def part(self, data: Path, part: str) -> Retrieval:
        """The queries of one part, among all documents."""
        folder = data / "retrieval" / self.folder
        return read_retrieval(folder / f"queries-{part}.jsonl", folder / "corpus.jsonl", folder / f"qrels-{part}.tsv")


COLLECTIONS = {
    each.name: each
    for each in (
        Collection("Cranfield", "cranfield", "en"),
        Collection("CMRC 2018", "cmrc2018", "zh"),
        Collection("CMRC 2018, sentences", "cmrc2018-sentences", "zh"),
    )
}
