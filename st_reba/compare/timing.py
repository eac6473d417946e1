"""What recipes cost: seconds a text, each run alone, on a few texts that stand for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sentence_transformers import SentenceTransformer

#: How many batches each recipe is timed on, of how many texts at most, and how often: enough to tell recipes apart, few
#: enough not to wait for.
TIMED_BATCHES = 3
TIMED_TEXTS = 16
TIMED_ROUNDS = 2
#: A first round that takes longer is enough: a moment in which something else ran does not show in it.
TIMED_SECONDS = 5.0


def costs(
    models: Mapping[str, SentenceTransformer],
    batches: Sequence[list[str]],
    on_model: Callable[[str], None] = lambda name: None,
    *,
    on_cpu: bool = True,
) -> dict[str, float]:
    """Seconds that each model takes for a text, on average over batches.

    On a CPU they are those of the processor, which hardly depend on what else runs there; elsewhere those of the clock.

    In rounds in which all take turns, in one if that takes long; of each batch the fastest counts.

    Args:
        models: By name.
        batches: As :func:`timed_batches` gives them.
        on_model: Called with a model's name after each of its rounds; one that is not run counts as done.
        on_cpu: Whether the models run there.
    """
    clock = time.process_time if on_cpu else time.perf_counter
    fastest = {key: [float("inf")] * len(batches) for key in models}
    begun = time.perf_counter()
    for done in range(TIMED_ROUNDS):
        enough = done and time.perf_counter() - begun > TIMED_SECONDS
        for key, model in models.items():
            for index, batch in enumerate(() if enough else batches):
                start = clock()
                model.encode(batch, batch_size=len(batch), show_progress_bar=False)
                fastest[key][index] = min(fastest[key][index], clock() - start)
            on_model(key)
    texts = sum(map(len, batches))
    return {key: sum(spent) / texts for key, spent in fastest.items()}


def timed_batches(texts: Sequence[str], batch_size: int) -> list[list[str]]:
    """Batches that stand for all of these texts: from the middle of the longest, the middling and the shortest third.

    A batch holds neighbours in length, as ``encode`` makes them, so that as much of it is padding as of the whole. Few
    texts are all taken.
    """
    size = min(batch_size, TIMED_TEXTS)
    ordered = sorted(texts, key=len, reverse=True)
    starts: Sequence[int] = range(0, len(ordered), size)
    if len(starts) > TIMED_BATCHES:
        part = len(ordered) / TIMED_BATCHES
        starts = [int((index + 0.5) * part - size / 2) for index in range(TIMED_BATCHES)]
    return [ordered[start : start + size] for start in starts]
