"""``st-reba build``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .checks import check_free, check_recipes, check_source, check_template
from .common import LengthOption, ModelOption, PoolingMode, PromptLanguageOption, check_language_model, command, refuse
from .methods import DEFAULT, METHODS


class SavedDtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@command("build")
def build_command(
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help='Any row of any table, by its name ("ReBA-2") or its key: "reba-2", read after a layer "reba-2@12", '
            'behind a filter "classical+whitened".',
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"How the language model is read, in place of a recipe's name: {', '.join(METHODS)}. "
            f"Default: {DEFAULT}.",
            show_default=False,
        ),
    ] = None,
    pooling: Annotated[
        PoolingMode | None,
        typer.Option(help="How token vectors become one. Default: as the recipe has it.", show_default=False),
    ] = None,
    repetitions: Annotated[int | None, typer.Option(help="Copies of the text (echo, reba). Default: 2.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help='Indices such as "-1,-2": the layers that count (reba, value-aggregation; default: all), or those '
            "that re-route (kv-rerouting; default: the middle third).",
            show_default=False,
        ),
    ] = None,
    chunk_length: Annotated[
        int | None, typer.Option(help="Tokens of a chunk, for texts too long to be repeated whole (reba).")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help='Text with {text} slots, or a name such as "springer" (echo) or "prompteol" (prompteol).'),
    ] = None,
    fit_texts: Annotated[
        str | None,
        typer.Option(
            help="Plain texts, one a line or the column text of a table, some hundreds, that what stands around the "
            "pooling is fitted on, such as the whitening behind early-late. Default: demo texts."
        ),
    ] = None,
    prompt_language: PromptLanguageOption = None,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse",
            help="A SparseEncoder in place of a SentenceTransformer: what weights the head gives the words of a text "
            "at the end of the recipe's prompt. Recipe by default: promptreps.",
        ),
    ] = False,
    expansion: Annotated[
        int | None, typer.Option(help="With --sparse: how many tokens that are not the text's own. Default: 0.", min=0)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="With --sparse: how many of the text's own, at most. Default: 128.", min=1)
    ] = None,
    rerank: Annotated[
        bool,
        typer.Option(
            "--rerank",
            help="A CrossEncoder, which ranks documents by a two-way choice of the language model; --template then has "
            "{query} and {document}.",
        ),
    ] = False,
    query_prompt: Annotated[
        str | None, typer.Option(help="Retrieval: what stands before a text in encode_query.", show_default=False)
    ] = None,
    document_prompt: Annotated[
        str | None, typer.Option(help="Retrieval: what stands before a text in encode_document.", show_default=False)
    ] = None,
    multi_vector: Annotated[
        bool,
        typer.Option(
            "--multi-vector",
            help="Retrieval: a vector for each token, for search by late interaction (MaxSim); a MultiVectorEncoder.",
        ),
    ] = False,
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="--multi-vector: project vectors to so many values, such as 128, by principal components of the "
            "tokens of --fit-texts.",
            min=1,
            show_default=False,
        ),
    ] = None,
    skip_punctuation: Annotated[
        bool | None,
        typer.Option(
            "--skip-punctuation/--keep-punctuation",
            help="--multi-vector: leave out a document's tokens that are punctuation alone. Default: leave them out.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    max_seq_length: LengthOption = None,
    dtype: Annotated[
        SavedDtype, typer.Option(help="Precision of the saved weights; auto: the model's own.")
    ] = SavedDtype.auto,
) -> None:
    """Write a ready SentenceTransformer directory."""
    if rerank:
        given: dict[str, object] = {
            "--recipe": recipe,
            "--method": method,
            "--pooling": pooling,
            "--sparse": sparse or None,
            "--multi-vector": multi_vector or None,
        }
        given |= {"--repetitions": repetitions, "--layers": layers, "--chunk-length": chunk_length}
        given |= {"--fit-texts": fit_texts, "--query-prompt": query_prompt, "--document-prompt": document_prompt}
        given |= {"--prompt-language": prompt_language, "--no-normalize": None if normalize else True}
        refuse("--rerank reads a query and a document together", given)
    if sparse:
        given = {"--pooling": pooling, "--repetitions": repetitions, "--layers": layers}
        given |= {"--chunk-length": chunk_length, "--fit-texts": fit_texts, "--multi-vector": multi_vector or None}
        given |= {"--no-normalize": None if normalize else True}
        refuse("--sparse reads the end of a prompt", given)
    else:
        refuse("without --sparse no token of the vocabulary is weighed", {"--expansion": expansion, "--top-k": top_k})
    if multi_vector and pooling is not None:
        raise ValueError("--multi-vector keeps the vector of each token, so nothing is pooled: leave --pooling out.")
    for option, value in (("--dimensions", dimensions), ("--skip-punctuation", skip_punctuation)):
        if value is not None and not multi_vector:
            raise ValueError(f"{option} is for --multi-vector: give that, too, or leave it out.")
    if template is not None and prompt_language is not None:
        raise ValueError("--template and --prompt-language both say which prompt is read: give one of them.")
    if recipe and method:
        raise ValueError("--recipe and --method say the same thing: give one of them.")
    if method and method not in METHODS:
        raise ValueError(
            f"There is no --method {method}: give one of {', '.join(METHODS)}; or --recipe with the name or key of any "
            "row of any table."
        )
    layers_of(layers)
    check_free(out, "--out")
    check_source(fit_texts)
    check_recipes([recipe] if recipe else [], model)
    if not rerank:
        check_template(template)
    check_language_model(model)


def layers_of(layers: str | None) -> str | list[int] | None:
    """What ``--layers`` asks for.

    Raises:
        ValueError: If it is neither "all" nor indices.
    """
    if layers is None or layers == "all":
        return layers
    try:
        return [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f'--layers {layers!r}: use "all" or indices separated by commas, such as "-1,-2".') from None
