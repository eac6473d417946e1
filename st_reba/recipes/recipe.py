"""A recipe: a row of the table, under one pooling, with a filter or weights of tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoModel

from .. import modules
from ..hub import compat
from ..modules import CausalModule
from ..moments import Moments, embedding_moments, fitting_progress
from ..text.presets import TEMPLATES, PromptLanguage, preset
from ..text.templates import TEXT

#: Poolings by the papers' names, with the names of sentence-transformers.
POOLINGS = {"mean": "mean", "last": "lasttoken"}

#: Name of the control without a model: the vector of a text is a mean of vectors of tokens with one dimension each.
TF_IDF = "tf-idf"
#: Beginning of the names of controls on random weights.
RANDOM = "Random weights"

#: Other ends of ``topic`` and ``echo-topic``, by the word that they ask for.
ENDINGS: dict[PromptLanguage, dict[str, str]] = {
    "en": {
        "meaning": '" and its meaning in one word is:"',
        "summary": '" and its summary in one word is:"',
        "domain": '" and its domain in one word is:"',
    },
    "zh": {"topic": "”，它的主题是：“", "meaning": "”，它的意思是：“", "summary": "”，用一个词概括就是：“"},
}


@dataclass(frozen=True)
class PostProcessor:
    """A filter after the pooling of a recipe, or weights of tokens before it.

    Attributes:
        name: Name in tables.
        description: Description: a clause without a full stop.
        module: Its class.
        poolings: Poolings that it fits.
        enough: Largest number of texts that it is fitted on, as it gains nothing from more. None: no limit.
    """

    name: str
    description: str
    module: type[Any]
    poolings: tuple[str, ...] = tuple(POOLINGS)
    enough: int | None = None

    @property
    def key(self) -> str:
        """Key after a recipe's: ``classical+all-but-the-top``."""
        return self.name.replace(" ", "-")

    @property
    def fitted(self) -> bool:
        """Whether it is fitted on plain texts, and not computed from the language model's head."""
        return self.module is not modules.EmbeddingFilter

    @property
    def weighs_tokens(self) -> bool:
        """Whether it precedes the pooling."""
        return self.module is modules.IdfWeights

    def drawn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that it is fitted on: all, or evenly drawn ones."""
        if self.enough is None or len(texts) <= self.enough:
            return tuple(texts)
        return tuple(texts[number * len(texts) // self.enough] for number in range(self.enough))

    def from_moments(self, moments: Moments, part_weights: Sequence[float] = CausalModule.part_weights) -> nn.Module:
        """Make a filter from moments of embeddings of plain texts.

        Args:
            moments: The moments.
            part_weights: Weight of each part of the embeddings.

        Raises:
            ValueError: If there are too few texts, or they are too similar.
        """
        settings = {"shares": part_weights} if "shares" in self.module.FIT_SETTINGS else {}
        return cast(nn.Module, self.module.from_moments(moments, **settings))

    def fit(self, model: SentenceTransformer, texts: Sequence[str], part_weights: Sequence[float] = ()) -> nn.Module:
        """Make a filter for a model that begins with a module of st_reba and ends in its pooling.

        Args:
            model: The model.
            texts: Plain texts, on which the filter is fitted.
            part_weights: Weight of each part of the model's vectors; empty: those of its first module.

        Raises:
            ValueError: If there are too few texts, or the model has no head.
        """
        if not self.fitted:
            return modules.EmbeddingFilter.from_language_model(model)
        drawn = self.drawn(texts)
        with fitting_progress(model[0], len(drawn)):
            moments = embedding_moments(model, drawn, covariance=self.module.NEEDS_COVARIANCE)
        return self.from_moments(moments, part_weights or cast(CausalModule, model[0]).part_weights)


@dataclass(frozen=True)
class Wording:
    """A prompt in other words than a row's own.

    Attributes:
        name: Name in tables, such as ``"domain"``.
        template: Text with a slot for each copy of the text.
    """

    name: str
    template: str


@dataclass(frozen=True)
class Row:
    """A recipe as plain data.

    Attributes:
        key: Key that people type: lower case, digits and hyphens.
        name: Name in tables.
        module: Class of the method.
        description: Description for people: a clause without a full stop.
        page: Page of the documentation, without the ending; empty for none.
        cost: Number of passes over the text; 1 for the classical embedding.
        settings: Arguments of the module.
        settings_if_last: Further arguments if only the last token is pooled.
        poolings: Keys of :data:`POOLINGS` that fit, the usual one first.
        compared: Whether ``compare`` runs it with ``--recipes all``, or only by its key.
        tried: Poolings under which it is one of the few that ``compare`` runs by default.
        post_processor: The filter that belongs to it.
        copies: Number of copies of the text from which :class:`st_reba.compare.sweep.RecipeSweep` computes it; None if
            it needs its own run.
        words: Whether it has an embedding for each token of the text, whatever the pooling.
        own_template: Further arguments where the user gives a template.
        reworded: Whether a comparison tries other endings of its prompt.
        parts: Number of parts of its vectors.
        paper: Citation; empty for the module's.
        chinese: Arguments for a Chinese prompt; empty if there is none, or the prompt is Chinese already.
    """

    key: str
    name: str
    module: type[CausalModule]
    description: str
    page: str = ""
    cost: str = "1"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    settings_if_last: Mapping[str, Any] = field(default_factory=dict, hash=False)
    poolings: tuple[str, ...] = tuple(POOLINGS)
    compared: Literal["never", "all"] = "all"
    tried: tuple[str, ...] = ()
    post_processor: PostProcessor | None = None
    copies: int | None = None
    words: bool = False
    own_template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reworded: bool = False
    parts: int = 1
    paper: str = ""
    chinese: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def repetitions(self) -> int:
        """Number of copies of the text."""
        template = preset(self.settings.get("template", TEXT)).template
        return int(self.settings.get("repetitions", template.count(TEXT)))

    @property
    def end(self) -> int:
        """Layer that it ends with, from the top: -1 for the last."""
        return int(preset(self.settings.get("template", TEXT)).output_layer or -1)

    @property
    def wordings(self) -> tuple[Wording, ...]:
        """Its prompt with other endings in the same language; none unless it is :attr:`reworded`."""
        if not self.reworded:
            return ()
        body, slot, _ = TEMPLATES[self.settings["template"]].rpartition(TEXT)
        endings = ENDINGS["en" if self.chinese else "zh"]
        return tuple(Wording(name, f"{body}{slot}{ending}") for name, ending in endings.items())

    def arguments(self, pooling: str, layer: int | None = None, **settings: Any) -> dict[str, Any]:
        """Return the module's arguments.

        Args:
            pooling: Key of :data:`POOLINGS`, or its value.
            layer: Layer after which to end; None for its own.
            **settings: Further arguments. A template of the user's own brings those of :attr:`own_template`.
        """
        arguments = {**self.settings}
        if pooling in ("last", POOLINGS["last"]):
            arguments |= self.settings_if_last
        if layer is not None:
            arguments["output_layer"] = layer
        if settings.get("template") is not None and settings["template"] not in TEMPLATES:
            arguments |= {name: value for name, value in self.own_template.items() if name in self.module.config_keys}
        return arguments | settings

    def in_chinese(self) -> Row:
        """Return the same recipe with its Chinese prompt."""
        return replace(
            self,
            key=f"{self.key}-zh",
            name=f"{self.name}, Chinese",
            description=f"{self.description}; in Chinese words",
            settings={**self.settings, **self.chinese},
            compared="never",
            tried=(),
            chinese={},
        )

    @property
    def prompt_languages(self) -> tuple[PromptLanguage, ...]:
        """Languages of its prompts; none if there is no prompt, or an English one alone."""
        if self.chinese:
            return ("en", "zh")
        return ("zh",) if any(str(value).endswith("-zh") for value in self.settings.values()) else ()

    @property
    def citation(self) -> str:
        """Citation of the paper."""
        return self.paper or self.module.citation


@dataclass(frozen=True)
class Recipe:
    """A row under one pooling.

    Attributes:
        row: The row.
        pooling: Key of :data:`POOLINGS`.
        fit_texts: Plain texts on which :attr:`post_processor` is fitted.
        post_processor: Filter after the pooling, or weights before it.
        layer: Layer after which it ends; None for its own.
        wording: Its prompt in other words; None for its own.
        part_weights: Weight of each part of its vectors; empty for the module's own.
        random: Whether this is the control on random weights.
        candidate_of: Result of the recipe of which this one is a candidate; empty if it is none.
    """

    row: Row
    pooling: str
    fit_texts: tuple[str, ...] = ()
    post_processor: PostProcessor | None = None
    layer: int | None = None
    wording: Wording | None = None
    part_weights: tuple[float, ...] = ()
    random: bool = False
    candidate_of: str = ""

    @property
    def name(self) -> str:
        """Name in tables: ``"ReBA-2"``, ``"ReBA-2, layer 12"``, ``"Classical, whitened"``."""
        parts = [
            RANDOM if self.random else "",
            self.row.name,
            "" if self.layer is None else f"layer {self.layer}",
            "" if self.wording is None else f"asked for {self.wording.name}",
            "" if self.post_processor is None else self.post_processor.name,
            f"shares {' '.join(f'{weight:.2f}' for weight in self.part_weights)}" if self.part_weights else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def result(self) -> str:
        """Name and pooling: the name of its result, different from all others."""
        return f"{self.name}, {self.pooling}"

    @property
    def key(self) -> str:
        """Key that people type: ``"reba-2"``, ``"reba-2@12"`` to end after a layer, ``"classical+whitened"``."""
        key = self.row.key if self.layer is None else f"{self.row.key}@{self.layer}"
        if self.post_processor is None or self.post_processor == self.row.post_processor:
            return key
        return f"{key}+{self.post_processor.key}"

    @property
    def description(self) -> str:
        """Description in a sentence for people."""
        weights = ", ".join(f"{weight:.2f}" for weight in self.part_weights)
        clauses = [
            "the same architecture and tokenizer with weights that were never trained" if self.random else "",
            self.row.description.rstrip("."),
            "" if self.layer is None else f"read after layer {self.layer}, where the model stops",
            "" if self.wording is None else f"its prompt ends in {self.wording.template.rpartition(TEXT)[2]}",
            f"its parts count for {weights}" if weights else "",
            "" if self.post_processor is None else self.post_processor.description,
        ]
        sentence = "; ".join(filter(None, clauses))
        return f"{sentence[0].upper()}{sentence[1:]}."

    @property
    def bag(self) -> bool:
        """Whether this is the control without context."""
        return self.row.module is modules.InputEmbeddings

    @property
    def poolings(self) -> tuple[str, ...]:
        """Poolings that fit the row and :attr:`post_processor`, the usual one first."""
        if self.post_processor is None:
            return self.row.poolings
        return tuple(pooling for pooling in self.row.poolings if pooling in self.post_processor.poolings)

    @property
    def control(self) -> bool:
        """Whether it is one of the controls."""
        return self.bag or self.random

    @property
    def copies(self) -> int | None:
        """Copies of the row; None if it ends after another layer, or its tokens are weighted."""
        return self.row.copies if self.layer is None and not self.weighs_tokens else None

    @property
    def words(self) -> bool:
        """Whether it has word embeddings of its own, which are the same under each pooling."""
        return self.row.words and self.post_processor is None and self.layer is None

    @property
    def weighs_tokens(self) -> bool:
        """Whether its tokens are weighted before the pooling."""
        return self.post_processor is not None and self.post_processor.weighs_tokens

    @property
    def filter(self) -> PostProcessor | None:
        """Filter after the pooling."""
        return None if self.weighs_tokens else self.post_processor

    @property
    def fitted(self) -> bool:
        """Whether :attr:`post_processor` is fitted on plain texts."""
        return self.post_processor is not None and self.post_processor.fitted

    @property
    def fitted_on(self) -> tuple[str, ...]:
        """Texts of ``fit_texts`` on which :attr:`post_processor` is fitted."""
        return self.fit_texts if self.post_processor is None else self.post_processor.drawn(self.fit_texts)

    def build(self, backbone: CausalModule, **settings: Any) -> CausalModule:
        """Make the module on a loaded backbone.

        Args:
            backbone: The loaded model, whose weights are shared.
            **settings: Further arguments of the module.

        Raises:
            ValueError: If the backbone cannot run it.
        """
        return self.row.module(backbone, **self.arguments(self.pooling, **settings))

    def arguments(self, pooling: str, **settings: Any) -> dict[str, Any]:
        """Return the module's arguments under a pooling: see :meth:`Row.arguments`."""
        if self.wording is not None:
            settings = {"template": self.wording.template, **settings}
        return self.row.arguments(pooling, self.layer, **settings)

    def pipeline(self, module: CausalModule, modes: str | tuple[str, ...]) -> list[nn.Module]:
        """Return a module, weights of its tokens, if any, and the pooling.

        Args:
            module: The recipe's module.
            modes: Pooling by the name of sentence-transformers, or several.

        Raises:
            ValueError: If the tokens cannot be weighted.
        """
        weights = [modules.IdfWeights.fit(module, self.fit_texts)] if self.weighs_tokens else []
        return [module, *weights, Pooling(module.get_embedding_dimension(), modes)]

    def on_random_weights(self) -> Recipe:
        """Return its control on random weights."""
        return replace(self, random=True, candidate_of="")


def mode_of(pooling: str) -> str:
    """Return the name of a pooling in sentence-transformers; a name that is not in :data:`POOLINGS` is one."""
    return POOLINGS.get(str(pooling), pooling)


def device_of(backbone: CausalModule) -> str:
    """Return the device of a module's language model."""
    return str(backbone.model.device)


def random_weights(backbone: CausalModule) -> CausalModule:
    """Return the classical embedding of the same architecture and tokenizer with new random weights.

    They are on the same device, in the same precision.
    """
    model = backbone.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = AutoModel.from_config(copy.deepcopy(model.config))
    # It has no head, and that of the checkpoint is trained.
    fresh.config.tie_word_embeddings = True
    fresh = fresh.to(model.device, model.dtype).eval()
    control = modules.CausalTransformer(fresh, tokenizer=backbone.tokenizer)
    # It truncates as the backbone does.
    compat.share(backbone, control)
    return control
