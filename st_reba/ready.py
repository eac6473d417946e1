"""A recipe on a language model as a ready model, in one call: what ``st-reba build`` writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import nn

from .data.demo import demo_sentences
from .hub.card import add_recipe
from .modules import CausalModule
from .recipes import Recipe, find
from .recipes.lookup import in_language, matching
from .recipes.recipe import device_of, mode_of
from .text.templates import PROMPT, PromptLanguage, language_of, preset

#: What suits most models and texts, as ``benchmarks/results/held_out.csv`` has it.
RECOMMENDED = "echo-topic"

logger = logging.getLogger(__name__)


def build(
    model_name_or_path: str | PathLike[str] | nn.Module,
    recipe: str | Recipe = RECOMMENDED,
    texts: Iterable[str] | None = None,
    *,
    language: PromptLanguage | None = None,
    pooling: str | None = None,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    max_seq_length: int | None = None,
    device: str | None = None,
    on_fit: Callable[[], None] | None = None,
    **settings: Any,
) -> SentenceTransformer:
    """A recipe on a language model, as a ready ``SentenceTransformer``.

    It is the model that ``st-reba build --recipe`` writes: the recipe's module, its pooling, what is fitted behind
    that, and ``Normalize``. ``save_pretrained`` and ``push_to_hub`` keep it::

        model = st_reba.build("HuggingFaceTB/SmolLM2-135M-Instruct", "echo-topic", texts=texts)

    Args:
        model_name_or_path: A decoder-only model's path or Hub id; or a loaded ``Transformer`` to share; or a language
            model that the program has loaded, with ``tokenizer=`` among the settings: its weights are shared, and it
            generates as before, also meanwhile.
        recipe: A row of any table, by its key or its name: ``"echo-topic"``, ``"prompteol+whitened"``, ``"ReBA-2"``.
            Left out: ``"echo-topic"``, which is ahead of the others on most of the sets in ``benchmarks/RESULTS.md``.
        texts: Plain texts like those to embed, some fifty or more, without labels. What the recipe has behind its
            pooling is fitted on them, and its prompt is in their language. None: it is fitted on the sentences of the
            package, with a logged line that says so, and the prompt is in English.
        language: That of the prompt, ``"en"`` or ``"zh"``. None: that of ``texts``.
        pooling: ``"mean"``, ``"last"`` or another mode of ST's ``Pooling``. None: the recipe's own.
        normalize: Whether embeddings have length 1.
        prompts: What stands before a ``"query"`` and before a ``"document"``. None: what the recipe's authors put
            there, where they put something.
        max_seq_length: Tokens of one copy of a text. None: as many as the model has room for.
        device: Where the model is. None: as ``SentenceTransformer`` chooses, or where a loaded language model is.
        on_fit: Called when the language model is loaded, before something is fitted on the texts.
        **settings: More arguments of the recipe's module: ``template``, ``repetitions``, ``model_kwargs`` and so on.

    Raises:
        ValueError: If there is no such recipe, or it does not go with the model, a setting or the texts.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: give an iterable of texts, such as a list.")
    if isinstance(model_name_or_path, nn.Module) and device is not None and "tokenizer" in settings:
        raise ValueError(
            f"device={device!r}: a loaded language model stays where it is. Move it yourself, or leave device out."
        )
    if isinstance(recipe, str):
        recipe = _asked_for(recipe, () if texts is None else tuple(texts), language, settings.get("template"))
    mode = mode_of(recipe.pooling if pooling is None else pooling)
    check_pooling(recipe, mode, f"pooling={pooling!r}")
    own = recipe.row.with_own_template({**recipe.settings, **settings})
    arguments = {**recipe.row.arguments(mode, recipe.layer), **own}
    if isinstance(model_name_or_path, str | PathLike):
        arguments.setdefault("model_kwargs", {"dtype": "auto"})
    module = recipe.row.module(cast(Any, model_name_or_path), **arguments)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    if isinstance(module, CausalModule) and module.is_borrowed:
        device = device_of(module)
    if recipe.fitted and not recipe.fit_texts:
        recipe = replace(recipe, fit_texts=tuple(demo_sentences()))
        logger.warning(
            "%s is fitted on %d sentences of the package. For better vectors give fifty texts or more of your own: "
            "texts=[...].",
            recipe.name,
            len(recipe.fitted_on),
        )
    if recipe.fitted and on_fit is not None:
        on_fit()
    parts = recipe.pipeline(module, mode)
    if recipe.filter is not None:
        pooled = SentenceTransformer(modules=parts, device=device)
        parts.append(recipe.filter.made(pooled, recipe.fit_texts, recipe.shares))
    if normalize:
        parts.append(Normalize())
    prompts = prompts_or_own(prompts, arguments)
    built = SentenceTransformer(modules=parts, device=device, prompts=prompts or None)
    if PROMPT in preset(arguments.get("template", "")).template and prompts.get("document"):
        # Without a prompt such a template reads nothing: texts are read as documents where nobody says otherwise.
        built.default_prompt_name = "document"
    note_recipe(built, recipe, settings)
    return built


def _asked_for(name: str, texts: Sequence[str], language: PromptLanguage | None, template: str | None) -> Recipe:
    """A recipe by its name, to be fitted on texts, in the language that is asked for or theirs."""
    found = replace(find(name), fit_texts=tuple(texts))
    if language is not None:
        if template is not None:
            raise ValueError("template and language both say which prompt is read: give one of them.")
        if language not in found.row.prompt_languages:
            asks = " or ".join(map(repr, found.row.prompt_languages)) or "no language of its own"
            raise ValueError(
                f"language={language!r}: {found.key} asks in {asks}. Leave language out, or give a recipe that can, "
                "such as prompteol."
            )
    elif texts and template is None:
        language = language_of(texts)
    (found,) = in_language([found], language or "en")
    return found


def check_pooling(recipe: Recipe, mode: str, said: str) -> None:
    """Refuse a pooling that what stands around it does not fit.

    Args:
        recipe: The recipe.
        mode: As ST calls it.
        said: How it was asked for.

    Raises:
        ValueError: If it does not.
    """
    fitting = [mode_of(pooling) for pooling in recipe.poolings]
    if recipe.part is not None and len(fitting) == 1 and mode not in fitting:
        raise ValueError(f"{said}: {recipe.name} is pooled by {fitting[0]}; use that, or leave it out.")


def prompts_or_own(prompts: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    """These prompts; None: what the authors of a module's template put before queries and documents."""
    return dict(preset(arguments.get("template", "")).prompts if prompts is None else prompts)


def note_recipe(model: Any, recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Put the recipe on a model's card, unless with these settings of its module it is no listed recipe any more."""
    own = {name: value for name, value in settings.items() if name in recipe.row.module.config_keys}
    row = matching(recipe.row.module, {**recipe.row.settings, **own})
    if row is not None:
        named = replace(recipe, row=row)
        add_recipe(model, named.name, named.key, named.says, row.citation)
