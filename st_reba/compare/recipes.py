"""Recipes on one model: the passes that they come out of, their controls, and what they give for texts.

A pass is one way in which texts run through the model. Recipes that differ only in the pooling, in what stands behind
it, in the layer that is read or in the number of repetitions come out of one pass; each pass has one ``encode``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..data.demo import demo_sentences
from ..evaluation.embedded import Embedded, TensorCache
from ..files import is_full
from ..fingerprint import fingerprint
from ..lm.anatomy import final_norm
from ..lm.backbone import depth
from ..lm.run import StatesAt, at
from ..modules import CausalModule, CausalTransformer, EchoModule, InputEmbeddings, ReBAModule, TopicModule
from ..modules.moments import Moments
from ..modules.partwise import checked_shares
from ..modules.token_vectors import TokenVectors
from ..reading.layers import LayerReader, reads_one_layer
from ..reading.words import encode_words, find_words, pool_words
from ..recipes import Recipe, default_recipes
from ..recipes.lookup import bags_of_input_embeddings
from ..recipes.recipe import POOLINGS, Wording, device_of, mode_of, random_model
from ..text.layout import Layout
from .sweep import RecipeSweep

#: Called with what was done, and to how many tokens.
OnTokens = Callable[[str, float], None]
#: From texts, their prompt and how many run at a time to what each reading gives, (B, D) float32 on the CPU.
Vectors = dict[str, Tensor]

# Texts that stand for others where tokens are counted.
_COUNTED = 64
# Batches of a file in the cache: what a killed run loses, at most, of each pass.
_BATCHES = 8
# Texts that filters are fitted on are embedded so many at a time, in their order: as `embedding_moments` does, so that
# what is fitted here and what is fitted there are equal to the bit where the embeddings are.
_FITTED = 1024


def reading(recipe: Recipe) -> str:
    """What tells a recipe's vectors from others of the same pass, before its filter."""
    return f"{recipe.method}|{recipe.pooling}"


class ModulePass:
    """One module, read at its end or after several layers, whose tokens are pooled in every way.

    Args:
        backbone: The loaded model.
        recipes: What comes out of it.
        by_layer: Whether it is read after several layers.

    Attributes:
        module: What runs the model, as far as tokens are counted.
        settings: What tells its vectors from those of any other pass on the same model.
        words: Names of the recipes that have word embeddings, and their methods.
    """

    def __init__(self, backbone: CausalModule, recipes: list[Recipe], by_layer: bool = False) -> None:
        # One that is made for the last token alone may hand on no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        self.recipes, self.backbone = recipes, backbone
        # By layer: all of the whole model, also those above the recipe's own end.
        self.module = widest.row.build(backbone, layer=-1) if by_layer else widest.build(backbone)
        self.poolings = list(dict.fromkeys(recipe.pooling for recipe in recipes))
        parts = widest.pipeline(self.module, tuple(map(mode_of, self.poolings)))
        self.model = SentenceTransformer(modules=parts, device=device_of(backbone))
        self.reader = LayerReader(self.model) if by_layer else None
        weights = widest.fit_texts if widest.weighs_tokens else None
        self.settings = [by_layer, type(self.module).__name__, self.module.get_config_dict(), self.poolings, weights]
        has_words = getattr(self.module, "rows", "all") == "all" and not (by_layer and widest.row.end != -1)
        self.words = {recipe.name: recipe.method for recipe in recipes if recipe.words and has_words}

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        """Of each recipe before its filter, by :func:`reading`: (B, D), float32, on the CPU."""
        if self.reader is None:
            vectors = self.model.encode(
                list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
            )
            by_pooling = zip(self.poolings, vectors.float().cpu().chunk(len(self.poolings), dim=1), strict=True)
            return {f"{self.recipes[0].method}|{pooling}": own for pooling, own in by_pooling}
        batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
        found = torch.cat([self.reader.embeddings(batch, prompt).float() for batch in batches], dim=1)
        pooled = dict(zip(self.poolings, found.chunk(len(self.poolings), dim=2), strict=True))
        last = self.reader.count + self.recipes[0].row.end
        return {
            reading(recipe): pooled[recipe.pooling][last if recipe.layer is None else recipe.layer]
            for recipe in self.recipes
        }

    def encode_words(self, sentences: Sequence[str], words: Sequence[str], batch_size: int) -> Vectors:
        """The embedding of one word in each sentence, by the recipes' methods, each (B, D)."""
        vectors = encode_words(self.model, list(sentences), list(words), batch_size=batch_size)
        return {method: torch.from_numpy(vectors) for method in self.words.values()}

    def tokens(self, texts: Sequence[str]) -> float:
        """How many tokens texts are in this pass: see :func:`tokens`."""
        return tokens(self.module, texts, self.backbone)


class SweepPass:
    """All repetitions, in the form of a :class:`ModulePass`: see :class:`RecipeSweep`."""

    def __init__(self, backbone: CausalModule, recipes: list[Recipe]) -> None:
        poolings = list(dict.fromkeys(POOLINGS[recipe.pooling] for recipe in recipes))
        self.recipes, self.backbone = recipes, backbone
        layers = sorted({recipe.layer for recipe in recipes if recipe.layer is not None})
        self.sweep = RecipeSweep(backbone, max(recipe.row.copies or 1 for recipe in recipes), poolings, layers)
        self.module = self.sweep.module(self.sweep.recipes[-1])
        self.settings = ["sweep", self.sweep.recipes, self.sweep.poolings]
        self.words = {recipe.name: recipe.method for recipe in recipes if recipe.words}

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        found = self.sweep.encode(texts, prompt, batch_size)
        return {reading(recipe): found[recipe.method, POOLINGS[recipe.pooling]] for recipe in self.recipes}

    def encode_words(self, sentences: Sequence[str], words: Sequence[str], batch_size: int) -> Vectors:
        # Each recipe truncates a long sentence in its own way.
        places = {name: find_words(self.sweep.module(name), sentences, words) for name in self.sweep.recipes}
        vectors: dict[str, list[Tensor]] = {name: [] for name in self.sweep.recipes}
        for number, readings in enumerate(self.sweep.token_embeddings(sentences, batch_size=batch_size)):
            for name, own in vectors.items():
                own.append(pool_words([readings[name]], [places[name][number]])[0])
        return {name: torch.stack(own) for name, own in vectors.items()}

    def tokens(self, texts: Sequence[str]) -> float:
        return tokens(self.module, texts, self.backbone)


class TopicPass(ModulePass):
    """Topic's module in one wording, read after several layers of one pass.

    Args:
        backbone: The loaded model.
        recipes: What comes out of it: one row under one wording and any layers.

    Raises:
        ValueError: If the backbone cannot run one of them, or one changes how the model reads.
    """

    def __init__(self, backbone: CausalModule, recipes: list[Recipe]) -> None:
        self.recipes, self.backbone = recipes, backbone
        self.modules = {reading(recipe): cast(TopicModule, recipe.build(backbone)) for recipe in recipes}
        for module in self.modules.values():
            if not module.final_norm or module.changes:
                raise ValueError("What changes how a model reads is run in a pass of its own.")
        # The one that runs the most runs the others' layers, too.
        self.module = max(self.modules.values(), key=lambda module: depth(module.model))
        self.ends = {key: depth(module.model) for key, module in self.modules.items()}
        self.layers = sorted({*self.ends.values()}.union(*(module.lower_layers for module in self.modules.values())))
        self.norm = final_norm(self.module.model)
        reader = copy.copy(self.module)
        reader._read = self._read  # type: ignore[method-assign]
        width = len(recipes) * self.module.get_embedding_dimension()
        pooling = Pooling(width, POOLINGS[recipes[0].pooling])
        self.model = SentenceTransformer(modules=[reader, pooling], device=device_of(backbone))
        self.settings = ["topic", [[key, module.get_config_dict()] for key, module in self.modules.items()]]
        # Topic gives the tokens of a text no vectors of their own.
        self.words = {}

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        vectors = self.model.encode(
            list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return dict(zip(self.modules, vectors.float().cpu().chunk(len(self.modules), dim=1), strict=True))

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        """What each module reads, side by side."""
        seen = StatesAt([self.module.layer(layer - 1) for layer in self.layers], "after")
        last = self.module.run(layout, change=[seen.as_change()], **kwargs)
        after = dict(zip(self.layers, seen.states(), strict=True))
        found = []
        for key, module in self.modules.items():
            end = self.ends[key]
            states = last if end == self.layers[-1] else self.norm(after[end]).to(last)
            found.append(module.read(layout, states, [at(after[layer], layout.ends) for layer in module.lower_layers]))
        return found[0]._replace(states=torch.cat([own.states for own in found], dim=-1))


def listed_of(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Those that have a row of their own: of candidates the recipe as it is."""
    return [recipe for recipe in recipes if recipe.candidate_of in ("", recipe.result)]


#: One way in which texts run through the model.
RecipePass: TypeAlias = ModulePass | SweepPass


def passes_of(backbone: CausalModule, recipes: Sequence[Recipe]) -> tuple[list[RecipePass], list[tuple[Recipe, str]]]:
    """The passes that recipes come out of; and the recipes that this backbone cannot run, and why."""
    readings: dict[str, set[tuple[int | None, Wording | None]]] = {}
    for recipe in recipes:
        readings.setdefault(recipe.row.key, set()).add((recipe.layer, recipe.wording))
    sweeps = any(recipe.copies is not None and recipe.row.module is ReBAModule for recipe in recipes)
    groups: dict[tuple[str, Any], list[Recipe]] = {}
    for recipe in recipes:
        weights = recipe.fit_texts if recipe.weighs_tokens else None
        group: tuple[str, Any] = ("module", (recipe.method, weights))
        several = weights is None and len(readings[recipe.row.key]) > 1
        # A sweep has Echo's layers, too. Which layers attend both ways depends on where the model ends: one pass gives
        # one layer alone.
        if sweeps and recipe.row.module is EchoModule and recipe.row.copies is not None and weights is None:
            group = ("sweep", ())
        elif several and reads_one_layer(recipe.row.module) and "bidirectional_layers" not in recipe.row.settings:
            group = ("layers", recipe.row.key)
        elif several and recipe.row.module is TopicModule:
            group = ("topic", (recipe.row.key, recipe.wording, recipe.pooling))
        elif recipe.copies is not None:
            group = ("sweep", ())
        groups.setdefault(group, []).append(recipe)
    passes: list[RecipePass] = []
    skipped: list[tuple[Recipe, str]] = []
    while groups:
        (how, key), own = next(iter(groups.items()))
        del groups[how, key]
        try:
            if how == "sweep":
                passes.append(SweepPass(backbone, own))
            elif how == "topic":
                passes.append(TopicPass(backbone, own))
            else:
                passes.append(ModulePass(backbone, own, how == "layers"))
        except ValueError as error:
            if how in ("sweep", "topic"):
                # What this backbone can run of them runs on its own.
                for recipe in own:
                    groups.setdefault(("module", (recipe.method, None)), []).append(recipe)
            else:
                skipped += [(recipe, str(error)) for recipe in own]
    return passes, skipped


def sample_of(texts: Sequence[str]) -> list[str]:
    """Some texts, evenly drawn, in which tokens are counted."""
    return list(texts[:: -(-len(texts) // _COUNTED)])


def tokens(module: Any, texts: Sequence[str], backbone: CausalModule) -> float:
    """How many tokens texts are as a module lays them out; one that runs through half of the layers is half a token.

    Args:
        module: On any backbone.
        texts: Some of them, evenly drawn, are laid out.
        backbone: The whole model.
    """
    if isinstance(module, InputEmbeddings) or not texts:
        return 0.0
    sample = sample_of(texts)
    layout = module.lay_out(sample)
    # What stands before all texts is run once.
    kept = sum(map(len, module.prefixes_of(layout, module.rows_per_text) or ()))
    share = depth(module.model) / depth(backbone.model)
    return share * len(texts) * (int(layout.attention_mask.sum()) / len(sample) - kept)


class Recipes:
    """Recipes on one model, and the controls that cost next to nothing: bags of its input embeddings.

    Nothing runs before it is asked for; what stands behind poolings is fitted then, for all recipes on one pass.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        recipes: What to compare; :func:`st_reba.recipes.default_recipes` if None.
        batch_size: Texts at a time.
        controls: Whether the bags are among them.
        fit_on: Sets of plain texts. Filters are fitted on each, and :meth:`vectors` says which is meant; but those of
            recipes with ``fit_texts`` of their own. Empty: the texts of the package, for all that has none.
        on_progress: Called when something has been done, with what it was and how many tokens.
        kept: Has what was embedded before, and keeps what is now; None: nothing is kept.

    Attributes:
        passes: What the recipes come out of.
        cache: ``kept``, or a temporary one.
    """

    def __init__(
        self,
        backbone: CausalModule,
        recipes: Sequence[Recipe] | None = None,
        *,
        batch_size: int = 32,
        controls: bool = True,
        fit_on: Sequence[tuple[str, ...]] = (),
        on_progress: OnTokens = lambda what, tokens: None,
        kept: TensorCache | None = None,
    ) -> None:
        # Weights of tokens stand before the pooling: they are not fitted on embeddings.
        weighed = tuple(demo_sentences())
        asked = [
            replace(recipe, fit_texts=weighed) if recipe.weighs_tokens and not recipe.fit_texts else recipe
            for recipe in (default_recipes() if recipes is None else recipes)
        ]
        self.backbone = backbone
        self.batch_size = batch_size
        self.with_controls = controls
        self.fit_on = list(fit_on) or [tuple(demo_sentences())]
        self.on_progress = on_progress
        self.kept = kept
        self.cache = TensorCache() if kept is None else kept
        self.asked = [*(bags_of_input_embeddings(asked) if controls else []), *asked]
        self.passes, self._refused = self._passes()
        self._embedded = Embedded(self._in_batches, _BATCHES * batch_size)

    @property
    def all(self) -> list[Recipe]:
        """The recipes that this backbone can run, controls among them."""
        left_out = {key for key, _ in self.skipped}
        return [recipe for recipe in self.asked if recipe.result not in left_out]

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The others, by the names of their results, and why."""
        return [(recipe.result, reason) for recipe, reason in [*self._refused, *self._fitted[1]]]

    @property
    def keys(self) -> list[str]:
        """Name and pooling of each."""
        return [recipe.result for recipe in self.all]

    # What they give

    def add(self, texts: Sequence[str], prompt: str | None = None) -> None:
        """Embed texts, those that have not been yet, with all recipes: :meth:`vectors` looks them up."""
        self._embedded.add(texts, prompt)

    def matrix(self, key: str, texts: Sequence[str], prompt: str | None = None, fitted_on: int = 0) -> Tensor:
        """What the recipe of this result gives for B texts behind a prompt, (B, D), float32, on the CPU.

        Args:
            key: Of the result.
            texts: B strings.
            prompt: What stands before them.
            fitted_on: Which set of ``fit_on`` its filter is fitted on.
        """
        return self._filtered(key, self._embedded.of(key, texts, prompt), fitted_on)

    def words(self, sentences: Sequence[str], words: Sequence[str]) -> dict[str, Tensor]:
        """The embedding of one word in each sentence, by the recipes' names, each (B, D): see :func:`encode_words`."""
        found: Vectors = {}
        for run in self.passes:
            if run.words:
                of = ["words", list(sentences), list(words)]
                own = self._computed(run, of, partial(run.encode_words, sentences, words, self.batch_size))
                found |= {name: own[method] for name, method in run.words.items()}
                self.on_progress("Words", run.tokens(sentences))
        return found

    def model(self, key: str, fitted_on: int = 0) -> SentenceTransformer:
        """One of the recipes as a ready model, its filter fitted on one set of ``fit_on``."""
        recipe = next(recipe for recipe in self.all if recipe.result == key)
        pooled, behind = recipe.model(self.backbone, filtered=False), self._filter(key, fitted_on)
        if behind is None:
            return pooled
        modules = [*pooled.children(), behind]
        return SentenceTransformer(modules=modules, device=device_of(self.backbone))

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self.backbone.token_ids(texts)]

    @contextmanager
    def on_random_weights(self, keys: Collection[str]) -> Iterator[Recipes]:
        """Some of the recipes, and the bags, on weights that were never trained: controls.

        Memory may have no room for two models: the trained weights lie on the disk meanwhile, and are back at the end.

        Args:
            keys: Of the recipes.
        """
        untrained = CausalTransformer(self.backbone)
        chosen = [recipe.on_random_weights() for recipe in self.all if recipe.bag or recipe.result in keys]
        with set_aside(self.backbone.model):
            untrained.model = random_model(self.backbone.model)
            yield Recipes(
                untrained,
                chosen,
                batch_size=self.batch_size,
                controls=False,
                fit_on=self.fit_on,
                on_progress=self.on_progress,
                kept=self.cache,
            )

    # How

    def _passes(self) -> tuple[list[RecipePass], list[tuple[Recipe, str]]]:
        return passes_of(self.backbone, self.asked)

    @property
    def told(self) -> dict[str, str]:
        """How they are run, as a comparison tells it."""
        model = self.backbone.model
        return {
            "batch size": str(self.batch_size),
            "device": str(model.device),
            "precision": str(model.dtype).removeprefix("torch."),
            "tokens of one copy, at most": str(self.backbone.max_seq_length or "no limit"),
        }

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.backbone.model, self.backbone.tokenizer, self.backbone.max_seq_length)

    def _computed(self, run: RecipePass, of: Sequence[Any], compute: Callable[[], Mapping[str, Tensor]]) -> Vectors:
        readings = sorted(set(map(reading, run.recipes)))
        return self.cache.get([self._fingerprint, self.batch_size, run.settings, readings, *of], compute)

    def _in_batches(self, texts: Sequence[str], prompt: str | None) -> Vectors:
        starts = range(0, len(texts), self.batch_size)
        # Before their filters are fitted, which may be on these texts.
        every = [recipe for run in self.passes for recipe in run.recipes]
        return self._pooled([list(texts[start : start + self.batch_size]) for start in starts], prompt, every)

    def _pooled(
        self,
        batches: list[list[str]],
        prompt: str | None,
        recipes: Sequence[Recipe],
        what: str = "Embedding",
    ) -> Vectors:
        """What these recipes give before their filters, by the results' names, each (B, D)."""
        keys = {recipe.result for recipe in recipes}
        texts = [text for batch in batches for text in batch]
        found: Vectors = {}
        for run in self.passes:
            if own := [recipe for recipe in run.recipes if recipe.result in keys]:

                def compute(run: RecipePass = run) -> Vectors:
                    parts = [run.encode(batch, prompt, self.batch_size) for batch in batches]
                    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

                vectors = self._computed(run, [batches, prompt], compute)
                found |= {recipe.result: vectors[reading(recipe)] for recipe in own}
                self.on_progress(what, run.tokens(texts))
        return found

    @torch.inference_mode()
    def _filtered(self, key: str, vectors: Tensor, fitted_on: int) -> Tensor:
        module = self._filter(key, fitted_on)
        if module is None:
            return vectors
        found: Tensor = module({"sentence_embedding": vectors.to(device_of(self.backbone))})["sentence_embedding"]
        return found.cpu()

    def _filter(self, key: str, fitted_on: int) -> nn.Module | None:
        found = self._fitted[0]
        return found.get((key, fitted_on), found.get((key, 0)))

    @cached_property
    def _fitted(self) -> tuple[dict[tuple[str, int], nn.Module], list[tuple[Recipe, str]]]:
        """What stands behind the poolings, by the results' names and the sets of ``fit_on``; and the recipes for which
        it cannot be made."""
        modules: dict[tuple[str, int], nn.Module] = {}
        skipped: list[tuple[Recipe, str]] = []
        head: nn.Module | None = None
        for run in self.passes:
            # What differs in the shares alone has the same statistics, which for a wide model are not cheap.
            made: dict[tuple[Any, ...], nn.Module | ValueError] = {}
            for recipe in run.recipes:
                if recipe.filter is None:
                    continue
                if not recipe.filter.fitted:
                    try:
                        # The same for all, and on a large model not cheap.
                        head = head or recipe.filter.made(recipe.model(self.backbone, filtered=False), ())
                        modules[recipe.result, 0] = head
                    except ValueError as error:
                        skipped.append((recipe, str(error)))
                    continue
                for place, own in enumerate([recipe.fit_texts] if recipe.fit_texts else self.fit_on):
                    texts = recipe.filter.drawn(own)
                    of = (reading(recipe), recipe.filter, texts)
                    if of not in made:
                        made |= self._made(run, texts)
                    found = made[of]
                    if isinstance(found, ValueError):
                        skipped.append((recipe, str(found)))
                        break
                    modules[recipe.result, place] = with_shares(found, recipe.shares)
        return modules, sorted(skipped, key=lambda entry: self.asked.index(entry[0]))

    def fitted_on(self, run: RecipePass) -> list[tuple[str, ...]]:
        """The sets of texts that filters of a pass are fitted on, each once."""
        fitted = [recipe for recipe in run.recipes if recipe.filter is not None and recipe.filter.fitted]
        return list(
            {
                recipe.filter.drawn(own): None
                for recipe in fitted
                if recipe.filter is not None
                for own in ([recipe.fit_texts] if recipe.fit_texts else self.fit_on)
            }
        )

    def _made(self, run: RecipePass, texts: tuple[str, ...]) -> dict[tuple[Any, ...], nn.Module | ValueError]:
        """The filters of all recipes of a pass that are fitted on these texts; or why there are none."""
        fitted = [
            recipe
            for recipe in run.recipes
            if recipe.filter is not None
            and recipe.filter.fitted
            and texts in map(recipe.filter.drawn, [recipe.fit_texts] if recipe.fit_texts else self.fit_on)
        ]
        moments = self._moments(texts, fitted)
        made: dict[tuple[Any, ...], nn.Module | ValueError] = {}
        for recipe in fitted:
            if recipe.filter is None or (of := (reading(recipe), recipe.filter, texts)) in made:
                continue
            try:
                own = moments[reading(recipe)]
                if isinstance(own, ValueError):
                    raise own
                made[of] = recipe.filter.from_moments(own, recipe.build(self.backbone).shares)
            except ValueError as error:
                made[of] = error
        return made

    def _moments(self, texts: tuple[str, ...], fitted: Sequence[Recipe]) -> dict[str, Moments | ValueError]:
        """Mean and covariance of what the recipes that are fitted on these texts give them; or why there are none."""
        whole = {reading(recipe) for recipe in fitted if recipe.filter and recipe.filter.needs_covariance}
        moments: dict[str, Moments | ValueError] = {}
        for start in range(0, len(texts), _FITTED):
            part = list(texts[start : start + _FITTED])
            if self._embedded.has(part):
                found = {recipe.result: self._embedded.of(recipe.result, part) for recipe in fitted}
            else:
                found = self._pooled([part], None, fitted, "Fitting")
            for key, vectors in {reading(recipe): found[recipe.result] for recipe in fitted}.items():
                own = moments.setdefault(key, Moments(vectors.shape[1], covariance=key in whole))
                try:
                    if isinstance(own, Moments):
                        # Texts without tokens, which are embedded as zero vectors, do not count.
                        own.add(vectors[vectors.any(dim=1)])
                except ValueError as error:
                    moments[key] = error
        return moments


def with_shares(module: nn.Module, shares: Sequence[float]) -> nn.Module:
    """A fitted filter of parts that count for something else; none: as they are."""
    if not shares:
        return module
    found = copy.copy(module)
    found.shares = checked_shares(shares)  # type: ignore[assignment]
    return found


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Take a model's weights out of memory, and put them back at the end, to the bit.

    Whatever shares its parameters lacks them as well, and is not to be run meanwhile. Parameters of a type of their
    own, as those of quantised models, stay where they are; and so do all where the disk has no room.

    Args:
        model: On any devices.
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
