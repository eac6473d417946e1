"""Recipes over a server, in the form of those on one model: which words around a text, and which filter behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from sentence_transformers import SentenceTransformer

from ..evaluation.embedded import TensorCache
from ..lm.fingerprint import fingerprint_of
from ..modules import CausalModule, EndpointTransformer
from ..recipes import Recipe
from ..recipes.recipe import POOLINGS
from .recipes import RecipePass, Recipes, Vectors, reading


class EndpointPass:
    """A prompt that a server reads, in the form of a :class:`.recipes.ModulePass`; its tokens are texts.

    Args:
        endpoint: Whose server is asked.
        recipes: What comes out of it: one wording, under any poolings and filters.
    """

    words: ClassVar[Mapping[str, str]] = {}

    def __init__(self, endpoint: EndpointTransformer, recipes: list[Recipe]) -> None:
        self.recipes = recipes
        # One that is made for the last token alone may hand on no others.
        widest = min(recipes, key=lambda recipe: recipe.pooling == "last")
        self.module = widest.build(cast(CausalModule, endpoint))
        self.poolings = list(dict.fromkeys(recipe.pooling for recipe in recipes))
        modes = tuple(POOLINGS.get(pooling, pooling) for pooling in self.poolings)
        self.model = SentenceTransformer(modules=widest.pipeline(self.module, modes), device="cpu")
        self.settings = [self.module.get_config_dict(), self.poolings]

    def encode(self, texts: Sequence[str], prompt: str | None, batch_size: int) -> Vectors:
        """Of each recipe before its filter, (B, D)."""
        vectors = self.model.encode(
            list(texts), prompt=prompt, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        by_pooling = zip(self.poolings, vectors.float().chunk(len(self.poolings), dim=1), strict=True)
        found = dict(by_pooling)
        return {reading(recipe): found[recipe.pooling] for recipe in self.recipes}

    def encode_words(self, sentences: Sequence[str], words: Sequence[str], batch_size: int) -> dict[str, torch.Tensor]:
        """A server gives no words of a text."""
        return {}

    def tokens(self, texts: Sequence[str]) -> float:
        """How many texts are sent."""
        return len(texts)


class EndpointRecipes(Recipes):
    """Recipes over a server. Of the controls tf-idf alone is run: a server shows neither input embeddings nor weights.

    Args:
        endpoint: Whose server is asked.
        recipes: As :func:`st_reba.recipes.endpoint.on_endpoint` has them.
        batch_size: Texts in a request.
        controls: Whether tf-idf is run.
        fit_on: As for :class:`Recipes`.
        kept: As for :class:`Recipes`.
    """

    timed = False

    def __init__(
        self,
        endpoint: EndpointTransformer,
        recipes: Sequence[Recipe],
        *,
        batch_size: int = 32,
        controls: bool = True,
        fit_on: Sequence[tuple[str, ...]] = (),
        kept: TensorCache | None = None,
    ) -> None:
        self.endpoint = endpoint
        backbone = cast(CausalModule, endpoint)
        super().__init__(backbone, recipes, batch_size=batch_size, controls=False, fit_on=fit_on, kept=kept)
        self.with_controls = controls

    @property
    def told(self) -> dict[str, str]:
        return {"batch size": str(self.batch_size), "server": self.endpoint.url, "form": str(self.endpoint.form)}

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Characters of each text: tokens are the server's own business."""
        return [len(text) for text in texts]

    def _passes(self) -> tuple[list[RecipePass], list[tuple[Recipe, str]]]:
        groups: dict[tuple[str, Any], list[Recipe]] = {}
        for recipe in self.asked:
            groups.setdefault((recipe.row.key, recipe.wording), []).append(recipe)
        return [EndpointPass(self.endpoint, own) for own in groups.values()], []

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.endpoint.url, self.endpoint.served_name, self.endpoint.fingerprint)
