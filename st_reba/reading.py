"""Texts as every recipe reads them: embedded once, by all recipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from .modules import CausalModule
from .recipes import POOLINGS, Recipe, bag_of_input_embeddings, default_recipes, random_weights
from .sweep import RecipeSweep
from .words import encode_words, find_words, pool_words

#: How many texts each recipe is timed on, and how often: enough to tell them apart, few enough not to wait for.
TIMED_TEXTS = 64
TIMED_ROUNDS = 3


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
        self.recipes: list[Recipe] = []
        self.skipped: list[tuple[Recipe, str]] = []
        self._sweep = _sweep(backbone, recipes)
        self._models: dict[str, SentenceTransformer] = {}
        for recipe in recipes:
            if not self._swept(recipe):
                try:
                    self._models[recipe.key] = recipe.model(backbone)
                except ValueError as error:
                    self.skipped.append((recipe, str(error)))
                    continue
            self.recipes.append(recipe)

    def _swept(self, recipe: Recipe) -> bool:
        return self._sweep is not None and recipe.copies is not None

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by the recipes' keys, each (B, D), float32, on the CPU."""
        swept = {} if self._sweep is None else self._sweep.encode(texts, prompt, self.batch_size)
        found = {}
        for recipe in self.recipes:
            if self._swept(recipe):
                found[recipe.key] = swept[recipe.method, POOLINGS[recipe.pooling]]
            else:
                found[recipe.key] = (
                    self._models[recipe.key]
                    .encode(
                        list(texts),
                        prompt=prompt,
                        batch_size=self.batch_size,
                        convert_to_tensor=True,
                        show_progress_bar=False,
                    )
                    .float()
                    .cpu()
                )
        return found

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """The embedding of one word in each sentence, by the recipes' names, each (B, D): see :func:`encode_words`."""
        vectors: dict[str, np.ndarray] = {}
        if self._sweep is not None:
            swept: dict[str, list[Tensor]] = {recipe: [] for recipe in self._sweep.recipes}
            found = find_words(self.backbone, sentences, words)
            tokens = self._sweep.token_embeddings(sentences, batch_size=self.batch_size)
            for word, readings in zip(found, tokens, strict=True):
                for recipe, vector in swept.items():
                    vector.append(pool_words([readings[recipe]], [word])[0])
            vectors = {recipe: torch.stack(vector).numpy() for recipe, vector in swept.items()}
        result: dict[str, np.ndarray] = {}
        for recipe in self.recipes:
            if self._swept(recipe):
                result[recipe.name] = vectors[recipe.method]
            elif recipe.words and recipe.name not in result and self._gives_all_words(recipe):
                model = self._models[recipe.key]
                result[recipe.name] = encode_words(model, sentences, words, batch_size=self.batch_size)
        return result

    def _gives_all_words(self, recipe: Recipe) -> bool:
        return getattr(self._models[recipe.key][0], "rows", "all") == "all"


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
    """All recipes on one model, and their controls: the bag of input embeddings, and each recipe on random weights.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        recipes: What to compare; :func:`st_reba.recipes.default_recipes` if None.
        batch_size: Texts at a time.
        on_progress: Called when something has been done, with what it was and to how many texts.

    Attributes:
        all: The recipes that this backbone can run, controls among them.
        skipped: Keys of the others, and why.
        lengths: Tokens of each text that was embedded.
        sample: The first texts that were embedded: what costs are measured on.
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
        trained = RecipeReader(backbone, [bag_of_input_embeddings(), *asked], batch_size)
        able = [recipe.on_random_weights() for recipe in trained.recipes if not recipe.control]
        self._readers = (trained, RecipeReader(random_weights(backbone), able, batch_size))
        self.all = [recipe for reader in self._readers for recipe in reader.recipes]
        self.skipped = [(recipe.key, reason) for reader in self._readers for recipe, reason in reader.skipped]
        self.lengths: list[int] = []
        self.sample: list[str] = []

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
        tokens = self.backbone.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        self.lengths += map(len, tokens)
        self.sample += texts[: TIMED_TEXTS - len(self.sample)]
        self.on_progress("Embedding", len(texts))
        return found

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """Word embeddings by name, each (B, D); the progress of B texts."""
        found: dict[str, np.ndarray] = {}
        for reader in self._readers:
            found.update(reader.words(sentences, words))
        self.on_progress("Words", len(sentences))
        return found

    def costs(self, texts: Sequence[str]) -> dict[str, float]:
        """Seconds in which each recipe embeds texts, run alone, by key: medians of rounds in which all take turns.

        The controls on random weights cost what their recipes cost, and are not timed.
        """
        trained = self._readers[0]
        models = {recipe.key: recipe.model(self.backbone) for recipe in trained.recipes}
        rounds: dict[str, list[float]] = {key: [] for key in models}
        for _ in range(TIMED_ROUNDS):
            for key, model in models.items():
                start = time.perf_counter()
                model.encode(list(texts), batch_size=self.batch_size, show_progress_bar=False)
                rounds[key].append(time.perf_counter() - start)
            self.on_progress("Timing", len(texts))
        return {key: median(seconds) for key, seconds in rounds.items()}
