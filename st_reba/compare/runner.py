"""Texts as every recipe reads them: embedded once, by all recipes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..catalogue import POOLINGS, Recipe, bags_of_input_embeddings, default_recipes, find, random_model
from ..lm.backbone import depth
from ..lm.set_aside import set_aside
from ..modules import CausalModule, CausalTransformer
from ..modules.after_pooling.choices import HEAD_FILTER, Weighting
from ..modules.after_pooling.moments import Moments
from ..modules.fingerprint import fingerprint, fingerprint_of, fingerprint_of_head
from ..readers.sweep import RecipeSweep
from ..readers.words import encode_words, find_words, pool_words
from .kept import Kept
from .timing import TIMED_ROUNDS, Spent, costs, timed_batches
from .workload import Pass

#: Called with what was done, and to how many tokens.
OnTokens = Callable[[str, float], None]

#: How many recipes are run on random weights at most: it takes as long as with the trained ones.
FINALISTS = 3

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
        on_tokens: Called when texts have run through the model, with what for and how many tokens that was.
        kept: Has what was embedded before, and keeps what is now; None: nothing is kept.
        fitted: Whether what stands after the pooling is fitted; False: nothing is embedded, only counted.

    Attributes:
        recipes: Those that this backbone can run.
        skipped: The others, and why.
    """

    def __init__(
        self,
        backbone: CausalModule,
        recipes: Sequence[Recipe],
        batch_size: int = 32,
        *,
        on_tokens: OnTokens = lambda what, tokens: None,
        kept: Kept | None = None,
        fitted: bool = True,
    ) -> None:
        self.backbone = backbone
        self.batch_size = batch_size
        self._on_tokens = on_tokens
        self._kept = kept
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
        self._passes = self._all_passes(self._left(recipes))
        self._filters = self._fitted(self._left(recipes)) if fitted else {}
        self.recipes = self._left(recipes)

    def _left(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        left_out = {recipe.key for recipe, _ in self.skipped}
        return [recipe for recipe in recipes if recipe.key not in left_out]

    def _swept(self, recipe: Recipe) -> bool:
        return self._sweep is not None and recipe.copies is not None

    def _all_passes(self, recipes: Sequence[Recipe]) -> dict[_Run | None, Pass]:
        """How texts run through the model, by the run; None is the one that all repetitions come out of."""
        layers = depth(self.backbone.model)
        passes: dict[_Run | None, Pass] = {run: Pass.of(method.module, layers) for run, method in self._alone.items()}
        if self._sweep is not None and any(map(self._swept, recipes)):
            passes[None] = Pass.of(self._sweep.module(self._sweep.recipes[-1]), layers)
        return passes

    def _run_of(self, recipe: Recipe) -> _Run | None:
        return None if self._swept(recipe) else _run(recipe)

    def tokens(self, lengths: Sequence[int], words: Sequence[int] = ()) -> float:
        """How many tokens will run: of texts of such lengths, of sentences with words, of those that are fitted on."""
        total = sum(own.tokens(lengths) for own in self._passes.values())
        if words:
            total += sum(self._passes[run].tokens(words) for run in self._runs_with_words())
        fitted: dict[tuple[str, ...], set[_Run | None]] = {}
        for recipe in self.recipes:
            if recipe.filter is not None and recipe.filter.texts:
                fitted.setdefault(recipe.filter.texts, set()).add(self._run_of(recipe))
        for texts, runs in fitted.items():
            own = self._lengths(texts)
            total += sum(self._passes[run].tokens(own) for run in runs)
        return total

    def dearest(self, count: int) -> list[Recipe]:
        """Recipes that run the model in different ways, of all those that take the most."""
        by_run = {self._run_of(recipe): recipe for recipe in self.recipes if not recipe.control}
        return sorted(by_run.values(), key=lambda recipe: -self._passes[self._run_of(recipe)].tokens([16]))[:count]

    def _runs_with_words(self) -> list[_Run | None]:
        runs: list[_Run | None] = [run for run, method in self._alone.items() if method.words]
        return [*runs, None] if any(self._swept(recipe) and recipe.words for recipe in self.recipes) else runs

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self.backbone.token_ids(texts)]

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.backbone)

    def _computed(
        self, run: _Run | None, of: Sequence[Any], compute: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """What a run gives; from before, if it was kept.

        Args:
            run: Which.
            of: What it is given.
            compute: Runs it.
        """
        if self._kept is None:
            return compute()
        if run is None and self._sweep is not None:
            how: list[Any] = ["sweep", self._sweep.recipes, self._sweep.poolings]
        elif run is not None:
            method = self._alone[run]
            how = [type(method.module).__name__, method.module.get_config_dict(), method.poolings, run[1]]
        return self._kept.get([self._fingerprint, self.batch_size, how, *of], compute)

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> dict[str, Tensor]:
        """Sentence embeddings by the recipes' keys, each (B, D), float32, on the CPU."""
        found = self._pooled(texts, self.recipes, prompt)
        return {recipe.key: self._filter(recipe, found[_reading(recipe)]) for recipe in self.recipes}

    def _pooled(
        self, texts: Sequence[str], recipes: Sequence[Recipe], prompt: str | None = None, what: str = "Embedding"
    ) -> dict[_Reading, Tensor]:
        """What these recipes give before their filters, each (B, D)."""
        found: dict[_Reading, Tensor] = {}
        lengths = self._lengths(texts)
        if self._sweep is not None and (swept := [recipe for recipe in recipes if self._swept(recipe)]):
            sweep = self._sweep
            vectors = self._computed(
                None,
                [list(texts), prompt],
                lambda: {"|".join(key): own for key, own in sweep.encode(texts, prompt, self.batch_size).items()},
            )
            found.update({_reading(recipe): vectors[f"{recipe.method}|{POOLINGS[recipe.pooling]}"] for recipe in swept})
            self._on_tokens(what, self._passes[None].tokens(lengths))
        for run in dict.fromkeys(_run(recipe) for recipe in recipes if not self._swept(recipe)):
            embed = partial(self._alone[run].embed, texts, prompt, self.batch_size)
            found.update({(run, key): own for key, own in self._computed(run, [list(texts), prompt], embed).items()})
            self._on_tokens(what, self._passes[run].tokens(lengths))
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
            for reading, vectors in self._pooled(ordered[start : start + _CHUNK], recipes, None, "Fitting").items():
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
        given, lengths = [list(sentences), list(words)], self._lengths(sentences)
        result = {}
        for run, method in self._alone.items():
            if method.words:
                encode = partial(encode_words, method.model, sentences, words, batch_size=self.batch_size)
                vectors = self._computed(run, given, partial(_as_tensors, encode))
                result[method.words] = vectors["words"].numpy()
                self._on_tokens("Words", self._passes[run].tokens(lengths))
        swept = [recipe for recipe in self.recipes if self._swept(recipe) and recipe.words]
        if self._sweep is not None and swept:
            vectors = self._computed(None, given, lambda: self._swept_words(sentences, words))
            result.update({recipe.name: vectors[recipe.method].numpy() for recipe in swept})
            self._on_tokens("Words", self._passes[None].tokens(lengths))
        return result

    def _swept_words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, Tensor]:
        """Those of all repetitions, by their names, each (B, D)."""
        sweep = cast(RecipeSweep, self._sweep)
        # Each recipe truncates a long sentence in its own way.
        found = {name: find_words(sweep.module(name), sentences, words) for name in sweep.recipes}
        vectors: dict[str, list[Tensor]] = {recipe: [] for recipe in sweep.recipes}
        for number, readings in enumerate(sweep.token_embeddings(sentences, batch_size=self.batch_size)):
            for name, own in vectors.items():
                own.append(pool_words([readings[name]], [found[name][number]])[0])
        return {name: torch.stack(own) for name, own in vectors.items()}


def _as_tensors(encode: Callable[[], np.ndarray]) -> dict[str, Tensor]:
    return {"words": torch.from_numpy(encode())}


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
        controls: Whether the bags are among them.
        on_progress: Called when something has been done, with what it was and how many tokens.
        kept: Has what was embedded before, and keeps what is now; None: nothing is kept.

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
        controls: bool = True,
        on_progress: OnTokens = lambda what, tokens: None,
        kept: Kept | None = None,
    ) -> None:
        asked = default_recipes() if recipes is None else recipes
        self.on_progress = on_progress
        self.with_controls = controls
        self._kept = kept
        bags = bags_of_input_embeddings(asked) if controls else []
        self._use(self._reader_of(backbone, [*bags, *asked], batch_size))

    def _reader_of(self, backbone: CausalModule, recipes: Sequence[Recipe], batch_size: int) -> RecipeReader:
        # Not the method as it is now: it may be set to another.
        return RecipeReader(
            backbone,
            recipes,
            batch_size,
            on_tokens=lambda what, tokens: self.on_progress(what, tokens),
            kept=self._kept,
        )

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
            controls._use(self._reader_of(untrained, chosen, self.batch_size))
            yield controls

    def skip_random(self, keys: Collection[str], lengths: Sequence[int], words: Sequence[int] = ()) -> None:
        """Count what :func:`work` announced of random weights, and will not be run on them, as done."""
        chosen = [recipe for recipe in self.all if recipe.bag or recipe.key in keys]
        actual = RecipeReader(self.backbone, chosen, self.batch_size, fitted=False).tokens(lengths, words)
        announced = _on_random_weights(self._reader, lengths, words)
        self.on_progress("Random weights", announced - actual)

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

    def costs(self, texts: Sequence[str]) -> dict[str, Spent]:
        """What each recipe takes for a text like these, run alone, by key: see :func:`.timing.costs`.

        The classical embedding is timed under every pooling that there is, compared or not: it is the unit.
        """
        models = {recipe.key: self._reader.model(recipe) for recipe in _timed(self.all)}
        layers = depth(self.backbone.model)
        passes = {key: Pass.of(cast(CausalModule, model[0]), layers) for key, model in models.items()}
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
    return list({recipe.key: recipe for recipe in [*units, *recipes]}.values())


def _on_random_weights(reader: RecipeReader, lengths: Sequence[int], words: Sequence[int]) -> float:
    """Tokens that will run on random weights, at most."""
    dearest = reader.dearest(FINALISTS)
    return RecipeReader(reader.backbone, dearest, reader.batch_size, fitted=False).tokens(lengths, words)


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
    lengths, of_words = reader._lengths(texts), reader._lengths(words)
    timed = reader._lengths([text for batch in timed_batches(texts, batch_size) for text in batch])
    layers = depth(backbone.model)
    timing = sum(Pass.of(recipe.build(backbone), layers).tokens(timed) for recipe in _timed(reader.recipes))
    untrained = _on_random_weights(reader, lengths, of_words) if random else 0
    return reader.tokens(lengths, of_words) + TIMED_ROUNDS * timing + untrained


def unit_of_cost(pooling: str) -> Recipe:
    """What a cost under this pooling is a multiple of."""
    return replace(find("classical"), pooling=pooling)
