"""What can be changed while a language model reads: small frozen objects, which any module takes and saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..lm import backbone
from ..lm.anatomy import embedding_scale, layer_paths, output_projections
from ..lm.attention.changes import Bidirectional, FirstKey, HiddenFirst
from ..lm.attention.setup import require_interface
from ..lm.backbone import for_summing, resolve_layer
from ..lm.run import Hook, PassChange, StatesAt, at, put
from ..settings import Setting, optional, whole
from ..text.layout import PREPENDED, Layout
from ..text.templates import PREPEND, USUAL_CONTRAST, Contrast, Template
from .stored import check_magnitudes

BIDIRECTIONAL_LAYERS = whole(
    "bidirectional_layers", 1, says="give the number of last layers that attend both ways, 1 or more."
)
TURNED_LAYERS: Setting[int | None] = optional(
    whole("bidirectional_layers", 1, says="give the number of last layers, 1 or more, or None for half of them.")
)
PREPEND_LAYERS: Setting[int | None] = optional(
    Setting("prepend_layers", lambda value: type(value) is int, "give a number of layers, or None for three in ten.")
)
SEED = whole("seed", 0, 2**63 - 1, "give a whole number, 0 or more, below 2**63.")
PREFIX_BIAS: Setting[float] = Setting(
    "prefix_bias",
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
    "give a finite number; 0 changes no logit.",
)
CONTRAST_LAYER: Setting[int | Contrast | None] = Setting(
    "contrast_layer",
    lambda value: value is None or isinstance(value, Contrast) or type(value) is int,
    "give the index of a layer, or None for the paper's.",
)
Scale = float | Literal["norm"]
SCALE: Setting[Scale] = Setting(
    "scale",
    lambda value: value == "norm" or (type(value) in (int, float) and 0 < value < math.inf),
    'give a number above 0, or "norm" for the length before.',
)

#: The question whose answer a text's embedding shall not be.
IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'

_Kind = TypeVar("_Kind", bound="type[Change]")


@dataclass(frozen=True)
class Change:
    """Something that is done to a language model while it reads, beside what the method does.

    A subclass is a frozen dataclass whose fields are its settings, of values that JSON has; they are checked when it
    is made, as far as that can be done without a model. Where a module has an argument for a change of its own, the
    setting bears that name. A field that is not compared (``field(default=..., compare=False, repr=False)``) is no
    setting: it has what :meth:`on` found out about a model.
    """

    #: The name that a saved model knows it by.
    key: ClassVar[str]

    #: Whether the state of a token then depends on tokens that stand behind it.
    looks_ahead: ClassVar[bool] = True

    #: Whether nothing is changed before a text, so that what stands there is as it would be without the change.
    spares_prefixes: ClassVar[bool] = False

    #: What a layer has one of, and this puts another in place of: the masks, or the key before all others.
    replaces: ClassVar[Literal["masks", "first key"] | None] = None

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        """The change as it is made to one model, which is set up for it.

        Args:
            model: The model, which ends where an early exit says.
            depth: The layers that it has without one.

        Returns:
            A copy with the settings that it has for this model, in place of None and negative numbers.

        Raises:
            ValueError: If a setting is out of the model's range, or the change cannot be made to the model.
        """
        return self

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        """What it does in one pass over a layout of B texts, to the model that it is on or to a copy of that.

        ``layout.seen`` has what was seen of the change's companion, if it has one.
        """
        return PassChange()

    def laid_out(self, template: Template) -> Template:
        """The template of a text that is read with it."""
        return template

    @property
    def cost(self) -> str:
        """What it costs beside the method, in a sentence; empty: next to nothing."""
        return ""

    @property
    def companion(self) -> Template | None:
        """One more template, in which a text is read before the method reads it in its own; None: there is none."""
        return None

    def observer(self, model: PreTrainedModel, companion: Layout) -> StatesAt:
        """What looks on at one module when the change's companion is read, under all changes that have none."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write what it has found that its settings do not say; most write nothing."""

    def loaded(self, find: Callable[[str], str | None], module: str) -> Self:
        """The same with what :meth:`save` wrote.

        Args:
            find: From a file's name to its path, or None where the model has no such file.
            module: The class of the module that loads it, for a refusal.

        Raises:
            ValueError: If what was written is of another model.
        """
        return self

    def settings(self) -> dict[str, Any]:
        """As a saved model has it."""
        values = {name: getattr(self, name) for name in _setting_names(type(self))}
        return {"key": self.key, **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}}

    def __str__(self) -> str:
        """Its settings, as one would type them."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in _setting_names(type(self)))


def _setting_names(kind: type[Change]) -> list[str]:
    return [field.name for field in fields(kind) if field.compare]


_registered: dict[str, type[Change]] = {}


def register(kind: _Kind) -> _Kind:
    """Let saved models name a change: a decorator of its class.

    Raises:
        ValueError: If another change has its key.
    """
    known = _registered.setdefault(kind.key, kind)
    if known is not kind:
        raise ValueError(
            f"{kind.__name__} has the key {kind.key!r}, which is that of {known.__name__}: give it another."
        )
    return kind


def from_settings(settings: Mapping[str, Any]) -> Change:
    """A change as a saved model has it: see :meth:`Change.settings`.

    Raises:
        ValueError: If no change of its key is registered, or it has no such settings.
    """
    key = settings.get("key")
    kind = _registered.get(key) if isinstance(key, str) else None
    if kind is None:
        raise ValueError(
            f"changes: {key!r} is not the key of a change that is registered; these are {sorted(_registered)}. Import "
            "the package that it is from, which calls st_reba.modules.changes.register, before the model is loaded."
        )
    known = _setting_names(kind)
    if unknown := sorted(settings.keys() - {"key", *known}):
        raise ValueError(f"changes: {key!r} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    return kind(**{name: settings[name] for name in known if name in settings})


def combined(
    reader: str,
    own: Iterable[Change],
    given: Sequence[Change | Mapping[str, Any]],
    unfit: Callable[[Change], str | None],
) -> tuple[Change, ...]:
    """The changes that a module makes, in no order of theirs: the one place where what does not go together is refused.

    Args:
        reader: The module's class.
        own: Those of its own arguments.
        given: Those of ``changes``; also as a saved model has them.
        unfit: Why the module does not take a change, in a sentence; None where it does.

    Raises:
        ValueError: If one is none, or not for this module, or there are two of a kind.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise ValueError(f"changes={given!r}: give a list of changes, such as [Reroute()].")
    found: list[Change] = []
    for change in (*own, *given):
        change = from_settings(change) if isinstance(change, Mapping) else change
        if not isinstance(change, Change):
            raise ValueError(f"changes has {change!r}: give changes, such as AttendBothWays(), Reroute() or Prepend().")
        if reason := unfit(change):
            raise ValueError(reason)
        for other in found:
            if isinstance(change, type(other)) or isinstance(other, type(change)):
                raise ValueError(
                    f"{reader} is given the change {change.key!r} with {change}, and makes it already, with {other}. "
                    "Leave one of the two out."
                )
            if change.replaces is not None and change.replaces == other.replaces:
                raise ValueError(
                    f"{reader} is given the changes {other.key!r} and {change.key!r}: both replace the "
                    f"{change.replaces} of a layer, which has one. Leave one of the two out."
                )
        found.append(change)
    return tuple(sorted(found, key=lambda change: change.key))


@register
@dataclass(frozen=True)
class AttendBothWays(Change):
    """The last layers attend to later tokens too, as in BeLLM; padding stays hidden.

    Attributes:
        bidirectional_layers: How many, 1 or more.
    """

    bidirectional_layers: int = 1
    layers: Collection[int] = field(default=(), compare=False, repr=False)
    key: ClassVar[str] = "attend-both-ways"
    replaces: ClassVar[Literal["masks"]] = "masks"

    def __post_init__(self) -> None:
        BIDIRECTIONAL_LAYERS.check(self.bidirectional_layers)

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        count, run, name = self.bidirectional_layers, backbone.depth(model), type(model).__name__
        if count > run:
            raise ValueError(f"bidirectional_layers={count}: {name} has {run} layers; use 0 to {run}.")
        layers = range(run - count, run)
        refusal = f"bidirectional_layers={count}: the last layers of {name} cannot be made to attend both ways"
        require_interface(model, layers, refusal, "Use bidirectional_layers=0")
        return replace(self, layers=layers)

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        padded = not bool(layout.attention_mask.all())
        real = layout.attention_mask.to(backbone.device(model), non_blocking=True)
        return PassChange(masking=Bidirectional(self.layers, real, padded))


@register
@dataclass(frozen=True)
class NoSink(Change):
    """The last layers attend both ways, and in some layers no other token attends to the first one.

    Attributes:
        layers: The indices of the layers that hide it; negative ones from the top. None: the upper half of those that
            attend both ways.
        bidirectional_layers: How many of the last layers attend both ways, 1 or more. None: half of all.
    """

    layers: Sequence[int] | None = None
    bidirectional_layers: int | None = None
    both_ways: AttendBothWays | None = field(default=None, compare=False, repr=False)
    key: ClassVar[str] = "no-sink"
    replaces: ClassVar[Literal["masks"]] = "masks"

    def __post_init__(self) -> None:
        if isinstance(self.layers, Sequence) and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))
        TURNED_LAYERS.check(self.bidirectional_layers)

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        run = backbone.depth(model)
        count = max(1, run // 2) if self.bidirectional_layers is None else self.bidirectional_layers
        both_ways = AttendBothWays(count).on(model, depth)
        top = range(run - max(1, count // 2), run)
        layers = _indices(self.layers, top, run, "the upper half of those that attend both ways")
        refusal = f"The first token cannot be hidden in layers {list(layers)} of {type(model).__name__}"
        require_interface(model, layers, refusal, "Use CausalTransformer")
        return replace(self, layers=layers, bidirectional_layers=count, both_ways=both_ways)

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        both_ways = cast(AttendBothWays, self.both_ways).effect(model, layout)
        return replace(both_ways, hiding=HiddenFirst(cast("tuple[int, ...]", self.layers)))


@register
@dataclass(frozen=True)
class EarlyExit(Change):
    """The layers above one of them are not run, and not saved; the final norm is.

    A module makes it first of all: what other changes say about layers is about those that are run.

    Attributes:
        output_layer: After which layer to stop, counted from 1, or from the top if negative (-2: the last but one).
    """

    output_layer: int
    key: ClassVar[str] = "early-exit"
    looks_ahead: ClassVar[bool] = False
    spares_prefixes: ClassVar[bool] = True

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        return replace(self, output_layer=resolve_layer(model, self.output_layer))


@register
@dataclass(frozen=True)
class Prepend(Change):
    r"""A slot before the text takes, in the first layers, the state that the layout's last token had a layer below.

    .. math:: h^{(l)}_{s} \leftarrow h^{(l)}_{n}, \quad l = 1, \dots, p - 1

    (Fu et al., "Token Prepending".) What layer 0 is given in the slot is one vector, drawn from N(0, 1) and saved. The
    slot stands where the template has ``{prepend}``, else right before the text. It is never handed on.

    Attributes:
        prepend_layers: p, from 1 to the layers that are run; 1 never replaces the slot's own state. None: three in ten
            of them, 2 at least (8 of 27).
        seed: Of the vector.
        initial_state: (E,): the vector, before the architecture scales it or adds positions.
    """

    prepend_layers: int | None = None
    seed: int = 0
    initial_state: Tensor | None = field(default=None, compare=False, repr=False)
    #: What the architecture multiplies its input embeddings with.
    embedding_scale: float = field(default=1.0, compare=False, repr=False)
    key: ClassVar[str] = "prepend"
    spares_prefixes: ClassVar[bool] = True
    FILE: ClassVar[str] = "token_prepending.safetensors"

    def __post_init__(self) -> None:
        SEED.check(self.seed)
        PREPEND_LAYERS.check(self.prepend_layers)

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        name, run, embeddings = type(model).__name__, backbone.depth(model), model.get_input_embeddings()
        layers = min(run, max(2, round(0.3 * run))) if self.prepend_layers is None else self.prepend_layers
        if not 1 <= layers <= run:
            raise ValueError(f"prepend_layers={layers}: {run} layers of {name} are run; use 1 to {run}.")
        scale = embedding_scale(model)
        if scale is None:
            raise ValueError(
                f"What {type(embeddings).__name__} makes of the table of input embeddings could not be found out, so "
                "no vector can be entered beside them. Load the model without device_map, or use another model."
            )
        width = cast(Tensor, embeddings.weight).shape[1]
        drawn = torch.randn(width, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float32)
        return replace(self, prepend_layers=layers, initial_state=drawn, embedding_scale=scale)

    def laid_out(self, template: Template) -> Template:
        before, *others = template.literals
        return template if PREPEND in before else replace(template, literals=(before + PREPEND, *others))

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        vector = cast(Tensor, self.initial_state) * self.embedding_scale
        device = backbone.device(model)
        is_slot = layout.copy_index == PREPENDED
        slots = is_slot.to(device, non_blocking=True)
        # A slot takes the state of its row's last token, any other position its own.
        source = torch.where(is_slot, layout.ends[:, None], torch.arange(is_slot.shape[1]))
        source = source.to(device, non_blocking=True)

        def enter(states: Tensor) -> Tensor:
            return torch.where(slots.to(states.device)[..., None], vector.to(states), states)

        def renew(states: Tensor) -> Tensor:
            index = source.to(states.device)[..., None].expand_as(states)
            return states.gather(1, index)

        layers = [model.get_submodule(path) for path in layer_paths(model)[1 : self.prepend_layers]]
        hooks = {model.get_input_embeddings(): Hook(after=enter), **dict.fromkeys(layers, Hook(before=renew))}
        return PassChange(hooks=hooks)

    def save(self, directory: Path) -> None:
        """Write the vector."""
        state = cast(Tensor, self.initial_state).detach().cpu().contiguous()
        save_file({"initial_state": state}, str(directory / self.FILE), metadata={"format": "pt"})

    def loaded(self, find: Callable[[str], str | None], module: str) -> Self:
        """The same with the vector that was saved, if it was."""
        path = find(self.FILE)
        if path is None:
            return self
        state, own = load_file(path).get("initial_state"), cast(Tensor, self.initial_state)
        if state is None or state.shape != own.shape:
            what = "nothing" if state is None else f"a tensor of shape {tuple(state.shape)}"
            raise ValueError(
                f'{path} has {what} under "initial_state", and the model\'s input embeddings have {len(own)} values. '
                "They are of two models; save the model again."
            )
        check_magnitudes({"initial_state": state}, module)
        return replace(self, initial_state=state)


@register
@dataclass(frozen=True)
class Reroute(Change):
    r"""In some layers, the key and value of the layout's last token stand before all others, for every token to see.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V]

    (Tang and Yang, "KV-Embedding".) What attention goes to it there is not part of the weights that an observer sees:
    these are of the tokens where they stand.

    Attributes:
        layers: The indices of the layers; negative ones from the top. None: the middle third.
        prefix_bias: Added to the logit of the key that stands before all others.
    """

    layers: Sequence[int] | None = None
    prefix_bias: float = 0.0
    key: ClassVar[str] = "reroute"
    replaces: ClassVar[Literal["first key"]] = "first key"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_bias", float(PREFIX_BIAS.check(self.prefix_bias)))
        if isinstance(self.layers, Sequence) and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        run = backbone.depth(model)
        layers = _indices(self.layers, middle_third(run), run, "the middle third")
        refusal = f"The keys and values of layers {list(layers)} of {type(model).__name__} cannot be re-routed"
        require_interface(model, layers, refusal, "Use CausalTransformer with the same template")
        return replace(self, layers=layers)

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        ends = layout.ends.to(backbone.device(model), non_blocking=True)
        return PassChange(rerouting=FirstKey(cast("tuple[int, ...]", self.layers), ends, self.prefix_bias))


def _indices(given: Any, usual: Sequence[int], run: int, says: str) -> tuple[int, ...]:
    """The layers that a change is given, or the usual ones for None.

    Args:
        given: As the setting ``layers`` has it; from a file, anything.
        usual: The layers that None means.
        run: How many layers are run.
        says: What None means, in words.

    Raises:
        ValueError: If there are none, or there is no such layer.
    """
    indices = tuple(usual) if given is None else given if isinstance(given, tuple) else ()
    if not indices or not all(type(index) is int and -run <= index < run for index in indices):
        raise ValueError(
            f"layers={list(given) if isinstance(given, tuple) else given!r}: the model has {run} layers; give a "
            f"list of one or more of their indices, {-run} to {run - 1}, or None for {says}."
        )
    return tuple(sorted({index % run for index in indices}))


def middle_third(depth: int) -> range:
    """The layers that are neither among the first nor among the last third."""
    return range(depth // 3, depth - depth // 3)


@register
@dataclass(frozen=True)
class Steer(Change):
    r"""In the attention of one layer, the layout's last token hands on its difference to that of another prompt.

    .. math:: v_n \leftarrow \alpha \, (v_n - v'_{n'})

    (Cheng et al., "Contrastive Prompting".) :math:`v_n` is what the last token n gives to the output projection of
    layer l, the values of all heads, weighted and side by side; :math:`v'_{n'}` is the same where the text stands in
    ``auxiliary_template``, in a pass of its own, which ends there.

    Attributes:
        contrast_layer: l, from 0; negative ones from the last layer that is run. None: the paper's for PromptEOL, index
            4 of 32, in proportion to the depth of the whole model, and no higher than the last layer that is run; a
            :class:`Contrast` says another share.
        scale: :math:`\alpha`; or ``"norm"``, which gives the difference the length of :math:`v_n`. None: 2.
        auxiliary_template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`.
    """

    contrast_layer: int | Contrast | None = None
    scale: Scale | None = None
    auxiliary_template: str = IRRELEVANT
    #: The path of the output projection. An adapter may have taken the module's place when the model runs.
    projection: str = field(default="", compare=False, repr=False)
    key: ClassVar[str] = "steer"
    looks_ahead: ClassVar[bool] = False
    spares_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        CONTRAST_LAYER.check(self.contrast_layer)
        object.__setattr__(self, "scale", SCALE.check(USUAL_CONTRAST.scale if self.scale is None else self.scale))
        parsed = Template.parse(self.auxiliary_template)
        if parsed.copies != 1:
            raise ValueError(
                f"auxiliary_template={str(parsed)!r} has {parsed.copies} slots: the other prompt has the text once. "
                "Leave one {text} in it."
            )
        object.__setattr__(self, "auxiliary_template", str(parsed))

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        layer, run, name = self.contrast_layer, backbone.depth(model), type(model).__name__
        if layer is None or isinstance(layer, Contrast):
            layer = min((layer or USUAL_CONTRAST).index(depth), run - 1)
        if not -run <= layer < run:
            raise ValueError(f"contrast_layer={layer}: {run} layers of {name} are run; use {-run} to {run - 1}.")
        layer, projections = layer % run, output_projections(model)
        if layer not in projections:
            raise ValueError(
                f"contrast_layer={layer}: this layer of {name} has no attention; those with attention are "
                f"{list(projections)}."
            )
        return replace(self, contrast_layer=layer, projection=projections[layer])

    @property
    def cost(self) -> str:
        return f"Before it, one pass over the first {cast(int, self.contrast_layer) + 1} layers, under another prompt."

    @property
    def companion(self) -> Template:
        return Template.parse(self.auxiliary_template)

    def observer(self, model: PreTrainedModel, companion: Layout) -> StatesAt:
        return StatesAt([model.get_submodule(self.projection)], "before", companion.ends, halts=True)

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        irrelevant, position = layout.seen[self.key], layout.ends

        def steer(states: Tensor) -> Tensor:
            return put(states, position, self._difference(at(states, position), irrelevant.to(states.device)))

        return PassChange(hooks={model.get_submodule(self.projection): Hook(before=steer)})

    def _difference(self, values: Tensor, irrelevant: Tensor) -> Tensor:
        """(B, W): the scaled difference of two (B, W); zero where they are the same."""
        difference = for_summing(values) - for_summing(irrelevant)
        length, before = (states.norm(dim=-1, keepdim=True) for states in (difference, for_summing(values)))
        # What differs by rounding alone is the same (so in a window that holds nothing but what both prompts end with):
        # it must not be blown up, here or by a norm that follows.
        same = length <= torch.finfo(values.dtype).eps ** 0.75 * before
        factor = before / length.masked_fill(same, 1) if self.scale == "norm" else cast(float, self.scale)
        return (factor * difference).masked_fill(same, 0)
