"""Build a recipe on a language model as a ready model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from os import PathLike
from typing import Any, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import nn

from .data.demo import demo_sentences
from .hub.card import add_recipe
from .hub.loading import ModelSource
from .lm.views import is_borrowed
from .recipes import Recipe, find
from .recipes.lookup import in_language, matching
from .recipes.recipe import device_of, mode_of
from .settings import check
from .text.presets import PromptLanguage, language_of, preset
from .text.templates import PROMPT

#: Recipe for most models and texts: see ``benchmarks/results/grid.csv``.
RECOMMENDED = "echo-topic"

logger = logging.getLogger(__name__)


def build(
    model_name_or_path: ModelSource,
    recipe: str | Recipe = RECOMMENDED,
    texts: Iterable[str] | None = None,
    *,
    language: PromptLanguage | None = None,
    pooling: str | None = None,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    max_seq_length: int | None = None,
    device: str | None = None,
    **settings: Any,
) -> SentenceTransformer:
    """Build a recipe on a language model as a ready ``SentenceTransformer``.

    The model consists of the recipe's module, its pooling, its filter and ``Normalize``, as ``st-reba build --recipe``
    writes it::

        model = st_reba.build("HuggingFaceTB/SmolLM2-135M-Instruct", "echo-topic", texts=texts)

    Args:
        model_name_or_path: Path or Hub id of a decoder-only model; or a loaded ``Transformer``; or a language model
            that the program has loaded, with ``tokenizer=`` among the settings. Weights of a loaded one are shared, and
            it can generate meanwhile.
        recipe: Key or name of a recipe in any table: ``"echo-topic"``, ``"prompteol+whitened"``, ``"ReBA-2"``.
        texts: Plain texts like those to embed, fifty or more, without labels. The filter is fitted on them, and the
            prompt is in their language. None: the filter is fitted on sentences of the package, which is logged, and
            the prompt is in English.
        language: Language of the prompt, ``"en"`` or ``"zh"``. None: that of ``texts``.
        pooling: ``"mean"``, ``"last"`` or another mode of ``Pooling``. None: the recipe's own.
        normalize: Whether embeddings have length 1.
        prompts: Text before a ``"query"`` and before a ``"document"``. None: those of the recipe's authors.
        max_seq_length: Number of tokens of one copy of a text. None: as many as fit the model.
        device: Device of the model. None: the choice of ``SentenceTransformer``, or that of a loaded language model.
        **settings: Further arguments of the recipe's module: ``template``, ``repetitions``, ``model_kwargs`` and so on.

    Raises:
        ValueError: If there is no such recipe, or it does not fit the model, a setting or the texts.
    """
    texts = texts if isinstance(texts, str) else tuple(() if texts is None else texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts is one string, or has something else than strings: give an iterable of texts.")
    template = settings.get("template")
    _check_types(pooling, template, prompts)
    if isinstance(model_name_or_path, nn.Module) and device is not None and "tokenizer" in settings:
        problem = f"device={device!r}: a loaded language model stays where it is."
        raise ValueError(f"{problem} Move it yourself, or leave device out.")
    if not isinstance(recipe, Recipe):
        recipe = _named(str(recipe), texts, language, template)
    mode = mode_of(recipe.pooling if pooling is None else pooling)
    fitting = [*map(mode_of, recipe.poolings)]
    if recipe.post_processor is not None and len(fitting) == 1 and mode not in fitting:
        raise ValueError(f"pooling={pooling!r}: {recipe.name} is pooled by {fitting[0]}; use that, or leave it out.")
    arguments = recipe.arguments(mode, **settings)
    if isinstance(model_name_or_path, str | PathLike):
        arguments.setdefault("model_kwargs", {"dtype": "auto"})
    module = recipe.row.module(cast(Any, model_name_or_path), **arguments)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    if is_borrowed(module.model):
        device = device_of(module)
    if recipe.fitted and not recipe.fit_texts:
        recipe = replace(recipe, fit_texts=tuple(demo_sentences()))
        fitted = f"{recipe.name} is fitted on {len(recipe.fitted_on)} sentences of the package."
        logger.warning("%s For better vectors give fifty texts or more of your own: texts=[...].", fitted)
    parts = recipe.pipeline(module, mode)
    if recipe.filter is not None:
        pooled = SentenceTransformer(modules=parts, device=device)
        parts.append(recipe.filter.fit(pooled, recipe.fit_texts, recipe.part_weights))
    if normalize:
        parts.append(Normalize())
    prompts = prompts_or_own(prompts, arguments)
    built = SentenceTransformer(modules=parts, device=device, prompts=prompts or None)
    if PROMPT in preset(arguments.get("template") or "").template and prompts.get("document"):
        # Such a template needs a prompt: texts are documents unless the caller says otherwise.
        built.default_prompt_name = "document"
    note_recipe(built, recipe, settings)
    return built


def _check_types(pooling: Any, template: Any, prompts: Any) -> None:
    """Check arguments whose type would otherwise raise an error of a library, after the model is loaded."""
    advice = 'give a name, such as "mean" or "last", or leave it out.'
    check("pooling", pooling, isinstance(pooling, str | list | tuple | None), advice)
    advice = "give one text with {text}, or a name in st_reba.TEMPLATES; metaeol takes several, as templates=[...]."
    check("template", template, isinstance(template, str | None), advice)
    are_strings = prompts is None or (
        isinstance(prompts, Mapping) and all(isinstance(text, str | None) for text in chain(*prompts.items()))
    )
    check("prompts", prompts, are_strings, 'give strings by their names, such as {"query": "query: "}.')


def _named(name: str, texts: Sequence[str], language: PromptLanguage | None, template: str | None) -> Recipe:
    """Return a recipe by its name, to be fitted on texts, in the given language or theirs."""
    recipe = replace(find(name), fit_texts=tuple(texts))
    if language is not None:
        if template is not None:
            raise ValueError("template and language both say which prompt is read: give one of them.")
        if language not in recipe.row.prompt_languages:
            known = " or ".join(map(repr, recipe.row.prompt_languages)) or "no language of its own"
            problem = f"language={language!r}: {recipe.key} asks in {known}."
            raise ValueError(f"{problem} Leave language out, or give a recipe that can, such as prompteol.")
    elif texts and template is None:
        language = language_of(texts)
    [recipe] = in_language([recipe], language or "en")
    return recipe


def prompts_or_own(prompts: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return prompts; if there are none, those of the authors of a module's template."""
    return dict(preset(arguments.get("template", "")).prompts if prompts is None else prompts)


def note_recipe(model: Any, recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Note the recipe on a model's card, unless these settings of its module make it one that is not listed."""
    saved = {name: value for name, value in settings.items() if name in recipe.row.module.config_keys}
    row = matching(recipe.row.module, {**recipe.row.settings, **saved})
    if row is not None:
        add_recipe(model, replace(recipe, row=row))
