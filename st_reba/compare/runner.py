"""Recipes on one model, their controls, and what they take: what a comparison runs."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
from sentence_transformers import SentenceTransformer
from torch import Tensor

from ..data.demo import demo_sentences
from ..lm.backbone import depth
from ..lm.fingerprint import fingerprint, fingerprint_of, fingerprint_of_weight
from ..modules import CausalModule, CausalTransformer
from ..modules.lm_head import head_blocks
from ..recipes import Recipe, default_recipes, find
from ..recipes.lookup import bags_of_input_embeddings
from ..recipes.recipe import random_model
from .kept import Kept
from .reader import OnTokens, RecipeReader
from .set_aside import set_aside
from .timing import TIMED_ROUNDS, costs, timed_batches
from .workload import Workload

#: How many recipes are run on random weights at most: it takes as long as with the trained ones.
FINALISTS = 3

# How many of the texts that were embedded are kept, for those that are timed to be taken from.
_SAMPLE = 1024


class Recipes:
    """Recipes on one model, and the controls that cost next to nothing: bags of its input embeddings.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        recipes: What to compare; :func:`st_reba.recipes.default_recipes` if None.
        batch_size: Texts at a time.
        controls: Whether the bags are among them.
        on_progress: Called when something has been done, with what it was and how many tokens.
        kept: Has what was embedded before, and keeps what is now; None: nothing is kept.

    Attributes:
        all: The recipes that this backbone can run, controls among them.
        skipped: The others, by the names of their results, and why.
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
        controls: bool = True,
        on_progress: OnTokens = lambda what, tokens: None,
        kept: Kept | None = None,
    ) -> None:
        asked = [
            replace(recipe, fit_texts=tuple(demo_sentences())) if recipe.fitted and not recipe.fit_texts else recipe
            for recipe in (default_recipes() if recipes is None else recipes)
        ]
        self.on_progress = on_progress
        self.with_controls = controls
        self._kept = kept
        bags = bags_of_input_embeddings(asked) if controls else []
        self._use(self._reader_of(backbone, [*bags, *asked], batch_size))

    def _reader_of(self, backbone: CausalModule, recipes: Sequence[Recipe], batch_size: int) -> RecipeReader:
        return RecipeReader(backbone, recipes, batch_size, on_tokens=self.on_progress, kept=self._kept)

    def _use(self, reader: RecipeReader) -> None:
        self.backbone = reader.backbone
        self.batch_size = reader.batch_size
        self.all = reader.recipes
        self.skipped = [(recipe.result, reason) for recipe, reason in reader.skipped]
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
        chosen = [recipe.on_random_weights() for recipe in self.all if recipe.bag or recipe.result in keys]
        controls = copy.copy(self)
        with set_aside(self.backbone.model):
            untrained.model = random_model(self.backbone.model)
            controls._use(self._reader_of(untrained, chosen, self.batch_size))
            yield controls

    def skip_random(self, keys: Collection[str], lengths: Sequence[int], words: Sequence[int] = ()) -> None:
        """Count what :func:`work` announced of random weights, and will not be run on them, as done."""
        chosen = [recipe for recipe in self.all if recipe.bag or recipe.result in keys]
        counted = RecipeReader(self.backbone, chosen, self.batch_size, fitted=False, beside=self._reader)
        announced = _on_random_weights(self._reader, lengths, words)
        self.on_progress("Random weights", announced - counted.tokens(lengths, words))

    @property
    def controls(self) -> list[str]:
        """The results of those that are there to be beaten, by name."""
        return [recipe.result for recipe in self.all if recipe.control]

    @property
    def keys(self) -> list[str]:
        """Name and pooling of each."""
        return [recipe.result for recipe in self.all]

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by the results' names, each (B, D); the progress of B texts."""
        found = self._reader.embed(texts, prompt)
        self._sample(texts)
        self.lengths += map(len, self.backbone.token_ids(texts))
        return found

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """Word embeddings by name, each (B, D); the progress of B texts."""
        return self._reader.words(sentences, words)

    def _sample(self, texts: Sequence[str]) -> None:
        """Keep each text that was ever embedded with the same probability (reservoir sampling)."""
        for seen, text in enumerate(texts, start=len(self.lengths) + 1):
            if seen <= _SAMPLE:
                self.sample.append(text)
            elif (place := self._draw.randrange(seen)) < _SAMPLE:
                self.sample[place] = text

    def model(self, key: str) -> SentenceTransformer:
        """One of the recipes as a ready model."""
        return self._reader.model(next(recipe for recipe in self.all if recipe.result == key))

    def revisions(self) -> dict[str, str]:
        """By key, what tells what a recipe makes of a text from what any other would: all that its vectors depend on.

        That is the language model, the module and its settings, the pooling, and, where something stands around that,
        the texts that it is fitted on, or the head that it is computed from.
        """
        found = {}
        backbone = self.backbone
        model = fingerprint(backbone.model, backbone.tokenizer, backbone.max_seq_length)
        for recipe in self.all:
            module = self._reader.module(recipe)
            settings = [model, type(module).__name__, module.get_config_dict(), recipe.pooling]
            if (part := recipe.part) is not None:
                fitted_on = recipe.fit_texts if part.fitted else fingerprint_of_weight("head", head_blocks(backbone))
                settings += [part.name, part.settings(module.shares), fitted_on]
            found[recipe.result] = fingerprint_of(*settings)
        return found

    def costs(self, texts: Sequence[str]) -> dict[str, float]:
        """What each recipe takes for a text like these, run alone, by result: see :func:`.timing.costs`.

        The classical embedding is timed under every pooling that there is, compared or not: it is the unit.
        """
        models = {recipe.result: self._reader.model(recipe) for recipe in _timed(self.all)}
        layers = depth(self.backbone.model)
        passes = {key: Workload.of(cast(CausalModule, model[0]), layers) for key, model in models.items()}
        batches = timed_batches(texts, self.batch_size)
        lengths = [len(ids) for batch in batches for ids in self.backbone.token_ids(batch)]
        return costs(
            models,
            batches,
            lambda key: self.on_progress("Timing", passes[key].tokens(lengths)),
            on_cpu=self.backbone.model.device.type == "cpu",
        )


def _timed(recipes: Sequence[Recipe]) -> list[Recipe]:
    """What is timed: the units first, compared or not."""
    units = [unit_of_cost(pooling) for pooling in dict.fromkeys(recipe.pooling for recipe in recipes)]
    return list({recipe.result: recipe for recipe in [*units, *recipes]}.values())


def _on_random_weights(reader: RecipeReader, lengths: Sequence[int], words: Sequence[int]) -> float:
    """Tokens that will run on random weights, at most."""
    dearest = reader.dearest(FINALISTS)
    counted = RecipeReader(reader.backbone, dearest, reader.batch_size, fitted=False, beside=reader)
    return counted.tokens(lengths, words)


def work(
    backbone: CausalModule,
    recipes: Sequence[Recipe],
    texts: Sequence[str],
    words: Sequence[str] = (),
    *,
    batch_size: int = 32,
    random: bool = True,
) -> float:
    """How many tokens a comparison will report the progress of.

    Args:
        backbone: The loaded model.
        recipes: What is compared.
        texts: What is embedded, each once.
        words: Sentences whose words are asked for.
        batch_size: Texts at a time.
        random: Whether the best are run on random weights, too; which ones is not known yet: the dearest count.
    """
    reader = RecipeReader(backbone, recipes, batch_size, fitted=False)
    lengths, of_words = reader.lengths(texts), reader.lengths(words)
    timed = reader.lengths([text for batch in timed_batches(texts, batch_size) for text in batch])
    timing = sum(reader.pass_of(recipe).tokens(timed) for recipe in _timed(reader.recipes))
    untrained = _on_random_weights(reader, lengths, of_words) if random else 0
    return reader.tokens(lengths, of_words) + TIMED_ROUNDS * timing + untrained


def unit_of_cost(pooling: str) -> Recipe:
    """What a cost under this pooling is a multiple of."""
    return replace(find("classical"), pooling=pooling)
