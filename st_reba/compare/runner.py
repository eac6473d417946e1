"""Texts as every recipe reads them: embedded once, by all recipes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..catalogue import POOLINGS, Recipe, bags_of_input_embeddings, default_recipes, find, random_weights
from ..modules import CausalModule
from ..modules.fingerprint import fingerprint, fingerprint_of, fingerprint_of_head
from ..readers.sweep import RecipeSweep
from ..readers.words import encode_words, find_words, pool_words

#: How many batches each recipe is timed on, of how many texts at most, and how often: enough to tell recipes apart, few
#: enough not to wait for.
TIMED_BATCHES = 3
TIMED_TEXTS = 32
TIMED_ROUNDS = 2
#: A first round that takes longer is enough: a moment in which something else ran does not show in it.
TIMED_SECONDS = 5.0

# How many of the texts that were embedded are kept, for those that are timed to be taken from.
_SAMPLE = 1024


class RecipeReader:
    """Texts as many recipes read them, on one backbone.

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
        self._alone: dict[str, _Method] = {}
        self._filters: dict[str, nn.Module] = {}
        methods: dict[str, list[Recipe]] = {}
        for recipe in recipes:
            if recipe.filter is not None:
                try:
                    self._filters[recipe.key] = recipe.filter(recipe.pooled(backbone), batch_size)
                except ValueError as error:
                    self.skipped.append((recipe, str(error)))
                    continue
            methods.setdefault(recipe.name, []).append(recipe)
        for name, group in methods.items():
            if not self._swept(group[0]):
                try:
                    self._alone[name] = _Method(backbone, group)
                except ValueError as error:
                    self.skipped += [(recipe, str(error)) for recipe in group]
        left_out = {recipe.key for recipe, _ in self.skipped}
        self.recipes = [recipe for recipe in recipes if recipe.key not in left_out]

    def _swept(self, recipe: Recipe) -> bool:
        return self._sweep is not None and recipe.copies is not None

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by the recipes' keys, each (B, D), float32, on the CPU."""
        found = {}
        if self._sweep is not None:
            swept = self._sweep.encode(texts, prompt, self.batch_size)
            found = {
                recipe.key: swept[recipe.method, POOLINGS[recipe.pooling]]
                for recipe in self.recipes
                if self._swept(recipe)
            }
        for method in self._alone.values():
            found.update(method.embed(texts, prompt, self.batch_size))
        return {recipe.key: self._filter(recipe, found[recipe.key]) for recipe in self.recipes}

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
            name: encode_words(method.model, sentences, words, batch_size=self.batch_size)
            for name, method in self._alone.items()
            if method.words
        }
        if self._sweep is not None:
            # Each recipe truncates a long sentence in its own way.
            found = {name: find_words(self._sweep.module(name), sentences, words) for name in self._sweep.recipes}
            swept: dict[str, list[Tensor]] = {recipe: [] for recipe in self._sweep.recipes}
            tokens = self._sweep.token_embeddings(sentences, batch_size=self.batch_size)
            for number, readings in enumerate(tokens):
                for name, vectors in swept.items():
                    vectors.append(pool_words([readings[name]], [found[name][number]])[0])
            for recipe in self.recipes:
                if self._swept(recipe) and recipe.words:
                    result[recipe.name] = torch.stack(swept[recipe.method]).numpy()
        return result


class _Method:
    """The recipes that differ in nothing but the pooling: one module, whose tokens are pooled in every way."""

    def __init__(self, backbone: CausalModule, recipes: Sequence[Recipe]) -> None:
        self.recipes = recipes
        # One that is made for the last token alone may hand on no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        module = widest.build(backbone)
        self.words = widest.words and getattr(module, "rows", "all") == "all"
        modes = tuple(POOLINGS[recipe.pooling] for recipe in recipes)
        parts = [*widest.weighed(module), Pooling(module.get_embedding_dimension(), modes)]
        self.model = SentenceTransformer(modules=parts, device=str(backbone.model.device))

    def embed(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> dict[str, Tensor]:
        """By the recipes' keys, each (B, D), float32, on the CPU."""
        vectors = self.model.encode(
            list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        parts = vectors.float().cpu().chunk(len(self.recipes), dim=1)
        return {recipe.key: part for recipe, part in zip(self.recipes, parts, strict=True)}


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


def timed_batches(texts: Sequence[str], batch_size: int) -> list[list[str]]:
    """Batches that stand for all of these texts: from the middle of the longest, the middling and the shortest third.

    A batch holds neighbours in length, as ``encode`` makes them, so that as much of it is padding as of the whole. Few
    texts are all taken.
    """
    size = min(batch_size, TIMED_TEXTS)
    ordered = sorted(texts, key=len, reverse=True)
    starts: Sequence[int] = range(0, len(ordered), size)
    if len(starts) > TIMED_BATCHES:
        part = len(ordered) / TIMED_BATCHES
        starts = [int((index + 0.5) * part - size / 2) for index in range(TIMED_BATCHES)]
    return [ordered[start : start + size] for start in starts]


class Recipes:
    """All recipes on one model, and their controls: the bag of input embeddings, and all of these on random weights.

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
        self.backbone = backbone
        self.batch_size = batch_size
        self.on_progress = on_progress
        asked = default_recipes() if recipes is None else recipes
        trained = RecipeReader(backbone, [*bags_of_input_embeddings(asked), *asked], batch_size)
        able = [recipe.on_random_weights() for recipe in trained.recipes]
        self._readers = (trained, RecipeReader(random_weights(backbone), able, batch_size))
        self.all = [recipe for reader in self._readers for recipe in reader.recipes]
        self.skipped = [(recipe.key, reason) for reader in self._readers for recipe, reason in reader.skipped]
        self.lengths: list[int] = []
        self.sample: list[str] = []
        self._draw = random.Random(0)

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
        found = {key: vectors for reader in self._readers for key, vectors in reader.embed(texts, prompt).items()}
        self._sample(texts)
        self.lengths += map(len, self.backbone.token_ids(texts))
        self.on_progress("Embedding", len(texts))
        return found

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """Word embeddings by name, each (B, D); the progress of B texts."""
        found: dict[str, np.ndarray] = {}
        for reader in self._readers:
            found.update(reader.words(sentences, words))
        self.on_progress("Words", len(sentences))
        return found

    def _sample(self, texts: Sequence[str]) -> None:
        """Keep each text that was ever embedded with the same probability (reservoir sampling)."""
        for seen, text in enumerate(texts, start=len(self.lengths) + 1):
            if seen <= _SAMPLE:
                self.sample.append(text)
            elif (place := self._draw.randrange(seen)) < _SAMPLE:
                self.sample[place] = text

    def revisions(self) -> dict[str, str]:
        """By key, what tells what a recipe makes of a text from what any other would: all that its vectors depend on.

        That is the language model, the module and its settings, the pooling, and, where something stands around that,
        the texts that it is fitted on, or the head that it is computed from.
        """
        found = {}
        for reader in self._readers:
            model = fingerprint(reader.backbone)
            for recipe in reader.recipes:
                module = recipe.build(reader.backbone)
                settings = [model, type(module).__name__, module.get_config_dict(), recipe.pooling]
                if recipe.filter is not None:
                    fitted_on = recipe.filter.texts or fingerprint_of_head(reader.backbone)
                    settings += [recipe.filter.name, recipe.filter.settings(module), fitted_on]
                if recipe.weighting is not None:
                    settings += [recipe.filtered, recipe.weighting.texts]
                found[recipe.key] = fingerprint_of(*settings)
        return found

    def costs(self, texts: Sequence[str]) -> dict[str, float]:
        """Seconds a text in which each recipe embeds texts like these, run alone, by key.

        Timed on :func:`timed_batches` in rounds in which all take turns, in one if that takes long; of each batch the
        fastest counts. The classical embedding is timed under every pooling that there is, compared or not: it is the
        unit. The controls on random weights cost what their recipes cost, and are not timed.
        """
        trained = self._readers[0]
        units = [unit_of_cost(pooling) for pooling in dict.fromkeys(recipe.pooling for recipe in trained.recipes)]
        models = {recipe.key: trained.model(recipe) for recipe in [*units, *trained.recipes]}
        batches = timed_batches(texts, self.batch_size)
        fastest = {key: [float("inf")] * len(batches) for key in models}
        begun = time.perf_counter()
        for done in range(TIMED_ROUNDS):
            enough = done and time.perf_counter() - begun > TIMED_SECONDS
            for key, model in () if enough else models.items():
                for index, batch in enumerate(batches):
                    start = time.perf_counter()
                    model.encode(batch, batch_size=self.batch_size, show_progress_bar=False)
                    fastest[key][index] = min(fastest[key][index], time.perf_counter() - start)
            self.on_progress("Timing", sum(map(len, batches)))
        return {key: sum(seconds) / sum(map(len, batches)) for key, seconds in fastest.items()}


def unit_of_cost(pooling: str) -> Recipe:
    """What a cost under this pooling is a multiple of."""
    return replace(find("classical"), pooling=pooling)
