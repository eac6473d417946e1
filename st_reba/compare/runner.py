"""Texts as every recipe reads them: embedded once, by all recipes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..catalogue import POOLINGS, Recipe, bags_of_input_embeddings, default_recipes, find, random_model
from ..lm.set_aside import set_aside
from ..modules import CausalModule, CausalTransformer
from ..modules.after_pooling.choices import HEAD_FILTER, Weighting
from ..modules.after_pooling.moments import Moments
from ..modules.fingerprint import fingerprint, fingerprint_of, fingerprint_of_head
from ..readers.sweep import RecipeSweep
from ..readers.words import encode_words, find_words, pool_words
from .timing import costs

# How many of the texts that were embedded are kept, for those that are timed to be taken from.
_SAMPLE = 1024
# Texts that filters are fitted on are embedded so many at a time, sorted by length.
_CHUNK = 1024


class RecipeReader:
    """Texts as many recipes read them, on one backbone.

    Recipes that differ only in what stands after the pooling, or in the pooling, come out of one pass; and what stands
    after the pooling is fitted for all of them on one pass over the texts for that.

    Args:
        backbone: The loaded model, whose weights are shared.
        recipes: What to run.
        batch_size: Texts at a time.

    Attributes:
        recipes: Those that this backbone can run.
        skipped: The others, and why.
    """

    def __init__(self, backbone: CausalModule, recipes: Sequence[Recipe], batch_size: int = 32) -> None:
        self.backbone = backbone
        self.batch_size = batch_size
        self.skipped: list[tuple[Recipe, str]] = []
        self._sweep = _sweep(backbone, recipes)
        self._alone: dict[_Run, _Method] = {}
        runs: dict[_Run, list[Recipe]] = {}
        for recipe in recipes:
            if not self._swept(recipe):
                runs.setdefault(_run(recipe), []).append(recipe)
        for run, group in runs.items():
            try:
                self._alone[run] = _Method(backbone, group)
            except ValueError as error:
                self.skipped += [(recipe, str(error)) for recipe in group]
        self._filters = self._fitted(self._left(recipes))
        self.recipes = self._left(recipes)

    def _left(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        left_out = {recipe.key for recipe, _ in self.skipped}
        return [recipe for recipe in recipes if recipe.key not in left_out]

    def _swept(self, recipe: Recipe) -> bool:
        return self._sweep is not None and recipe.copies is not None

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by the recipes' keys, each (B, D), float32, on the CPU."""
        found = self._pooled(texts, self.recipes, prompt)
        return {recipe.key: self._filter(recipe, found[_reading(recipe)]) for recipe in self.recipes}

    def _pooled(
        self, texts: Sequence[str], recipes: Sequence[Recipe], prompt: str | None = None
    ) -> dict[_Reading, Tensor]:
        """What these recipes give before their filters, each (B, D)."""
        found: dict[_Reading, Tensor] = {}
        if self._sweep is not None and (swept := [recipe for recipe in recipes if self._swept(recipe)]):
            vectors = self._sweep.encode(texts, prompt, self.batch_size)
            found.update({_reading(recipe): vectors[recipe.method, POOLINGS[recipe.pooling]] for recipe in swept})
        for run in dict.fromkeys(_run(recipe) for recipe in recipes if not self._swept(recipe)):
            for pooling, pooled in self._alone[run].embed(texts, prompt, self.batch_size).items():
                found[run, pooling] = pooled
        return found

    def _fitted(self, recipes: Sequence[Recipe]) -> dict[str, nn.Module]:
        """What stands after the pooling, by the recipes' keys; recipes for which it cannot be made are left out."""
        filtered = [(recipe, recipe.filter) for recipe in recipes if recipe.filter is not None]
        moments: dict[tuple[_Reading, tuple[str, ...]], Moments | ValueError] = {}
        for texts in dict.fromkeys(made.texts for _, made in filtered if made.name != HEAD_FILTER):
            on_them = [recipe for recipe, made in filtered if made.texts == texts and made.name != HEAD_FILTER]
            moments.update({(reading, texts): own for reading, own in self._moments(texts, on_them).items()})
        head: nn.Module | None = None
        found = {}
        for recipe, made in filtered:
            try:
                if made.name == HEAD_FILTER:
                    # The same for all, and on a large model not cheap.
                    head = head or made(recipe.pooled(self.backbone))
                    found[recipe.key] = head
                    continue
                own = moments.get((_reading(recipe), made.texts))
                if not isinstance(own, Moments):
                    raise own or ValueError("No texts were given to fit it on.")
                found[recipe.key] = made.from_moments(own, self._shares(recipe))
            except ValueError as error:
                self.skipped.append((recipe, str(error)))
        return found

    def _moments(self, texts: Sequence[str], recipes: Sequence[Recipe]) -> dict[_Reading, Moments | ValueError]:
        """Mean and covariance of what these recipes give these texts before their filters; or why there are none."""
        ordered = sorted(texts, key=len, reverse=True)
        found: dict[_Reading, Moments | ValueError] = {}
        for start in range(0, len(ordered), _CHUNK):
            for reading, vectors in self._pooled(ordered[start : start + _CHUNK], recipes).items():
                moments = found.setdefault(reading, Moments(vectors.shape[1]))
                try:
                    if isinstance(moments, Moments):
                        # Texts without tokens, which are embedded as zero vectors, do not count.
                        moments.add(vectors[vectors.any(dim=1)])
                except ValueError as error:
                    found[reading] = error
        return found

    def _shares(self, recipe: Recipe) -> Sequence[float]:
        """How much each part of a recipe's vectors counts."""
        return CausalModule.SHARES if self._swept(recipe) else self._alone[_run(recipe)].module.SHARES

    def model(self, recipe: Recipe) -> SentenceTransformer:
        """One of the recipes as a ready model."""
        pooled = recipe.pooled(self.backbone)
        if recipe.filter is None:
            return pooled
        modules = [*pooled.children(), self._filters[recipe.key]]
        return SentenceTransformer(modules=modules, device=str(self.backbone.model.device))

    @torch.inference_mode()
    def _filter(self, recipe: Recipe, vectors: Tensor) -> Tensor:
        module = self._filters.get(recipe.key)
        if module is None:
            return vectors
        return module({"sentence_embedding": vectors.to(self.backbone.model.device)})["sentence_embedding"].cpu()

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """The embedding of one word in each sentence, by the recipes' names, each (B, D): see :func:`encode_words`."""
        result = {
            method.words: encode_words(method.model, sentences, words, batch_size=self.batch_size)
            for method in self._alone.values()
            if method.words
        }
        swept = [recipe for recipe in self.recipes if self._swept(recipe) and recipe.words]
        if self._sweep is not None and swept:
            # Each recipe truncates a long sentence in its own way.
            found = {name: find_words(self._sweep.module(name), sentences, words) for name in self._sweep.recipes}
            vectors: dict[str, list[Tensor]] = {recipe: [] for recipe in self._sweep.recipes}
            tokens = self._sweep.token_embeddings(sentences, batch_size=self.batch_size)
            for number, readings in enumerate(tokens):
                for name, own in vectors.items():
                    own.append(pool_words([readings[name]], [found[name][number]])[0])
            for recipe in swept:
                result[recipe.name] = torch.stack(vectors[recipe.method]).numpy()
        return result


#: What runs the language model: a method, and what weighs its tokens; and that with a pooling behind it.
_Run = tuple[str, Weighting | None]
_Reading = tuple[_Run, str]


def _run(recipe: Recipe) -> _Run:
    return recipe.method, recipe.weighting


def _reading(recipe: Recipe) -> _Reading:
    return _run(recipe), recipe.pooling


class _Method:
    """The recipes that run the model alike: one module, whose tokens are pooled in every way.

    Attributes:
        module: What runs the model.
        words: Name of the recipe that has word embeddings; empty if none has.
    """

    def __init__(self, backbone: CausalModule, recipes: Sequence[Recipe]) -> None:
        # One that is made for the last token alone may hand on no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        self.module = module = widest.build(backbone)
        worded = next((recipe.name for recipe in recipes if recipe.words), "")
        self.words = worded if getattr(module, "rows", "all") == "all" else ""
        self.poolings = list(dict.fromkeys(recipe.pooling for recipe in recipes))
        modes = tuple(POOLINGS[pooling] for pooling in self.poolings)
        parts = [*widest.weighed(module), Pooling(module.get_embedding_dimension(), modes)]
        self.model = SentenceTransformer(modules=parts, device=str(backbone.model.device))

    def embed(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> dict[str, Tensor]:
        """By pooling, each (B, D), float32, on the CPU."""
        vectors = self.model.encode(
            list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return dict(zip(self.poolings, vectors.float().cpu().chunk(len(self.poolings), dim=1), strict=True))


def _sweep(backbone: CausalModule, recipes: Sequence[Recipe]) -> RecipeSweep | None:
    """One pass for the recipes that it serves; None where there are none, or this backbone has no attention to see."""
    copies = [recipe.copies for recipe in recipes if recipe.copies is not None]
    if not copies:
        return None
    poolings = dict.fromkeys(POOLINGS[recipe.pooling] for recipe in recipes if recipe.copies is not None)
    try:
        return RecipeSweep(backbone, repetitions=max(copies), poolings=list(poolings))
    except ValueError:
        return None


class Recipes:
    """Recipes on one model, and the controls that cost next to nothing: bags of its input embeddings.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        recipes: What to compare; :func:`st_reba.catalogue.default_recipes` if None.
        batch_size: Texts at a time.
        on_progress: Called when something has been done, with what it was and to how many texts.

    Attributes:
        all: The recipes that this backbone can run, controls among them.
        skipped: Keys of the others, and why.
        lengths: Tokens of each text that was embedded.
        sample: Texts drawn evenly from all that were embedded, or all of them if they are few: what costs are measured
            on. Evenly, because those that come first are the longest: evaluators sort.
    """

    def __init__(
        self,
        backbone: CausalModule,
        recipes: Sequence[Recipe] | None = None,
        *,
        batch_size: int = 32,
        on_progress: Callable[[str, int], None] = lambda what, texts: None,
    ) -> None:
        asked = default_recipes() if recipes is None else recipes
        self.on_progress = on_progress
        self._use(RecipeReader(backbone, [*bags_of_input_embeddings(asked), *asked], batch_size))

    def _use(self, reader: RecipeReader) -> None:
        self.backbone = reader.backbone
        self.batch_size = reader.batch_size
        self.all = reader.recipes
        self.skipped = [(recipe.key, reason) for recipe, reason in reader.skipped]
        self.lengths: list[int] = []
        self.sample: list[str] = []
        self._reader = reader
        self._draw = random.Random(0)

    @contextmanager
    def on_random_weights(self, keys: Collection[str]) -> Iterator[Recipes]:
        """Some of the recipes, and the bags, on weights that were never trained: controls.

        Memory may have no room for two models: the trained weights lie on the disk meanwhile, and are back at the end.

        Args:
            keys: Of the recipes.
        """
        untrained = CausalTransformer(self.backbone)
        chosen = [recipe.on_random_weights() for recipe in self.all if recipe.bag or recipe.key in keys]
        controls = copy.copy(self)
        with set_aside(self.backbone.model):
            untrained.model = random_model(self.backbone.model)
            controls._use(RecipeReader(untrained, chosen, self.batch_size))
            yield controls

    @property
    def controls(self) -> list[str]:
        """Keys of those that are there to be beaten."""
        return [recipe.key for recipe in self.all if recipe.control]

    @property
    def keys(self) -> list[str]:
        """Name and pooling of each."""
        return [recipe.key for recipe in self.all]

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by key, each (B, D); the progress of B texts."""
        found = self._reader.embed(texts, prompt)
        self._sample(texts)
        self.lengths += map(len, self.backbone.token_ids(texts))
        self.on_progress("Embedding", len(texts))
        return found

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """Word embeddings by name, each (B, D); the progress of B texts."""
        found = self._reader.words(sentences, words)
        self.on_progress("Words", len(sentences))
        return found

    def _sample(self, texts: Sequence[str]) -> None:
        """Keep each text that was ever embedded with the same probability (reservoir sampling)."""
        for seen, text in enumerate(texts, start=len(self.lengths) + 1):
            if seen <= _SAMPLE:
                self.sample.append(text)
            elif (place := self._draw.randrange(seen)) < _SAMPLE:
                self.sample[place] = text

    def model(self, key: str) -> SentenceTransformer:
        """One of the recipes as a ready model."""
        return self._reader.model(next(recipe for recipe in self.all if recipe.key == key))

    def revisions(self) -> dict[str, str]:
        """By key, what tells what a recipe makes of a text from what any other would: all that its vectors depend on.

        That is the language model, the module and its settings, the pooling, and, where something stands around that,
        the texts that it is fitted on, or the head that it is computed from.
        """
        found = {}
        model = fingerprint(self.backbone)
        for recipe in self.all:
            module = recipe.build(self.backbone)
            settings = [model, type(module).__name__, module.get_config_dict(), recipe.pooling]
            if recipe.filter is not None:
                fitted_on = recipe.filter.texts or fingerprint_of_head(self.backbone)
                settings += [recipe.filter.name, recipe.filter.settings(module), fitted_on]
            if recipe.weighting is not None:
                settings += [recipe.filtered, recipe.weighting.texts]
            found[recipe.key] = fingerprint_of(*settings)
        return found

    def costs(self, texts: Sequence[str]) -> dict[str, float]:
        """Seconds a text in which each recipe embeds texts like these, run alone, by key: see :func:`.timing.costs`.

        The classical embedding is timed under every pooling that there is, compared or not: it is the unit.
        """
        units = [unit_of_cost(pooling) for pooling in dict.fromkeys(recipe.pooling for recipe in self.all)]
        models = {recipe.key: self._reader.model(recipe) for recipe in [*units, *self.all]}
        return costs(models, texts, self.batch_size, lambda texts: self.on_progress("Timing", texts))


def unit_of_cost(pooling: str) -> Recipe:
    """What a cost under this pooling is a multiple of."""
    return replace(find("classical"), pooling=pooling)
