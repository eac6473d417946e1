"""What ``st-reba build`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize

from st_reba.data.demo import texts_to_fit
from st_reba.files import atomic_directory
from st_reba.hub.card import add_recipe
from st_reba.modules import CausalModule, CausalTransformer, PromptRepsModule, RerankModule
from st_reba.modules.multi_vector import multi_vector_encoder
from st_reba.modules.reranking import cross_encoder
from st_reba.recipes import Recipe, Row, every_row, find
from st_reba.recipes.lookup import matching
from st_reba.recipes.parts import POOLINGS
from st_reba.text.templates import PRESETS, language_of, preset

from ..build import SavedDtype, layers_of
from ..common import Dtype, Language, PoolingMode
from ..data import prompts_of
from ..methods import DEFAULT, METHODS
from ..printing import console
from .models import load
from .prompts import in_asked_language

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
    if rerank:
        settings = {} if template is None else {"template": template}
        _write(
            out, lambda: cross_encoder(_loaded(RerankModule, model, max_seq_length, precision, settings), device="cpu")
        )
        return
    if sparse:
        chosen = find(recipe or (METHODS[method] if method else SPARSE))
        (chosen,) = in_asked_language([chosen], prompt_language, "en")
        settings = _sparse_settings(chosen, template, expansion=expansion, top_k=top_k)
        prompts = _prompts(query_prompt, document_prompt, settings)
        _write(
            out,
            lambda: SparseEncoder(
                modules=[_loaded(PromptRepsModule, model, max_seq_length, precision, settings)],
                device="cpu",
                prompts=prompts,
            ),
        )
        return
    chosen = find(recipe) if recipe else _of_method(method or DEFAULT)
    (chosen,) = in_asked_language([chosen], prompt_language, "en")
    mode = POOLINGS[chosen.pooling] if pooling is None else POOLINGS.get(pooling.value, pooling.value)
    settings = _settings(
        chosen, repetitions=repetitions, layers=layers_of(layers), chunk_length=chunk_length, template=template
    )
    if multi_vector:
        _check_tokens(chosen)
    else:
        _check_pooling(chosen, mode)
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
        arguments = {**chosen.row.arguments(mode, chosen.layer), **settings}
        prompts = _prompts(query_prompt, document_prompt, arguments)
        module = load(chosen.row.module, model, max_seq_length, precision, **arguments)
        if multi_vector:
            built: Any = multi_vector_encoder(
                module,
                dimension=dimensions,
                fit_texts=texts,
                skip_punctuation=skip_punctuation is not False,
                normalize=normalize,
                prompts=prompts,
            )
        else:
            built = _pooled(chosen, module, mode, normalize, prompts)
        row = matching(chosen.row.module, {**chosen.row.settings, **settings})
        if row is not None:
            named = replace(chosen, row=row)
            add_recipe(built, named.name, named.key, named.says, row.citation)
        built.save_pretrained(str(scratch))
    console.print(f'Wrote {out}. Load it with: import st_reba; {type(built).__name__}("{out}")', soft_wrap=True)


def _pooled(
    chosen: Recipe, module: CausalModule, mode: str, normalize: bool, prompts: dict[str, str]
) -> SentenceTransformer:
    """One vector a text."""
    parts = chosen.pipeline(module, mode)
    if chosen.filter is not None:
        parts.append(chosen.filter.made(SentenceTransformer(modules=parts, device="cpu"), chosen.fit_texts))
    if normalize:
        parts.append(Normalize())
    return SentenceTransformer(modules=parts, device="cpu", prompts=prompts or None)


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


def _prompts(query: str | None, document: str | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """What the user puts before queries and documents, or else what the authors of the template do."""
    if query is None and document is None:
        return dict(preset(settings.get("template", "")).prompts)
    return prompts_of(query, document)


def _of_method(method: str) -> Recipe:
    row = _row(method)
    return Recipe(row, row.poolings[0], part=row.around)


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
    if template := settings.get("template"):
        read = {} if template in PRESETS else chosen.row.own_template
        settings.update({name: value for name, value in read.items() if name in module.config_keys})
    return settings


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _check_pooling(chosen: Recipe, mode: str) -> None:
    """Refuse a pooling that what stands around it does not fit."""
    fitting = [POOLINGS[pooling] for pooling in chosen.poolings]
    if chosen.part is not None and len(fitting) == 1 and mode not in fitting:
        raise ValueError(f"--pooling {mode}: {chosen.name} is pooled by {fitting[0]}; use that, or leave it out.")


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
    console.print(f"Fitting {fitted} on {len(texts)} texts{hint}.", soft_wrap=True)
    return texts
