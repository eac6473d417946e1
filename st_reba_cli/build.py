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

#: The recipe without ``--recipe``, and those of families that it does not fit.
DEFAULT, SPARSE, MULTI_VECTOR = "echo-topic", "promptreps", "reba-2"


def build(
    context: typer.Context,
    out: options.NewDirectory,
    model: options.Model = None,
    recipe: Annotated[
        str | None,
        option(
            'The recipe, by the name that tables show ("ReBA-2") or by its key: "reba-2"; "reba-2@12" is read after '
            f'layer 12, "classical+whitened" has a filter. `st-reba recipes` lists the keys. Default: {DEFAULT}; with '
            f"--sparse {SPARSE}; with --multi-vector {MULTI_VECTOR}.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    pooling: Annotated[
        Literal["mean", "last", "lasttoken", "weightedmean", "max", "cls"] | None,
        option("How the vectors of tokens become one. Default: the recipe's own."),
    ] = None,
    template: Annotated[
        str | None,
        option(
            'The prompt: text with {text} where the input goes, or a name such as "springer" (echo) or "prompteol". '
            "With --rerank it has {documents} and {query}.",
        ),
    ] = None,
    prompt_language: options.PromptLanguage = None,
    shares: Annotated[
        str | None,
        option('Weights of the parts of a recipe that has parts (topic, echo-topic, early-late), such as "1,2,2".'),
    ] = None,
    fit_texts: options.FitTexts = None,
    columns: options.Columns = None,
    separator: options.Separator = None,
    sparse: Annotated[
        bool, option("Write a SparseEncoder: the head's weights of words at the end of a prompt.", "--sparse")
    ] = False,
    multi_vector: Annotated[
        bool, option("Write a MultiVectorEncoder: a vector for each token, for search by MaxSim.", "--multi-vector")
    ] = False,
    dimensions: Annotated[
        int | None,
        option("With --multi-vector: values of a vector, by principal components of the tokens of --fit-texts.", min=1),
    ] = None,
    rerank: Annotated[
        bool,
        option(
            "Write an AttentionReranker: it reads all documents of a query in one prompt, and orders them by the "
            "query's attention (ICR).",
            "--rerank",
        ),
    ] = False,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    max_seq_length: options.MaxSeqLength = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of the saved weights. auto: the model's own."),
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
        why = "--sparse reads the last token of a prompt and nothing else"
        refuse(context, why, "--multi-vector", "--fit-texts", *pooled)
    if multi_vector:
        refuse(context, "--multi-vector keeps the vector of each token, so nothing is pooled", *pooled)
    else:
        refuse(context, "without --multi-vector no token has a vector of its own", "--dimensions")
    if fit_texts is None:
        refuse(context, "without --fit-texts nothing is read", "--columns", "--separator")
    if template is not None:
        refuse(context, "--template says which prompt is read", "--prompt-language")
    if engine == "llama.cpp":
        why = "llama.cpp runs a file's weights as they are, and hands out no head"
        refuse(context, why, "--dtype", "--sparse", "--rerank")
    options.check_columns(fit_texts, columns, separator)
    options.check_recipes([recipe] if recipe else [])
    model = options.model_or_demo(model)
    # Before what takes seconds to import.
    notes.say(f"Loading {model_name(model)}.")

    from sentence_transformers import SparseEncoder

    import st_reba
    from st_reba.files import atomic_directory
    from st_reba.modules import AttentionRerankModule, PromptRepsModule
    from st_reba.modules.attention_reranking import attention_reranker
    from st_reba.modules.multi_vector import multi_vector_encoder
    from st_reba.ready import note_recipe, prompts_or_own
    from st_reba.recipes import find

    from .load import in_asked_language, load, load_llama_cpp, quiet, say_fitted, usable

    context.with_resource(quiet())
    origin: Any = load_llama_cpp(model, max_seq_length) if engine == "llama.cpp" else model
    settings: dict[str, Any] = {} if template is None else {"template": template}
    prompts = options.prompts_of(query_prompt, document_prompt)

    def loaded(kind: Any, arguments: dict[str, Any]) -> Any:
        if engine == "llama.cpp":
            return kind(origin, **arguments)
        return load(kind, model, dtype, "cpu", max_seq_length, **arguments)

    def tell() -> None:
        what = f"the filter, {chosen.part.name}," if chosen.part else f"the projection to {dimensions} dimensions"
        say_fitted(what, len(chosen.fitted_on), fit_texts)

    if not rerank:
        chosen = find(recipe or (SPARSE if sparse else MULTI_VECTOR if multi_vector else DEFAULT))
        (chosen,) = in_asked_language([chosen], prompt_language, "en")
        if sparse:
            settings = {**_of_the_prompt(chosen), **settings}
        else:
            mode = _checked_pooling(chosen, pooling, template, multi_vector)
            by_language = not (prompt_language or template)
            chosen = _with_texts(chosen, fit_texts, dimensions, by_language, columns, separator)
            chosen = _with_shares(chosen, shares)
    with atomic_directory(out) as scratch:
        built: Any
        if rerank:
            built = attention_reranker(loaded(AttentionRerankModule, settings), device="cpu")
        elif sparse:
            own_prompts = prompts_or_own(prompts, settings)
            built = SparseEncoder(modules=[loaded(PromptRepsModule, settings)], device="cpu", prompts=own_prompts)
        elif multi_vector:
            arguments = {**chosen.row.arguments(mode, chosen.layer), **chosen.row.with_own_template(settings)}
            module = loaded(chosen.row.module, arguments)
            if dimensions:
                tell()
            own_prompts, texts = prompts_or_own(prompts, arguments), chosen.fit_texts
            built = multi_vector_encoder(module, dimension=dimensions, fit_texts=texts, prompts=own_prompts)
            note_recipe(built, chosen, settings)
        else:
            if engine == "transformers":
                settings = {**settings, "model_kwargs": {"dtype": dtype}}
            with usable(model):
                built = st_reba.build(
                    origin, chosen, pooling=mode, prompts=prompts, max_seq_length=max_seq_length, device="cpu",
                    on_fit=tell, **settings,
                )  # fmt: skip
        built.save_pretrained(str(scratch))
    family = type(built).__name__
    line = loading_line(f"st_reba.{family}" if rerank else family, out)
    console.say(f"Wrote {out}. Load it with: {line}")
    if as_json:
        key = None if rerank else chosen.key
        write_json("build", path=str(out), family=family, recipe=key, load=line)


def _of_the_prompt(chosen: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that asks at the end of a prompt.

    Raises:
        ValueError: If it is another recipe.
    """
    from st_reba.modules import CausalTransformer

    prompted = chosen.row.module is CausalTransformer and chosen.row.poolings == ("last",)
    if not prompted or chosen.part or chosen.layer is not None:
        raise ValueError(
            f"--sparse with {chosen.key}: the head is asked at the end of a prompt, behind the last layer. Give a "
            f"prompt's recipe, such as {SPARSE} or prompteol."
        )
    return dict(chosen.row.settings)


def _checked_pooling(chosen: Recipe, pooling: str | None, template: str | None, multi_vector: bool) -> str:
    """Return the pooling in ST's words.

    Raises:
        ValueError: If pooling, template or the vectors of tokens do not fit the recipe.
    """
    from st_reba.ready import check_pooling
    from st_reba.recipes import every_row
    from st_reba.recipes.recipe import POOLINGS

    if template is not None and "template" not in chosen.row.module.config_keys:
        raise ValueError(f"--template: {chosen.name} has no template of its own. Leave --template out.")
    mode = POOLINGS.get(pooling or chosen.pooling, pooling or "")
    if not multi_vector:
        check_pooling(chosen, mode, f"--pooling {mode}")
    elif chosen.part is not None:
        raise ValueError(
            f"--multi-vector: {chosen.part.name} stands around the pooling, and nothing is pooled. Give "
            f"{chosen.row.key if chosen.row.around is None else 'another recipe, such as echo-2'}."
        )
    elif not chosen.row.words:
        having = ", ".join(row.key for row in every_row() if row.words)
        raise ValueError(f"--multi-vector: {chosen.name} does not read every token. Give one of {having}.")
    return mode


def _with_shares(chosen: Recipe, shares: str | None) -> Recipe:
    """The recipe with what each part of its vectors counts for.

    Raises:
        ValueError: If these are no numbers above 0, one for each part.
    """
    if shares is None:
        return chosen
    try:
        counts = [float(share) for share in shares.split(",")]
    except ValueError:
        counts = []
    parts = chosen.row.parts
    if parts == 1 or len(counts) != parts or not all(0 < count < float("inf") for count in counts):
        raise ValueError(
            f"--shares {shares!r}: {chosen.name} has {parts} part{'s' * (parts > 1)}. With a recipe that has several, "
            "such as topic, give a number above 0 for each, with commas; else leave --shares out."
        )
    return replace(chosen, shares=tuple(count / sum(counts) for count in counts))


def _with_texts(
    chosen: Recipe,
    fit_texts: str | None,
    dimensions: int | None,
    by_language: bool,
    columns: str | None,
    separator: str | None,
) -> Recipe:
    """The recipe with the texts that its filter, or the projection of token vectors, is fitted on.

    Args:
        chosen: The recipe.
        fit_texts: The user's own texts; None: those of the package.
        dimensions: Of the projection; None: there is none.
        by_language: Whether the language of the user's texts is that of the prompt.
        columns: What theirs are called.
        separator: Of the columns; None: what is usual.

    Raises:
        ValueError: If there are texts, and nothing is fitted.
    """
    from st_reba.text.templates import language_of

    from .load import in_asked_language, texts_to_fit

    if not dimensions and not chosen.fitted:
        if fit_texts is None:
            return chosen
        raise ValueError(
            f"--fit-texts is for what is fitted on texts, such as --recipe early-late or "
            f"{chosen.row.key}+whitened; {chosen.name} is not."
        )
    texts = texts_to_fit(fit_texts, columns, separator)
    if by_language and fit_texts is not None:
        (chosen,) = in_asked_language([chosen], None, language_of(texts))
    return replace(chosen, fit_texts=tuple(texts))
