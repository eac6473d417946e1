"""Whether a server gives a saved model's vectors, and if not, what it does otherwise."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from .endpoint import Endpoint, EndpointError
from .probes import EMPTY, LONG, Probe, probes
from .readings import Reading, faults, lengths, pairs, saved

#: How far two vectors of length 1 may be apart by rounding alone, on other kernels as well.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: Farther apart than that no precision brings them.
_NOISE = 0.1

Vectors = dict[str, np.ndarray]


@dataclass
class SentText:
    """One text.

    Attributes:
        probe: It.
        distance: Between the server's vector and the model's, both of length 1; None: the server refused the text.
        said: What the server said then.
    """

    probe: Probe
    distance: float | None
    said: str = ""


@dataclass
class Verdict:
    """What was seen.

    Attributes:
        rows: Of each text, sent alone.
        tolerance: Beyond which a distance is a difference.
        causes: What the server does otherwise, in words; none: nothing.
    """

    rows: list[SentText]
    tolerance: float
    causes: list[str]

    @property
    def equal(self) -> bool:
        """Whether the server gives the model's vectors."""
        return not self.causes


def verify(
    endpoint: Endpoint,
    model: SentenceTransformer,
    *,
    prompt_name: str | None = None,
    tolerance: float | None = None,
    max_tokens: int = 2048,
) -> Verdict:
    """Send texts to a server, and tell its vectors from those of a saved model.

    What it does otherwise is found by doing it here: the fault whose vectors are the server's is named.

    Args:
        endpoint: The server.
        model: What it is to serve.
        prompt_name: Which of the model's prompts it should use; None: the model's default one, if any.
        tolerance: How far two vectors of length 1 may be apart; None: by the model's precision, :data:`TOLERANCES`.
        max_tokens: Of the longest text.

    Raises:
        EndpointError: If the server does not answer, or refuses every text.
        ValueError: If the model has no such prompt.
    """
    if tolerance is None:
        tolerance = TOLERANCES.get(next(model.parameters()).dtype, TOLERANCES[torch.float32])
    own = saved(model, prompt_name)
    found = _Found(own, probes(model, own.prompt, max_tokens), tolerance)
    found.ask(endpoint)
    causes = found.explained()
    return Verdict(found.rows(), tolerance, [*causes, *found.in_batches(endpoint)])


class _Found:
    """What a server gave, and what explains it."""

    def __init__(self, own: Reading, texts: Sequence[Probe], tolerance: float) -> None:
        self.own, self.tolerance = own, tolerance
        #: What the server's own arithmetic comes to.
        self.noise = tolerance
        self.texts = {probe.name: probe for probe in texts}
        self.expected = {name: own.embed(probe.text) for name, probe in self.texts.items()}
        self.got: Vectors = {}
        self.said: dict[str, str] = {}

    def ask(self, endpoint: Endpoint) -> None:
        """Each text alone."""
        for name, probe in self.texts.items():
            try:
                (self.got[name],) = endpoint.embed([probe.text])
            except EndpointError as error:
                # Some servers refuse an empty text, or one that is too long.
                if not error.is_refusal or name not in (EMPTY, LONG):
                    raise
                self.said[name] = str(error)

    def rows(self) -> list[SentText]:
        """How far each is from what it should be."""
        return [
            SentText(
                probe,
                _apart(self.got[name], self.expected[name]) if name in self.got else None,
                self.said.get(name, ""),
            )
            for name, probe in self.texts.items()
        ]

    def in_batches(self, endpoint: Endpoint) -> list[str]:
        """What is otherwise where texts are sent together, in two orders."""
        names = [name for name in self.got if name != EMPTY]
        for order in (names, names[::-1]):
            together = dict(zip(order, endpoint.embed([self.texts[name].text for name in order]), strict=True))
            far = max(_apart(together[name], self.got[name]) for name in order)
            if far <= self.noise:
                continue
            if all(any(_apart(vector, self.got[name]) <= self.noise for name in order) for vector in together.values()):
                return ["order: the vectors of a list are not in the order of its texts"]
            return [f"batch: a text's vector depends on the texts beside it (up to {far:.1g} apart): padding?"]
        return []

    def explained(self) -> list[str]:
        """What the server does otherwise with a text that is alone."""
        names = [name for name in self.got if name != EMPTY]
        reading = self._search([name for name in names if name != LONG], names)
        if reading is None:
            return self._precision(names) or self._unexplained(names)
        if not self._explains(reading, names):
            # All but the long text.
            return [
                *reading.causes,
                *(self._precision(names) or ["the long text differs, and is cut at no usual length"]),
            ]
        causes = [*reading.causes, *self._lengths_of_vectors(reading, names)]
        return causes or self._empty()

    def _explains(self, reading: Reading, names: Sequence[str]) -> bool:
        return all(_apart(reading.embed(self.texts[name].text), self.got[name]) <= self.tolerance for name in names)

    def _search(self, short: Sequence[str], names: Sequence[str]) -> Reading | None:
        """No fault, or one, or two, which give the server's vectors of the short texts, and if possible of all."""
        for reading in chain([self.own], faults(self.own)):
            if self._explains(reading, short):
                return self._cut(reading, names) or reading
        return self._cut(self.own, names) or next(
            (reading for reading in pairs(self.own) if self._explains(reading, names)), None
        )

    def _cut(self, reading: Reading, names: Sequence[str]) -> Reading | None:
        """The same with texts of the length, if any, that the server cuts them at."""
        every = chain([reading], lengths(reading, max(self.texts[name].tokens for name in names)))
        # The long text tells most of them apart.
        first = [name for name in (LONG,) if name in names]
        return next((cut for cut in every if self._explains(cut, [*first, *names])), None)

    def _precision(self, names: Sequence[str]) -> list[str]:
        """Whether the server's arithmetic is coarser than the model's here."""
        far = max(_apart(self.got[name], self.expected[name]) for name in names)
        if far > _NOISE:
            return []
        for dtype in (torch.float16, torch.bfloat16):
            coarse = Reading(copy.deepcopy(self.own.model).to(dtype), self.own.prompt)
            here = max(_apart(coarse.embed(self.texts[name].text), self.expected[name]) for name in names)
            if far <= 3 * here:
                self.noise = max(self.noise, 3 * here)
                called = str(dtype).removeprefix("torch.")
                return [f"precision: as in {called} ({far:.1g} apart; the model in {called} is {here:.1g} apart here)"]
        self.noise = max(self.noise, _NOISE)
        return [f"precision: coarser than bfloat16 ({far:.1g} apart): quantised weights?"]

    def _unexplained(self, names: Sequence[str]) -> list[str]:
        sizes = {len(self.got[name]) for name in names}, {len(self.expected[name]) for name in names}
        if sizes[0] != sizes[1]:
            return [f"vectors have {min(sizes[0])} values, and the model's {min(sizes[1])}: another model, or a part"]
        far = max(_apart(self.got[name], self.expected[name]) for name in names)
        return [f"no fault that is known explains vectors that are {far:.1g} apart: another model, or other weights?"]

    def _lengths_of_vectors(self, reading: Reading, names: Sequence[str]) -> list[str]:
        got = _norms(self.got, names)
        wanted = _norms({name: reading.embed(self.texts[name].text) for name in names}, names)
        if np.allclose(got, wanted, rtol=max(self.tolerance, 1e-3)):
            return []
        if np.allclose(got, 1, rtol=1e-2):
            return ["normalisation: the vectors have length 1, and the model's have not"]
        if np.allclose(wanted, 1, rtol=1e-2):
            return [f"normalisation: the model's vectors have length 1, and these {got.min():.3g} to {got.max():.3g}"]
        ratios = got / wanted
        return [f"normalisation: the vectors are {ratios.min():.3g} to {ratios.max():.3g} times as long as the model's"]

    def _empty(self) -> list[str]:
        if EMPTY not in self.got or (apart := _apart(self.got[EMPTY], self.expected[EMPTY])) <= self.tolerance:
            return []
        zero = [what for what, own in (("the server", self.got), ("the model", self.expected)) if not own[EMPTY].any()]
        gives = f"{zero[0]} gives zeros and the other a vector" if zero else f"the vectors are {apart:.1g} apart"
        return [f"empty text: {gives}"]


def _apart(given: np.ndarray, expected: np.ndarray) -> float:
    """The length of the difference of two vectors that are scaled to length 1; infinite if they have other sizes."""
    if given.shape != expected.shape:
        return math.inf
    scaled = [vector / norm if (norm := np.linalg.norm(vector)) else vector for vector in (given, expected)]
    return float(np.linalg.norm(scaled[0] - scaled[1]))


def _norms(vectors: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.array([np.linalg.norm(vectors[name]) for name in names])
