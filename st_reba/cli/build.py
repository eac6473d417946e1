"""``st-reba build``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import nn

from ..catalogue import POOLINGS, Recipe, every_row, find, matching
from ..data.demo import demo_sentences
from ..data.tables import read_texts
from ..files import check_file, whole_directory
from ..hub.card import add_recipe
from ..text.templates import PRESETS
from .common import Dtype, LengthOption, ModelOption, PoolingMode, app, clear_errors, console, load

#: Recipes by what ``--method`` calls them.
METHODS = {row.method: row for row in every_row() if row.method}
_DEFAULT = "reba"


@app.command("build")
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
            help=f"How the language model is read, in place of a recipe's name: {', '.join(METHODS)}. Default: reba.",
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
        Path | None,
        typer.Option(
            help="Plain texts, one a line, some hundreds, that what stands around the pooling is fitted on, such as "
            "the whitening behind early-late. Default: demo texts."
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    max_seq_length: LengthOption = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the saved weights; auto: the model's own.")] = Dtype.auto,
) -> None:
    """Write a ready SentenceTransformer directory."""
    with clear_errors():
        if recipe and method:
            raise ValueError("--recipe and --method say the same thing: give one of them.")
        chosen = find(recipe) if recipe else _of_method(method or _DEFAULT)
        mode = POOLINGS[chosen.pooling] if pooling is None else POOLINGS.get(pooling.value, pooling.value)
        settings = _settings(
            chosen, repetitions=repetitions, layers=_layers(layers), chunk_length=chunk_length, template=template
        )
        _check_pooling(chosen, mode)
        if dtype is Dtype.fastest:
            raise ValueError("--dtype fastest is for running a model: to save one, give float32, bfloat16 or float16.")
        chosen = replace(chosen, fit_texts=tuple(_fit_texts(chosen, fit_texts)))
        with whole_directory(out) as scratch:
            arguments = {**chosen.row.arguments(mode, chosen.layer), **settings}
            module = load(chosen.row.module, model, max_seq_length, dtype, **arguments)
            parts: list[nn.Module] = [*chosen.weighed(module), Pooling(module.get_embedding_dimension(), mode)]
            if chosen.filter is not None:
                parts.append(chosen.filter(SentenceTransformer(modules=parts, device="cpu")))
            built = SentenceTransformer(modules=[*parts, Normalize()] if normalize else parts, device="cpu")
            row = matching(chosen.row.module, {**chosen.row.settings, **settings})
            if row is not None:
                named = replace(chosen, row=row)
                add_recipe(built, named.name, named.spec, named.says, row.citation)
            built.save_pretrained(str(scratch))
    console.print(f'Wrote {out}. Load it with: import st_reba; SentenceTransformer("{out}")', soft_wrap=True)


def _of_method(method: str) -> Recipe:
    if method not in METHODS:
        raise ValueError(
            f"There is no --method {method}: give one of {', '.join(METHODS)}; or --recipe with the name or key of any "
            "row of any table."
        )
    row = METHODS[method]
    return Recipe(row, row.poolings[0], around=row.around)


def _settings(chosen: Recipe, **given: Any) -> dict[str, Any]:
    """The module's arguments that the user gives; refuses those that the module does not have."""
    module, settings = chosen.row.module, {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in module.config_keys:
            having = [method for method, row in METHODS.items() if name in row.module.config_keys]
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
    if chosen.around is not None and len(fitting) == 1 and mode not in fitting:
        raise ValueError(f"--pooling {mode}: {chosen.name} is pooled by {fitting[0]}; use that, or leave it out.")


def _fit_texts(chosen: Recipe, path: Path | None) -> list[str]:
    """What stands around the pooling is fitted on; nothing where nothing is."""
    if not chosen.fitted:
        if path is not None:
            raise ValueError(
                f"--fit-texts is for what is fitted on texts, such as --method early-late or --recipe "
                f"{chosen.row.key}+whitened; {chosen.name} is not."
            )
        return []
    check_file(path, "--fit-texts")
    texts = demo_sentences() if path is None else read_texts(path)
    hint = ", sentences inside the package: give --fit-texts with some hundreds like your own" if path is None else ""
    console.print(f"Fitting what is {chosen.filtered} on {len(texts)} texts{hint}.", soft_wrap=True)
    return texts


def _layers(layers: str | None) -> str | list[int] | None:
    if layers is None or layers == "all":
        return layers
    try:
        return [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f'--layers {layers!r}: use "all" or indices separated by commas, such as "-1,-2".') from None
