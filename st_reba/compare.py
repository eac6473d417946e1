"""Which recipe for this model and these texts: every recipe beside two controls, in one table."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from .data import Pairs
from .evaluation import OddOneOutEvaluator, Question
from .modules import (
    BidirectionalLastLayer,
    CausalModule,
    CausalTransformer,
    EchoModule,
    InputEmbeddings,
    ReBAModule,
    RefinedThoughtModule,
)

#: Poolings as the papers call them, and as ST does.
POOLINGS = {"mean": "mean", "last": "lasttoken"}

_TIMED_TEXTS = 64
_TIMED_ROUNDS = 3


@dataclass(frozen=True)
class Recipe:
    """One way to read the language model.

    Attributes:
        name: As the table shows it.
        pooling: A key of :data:`POOLINGS`.
        build: Makes the module on a backbone that is already loaded.
        control: Whether this is there to be beaten.
        words: Whether it has word embeddings, one a token of the text.
    """

    name: str
    pooling: str
    build: Callable[[CausalModule], CausalModule]
    control: bool = False
    words: bool = True

    def model(self, backbone: CausalModule) -> SentenceTransformer:
        """The recipe as a ready model, on the backbone's device."""
        module = self.build(backbone)
        pooling = Pooling(module.get_embedding_dimension(), POOLINGS[self.pooling])
        return SentenceTransformer(modules=[module, pooling], device=str(backbone.model.device))


@dataclass(frozen=True)
class Result:
    """What one recipe gave.

    Attributes:
        recipe: Which.
        spearman: Spearman correlation of the cosine similarities with the labels, -1 to 1.
        odd_one_out: Accuracy on the word-sense questions, 0 to 1; None if none were asked. It does not depend on the
            pooling.
        seconds: Median time to embed the timed texts.
        sentences_per_second: How many texts that is a second.
        cost: Time as a multiple of the classical embedding's under the same pooling.
    """

    recipe: Recipe
    spearman: float
    odd_one_out: float | None
    seconds: float
    sentences_per_second: float
    cost: float


def random_weights(backbone: CausalModule, seed: int = 0) -> CausalModule:
    """The classical embedding of the same architecture and tokenizer with freshly initialised weights."""
    control = CausalTransformer(backbone)
    config = copy.deepcopy(backbone.model.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config)
    control.model = model.to(backbone.model.device, backbone.model.dtype).eval()
    return control


def default_recipes() -> list[Recipe]:
    """Every training-free recipe under the poolings that make sense for it, and the two controls."""
    recipes = [Recipe("Bag of input embeddings", "mean", InputEmbeddings, control=True)]
    recipes += [Recipe("Random weights, Classical", pooling, random_weights, control=True) for pooling in POOLINGS]
    for pooling in POOLINGS:
        recipes.append(Recipe("Classical", pooling, CausalTransformer))
        recipes += [Recipe(f"Echo-{k}", pooling, _echo(k)) for k in (2, 3)]
        recipes += [Recipe(f"ReBA-{k}", pooling, _reba(k, pooling)) for k in (2, 3)]
        recipes.append(Recipe("Bidirectional", pooling, _bidirectional))
        recipes.append(Recipe("Echo-2, bidirectional", pooling, _echo(2, bidirectional_layers=1)))
        recipes.append(Recipe("ReBA-2, bidirectional", pooling, _reba(2, pooling, bidirectional_layers=1)))
    recipes.append(Recipe("Bidirectional, prompt", "last", BidirectionalLastLayer, words=False))
    recipes += [Recipe(f"RT-{passes}", "last", _thought(passes), words=False) for passes in (2, 4, 8)]
    return recipes


def _bidirectional(backbone: CausalModule) -> CausalModule:
    return CausalTransformer(backbone, bidirectional_layers=1)


def _echo(repetitions: int, bidirectional_layers: int = 0) -> Callable[[CausalModule], CausalModule]:
    return lambda backbone: EchoModule(backbone, repetitions=repetitions, bidirectional_layers=bidirectional_layers)


def _reba(repetitions: int, pooling: str, bidirectional_layers: int = 0) -> Callable[[CausalModule], CausalModule]:
    rows: Literal["all", "last"] = "last" if pooling == "last" else "all"
    return lambda backbone: ReBAModule(
        backbone, repetitions=repetitions, rows=rows, bidirectional_layers=bidirectional_layers
    )


def _thought(passes: int) -> Callable[[CausalModule], CausalModule]:
    return lambda backbone: RefinedThoughtModule(backbone, iterations=passes)


def compare(
    backbone: CausalModule,
    pairs: Pairs,
    questions: Sequence[Question] = (),
    *,
    recipes: Sequence[Recipe] | None = None,
    batch_size: int = 32,
    on_step: Callable[[str], None] = lambda step: None,
    on_skip: Callable[[Recipe, str], None] = lambda recipe, reason: None,
) -> list[Result]:
    """Score and time every recipe on one backbone.

    Args:
        backbone: The loaded model; every recipe shares its weights.
        pairs: Labelled sentence pairs.
        questions: Word-sense questions; none are asked if empty.
        recipes: What to compare; :func:`default_recipes` if None. A recipe "Classical" is the unit of cost where there
            is one of the same pooling, else the first recipe.
        batch_size: Texts at a time.
        on_step: Called when something has been done, with its name; :func:`number_of_steps` times in all.
        on_skip: Called with a recipe that this backbone cannot run, and why; it is left out.

    Returns:
        One result a recipe, in their order.
    """
    evaluator = EmbeddingSimilarityEvaluator(
        pairs.first, pairs.second, pairs.scores, batch_size=batch_size, main_similarity="cosine", write_csv=False
    )
    models, spearman, ran = [], [], []
    for recipe in default_recipes() if recipes is None else recipes:
        try:
            model = recipe.model(backbone)
        except ValueError as error:
            on_skip(recipe, str(error))
            continue
        models.append(model)
        ran.append(recipe)
        spearman.append(float(evaluator(model)["spearman_cosine"]))
        on_step(f"{recipe.name}, {recipe.pooling}")

    recipes = ran
    odd_one_out: dict[str, float] = {}
    if questions:
        words = OddOneOutEvaluator(questions, batch_size=batch_size)
        for recipe, model in zip(recipes, models, strict=True):
            if recipe.words and recipe.name not in odd_one_out and getattr(model[0], "rows", "all") == "all":
                odd_one_out[recipe.name] = words(model)["euclidean_accuracy"]
                on_step(f"{recipe.name}, word sense")

    seconds = _interleaved_seconds(models, pairs.texts()[:_TIMED_TEXTS], batch_size, on_step)
    timed = min(_TIMED_TEXTS, len(pairs.texts()))
    units = {
        recipe.pooling: spent for recipe, spent in zip(recipes, seconds, strict=True) if recipe.name == "Classical"
    }
    return [
        Result(
            recipe=recipe,
            spearman=score,
            odd_one_out=odd_one_out.get(recipe.name),
            seconds=spent,
            sentences_per_second=timed / spent,
            cost=spent / units.get(recipe.pooling, seconds[0]),
        )
        for recipe, score, spent in zip(recipes, spearman, seconds, strict=True)
    ]


def number_of_steps(recipes: Sequence[Recipe], questions: Sequence[Question]) -> int:
    """How often :func:`compare` calls ``on_step``."""
    with_words = {recipe.name for recipe in recipes if recipe.words}
    return len(recipes) + (len(with_words) if questions else 0) + _TIMED_ROUNDS


def _interleaved_seconds(
    models: Sequence[SentenceTransformer], texts: list[str], batch_size: int, on_step: Callable[[str], None]
) -> list[float]:
    """Median time of each model, all of them taking turns, so that a busy machine is busy for all."""
    rounds: list[list[float]] = []
    for number in range(_TIMED_ROUNDS):
        spent = []
        for model in models:
            start = time.perf_counter()
            model.encode(texts, batch_size=batch_size, show_progress_bar=False)
            spent.append(time.perf_counter() - start)
        rounds.append(spent)
        on_step(f"timing, round {number + 1} of {_TIMED_ROUNDS}")
    return [median(times) for times in zip(*rounds, strict=True)]
