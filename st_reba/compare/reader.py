"""Texts as many recipes read them, on one backbone: one pass for all that can come out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ..compare.sweep import RecipeSweep
from ..lm.backbone import depth
from ..lm.fingerprint import fingerprint
from ..modules import CausalModule
from ..modules.moments import Moments
from ..reading.words import encode_words, find_words, pool_words
from ..recipes import Recipe, Row
from ..recipes.recipe import POOLINGS
from .kept import Kept
from .workload import Workload

#: Called with what was done, and to how many tokens.
OnTokens = Callable[[str, float], None]

# Texts that filters are fitted on are embedded so many at a time, in their order: as `embedding_moments` does, so that
# what is fitted here and what is fitted there are equal to the bit where the embeddings are.
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
        beside: Another of the same backbone, whose modules are taken where there are such.

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
        beside: RecipeReader | None = None,
    ) -> None:
        self.backbone = backbone
        self.batch_size = batch_size
        self._on_tokens = on_tokens
        self._kept = kept
        self.skipped: list[tuple[Recipe, str]] = []
        self._layers = depth(backbone.model)
        self._modules: dict[tuple[Row, int | None, bool], CausalModule] = {} if beside is None else beside._modules
        self._laid_out: dict[CausalModule, Workload] = {} if beside is None else beside._laid_out
        self._sweep = _sweep(backbone, recipes)
        self._alone: dict[_Run, _Method] = {}
        runs: dict[_Run, list[Recipe]] = {}
        for recipe in recipes:
            if not self._swept(recipe):
                runs.setdefault(_run(recipe), []).append(recipe)
        for run, group in runs.items():
            try:
                self._alone[run] = _Method(self.module, group)
            except ValueError as error:
                self.skipped += [(recipe, str(error)) for recipe in group]
        self._passes = self._all_passes(self._left(recipes))
        self._filters = self._fitted(self._left(recipes)) if fitted else {}
        self.recipes = self._left(recipes)

    def _left(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        left_out = {recipe.result for recipe, _ in self.skipped}
        return [recipe for recipe in recipes if recipe.result not in left_out]

    def _swept(self, recipe: Recipe) -> bool:
        return self._sweep is not None and recipe.copies is not None

    def _all_passes(self, recipes: Sequence[Recipe]) -> dict[_Run | None, Workload]:
        """How texts run through the model, by the run; None is the one that all repetitions come out of."""
        passes: dict[_Run | None, Workload] = {run: self._pass(method.module) for run, method in self._alone.items()}
        if self._sweep is not None and any(map(self._swept, recipes)):
            passes[None] = self._pass(self._sweep.module(self._sweep.recipes[-1]))
        return passes

    def _pass(self, module: CausalModule) -> Workload:
        if module not in self._laid_out:
            self._laid_out[module] = Workload.of(module, self._layers)
        return self._laid_out[module]

    def pass_of(self, recipe: Recipe) -> Workload:
        """How texts run through the model for a recipe by itself."""
        return self._pass(self.module(recipe))

    def _run_of(self, recipe: Recipe) -> _Run | None:
        return None if self._swept(recipe) else _run(recipe)

    def tokens(self, lengths: Sequence[int], words: Sequence[int] = ()) -> float:
        """How many tokens will run: of texts of such lengths, of sentences with words, of those that are fitted on."""
        total = sum(own.tokens(lengths) for own in self._passes.values())
        if words:
            total += sum(self._passes[run].tokens(words) for run in self._runs_with_words())
        fitted: dict[tuple[str, ...], set[_Run | None]] = {}
        for recipe in self.recipes:
            if recipe.filter is not None and recipe.filter.fitted and recipe.fit_texts:
                fitted.setdefault(recipe.fitted_on, set()).add(self._run_of(recipe))
        for texts, runs in fitted.items():
            own = self.lengths(texts)
            total += sum(self._passes[run].tokens(own) for run in runs)
        return total

    def dearest(self, count: int) -> list[Recipe]:
        """Recipes that run the model in different ways, of all those that take the most."""
        by_run = {self._run_of(recipe): recipe for recipe in self.recipes if not recipe.control}
        return sorted(by_run.values(), key=lambda recipe: -self._passes[self._run_of(recipe)].tokens([16]))[:count]

    def _runs_with_words(self) -> list[_Run | None]:
        runs: list[_Run | None] = [run for run, method in self._alone.items() if method.words]
        return [*runs, None] if any(self._swept(recipe) and recipe.words for recipe in self.recipes) else runs

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self.backbone.token_ids(texts)]

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.backbone.model, self.backbone.tokenizer, self.backbone.max_seq_length)

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
        """Sentence embeddings by the results' names, each (B, D), float32, on the CPU."""
        found = self._pooled(texts, self.recipes, prompt)
        return {recipe.result: self._filter(recipe, found[_reading(recipe)]) for recipe in self.recipes}

    def _pooled(
        self, texts: Sequence[str], recipes: Sequence[Recipe], prompt: str | None = None, what: str = "Embedding"
    ) -> dict[_Reading, Tensor]:
        """What these recipes give before their filters, each (B, D)."""
        found: dict[_Reading, Tensor] = {}
        lengths = self.lengths(texts)
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
        """What stands after the pooling, by the results' names; recipes for which it cannot be made are left out."""
        filtered = [(recipe, recipe.filter) for recipe in recipes if recipe.filter is not None]
        fitted = [recipe for recipe, part in filtered if part.fitted]
        moments: dict[tuple[_Reading, tuple[str, ...]], Moments | ValueError] = {}
        for texts in dict.fromkeys(recipe.fitted_on for recipe in fitted):
            on_them = [recipe for recipe in fitted if recipe.fitted_on == texts]
            moments.update({(reading, texts): own for reading, own in self._moments(texts, on_them).items()})
        head: nn.Module | None = None
        found = {}
        for recipe, part in filtered:
            try:
                if not part.fitted:
                    # The same for all, and on a large model not cheap.
                    head = head or part.made(recipe.model(self.backbone, filtered=False), ())
                    found[recipe.result] = head
                    continue
                own = moments.get((_reading(recipe), recipe.fitted_on))
                if not isinstance(own, Moments):
                    raise own or ValueError("No texts were given to fit it on.")
                found[recipe.result] = part.from_moments(own, self.module(recipe).shares)
            except ValueError as error:
                self.skipped.append((recipe, str(error)))
        return found

    def _moments(self, texts: Sequence[str], recipes: Sequence[Recipe]) -> dict[_Reading, Moments | ValueError]:
        """Mean and covariance of what these recipes give these texts before their filters; or why there are none."""
        found: dict[_Reading, Moments | ValueError] = {}
        whole = {_reading(recipe) for recipe in recipes if recipe.filter is not None and recipe.filter.needs_covariance}
        for start in range(0, len(texts), _CHUNK):
            for reading, vectors in self._pooled(texts[start : start + _CHUNK], recipes, None, "Fitting").items():
                moments = found.get(reading)
                if moments is None:
                    moments = found[reading] = Moments(vectors.shape[1], covariance=reading in whole)
                try:
                    if isinstance(moments, Moments):
                        # Texts without tokens, which are embedded as zero vectors, do not count.
                        moments.add(vectors[vectors.any(dim=1)])
                except ValueError as error:
                    found[reading] = error
        return found

    def module(self, recipe: Recipe) -> CausalModule:
        """What runs the model for a recipe, by itself; recipes that give it the same arguments share it.

        Raises:
            ValueError: If this backbone cannot run it.
        """
        key = recipe.row, recipe.layer, recipe.pooling == "last" and bool(recipe.row.settings_if_last)
        if key not in self._modules:
            self._modules[key] = recipe.build(self.backbone)
        return self._modules[key]

    def model(self, recipe: Recipe) -> SentenceTransformer:
        """One of the recipes as a ready model."""
        pooled = recipe.model(self.backbone, filtered=False)
        if recipe.filter is None:
            return pooled
        modules = [*pooled.children(), self._filters[recipe.result]]
        return SentenceTransformer(modules=modules, device=str(self.backbone.model.device))

    @torch.inference_mode()
    def _filter(self, recipe: Recipe, vectors: Tensor) -> Tensor:
        module = self._filters.get(recipe.result)
        if module is None:
            return vectors
        return module({"sentence_embedding": vectors.to(self.backbone.model.device)})["sentence_embedding"].cpu()

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
        """The embedding of one word in each sentence, by the recipes' names, each (B, D): see :func:`encode_words`."""
        given, lengths = [list(sentences), list(words)], self.lengths(sentences)
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


#: What runs the language model: a method, and the texts that weights of its tokens are fitted on; and that with a
#: pooling behind it.
_Run = tuple[str, tuple[str, ...] | None]
_Reading = tuple[_Run, str]


def _run(recipe: Recipe) -> _Run:
    return recipe.method, recipe.fit_texts if recipe.part is not None and recipe.part.weighs_tokens else None


def _reading(recipe: Recipe) -> _Reading:
    return _run(recipe), recipe.pooling


class _Method:
    """The recipes that run the model alike: one module, whose tokens are pooled in every way.

    Attributes:
        module: What runs the model.
        words: Name of the recipe that has word embeddings; empty if none has.
    """

    def __init__(self, build: Callable[[Recipe], CausalModule], recipes: Sequence[Recipe]) -> None:
        # One that is made for the last token alone may hand on no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        self.module = module = build(widest)
        worded = next((recipe.name for recipe in recipes if recipe.words), "")
        self.words = worded if getattr(module, "rows", "all") == "all" else ""
        self.poolings = list(dict.fromkeys(recipe.pooling for recipe in recipes))
        modes = tuple(POOLINGS[pooling] for pooling in self.poolings)
        self._parts = widest.pipeline(module, modes)

    @cached_property
    def model(self) -> SentenceTransformer:
        """The module, and all poolings behind it. It is not made where tokens are only counted."""
        return SentenceTransformer(modules=self._parts, device=str(self.module.model.device))

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
