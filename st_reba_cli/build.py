"""``st-reba build``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .options import complete_recipe, option, refuse
from .printing import console, loading_line, model_name, notes, write_json

if TYPE_CHECKING:
    from st_reba.recipes import Recipe

#: Recipes used without ``--recipe``: by default, with ``--sparse`` and with ``--multi-vector``.
DEFAULT, SPARSE, MULTI_VECTOR = "echo-topic", "promptreps", "reba-2"


def build(
    context: typer.Context,
    out: options.NewDirectory,
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
            "With --rerank it has {documents} and {query}.",
        ),
    ] = None,
    prompt_language: options.PromptLanguage = None,
    shares: Annotated[
        str | None,
        option('Weights of the parts of a recipe with parts (topic, echo-topic, early-late), such as "1,2,2".'),
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
        int | None,
        option(
            "With --multi-vector: dimensions of a vector, by principal components of the tokens of --fit-texts.", min=1
        ),
    ] = None,
    rerank: Annotated[
        bool,
        option(
            "Write an AttentionReranker: it reads all documents of a query in one prompt, and ranks them by the "
            "query's attention (ICR).",
            "--rerank",
        ),
    ] = False,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    max_seq_length: options.MaxSeqLength = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of the saved weights. auto: that of the model."),
    ] = "auto",
    engine: options.Engine = "transformers",
    as_json: options.Json = False,
) -> None:
    """Build a recipe on a model, and save it for SentenceTransformer."""
    pooled = ("--pooling", "--shares")
    if rerank:
        others = ("--recipe", "--sparse", "--multi-vector", "--fit-texts", "--prompt-language")
        why = "--rerank reads a query and its documents together"
        refuse(context, why, *others, *pooled, "--query-prompt", "--document-prompt")
    if sparse:
        why = "--sparse reads the last token of a prompt alone"
        refuse(context, why, "--multi-vector", "--fit-texts", *pooled)
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
    options.check_columns(fit_texts, columns, separator)
    options.check_recipes([recipe] if recipe else [])
    model = options.model_or_demo(model)
    # Printed before imports that take seconds.
    notes.say(f"Loading {model_name(model)}.")

    from sentence_transformers import SparseEncoder

    import st_reba
    from st_reba.build import note_recipe, prompts_or_own
    from st_reba.files import atomic_directory
    from st_reba.modules import AttentionRerankModule, PromptRepsModule
    from st_reba.modules.attention_reranking import attention_reranker
    from st_reba.modules.multi_vector import multi_vector_encoder
    from st_reba.recipes import find

    from .load import in_asked_language, load, load_llama_cpp, quiet, say_fitted, usable

    context.with_resource(quiet())
    origin: Any = load_llama_cpp(model, max_seq_length) if engine == "llama.cpp" else model
    settings: dict[str, Any] = {} if template is None else {"template": template}
    prompts = options.prompts_of(query_prompt, document_prompt)

    def load_module(kind: Any, arguments: dict[str, Any]) -> Any:
        if engine == "llama.cpp":
            return kind(origin, **arguments)
        return load(kind, model, dtype, "cpu", max_seq_length, **arguments)

    def print_fitting() -> None:
        own = chosen.post_processor
        what = f"the filter, {own.name}," if own else f"the projection to {dimensions} dimensions"
        say_fitted(what, len(chosen.fitted_on), fit_texts)

    if not rerank:
        chosen = find(recipe or (SPARSE if sparse else MULTI_VECTOR if multi_vector else DEFAULT))
        (chosen,) = in_asked_language([chosen], prompt_language, "en")
        if sparse:
            settings = {**_sparse_settings(chosen), **settings}
        else:
            mode = _checked_pooling(chosen, pooling, template, multi_vector)
            by_language = not (prompt_language or template)
            chosen = _with_texts(chosen, fit_texts, dimensions, by_language, columns, separator)
            chosen = _with_shares(chosen, shares)
    with atomic_directory(out) as scratch:
        built: Any
        if rerank:
            built = attention_reranker(load_module(AttentionRerankModule, settings), device="cpu")
        elif sparse:
            prompts = prompts_or_own(prompts, settings)
            built = SparseEncoder(modules=[load_module(PromptRepsModule, settings)], device="cpu", prompts=prompts)
        elif multi_vector:
            arguments = {**chosen.row.arguments(mode, chosen.layer), **chosen.row.with_own_template(settings)}
            module = load_module(chosen.row.module, arguments)
            if dimensions:
                print_fitting()
            prompts, texts = prompts_or_own(prompts, arguments), chosen.fit_texts
            built = multi_vector_encoder(module, dimension=dimensions, fit_texts=texts, prompts=prompts)
            note_recipe(built, chosen, settings)
        else:
            if engine == "transformers":
                settings = {**settings, "model_kwargs": {"dtype": dtype}}
            with usable(model):
                built = st_reba.build(
                    origin, chosen, pooling=mode, prompts=prompts, max_seq_length=max_seq_length, device="cpu",
                    on_fit=print_fitting, **settings,
                )  # fmt: skip
        built.save_pretrained(str(scratch))
    family = type(built).__name__
    line = loading_line(f"st_reba.{family}" if rerank else family, out)
    console.say(f"Wrote {out}. Load it with: {line}")
    if as_json:
        key = None if rerank else chosen.key
        write_json("build", path=str(out), family=family, recipe=key, load=line)


def _sparse_settings(chosen: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that reads the last token of a prompt.

    Raises:
        ValueError: If the recipe reads other tokens or layers, or has a filter.
    """
    from st_reba.modules import CausalTransformer

    prompted = chosen.row.module is CausalTransformer and chosen.row.poolings == ("last",)
    if not prompted or chosen.post_processor or chosen.layer is not None:
        raise ValueError(
            f"--sparse with {chosen.key}: words are predicted at the end of a prompt, after the last layer. Give a "
            f"recipe with a prompt, such as {SPARSE} or prompteol."
        )
    return dict(chosen.row.settings)


def _checked_pooling(chosen: Recipe, pooling: str | None, template: str | None, multi_vector: bool) -> str:
    """Return the name of the pooling in sentence-transformers.

    Raises:
        ValueError: If pooling, template or token vectors do not fit the recipe.
    """
    from st_reba.build import check_pooling
    from st_reba.recipes import every_row
    from st_reba.recipes.recipe import POOLINGS

    if template is not None and "template" not in chosen.row.module.config_keys:
        raise ValueError(f"--template: {chosen.name} has no template. Leave --template out.")
    mode = POOLINGS.get(pooling or chosen.pooling, pooling or "")
    if not multi_vector:
        check_pooling(chosen, mode, f"--pooling {mode}")
    elif chosen.post_processor is not None:
        raise ValueError(
            f"--multi-vector: {chosen.post_processor.name} is a filter of pooled vectors, and nothing is pooled. Give "
            f"{chosen.row.key if chosen.row.post_processor is None else 'another recipe, such as echo-2'}."
        )
    elif not chosen.row.words:
        keys = ", ".join(row.key for row in every_row() if row.words)
        raise ValueError(f"--multi-vector: {chosen.name} does not read every token. Give one of {keys}.")
    return mode


def _with_shares(chosen: Recipe, shares: str | None) -> Recipe:
    """Return the recipe with the weights of its parts.

    Raises:
        ValueError: If the weights are not one number above 0 for each part.
    """
    if shares is None:
        return chosen
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
    return replace(chosen, part_weights=tuple(weight / sum(weights) for weight in weights))


def _with_texts(
    chosen: Recipe,
    fit_texts: str | None,
    dimensions: int | None,
    by_language: bool,
    columns: str | None,
    separator: str | None,
) -> Recipe:
    """Return the recipe with the texts to fit its filter, or the projection of token vectors, on.

    Args:
        chosen: The recipe.
        fit_texts: Source of the user's texts; None: those of the package.
        dimensions: Dimensions of the projection; None: no projection.
        by_language: Whether the prompt is in the language of the user's texts.
        columns: Names of the columns of the user's texts.
        separator: Separator of the columns; None: the default.

    Raises:
        ValueError: If there are texts, and nothing is fitted.
    """
    from st_reba.text.presets import language_of

    from .load import in_asked_language, texts_to_fit

    if not dimensions and not chosen.fitted:
        if fit_texts is None:
            return chosen
        raise ValueError(
            f"--fit-texts: {chosen.name} is not fitted on texts. Give a recipe that is, such as early-late or "
            f"{chosen.row.key}+whitened, or leave --fit-texts out."
        )
    texts = texts_to_fit(fit_texts, columns, separator)
    if by_language and fit_texts is not None:
        (chosen,) = in_asked_language([chosen], None, language_of(texts))
    return replace(chosen, fit_texts=tuple(texts))
