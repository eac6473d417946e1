"""Recipes on one model: the passes that they come out of, their filters and their controls.

A pass is one way in which texts run through the model. Recipes that differ only in pooling, filter, layer or number of
repetitions come out of one pass. A recipe that fails is left out with its reason, and the others run on.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..data.demo import demo_sentences
from ..evaluation.embedded import Embedded, TensorCache
from ..evaluation.layers import LayerReader, reads_one_layer
from ..files import is_full
from ..fingerprint import fingerprint
from ..lm.passes import Capture, gather_positions
from ..lm.views import depth
from ..modules import CausalModule, EchoModule, InputEmbeddings, ReBAModule, TopicModule
from ..modules.embedding_transforms import check_part_weights
from ..modules.vectors import TokenVectors
from ..moments import CHUNK, Moments
from ..reading.words import encode_words, tokens_of
from ..recipes import PostProcessor, Recipe, find, random_weights
from ..recipes.lookup import bags_of_input_embeddings
from ..recipes.recipe import POOLINGS, device_of, mode_of
from ..recipes.rows import CLASSICAL
from ..text.layout import Layout
from .sweep import RecipeSweep

#: Called with what was done, and to how many tokens.
OnTokens = Callable[[str, float], None]
#: Vectors (B, D) by name, float32, on the CPU.
Vectors = dict[str, Tensor]

# Number of texts, about, on which tokens are counted.
_COUNTED = 16
# Number of batches in a file of the cache: what a killed run loses, at most, of each pass.
_BATCHES = 8
# Share of the layers after which a recipe is read besides its own end and the layer below.
_NINE_TENTHS = 0.9

# Errors that say nothing about a recipe: the next one would fail, too.
_NO_MEMORY = re.compile(r"out of memory|allocate memory", re.IGNORECASE)


def raise_if_fatal(error: Exception) -> None:
    """Raise an error that is about the machine: no memory, or a file that cannot be written."""
    if isinstance(error, MemoryError | OSError) or _NO_MEMORY.search(str(error)):
        raise error


def reason_of(error: Exception) -> str:
    """Return why a recipe is left out, in a sentence; a fatal error is raised."""
    raise_if_fatal(error)
    first = next(iter(str(error).strip().splitlines()), "")
    return first if first and isinstance(error, ValueError) else f"{type(error).__name__}: {first}".removesuffix(": ")


def unprocessed(recipe: Recipe) -> Recipe:
    """Return a recipe without filter and weights."""
    return replace(recipe, post_processor=None, part_weights=(), random=False)


def reading(recipe: Recipe) -> str:
    """Return the name of a recipe's vectors among those of its pass, before its filter."""
    return unprocessed(recipe).result


def variant(recipe: Recipe) -> str:
    """Return the name of a recipe's vectors among those of all passes, before its filter."""
    part = recipe.post_processor
    return f"{reading(recipe)}|{'' if part is None or not part.weighs_tokens else part.key}"


def listed_of(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the recipes that have a row of their own: of candidates the recipe as it is."""
    return [recipe for recipe in recipes if recipe.candidate_of in ("", recipe.result)]


def grouped(recipes: Iterable[Recipe], key: Callable[[Recipe], Hashable]) -> list[list[Recipe]]:
    """Return recipes with equal keys together."""
    groups: dict[Hashable, list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault(key(recipe), []).append(recipe)
    return list(groups.values())


# Free parts of a recipe: its layer, the words that its prompt ends in, and the weights of its parts


def classical(pooling: str) -> Recipe:
    """Return the classical embedding under a pooling: it needs no recipe, and its time is the unit of cost."""
    return replace(find("classical"), pooling=pooling)


def with_candidates(recipe: Recipe, depth: int) -> list[Recipe]:
    """Return a recipe as it is, and every other combination of layer, wording and weights of its parts.

    The classical embedding stays as it is, and so does a recipe that was asked for at a layer. A recipe whose last
    layers attend both ways is read at its own end alone, as each other layer would take a pass of its own.

    Args:
        recipe: The recipe.
        depth: Number of layers of the model.
    """
    row = recipe.row
    if recipe.layer is not None or "bidirectional_layers" in row.settings or row is CLASSICAL:
        return [recipe]
    layers: list[int | None] = [None]
    if reads_one_layer(row.module) or row.module is TopicModule:
        end = depth + 1 + row.end
        below = dict.fromkeys((end - 1, round(_NINE_TENTHS * depth)))
        layers += [layer for layer in below if 0 < layer < end]
    return [
        replace(recipe, layer=layer, wording=wording, part_weights=weights, candidate_of=recipe.result)
        for layer in layers
        for wording in (None, *row.wordings)
        for weights in ((), *_part_weights(row.parts))
    ]


def _part_weights(parts: int) -> list[tuple[float, ...]]:
    """Return a coarse grid of weights of P parts: each in turn counts twice as much as each of the others."""
    weights = np.ones((parts, parts)) + np.eye(parts)
    return [tuple((row / row.sum()).tolist()) for row in weights] if parts > 1 else []


def in_short(recipe: Recipe) -> str:
    """Return how a candidate differs from its recipe as it is, for a column of a table; empty if it does not."""
    layer = "" if recipe.layer is None else f"@{recipe.layer}"
    wording = "" if recipe.wording is None else recipe.wording.name
    # The part that counts twice.
    part = f"part {1 + int(np.argmax(recipe.part_weights))} twice" if recipe.part_weights else ""
    return " ".join(filter(None, (layer, wording, part)))


# The passes


class Modules:
    """Modules of recipes, each built once.

    Args:
        backbone: The loaded model.
    """

    def __init__(self, backbone: CausalModule) -> None:
        self.backbone = backbone
        self._built: dict[Hashable, CausalModule] = {}

    def of(self, recipe: Recipe) -> CausalModule:
        """Return the module of a recipe."""
        key = (recipe.row, repr(recipe.arguments(recipe.pooling)))
        if key not in self._built:
            self._built[key] = recipe.build(self.backbone)
        return self._built[key]

    def pipeline(self, recipe: Recipe) -> list[nn.Module]:
        """Return a recipe's module and pooling."""
        return recipe.pipeline(self.of(recipe), mode_of(recipe.pooling))

    def model(self, parts: Sequence[nn.Module]) -> SentenceTransformer:
        """Return a pipeline on the backbone's device."""
        return SentenceTransformer(modules=list(parts), device=device_of(self.backbone))


class ModulePass:
    """One way in which texts run through the model: one module, whose tokens are pooled in every way.

    Args:
        modules: Modules of recipes.
        recipes: Recipes that come out of the pass.

    Attributes:
        module: Module that runs the model, as far as tokens are counted.
        names: Names of the vectors, by :func:`reading`.
        settings: Settings that distinguish its vectors from those of any other pass on the same model.
    """

    # Whether it is read after several layers.
    by_layer = False

    def __init__(self, modules: Modules, recipes: list[Recipe]) -> None:
        self.backbone, self.recipes = modules.backbone, recipes
        # A module that is made for the last token alone may return no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        # By layer it runs all layers, also those above the recipe's own end.
        self.module: Any = modules.of(replace(widest, layer=-1) if self.by_layer else widest)
        by_pooling = {recipe.pooling: reading(recipe) for recipe in recipes}
        self.poolings, self.names = list(by_pooling), list(by_pooling.values())
        self.model = modules.model(widest.pipeline(self.module, tuple(map(mode_of, self.poolings))))
        weights = widest.fit_texts if widest.weighs_tokens else None
        self.settings: list[Any] = [
            self.by_layer, type(self.module).__name__, self.module.get_config_dict(), self.poolings, weights,
        ]  # fmt: skip

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        """Return the vectors of each recipe before its filter, by :func:`reading`."""
        vectors = self.model.encode(
            list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return dict(zip(self.names, vectors.float().cpu().chunk(len(self.names), dim=1), strict=True))

    def tokens(self, texts: Sequence[str]) -> float:
        """Return the number of tokens of texts in this pass: see :func:`tokens`."""
        return tokens(self.module, texts, self.backbone)


class LayersPass(ModulePass):
    """Pass through the module of one recipe, read after several layers."""

    by_layer = True

    def __init__(self, modules: Modules, recipes: list[Recipe]) -> None:
        super().__init__(modules, recipes)
        self.reader = LayerReader(self.model)

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        states = torch.cat([self.reader.embeddings(batch, prompt).float() for batch in batches], dim=1)
        pooled = dict(zip(self.poolings, states.chunk(len(self.poolings), dim=2), strict=True))
        last = self.reader.count + self.recipes[0].row.end
        return {
            reading(recipe): pooled[recipe.pooling][last if recipe.layer is None else recipe.layer]
            for recipe in self.recipes
        }


class TopicPass(ModulePass):
    """Pass through Topic's module in one wording, read after several layers."""

    def __init__(self, modules: Modules, recipes: list[Recipe]) -> None:
        self.backbone, self.recipes = modules.backbone, recipes
        self.modules = {reading(recipe): cast(TopicModule, modules.of(recipe)) for recipe in recipes}
        self.names = list(self.modules)
        if any(not module.final_norm or module.bidirectional_layers for module in self.modules.values()):
            raise ValueError("A module that changes how the model reads needs a pass of its own.")
        # The one that runs the most layers runs those of the others.
        self.module = max(self.modules.values(), key=lambda module: depth(module.model))
        self.ends = {key: depth(module.model) for key, module in self.modules.items()}
        self.layers = sorted({*self.ends.values()}.union(*(module.lower_layers for module in self.modules.values())))
        reader = copy.copy(self.module)
        reader.read = self._read
        width = len(self.modules) * self.module.get_embedding_dimension()
        self.model = modules.model([reader, Pooling(width, POOLINGS[recipes[0].pooling])])
        self.settings = ["topic", [[key, module.get_config_dict()] for key, module in self.modules.items()]]

    def _read(self, layout: Layout) -> TokenVectors:
        """Return the vectors of each module, side by side."""
        lm = self.module.lm
        capture = Capture([lm.layers[layer - 1] for layer in self.layers])
        last = self.module.run(layout, capture)
        after = dict(zip(self.layers, capture.states, strict=True))
        vectors = []
        for key, module in self.modules.items():
            states = last if self.ends[key] == self.layers[-1] else lm.final_norm(after[self.ends[key]]).to(last)
            lower = [gather_positions(after[layer], layout.ends) for layer in module.lower_layers]
            vectors.append(module.vectors_of(states, lower, layout))
        return vectors[0]._replace(states=torch.cat([part.states for part in vectors], dim=-1))


class SweepPass(ModulePass):
    """Pass that gives all repetitions: see :class:`RecipeSweep`."""

    def __init__(self, modules: Modules, recipes: list[Recipe]) -> None:
        self.backbone, self.recipes = modules.backbone, recipes
        poolings = list(dict.fromkeys(POOLINGS[recipe.pooling] for recipe in recipes))
        layers = sorted({recipe.layer for recipe in recipes if recipe.layer is not None})
        copies = max(recipe.row.copies or 1 for recipe in recipes)
        self.sweep = RecipeSweep(self.backbone, copies, poolings, layers)
        self.module = self.sweep.module
        self.settings = ["sweep", self.sweep.recipes, self.sweep.poolings]

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        vectors = self.sweep.encode(texts, prompt, batch_size)
        return {reading(recipe): vectors[unprocessed(recipe).name, POOLINGS[recipe.pooling]] for recipe in self.recipes}


def passes_of(recipes: Sequence[Recipe]) -> list[tuple[type[ModulePass], list[Recipe]]]:
    """Return the recipes of each pass, and its class."""
    readings: dict[str, set[Any]] = {}
    for recipe in recipes:
        readings.setdefault(recipe.row.key, set()).add((recipe.layer, recipe.wording))
    sweeps = any(recipe.copies is not None and recipe.row.module is ReBAModule for recipe in recipes)

    def kind(recipe: Recipe) -> tuple[type[ModulePass], Hashable]:
        row = recipe.row
        several = len(readings[row.key]) > 1
        if recipe.weighs_tokens:
            return ModulePass, (unprocessed(recipe).name, recipe.fit_texts)
        # A sweep reads Echo after other layers, too.
        if sweeps and row.module is EchoModule and row.copies is not None:
            return SweepPass, None
        # Which layers attend both ways depends on where the model ends: one pass gives one layer alone.
        if several and reads_one_layer(row.module) and "bidirectional_layers" not in row.settings:
            return LayersPass, row.key
        if several and row.module is TopicModule:
            return TopicPass, (row.key, recipe.wording, recipe.pooling)
        return (ModulePass, (unprocessed(recipe).name, None)) if recipe.copies is None else (SweepPass, None)

    return [(kind(group[0])[0], group) for group in grouped(recipes, kind)]


def tokens(module: Any, texts: Sequence[str], backbone: CausalModule) -> float:
    """Return the number of tokens of texts as a module lays them out; one that runs half of the layers is half a token.

    Args:
        module: Module on any backbone.
        texts: Some of them, evenly drawn by their length, are laid out.
        backbone: The whole model.
    """
    if isinstance(module, InputEmbeddings) or not texts:
        return 0.0
    step = -(-len(texts) // _COUNTED)
    sample = sorted(texts, key=len)[step // 2 :: step]
    layouts, least = module.lay_out(sample), len(module.layouter.before)
    count = sum(int(layout.lengths.sum()) for layout in layouts) / len(sample)
    # A prefix of all texts runs once.
    prefixes = [len(layout.shared_prefix) for layout in layouts if len(layout.shared_prefix) > least]
    if prefixes and module.caches_prefixes and module.lm.continues_past:
        count -= sum(prefixes)
    return depth(module.model) / depth(backbone.model) * len(texts) * count


class Recipes:
    """Recipes on one model, and the controls that cost next to nothing: bags of its input embeddings.

    Nothing runs before it is asked for. A recipe that cannot be built, cannot embed or cannot be fitted is left out.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        recipes: Recipes to compare.
        batch_size: Number of texts at a time.
        controls: Whether the bags are among them.
        fit_on: Sets of plain texts, on each of which filters are fitted, except those of recipes with ``fit_texts`` of
            their own. Empty: the texts of the package.
        on_progress: Called when something has been done, with what it was and how many tokens.
        kept: Cache with the embeddings of a stopped run, to which those of this one are added. None: nothing is kept.

    Attributes:
        passes: Passes that the recipes come out of.
        modules: Modules of the recipes.
        cache: ``kept``, or a temporary one.

    Raises:
        ValueError: Here or later, when no recipe is left.
    """

    def __init__(
        self,
        backbone: CausalModule,
        recipes: Sequence[Recipe],
        *,
        batch_size: int = 32,
        controls: bool = True,
        fit_on: Sequence[tuple[str, ...]] = (),
        on_progress: OnTokens = lambda what, tokens: None,
        kept: TensorCache | None = None,
    ) -> None:
        own_texts = tuple(demo_sentences())
        # Weights of tokens come before the pooling: they are not fitted on embeddings.
        asked = [
            replace(recipe, fit_texts=own_texts) if recipe.weighs_tokens and not recipe.fit_texts else recipe
            for recipe in recipes
        ]
        self.backbone, self.modules = backbone, Modules(backbone)
        self.batch_size = batch_size
        self.with_controls = controls
        self.fit_on = list(fit_on) or [own_texts]
        self.on_progress = on_progress
        self.kept = kept
        self.cache = TensorCache() if kept is None else kept
        self.asked = [*(bags_of_input_embeddings(asked) if controls else []), *asked]
        self._left_out: dict[str, str] = {}
        self._filters: dict[Hashable, nn.Module] = {}
        self._embedded = Embedded(self._vectors, _BATCHES * batch_size)
        self._to_fit = Embedded(partial(self._vectors, to_fit=True), CHUNK)
        self.passes = [run for kind, group in passes_of(self.asked) for run in self._opened(group, kind)]

    @property
    def all(self) -> list[Recipe]:
        """Recipes that run on this backbone, controls among them. Their filters are fitted first."""
        for recipe in self._running(self.asked):
            try:
                for place in range(len(self.fit_on)):
                    self._filter(recipe, place)
            except Exception as error:
                self._leave_out([recipe], reason_of(error))
        return self._running(self.asked)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the results that are left out, and why. Of a row that is left out, no candidates are named."""
        running = {recipe.result for recipe in self.all}
        rows = {recipe.result: recipe.candidate_of for recipe in self.asked if recipe.candidate_of != recipe.result}
        return [(name, why) for name, why in self._left_out.items() if not rows.get(name) or rows[name] in running]

    def add(self, texts: Sequence[str], prompt: str | None = None) -> None:
        """Embed the texts that have not been embedded yet, by all recipes."""
        self._embedded.add(texts, prompt)

    def matrix(self, recipe: Recipe, texts: Sequence[str], prompt: str | None = None, fitted_on: int = -1) -> Tensor:
        """Return the vectors of B texts behind a prompt, (B, D), float32, on the CPU.

        Args:
            recipe: One of :attr:`all`.
            texts: B strings.
            prompt: Prompt before them.
            fitted_on: Index of the set of ``fit_on`` that the recipe's filter is fitted on.
        """
        vectors, transform = self._embedded.of(variant(recipe), texts, prompt), self._filter(recipe, fitted_on)
        if transform is None:
            return vectors
        with torch.inference_mode():
            features = transform({"sentence_embedding": vectors.to(device_of(self.backbone))})
        return cast(Tensor, features["sentence_embedding"]).cpu()

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, Tensor]:
        """Return the embedding of one word in each sentence, (B, D), by the recipes' names."""
        vectors: Vectors = {}
        for recipe in self.with_words:
            try:
                module = self.modules.of(recipe)
                settings = [type(module).__name__, module.get_config_dict()]
                compute = partial(self._words, self.model(recipe), sentences, words)
                vectors |= {recipe.name: self._computed(["words", settings, list(sentences), list(words)], compute)[""]}
                self.on_progress("Words", tokens(module, sentences, self.backbone))
            except Exception as error:
                self._left_out[f"Words of {recipe.name}"] = reason_of(error)
        return vectors

    def _words(self, model: SentenceTransformer, sentences: Sequence[str], words: Sequence[str]) -> Vectors:
        return {"": torch.from_numpy(encode_words(model, sentences, words, batch_size=self.batch_size))}

    @property
    def with_words(self) -> list[Recipe]:
        """Recipes that have word embeddings, each once, under a pooling that reads all tokens."""
        worded = [replace(recipe, pooling="mean") for recipe in self._running(self.asked) if recipe.words]
        return list({recipe.name: recipe for recipe in worded}.values())

    def model(self, recipe: Recipe) -> SentenceTransformer:
        """Return a recipe as a ready model, its filter fitted on the last set of ``fit_on``."""
        transform = self._filter(recipe, -1)
        return self.modules.model([*self.modules.pipeline(recipe), *([] if transform is None else [transform])])

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [len(tokens.ids) for tokens in tokens_of(self.backbone, texts)]

    @contextmanager
    def on_random_weights(self, keys: Collection[str]) -> Iterator[Recipes]:
        """Yield some of the recipes, and the bags, on weights that were never trained: controls.

        Memory may have no room for two models: the trained weights are on the disk meanwhile, and are back at the end.

        Args:
            keys: Names of the recipes' results.
        """
        chosen = [recipe.on_random_weights() for recipe in self.all if recipe.bag or recipe.result in keys]
        with set_aside(self.backbone.model):
            try:
                untrained = random_weights(self.backbone)
            except Exception as error:
                self._leave_out(chosen, reason_of(error))
                untrained, chosen = self.backbone, []
            made = Recipes(
                untrained,
                chosen,
                batch_size=self.batch_size,
                controls=False,
                fit_on=self.fit_on,
                on_progress=self.on_progress,
                kept=self.cache,
            )
            yield made
            self._left_out |= dict(made.skipped)

    @property
    def settings(self) -> dict[str, str]:
        """Settings that the recipes are run with."""
        model = self.backbone.model
        return {
            "batch size": str(self.batch_size),
            "device": str(model.device),
            "precision": str(model.dtype).removeprefix("torch."),
            "tokens of one copy, at most": str(self.backbone.max_seq_length or "no limit"),
        }

    def texts_to_fit(self, recipes: Iterable[Recipe]) -> list[str]:
        """Return the texts that the filters of these recipes are fitted on, each once."""
        sets = [texts for recipe in recipes if recipe.filter and recipe.filter.fitted for texts in self._sets(recipe)]
        return list(dict.fromkeys(text for texts in sets for text in texts))

    # Passes

    def _running(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Return the recipes that are not left out; without a recipe as it is, its candidates are."""
        return [recipe for recipe in recipes if not {recipe.result, recipe.candidate_of} & self._left_out.keys()]

    def _leave_out(self, recipes: Iterable[Recipe], reason: str) -> None:
        for recipe in recipes:
            self._left_out.setdefault(recipe.result, reason)
        asked = [recipe for recipe in self.asked if not recipe.control]
        if asked and not self._running(asked):
            raise ValueError(f"No recipe can run on this model. {asked[0].result}: {self._left_out[asked[0].result]}")

    def _opened(self, recipes: list[Recipe], kind: type[ModulePass] = ModulePass) -> list[ModulePass]:
        """Return the passes that recipes come out of; a recipe that cannot be built is left out."""
        try:
            return [kind(self.modules, recipes)]
        except Exception as error:
            return self._apart(recipes, kind, reason_of(error))

    def _apart(self, recipes: list[Recipe], kind: type[ModulePass], reason: str) -> list[ModulePass]:
        """Return passes of fewer recipes in place of one that failed; a recipe that failed alone is left out."""
        parts = grouped(recipes, reading if kind is ModulePass else lambda recipe: unprocessed(recipe).name)
        if kind is ModulePass and len(parts) < 2:
            self._leave_out(recipes, reason)
            return []
        return [run for part in parts for run in self._opened(part)]

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.backbone.model, self.backbone.tokenizer, self.backbone.max_seq_length)

    def _computed(self, of: Sequence[Any], compute: Callable[[], Mapping[str, Tensor]]) -> Vectors:
        return self.cache.get([self._fingerprint, self.batch_size, *of], compute)

    def _vectors(self, texts: Sequence[str], prompt: str | None, to_fit: bool = False) -> Vectors:
        """Embed texts by all recipes, or in the passes of those that are fitted: vectors before filters, by variant."""
        vectors = Vectors()
        for run in list(self.passes):
            if any(not to_fit or (recipe.filter and recipe.filter.fitted) for recipe in self._running(run.recipes)):
                vectors |= self._run(run, list(texts), prompt, "Fitting" if to_fit else "Embedding")
        return vectors

    def _run(self, run: ModulePass, texts: list[str], prompt: str | None, what: str) -> Vectors:
        """Embed texts in one pass; a pass that fails is taken apart from then on."""
        try:
            readings = sorted(set(map(reading, run.recipes)))
            compute = partial(run.encode, texts, prompt, self.batch_size)
            vectors = self._computed([run.settings, readings, texts, prompt], compute)
        except Exception as error:
            parts = self._apart(self._running(run.recipes), type(run), reason_of(error))
            place = self.passes.index(run)
            self.passes[place : place + 1] = parts
            return {key: matrix for part in parts for key, matrix in self._run(part, texts, prompt, what).items()}
        for recipe in self._running(run.recipes):
            if not vectors[reading(recipe)].isfinite().all():
                reason = f"A value is infinite or not a number in {self.settings['precision']}."
                self._leave_out([recipe], reason)
        self.on_progress(what, run.tokens(texts))
        return {variant(recipe): vectors[reading(recipe)] for recipe in self._running(run.recipes)}

    # Filters

    def _sets(self, recipe: Recipe) -> list[tuple[str, ...]]:
        """Return the sets of texts that the filter of a recipe is fitted on."""
        part = cast(PostProcessor, recipe.filter)
        return [part.drawn(texts) for texts in ([recipe.fit_texts] if recipe.fit_texts else self.fit_on)]

    def _filter(self, recipe: Recipe, fitted_on: int) -> nn.Module | None:
        """Return what comes after the pooling of a recipe, fitted once for all weights of its parts."""
        part = recipe.filter
        if part is None:
            return None
        # A single set serves every half.
        place = 0 if recipe.fit_texts else fitted_on % len(self.fit_on)
        # The language model's head gives one filter for all recipes.
        key = (part, variant(recipe), bool(recipe.fit_texts), place) if part.fitted else part
        if key not in self._filters:
            self._filters[key] = self._made(recipe, part, place)
        transform = self._filters[key]
        if recipe.part_weights:
            transform = copy.copy(transform)
            transform.shares = check_part_weights(recipe.part_weights)  # type: ignore[assignment]
        return transform

    def _made(self, recipe: Recipe, part: PostProcessor, place: int) -> nn.Module:
        if not part.fitted:
            return part.fit(self.modules.model(self.modules.pipeline(recipe)), ())
        name, texts, source = variant(recipe), self._sets(recipe)[place], self._embedded
        if not source.has(texts):
            source = self._to_fit
            source.add(self.texts_to_fit([recipe]))
        moments = Moments(source.of(name, texts[:1]).shape[1], covariance=part.module.NEEDS_COVARIANCE)
        # In the chunks of `embedding_moments`: equal embeddings give equal filters.
        for start in range(0, len(texts), CHUNK):
            vectors = source.of(name, texts[start : start + CHUNK])
            # Texts without tokens, which are embedded as zero vectors, do not count.
            moments.add(vectors[vectors.any(dim=1)])
        return part.from_moments(moments, self.modules.of(recipe).part_weights)


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Take a model's weights out of memory within the block, and put them back at the end, to the bit.

    Models that share its parameters must not be run meanwhile. Parameters of other types, as those of quantised models,
    stay in memory; so do all parameters if the disk has no room.

    Args:
        model: Model on any devices.
    """
    plain = [parameter for parameter in model.parameters() if type(parameter) is nn.Parameter]
    with tempfile.TemporaryDirectory(prefix="st-reba-") as directory:
        path = Path(directory) / "weights.pt"
        try:
            torch.save([parameter.data for parameter in plain], path)
        # torch has an error of its own for a full disk.
        except (OSError, RuntimeError) as error:
            if not is_full(error):
                raise
            plain = []
        for parameter in plain:
            parameter.data = parameter.data.new_empty(0)
        try:
            yield
        finally:
            for parameter, weights in zip(plain, torch.load(path) if plain else [], strict=True):
                parameter.data = weights
