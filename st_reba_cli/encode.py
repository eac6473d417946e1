"""``st-reba encode``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import options
from .options import argument, check_columns, check_model, check_source, check_url, option, separated
from .printing import Shown, console, write_json


def encode(
    context: typer.Context,
    model: Annotated[
        str,
        argument(
            "A saved model of sentence-transformers: a directory or a Hub id.",
            "MODEL",
            callback=check_model,
        ),
    ],
    texts: Annotated[
        str,
        argument(
            "Texts: .txt (one a line), .tsv, .csv, .jsonl or .parquet; a folder of shards; a remote path (s3://, "
            "hf://, https://); a data set of the Hub.",
            "INPUT",
            callback=check_source,
        ),
    ],
    out: Annotated[
        str,
        option(
            "Where the vectors go: an .npy, a .parquet or, without a suffix, a directory of Parquet shards. To a URL "
            "(s3://, gs://, hf://) they are uploaded when all are there."
        ),
    ],
    column: Annotated[str | None, option('The column that has the texts. Default: "text".')] = None,
    keep: Annotated[
        list[str] | None,
        option(
            "A column to write beside the vectors, to Parquet alone; may be repeated. Cells of .csv and .tsv are text."
        ),
    ] = None,
    separator: options.Separator = None,
    precision: Annotated[
        Literal["float32", "binary", "ubinary"],
        option("Type of the numbers that are written."),
    ] = "float32",
    truncate_dim: Annotated[int | None, option("Keep this many values of each vector, the first ones.", min=1)] = None,
    normalize: Annotated[bool, option("Scale vectors to length 1.")] = False,
    prompt_name: Annotated[str | None, option("Put the model's prompt of this name before each text.")] = None,
    prompt: Annotated[str | None, option("Put this prompt before each text.")] = None,
    chunk_tokens: Annotated[
        int | None,
        option(
            "Write a vector for each chunk of this many tokens, read within its whole text; to Parquet alone.", min=1
        ),
    ] = None,
    chunk_overlap: Annotated[int, option("Tokens that a chunk shares with the next one.", min=0)] = 0,
    batch_size: options.BatchSize = 32,
    chunk_size: Annotated[
        int | None, option("Texts that are sorted by length, encoded and saved together. Default: up to 2,048.", min=1)
    ] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: Annotated[
        str | None,
        option('Where the model runs: cpu, cuda; several as "cuda:0,cuda:1". Default: the fastest there is.'),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], option("Run on this machine, or on the Ray cluster that RAY_ADDRESS names.")
    ] = "local",
    workers: Annotated[
        int | None, option("With --engine ray: how many copies of the model run. Default: 1.", min=1)
    ] = None,
    overwrite: Annotated[
        bool, option("Replace what --out has, and what a stopped run with other settings has left.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Turn a file of texts, of any size, into a file of vectors.

    If a run is stopped or killed, the same command goes on where it was, and the output is the same.
    """
    if workers is not None and engine != "ray":
        raise ValueError("--workers is for --engine ray; on this machine name the devices: --device cuda:0,cuda:1.")
    for name in filter(None, (column, *(keep or ()))):
        check_columns(texts, name, separator)
    path = Path(out)
    if keep and path.suffix == ".npy":
        raise ValueError("An .npy holds vectors alone: keep columns with an --out that ends in .parquet.")
    if "://" in out:
        check_url(out, "http", "https")
    else:
        out = str(path)
        if path.exists() and not overwrite and not path.with_name(f"{path.name}.partial").exists():
            raise ValueError(f"{out} exists: choose another --out, or replace it with --overwrite.")

    from sentence_transformers.util import get_device_name

    import st_reba.encode as job

    from .load import placement, quiet, usable

    context.with_resource(quiet())

    # SIGTERM, which schedulers send, ends the run as Ctrl-C does, so that worker processes are closed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before or signal.SIG_DFL))

    with usable(model, device if engine == "local" else None), Shown("Loading", "") as shown:
        runner: job.Engine
        if engine == "ray":
            runner = job.RayEngine(workers or 1, device)
        else:
            runner = job.LocalEngine(separated([device or get_device_name()]))
        encoder = job.Encoder(
            model=model, revision=revision, batch_size=batch_size, prompt_name=prompt_name, prompt=prompt,
            truncate_dim=truncate_dim, normalize=normalize, chunk_tokens=chunk_tokens, chunk_overlap=chunk_overlap,
            dtype=placement(runner.device, dtype)[1], precision=precision,
        )  # fmt: skip

        def tell(stage: str, done: int, total: int | None) -> None:
            shown.stage(stage, done, total, "MB" if stage in (job.COPYING, job.HASHING, job.UPLOADING) else "texts")

        try:
            made = job.encode_file(
                encoder, texts, out, column=column, keep=keep or (), separator=separator, chunk_size=chunk_size,
                engine=runner, overwrite=overwrite, on_progress=tell,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = f"{job.destination_of(out).work if '://' in out else out}.partial"
            console.say(f"Stopped. The same command goes on from {kept}.")
            raise typer.Exit(130) from None
    resumed = f", {made.resumed:,} of them from an interrupted run" if made.resumed else ""
    console.say(f"Wrote {made.rows:,} vectors of {made.texts:,} texts to {out}{resumed}.")
    if as_json:
        write_json("encode", path=out, rows=made.rows, texts=made.texts, resumed=made.resumed)
