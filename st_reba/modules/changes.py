"""What methods change while a language model reads: small frozen objects."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..lm import backbone
from ..lm.anatomy import embedding_scale, layer_paths, output_projections
from ..lm.attention.changes import Bidirectional, FirstKey, HiddenFirst
from ..lm.attention.setup import require_interface
from ..lm.backbone import for_summing
from ..lm.run import Hook, PassChange, StatesAt, at, put
from ..settings import Setting, optional, whole
from ..text.layout import PREPENDED, Layout
from ..text.templates import USUAL_CONTRAST, Contrast, Template

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


@dataclass(frozen=True)
class Change:
    """Something that a method does to a language model while it reads.

    A subclass is a frozen dataclass whose fields are settings of its method; they are checked when it is made, as far
    as that can be done without a model. A field that is not compared (``field(default=..., compare=False,
    repr=False)``) is no setting: it has what :meth:`on` found out about a model.
    """

    #: Name of the features that a companion's layout has.
    key: ClassVar[str]

    #: Whether nothing is changed before a text, so that what stands there is as it would be without the change.
    spares_prefixes: ClassVar[bool] = False

    def on(self, model: PreTrainedModel, depth: int) -> Self:
        """The change as it is made to one model, which is set up for it.

        Args:
            model: The model, which ends where ``output_layer`` says.
            depth: The layers of the whole model.

        Returns:
            A copy with the settings that it has for this model, in place of None and negative numbers.

        Raises:
            ValueError: If a setting is out of the model's range, or the change cannot be made to the model.
        """
        raise NotImplementedError

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        """What it does in one pass over a layout of B texts, to the model that it is on or to a copy of that.

        ``layout.seen`` has what was seen of the change's companion, if it has one.
        """
        raise NotImplementedError

    @property
    def companion(self) -> Template | None:
        """One more template, in which a text is read before the method reads it in its own; None: there is none."""
        return None

    def observer(self, model: PreTrainedModel, companion: Layout) -> StatesAt:
        """What looks on at one module when the change's companion is read, under all changes that have none."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Its settings, as one would type them."""
        return ", ".join(f"{own.name}={getattr(self, own.name)!r}" for own in fields(self) if own.compare)


@dataclass(frozen=True)
class AttendBothWays(Change):
    """The last layers attend to later tokens too, as in BeLLM; padding stays hidden.

    Attributes:
        bidirectional_layers: How many, 1 or more.
    """

    bidirectional_layers: int
    layers: Collection[int] = field(default=(), compare=False, repr=False)

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
    spares_prefixes: ClassVar[bool] = True

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
