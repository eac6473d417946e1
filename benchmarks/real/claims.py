"""Claims of papers as paired differences on real models: rows of ``benchmarks/results/claims.csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Items
from st_reba.recipes import find

from .cosines import beside
from .kept import IN_ENGLISH, Kept, Variant
from .scores import Pairs, Row, word_readings


def read(key: str, pooling: str = "") -> Variant:
    """Return a row of the recipes at its own end, under a pooling; its usual one if empty."""
    recipe = find(key)
    own = recipe.post_processor
    return Variant(recipe.row.name, pooling or recipe.pooling, filter="" if own is None else own.name)


CLASSICAL, LAST = read("classical", "mean"), read("classical", "last")
ECHO, REBA = map(read, ("echo-2", "reba-2"))
PROMPT = read("prompteol")
#: The prompt that recipes that build on it ask with.
ENGLISH_PROMPT = {"en": PROMPT, "zh": PROMPT._replace(recipe=IN_ENGLISH)}
EARLY_LATE = read("early-late")
TOPIC, ECHO_TOPIC = map(read, ("topic", "echo-topic"))
#: Recipes that build on PromptEOL.
BUILT_ON_PROMPT = ("metaeol", "ck", "token-prepending", "contrastive-prompting", "value-aggregation")


class Claim(NamedTuple):
    """A claim in a few words: the first reading is ahead of the second."""

    text: str
    first: Variant
    second: Variant


def on_pairs(language: str) -> list[Claim]:
    """Return the claims about sentence embeddings."""
    prompt = ENGLISH_PROMPT[language]
    return [
        Claim("ReBA lifts the last token", REBA._replace(pooling="last"), LAST),
        Claim("ReBA lifts the mean", REBA, CLASSICAL),
        Claim("ReBA is ahead of Echo", REBA, ECHO),
        Claim("Echo lifts the mean", ECHO, CLASSICAL),
        Claim("A prompt is ahead of the mean", PROMPT, CLASSICAL),
        Claim("A prompt is ahead of Echo", PROMPT, ECHO),
        *(Claim(f"{own.recipe} is ahead of PromptEOL", own, prompt) for own in map(read, BUILT_ON_PROMPT)),
        Claim("Pretended CoT is ahead of PromptEOL", read("pretended-cot"), PROMPT),
        Claim("Knowledge is ahead of PromptEOL", read("knowledge"), PROMPT),
        Claim("Re-routing lifts the mean", read("kv-rerouting", "mean"), CLASSICAL),
        Claim("Re-routing lifts the last token", read("kv-rerouting", "last"), LAST),
        Claim("Four passes are ahead of two", read("rt-4"), read("rt-2")),
        Claim("A bidirectional last layer lifts the mean, untrained", read("bidirectional"), CLASSICAL),
        Claim("Early and late is ahead of PromptEOL", EARLY_LATE, PROMPT),
        *(Claim(f"{each.recipe} is ahead of PromptEOL", each, PROMPT) for each in (TOPIC, ECHO_TOPIC)),
        Claim("A second copy helps Topic", ECHO_TOPIC, TOPIC),
    ]


def differences(
    claims: Sequence[Claim],
    readings: Mapping[Variant, Any],
    statistic: Callable[[dict[str, Any]], Items],
    name: str,
) -> Iterator[Row]:
    """Yield a row for each claim whose readings were run.

    Args:
        claims: Some claims.
        readings: What each reading gave.
        statistic: Function from that to scores.
        name: Name of the set.
    """
    claims = [claim for claim in claims if claim.first in readings and claim.second in readings]
    used = list(dict.fromkeys(each for claim in claims for each in claim[1:]))
    scores = statistic({str(number): readings[each] for number, each in enumerate(used)}) if used else None
    for text, first, second in claims:
        difference = beside(scores, [used.index(first)], [used.index(second)], ("difference", "low", "high"))
        yield {"claim": text, "set": name, "first": shown(first), "second": shown(second), **difference}


def pair_claims(found: Pairs) -> Iterator[Row]:
    """Yield the rows of a part of STS-B."""
    statistic = partial(bootstrap.spearman, labels=found.labels)
    return differences(on_pairs(found.language), found.cosines, statistic, found.name)


def word_claims(kept: Kept, name: str) -> Iterator[Row]:
    """Yield the rows of word senses, by both distances."""
    words = [(each.recipe, Variant(each.recipe)) for each in (REBA, CLASSICAL, ECHO)]
    claims = [
        Claim(f"{ours} is ahead of {theirs} on word senses", one, two)
        for (ours, one), (theirs, two) in (words[:2], words[::2], words[:0:-1])
    ]
    for metric, correct in word_readings(kept, name).items():
        yield from differences(claims, correct, bootstrap.mean, f"{name.upper()}, {metric}")


def shown(variant: Variant) -> str:
    """Return a reading at its own end in words."""
    return ", ".join(part for part in (variant.recipe, variant.filter, variant.pooling) if part)
