"""``st-reba layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..data.demo import DEMO_MODEL
from ..files import check_free
from .common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LanguageOption,
    LengthOption,
    ModelOption,
    PoolingMode,
    check_model,
    command,
)
from .data import (
    ColumnsOption,
    CorpusOption,
    DataOption,
    DemoOption,
    DocumentPromptOption,
    QrelsOption,
    QueriesOption,
    QueryPromptOption,
    check_given,
)


@command("layers")
def layers_command(
    model: ModelOption = str(DEMO_MODEL),
    data: DataOption = None,
    columns: ColumnsOption = None,
    queries: QueriesOption = None,
    corpus: CorpusOption = None,
    qrels: QrelsOption = None,
    query_prompt: QueryPromptOption = None,
    document_prompt: DocumentPromptOption = None,
    demo: DemoOption = None,
    language: LanguageOption = None,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")] = Path(
        "st-reba-layers"
    ),
    pooling: Annotated[PoolingMode, typer.Option(help="How token vectors become one.")] = PoolingMode.mean,
    template: Annotated[
        str | None, typer.Option(help='Text with {text} slots, or a name such as "springer" or "prompteol".')
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """After which layer a model embeds best, and how much its tokens share: tables and plots.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    check_free(out, "--out")
    check_given(data, columns=columns, queries=queries, corpus=corpus, qrels=qrels, demo=demo, language=language)
    check_model(model)
