"""Tasks of the mteb package by name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...optional import require
from ...text.templates import PromptLanguage

if TYPE_CHECKING:
    from mteb import AbsTask

#: What the ReBA paper reports (Table 3's caption, A.3), by mteb's type of a task, in its names. See docs/evaluate.md.
PAPER_METRICS = {
    "Classification": "accuracy",
    "Clustering": "v_measure",
    "Reranking": "map_at_1000",
    "PairClassification": "cosine_accuracy",
    "STS": "cosine_pearson",
    "Retrieval": "recall_at_1000",
}

_C_MTEB = "MTEB(cmn, v1)"
#: Chinese, as mteb calls it.
_CHINESE = {"cmn", "zho"}


def resolve_tasks(names: Sequence[str | AbsTask]) -> list[AbsTask]:
    """The tasks of these names, each once, in their order.

    Args:
        names: Names of mteb's tasks; names of its benchmarks, which stand for all their tasks (``"C-MTEB"`` is the 31
            of ``"MTEB(cmn, v1)"``); or tasks.

    Raises:
        ImportError: If mteb is missing.
        ValueError: If there is no such task, or one that is not about texts alone; the message names what comes close.
    """
    require("mteb", "mteb", "A task of the Massive Text Embedding Benchmark")
    if not names:
        raise ValueError('No mteb task was given: name at least one, such as "STSB", or "C-MTEB" for its 31 tasks.')
    found: dict[str, AbsTask] = {}
    for name in names:
        for task in _named(name) if isinstance(name, str) else [name]:
            if task.metadata.modalities != ["text"]:
                raise ValueError(
                    f"The mteb task {task.metadata.name} is about {', '.join(task.metadata.modalities)}, and a "
                    "language model embeds texts alone: choose tasks whose modality is text."
                )
            found.setdefault(task.metadata.name, task)
    return list(found.values())


def _named(name: str) -> list[AbsTask]:
    import mteb

    benchmark = _C_MTEB if name.upper() in ("C-MTEB", "CMTEB") else name
    try:
        return list(mteb.get_benchmark(benchmark).tasks)
    except KeyError:
        pass
    try:
        return [mteb.get_task(name)]
    except KeyError:
        raise ValueError(f"There is no mteb task {name!r}.{_close(name)}") from None


def _close(name: str) -> str:
    """What the user may have meant, whatever the case of its letters."""
    by_lower = {known.lower(): known for known in _names()}
    if matches := difflib.get_close_matches(name.lower(), by_lower, n=3):
        return f" Did you mean {', or '.join(by_lower[match] for match in matches)}?"
    return " mteb.get_tasks() lists those there are; C-MTEB stands for its 31 Chinese tasks."


def language_of_tasks(tasks: Sequence[AbsTask]) -> PromptLanguage:
    """The language in which to ask about the texts of tasks: ``"zh"`` where all of them are Chinese alone."""
    languages = {language for task in tasks for language in task.metadata.languages}
    return "zh" if languages and languages <= _CHINESE else "en"


@functools.cache
def _names() -> list[str]:
    """Every name that is understood."""
    import mteb

    tasks = mteb.get_tasks(
        modalities=["text"], exclusive_modality_filter=True, exclude_superseded=False, exclude_private=False
    )
    benchmarks = mteb.get_benchmarks()
    return ["C-MTEB", *(task.metadata.name for task in tasks), *(benchmark.name for benchmark in benchmarks)]
