"""What ``compare``, ``search`` and ``layers`` are given to measure on: their options for data, and reading it."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from ..data.columns import match_asked
from ..data.demo import demo_pairs, demo_retrieval
from ..data.reading import MEASURED
from ..data.tables import Data, Labelled, Retrieval, read_data, read_retrieval
from .common import Language, notes


class Demo(str, Enum):
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


def check_given(
    data: str | None,
    *,
    columns: str | None,
    queries: str | None,
    corpus: str | None,
    qrels: str | None,
    demo: Demo | None,
    language: Language | None,
) -> None:
    """See that the options for data go together.

    Raises:
        ValueError: If they do not.
    """
    parts = {"--queries": queries, "--corpus": corpus, "--qrels": qrels}
    named = [name for name, value in parts.items() if value is not None]
    if named and (data is not None or len(named) < len(parts)):
        raise ValueError("Retrieval takes --queries, --corpus and --qrels, all three, in place of --data.")
    own = data is not None or named
    if own and (language or demo):
        raise ValueError("--language and --demo choose among the demo texts: leave them out with data of your own.")
    if columns is not None:
        if data is None:
            raise ValueError("--columns is for --data: it says what that table's columns are called.")
        match_asked(MEASURED, columns)


def given(
    data: str | None = None,
    *,
    columns: str | None = None,
    queries: str | None = None,
    corpus: str | None = None,
    qrels: str | None = None,
    demo: Demo | None = None,
    language: Language | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
) -> tuple[Data, str]:
    """What is to be measured on, and what it is called; tells in a line what was read.

    Raises:
        ValueError: If a row cannot be read, or there are prompts for what has no queries.
        OSError: If something is not there.
    """
    prompts = prompts_of(query_prompt, document_prompt)

    def tell(line: str) -> None:
        notes.print(line, soft_wrap=True)

    if queries is not None and corpus is not None and qrels is not None:
        found: Data = read_retrieval(queries, corpus, qrels, tell=tell)
    elif data is not None:
        found = read_data(data, columns, tell)
    else:
        of_the_demo = language or Language.en
        found = read_data((demo_retrieval if demo is Demo.retrieval else demo_pairs)(of_the_demo.value))
    if prompts:
        if not isinstance(found, Retrieval):
            raise ValueError("--query-prompt and --document-prompt are for retrieval: nothing else here has queries.")
        found = replace(found, prompts=prompts)
    return found, described(found, data, queries, language)


def described(found: Data, data: str | None, queries: str | None, language: Language | None) -> str:
    """What is scored, in a few words."""
    items = found.noun if isinstance(found, Labelled) else "plain texts"
    if isinstance(found, Retrieval):
        items = f"{items} on {len(found.documents)} documents"
    source = data or queries
    if source is None:
        return f"{len(found)} demo {items} in {'Chinese' if language is Language.zh else 'English'}"
    return f"{len(found)} {items} of {source.rstrip('/').rpartition('/')[2]}"
