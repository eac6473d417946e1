"""Whether a server gives a saved model's vectors, and if not, what it does otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from ..lm.endpoint import Endpoint, EndpointError
from ..modules import EndpointTransformer
from ..modules.endpoint import FINGERPRINT_APART, FINGERPRINTED
from .faults import Reading, faults, lengths, saved, text_limit

#: How far two vectors of length 1 may be apart by rounding alone, on other kernels as well.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: How far apart vectors are that coarser arithmetic has made; farther apart no precision brings them.
_PRECISIONS = {
    **{f"as in {str(dtype).removeprefix('torch.')}": most for dtype, most in TOLERANCES.items()},
    "coarser than bfloat16, such as quantised weights": 0.1,
}

LONG, EMPTY = "long", "empty"
_SHORT = {
    "word": "Hello",
    "sentence": "The dog chased the cat; the cat chased the mouse, and nobody chased the dog.",
    "Chinese": "我爱自然语言处理。",
    "other marks": "Zwölf Boxkämpfer jagen Viktor 🥊 — naïve café, 3.14 % of {x}",
    EMPTY: "",
}

#: By the names of the texts.
Vectors = dict[str, np.ndarray]
#: Whether a reading gives the server's vectors of the texts of these names.
Explains = Callable[[Reading, Iterable[str]], bool]


@dataclass(frozen=True)
class Probe:
    """A text in which the faults of servers show.

    Attributes:
        name: What it is called.
        text: The text.
        tokens: Of it, whole.
    """

    name: str
    text: str
    tokens: int


@dataclass
class SentText:
    """What came of one text.

    Attributes:
        probe: The text.
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

    What it does otherwise is found by doing it here: the fault whose vectors are the server's is named. A model whose
    first module asks a server is not served itself: the question is then whether this is the server that it was made
    for, by the vector of one text that the module has kept.

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
    if isinstance(model[0], EndpointTransformer):
        return _of_the_server(endpoint, model[0])
    if tolerance is None:
        tolerance = TOLERANCES.get(next(model.parameters()).dtype, TOLERANCES[torch.float32])
    own = saved(model, prompt_name)
    probes = {probe.name: probe for probe in _probes(model, own.prompt, max_tokens)}

    @cache
    def embed(reading: Reading, name: str) -> np.ndarray:
        return reading.embed(probes[name].text)

    expected = {name: embed(own, name) for name in probes}
    got: Vectors = {}
    said: dict[str, str] = {}
    for name, probe in probes.items():
        try:
            (got[name],) = endpoint.embed([probe.text])
        except EndpointError as error:
            # Some servers refuse an empty text, or one that is too long.
            if not error.is_refusal or name not in (EMPTY, LONG):
                raise
            said[name] = str(error)
    sent = {name: probes[name] for name in got if name != EMPTY}

    def explains(reading: Reading, names: Iterable[str]) -> bool:
        return all(_apart(embed(reading, name), got[name]) <= tolerance for name in names)

    reading, noise = _found(own, sent, explains), tolerance
    if reading is not None and explains(reading, sent):
        causes = [*reading.causes, *_lengths({name: embed(reading, name) for name in sent}, got, tolerance)]
        causes = causes or _empty(expected, got, tolerance)
    else:
        # All but the long text, or none.
        causes = [*(reading.causes if reading else ())]
        far = _farthest(sent, expected, got)
        if far <= max(_PRECISIONS.values()):
            coarse, noise = next((name, most) for name, most in _PRECISIONS.items() if far <= most)
            causes.append(f"precision: {coarse} ({far:.1g} apart)")
        else:
            cut = "the long text differs, and is cut at no usual length"
            causes.append(cut if reading else _unexplained(sent, expected, got))
    causes += _in_batches(endpoint, sent, got, max(noise, tolerance))
    distances = {name: _apart(got[name], expected[name]) for name in got}
    rows = [SentText(probe, distances.get(name), said.get(name, "")) for name, probe in probes.items()]
    return Verdict(rows, tolerance, causes)


def _of_the_server(endpoint: Endpoint, module: EndpointTransformer) -> Verdict:
    """Whether a server serves the model that a module was made for, and gives a text one vector whatever is beside it.

    Raises:
        EndpointError: If it does not answer in the module's form.
    """
    if (endpoint.form == "llama.cpp") != module.gives_states:
        raise EndpointError(f"{endpoint.url}: the model was made for a server in the form {module.form}: give --form.")
    probe = Probe("sentence", FINGERPRINTED, len(FINGERPRINTED.split()))
    apart = module.apart(endpoint)
    causes = []
    if apart == math.inf:
        causes.append(f"another model: its vectors have not {module.dimension} values")
    elif apart > FINGERPRINT_APART:
        causes.append(f"another model: the vector of one text is {apart:.2g} of its length away from what was noted")
    elif not module.gives_states:
        sent = {name: Probe(name, text, len(text.split())) for name, text in _SHORT.items() if text}
        got = {name: endpoint.embed([probe.text])[0] for name, probe in sent.items()}
        causes = _in_batches(endpoint, sent, got, TOLERANCES[torch.bfloat16])
    return Verdict([SentText(probe, apart)], FINGERPRINT_APART, causes)


def _probes(model: SentenceTransformer, prompt: str | None, max_tokens: int) -> list[Probe]:
    """Short texts, one that is longer than the model reads, and an empty one."""
    limit = text_limit(model, prompt) or max_tokens

    def tokens(text: str) -> int:
        tokenizer = model.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return len(tokenizer.encode(text, add_special_tokens=False).ids)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    # No part of the long text is like another, so that it shows where it was cut.
    long, count = "", min(limit + limit // 2 + 8, max_tokens)
    for number in itertools.count(1):
        if tokens(long) >= count:
            break
        colour = "red" if number % 3 else "blue"
        long = f"{long} Item {number} weighs {number * 37 % 101} grams and is {colour}.".lstrip()
    return [Probe(name, text, tokens(text)) for name, text in {**_SHORT, LONG: long}.items()]


def _found(own: Reading, sent: dict[str, Probe], explains: Explains) -> Reading | None:
    """No fault, or one, which gives the server's vectors of the short texts, and if possible of all."""
    # The long text tells most lengths apart.
    every = sorted(sent, key=lambda name: name != LONG)
    tokens = max(probe.tokens for probe in sent.values())

    def with_length(reading: Reading) -> Reading | None:
        return next((cut for cut in chain([reading], lengths(reading, tokens)) if explains(cut, every)), None)

    for reading in chain([own], faults(own)):
        if explains(reading, [name for name in sent if name != LONG]):
            return with_length(reading) or reading
    return with_length(own)


def _unexplained(sent: Iterable[str], expected: Vectors, got: Vectors) -> str:
    sizes, wanted = ({len(vectors[name]) for name in sent} for vectors in (got, expected))
    if sizes != wanted:
        return f"vectors have {min(sizes)} values, and the model's {min(wanted)}: another model, or a part"
    far = _farthest(sent, expected, got)
    return f"no fault that is known explains vectors that are {far:.1g} apart: another model, or other weights?"


def _lengths(expected: Vectors, got: Vectors, tolerance: float) -> list[str]:
    found, wanted = (np.array([np.linalg.norm(vectors[name]) for name in expected]) for vectors in (got, expected))
    if np.allclose(found, wanted, rtol=max(tolerance, 1e-3)):
        return []
    if np.allclose(found, 1, rtol=1e-2):
        return ["normalisation: the vectors have length 1, and the model's have not"]
    if np.allclose(wanted, 1, rtol=1e-2):
        return [f"normalisation: the model's vectors have length 1, and these {found.min():.3g} to {found.max():.3g}"]
    ratios = found / wanted
    return [f"normalisation: the vectors are {ratios.min():.3g} to {ratios.max():.3g} times as long as the model's"]


def _empty(expected: Vectors, got: Vectors, tolerance: float) -> list[str]:
    if EMPTY not in got or (apart := _apart(got[EMPTY], expected[EMPTY])) <= tolerance:
        return []
    zero = [what for what, own in (("the server", got), ("the model", expected)) if not own[EMPTY].any()]
    gives = f"{zero[0]} gives zeros and the other a vector" if zero else f"the vectors are {apart:.1g} apart"
    return [f"empty text: {gives}"]


def _in_batches(endpoint: Endpoint, sent: dict[str, Probe], got: Vectors, noise: float) -> list[str]:
    """What is otherwise where texts are sent together, in two orders."""
    for order in (list(sent), list(sent)[::-1]):
        together = dict(zip(order, endpoint.embed([sent[name].text for name in order]), strict=True))
        far = _farthest(order, together, got)
        if far <= noise:
            continue
        if all(any(_apart(vector, got[name]) <= noise for name in order) for vector in together.values()):
            return ["order: the vectors of a list are not in the order of its texts"]
        return [f"batch: a text's vector depends on the texts beside it (up to {far:.1g} apart): padding?"]
    return []


def _farthest(names: Iterable[str], some: Vectors, others: Vectors) -> float:
    return max(_apart(some[name], others[name]) for name in names)


def _apart(given: np.ndarray, expected: np.ndarray) -> float:
    """The length of the difference of two vectors that are scaled to length 1; infinite if they have other sizes."""
    if given.shape != expected.shape:
        return math.inf
    scaled = [vector / norm if (norm := np.linalg.norm(vector)) else vector for vector in (given, expected)]
    return float(np.linalg.norm(scaled[0] - scaled[1]))
