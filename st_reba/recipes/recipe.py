"""What a recipe is: a row, what can stand around its pooling, and that row under one pooling, ready to be run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoModel, PreTrainedModel

from .. import modules
from ..modules.embedding_transforms import SHRINKAGE
from ..modules.moments import Moments, embedding_moments
from ..modules.partwise import SHRINKAGE as PARTWISE_SHRINKAGE
from ..progress import reading
from ..text.templates import ENDINGS, SLOT, TEMPLATES, PromptLanguage, preset

#: Poolings as the papers call them, and as ST does.
POOLINGS = {"mean": "mean", "last": "lasttoken"}

#: The control without a model: a text's vector is a mean of its tokens' own, each of which has one dimension.
TF_IDF = "tf-idf"
#: What stands before a recipe's name where it is run on random weights.
RANDOM = "Random weights"


@dataclass(frozen=True)
class Part:
    """A filter behind the pooling of any recipe, or weights of tokens before it.

    Attributes:
        name: As tables show it.
        says: What it does, without a full stop.
        module: Its class.
        poolings: Those that it can stand around.
        enough: How many texts, at most, it is fitted on: it gains nothing from more. None: it gains from all.
    """

    name: str
    says: str
    module: type[Any]
    poolings: tuple[str, ...] = tuple(POOLINGS)
    enough: int | None = None

    @property
    def key(self) -> str:
        """As people type it behind a recipe's key: ``classical+all-but-the-top``."""
        return self.name.replace(" ", "-")

    @property
    def fitted(self) -> bool:
        """Whether it is fitted on plain texts; the other is computed from the language model's head."""
        return self.module is not modules.EmbeddingFilter

    @property
    def weighs_tokens(self) -> bool:
        """Whether it stands before the pooling."""
        return self.module is modules.IdfWeights

    @property
    def needs_covariance(self) -> bool:
        """Whether it is fitted on more than mean and variances."""
        return self.module is not modules.StandardizedSum

    def drawn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Those of these texts that it is fitted on: all, or some, evenly drawn."""
        if self.enough is None or len(texts) <= self.enough:
            return tuple(texts)
        return tuple(texts[number * len(texts) // self.enough] for number in range(self.enough))

    def settings(self, shares: Sequence[float]) -> dict[str, Any]:
        """What a filter is fitted with, besides texts.

        Args:
            shares: How much each part of the vectors counts: ``shares`` of the module that gives them.
        """
        if self.module is modules.PartwiseWhitening:
            return {"shrinkage": PARTWISE_SHRINKAGE, "shares": shares}
        if self.module is modules.StandardizedSum:
            return {"shares": shares}
        return {"shrinkage": SHRINKAGE} if self.module is modules.WhiteningTransform else {}

    def from_moments(self, moments: Moments, shares: Sequence[float] = modules.CausalModule.shares) -> nn.Module:
        """A filter that is fitted, on embeddings that were seen elsewhere.

        Args:
            moments: Of the embeddings of plain texts.
            shares: As for :meth:`settings`.

        Raises:
            ValueError: If there are too few texts, or they are too much alike.
        """
        return cast(nn.Module, self.module.from_moments(moments, **self.settings(shares)))

    def made(self, model: SentenceTransformer, texts: Sequence[str], shares: Sequence[float] = ()) -> nn.Module:
        """A filter for a model that begins with a module of st_reba's and ends in its pooling.

        Args:
            model: Embeds the texts.
            texts: Plain ones, to fit the filter on.
            shares: How much each part of its vectors counts; empty: as its module says.

        Raises:
            ValueError: If there are too few texts, or the model has no head.
        """
        if not self.fitted:
            return modules.EmbeddingFilter.from_language_model(model)
        drawn = self.drawn(texts)
        with reading(model[0], len(drawn)):
            moments = embedding_moments(model, drawn, covariance=self.needs_covariance)
        return self.from_moments(moments, shares or cast(modules.CausalModule, model[0]).shares)


@dataclass(frozen=True)
class Wording:
    """A prompt in other words than a row's own.

    Attributes:
        name: As tables show it, such as ``"domain"``.
        template: Text with a slot for each copy of the text.
    """

    name: str
    template: str


@dataclass(frozen=True)
class Row:
    """One recipe, as plain data.

    Attributes:
        key: As people type it: lower case, digits and hyphens.
        name: As tables show it.
        module: The class that does it.
        says: What it does, for people: a clause without a full stop.
        page: Its page of the documentation, without the ending; empty: none.
        cost: Passes over the text, the classical embedding's being 1.
        settings: The module's arguments.
        settings_if_last: More of them where the last token alone is pooled.
        poolings: Keys of :data:`POOLINGS` that make sense for it, the usual one first.
        compared: When ``compare`` runs it: never but by its key, or with ``--recipes all``.
        tried: The poolings under which it is among the few that ``compare`` runs by default.
        around: The part that it is never without.
        copies: How many copies of the text :class:`st_reba.compare.sweep.RecipeSweep` needs to give it, under this
            name; None if it has to be run on its own.
        words: Whether it has word embeddings, one a token of the text; they do not depend on the pooling.
        same_if_last: Key of the recipe whose vectors have the same direction under last pooling, by definition.
        own_template: Arguments to add where the user gives a template of their own.
        reworded: Whether a comparison tries other endings of its prompt.
        parts: Of how many its vectors are made.
        paper: Who it is from; empty: the module's ``citation`` says it.
        chinese: Arguments with which the module asks in Chinese; empty: it cannot, or it does so already.
    """

    key: str
    name: str
    module: type[modules.CausalModule]
    says: str
    page: str = ""
    cost: str = "1"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    settings_if_last: Mapping[str, Any] = field(default_factory=dict, hash=False)
    poolings: tuple[str, ...] = tuple(POOLINGS)
    compared: Literal["never", "all"] = "all"
    tried: tuple[str, ...] = ()
    around: Part | None = None
    copies: int | None = None
    words: bool = False
    same_if_last: str = ""
    own_template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reworded: bool = False
    parts: int = 1
    paper: str = ""
    chinese: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def repetitions(self) -> int:
        """How often the text stands in the input."""
        template = str(self.settings.get("template", SLOT))
        return int(self.settings.get("repetitions", TEMPLATES.get(template, template).count(SLOT)))

    @property
    def end(self) -> int:
        """The layer that it ends with, from the top: -1 the last, -2 the last but one."""
        return int(preset(self.settings.get("template", SLOT)).output_layer or -1)

    @property
    def wordings(self) -> tuple[Wording, ...]:
        """Its prompt with other endings, in its own language; none if it is not :attr:`reworded`."""
        if not self.reworded:
            return ()
        body, slot, _ = TEMPLATES[self.settings["template"]].rpartition(SLOT)
        endings = ENDINGS["en" if self.chinese else "zh"]
        return tuple(Wording(name, f"{body}{slot}{ending}") for name, ending in endings.items())

    def arguments(self, pooling: str, layer: int | None = None) -> dict[str, Any]:
        """The module's arguments under a pooling, read after a layer, or at its own end if None."""
        last = self.settings_if_last if pooling in ("last", POOLINGS["last"]) else {}
        return {**self.settings, **last, **({} if layer is None else {"output_layer": layer})}

    def with_own_template(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments, and how a template is read where one of the user's own is among them."""
        template = given.get("template")
        reading = {} if template is None or template in TEMPLATES else self.own_template
        return {**{name: value for name, value in reading.items() if name in self.module.config_keys}, **given}

    def build(
        self, backbone: modules.CausalModule, pooling: str = "", layer: int | None = None, **settings: Any
    ) -> modules.CausalModule:
        """The module, on a backbone that is already loaded.

        Args:
            backbone: The loaded model.
            pooling: A key of :data:`POOLINGS`; empty: the usual one.
            layer: After which it is read; None: at its own end.
            **settings: More arguments of the module.

        Raises:
            ValueError: If this backbone cannot run it.
        """
        arguments = self.arguments(pooling or self.poolings[0], layer)
        return self.module(backbone, **{**arguments, **self.with_own_template(settings)})

    def in_chinese(self) -> Row:
        """The same recipe with its Chinese prompt, which is run for Chinese texts, or where it is asked for."""
        return replace(
            self,
            key=f"{self.key}-zh",
            name=f"{self.name}, Chinese",
            says=f"{self.says}; in Chinese words",
            settings={**self.settings, **self.chinese},
            compared="never",
            tried=(),
            chinese={},
        )

    @property
    def prompt_languages(self) -> tuple[PromptLanguage, ...]:
        """The languages that it can ask in: none if it has no prompt, or an English one alone."""
        if self.chinese:
            return ("en", "zh")
        return ("zh",) if any(str(value).endswith("-zh") for value in self.settings.values()) else ()

    @property
    def citation(self) -> str:
        """Who it is from."""
        return self.paper or self.module.citation


Kind = Literal["tf-idf", "bag", "filtered bag", "random"]


@dataclass(frozen=True)
class Control:
    """What a recipe is compared with.

    Attributes:
        kind: Which control it is.
        name: Of its result, recipe and pooling.
        called: What to call it in a sentence about the recipe.
    """

    kind: Kind
    name: str
    called: str


@dataclass(frozen=True)
class Recipe:
    """A row under one pooling.

    Attributes:
        row: Which.
        pooling: A key of :data:`POOLINGS`.
        fit_texts: Plain texts that what stands around the pooling is fitted on.
        part: What stands around the pooling, if anything does.
        layer: After which layer it is read; None for its own end.
        wording: Its prompt in other words; None for its own.
        shares: How much each part of its vectors counts; empty: as its module says.
        random: Whether this is the control on random weights.
        same_as: Other recipes whose vectors have the same direction as its own, by definition.
        candidate_of: Result of the recipe that this one is a candidate of, itself among them; empty: of none.
    """

    row: Row
    pooling: str
    fit_texts: tuple[str, ...] = ()
    part: Part | None = None
    layer: int | None = None
    wording: Wording | None = None
    shares: tuple[float, ...] = ()
    random: bool = False
    same_as: tuple[str, ...] = ()
    candidate_of: str = ""

    @property
    def method(self) -> str:
        """Its name, whatever stands around the pooling: ``"ReBA-2"``, ``"ReBA-2, layer 12"``."""
        layer = "" if self.layer is None else f"layer {self.layer}"
        wording = "" if self.wording is None else f"asked for {self.wording.name}"
        return ", ".join(filter(None, (self.row.name, layer, wording)))

    @property
    def name(self) -> str:
        """As tables show it."""
        part = "" if self.part is None else self.part.name
        shares = f"shares {' '.join(f'{share:.2f}' for share in self.shares)}" if self.shares else ""
        return ", ".join(filter(None, (RANDOM if self.random else "", self.method, part, shares)))

    @property
    def result(self) -> str:
        """Name and pooling, which are the name of its result: what tells it from all others."""
        return f"{self.name}, {self.pooling}"

    @property
    def key(self) -> str:
        """As people type it: ``"reba-2"``, read after a layer ``"reba-2@12"``, filtered ``"classical+whitened"``."""
        layer = "" if self.layer is None else f"@{self.layer}"
        part = "" if self.part is None or self.part == self.row.around else f"+{self.part.key}"
        return f"{self.row.key}{layer}{part}"

    @property
    def says(self) -> str:
        """What it does, in a sentence for people."""
        clauses = [self.row.says]
        if self.random:
            clauses.insert(0, "the same architecture and tokenizer with weights that were never trained")
        if self.layer is not None:
            clauses.append(f"read after layer {self.layer}, where the model stops")
        if self.wording is not None:
            clauses.append(f"its prompt ends in {self.wording.template.rpartition(SLOT)[2]}")
        if self.shares:
            clauses.append(f"its parts count for {', '.join(f'{share:.2f}' for share in self.shares)}")
        if self.part is not None:
            clauses.append(self.part.says)
        sentence = "; ".join(clauses)
        return f"{sentence[0].upper()}{sentence[1:]}."

    @property
    def bag(self) -> bool:
        """Whether this is the control that looks at no context."""
        return self.row.module is modules.InputEmbeddings

    @property
    def poolings(self) -> tuple[str, ...]:
        """Those that make sense for the row, with what stands around it; the usual one first."""
        return tuple(pooling for pooling in self.row.poolings if self.part is None or pooling in self.part.poolings)

    @property
    def control(self) -> bool:
        """Whether it is one of the controls."""
        return self.bag or self.random

    @property
    def called(self) -> str:
        """What to call it in a sentence, as a control."""
        if self.bag:
            bag = f"the bag of {'random' if self.random else 'input'} embeddings"
            return bag if self.part is None else f"{bag}, {self.part.name}"
        own = replace(self, random=False).result
        return f"{own} on random weights" if self.random else own

    @property
    def copies(self) -> int | None:
        """As the row's; None if it is read after another layer, or its tokens are weighed."""
        return self.row.copies if self.layer is None and not self.weighs_tokens else None

    @property
    def words(self) -> bool:
        """Whether it has word embeddings of its own: not where another row has them."""
        return self.row.words and self.part is None and self.layer is None and not self.same_as

    @property
    def weighs_tokens(self) -> bool:
        """Whether its tokens are weighed before the pooling."""
        return self.part is not None and self.part.weighs_tokens

    @property
    def filter(self) -> Part | None:
        """What stands behind the pooling."""
        return None if self.weighs_tokens else self.part

    @property
    def fitted(self) -> bool:
        """Whether what stands around the pooling is fitted on plain texts."""
        return self.part is not None and self.part.fitted

    @property
    def fitted_on(self) -> tuple[str, ...]:
        """Those of ``fit_texts`` that what stands around the pooling is fitted on."""
        return self.fit_texts if self.part is None else self.part.drawn(self.fit_texts)

    def build(self, backbone: modules.CausalModule) -> modules.CausalModule:
        """The module, on a backbone that is already loaded."""
        return self.row.build(backbone, self.pooling, self.layer, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the module that are not the row's."""
        return {} if self.wording is None else {"template": self.wording.template}

    def model(self, backbone: modules.CausalModule, *, filtered: bool = True) -> SentenceTransformer:
        """The recipe as a ready model, on the backbone's device.

        Args:
            backbone: A loaded module, whose weights are shared.
            filtered: Whether what stands behind the pooling is made, too.

        Raises:
            ValueError: If this backbone cannot run it, or what stands after the pooling cannot be made for it.
        """
        device = device_of(backbone)
        parts = self.pipeline(self.build(backbone), mode_of(self.pooling))
        if filtered and self.filter is not None:
            pooled = SentenceTransformer(modules=parts, device=device)
            parts.append(self.filter.made(pooled, self.fit_texts, self.shares))
        return SentenceTransformer(modules=parts, device=device)

    def pipeline(self, module: modules.CausalModule, modes: str | tuple[str, ...]) -> list[nn.Module]:
        """A module, what weighs its tokens, and the pooling.

        Args:
            module: That of the recipe.
            modes: The pooling, as ST calls it; several: their vectors stand one after another.

        Raises:
            ValueError: If the tokens cannot be weighed.
        """
        pooling = Pooling(module.get_embedding_dimension(), modes)
        if not self.weighs_tokens:
            return [module, pooling]
        return [module, modules.IdfWeights.fit(module, self.fit_texts), pooling]

    def on_random_weights(self) -> Recipe:
        """Its control."""
        return replace(self, random=True, candidate_of="")


def mode_of(pooling: str) -> str:
    """A pooling as ST calls it; what is none of :data:`POOLINGS` has that name already."""
    return POOLINGS.get(pooling, pooling)


def device_of(backbone: nn.Module) -> str:
    """Where what follows a module runs: beside its language model."""
    return str(cast(modules.CausalModule, backbone).model.device)


def random_weights(backbone: modules.CausalModule, seed: int = 0) -> modules.CausalModule:
    """The classical embedding of the same architecture and tokenizer with freshly initialised weights."""
    control = modules.CausalTransformer(backbone)
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
