"""What a search tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...catalogue import POOLINGS, PROMPTS, Recipe
from ...modules import CausalModule, CausalTransformer, EchoModule, ReBAModule
from ...modules.after_pooling.choices import FILTERS, fitted_on
from ...text.templates import PRESETS


@dataclass(frozen=True)
class Reading:
    """One way to run the model.

    Attributes:
        method: As tables show it; what tells it from all others.
        build: Makes its module on a backbone, to stop after a layer, or at its own end if None.
        poolings: Keys of :data:`st_reba.catalogue.POOLINGS` that make sense for it.
        every_layer: Whether all layers can be read from one pass.
        end: The layer that it ends with, from the top: -1 the last, -2 the last but one.
    """

    method: str
    build: Callable[[CausalModule, int | None], CausalModule]
    poolings: tuple[str, ...]
    every_layer: bool = True
    end: int = -1


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Attributes:
        reading: How the model is run.
        layer: After which layer it is read; None for the reading's own end.
        pooling: How token vectors become one.
        filter: What stands behind that, one of :data:`~st_reba.modules.after_pooling.choices.FILTERS`; empty for none.
    """

    reading: Reading
    layer: int | None
    pooling: str
    filter: str = ""

    @property
    def run(self) -> tuple[str, int | None]:
        """What candidates have in common that come out of one pass."""
        return self.reading.method, None if self.reading.every_layer else self.layer

    def recipe(self, fit_texts: Sequence[str]) -> Recipe:
        """The candidate as a recipe, its filter fitted on these texts."""
        return Recipe(
            self.reading.method if self.layer is None else f"{self.reading.method}, layer {self.layer}",
            self.pooling,
            lambda backbone: self.reading.build(backbone, self.layer),
            words=False,
            filtered=self.filter,
            filter=fitted_on(list(fit_texts))[self.filter] if self.filter else None,
        )


#: The recipe without any choice: what a search has to beat.
PLAIN = Candidate(
    Reading("Classical", lambda backbone, layer: CausalTransformer(backbone, output_layer=layer), tuple(POOLINGS)),
    None,
    "mean",
)


def readings() -> list[Reading]:
    """Every way to run the model that a search tries."""
    return [
        PLAIN.reading,
        # Read at its end, so there is one pooling for it.
        *(
            Reading(name, _prompt(template), ("last",), end=PRESETS[template].output_layer or -1)
            for name, template in PROMPTS.items()
        ),
        *(Reading(f"Echo-{k}", _echo(repetitions=k), tuple(POOLINGS)) for k in (2, 3)),
        Reading("Echo, Springer's prompt", _echo(template="springer"), tuple(POOLINGS)),
        # Under last pooling it is Classical.
        Reading("ReBA-1", _reba(1), ("mean",), every_layer=False),
        Reading("ReBA-2", _reba(2), tuple(POOLINGS), every_layer=False),
    ]


def candidates(layers: int, every: Sequence[Reading] | None = None) -> list[Candidate]:
    """Every combination, on a model of so many layers.

    It is read after each eighth of the layers from a quarter of them on, after the last but one, and at its end: the
    turning points that papers report lie there.
    """
    chosen = sorted({round(layers * eighth / 8) for eighth in range(2, 8)} | {layers - 1})
    return [
        Candidate(reading, layer, pooling, name)
        for reading in (readings() if every is None else every)
        for layer in [*(layer for layer in chosen if 0 < layer < layers + 1 + reading.end), None]
        for pooling in reading.poolings
        for name in ("", *FILTERS)
    ]


def _prompt(template: str) -> Callable[[CausalModule, int | None], CausalModule]:
    return lambda backbone, layer: CausalTransformer(backbone, template=template, output_layer=layer)


def _echo(
    repetitions: int | None = None, template: str | None = None
) -> Callable[[CausalModule, int | None], CausalModule]:
    return lambda backbone, layer: EchoModule(backbone, repetitions=repetitions, template=template, output_layer=layer)


def _reba(repetitions: int) -> Callable[[CausalModule, int | None], CausalModule]:
    return lambda backbone, layer: ReBAModule(backbone, repetitions=repetitions, output_layer=layer)
