"""Comparison of a server's vectors with those of its saved model."""

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
from .modules.endpoint import Endpoint as Endpoint

#: Largest distance between vectors of length 1 that rounding causes, also with different kernels.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: Pooling modes of servers.
_POOLINGS = {"mean": "the mean of all tokens", "lasttoken": "the last token", "cls": "the first token"}


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify`.

    Attributes:
        distance: Largest distance between the two vectors of a text, scaled to length 1, or 2 if their sizes differ.
        tolerance: Largest allowed distance.
        causes: Probable causes of the differences, or an empty list if the vectors are equal.
    """

    distance: float
    tolerance: float
    causes: list[str]

    @property
    def equal(self) -> bool:
        """Whether the server returns the model's vectors."""
        return not self.causes


def verify(endpoint: Endpoint, model: SentenceTransformer, *, prompt_name: str | None = None) -> Verdict:
    """Compare a server's vectors of twenty demo texts with those of its saved model.

    Args:
        endpoint: The server.
        model: Model that the server should run.
        prompt_name: Name of the model's prompt that the server should use. None uses the default prompt, if any.

    Raises:
        EndpointError: If the server does not answer.
        ValueError: If the model has no prompt named ``prompt_name``.
    """
    if prompt_name is not None and prompt_name not in model.prompts:
        names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
        raise ValueError(f"--prompt-name {prompt_name}: the model has {names}.")
    precision = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    tolerance = TOLERANCES.get(precision, TOLERANCES[torch.float32])
    prompt = model.prompts.get(prompt_name or model.default_prompt_name or "") or ""
    texts = [*demo_sentences("en")[:12], *demo_sentences("zh")[:8]]
    served, expected = endpoint.embed(texts), _embed(model, texts, prompt)
    distance = _distance(served, expected)
    causes = []
    if served.shape != expected.shape:
        causes.append(f"it has {served.shape[1]} values, the model's {expected.shape[1]}")
    elif distance > tolerance:
        unknown = "neither another pooling nor a missing prompt explains it: another model, recipe or precision?"
        variants = _variants(model, prompt)
        known = (why for why, other, words in variants if _distance(served, _embed(other, texts, words)) <= tolerance)
        causes.append(next(known, unknown))
    lengths = [np.linalg.norm(vectors, axis=1) for vectors in (served, expected)]
    if not np.allclose(lengths[0], lengths[1], rtol=max(tolerance, 1e-3)):
        ranges = [f"{norms.min():.3g} to {norms.max():.3g}" for norms in lengths]
        causes.append(f"normalization: its vectors have lengths of {ranges[0]}, and the model's of {ranges[1]}")
    return Verdict(distance, tolerance, causes)


def _variants(model: SentenceTransformer, prompt: str) -> Iterator[tuple[str, SentenceTransformer, str]]:
    """Yield variants of a model and a prompt, each after its description: other prompts, and other poolings."""
    prompts = {prompt: ""}
    prompts.setdefault("", "the prompt is missing")
    for name, other in model.prompts.items():
        prompts.setdefault(other or "", f'the prompt is that of "{name}"')
    models = {"": model}
    for index, part in enumerate(model.children()):
        if not isinstance(part, Pooling):
            continue
        for mode in _POOLINGS:
            variant = copy.copy(model)
            pooling = Pooling(part.embedding_dimension, mode, part.include_prompt)
            variant._modules = {**model._modules, list(model._modules)[index]: pooling}
            models[f"pooling is {_POOLINGS[mode]}, and the model's {part.pooling_mode}"] = variant
    for (other, prompt_cause), (pooling_cause, variant) in product(prompts.items(), models.items()):
        yield ", and ".join(filter(None, (prompt_cause, pooling_cause))), variant, other


def _embed(model: SentenceTransformer, texts: list[str], prompt: str) -> NDArray[np.float64]:
    return np.asarray(model.encode(texts, prompt=prompt, show_progress_bar=False), dtype=np.float64)


def _distance(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the largest distance between two rows of length 1, or 2, its maximum, if their sizes differ."""
    if first.shape != second.shape:
        return 2.0
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-12) for rows in (first, second)]
    return float(np.linalg.norm(unit[0] - unit[1], axis=1).max())
