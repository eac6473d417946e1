"""What all modules share: a causal language model, run over a layout of its input."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hub import card, compat
from ..lm import backbone, decoder, gguf
from ..lm.all_layers import beside, recording
from ..lm.attention import routes
from ..lm.attention.masks import attending_both_ways
from ..lm.hooks import Places
from ..text.builder import LayoutBuilder, Plan, Tokenization, lay_out
from ..text.layout import Layout
from ..text.templates import PoolOver as PoolOver
from ..text.templates import Preset, Template, normalized
from ..text.templates import Rows as Rows
from ..text.tokens import traits
from ..version import REQUIREMENT
from .loaded_weights import CheckedTransformer
from .published import Published

if TYPE_CHECKING:
    from typing_extensions import Self

_Value = TypeVar("_Value")

#: The most copies any module takes, far above what helps: a configuration that asks for more is a mistake or an attack.
MAX_COPIES = 1024

# Where tokenizers and ST keep "no limit".
_NO_LIMIT = int(1e30)


class Reading(NamedTuple):
    """What a method reads off a batch.

    Attributes:
        states: (B, n, D).
        mask: (B, n), which of them are real.
        ids: (B, n), the tokens they belong to.
        extra: More features to hand on, each (B, ...).
    """

    states: Tensor
    mask: Tensor
    ids: Tensor
    extra: dict[str, Tensor] = {}


class _Builders(NamedTuple):
    """What makes a module's layouts, and what that was made from."""

    tokenizer: PreTrainedTokenizerBase
    made_from: tuple[list[Plan], object]
    builders: list[LayoutBuilder]


class CausalModule(CheckedTransformer, metaclass=Published):
    """Base of the modules that replace ST's ``Transformer`` at the head of a pipeline.

    A subclass chooses a template and overrides :meth:`_read`: which states of which tokens it hands on. What follows in
    the pipeline (``Pooling``, ``Normalize``, ``Dense``) is ST's own.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or those of a GGUF file (see
            :func:`st_reba.lm.gguf.as_directory`); or a loaded ST ``Transformer``, whose weights and tokenizer are then
            shared, not copied. What is set up here, such as how the backbone attends, is set on a view of it: the
            other stays as it is.
        template: What stands around and between the copies of a text.
        preset: How the template's authors read it: what it says of ``pool_over``, ``rows``, ``output_layer``,
            ``final_norm`` and ``normalize_text`` holds where the argument is None. Where it says nothing, the module's
            own habit does.
        pool_over: Which tokens are handed on. ``"text"``: those of the copy or copies that are read. ``"all"``: from
            there to the end of the layout, literals and special tokens included; where nothing but special tokens
            precedes that copy, those too, so that the result is what ST's ``Transformer`` gives. ``"whole"``: the whole
            layout, all that stands before the text included, the ``prompt`` and special tokens as well.
        bidirectional_layers: How many of the last layers attend to later tokens too, as in BeLLM.
        output_layer: After which layer to stop, counted from 1, or from the top if negative (-2: the last but one). The
            layers above are not run, and not saved; the final norm is. None: the last layer.
        final_norm: Whether the states that are read go through the model's final norm. False: they are those of the
            residual stream, transformers' ``hidden_states[output_layer]``, of which only those of the very last layer
            come with the norm. What stands between the last layer and the last hidden state besides, such as OPT's
            projection, is left out with it. None: True.
        normalize_text: Whether each text is changed as the prompts of the PromptEOL family expect it: see
            :func:`st_reba.text.templates.normalized`. None: False.
        tokenization: ``"whole"``: prompt, template and text are tokenised as one string; a token that holds
            characters of the text and of what stands beside it counts as text. ``"pieces"``: each on its own, as
            version 0.1 did. None: the whole, where the template has the text once and the method does not repeat it.
        **transformer_kwargs: As for ST's ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on.

    Raises:
        ValueError: If the model is not causal, or its checkpoint lacks weights, or ``template`` does not fit into its
            positions, or its last layers cannot be made to attend both ways, or it cannot stop after ``output_layer``,
            or before its final norm.
    """

    config_keys: list[str] = [
        *Transformer.config_keys,
        "pool_over",
        "bidirectional_layers",
        "output_layer",
        "final_norm",
        "normalize_text",
        "tokenization",
    ]

    #: ``pool_over`` where neither the caller nor a preset says.
    POOL_OVER: ClassVar[PoolOver] = "text"
    #: The same of ``final_norm``.
    FINAL_NORM: ClassVar[bool] = True
    #: Whether every layer is read, so that it means nothing at which one a prompt's authors read it.
    EVERY_LAYER: ClassVar[bool] = False

    #: Tokens a thread runs at a time on a CPU.
    CPU_TOKENS: ClassVar[int] = 1024

    #: Whether every token that is read is handed on, or the last alone.
    rows: Rows

    #: Whether the texts of a batch may have prompts of their own.
    PROMPTS_MAY_DIFFER: ClassVar[bool] = True

    #: Whether the method places the same token ids of a text in several places, so that only pieces will do.
    REPEATS_TEXT: ClassVar[bool] = False

    #: Whether what is read are states of the residual stream, so that those of each layer can be read alike.
    READS_HIDDEN_STATES: ClassVar[bool] = True

    #: How much each part of a vector counts where :class:`st_reba.PartwiseWhitening` stands behind; one: it is whole.
    SHARES: ClassVar[tuple[float, ...]] = (1.0,)

    _made: _Builders | None = None

    #: The method's name and its equation, for the model card.
    method: ClassVar[str]
    equation: ClassVar[str]
    citation: ClassVar[str]

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        template: Template,
        preset: Preset | None = None,
        pool_over: PoolOver | None = None,
        bidirectional_layers: int = 0,
        output_layer: int | None = None,
        final_norm: bool | None = None,
        normalize_text: bool | None = None,
        tokenization: Tokenization | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        if type(bidirectional_layers) is not int or bidirectional_layers < 0:
            raise ValueError(
                f"bidirectional_layers={bidirectional_layers!r}: give the number of last layers that attend both ways, "
                "0 or more."
            )
        preset = self._heeded(Preset(str(template)) if preset is None else preset)
        pool_over = chosen(pool_over, preset.pool_over, self.POOL_OVER)
        final_norm = chosen(final_norm, preset.final_norm, self.FINAL_NORM)
        normalize_text = chosen(normalize_text, preset.normalize_text, False)
        if pool_over not in ("text", "all", "whole"):
            raise ValueError(f'pool_over={pool_over!r}: use "text", "all" or "whole".')
        if not isinstance(final_norm, bool):
            raise ValueError(f"final_norm={final_norm!r}: use True or False.")
        if not isinstance(normalize_text, bool):
            raise ValueError(f"normalize_text={normalize_text!r}: use True or False.")
        self._check_tokenization(tokenization)
        self._check_transformer_kwargs(transformer_kwargs)
        if isinstance(model_name_or_path, Transformer):
            self._share(model_name_or_path, transformer_kwargs)
        else:
            path, transformer_kwargs = gguf.as_directory(cast(str, model_name_or_path), transformer_kwargs)
            # Batches are padded, always: a layout is not a sequence that a packed kernel would know where to cut.
            initialise(self, path, {**transformer_kwargs, "unpad_inputs": False})
        compat.check_placement(self.model)
        # It may have to be told not to hand out its hidden states: see backbone.without_hidden_states.
        compat.pass_on(self, "output_hidden_states", "output_attentions")
        if self.tokenizer is None:
            raise ValueError(f"{model_name_or_path} has no tokenizer: st_reba embeds text.")
        check_length(self.tokenizer.model_max_length, "the tokenizer's model_max_length")
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        # Of the whole model, of which the layers above the output layer are then not run.
        self._whole_depth = backbone.depth(self.model)
        output_layer = self._output_layer(preset) if output_layer is None else output_layer
        self.output_layer = None if output_layer is None else decoder.resolve_layer(self.model, output_layer)
        if self.output_layer is not None:
            self.model = decoder.shortened(self.model, self.output_layer)
        # Of layers that are left out, none is needed.
        self.check_weights()
        self.final_norm = final_norm
        self._norm = None if final_norm else decoder.FinalNorm(self.model)
        self.pool_over = pool_over
        self.normalize_text = normalize_text
        self.tokenization = tokenization or ("pieces" if self.REPEATS_TEXT else "whole")
        self._template = template
        self._warned_empty = False
        self._places: Places | None = None
        # Set where a module reads few positions: see _hidden_states.
        self._last_layer_parts: decoder.PositionWise | None = None
        self._room()
        routes.prepare(self.model)
        self.bidirectional_layers = bidirectional_layers
        self._both_ways = routes.make_bidirectional(self.model, bidirectional_layers)

    @staticmethod
    def _check_transformer_kwargs(kwargs: dict[str, Any]) -> None:
        if (backend := kwargs.get("backend", "torch")) != "torch":
            raise ValueError(f'backend={backend!r}: st_reba reads hidden states and attention; use backend="torch".')
        if (task := kwargs.get("transformer_task", "feature-extraction")) != "feature-extraction":
            raise ValueError(f'transformer_task={task!r}: st_reba embeds text; use "feature-extraction".')

    def _check_tokenization(self, tokenization: Tokenization | None) -> None:
        if tokenization not in (None, "whole", "pieces"):
            raise ValueError(f'tokenization={tokenization!r}: use "whole" or "pieces".')
        if self.REPEATS_TEXT and tokenization == "whole":
            raise ValueError(
                f'tokenization="whole": {type(self).__name__} places the same tokens of a text in several places, so '
                'they are tokenised on their own; use "pieces", or leave it out.'
            )

    def _share(self, other: Transformer, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a backbone that is already loaded: leave them out.")
        nn.Module.__init__(self)
        own = set(self.__dict__)
        self.__dict__.update({name: value for name, value in other.__dict__.items() if name not in own})
        # What is set here, and by what follows, is not the other's to bear.
        self.model = decoder.view(other.model)

    def _heeded(self, preset: Preset) -> Preset:
        """What this module takes from a preset."""
        return replace(preset, output_layer=None, final_norm=None) if self.EVERY_LAYER else preset

    def _output_layer(self, preset: Preset) -> int | None:
        """``output_layer`` where none is given: the preset's, or its lowest layer if the model has too few."""
        layer = preset.output_layer
        return layer if layer is None or layer > 0 else max(layer, -backbone.depth(self.model))

    @property
    def copies(self) -> int:
        """How often the text stands in the input."""
        return self._template.copies

    @property
    def unfit_poolings(self) -> Mapping[str, str]:
        """Modes of ST's ``Pooling`` behind which the method is not itself, and what to use instead, in a sentence."""
        return {}

    @property
    def own_equation(self) -> str:
        """The equation with the settings that this module has, for the model card."""
        return self.equation

    @property
    def cost(self) -> str:
        """What an embedding costs beside the classical one, in a sentence, for the model card."""
        if self.copies == 1:
            return "One pass over the text, as for the classical embedding."
        return f"One pass over {self.copies} copies of the text: about {self.copies} times the classical embedding."

    # Text in

    @property
    def modalities(self) -> list[Any]:
        """Text, whatever else the backbone could take."""
        return ["text"]

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, self.tokenizer)

    @property
    def max_seq_length(self) -> int | None:
        """Tokens of one copy of a text; longer ones are truncated.

        What was asked for, or less where the whole layout would not fit the model's positions. None: no limit.
        """
        return self._limit(self._room())

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        check_length(value, "max_seq_length")
        self._tokenizer.model_max_length = _NO_LIMIT if value is None else value

    def _limit(self, *limits: int | None) -> int | None:
        """The lowest of these and the tokenizer's own, or None if there is none."""
        limit = min(limit for limit in (self._tokenizer.model_max_length, *limits, _NO_LIMIT) if limit is not None)
        return None if limit >= _NO_LIMIT else int(limit)

    def _plans(self) -> list[Plan]:
        """One for each layout that a text is read in."""
        return [Plan(self._template, self.tokenization)]

    def _builders(self) -> list[LayoutBuilder]:
        """Those of the plans: made once, and again where plans or tokenizer have changed."""
        tokenizer, made_from = self._tokenizer, (self._plans(), traits(self._tokenizer))
        if self._made is None or self._made.tokenizer is not tokenizer or self._made.made_from != made_from:
            self._made = _Builders(tokenizer, made_from, [plan.builder(tokenizer) for plan in made_from[0]])
        return self._made.builders

    def _builder(self) -> LayoutBuilder:
        """The first of them."""
        return self._builders()[0]

    def _positions(self) -> int | None:
        """Tokens that a layout may have; None: no limit."""
        return backbone.positions(self.model)

    def _room(self, prompt: str | None = None) -> int | None:
        """Tokens one copy may have beside everything else in the layout, by the model's positions."""
        available = self._positions()
        if available is None:
            return None
        builder = min(self._builders(), key=lambda builder: builder.room(available, prompt))
        room = builder.room(available, prompt)
        if room < 1:
            raise ValueError(
                f"{builder.overhead(prompt)} tokens of prompt, template and special tokens leave no room for "
                f"{builder.template.copies} copies of a text in the model's {available} positions. "
                "Use fewer repetitions, or a shorter template or prompt."
            )
        return room

    def preprocess(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        processing_kwargs: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Lay texts out.

        Args:
            inputs: B texts: strings, or ``{"prompt": str, "text": str}`` for a text with a prompt of its own.
            prompt: Literal text at the front of each layout: context, never repeated, never pooled. A prompt of the
                text's own comes after it.
            processing_kwargs: ``{"text": {"max_length": n}}`` truncates to n tokens a copy for this call.
            **kwargs: What ST passes to every module (such as ``task``) and this one does not use.

        Returns:
            ``input_ids``, ``attention_mask`` and ``copy_index``, each (B, N): see :class:`st_reba.text.layout.Layout`.

        Raises:
            ValueError: If an input is neither, or the prompt leaves no room for text.
        """
        if not inputs:
            return {}
        prompts, texts = self._split(inputs, prompt or "")
        layout = self._lay_out_all(self._texts(texts), prompts, processing_kwargs)
        if not self._warned_empty and bool((layout.text_length == 0).any()):
            self._warned_empty = True
            warnings.warn(
                "A text without tokens (empty, or nothing the tokenizer knows) is embedded as a zero vector. "
                "This is said once.",
                stacklevel=2,
            )
        return dict(vars(layout))

    def lay_out(self, texts: Sequence[str], prompt: str | None = None) -> Layout:
        """The layout of texts behind one prompt, as :meth:`preprocess` makes it, without a word on empty ones."""
        return self._lay_out_all(self._texts(texts), [prompt or ""] * len(texts), None)

    def _texts(self, texts: Sequence[str]) -> list[str]:
        """As the tokenizer is given them."""
        return [normalized(text) for text in texts] if self.normalize_text else list(texts)

    def _lay_out(self, texts: Sequence[str], max_tokens: int | None, prompt: str | None) -> Layout:
        """The layout of a batch of texts."""
        return self._builder().build(texts, max_tokens=max_tokens, positions=self._positions(), prompt=prompt)

    def _lay_out_all(self, texts: Sequence[str], prompts: Sequence[str], processing_kwargs: Any) -> Layout:
        """The layout of texts that may have different prompts: those of one prompt together, then as they stood."""
        parts, order = [], []
        for prompt in dict.fromkeys(prompts):
            chosen = [index for index, own in enumerate(prompts) if own == prompt]
            max_tokens = self.max_tokens(prompt, processing_kwargs)
            parts.append(self._lay_out([texts[index] for index in chosen], max_tokens, prompt))
            order += chosen
        return parts[0] if len(parts) == 1 else Layout.joined(parts).rows(torch.tensor(order).argsort())

    def _split(self, inputs: Sequence[Any], prompt: str) -> tuple[list[str], list[str]]:
        """What stands in front of each text, and the texts."""
        prompts, texts = [], []
        for index, given in enumerate(inputs):
            parts = {"prompt": "", "text": given} if isinstance(given, str) else given
            if not isinstance(parts, dict) or [type(parts.get(name)) for name in ("prompt", "text")] != [str, str]:
                raise ValueError(
                    f"Input {index} is a {type(given).__name__}: {type(self).__name__} embeds strings, or "
                    '{"prompt": ..., "text": ...} with two strings.'
                )
            prompts.append(prompt + parts["prompt"])
            texts.append(parts["text"])
        if not self.PROMPTS_MAY_DIFFER and len(set(prompts)) > 1:
            raise ValueError(
                f"The texts of a batch have different prompts, and {type(self).__name__} reads the same stretch of all "
                "of them. Encode the texts of one prompt at a time, with encode(prompt=...), or use CausalTransformer."
            )
        return prompts, texts

    def max_tokens(self, prompt: str | None = None, processing_kwargs: Any = None) -> int | None:
        """Tokens of one copy of a text in a call with these arguments of :meth:`preprocess`; None: no limit."""
        return self._limit(self._room(prompt), self._asked_length(processing_kwargs))

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, whole, without special tokens."""
        return self._builder().tokenize(self._texts(texts))

    def token_offsets(self, text: str, prompt: str | None = None) -> list[tuple[int, int]]:
        """Where each token of a text lies in it, (first character, one past the last), truncated as when embedded.

        With ``normalize_text``, a mark that was added lies one past the text's end.

        Args:
            text: The text.
            prompt: What stands before it: the tokens at its beginning may depend on it.

        Raises:
            ValueError: If the tokenizer does not say where its tokens lie, and they do not spell the text.
        """
        [[row], *_] = lay_out(
            self._builders(),
            self._texts([text]),
            max_tokens=self.max_tokens(prompt),
            positions=self._positions(),
            prompt=prompt,
        )
        if row.extents is None:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not say where its tokens lie: use a fast tokenizer."
            )
        return row.extents

    def _asked_length(self, processing_kwargs: dict[str, Any] | None) -> int | None:
        own: dict[str, Any] = dict(self.processing_kwargs)
        asked = {**own.get("text", {}), **(processing_kwargs or {}).get("text", {})}
        if unknown := sorted(set(asked) - {"max_length", "truncation", "padding"}):
            raise ValueError(f'processing_kwargs["text"] has {unknown}: only max_length means something here.')
        length = asked.get("max_length")
        check_length(length, "max_length")
        return cast("int | None", length)

    # Vectors out

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the backbone over layouts and hand on the states that the method reads.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: For the backbone's forward.

        Returns:
            The features with ``token_embeddings`` (B, n, D), and ``attention_mask`` and ``input_ids`` (B, n) to match.
            A text without tokens has one zero vector. Where the backbone's configuration has ``output_hidden_states``,
            as for ST's ``WeightedLayerPooling``, ``all_layer_embeddings``, too: see :meth:`forward_all_layers`.
        """
        if not backbone.hidden_states_are_asked_for(self.model):
            return self._handed_on(features, self._read_all(self._layout(features), **kwargs))
        found = self.forward_all_layers(features, **kwargs)
        # In place, as ST's Transformer does: what asks for the layers reads them there.
        features.clear()
        features.update(found)
        return features

    def forward_all_layers(
        self, features: dict[str, Any], *, norm: Callable[[Tensor], Tensor] = lambda states: states, **kwargs: Any
    ) -> dict[str, Any]:
        """As :meth:`forward`, with the same reading of every layer's states.

        Args:
            features: What :meth:`preprocess` returned.
            norm: What is done to the states of every layer but the last before they are read.
            **kwargs: For the backbone's forward.

        Returns:
            What :meth:`forward` does, and ``all_layer_embeddings``: L + 1 times (B, n, D), first what enters the first
            layer, then what each layer leaves in the residual stream, and last ``token_embeddings`` themselves.

        Raises:
            ValueError: If the method reads something else than hidden states, or the layers are not found, or would
                run a second time for their gradients.
        """
        self._refuse_all_layers()
        with recording(self.model, self._layer_places(), norm) as record:
            found = self._handed_on(features, self._read_all(self._layout(features), **kwargs))
        layers = record.split(found["token_embeddings"])
        return {**found, "token_embeddings": layers[-1], "all_layer_embeddings": layers}

    def _refuse_all_layers(self) -> None:
        if not self.READS_HIDDEN_STATES:
            raise ValueError(
                f"The configuration has output_hidden_states=True, and {type(self).__name__} does not read hidden "
                "states of one layer alone, so it has none of each to hand on. Set "
                "model[0].model.config.output_hidden_states = False, or use CausalTransformer."
            )
        if backbone.is_checkpointing(self.model):
            raise ValueError(
                "Gradient checkpointing runs each layer a second time, where its states are not recorded. Turn it off, "
                "or the configuration's output_hidden_states."
            )

    def _layer_places(self) -> Places:
        """The layers of the backbone, found when they are first asked for."""
        if self._places is None:
            self._places = decoder.layer_places(self.model)
        return self._places

    def _read_all(self, layout: Layout, **kwargs: Any) -> list[Reading]:
        """What the method reads, part by part, of states that went through the final norm, or did not."""
        with contextlib.nullcontext() if self._norm is None else self._norm.left_out(self.model):
            return self._readings(layout, **kwargs)

    def _handed_on(self, features: dict[str, Any], readings: list[Reading]) -> dict[str, Any]:
        """The features with what was read of a batch, part by part."""
        states, mask, ids, extra = _join(readings)
        states, mask = blank(states, mask, self._layout(features).text_length == 0)
        rest = {name: value for name, value in features.items() if name != "copy_index"}
        return {**rest, **extra, "token_embeddings": states, "attention_mask": mask.long(), "input_ids": ids}

    def _readings(self, layout: Layout, **kwargs: Any) -> list[Reading]:
        """What the method reads, part by part."""
        return [self._read(layout.rows(part), **kwargs) for part in self.parts(layout)]

    def _layout(self, features: dict[str, Any]) -> Layout:
        return Layout(features["input_ids"], features["attention_mask"], features["copy_index"])

    def parts(self, layout: Layout) -> list[slice]:
        """The texts of a batch that run together; the result does not depend on it."""
        return even_slices(len(layout.input_ids), self._part_size(layout))

    def _part_size(self, layout: Layout) -> int:
        """How many texts of a batch may run at a time.

        On an accelerator, the batch that was asked for. On a CPU, about as many tokens as its caches hold the
        activations of: larger batches are slower, and padded further.
        """
        batch, length = layout.input_ids.shape
        if layout.input_ids.device.type != "cpu":
            return batch
        return max(1, self.CPU_TOKENS * torch.get_num_threads() // length)

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        """The method."""
        raise NotImplementedError

    def _hidden_states(self, layout: Layout, read: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, N, D).

        No mask is needed where attention is causal, since rows are padded on the right.

        Args:
            layout: B texts.
            read: (B, N), the only positions whose states will be looked at; None: any.
            **kwargs: For the backbone's forward.
        """
        if self._both_ways:
            self._refuse_checkpointing()
        spare: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # A second run of a layer, for its gradient, would not know which positions are read.
        if self._last_layer_parts is not None and read is not None and not backbone.is_checkpointing(self.model):
            spare = self._last_layer_parts.at(read)
        with spare, attending_both_ways(self._both_ways, layout.attention_mask.bool()):
            quiet = backbone.without_hidden_states(self.model)
            output = super().forward({"input_ids": layout.input_ids, "modality": "text"}, **{**kwargs, **quiet})
        return beside(output[self.module_output_name])

    def _refuse_checkpointing(self) -> None:
        """For what is set up around a forward pass only: the second run of each layer would not find it."""
        if backbone.is_checkpointing(self.model):
            turned = f" with bidirectional_layers={self.bidirectional_layers}" if self._both_ways else ""
            raise ValueError(
                f"Gradient checkpointing runs attention a second time, where {type(self).__name__}{turned} neither "
                f"watches it nor sets its masks. Turn it off to train through {type(self).__name__}{turned}."
            )

    def _set_rows(self, rows: Rows) -> None:
        """Which of the tokens that ``pool_over`` names are handed on: all of them, or the last."""
        self.rows = rows
        if rows == "last":
            self._last_layer_parts = decoder.PositionWise(self.model)

    def _read_tokens(self, layout: Layout, first_copy: int, last_copy: int, **kwargs: Any) -> Reading:
        """The last hidden states of the tokens that ``pool_over`` and ``rows`` name."""
        selected = self._select(layout, first_copy, last_copy)
        if self.rows == "last":
            selected = last_of(selected)
        states = self._hidden_states(layout, selected, **kwargs)
        return compact(states, layout.input_ids, selected)

    def _select(self, layout: Layout, first_copy: int, last_copy: int) -> Tensor:
        """(B, N): the tokens that ``pool_over`` names, when copies ``first_copy`` to ``last_copy`` are read."""
        if self.pool_over == "whole":
            return layout.attention_mask.bool()
        copies = (layout.copy_index >= first_copy) & (layout.copy_index <= last_copy)
        if self.pool_over == "text":
            return copies
        reached = copies.cummax(dim=1).values
        if first_copy == 0:
            reached = reached | (layout.text_starts == len(self._builder().specials_before))[:, None]
        return reached & layout.attention_mask.bool()

    # On disk

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as ST's ``Transformer.load`` does.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json.
            *args: As for ST's ``Transformer.load``.
            **kwargs: As for ST's ``Transformer.load``.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none that a saved module
                has, or weights are missing.
        """
        check_inside(subfolder)
        return super().load(model_name_or_path, subfolder, *args, **kwargs)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. What version 0.1 did not write is as it was then."""
        config = super().load_config(*args, **kwargs)
        return {"tokenization": "pieces", **config} if "pool_over" in config else config

    def get_config_dict(self) -> dict[str, Any]:
        # Padding is not a setting here, so it is not saved as one.
        return {key: value for key, value in super().get_config_dict().items() if key != "unpad_inputs"}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and note in ST's own configuration that st_reba is needed to load.

        Raises:
            ValueError: If the backbone was quantised in a way that it cannot be saved in.
        """
        backbone.check_it_can_be_saved(self.model)
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        note_requirement(Path(output_path))

    def on_model_ready(self, model: Any) -> None:
        """Called by ST (6 and later) when the pipeline is complete: give it our model card, and look at its pooling."""
        card.adopt(model)
        self.check_pooling(model)

    def check_pooling(self, model: Any) -> None:
        """Warn if what pools this module's tokens in a complete pipeline reads others than the method is about."""
        for part in model.children():
            if not isinstance(part, Pooling):
                continue
            modes = {part.pooling_mode} if isinstance(part.pooling_mode, str) else set(part.pooling_mode)
            for mode in sorted(modes & self.unfit_poolings.keys()):
                warnings.warn(
                    f'{type(self).__name__} stands before Pooling("{mode}"): {self.unfit_poolings[mode]}', stacklevel=3
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_config_dict(), architecture=type(self.model).__name__)})"


def initialise(module: CheckedTransformer, model_name_or_path: Any, kwargs: dict[str, Any]) -> None:
    """Load a backbone and its tokenizer as ST's ``Transformer`` does, and refuse lengths that are none."""
    check_length(kwargs.get("max_seq_length"), "max_seq_length")
    try:
        CheckedTransformer.__init__(module, model_name_or_path, **kwargs)
    except TypeError:
        # ST compares the tokenizer's limit with the model's positions, before anybody else can look at it.
        limit = getattr(vars(module).get("processor"), "model_max_length", None)
        check_length(limit, "the tokenizer's model_max_length")
        raise


def check_length(length: object, name: str) -> None:
    """Refuse what is not a number of tokens: a whole number from 1, or None or transformers' huge one for no limit."""
    whole = type(length) is int or (isinstance(length, float) and length >= _NO_LIMIT)
    if length is not None and not (whole and cast(float, length) >= 1):
        raise ValueError(f"{name}={length!r}: give a number of tokens, 1 or more, or None for no limit.")


def check_layers(layers: Literal["all"] | Sequence[int]) -> Literal["all"] | list[int]:
    """Refuse what is neither all layers nor a list of indices, before a model is there to have them."""
    if layers == "all":
        return "all"
    valid = not isinstance(layers, str) and isinstance(layers, Sequence) and len(layers) > 0
    if not valid or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(f'layers={layers!r}: use "all" or a list of layer indices, such as [-1].')
    return list(layers)


def resolve_layers(
    layers: Literal["all"] | list[int], model: PreTrainedModel, attending: Collection[int]
) -> frozenset[int]:
    """The indices that are meant, of the layers that have attention; negative ones count from the top.

    Raises:
        ValueError: If there is no such layer, or it has no attention.
    """
    if layers == "all":
        return frozenset(attending)
    depth = backbone.depth(model)
    for layer in layers:
        if not -depth <= layer < depth:
            raise ValueError(
                f"layers={layers}: the model has {depth} layers, so {layer} is out of range; "
                f"use {-depth} to {depth - 1}."
            )
    chosen = frozenset(layer % depth for layer in layers)
    if missing := sorted(chosen - set(attending)):
        raise ValueError(
            f"layers={layers}: layers {missing} of {type(model).__name__} have no attention; "
            f"those with attention are {sorted(attending)}."
        )
    return chosen


def chosen(given: _Value | None, preset: _Value | None, usual: _Value) -> _Value:
    """The first of these that says something."""
    return given if given is not None else usual if preset is None else preset


def check_rows(rows: Rows) -> None:
    """Refuse what is neither all tokens nor the last."""
    if rows not in ("all", "last"):
        raise ValueError(f'rows={rows!r}: use "all" for every token, or "last" for the last alone.')


def even_slices(batch: int, size: int) -> list[slice]:
    """A batch in parts of at most ``size`` texts.

    All are of one size, near enough: a last part of a text or two would waste what the others gain.
    """
    size = ceil(batch / ceil(batch / size))
    return [slice(first, min(first + size, batch)) for first in range(0, batch, size)]


def _join(parts: list[Reading]) -> Reading:
    """What several parts of a batch gave, as one, padded to the longest n."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.mask.shape[1] for part in parts)
    return Reading(
        torch.cat([pad(part.states, (0, 0, 0, length - part.states.shape[1])) for part in parts]),
        torch.cat([pad(part.mask, (0, length - part.mask.shape[1])) for part in parts]),
        torch.cat([pad(part.ids, (0, length - part.ids.shape[1])) for part in parts]),
        {name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra},
    )


def blank(states: Tensor, mask: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros wherever nothing was read.

    Args:
        states: (B, n, D).
        mask: (B, n), boolean: which of them are real.
        empty: (B,), boolean: which texts have no tokens.

    Returns:
        The states and the mask, in which a text without tokens has one vector of zeros.
    """
    states = states.masked_fill(~mask[..., None] | empty[:, None, None], 0)
    mask = mask & ~empty[:, None]
    mask[:, 0] |= empty
    return states, mask


def last_of(selected: Tensor) -> Tensor:
    """(B, N): of the tokens selected in each row, (B, N) booleans, the last; none where there are none."""
    later = selected.flip(1).cumsum(dim=1).flip(1)
    return selected & (later == 1)


def last_position(selected: Tensor) -> Tensor:
    """(B,): where the last of the tokens selected in each row, (B, N) booleans, stands; 0 where there are none."""
    return last_of(selected).int().argmax(dim=1)


def at(states: Tensor, position: Tensor) -> Tensor:
    """(B, D): of (B, N, D), the state at one position a row, (B,)."""
    position = position.to(states.device)
    return states[torch.arange(len(states), device=states.device), position]


def put(states: Tensor, position: Tensor, values: Tensor) -> Tensor:
    """(B, N, D): the same with ``values`` (B, D) at one position a row, (B,)."""
    position = position.to(states.device)
    return states.index_put((torch.arange(len(states), device=states.device), position), values.to(states))


def compact(states: Tensor, ids: Tensor, selected: Tensor) -> Reading:
    """Move the selected tokens of each row to its front and drop the columns that no row needs.

    Args:
        states: (B, N, D).
        ids: (B, N).
        selected: (B, N), boolean.

    Returns:
        A reading of n tokens; n is at least 1.
    """
    counts = selected.sum(dim=1)
    length = max(1, int(counts.max()))
    order = (~selected).to(torch.int8).argsort(dim=1, stable=True)[:, :length]
    mask = torch.arange(length, device=states.device) < counts[:, None]
    states = states.gather(1, order[..., None].expand(-1, -1, states.shape[-1]))
    return Reading(states, mask, ids.gather(1, order))


def note_requirement(directory: Path) -> None:
    """Note in the configuration that ST has written there, if it has, that st_reba is needed to load the model."""
    path = directory / "config_sentence_transformers.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config["requirements"] = {**config.get("requirements", {}), **REQUIREMENT}
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def check_inside(subfolder: str) -> None:
    """Refuse a module's path that leads out of its model, by the rules of any system (later STs do so, too)."""
    path = PureWindowsPath(subfolder)
    if path.anchor or ".." in path.parts:
        raise ValueError(
            f"modules.json has the path {subfolder!r}: a module lies inside its model, so give a relative path "
            'without "..", or "" for the model\'s own directory.'
        )


def check_repetitions(repetitions: int, least: int) -> None:
    """Refuse what is not a sensible number of copies, before a template of them is made."""
    if isinstance(repetitions, bool) or not isinstance(repetitions, int) or not least <= repetitions <= MAX_COPIES:
        raise ValueError(
            f"repetitions={repetitions!r}: give a whole number from {least} to {MAX_COPIES}, how often the text stands "
            "in the input. 2 is the usual choice."
        )
