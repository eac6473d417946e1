"""What papers claim, as paired differences on real models: rows of ``benchmarks/results/claims.csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from st_reba.compare.mteb import score_items
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Resampled
from st_reba.recipes import find
from st_reba.recipes.rows import PARTWISE

from .cosines import beside
from .kept import Kept, Variant
from .scores import Pairs, Row, Titles, word_readings
from .sets import Sets

Array = NDArray[np.float64]


def read(key: str, pooling: str = "") -> Variant:
    """A row of the recipes at its own end, under a pooling; its usual one if empty."""
    recipe = find(key)
    return Variant(recipe.method, pooling or recipe.pooling, filter="" if recipe.part is None else recipe.part.name)


BAG = read("bag-of-input-embeddings")
CLASSICAL, LAST = read("classical", "mean"), read("classical", "last")
ECHO, REBA, NORMALISED = map(read, ("echo-2", "reba-2", "reba-2-normalised"))
PROMPT = read("prompteol")
#: In English words, whatever the language of the texts: as the recipes that build on it ask.
ENGLISH_PROMPT = {"en": PROMPT, "zh": replace(PROMPT, recipe="PromptEOL, English")}
EARLY_LATE = read("early-late")
TOPIC, ECHO_TOPIC = map(read, ("topic", "echo-topic"))
#: Those that build on PromptEOL.
BUILT_ON_PROMPT = ("metaeol", "ck", "token-prepending", "contrastive-prompting", "value-aggregation")


@dataclass(frozen=True)
class Claim:
    """The first is ahead of the second.

    Attributes:
        text: In a few words.
        first: A reading.
        second: Another.
        names: The two in words, where the layer of one was chosen.
    """

    text: str
    first: Variant
    second: Variant
    names: tuple[str, str] | None = None


def on_pairs(language: str) -> list[Claim]:
    """The claims about sentence embeddings."""
    prompt = ENGLISH_PROMPT[language]
    readings = (CLASSICAL, LAST, ECHO, REBA, PROMPT)
    return [
        Claim("ReBA lifts the last token", replace(REBA, pooling="last"), LAST),
        Claim("ReBA lifts the mean", REBA, CLASSICAL),
        Claim("ReBA is ahead of Echo", REBA, ECHO),
        Claim("Weights that sum to 1 change ReBA", NORMALISED, REBA),
        Claim("Echo lifts the mean", ECHO, CLASSICAL),
        Claim("A prompt is ahead of the mean", PROMPT, CLASSICAL),
        Claim("A prompt is ahead of Echo", PROMPT, ECHO),
        *(Claim(f"{own.recipe} is ahead of PromptEOL", own, prompt) for own in map(read, BUILT_ON_PROMPT)),
        Claim("Pretended CoT is ahead of PromptEOL", read("pretended-cot"), PROMPT),
        Claim("Knowledge is ahead of PromptEOL", read("knowledge"), PROMPT),
        *(
            Claim("Re-routing lifts Classical", read("kv-rerouting", pooling), read("classical", pooling))
            for pooling in ("mean", "last")
        ),
        Claim("A second pass of Refined Thought helps", read("rt-2"), Variant("RT-1", "last")),
        Claim("Four passes are ahead of two", read("rt-4"), read("rt-2")),
        Claim("Eight passes are below four", read("rt-4"), read("rt-8")),
        Claim("A bidirectional last layer lifts the mean, untrained", read("bidirectional"), CLASSICAL),
        *(
            Claim(f"A bidirectional last layer lifts {each.recipe}, untrained", read(f"{key}-bidirectional"), each)
            for key, each in (("echo-2", ECHO), ("reba-2", REBA))
        ),
        *(Claim("An earlier layer is ahead of the last", each, each, _chosen(each)) for each in readings),
        *(
            Claim(f"A filter helps: {name}", replace(each, filter=name), each)
            for name in ("filtered", "standardised", "whitened", PARTWISE)
            for each in (BAG, *readings)
        ),
        *(
            Claim("Ahead of the bag behind the same filter", replace(each, filter=name), replace(BAG, filter=name))
            for name in ("", "standardised", "whitened", PARTWISE)
            for each in readings
        ),
        Claim("Ahead of the bag behind the same filter", EARLY_LATE, replace(BAG, filter=EARLY_LATE.filter)),
        Claim("Early and late is ahead of PromptEOL", EARLY_LATE, PROMPT),
        *(Claim("Asking for the topic is ahead of PromptEOL", each, PROMPT) for each in (TOPIC, ECHO_TOPIC)),
        *(Claim("Asking for the topic is ahead of Early and late", each, EARLY_LATE) for each in (TOPIC, ECHO_TOPIC)),
        Claim("A second copy helps Topic", ECHO_TOPIC, TOPIC),
        *(
            Claim("Early and late is ahead of PromptEOL behind a filter", EARLY_LATE, replace(PROMPT, filter=name))
            for name in ("standardised", "whitened", PARTWISE)
        ),
    ]


def differences(
    claims: Sequence[Claim],
    readings: Mapping[Variant, Any],
    statistic: Callable[[dict[str, Any]], Resampled],
    name: str,
) -> Iterator[Row]:
    """A row for each claim; what was not run is left out.

    Args:
        claims: Some claims.
        readings: What each reading gave.
        statistic: The score of that.
        name: Of the set.
    """
    claims = [claim for claim in claims if claim.first in readings and claim.second in readings]
    used = list(dict.fromkeys(each for claim in claims for each in (claim.first, claim.second)))
    scores = statistic({str(number): readings[each] for number, each in enumerate(used)}) if used else None
    for claim in claims:
        first, second = claim.names or (shown(claim.first), shown(claim.second))
        ours, theirs = [used.index(claim.first)], [used.index(claim.second)]
        difference = beside(scores, ours, theirs, ("difference", "low", "high"))
        yield {"claim": claim.text, "set": name, "first": first, "second": second, **difference}


def pair_claims(found: Pairs) -> Iterator[Row]:
    """On the test part."""
    claims = []
    for claim in on_pairs(found.language):
        layer = found.chosen_layer(claim.first) if claim.names else None
        # Without a development part there is nothing to choose a layer on.
        if not claim.names or layer is not None:
            claims.append(replace(claim, first=replace(claim.first, layer=layer)))
    statistic = partial(bootstrap.spearman, labels=found.labels["test"])
    return differences(claims, found.cosines["test"], statistic, found.names["test"])


def title_claims(found: Titles) -> Iterator[Row]:
    """On titles of news."""
    scores = {variant: found.scores.scores[key].samples for key, variant in found.variants.items()}
    readings = {variant: samples for variant, samples in scores.items() if samples}
    claims = [claim for claim in on_pairs("zh") if not claim.names]
    return differences(claims, readings, score_items, found.name)


def word_claims(kept: Kept, sets: Sets, names: Sequence[str]) -> Iterator[Row]:
    """On word senses, by both distances: at the end, and after the layer at which each is best on the other set."""
    readings = {name: word_readings(kept, sets, name) for name in names}
    recipes = [(REBA, CLASSICAL), (REBA, ECHO), (NORMALISED, CLASSICAL), (NORMALISED, ECHO), (NORMALISED, REBA),
               (ECHO, CLASSICAL)]  # fmt: skip
    for name in names:
        other = next((each for each in names if each != name), name)
        for metric, correct in readings[name].items():
            claims = []
            for pair in recipes:
                first, second = (Variant(each.recipe, "") for each in pair)
                text = f"{first.recipe} is ahead of {second.recipe} on word senses"
                one, two = (_best_layer(readings[other][metric], each) for each in (first, second))
                called = (f"{first.recipe}, its best layer", f"{second.recipe}, its best layer")
                claims += [Claim(text, first, second), Claim(text, one, two, called)]
            yield from differences(claims, correct, bootstrap.mean, f"{name.upper()}, {metric}")


def _best_layer(correct: Mapping[Variant, Array], variant: Variant) -> Variant:
    own = [each for each in correct if each.layer is not None and replace(each, layer=None) == variant]
    return max(own, key=lambda each: float(correct[each].mean()), default=variant)


def shown(variant: Variant) -> str:
    """A reading at its own end, in words."""
    return ", ".join(part for part in (variant.recipe, variant.filter, variant.pooling) if part)


def _chosen(variant: Variant) -> tuple[str, str]:
    """A reading at the layer that is best on the development part, and at its own end."""
    return f"{variant.recipe}, its best layer, {variant.pooling}", shown(variant)
