"""What ``st-reba build`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sentence_transformers import CrossEncoder, SparseEncoder

from st_reba.files import atomic_directory
from st_reba.modules import CausalModule, CausalTransformer, PromptRepsModule, RerankModule
from st_reba.modules.multi_vector import multi_vector_encoder
from st_reba.modules.reranking import cross_encoder
from st_reba.ready import build, check_pooling, note_recipe, prompts_or_own
from st_reba.recipes import Recipe, Row, every_row, find
from st_reba.recipes.recipe import POOLINGS
from st_reba.text.templates import language_of

from ..build import SavedDtype, layers_of
from ..common import STAND_IN, Dtype, Language, PoolingMode
from ..data import prompts_of
from ..methods import DEFAULT, METHODS
from ..printing import console
from .given import texts_to_fit
from .models import load, usable
from .prompts import in_asked_language
from .stand_in import stand_in

#: The recipe whose prompt is read where nothing else is asked for with ``--sparse``.
SPARSE = "promptreps"

Module = TypeVar("Module", bound=CausalModule)


def run(
    *,
    model: str,
    out: Path,
    recipe: str | None,
    method: str | None,
    pooling: PoolingMode | None,
    repetitions: int | None,
    layers: str | None,
    chunk_length: int | None,
    template: str | None,
    fit_texts: str | None,
    prompt_language: Language | None,
    sparse: bool,
    expansion: int | None,
    top_k: int | None,
    rerank: bool,
    query_prompt: str | None,
    document_prompt: str | None,
    multi_vector: bool,
    dimensions: int | None,
    skip_punctuation: bool | None,
    normalize: bool,
    max_seq_length: int | None,
    dtype: SavedDtype,
) -> None:
    """Write a ready directory of a SentenceTransformer, or of another family of models."""
    precision = Dtype(dtype.value)
    prompts = None if query_prompt is None and document_prompt is None else prompts_of(query_prompt, document_prompt)
    if rerank:
        settings: dict[str, Any] = {} if template is None else {"template": template}
        _write(
            out, lambda: cross_encoder(_loaded(RerankModule, model, max_seq_length, precision, settings), device="cpu")
        )
        return
    if sparse:
        chosen = find(recipe or (METHODS[method] if method else SPARSE))
        (chosen,) = in_asked_language([chosen], prompt_language, "en")
        settings = _sparse_settings(chosen, template, expansion=expansion, top_k=top_k)
        _write(
            out,
            lambda: SparseEncoder(
                modules=[_loaded(PromptRepsModule, model, max_seq_length, precision, settings)],
                device="cpu",
                prompts=prompts_or_own(prompts, settings),
            ),
        )
        return
    chosen = find(recipe or METHODS[method or DEFAULT])
    (chosen,) = in_asked_language([chosen], prompt_language, "en")
    mode = POOLINGS[chosen.pooling] if pooling is None else POOLINGS.get(pooling.value, pooling.value)
    settings = _settings(
        chosen, repetitions=repetitions, layers=layers_of(layers), chunk_length=chunk_length, template=template
    )
    if multi_vector:
        _check_tokens(chosen)
    else:
        check_pooling(chosen, mode, f"--pooling {mode}")
    fitted = f"the projection to {dimensions} dimensions" if dimensions else ""
    texts = tuple(
        _fit_texts(
            chosen,
            fit_texts,
            fitted or (f"what is {chosen.part.name}" if chosen.part is not None and chosen.part.fitted else ""),
        )
    )
    if prompt_language is None and template is None and fit_texts is not None:
        (chosen,) = in_asked_language([chosen], None, language_of(texts))
    chosen = replace(chosen, fit_texts=texts)
    with atomic_directory(out) as scratch:
        if multi_vector:
            arguments = {**chosen.row.arguments(mode, chosen.layer), **chosen.row.with_own_template(settings)}
            built: Any = multi_vector_encoder(
                load(chosen.row.module, model, max_seq_length, precision, **arguments),
                dimension=dimensions,
                fit_texts=texts,
                skip_punctuation=skip_punctuation is not False,
                normalize=normalize,
                prompts=prompts_or_own(prompts, arguments),
            )
            note_recipe(built, chosen, settings)
        else:
            source = str(stand_in()) if model == STAND_IN else model
            with usable(source):
                built = build(
                    source,
                    chosen,
                    pooling=mode,
                    normalize=normalize,
                    prompts=prompts,
                    max_seq_length=max_seq_length,
                    device="cpu",
                    model_kwargs={"dtype": precision.value},
                    **settings,
                )
        built.save_pretrained(str(scratch))
    console.print(f'Wrote {out}. Load it with: import st_reba; {type(built).__name__}("{out}")', soft_wrap=True)


def _write(out: Path, make: Callable[[], SparseEncoder | CrossEncoder]) -> None:
    """Write a model of another family than SentenceTransformer."""
    with atomic_directory(out) as scratch:
        built = make()
        built.save_pretrained(str(scratch))
    family = type(built).__name__
    console.print(
        f'Wrote {out}. Load it with: import st_reba; from sentence_transformers import {family}; {family}("{out}")',
        soft_wrap=True,
    )


def _loaded(
    kind: type[Module], model: str, max_seq_length: int | None, dtype: Dtype, settings: Mapping[str, Any]
) -> Module:
    loaded = load(kind, model, max_seq_length, dtype, **settings)
    assert isinstance(loaded, kind)
    return loaded


def _sparse_settings(chosen: Recipe, template: str | None, **given: Any) -> dict[str, Any]:
    """What a recipe says of its prompt, and what the user says besides.

    Raises:
        ValueError: If the recipe is not read at the end of a prompt, as it is.
    """
    row = chosen.row
    if row.module is not CausalTransformer or row.poolings != ("last",) or chosen.part or chosen.layer is not None:
        raise ValueError(
            f"--sparse with {chosen.key}: the head is asked at the end of a prompt, behind the last layer. Give a "
            f"prompt's recipe, such as {SPARSE} or prompteol."
        )
    settings = {**row.settings, **({} if template is None else {"template": template})}
    return {**settings, **{name: value for name, value in given.items() if value is not None}}


def _row(method: str) -> Row:
    return next(row for row in every_row() if row.key == METHODS[method])


def _settings(chosen: Recipe, **given: Any) -> dict[str, Any]:
    """The module's arguments that the user gives; refuses those that the module does not have."""
    module, settings = chosen.row.module, {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in module.config_keys:
            having = [method for method in METHODS if name in _row(method).module.config_keys]
            raise ValueError(f"--{name.replace('_', '-')} is for --method {_either(having)}; {chosen.name} has none.")
        settings[name] = value
    return settings


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _check_tokens(chosen: Recipe) -> None:
    """Refuse a recipe that has no vector of its own for each token."""
    if chosen.part is not None:
        raise ValueError(
            f"--multi-vector: {chosen.part.name} stands around the pooling, and nothing is pooled. Give "
            f"{chosen.row.key if chosen.row.around is None else 'another recipe, such as echo-2'}."
        )
    if not chosen.row.words:
        having = [row.key for row in every_row() if row.words]
        raise ValueError(f"--multi-vector: {chosen.name} does not read every token. Give one of {', '.join(having)}.")


def _fit_texts(chosen: Recipe, path: str | None, fitted: str) -> list[str]:
    """What something is fitted on; nothing where nothing is.

    Args:
        chosen: The recipe.
        path: The user's own texts.
        fitted: What is fitted.
    """
    if not fitted:
        if path is not None:
            raise ValueError(
                f"--fit-texts is for what is fitted on texts, such as --method early-late or --recipe "
                f"{chosen.row.key}+whitened; {chosen.name} is not."
            )
        return []
    texts = texts_to_fit(path)
    hint = ", sentences inside the package: give --fit-texts with some hundreds like your own" if path is None else ""
    count = len(texts) if chosen.part is None else len(chosen.part.drawn(texts))
    console.print(f"Fitting {fitted} on {count} texts{hint}.", soft_wrap=True)
    return texts
