"""What one dry run shows of a language model, and a second one of its attention.

Nothing is known by name: what the modules of a model took and gave says what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention.function import NAME
from .attention.observers import LayerCensus, watching
from .backbone import depth
from .dry_run import CANNOT_RUN, TOKENS, Call, given_instead, noting_calls, output_on

_SHAPE = (len(TOKENS), len(TOKENS[0]))


class LastStates(NamedTuple):
    """One call of a module: marks of the last token's states that it was given and gave; None for what is not states.

    Equal marks are of states that are equal to the bit.
    """

    path: str
    given: int | None
    gave: int | None


@dataclass(frozen=True)
class Sketch:
    """What one dry run shows.

    Attributes:
        states: Last hidden states (2, 4, D).
        calling: Indices of the layers that call our attention function.
        explicit: Whether any of them asks for a softmax that the fused kernels do not know (soft cap, sinks).
        unknown: Names of the arguments they pass that are neither honoured nor harmless.
        owner: Path of the module that the layers belong to.
        layers: Their paths, in the order in which they run; empty if none were found that take and give states.
        norm: Paths of what stands between the last layer and the last hidden state: a norm, a projection, both, or
            nothing. None: the model does more to its last layer's states than its children do.
        given: What each layer was given, (2, 4, D).
        gave: What it gave.
        calls: Of the modules within the layers, those that ended first first.
        parts: For each layer, by their paths, its parts with large weights that take states and give states: those of
            one position, (1, 1, D), and what became of them.
    """

    states: Tensor
    calling: tuple[int, ...]
    explicit: bool
    unknown: frozenset[str]
    owner: str
    layers: tuple[str, ...]
    norm: tuple[str, ...] | None
    given: tuple[Tensor, ...]
    gave: tuple[Tensor, ...]
    calls: tuple[LastStates, ...]
    parts: tuple[Mapping[str, tuple[Tensor, Tensor]], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sketch:
        """Run a model under our attention function, or under its own where it cannot run so."""
        census = LayerCensus()
        try:
            with noting_calls(model) as calls, watching(census):
                output = output_on(model, NAME)
        except CANNOT_RUN:
            census = LayerCensus()
            with noting_calls(model) as calls:
                output = output_on(model)
        paths = {module: path for path, module in model.named_modules()}
        owner, layers, norm = _inside(model, output.last_hidden_state, calls)
        # A module that is called more than once is what it is the first time.
        first = {call.module: call for call in reversed(calls)}
        given = [first[layer].given for layer in layers if layer in first]
        gave = [states_of(first[layer].gave) for layer in layers if layer in first]
        if len(given) < len(layers) or not all(isinstance(states, Tensor) for states in (*given, *gave)):
            layers, given, gave = [], [], []
        within = {module for layer in layers for module in layer.modules()}
        inner = [call for call in calls if call.module in within]
        marks = _Marks(inner)
        return cls(
            states=output.last_hidden_state,
            calling=tuple(census.layers),
            explicit=census.explicit,
            unknown=frozenset(census.unknown),
            owner=paths[owner],
            layers=tuple(paths[layer] for layer in layers),
            norm=None if norm is None else tuple(paths[step] for step in norm),
            given=tuple(given),
            gave=tuple(gave),
            calls=tuple(marks.of(paths[call.module], call) for call in inner),
            parts=tuple(_parts(layer, first, paths) for layer in layers),
        )

    def of_the_first(self, layers: int, states: Tensor) -> Sketch:
        """That of the model which stops after its first layers, and gives these states."""
        return replace(
            self,
            states=states,
            calling=tuple(layer for layer in self.calling if layer < layers),
            layers=self.layers[:layers],
            given=self.given[:layers],
            gave=self.gave[:layers],
            parts=self.parts[:layers],
        )


def states_of(output: Any) -> Any:
    """What a layer gives, of which some architectures make a tuple with the states first."""
    return output[0] if isinstance(output, tuple) else output


def _inside(
    model: PreTrainedModel, wanted: Tensor, calls: Sequence[Call]
) -> tuple[nn.Module, list[nn.Module], list[nn.Module] | None]:
    """The module that the layers belong to, the layers, and what stands behind them.

    The final norm is those direct children whose outputs lead up to the last hidden state (in OPT two, a norm and a
    projection; in a model without one, none).
    """
    # Where the layers live: OPT and models that also see images wrap the decoder in a model of the same output.
    owner: nn.Module = model
    children = set(owner.children())
    while inner := [
        call.module
        for call in calls
        if call.module in children and _same(getattr(call.gave, "last_hidden_state", None), wanted)
    ]:
        owner = inner[0]
        children = set(owner.children())
    steps: list[nn.Module] = []
    for call in reversed(calls):
        if call.module in children and _same(call.gave, wanted):
            steps.insert(0, call.module)
            wanted = call.given
    lists = [child for child in owner.children() if isinstance(child, nn.ModuleList)]
    layers = next((list(found) for found in lists if len(found) == depth(model)), [])
    return owner, layers, steps if any(_same(states_of(call.gave), wanted) for call in calls) else None


def _parts(
    layer: nn.Module, calls: Mapping[nn.Module, Call], paths: Mapping[nn.Module, str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of its direct parts those with large weights: norms are not worth the trouble, and what has none is cheap."""
    found = {}
    for part in layer.children():
        call = calls.get(part)
        if call is None or not any(weight.dim() > 1 for weight in part.parameters()):
            continue
        # Experts also give which of them were chosen.
        given, gave = call.given, states_of(call.gave)
        if all(isinstance(states, Tensor) and states.dim() == 3 for states in (given, gave)):
            found[paths[part]] = given[:1, 1:2].clone(), gave[:1, 1:2].clone()
    return found


def output_projections(model: PreTrainedModel, sketch: Sketch, attending: Collection[int]) -> dict[int, str]:
    """Paths of the output projection of each of these layers, from a second dry run; without those not found.

    In every layer of that run the last state is what it was in the first and those before are not: what turns equal
    last states into unequal ones attends. The states before are negated, not exchanged: a token that takes nearly all
    attention (often the first) would have it anywhere.
    """

    def with_another_past(given: Tensor, states: Tensor) -> Tensor:
        return torch.cat([-given[:, :-1], given[:, -1:]], dim=1)

    layers = [model.get_submodule(path) for path in sketch.layers]
    changes = {layer: partial(with_another_past, given) for layer, given in zip(layers, sketch.given, strict=True)}
    paths = {module: path for path, module in model.named_modules()}
    with noting_calls(model) as calls, given_instead(changes):
        output_on(model, NAME if sketch.calling else None)
    marks = _Marks(calls)
    again = {paths[call.module]: marks.of(paths[call.module], call) for call in calls}
    twice = [(call, again[call.path]) for call in sketch.calls if call.path in again]
    found = {layer: _projection(model, sketch.layers[layer], twice) for layer in attending if layer < len(layers)}
    return {layer: path for layer, path in found.items() if path is not None}


def _projection(model: nn.Module, layer: str, calls: Sequence[tuple[LastStates, LastStates]]) -> str | None:
    """The last module with weights in what turns equal last states into unequal ones, if it is given these."""
    attention = next(
        (
            one.path
            for one, other in calls
            if one.path.startswith(f"{layer}.")
            and _equal(one.given, other.given) is True
            and _equal(one.gave, other.gave) is False
        ),
        None,
    )
    if attention is None:
        return None
    weighted = [
        (one, other)
        for one, other in calls
        if one.path.startswith(f"{attention}.") and _has_weights(model.get_submodule(one.path))
    ]
    if not weighted:
        return None
    one, other = weighted[-1]
    return one.path if _equal(one.given, other.given) is False else None


def _equal(one: int | None, other: int | None) -> bool | None:
    """Whether two marks are of the same states; None where one is of none."""
    return None if one is None or other is None else one == other


class _Marks:
    """Marks of what modules took and gave in one run: of the last token's states, to the bit, since a small effect in
    half precision is one. Those of one shape are read at once: on a GPU, each reading waits for it."""

    def __init__(self, calls: Sequence[Call]) -> None:
        alike: dict[tuple[Any, ...], dict[int, Tensor]] = {}
        for call in calls:
            for states in (states_of(call.given), states_of(call.gave)):
                if isinstance(states, Tensor) and states.dim() >= 3 and states.shape[:2] == _SHAPE:
                    # What one module gave, the next one often takes.
                    alike.setdefault((states.shape, states.dtype, states.device), {})[id(states)] = states
        self._marks: dict[int, int] = {}
        for found in alike.values():
            # Of the two zeros one.
            last = torch.stack([states[:, -1] for states in found.values()]) + 0
            rows = last.view(torch.uint8).cpu().numpy()
            self._marks.update((key, hash(row.tobytes())) for key, row in zip(found, rows, strict=True))

    def of(self, path: str, call: Call) -> LastStates:
        given, gave = (self._marks.get(id(states_of(value))) for value in (call.given, call.gave))
        return LastStates(path, given, gave)


def _has_weights(module: nn.Module) -> bool:
    """Quantised ones may be buffers; those of a norm have one dimension."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))


def _same(value: Any, wanted: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (wanted.shape, wanted.dtype, wanted.device)
        and torch.equal(value, wanted)
    )
