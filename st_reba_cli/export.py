"""``st-reba export`` and ``st-reba push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import argument, directory, model_or_demo, option, refuse
from .printing import Shown, console, loading_line, write_json


def export(
    context: typer.Context,
    model: options.Model = None,
    static: Annotated[
        Path | None, directory("Directory for a StaticEmbedding: a whitened table of one vector per token.", "--static")
    ] = None,
    plain: Annotated[
        Path | None, directory("Directory for a saved model, in a form that inference engines serve.", "--plain")
    ] = None,
    pieces: Annotated[bool, option("With --plain: tokenize template and text separately, as engines do.")] = False,
    layer: Annotated[
        int | None, option("With --static: layer to read; 0: input embeddings. Default: a quarter of the depth.", min=0)
    ] = None,
    dimensions: Annotated[
        int | None, option("With --static: dimensions of a vector, by PCA. Default: all.", min=1)
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

    from .load import load_backbone, quiet, say_fitted, texts_to_fit, usable

    context.with_resource(quiet())
    if static is not None:
        texts = texts_to_fit(fit_texts)
        with atomic_directory(static, "--static") as scratch, Shown("Reading the vocabulary", "tokens") as shown:
            module = load_backbone(model, "transformers", dtype, device)
            say_fitted("weights and whitening", len(texts), fit_texts)
            made = static_model(
                module, texts, layer=layer, dimension=dimensions,
                on_progress=lambda done, total: shown.stage("Reading the vocabulary", done, total, "tokens"),
            )  # fmt: skip
            made.save_pretrained(str(scratch))
        written = f"Wrote {static}. Load it"
    if plain is not None:
        with usable(model, device):
            # The export keeps the precision of the weights.
            loaded = Encoder(model).pinned().load(device or "cpu")
        with atomic_directory(plain, "--plain") as scratch:
            save_plain(loaded, scratch, pieces=pieces)
        engines = f"any engine that has {type(loaded[0].model).__name__}"
        vectors = 'the vectors of tokenization="pieces" and normalize_text=False' if pieces else "the same vectors"
        written = f"Wrote {plain}, which gives {vectors}. Serve it with {engines}, or load it"
    line = loading_line("SentenceTransformer", static or plain, imports="")
    console.say(f"{written} with: {line}; it needs sentence-transformers alone.")


def push(
    directory: Annotated[Path, argument("A saved SentenceTransformer.", "MODEL_DIR", exists=True, file_okay=False)],
    repo_id: Annotated[str, argument("Repository on the Hub, created if it does not exist.", "ORG/NAME")],
    private: Annotated[
        bool, option("Create the repository as private; an existing one must be private.", "--private")
    ] = False,
    revision: Annotated[str | None, option("Branch to push to. Default: main.")] = None,
    create_pr: Annotated[bool, option("Open a pull request instead of pushing.", "--create-pr")] = False,
    message: Annotated[str | None, option("Commit message.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check that a saved model is complete, and upload it to the Hub.

    The token is that of your login, or HF_TOKEN.
    """
    if repo_id.count("/") != 1:
        raise ValueError(f'"{repo_id}" is not the name of a repository: give "org/name" or "user/name".')

    from st_reba.hub import push as hub

    url = hub.push(directory, repo_id, private=private, revision=revision, create_pr=create_pr, message=message)
    where = "" if revision is None else f", revision {revision}"
    line = loading_line(str(hub.loading_class(str(directory))), repo_id, revision)
    if create_pr:
        console.say(f"Proposed {directory} to {repo_id}: {url}")
    else:
        console.say(f"Pushed {directory} to {repo_id}{where}: {url}")
        console.say(f"Load it with: {line}")
    if as_json:
        write_json("push", url=str(url), repo_id=repo_id, revision=revision, pull_request=create_pr, load=line)
