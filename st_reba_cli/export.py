"""``st-reba export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .checks import check_free, check_model, check_source
from .data import texts_to_fit
from .options import option, typed
from .printing import Shown, console


def export(
    context: typer.Context,
    model: options.Model,
    static: Annotated[
        Path | None,
        option(help="Directory for a static model: a whitened table of the vocabulary's vectors, a StaticEmbedding."),
    ] = None,
    plain: Annotated[
        Path | None,
        option(help="Directory for a saved model of st_reba's, as a plain one that inference engines serve."),
    ] = None,
    pieces: Annotated[
        bool, typer.Option(help="--plain: tokenise a template and its text apart, as engines do.")
    ] = False,
    layer: Annotated[
        int | None,
        option(help="--static: read after this layer; 0: input embeddings. Default: a quarter of the layers.", min=0),
    ] = None,
    dimensions: Annotated[
        int | None, option(help="--static: so many values of a vector, by principal components. Default: all.", min=1)
    ] = None,
    fit_texts: options.FitTexts = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Write a model in a form that runs elsewhere, without st_reba."""
    if (static is None) == (plain is None):
        raise ValueError("What is exported is one of --static, --plain: give one of them, with a directory.")
    if pieces and plain is None:
        raise ValueError("--pieces says how --plain tokenises: give both, or neither.")
    of_static = ("--layer", "--dimensions", "--fit-texts", "--dtype")
    if plain is not None and (passed_over := [name for name in of_static if name in typed(context)]):
        raise ValueError(
            f"{', '.join(passed_over)}: for --static alone, as --plain writes the model as it is. Leave it out."
        )
    check_free(static, "--static")
    check_free(plain, "--plain")
    check_source(fit_texts)
    check_model(model)

    from st_reba.encode import Encoder
    from st_reba.export import save_plain, static_model
    from st_reba.files import atomic_directory
    from st_reba.modules import CausalTransformer

    from .load import load_fastest, quiet, usable

    context.with_resource(quiet())
    if static is not None:
        texts = texts_to_fit(fit_texts)
        hint = "" if fit_texts else ", sentences inside the package: give --fit-texts with some hundreds like your own"
        console.say(f"Fitting weights and whitening on {len(texts)} texts{hint}.")
        with atomic_directory(static, "--static") as scratch, Shown() as shown:
            module = load_fastest(CausalTransformer, model, texts, dtype=dtype, device=device)
            bar = shown.add_task("Reading the vocabulary", total=None, unit="tokens")
            made = static_model(
                module,
                texts,
                layer=layer,
                dimension=dimensions,
                on_progress=lambda done, total: shown.update(bar, completed=done, total=total),
            )
            made.save_pretrained(str(scratch))
        said = f"Wrote {static}. Load"
    if plain is not None:
        with usable(model, device):
            # In the precision of its weights, which is what is written.
            loaded = Encoder(model).pinned().load(device or "cpu")
        with atomic_directory(plain, "--plain") as scratch:
            save_plain(loaded, scratch, pieces=pieces)
        engines = f"Serve it with any engine that has {type(loaded[0].model).__name__}, or load"
        said = f"Wrote {plain}, which gives the same vectors. {engines}"
    line = f'SentenceTransformer("{static or plain}")'
    console.say(f"{said} it with: {line}; it needs sentence-transformers alone.")
