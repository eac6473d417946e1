"""``st-reba encode``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .checks import check_model, check_source
from .common import Dtype, DtypeOption, command


class Precision(StrEnum):
    float32 = "float32"
    int8 = "int8"
    uint8 = "uint8"
    binary = "binary"
    ubinary = "ubinary"


class EngineName(StrEnum):
    local = "local"
    ray = "ray"


@command("encode")
def encode_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A SentenceTransformer: a directory or a Hub id.")],
    texts: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Texts: .txt (one a line), .tsv, .csv, .jsonl or .parquet; a folder of shards; a remote path (s3://, "
            "hf://, https://); a data set of the Hub.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="An .npy, a .parquet, or (no suffix) a directory of Parquet shards.", show_default=False),
    ],
    column: Annotated[str | None, typer.Option(help='Which column has the texts. Default: "text".')] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="A column to keep in a Parquet --out; may be repeated. The cells of .csv and .tsv are text, numbers, "
            "too; those of .jsonl and .parquet keep their type."
        ),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="What values are written as.")] = Precision.float32,
    calibration_rows: Annotated[
        int, typer.Option(help="int8, uint8: the ranges are those of so many first texts.", min=1)
    ] = 10_000,
    ranges: Annotated[
        Path | None, typer.Option(help="int8, uint8: ranges from a file, such as an earlier run's vectors.ranges.npy.")
    ] = None,
    truncate_dim: Annotated[int | None, typer.Option(help="Keep a vector's first values.", min=1)] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = False,
    prompt_name: Annotated[str | None, typer.Option(help="One of the model's prompts, by name.")] = None,
    prompt: Annotated[str | None, typer.Option(help="A prompt in full.")] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="One vector for each chunk of so many tokens, read in its text. To Parquet.", min=1),
    ] = None,
    chunk_overlap: Annotated[int, typer.Option(help="Tokens that a chunk shares with the next one.", min=0)] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Texts that are sorted by length and kept as one.",
            min=1,
            show_default="from four batches, growing to 2,048",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    dtype: DtypeOption = Dtype.fastest,
    device: Annotated[
        str | None, typer.Option(help='cpu, cuda ...; several as "cuda:0,cuda:1". The fastest one by default.')
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="This machine, or a Ray cluster (RAY_ADDRESS).")
    ] = EngineName.local,
    workers: Annotated[int | None, typer.Option(help="ray: copies of the model. Default: 1.", min=1)] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace --out, and other settings' interrupted run.")] = False,
) -> None:
    """Texts of a file of any size to vectors.

    A run that was stopped or killed goes on where it was when it is started again, and the output is the same.
    """
    if workers is not None and engine is not EngineName.ray:
        raise ValueError("--workers is for --engine ray; on this machine name the devices: --device cuda:0,cuda:1.")
    if keep and out.suffix == ".npy":
        raise ValueError("An .npy holds vectors alone: keep columns with an --out that ends in .parquet.")
    if out.exists() and not overwrite and not out.with_name(f"{out.name}.partial").exists():
        raise ValueError(f"{out} exists: choose another --out, or replace it with --overwrite.")
    check_model(model)
    check_source(texts)
