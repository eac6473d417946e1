"""What ``compare``, ``search`` and ``layers`` are given to measure on: their options for data, and reading it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from .checks import check_source
from .common import Language, LanguageOption


class Demo(StrEnum):
    pairs = "pairs"
    retrieval = "retrieval"


DataOption = Annotated[
    str | None,
    typer.Option(
        help="Pairs with scores, triplets, or plain texts (proxies only): a .tsv, .csv, .jsonl or .parquet, a folder "
        "of shards, a remote path (s3://, hf://, https://), a data set of the Hub, or a folder in BEIR's layout. "
        "Default: demo texts."
    ),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        help='What columns are called, if not as usual: "question1,question2,same" in order, or '
        '"score=same,sentence1=question1,sentence2=question2"; without a header, places from 1.',
        show_default=False,
    ),
]
QueriesOption = Annotated[
    str | None, typer.Option(help="Retrieval, in place of --data: a table of _id and text.", show_default=False)
]
CorpusOption = Annotated[
    str | None, typer.Option(help="Its documents: a table of _id, text and, if any, title.", show_default=False)
]
QrelsOption = Annotated[
    str | None, typer.Option(help="Its judgements: a table of query-id, corpus-id and score.", show_default=False)
]
DemoOption = Annotated[
    Demo | None, typer.Option(help="Which of the demo texts: pairs (the default) or retrieval.", show_default=False)
]
QueryPromptOption = Annotated[
    str | None, typer.Option(help="Retrieval: what stands before a query when it is embedded.", show_default=False)
]
DocumentPromptOption = Annotated[
    str | None, typer.Option(help="Retrieval: what stands before a document.", show_default=False)
]


def prompts_of(query: str | None, document: str | None) -> dict[str, str]:
    """As sentence-transformers calls them: those of ``encode_query`` and ``encode_document``."""
    return {name: prompt for name, prompt in (("query", query), ("document", document)) if prompt}


@dataclass(frozen=True)
class Given:
    """What is measured on, as these options say it: a command that takes a ``Given`` has each field as an option."""

    data: DataOption = None
    columns: ColumnsOption = None
    queries: QueriesOption = None
    corpus: CorpusOption = None
    qrels: QrelsOption = None
    query_prompt: QueryPromptOption = None
    document_prompt: DocumentPromptOption = None
    demo: DemoOption = None
    language: LanguageOption = None

    @property
    def own(self) -> bool:
        """Whether it is no demo text."""
        return any(value is not None for value in (self.data, self.queries, self.corpus, self.qrels))

    @property
    def demo_language(self) -> Language:
        """Of the demo texts."""
        return self.language or Language.en

    def check(self) -> None:
        """See that the options go together, and that what they name on this machine is there.

        Raises:
            ValueError: If they do not go together.
            FileNotFoundError: If something is not there.
        """
        parts = (self.queries, self.corpus, self.qrels)
        named = [part for part in parts if part is not None]
        if named and (self.data is not None or len(named) < len(parts)):
            raise ValueError("Retrieval takes --queries, --corpus and --qrels, all three, in place of --data.")
        if self.own and (self.language or self.demo):
            raise ValueError("--language and --demo choose among the demo texts: leave them out with data of your own.")
        if self.columns is not None and self.data is None:
            raise ValueError("--columns is for --data: it says what that table's columns are called.")
        for source in (self.data, *parts):
            check_source(source)
