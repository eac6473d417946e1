"""``st-reba encode``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import options
from .options import argument, check_model, check_source, check_url, option
from .printing import Shown, console, write_json


def encode(
    context: typer.Context,
    model: Annotated[
        str, argument("A saved SentenceTransformer: a directory or a Hub id.", "MODEL", callback=check_model)
    ],
    texts: Annotated[
        str,
        argument(
            "Texts: a .txt (one per line), .tsv, .csv, .jsonl or .parquet file; a folder of shards; a remote path "
            "(s3://, hf://, https://); a dataset on the Hub.",
            "INPUT",
            callback=check_source,
        ),
    ],
    out: Annotated[
        str,
        option(
            "Output of the vectors: an .npy or .parquet file or, without a suffix, a directory of Parquet shards. A "
            "URL (s3://, gs://, hf://) receives the finished output."
        ),
    ],
    column: Annotated[str | None, option('Column of the texts. Default: "text".')] = None,
    keep: Annotated[
        list[str] | None, option("Column to write along with the vectors, to Parquet only; may be repeated.")
    ] = None,
    separator: options.Separator = None,
    precision: Annotated[Literal["float32", "binary", "ubinary"], option("Type of the values to write.")] = "float32",
    truncate_dim: Annotated[int | None, option("Keep only the first values of each vector, this many.", min=1)] = None,
    normalize: Annotated[bool, option("Scale vectors to length 1.")] = False,
    prompt_name: Annotated[str | None, option("Name of a prompt of the model to put before each text.")] = None,
    prompt: Annotated[str | None, option("Prompt to put before each text.")] = None,
    chunk_tokens: Annotated[
        int | None, option("Write a vector per chunk of this many tokens, read in its context; Parquet only.", min=1)
    ] = None,
    chunk_overlap: Annotated[int, option("Number of tokens that consecutive chunks share.", min=0)] = 0,
    batch_size: options.BatchSize = 32,
    chunk_size: Annotated[
        int | None, option("Number of texts that are sorted, encoded and saved together. Default: up to 2,048.", min=1)
    ] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: Annotated[
        str | None,
        option('Device of the model: cpu, cuda; or several: "cuda:0,cuda:1". Default: the fastest available.'),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], option("Run on this machine, or on the Ray cluster at RAY_ADDRESS.")
    ] = "local",
    workers: Annotated[
        int | None, option("With --engine ray: number of copies of the model. Default: 1.", min=1)
    ] = None,
    overwrite: Annotated[
        bool, option("Replace an existing --out, and the output of a stopped run with other settings.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Encode a file of texts, of any size, to a file of vectors.

    If a run is stopped or killed, the same command resumes it, and the output is the same.
    """
    if workers is not None and engine != "ray":
        raise ValueError("--workers is for --engine ray. On this machine list the devices: --device cuda:0,cuda:1.")
    path = Path(out)
    if keep and path.suffix == ".npy":
        raise ValueError("--keep: an .npy file holds vectors alone. Give an --out that ends in .parquet.")
    if "://" in out:
        check_url(out, "http", "https")
    else:
        out = str(path)
        if path.exists() and not overwrite and not Path(f"{path}.partial").exists():
            raise ValueError(f"{out} exists: choose another --out, or replace it with --overwrite.")

    from sentence_transformers.util import get_device_name

    import st_reba.encode as job

    from .load import placement, quiet, usable

    context.with_resource(quiet())

    # SIGTERM, which schedulers send, ends the run like Ctrl-C, so that worker processes are closed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before or signal.SIG_DFL))

    with usable(model, device if engine == "local" else None), Shown("Loading", "") as shown:
        runner: job.Engine
        if engine == "ray":
            runner = job.RayEngine(workers or 1, device)
        else:
            runner = job.LocalEngine([name.strip() for name in (device or get_device_name()).split(",")])
        encoder = job.Encoder(
            model=model, revision=revision, batch_size=batch_size, prompt_name=prompt_name, prompt=prompt,
            truncate_dim=truncate_dim, normalize=normalize, chunk_tokens=chunk_tokens, chunk_overlap=chunk_overlap,
            dtype=placement(runner.device, dtype)[1], precision=precision,
        )  # fmt: skip

        def on_progress(stage: str, done: int, total: int | None) -> None:
            shown.stage(stage, done, total, "MB" if stage in (job.COPYING, job.HASHING, job.UPLOADING) else "texts")

        try:
            result = job.encode_file(
                encoder, texts, out, column=column, keep=keep or (), separator=separator, chunk_size=chunk_size,
                engine=runner, overwrite=overwrite, on_progress=on_progress,
            )  # fmt: skip
        except KeyboardInterrupt:
            partial = f"{job.destination_of(out).work if '://' in out else out}.partial"
            console.say(f"Stopped. The same command resumes from {partial}.")
            raise typer.Exit(130) from None
    resumed = f", {result.resumed:,} of them from an interrupted run" if result.resumed else ""
    console.say(f"Wrote {result.rows:,} vectors of {result.texts:,} texts to {out}{resumed}.")
    if as_json:
        write_json("encode", path=out, rows=result.rows, texts=result.texts, resumed=result.resumed)
