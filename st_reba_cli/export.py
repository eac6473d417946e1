"""``st-reba export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import directory, model_or_demo, option, refuse
from .printing import Shown, console, loading_line


def export(
    context: typer.Context,
    model: options.Model = None,
    static: Annotated[
        Path | None,
        directory("Directory to write a StaticEmbedding to: a whitened table of one vector per token.", "--static"),
    ] = None,
    plain: Annotated[
        Path | None,
        directory("Directory to write a saved model of st_reba to, in a form that inference engines serve.", "--plain"),
    ] = None,
    pieces: Annotated[
        bool, option("With --plain: tokenize the template and the text separately, as engines do.")
    ] = False,
    layer: Annotated[
        int | None,
        option(
            "With --static: layer after which tokens are read; 0: input embeddings. Default: a quarter of the depth.",
            min=0,
        ),
    ] = None,
    dimensions: Annotated[
        int | None, option("With --static: dimensions of a vector, by principal components. Default: all.", min=1)
    ] = None,
    fit_texts: options.FitTexts = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Export a model to a form that runs without st_reba."""
    if (static is None) == (plain is None):
        raise ValueError("Give either --static or --plain, with a directory.")
    model = model_or_demo(model)
    if static is not None:
        refuse(context, "it is for --plain", "--pieces")
    else:
        names = ("--layer", "--dimensions", "--fit-texts", "--dtype")
        refuse(context, "for --static alone, as --plain writes the model unchanged", *names)

    from st_reba.encode import Encoder
    from st_reba.export import save_plain, static_model
    from st_reba.files import atomic_directory
    from st_reba.modules import CausalTransformer

    from .load import load, placement, quiet, say_fitted, texts_to_fit, usable

    context.with_resource(quiet())
    if static is not None:
        texts = texts_to_fit(fit_texts)
        with atomic_directory(static, "--static") as scratch, Shown("Reading the vocabulary", "tokens") as shown:
            where, precision = placement(device, dtype)
            module = load(CausalTransformer, model, precision, where)
            say_fitted("weights and whitening", len(texts), fit_texts)
            made = static_model(
                module, texts, layer=layer, dimension=dimensions,
                on_progress=lambda done, total: shown.stage("Reading the vocabulary", done, total, "tokens"),
            )  # fmt: skip
            made.save_pretrained(str(scratch))
        message = f"Wrote {static}. Load"
    if plain is not None:
        with usable(model, device):
            # The export keeps the precision of the weights.
            loaded = Encoder(model).pinned().load(device or "cpu")
        with atomic_directory(plain, "--plain") as scratch:
            save_plain(loaded, scratch, pieces=pieces)
        engines = f"Serve it with any engine that has {type(loaded[0].model).__name__}, or load"
        message = f"Wrote {plain}, which gives the same vectors. {engines}"
    line = loading_line("SentenceTransformer", static or plain, imports="")
    console.say(f"{message} it with: {line}; it needs sentence-transformers alone.")
