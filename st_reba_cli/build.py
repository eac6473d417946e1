"""``st-reba build`` and ``st-reba recipes``, the list of what it builds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from . import options
from .options import complete_recipe, directory, known_names, option, refuse
from .printing import console, loading_line, model_name, notes, write_json

if TYPE_CHECKING:
    from st_reba.recipes import Recipe

#: Recipes used without ``--recipe``: by default, with ``--sparse`` and with ``--multi-vector``.
DEFAULT, SPARSE, MULTI_VECTOR = "echo-topic", "promptreps", "reba-2"


def build(
    context: typer.Context,
    out: Annotated[Path, directory("Directory to write; it must be new or empty.", "--out")],
    model: options.Model = None,
    recipe: Annotated[
        str | None,
        option(
            'Recipe, by its name in tables ("ReBA-2") or its key: "reba-2"; "reba-2@12" reads after layer 12, '
            f'"classical+whitened" adds a filter. `st-reba recipes` lists the keys. Default: {DEFAULT}; with '
            f"--sparse {SPARSE}; with --multi-vector {MULTI_VECTOR}.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    pooling: Annotated[
        Literal["mean", "last", "lasttoken", "weightedmean", "max", "cls"] | None,
        option("Pooling of the token vectors. Default: the recipe's."),
    ] = None,
    template: Annotated[
        str | None,
        option(
            'Prompt: text with {text} in place of the input, or a name such as "springer" (echo) or "prompteol". '
            "With --rerank it has {documents} and {query}."
        ),
    ] = None,
    prompt_language: options.PromptLanguage = None,
    shares: Annotated[
        str | None, option('Weights of the parts of a recipe with parts, such as echo-topic or reverse-eol: "1,2,2".')
    ] = None,
    fit_texts: options.FitTexts = None,
    columns: options.Columns = None,
    separator: options.Separator = None,
    sparse: Annotated[
        bool, option("Write a SparseEncoder: weights of words, predicted at the end of a prompt.", "--sparse")
    ] = False,
    multi_vector: Annotated[
        bool, option("Write a MultiVectorEncoder: one vector per token, for search by MaxSim.", "--multi-vector")
    ] = False,
    dimensions: Annotated[
        int | None, option("With --multi-vector: dimensions of a vector, by PCA of the tokens of --fit-texts.", min=1)
    ] = None,
    rerank: Annotated[
        bool, option("Write an AttentionReranker, which ranks documents by a prompt's attention (ICR).", "--rerank")
    ] = False,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    max_seq_length: options.MaxSeqLength = None,
    dtype: Annotated[options.Precision, option("Precision of the saved weights. auto: that of the model.")] = "auto",
    engine: options.Engine = "transformers",
    as_json: options.Json = False,
) -> None:
    """Build a recipe on a model, and save it for SentenceTransformer."""
    pooled = ("--pooling", "--shares")
    if rerank:
        why = "--rerank reads a query and its documents together"
        prompts_asked = ("--prompt-language", "--query-prompt", "--document-prompt")
        refuse(context, why, "--recipe", "--sparse", "--multi-vector", "--fit-texts", *prompts_asked, *pooled)
    if sparse:
        refuse(context, "--sparse reads the last token of a prompt alone", "--multi-vector", "--fit-texts", *pooled)
    if multi_vector:
        refuse(context, "--multi-vector keeps the vector of each token, so nothing is pooled", *pooled)
    else:
        refuse(context, "it sets the size of token vectors, which need --multi-vector", "--dimensions")
    if fit_texts is None:
        refuse(context, "without --fit-texts no table is read", "--columns", "--separator")
    if template is not None:
        refuse(context, "--template already sets the prompt", "--prompt-language")
    if engine == "llama.cpp":
        why = "llama.cpp runs a file's weights unchanged, and gives no access to the LM head or to attention"
        refuse(context, why, "--dtype", "--sparse", "--rerank")
    model = options.model_or_demo(model)
    # Printed before imports that take seconds.
    notes.say(f"Loading {model_name(model)}.")

    from sentence_transformers import SparseEncoder

    import st_reba
    from st_reba.build import note_recipe, prompts_or_own
    from st_reba.files import atomic_directory
    from st_reba.modules import AttentionReranker, AttentionRerankModule, PromptRepsModule
    from st_reba.modules.multi_vector import multi_vector_encoder
    from st_reba.recipes import find
    from st_reba.text.presets import language_of

    from .load import in_asked_language, prompts_of, quiet, say_fitted, texts_to_fit, usable

    context.with_resource(quiet())
    prompts = prompts_of(query_prompt, document_prompt)
    settings: dict[str, Any] = {} if template is None else {"template": template}
    if not rerank:
        chosen = find(recipe or (SPARSE if sparse else MULTI_VECTOR if multi_vector else DEFAULT))
        _check_recipe(chosen, settings, sparse, multi_vector)
        fitted = bool(dimensions or chosen.fitted)
        if fit_texts and not fitted:
            raise ValueError(
                f"--fit-texts: {chosen.name} is not fitted on texts. Give a recipe that is, such as early-late or "
                f"{chosen.row.key}+whitened, or leave --fit-texts out."
            )
        texts = texts_to_fit(fit_texts, columns, separator) if fitted else []
        language = language_of(texts) if fit_texts and template is None else "en"
        (chosen,) = in_asked_language([chosen], prompt_language, language)
        chosen = replace(chosen, fit_texts=tuple(texts), part_weights=_part_weights(chosen, shares))
    with atomic_directory(out) as scratch, usable(model):
        if engine == "llama.cpp":
            backbone: Any = st_reba.LlamaCppTransformer(model)
        else:
            backbone = st_reba.CausalTransformer(model, model_kwargs={"dtype": dtype})
        if not rerank and fitted:
            own = chosen.post_processor
            what = f"the filter, {own.name}," if own else f"the projection to {dimensions} dimensions"
            say_fitted(what, len(chosen.fitted_on), fit_texts)

        def on_backbone(kind: Any, **arguments: Any) -> Any:
            module = kind(backbone, **arguments)
            if max_seq_length is not None:
                module.max_seq_length = max_seq_length
            return module

        built: Any
        if rerank:
            built = AttentionReranker(modules=[on_backbone(AttentionRerankModule, **settings)], device="cpu")
        elif sparse:
            arguments = {**chosen.row.settings, **settings}
            prompts = prompts_or_own(prompts, arguments)
            built = SparseEncoder(modules=[on_backbone(PromptRepsModule, **arguments)], device="cpu", prompts=prompts)
        elif multi_vector:
            arguments = chosen.arguments("", **settings)
            module, prompts = on_backbone(chosen.row.module, **arguments), prompts_or_own(prompts, arguments)
            built = multi_vector_encoder(module, dimension=dimensions, fit_texts=texts, prompts=prompts)
            note_recipe(built, chosen, settings)
        else:
            built = st_reba.build(
                backbone, chosen, pooling=pooling, prompts=prompts, max_seq_length=max_seq_length, device="cpu",
                **settings,
            )  # fmt: skip
        built.save_pretrained(str(scratch))
    family = type(built).__name__
    line = loading_line(f"st_reba.{family}" if rerank else family, out)
    console.say(f"Wrote {out}. Load it with: {line}")
    if as_json:
        write_json("build", path=str(out), family=family, recipe=None if rerank else chosen.key, load=line)


def _check_recipe(chosen: Recipe, settings: dict[str, Any], sparse: bool, multi_vector: bool) -> None:
    """Check that a recipe has the prompt, the token vectors and the template that are asked for.

    Raises:
        ValueError: If it does not.
    """
    from st_reba.modules import CausalTransformer
    from st_reba.recipes import every_row

    row, filtered = chosen.row, chosen.post_processor is not None
    prompted = row.module is CausalTransformer and row.poolings == ("last",)
    if sparse and (not prompted or filtered or chosen.layer is not None):
        problem = f"--sparse with {chosen.key}: words are predicted at the end of a prompt, after the last layer."
        raise ValueError(f"{problem} Give a recipe with a prompt, such as {SPARSE} or prompteol.")
    if multi_vector and (not row.words or filtered):
        keys = ", ".join(row.key for row in every_row() if row.words)
        problem = f"--multi-vector: {chosen.name} does not read every token, or has a filter of pooled vectors."
        raise ValueError(f"{problem} Give one of {keys}.")
    if settings.keys() - {*row.module.config_keys}:
        raise ValueError(f"--template: {chosen.name} has no template. Leave --template out.")


def _part_weights(chosen: Recipe, shares: str | None) -> tuple[float, ...]:
    """Return the weights of a recipe's parts, whose sum is 1.

    Raises:
        ValueError: If they are not one number above 0 for each part.
    """
    if shares is None:
        return chosen.part_weights
    try:
        weights = [float(share) for share in shares.split(",")]
    except ValueError:
        weights = []
    parts = chosen.row.parts
    if parts == 1 or len(weights) != parts or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(
            f"--shares {shares!r}: {chosen.name} has {parts} part{'s' * (parts > 1)}. Give a number above 0 for each "
            "of several parts, separated by commas, or leave --shares out."
        )
    return tuple(weight / sum(weights) for weight in weights)


def recipes() -> None:
    """List all recipes and filters.

    --recipe and --recipes take a recipe's key. @LAYER and one filter may follow it: "classical@12",
    "prompteol+whitened". With -zh a recipe has its Chinese prompt: "topic-zh".
    """
    known, filters = known_names()
    for title, tried in (("Recipes that compare tries by default", True), ("Other recipes", False)):
        console.say(title, style="bold")
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("Key", no_wrap=True, min_width=max(map(len, known)) + 2)
        table.add_column("Passes", no_wrap=True)
        table.add_column("What it does")
        for key, row in known.items():
            if row["tried"] == tried:
                description = row["in_brief"] or f"{row['description'][:1].upper()}{row['description'][1:]}"
                table.add_row(f"{key} *" if row["fitted"] else key, row["cost"], description)
        console.print(table)
        console.print()
    console.say("*: fitted on plain texts (--fit-texts). Passes: number of passes over the text.")
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("Filter", no_wrap=True)
    table.add_column("What it does")
    for key, description in filters.items():
        table.add_row(f"+{key}", description)
    console.print(table)
