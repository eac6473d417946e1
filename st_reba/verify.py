"""Comparison of a server's vectors with those of the saved model that it is to serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from .data.demo import demo_sentences
from .modules.endpoint import Endpoint, EndpointError

__all__ = ["TOLERANCES", "Endpoint", "EndpointError", "Verdict", "verify"]

#: Largest distance of two vectors of length 1 that rounding alone explains, on other kernels as well.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: Poolings that servers have.
_POOLINGS = {"mean": "the mean of all tokens", "lasttoken": "the last token", "cls": "the first token"}


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify`.

    Attributes:
        distance: Greatest distance of the two vectors of a text, both of length 1; 2 if they have other sizes.
        tolerance: Largest distance allowed.
        causes: What the server does otherwise, as far as it is known; none if the vectors are equal.
    """

    distance: float
    tolerance: float
    causes: list[str]

    @property
    def equal(self) -> bool:
        """Whether the server gives the model's vectors."""
        return not self.causes


def verify(
    endpoint: Endpoint, model: SentenceTransformer, *, prompt_name: str | None = None, tolerance: float | None = None
) -> Verdict:
    """Embed twenty texts of the package by a server and by a saved model, and compare the vectors.

    Args:
        endpoint: The server.
        model: The model that it is to serve.
        prompt_name: Name of the model's prompt that the server should use; None: its default prompt, if any.
        tolerance: Largest distance of two vectors of length 1; None: that of the model's precision in
            :data:`TOLERANCES`.

    Raises:
        EndpointError: If the server does not answer.
        ValueError: If the model has no such prompt.
    """
    if prompt_name is not None and prompt_name not in model.prompts:
        names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
        raise ValueError(f"--prompt-name {prompt_name}: the model has {names}.")
    if tolerance is None:
        precision = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        tolerance = TOLERANCES.get(precision, TOLERANCES[torch.float32])
    name = prompt_name or model.default_prompt_name
    prompt = (model.prompts[name] or "") if name else ""
    texts = [*demo_sentences("en")[:12], *demo_sentences("zh")[:8]]
    there, here = endpoint.embed(texts), _embed(model, texts, prompt)
    distance = _distance(there, here)
    causes = []
    if distance > tolerance:
        readings = _readings(model, prompt)
        found = (cause for cause, own, words in readings if _distance(there, _embed(own, texts, words)) <= tolerance)
        other = f"it has {there.shape[1]} values, the model's {here.shape[1]}"
        unknown = "neither another pooling nor a missing prompt explains it: another model, recipe or precision?"
        causes.append(other if there.shape != here.shape else next(found, unknown))
    lengths = [np.linalg.norm(vectors, axis=1) for vectors in (there, here)]
    if not np.allclose(lengths[0], lengths[1], rtol=max(tolerance, 1e-3)):
        spans = [f"{own.min():.3g} to {own.max():.3g}" for own in lengths]
        causes.append(f"normalising: its vectors have lengths of {spans[0]}, and the model's of {spans[1]}")
    return Verdict(distance, tolerance, causes)


def _readings(model: SentenceTransformer, prompt: str) -> Iterator[tuple[str, SentenceTransformer, str]]:
    """Yield other ways to read texts, each with its name: without the prompt, by another one, in another pooling."""
    others = {other: f'the prompt is that of "{name}"' for name, other in model.prompts.items()}
    # The model's own prompt comes first.
    prompts = {prompt: "", **others, "": "the prompt is missing"} | {prompt: ""}
    pooled = {"": model}
    for place, part in enumerate(model.children()):
        for mode in _POOLINGS if isinstance(part, Pooling) else ():
            other = copy.copy(model)
            pooling = Pooling(part.embedding_dimension, mode, part.include_prompt)
            other._modules = {**model._modules, list(model._modules)[place]: pooling}
            pooled[f"pooling is {_POOLINGS[mode]}, and the model's {part.pooling_mode}"] = other
    for (words, said), (cause, own) in product(prompts.items(), pooled.items()):
        yield ", and ".join(filter(None, (said, cause))), own, words or ""


def _embed(model: SentenceTransformer, texts: list[str], prompt: str) -> NDArray[np.float64]:
    return np.asarray(model.encode(texts, prompt=prompt, show_progress_bar=False), dtype=np.float64)


def _distance(some: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the greatest distance of two rows, both scaled to length 1; 2, the most there is, of other sizes."""
    if some.shape != others.shape:
        return 2.0
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12) for rows in (some, others)]
    return float(np.linalg.norm(unit[0] - unit[1], axis=1).max())
