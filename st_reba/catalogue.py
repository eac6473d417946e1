"""The recipes that are compared: ways to read one language model, and the controls beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoModel, PreTrainedModel

from .data.demo import demo_sentences
from .modules import (
    BidirectionalLastLayer,
    CausalModule,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from .modules.after_pooling.choices import IDF, PARTWISE, Filter, Weighting, fitted_on

#: Names of the controls; the last stands before the recipe that it is the control of: ``"Random weights, ReBA-2"``.
TF_IDF = "tf-idf"
BAG = "Bag of input embeddings"
RANDOM = "Random weights"

#: Poolings as the papers call them, and as ST does.
POOLINGS = {"mean": "mean", "last": "lasttoken"}

#: Prompts that are read at their end, by the names of their recipes: names of templates, which bring the rest.
PROMPTS = {
    "PromptEOL": "prompteol",
    "PromptEOL, Chinese": "prompteol-zh",
    "Pretended CoT": "pretended-cot",
    "Knowledge": "knowledge",
}


#: Under last pooling the last token is read, which sees the whole text either way: a bidirectional last layer gives it
#: nothing new, and without repetition it looks back at itself alone, at :math:`e_n = a_{nn} v_n`.
SAME_UNDER_LAST_POOLING = {
    "Classical": ("ReBA-1", "Bidirectional"),
    "Echo-2": ("Echo-2, bidirectional",),
}


@dataclass(frozen=True)
class Recipe:
    """One way to read the language model.

    Attributes:
        method: Its name, such as ``"ReBA-2"``.
        pooling: A key of :data:`POOLINGS`.
        build: Makes the module on a backbone that is already loaded.
        copies: How many copies of the text :class:`st_reba.readers.sweep.RecipeSweep` needs to give it, under the name
            ``method``; None if it has to be run on its own.
        words: Whether it has word embeddings, one a token of the text; they do not depend on the pooling.
        filtered: What to call what stands around the pooling, such as ``"whitened"``; empty if nothing does.
        filter: Makes what stands after it, for a model that ends in the pooling.
        weighting: Makes what stands before it, for the module.
        bag: Whether this is the control that looks at no context.
        random: Whether this is the control on random weights: of a recipe, or of the bag.
        same_as: Other methods whose sentence vectors have the same direction as its own, by definition.
    """

    method: str
    pooling: str
    build: Callable[[CausalModule], CausalModule]
    copies: int | None = None
    words: bool = True
    filtered: str = ""
    filter: Filter | None = None
    weighting: Weighting | None = None
    bag: bool = False
    random: bool = False
    same_as: tuple[str, ...] = ()

    @property
    def control(self) -> bool:
        """Whether it is there to be beaten."""
        return self.bag or self.random

    @property
    def name(self) -> str:
        """As tables show it."""
        return ", ".join(part for part in (RANDOM if self.random else "", self.method, self.filtered) if part)

    @property
    def key(self) -> str:
        """Name and pooling: what tells it from all others."""
        return f"{self.name}, {self.pooling}"

    def model(self, backbone: CausalModule) -> SentenceTransformer:
        """The recipe as a ready model, on the backbone's device.

        Raises:
            ValueError: If this backbone cannot run it, or what stands after the pooling cannot be made for it.
        """
        pooled = self.pooled(backbone)
        if self.filter is None:
            return pooled
        device = str(backbone.model.device)
        return SentenceTransformer(modules=[*pooled.children(), self.filter(pooled)], device=device)

    def pooled(self, backbone: CausalModule) -> SentenceTransformer:
        """The recipe up to the pooling."""
        module = self.build(backbone)
        pooling = Pooling(module.get_embedding_dimension(), POOLINGS[self.pooling])
        return SentenceTransformer(modules=[*self.weighed(module), pooling], device=str(backbone.model.device))

    def weighed(self, module: CausalModule) -> list[nn.Module]:
        """What stands before the pooling: the module, and what weighs its tokens."""
        return [module] if self.weighting is None else [module, self.weighting(module)]

    def on_random_weights(self) -> Recipe:
        """Its control."""
        return replace(self, random=True)


def default_recipes(repetitions: int = 3, fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """Every training-free recipe, under the poolings that make sense for it.

    Args:
        repetitions: Copies of the text, at most.
        fit_texts: Plain texts that the filters and the idf weights are fitted on; those of the package's word-sense
            questions if None.
    """
    fit_texts = tuple(demo_sentences() if fit_texts is None else fit_texts)
    copies = range(2, repetitions + 1)
    recipes = []
    for pooling in POOLINGS:
        recipes.append(Recipe("Classical", pooling, CausalTransformer, copies=1))
        recipes += [Recipe(f"Echo-{k}", pooling, _echo(k), copies=k) for k in copies]
        recipes += [Recipe(f"ReBA-{k}", pooling, _reba(k, pooling), copies=k) for k in (1, *copies)]
        recipes.append(Recipe("Bidirectional", pooling, _bidirectional))
        if repetitions > 1:
            recipes.append(Recipe("Echo-2, bidirectional", pooling, _echo(2, bidirectional_layers=1)))
            recipes.append(Recipe("ReBA-2, bidirectional", pooling, _reba(2, pooling, bidirectional_layers=1)))
    recipes.append(Recipe("Bidirectional, prompt", "last", BidirectionalLastLayer, words=False))
    recipes += [Recipe(f"RT-{passes}", "last", _thought(passes), words=False) for passes in (2, 4, 8)]
    recipes += [Recipe(method, "last", _prompted(template), words=False) for method, template in PROMPTS.items()]
    recipes.append(Recipe("MetaEOL", "mean", MetaEOLModule, words=False))
    recipes.append(Recipe("CK", "mean", _ck, words=False))
    recipes += [Recipe("KV re-routing", pooling, KVReroutingModule, words=False) for pooling in POOLINGS]
    recipes.append(Recipe("Token prepending", "last", TokenPrependingModule, words=False))
    recipes.append(Recipe("Token prepending, blocks", "mean", HierarchicalTokenPrependingModule))
    recipes.append(Recipe("Value aggregation", "last", ValueAggregationModule, words=False))
    recipes.append(Recipe("Contrastive prompting", "last", ContrastivePromptingModule, words=False))
    for name, made in fitted_on(fit_texts).items():
        recipes += [
            Recipe("Classical", pooling, CausalTransformer, copies=1, words=False, filtered=name, filter=made)
            for pooling in POOLINGS
        ]
    weighting = Weighting(fit_texts)
    recipes.append(Recipe("Classical", "mean", CausalTransformer, words=False, filtered=IDF, weighting=weighting))
    recipes.append(_early_late(fit_texts))
    return without_repeats(recipes)


def without_repeats(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The same with one recipe in the place of those that are one by definition: it names the others.

    Their words differ, and do not depend on the pooling: the rows under other poolings have them.
    """
    last = [recipe.name for recipe in recipes if recipe.pooling == "last"]
    same = {
        name: tuple(other for other in others if other in last)
        for name, others in SAME_UNDER_LAST_POOLING.items()
        if name in last
    }
    repeats = {other for others in same.values() for other in others}
    kept = []
    for recipe in recipes:
        if recipe.pooling != "last":
            kept.append(recipe)
        elif recipe.name not in repeats:
            others = same.get(recipe.name, ())
            kept.append(replace(recipe, same_as=others, words=recipe.words and not others))
    return kept


def worth_trying(fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """The few recipes to try first: what one has without a recipe, and the best cheap one of each family.

    Args:
        fit_texts: Plain texts that whitening is fitted on; those of the package's word-sense questions if None.
    """
    return [
        Recipe("Classical", "mean", CausalTransformer, copies=1),
        Recipe("Classical", "last", CausalTransformer, copies=1),
        Recipe("Echo-2", "mean", _echo(2), copies=2),
        Recipe("ReBA-2", "mean", _reba(2, "mean"), copies=2),
        Recipe("ReBA-2", "last", _reba(2, "last"), copies=2),
        Recipe("PromptEOL", "last", _prompted(PROMPTS["PromptEOL"]), words=False),
        Recipe("Value aggregation", "last", ValueAggregationModule, words=False),
        _early_late(tuple(demo_sentences() if fit_texts is None else fit_texts)),
    ]


def bags_of_input_embeddings(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The control that looks at no context: as it is, and with each filter and weighting that some of these have.

    What helps a recipe there helps the bag, too, so that its gain means little without it.
    """
    bag = Recipe(BAG, "mean", InputEmbeddings, bag=True)
    around = {recipe.filtered: recipe for recipe in recipes if recipe.filtered}
    return [
        bag,
        *(
            replace(bag, words=False, filtered=name, filter=recipe.filter, weighting=recipe.weighting)
            for name, recipe in around.items()
        ),
    ]


def random_weights(backbone: CausalModule, seed: int = 0) -> CausalModule:
    """The classical embedding of the same architecture and tokenizer with freshly initialised weights."""
    control = CausalTransformer(backbone)
    control.model = random_model(backbone.model, seed)
    return control


def random_model(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The same architecture with freshly initialised weights, on the same device, in the same precision."""
    config = copy.deepcopy(model.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = AutoModel.from_config(config)
    # It has no head, and that of the checkpoint would be a trained one.
    fresh.config.tie_word_embeddings = True
    return cast(PreTrainedModel, fresh.to(model.device, model.dtype).eval())


def _early_late(fit_texts: tuple[str, ...]) -> Recipe:
    """Never without its whitening."""
    whitening = Filter(PARTWISE, fit_texts)
    return Recipe("Early and late", "mean", EarlyLateModule, words=False, filtered=PARTWISE, filter=whitening)


def _bidirectional(backbone: CausalModule) -> CausalModule:
    return CausalTransformer(backbone, bidirectional_layers=1)


def _echo(repetitions: int, bidirectional_layers: int = 0) -> Callable[[CausalModule], CausalModule]:
    return lambda backbone: EchoModule(backbone, repetitions=repetitions, bidirectional_layers=bidirectional_layers)


def _reba(repetitions: int, pooling: str, bidirectional_layers: int = 0) -> Callable[[CausalModule], CausalModule]:
    rows: Literal["all", "last"] = "last" if pooling == "last" else "all"
    return lambda backbone: ReBAModule(
        backbone, repetitions=repetitions, rows=rows, bidirectional_layers=bidirectional_layers
    )


def _prompted(template: str) -> Callable[[CausalModule], CausalModule]:
    return lambda backbone: CausalTransformer(backbone, template=template)


def _ck(backbone: CausalModule) -> CausalModule:
    return MetaEOLModule(backbone, templates="ck")


def _thought(passes: int) -> Callable[[CausalModule], CausalModule]:
    return lambda backbone: RefinedThoughtModule(backbone, iterations=passes)
