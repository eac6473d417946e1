"""What ``compare``, ``search`` and ``layers`` are given to measure on, read and named."""

from __future__ import annotations

from dataclasses import replace

from st_reba.data.demo import demo_pairs, demo_retrieval, demo_sentences
from st_reba.data.tables import Data, Labelled, Retrieval, read_data, read_retrieval, read_texts

from ..common import Language
from ..data import Demo, Given, prompts_of
from ..printing import notes


def read(given: Given) -> Data:
    """What is to be measured on; tells in a line what was read.

    Raises:
        ValueError: If a row cannot be read, or there are prompts for what has no queries.
        OSError: If something is not there.
    """

    def tell(line: str) -> None:
        notes.print(line, soft_wrap=True)

    if given.queries is not None and given.corpus is not None and given.qrels is not None:
        found: Data = read_retrieval(given.queries, given.corpus, given.qrels, tell=tell)
    elif given.data is not None:
        found = read_data(given.data, given.columns, tell)
    else:
        shipped = demo_retrieval if given.demo is Demo.retrieval else demo_pairs
        found = read_data(shipped(given.demo_language.value))
    if prompts := prompts_of(given.query_prompt, given.document_prompt):
        if not isinstance(found, Retrieval):
            raise ValueError("--query-prompt and --document-prompt are for retrieval: nothing else here has queries.")
        found = replace(found, prompts=prompts)
    return found


def texts_to_fit(source: str | None) -> list[str]:
    """The plain texts that a command fits something on: every command takes the same ones, so that the model that one
    of them has scored is the model that another one builds.

    Args:
        source: The user's own, as for :func:`st_reba.data.tables.read_texts`; None: all of those in the package.
    """
    return demo_sentences() if source is None else read_texts(source)


def described(given: Given, found: Data) -> str:
    """What is scored, all that was read or part of it, in a few words."""
    items = found.noun if isinstance(found, Labelled) else "plain texts"
    if isinstance(found, Retrieval):
        items = f"{items} on {len(found.documents)} documents"
    source = given.data or given.queries
    if source is None:
        return f"{len(found)} demo {items} in {'Chinese' if given.demo_language is Language.zh else 'English'}"
    return f"{len(found)} {items} of {source.rstrip('/').rpartition('/')[2]}"
