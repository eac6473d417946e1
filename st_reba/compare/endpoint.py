"""Recipes over a server, in the form of those on one model: which words around a text, and which filter behind it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from ..evaluation.embedded import TensorCache
from ..lm.fingerprint import fingerprint_of
from ..modules import CausalModule, EndpointTransformer
from ..recipes import Recipe
from .recipes import ModulePass, RecipePass, Recipes


class EndpointPass(ModulePass):
    """A prompt that a server reads, under any poolings. Its tokens are the server's own business: texts are counted."""

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
        return [EndpointPass(self.backbone, own) for own in groups.values()], []

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.endpoint.url, self.endpoint.served_name, self.endpoint.fingerprint)
