"""What finds documents: how each contender embeds texts, what is kept of that, and how it ranks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack
from sentence_transformers import SentenceTransformer, SparseEncoder

from runs import pooled
from st_reba.data.demo import Language, demo_sentences
from st_reba.evaluation.rankings import Hits
from st_reba.export import static_model
from st_reba.modules import CausalModule, CausalTransformer, PromptRepsModule
from st_reba.modules.moments import Moments
from st_reba.modules.multi_vector import DIMENSION, multi_vector_encoder
from st_reba.recipes import Row, find
from st_reba.recipes.rows import PARTS, SUM
from st_reba.text.templates import preset

from .endings import MEANS

Array = NDArray[np.float32]
#: What is kept of some texts, by the names of the arrays in a file.
Kept = Mapping[str, NDArray[Any]]
#: Texts that are encoded together.
BATCH = 16
#: Documents that filters are fitted on, without any label.
FIT_DOCUMENTS = 400
#: A sum whose parts are standardised on documents for these, and on queries for those.
APART = f"{SUM}, apart"


@dataclass(frozen=True)
class Contender(ABC):
    """One way to find documents.

    Attributes:
        name: As tables call it.
        pooling: ``"mean"``, ``"last"``, or empty.
        make: From a loaded backbone and a language to the model that embeds.
    """

    name: str
    pooling: str
    make: Callable[[CausalModule, str], Any]

    @property
    def directory(self) -> str:
        return ", ".join(filter(None, (self.name, self.pooling)))

    def encoded(self, model: Any, texts: Sequence[str], role: str, **more: Any) -> Any:
        """What the model gives for some texts; ``role`` is ``"query"`` or ``"document"``."""
        encode = model.encode_query if role == "query" else model.encode_document
        return encode(list(texts), batch_size=BATCH, show_progress_bar=False, **more)

    @abstractmethod
    def embed(self, model: Any, texts: Sequence[str], role: str) -> Kept:
        """What is kept of some texts."""

    @abstractmethod
    def joined(self, blocks: Sequence[Kept]) -> Any:
        """All texts, of what was kept of them block by block."""

    @abstractmethod
    def rank(self, queries: Any, documents: Any, count: int, seen: Any) -> dict[str, list[Hits]]:
        """For each query the best documents, behind each filter; ``seen`` are queries that may be fitted on."""


class Vectors(NamedTuple):
    """Of some texts, (texts, D), and how much each part of them counts."""

    vectors: Array
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Dense(Contender):
    """One vector a text, and their cosines.

    Attributes:
        filters: What else stands behind the pooling, fitted on documents.
    """

    filters: tuple[str, ...] = ("", "centred", "whitened")

    def embed(self, model: Any, texts: Sequence[str], role: str) -> Kept:
        vectors = self.encoded(model, texts, role, convert_to_tensor=True)
        shares = getattr(model[0], "shares", CausalModule.shares)
        return {"vectors": vectors.float().cpu().numpy(), "shares": np.array(shares)}

    def joined(self, blocks: Sequence[Kept]) -> Vectors:
        return Vectors(np.concatenate([block["vectors"] for block in blocks]), tuple(blocks[0]["shares"].tolist()))

    def rank(self, queries: Vectors, documents: Vectors, count: int, seen: Vectors) -> dict[str, list[Hits]]:
        found = {}
        for name in self.filters:
            fitted = [_fitted(name, documents)] * 2
            if name == APART:
                fitted[0] = _fitted(name, seen)
            sides = [_unit(make(each.vectors)) for make, each in zip(fitted, (queries, documents), strict=True)]
            found[name] = best(sides[0] @ sides[1].T, count)
        return found


@dataclass(frozen=True)
class ByRole(Dense):
    """Queries behind one prompt, documents behind another: ``make`` gives a model for each, by role."""

    def embed(self, model: Mapping[str, Any], texts: Sequence[str], role: str) -> Kept:
        return super().embed(model[role], texts, role)


@dataclass(frozen=True)
class Sparse(Contender):
    """One weight a token of the vocabulary, nearly all 0, and their products."""

    def embed(self, model: Any, texts: Sequence[str], role: str) -> Kept:
        vectors = self.encoded(model, texts, role, convert_to_sparse_tensor=False)
        rows = csr_matrix(vectors.float().cpu().numpy())
        return {"data": rows.data, "indices": rows.indices, "indptr": rows.indptr, "shape": np.array(rows.shape)}

    def joined(self, blocks: Sequence[Kept]) -> csr_matrix:
        parts = [csr_matrix((each["data"], each["indices"], each["indptr"]), tuple(each["shape"])) for each in blocks]
        return vstack(parts).tocsr()

    def rank(self, queries: csr_matrix, documents: csr_matrix, count: int, seen: csr_matrix) -> dict[str, list[Hits]]:
        return {"": best((queries @ documents.T).toarray(), count)}


@dataclass(frozen=True)
class Tokens(Contender):
    """A vector for each token, and the sum of each query token's best match (MaxSim)."""

    def embed(self, model: Any, texts: Sequence[str], role: str) -> Kept:
        found = [each.float().cpu().numpy() for each in self.encoded(model, texts, role)]
        return {"vectors": np.concatenate(found).astype(np.float16), "lengths": np.array([len(own) for own in found])}

    def joined(self, blocks: Sequence[Kept]) -> list[Array]:
        return [own for block in blocks for own in np.split(block["vectors"], np.cumsum(block["lengths"])[:-1])]

    def rank(
        self, queries: list[Array], documents: list[Array], count: int, seen: list[Array]
    ) -> dict[str, list[Hits]]:
        # A document without tokens matches nothing: beside all others it has one vector of zeros.
        held = [own if len(own) else np.zeros((1, documents[0].shape[1]), dtype=np.float16) for own in documents]
        vectors = np.concatenate(held).astype(np.float32)
        starts = np.cumsum([0, *map(len, held[:-1])])
        scores = [
            np.maximum.reduceat(own.astype(np.float32) @ vectors.T, starts, axis=1).sum(axis=0) for own in queries
        ]
        return {"": best(np.stack(scores), count)}


def best(scores: NDArray[Any], count: int) -> list[Hits]:
    """Of (Q, N) scores the highest of each row, of equals those that stand first."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return [[(int(index), float(own[index])) for index in indices] for own, indices in zip(scores, order, strict=True)]


def words(text: str, language: str) -> list[str]:
    """What BM25 counts: words; of Chinese, characters and pairs of neighbours."""
    runs = re.findall(r"\w+", text.lower())
    if language == "en":
        return runs
    return [run[index : index + size] for run in runs for size in (1, 2) for index in range(len(run) - size + 1)]


def bm25(queries: Sequence[str], documents: Sequence[str], language: str, count: int) -> list[Hits]:
    """By the library bm25s, with k1 = 1.2 and b = 0.75, over whole documents."""
    from bm25s import BM25

    index = BM25(k1=1.2, b=0.75)
    index.index([words(text, language) for text in documents], show_progress=False)
    asked = [words(text, language) for text in queries]
    scores = np.stack([index.get_scores(own) if own else np.zeros(len(documents)) for own in asked])
    return best(scores, count)


def recipe(key: str, pooling: str = "", *, name: str = "", templates: Mapping[str, str] | None = None) -> Dense:
    """A row of the recipes, its prompt in the language of the texts.

    Args:
        key: Its key.
        pooling: Under which; the row's own if empty.
        name: As tables call it, where that is not the row's name.
        templates: Its prompt by language, where that is not the row's.
    """
    row: Row = find(key).row
    pooling = pooling or row.poolings[0]

    def make(backbone: CausalModule, language: str) -> SentenceTransformer:
        arguments = row.arguments(pooling)
        if templates is not None:
            arguments |= row.with_own_template({"template": templates[language]})
        elif language == "zh" and (row.around is not None or "template" in arguments):
            arguments["template"] = f"{arguments.get('template', 'prompteol')}-zh"
        module = row.module(backbone, **arguments)
        return pooled(module, pooling)

    around = "whitened" if row.around is None else row.around.name
    filters = ("", "centred", around, *([APART] if around == SUM else ()))
    return Dense(name or row.name, pooling, make, filters)


def by_role(key: str, name: str, words: Mapping[str, Mapping[str, str]]) -> ByRole:
    """A row of the recipes whose prompt calls queries and documents what they are.

    Args:
        key: Its key.
        name: As tables call it.
        words: By role and language, what stands in the place of "this sentence".
    """
    own = find(key).row

    def make(backbone: CausalModule, language: str) -> Mapping[str, SentenceTransformer]:
        template = preset(own.settings["template"] + ("-zh" if language == "zh" else "")).template
        usual = {"en": "this sentence", "zh": "这句话"}[language]
        return {
            role: recipe(key, templates={language: template.replace(usual, of[language])}).make(backbone, language)
            for role, of in words.items()
        }

    usual = recipe(key)
    return ByRole(name, usual.pooling, make, usual.filters)


#: What a query and a document are called.
CALLED = {
    "query": {"en": "this question", "zh": "这个问题"},
    "document": {"en": "this passage", "zh": "这段文字"},
}


def promptreps() -> Dense:
    """The dense half of PromptReps, with what stands before queries and documents."""

    def make(backbone: CausalModule, language: str) -> SentenceTransformer:
        template = _word_prompt(language)
        return pooled(CausalTransformer(backbone, template=template), "last", prompts=preset(template).prompts)

    return Dense("PromptReps", "last", make)


def sparse(expansion: int) -> Sparse:
    """PromptReps' weights of words, with so many tokens that are not the text's own."""

    def make(backbone: CausalModule, language: str) -> SparseEncoder:
        template = _word_prompt(language)
        module = PromptRepsModule(backbone, template=template, expansion=expansion)
        return SparseEncoder(
            modules=[module], device=str(backbone.model.device), prompts=dict(preset(template).prompts)
        )

    return Sparse(f"PromptReps, sparse{f', expansion {expansion}' if expansion else ''}", "", make)


def late_interaction(key: str) -> Tokens:
    """A row of the recipes as a model of token vectors, projected by what the package's own sentences have."""
    row: Row = find(key).row

    def make(backbone: CausalModule, language: str) -> Any:
        module = row.module(backbone, **row.arguments("mean"))
        return multi_vector_encoder(module, dimension=DIMENSION, fit_texts=demo_sentences(cast(Language, language)))

    return Tokens(f"{row.name}, late interaction", "", make)


def static() -> Dense:
    """The table of the vocabulary's vectors, at the usual layer."""

    def make(backbone: CausalModule, language: str) -> SentenceTransformer:
        return static_model(backbone, demo_sentences(cast(Language, language)))

    return Dense("Static", "", make, ("",))


def _word_prompt(language: str) -> str:
    return "promptreps-zh" if language == "zh" else "promptreps"


#: By what directories of kept vectors are called.
CONTENDERS: dict[str, Contender] = {
    each.directory: each
    for each in (
        recipe("classical", "mean"),
        recipe("prompteol"),
        sparse(0),
        recipe("early-late"),
        recipe("topic"),
        recipe("echo-topic"),
        recipe("echo-topic", name="Echo means", templates=MEANS),
        by_role("topic", "Topic, question and passage", CALLED),
        by_role("echo-topic", "Echo topic, question and passage", CALLED),
        recipe("prompteol-before-mlp"),
        recipe("early-late-before-mlp"),
        promptreps(),
        recipe("echo-2", "mean"),
        recipe("reba-2", "mean"),
        sparse(16),
        late_interaction("classical"),
        late_interaction("echo-2"),
        static(),
    )
}


def _fitted(name: str, texts: Vectors) -> Callable[[Array], Array]:
    """What a filter makes of vectors, fitted on some of these."""
    if not name:
        return lambda vectors: vectors
    moments = Moments(texts.vectors.shape[1])
    chosen = np.random.default_rng(0).permutation(len(texts.vectors))[:FIT_DOCUMENTS]
    moments.add(torch.from_numpy(texts.vectors[chosen]))
    module = PARTS[SUM if name == APART else name].from_moments(moments, texts.shares)
    return partial(_mapped, module)


def _unit(vectors: Array) -> Array:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms == 0, 1, norms)).astype(np.float32)


@torch.inference_mode()
def _mapped(module: torch.nn.Module, vectors: Array) -> Array:
    mapped: Array = module({"sentence_embedding": torch.from_numpy(vectors)})["sentence_embedding"].numpy()
    return mapped
