"""What all methods share: a causal language model as a sentence-transformers module.

Five sections: settings, text in, the pass, vectors out, on disk. A method chooses a template and which states it reads.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..hub import card, compat
from ..lm import anatomy, backbone, gguf
from ..lm.attention import routes
from ..lm.attention.observers import Observer
from ..lm.run import Effect, Halt, StatesAt, recording, run
from ..lm.shortened import shortened
from ..lm.view import view
from ..settings import NO_LIMIT, Setting, choice, flag, optional, shown, tokens, whole
from ..text.layout import NOT_TEXT, Layout, feature_names
from ..text.layouts import Frame, Tokenization, frames, lay_out, room
from ..text.templates import PoolOver as PoolOver
from ..text.templates import Preset, Template, normalized
from ..text.templates import Rows as Rows
from ..text.tokens import Span, special_tokens, tokenized
from .changes import AttendBothWays, BeforeFeedForward, Change, EarlyExit, Fitted, combined, from_settings
from .checkpoints import SafeTransformer, backbone_of, note_requirement
from .token_vectors import ONE_BY_ONE, TokenVectors, in_parts, joined, last_of, picked, without_empty

_Value = TypeVar("_Value")

#: The most copies any module takes, far above what helps: a configuration that asks for more is a mistake or an attack.
MAX_COPIES = 1024

POOL_OVER: Setting[PoolOver] = choice("pool_over", "text", "all", "whole")
BIDIRECTIONAL_LAYERS = whole(
    "bidirectional_layers", 0, says="give the number of last layers that attend both ways, 0 or more."
)
FINAL_NORM = flag("final_norm")
READOUT: Setting[Literal["layer", "before_mlp"]] = choice("readout", "layer", "before_mlp")
NORMALIZE_TEXT = flag("normalize_text")
TOKENIZATION: Setting[Tokenization | None] = optional(choice("tokenization", "whole", "pieces"))
DETERMINISTIC = flag("deterministic")
# Those that several methods have.
ROWS: Setting[Rows] = choice("rows", "all", "last", says='use "all" for every token, or "last" for the last alone.')
# Of ST's own, those with which the module would not be what it is.
_OF_TRANSFORMER: tuple[Setting[Any], ...] = (
    tokens("query_length"),
    tokens("document_length"),
    Setting(
        "backend",
        lambda value: value == "torch",
        'st_reba reads hidden states and attention; use backend="torch".',
    ),
    Setting(
        "transformer_task",
        lambda value: value == "feature-extraction",
        'st_reba reads hidden states, and this ends in a head; use transformer_task="feature-extraction".',
    ),
    Setting(
        "query_expansion",
        lambda value: value is None,
        "a causal language model was not trained to fill in masked tokens, so st_reba adds none to a query. Leave it "
        "out.",
    ),
)


def repetitions_from(least: int) -> Setting[int]:
    """How often a text stands in the input, which is checked before a template of them is made."""
    return whole(
        "repetitions",
        least,
        MAX_COPIES,
        f"give a whole number from {least} to {MAX_COPIES}, how often the text stands in the input. 2 is the usual "
        "choice.",
    )


def chosen(given: _Value | None, preset: _Value | None, usual: _Value) -> _Value:
    """The first of these that says something."""
    return given if given is not None else usual if preset is None else preset


class CausalModule(SafeTransformer):
    """Base of the modules that replace ST's ``Transformer`` at the head of a pipeline.

    A subclass chooses a template and overrides :meth:`_read`: which states of which tokens it hands on. What follows in
    the pipeline (``Pooling``, ``Normalize``, ``Dense``) is ST's own.

    A subclass sets and checks its settings first, then calls this constructor, then sets up what needs the model. So
    nothing is loaded for a setting that is refused, and this constructor can end by laying out a text.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or those of a GGUF file (see
            :func:`st_reba.lm.gguf.as_directory`); or a loaded ST ``Transformer``, whose weights and tokenizer are then
            shared, not copied. What is set up here, such as how the backbone attends, is set on a view of it: the
            other stays as it is, and none of its settings is taken over.
        template: What stands around and between the copies of a text.
        preset: How the template's authors read it: what it says of ``pool_over``, ``output_layer``, ``final_norm`` and
            ``normalize_text`` holds where the argument is None. An ``output_layer`` that is a fraction is a share of
            the model's layers.
        pool_over: Which tokens are handed on. ``"text"``: those of the copy or copies that are read. ``"all"``: from
            there to the end of the layout, literals and special tokens included; where nothing but special tokens
            precedes that copy, those too, so that the result is what ST's ``Transformer`` gives. ``"whole"``: the whole
            layout, all that stands before the text included, the ``prompt`` and special tokens as well. None:
            ``"text"``.
        bidirectional_layers: How many of the last layers attend to later tokens too, as in BeLLM.
        output_layer: After which layer to stop, counted from 1, or from the top if negative (-2: the last but one). The
            layers above are not run, and not saved; the final norm is. None: the last layer.
        final_norm: Whether the states that are read go through the model's final norm. False: they are those of the
            residual stream, transformers' ``hidden_states[output_layer]``, of which only those of the very last layer
            come with the norm. What stands between the last layer and the last hidden state besides, such as OPT's
            projection, is left out with it. None: True.
        readout: ``"layer"``: what is read is what the layer at which the model ends gives. ``"before_mlp"``: the
            residual stream before that layer's feed-forward part, which is then not run (Zhu et al., FreeRet,
            arXiv:2509.24621); through the final norm, unless ``final_norm`` is False.
        normalize_text: Whether each text is changed as the prompts of the PromptEOL family expect it: see
            :func:`st_reba.text.templates.normalized`. None: False.
        tokenization: ``"whole"``: prompt, template and text are tokenised as one string; a token that holds
            characters of the text and of what stands beside it counts as text. ``"pieces"``: each on its own, as
            version 0.1 did. None: the whole, where the template has the text once and the method does not repeat it.
        deterministic: Whether each text runs alone, whatever its batch: then its embedding is the same to the bit, in
            every precision, on one machine with one number of threads. It costs what a batch saves. Otherwise batches
            differ by rounding: 1e-6 in float32, 1e-2 in bfloat16. What st_reba puts behind ``Pooling`` keeps to it;
            ST's ``Dense`` does not.
        changes: What is changed while the model reads, besides what is named here: a list of
            :mod:`st_reba.modules.changes`, such as ``[Reroute()]``, each kind once.
        **transformer_kwargs: As for ST's ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on.

    Raises:
        ValueError: If the model is not causal, or its checkpoint lacks weights, or ``template`` does not fit into its
            positions, or it cannot be changed as ``changes`` or ``bidirectional_layers`` say, or it cannot stop after
            ``output_layer``, or before its final norm.
    """

    # What a method's class says of itself

    #: The method's name, its equation and its paper, for the model card. A module may set an equation of its own.
    method: ClassVar[str]
    equation: str
    citation: ClassVar[str] = ""

    #: What is saved of a module, besides what ST saves of it.
    config_keys: list[str] = [
        *Transformer.config_keys,
        POOL_OVER.name,
        BIDIRECTIONAL_LAYERS.name,
        "output_layer",
        FINAL_NORM.name,
        READOUT.name,
        NORMALIZE_TEXT.name,
        TOKENIZATION.name,
        DETERMINISTIC.name,
        "changes",
    ]

    #: Whether the method places the same token ids of a text in several places, so that only pieces will do.
    repeats_text: ClassVar[bool] = False

    #: Whether vectors are a linear function of one layer's states, so that those of each layer can be read alike. False
    #: where weights depend on the states, or something else is read.
    reads_hidden_states: ClassVar[bool] = True

    #: Why a token has no vector of its own, as a sentence about the module goes on; empty: it has one.
    no_words: str = ""

    #: Modes of ST's ``Pooling`` behind which the method is not itself, and what to use instead, in a sentence.
    unfit_poolings: Mapping[str, str] = {}

    #: How much each part of a vector counts where :class:`st_reba.PartwiseWhitening` stands behind; one: it is whole.
    shares: ClassVar[tuple[float, ...]] = (1.0,)

    #: The changes that settings of the class's own name, under which they are saved.
    own_changes: Sequence[Change] = ()

    #: Whether every token that is read is handed on, or the last alone.
    rows: Rows = "all"

    #: How many rows of a layout a text has.
    rows_per_text: int = 1

    #: Tokens a thread runs at a time on a CPU.
    CPU_TOKENS: ClassVar[int] = 1024

    # Settings

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
        readout: Literal["layer", "before_mlp"] = "layer",
        normalize_text: bool | None = None,
        tokenization: Tokenization | None = None,
        deterministic: bool = False,
        changes: Sequence[Change | Mapping[str, Any]] = (),
        **transformer_kwargs: Any,
    ) -> None:
        preset = preset or Preset(str(template))
        self.pool_over = POOL_OVER.check(chosen(pool_over, preset.pool_over, "text"))
        self.final_norm = FINAL_NORM.check(chosen(final_norm, preset.final_norm, True))
        self.normalize_text = NORMALIZE_TEXT.check(chosen(normalize_text, preset.normalize_text, False))
        self.deterministic = DETERMINISTIC.check(deterministic)
        self.tokenization = TOKENIZATION.check(tokenization) or ("pieces" if self.repeats_text else "whole")
        if self.repeats_text and self.tokenization == "whole":
            raise ValueError(
                f'tokenization="whole": {type(self).__name__} places the same tokens of a text in several places, so '
                'they are tokenised on their own; use "pieces", or leave it out.'
            )
        wanted = self._wanted(bidirectional_layers, READOUT.check(readout), output_layer, changes)
        self.bidirectional_layers = sum(
            change.bidirectional_layers for change in wanted if isinstance(change, AttendBothWays)
        )
        before_mlp = any(isinstance(change, BeforeFeedForward) for change in wanted)
        self.readout: Literal["layer", "before_mlp"] = "before_mlp" if before_mlp else "layer"
        self._template = template
        self._warned_empty = False
        self._load(model_name_or_path, transformer_kwargs)
        self._set_up(wanted, preset.output_layer)
        # Refused here, and not at the first text, where template and changes leave no room for one.
        self._room()

    def _wanted(
        self,
        bidirectional_layers: int,
        readout: str,
        output_layer: int | None,
        changes: Sequence[Change | Mapping[str, Any]],
    ) -> tuple[Change, ...]:
        """All changes that the settings name, and those of ``changes``."""
        own = [*self.own_changes]
        if BIDIRECTIONAL_LAYERS.check(bidirectional_layers):
            own.append(AttendBothWays(bidirectional_layers))
        if readout == "before_mlp":
            own.append(BeforeFeedForward())
        if output_layer is not None:
            own.append(EarlyExit(output_layer))
        return combined(type(self).__name__, own, changes, self._unfit)

    def _unfit(self, change: Change) -> str | None:
        """Why the method does not go together with a change, in a sentence; None where it does."""
        return None

    def _load(self, model_name_or_path: str | Transformer, kwargs: dict[str, Any]) -> None:
        """Load the backbone and its tokenizer, or share those of a loaded ``Transformer``."""
        if isinstance(model_name_or_path, Transformer) and kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a backbone that is already loaded: leave them out.")
        given = vars(model_name_or_path) if isinstance(model_name_or_path, Transformer) else kwargs
        for setting in _OF_TRANSFORMER:
            if setting.name in given:
                setting.check(given[setting.name])
        if isinstance(model_name_or_path, Transformer):
            self._share(model_name_or_path)
        else:
            path, kwargs = gguf.as_directory(model_name_or_path, kwargs)
            if "subfolder" not in (kwargs.get("model_kwargs") or {}):
                path = backbone_of(path)
            super().__init__(path, **kwargs)
        compat.check_placement(self.model)
        if self.tokenizer is None:
            raise ValueError(f"{model_name_or_path} has no tokenizer: st_reba embeds text.")
        tokens("the tokenizer's model_max_length").check(self._tokenizer.model_max_length)
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False

    def _share(self, other: Transformer) -> None:
        nn.Module.__init__(self)
        compat.share(other, self)
        if isinstance(other, SafeTransformer):
            self.lacking, self.checkpoint = other.lacking, other.checkpoint
        self.can_flatten_inputs = False
        # What is set here, and by what follows, is not the other's to bear.
        self.model = view(other.model)

    def _set_up(self, wanted: Sequence[Change], usual_output_layer: float | None) -> None:
        """Set the backbone up for what is changed, and for where the model ends."""
        #: Layers of the whole model, those above the output layer included, which are then not run.
        self.whole_depth = backbone.depth(self.model)
        exits: list[Change] = [change for change in wanted if isinstance(change, EarlyExit)]
        if not exits and usual_output_layer is not None:
            share = isinstance(usual_output_layer, float)
            layer = round(usual_output_layer * self.whole_depth) if share else usual_output_layer
            # Below a model's first layer, that one.
            exits = [EarlyExit(max(1 if share else -self.whole_depth, int(layer)))]
        leaving = [cast(EarlyExit, change.resolved(self.model, self.whole_depth)) for change in exits]
        self.output_layer = leaving[0].output_layer if leaving else None
        if self.output_layer is not None:
            self.model = shortened(self.model, self.output_layer)
        # Of layers that are left out, none is needed.
        self.check_weights()
        if not self.final_norm:
            # Refused here where it is not found.
            anatomy.final_norm(self.model)
        # Set where a module watches attention: see run.
        self._route: routes.AttentionRoute | None = None
        routes.prepare(self.model)
        others = [
            change.resolved(self.model, self.whole_depth) for change in wanted if not isinstance(change, EarlyExit)
        ]
        #: What is changed while it reads, what the class's own settings say included.
        self.changes: tuple[Change, ...] = (*leaving, *others)
        self._fitted = nn.ModuleList(change.fitted(self.model) for change in self.changes)
        self._companions = {
            change.key: self._changed(change.companion) for change in self.changes if change.companion is not None
        }

    @property
    def added_changes(self) -> list[Change]:
        """The changes that no setting of the class's own names: what is saved under ``changes``."""
        named = (AttendBothWays, BeforeFeedForward, EarlyExit, *map(type, self.own_changes))
        return [change for change in self.changes if not isinstance(change, named)]

    def _fitted_as(self, kind: type[Change]) -> tuple[Any, Any]:
        """A change that is made, with the settings that it has on this model, and what it is there."""
        return next(
            (change, fitted)
            for change, fitted in zip(self.changes, self._fitted, strict=True)
            if isinstance(change, kind)
        )

    def _changed(self, template: Template) -> Template:
        """A template with what the module's changes need in it."""
        for change in self.changes:
            template = change.laid_out(template)
        return template

    @property
    def reuses_states(self) -> bool:
        """Whether the states of what stands before a token are the same whatever follows, so that they can be kept."""
        return not any(change.looks_ahead or change.replaces == "masks" for change in self.changes)

    @property
    def copies(self) -> int:
        """How often the text stands in the input."""
        return self._template.copies

    @property
    def cost(self) -> str:
        """What an embedding costs beside the classical one, in a sentence, for the model card."""
        if self.copies == 1:
            return "One pass over the text, as for the classical embedding."
        return f"One pass over {self.copies} copies of the text: about {self.copies} times the classical embedding."

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

    def on_model_ready(self, model: Any) -> None:
        """Called by ST when the pipeline is complete: give it our model card, and look at its pooling."""
        card.adopt(model)
        self.check_pooling(model)

    def extra_repr(self) -> str:
        return shown(self, [key for key in self.config_keys if key not in Transformer.config_keys])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_config_dict(), architecture=type(self.model).__name__)})"

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
        tokens("max_seq_length").check(value)
        # Modules that share the tokenizer keep their own length.
        self.processor = copy.copy(self.processor)
        if self.processor is not self._tokenizer:
            self.processor.tokenizer = copy.copy(self._tokenizer)
        self._tokenizer.model_max_length = NO_LIMIT if value is None else value

    def _limit(self, *limits: int | None) -> int | None:
        """The lowest of these and the tokenizer's own, or None if there is none."""
        limit = min(limit for limit in (self._tokenizer.model_max_length, *limits, NO_LIMIT) if limit is not None)
        return None if limit >= NO_LIMIT else int(limit)

    def layouts(self) -> list[Template]:
        """One template for each layout that the method reads a text in."""
        return [self._changed(self._template)]

    def frames(self, prompt: str | None = None) -> list[Frame]:
        """What stands around a text in each of these layouts, and then in those of the changes' companions."""
        return frames([*self.layouts(), *self._companions.values()], self._tokenizer, prompt or "")

    def _positions(self) -> int | None:
        """Tokens that a layout may have; None: no limit."""
        return backbone.positions(self.model)

    def _room(self, prompt: str | None = None) -> int | None:
        """Tokens one copy may have beside everything else in the layout, by the model's positions.

        Raises:
            ValueError: If none.
        """
        around, available = self.frames(prompt), self._positions()
        return None if available is None else room(around, available)

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
            **kwargs: What ST passes to every module. Of it ``task``, ``"query"`` or ``"document"``, truncates to ST's
                ``query_length`` or ``document_length``, where the module was given one.

        Returns:
            ``input_ids``, ``attention_mask`` and ``copy_index``, each (B, N): see :class:`st_reba.text.layout.Layout`;
            and those of the changes' companions, ``input_ids_of_steer`` and so on. Where the model is on an
            accelerator, ``layout_at_home`` besides, which stays in the host's memory; not in training.

        Raises:
            ValueError: If an input is neither, or the prompt leaves no room for text, or the tokenizer has a token
                that the model has no embedding for.
        """
        if not inputs:
            return {}
        prompts, texts = self._split(inputs, prompt or "")
        layouts = self._lay_out(self._texts(texts), prompts, self._asked_length(processing_kwargs, kwargs.get("task")))
        if not self._warned_empty and bool((layouts[0].text_length == 0).any()):
            self._warned_empty = True
            warnings.warn(
                "A text without tokens (empty, or nothing the tokenizer knows) is embedded as a zero vector. "
                "This warning comes once.",
                stacklevel=2,
            )
        # The host can still look at a layout whose tensors have been moved to an accelerator. In training, losses of ST
        # join features and cut them apart, which they do to tensors alone.
        kept_at_home = not self.training and backbone.device(self.model).type != "cpu"
        features: dict[str, Any] = {}
        for key, layout in zip(("", *self._companions), layouts, strict=True):
            self._check_ids(layout)
            features |= (replace(layout, at_home=layout) if kept_at_home else layout).features(key)
        return features

    def _check_ids(self, layout: Layout) -> None:
        """Refuse token ids that the model has no embedding for, at which PyTorch would stop in words of its own."""
        largest, known = int(layout.input_ids.max()), backbone.vocabulary_size(self.model)
        if largest >= known:
            raise ValueError(
                f"The tokenizer gives {self._tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}, and "
                f"{type(self.model).__name__} has embeddings for {known} tokens: the two are of different models. Get "
                "both from one place, or resize the embeddings (resize_token_embeddings)."
            )

    def lay_out(self, texts: Sequence[str], prompt: str | None = None) -> Layout:
        """The layout of texts behind one prompt, as :meth:`preprocess` makes it, without a word on empty ones."""
        return self._lay_out(self._texts(texts), prompt or "", self._asked_length())[0]

    def _texts(self, texts: Sequence[str]) -> list[str]:
        """As the tokenizer is given them."""
        return [normalized(text) for text in texts] if self.normalize_text else list(texts)

    def _lay_out(self, texts: Sequence[str], prompt: str | Sequence[str], asked_length: int | None) -> list[Layout]:
        """The layout of a batch of texts, and those of the changes' companions, in all of which they are cut alike."""
        return lay_out(
            [*self.layouts(), *self._companions.values()],
            self._tokenizer,
            texts,
            prompt=prompt,
            max_tokens=self._limit(asked_length),
            positions=self._positions(),
            tokenization=self.tokenization,
        )

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
        return prompts, texts

    def _asked_length(self, processing_kwargs: Any = None, task: str | None = None) -> int | None:
        """Tokens of one copy that a call asks for; else those of its task; else those that the module has."""
        of_task = getattr(self, f"{task}_length", None) if task in ("query", "document") else None
        own: dict[str, Any] = dict(self.processing_kwargs)
        of_call = {} if of_task is None else {"max_length": of_task}
        asked = {**own.get("text", {}), **of_call, **(processing_kwargs or {}).get("text", {})}
        if unknown := sorted(set(asked) - {"max_length", "truncation", "padding"}):
            raise ValueError(f'processing_kwargs["text"] has {unknown}: only max_length means something here.')
        return tokens("max_length").check(asked.get("max_length"))

    def max_tokens(self, prompt: str | None = None, processing_kwargs: Any = None) -> int | None:
        """Tokens of one copy of a text in a call with these arguments of :meth:`preprocess`; None: no limit."""
        return self._limit(self._room(prompt), self._asked_length(processing_kwargs))

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, whole, without special tokens."""
        return [found.ids for found in tokenized(self._tokenizer, self._texts(texts))]

    def token_offsets(self, text: str, prompt: str | None = None) -> list[tuple[int, int]]:
        """Where each token of a text lies in it, (first character, one past the last), truncated as when embedded.

        With ``normalize_text``, a mark that was added lies one past the text's end.

        Args:
            text: The text.
            prompt: What stands before it: the tokens at its beginning may depend on it.

        Raises:
            ValueError: If tokens have no vectors of their own, or the tokenizer does not say where its tokens lie, and
                they do not spell the text.
        """
        if self.no_words:
            raise ValueError(
                f"{type(self).__name__} {self.no_words}: it has no word embeddings. Use CausalTransformer, EchoModule "
                "or ReBAModule for words."
            )
        return self._located(self.lay_out([text], prompt).spans[0])

    def own_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Where each of the text's own tokens lies in it, whole, without what stands around it or is added to it.

        Raises:
            ValueError: If the tokenizer does not say where its tokens lie, and they do not spell the text.
        """
        found = []
        for text, own in zip(texts, tokenized(self._tokenizer, self._texts(texts)), strict=True):
            inside = [(first, min(last, len(text))) for first, last in self._located(own.spans)]
            found.append([(first, last) for first, last in inside if first < last])
        return found

    def _located(self, spans: list[Span] | None) -> list[Span]:
        if spans is None:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not say where its tokens lie: use a fast tokenizer."
            )
        return spans

    # The pass

    def run(
        self,
        layout: Layout,
        *,
        inputs: Callable[[], Mapping[str, Any]] | None = None,
        change: Sequence[Effect] = (),
        observe: Observer | StatesAt | None = None,
        is_companion: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """One pass of the language model, the one way to run it: see :func:`st_reba.lm.run.run`.

        No mask is needed where attention is causal, since rows are padded on the right.

        Args:
            layout: B texts.
            inputs: Makes what the backbone is given, in the pass, in place of the layout's ``input_ids``.
            change: What is changed besides the module's own ``changes``.
            observe: Looks on: at attention, or at states.
            is_companion: Whether the layout is that of a change's companion: changes that have one are then not made.
            **kwargs: For the backbone's forward.

        Returns:
            Last hidden states (B, N, D).

        Raises:
            ValueError: If states are changed or anything is looked at, and the backbone is trained with gradient
                checkpointing.
        """

        def forward() -> Tensor:
            return self._forward({"input_ids": layout.input_ids} if inputs is None else inputs(), **kwargs)

        def show_maps(observer: Observer) -> Tensor:
            return routes.run_and_show_maps(self.model, layout.input_ids, observer, **kwargs)

        effects = [
            cast(Fitted, fitted).effect(self.model, layout)
            for own, fitted in zip(self.changes, self._fitted, strict=True)
            if own.companion is None or not is_companion
        ]
        hands_out_maps = self._route is not None and not self._route.through_function
        return run(
            self.model,
            forward,
            show_maps=show_maps if hands_out_maps else None,
            change=[effect for effect in (*effects, *change) if effect],
            observe=observe,
            reader=self._reader,
        )

    def _forward(self, inputs: Mapping[str, Any], **kwargs: Any) -> Tensor:
        quiet = backbone.without_hidden_states(self.model)
        output = super().forward({**inputs, "modality": "text"}, **{**kwargs, **quiet})
        return cast(Tensor, output[self.module_output_name])

    @property
    def _reader(self) -> str:
        """The class, and what is changed, for a refusal."""
        changes = [str(change) for change in self.changes if not isinstance(change, EarlyExit)]
        return " with ".join([type(self).__name__, *([", ".join(changes)] if changes else [])])

    def _seen(self, layout: Layout, features: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """What changes see of the texts in layouts of their own, for each row of the layout."""
        found = {}
        for change, fitted in zip(self.changes, self._fitted, strict=True):
            if change.companion is not None:
                companion = Layout.of(features, change.key)
                texts = len(companion.input_ids)
                size = 1 if self.deterministic else CausalModule._part_size(self, layout)
                parts = [companion.part(part) for part in in_parts(texts, size)]
                seen = torch.cat([self._seen_by(cast(Fitted, fitted), part, **kwargs) for part in parts])
                found[change.key] = seen.repeat_interleave(len(layout.input_ids) // texts, dim=0)
        return found

    def _seen_by(self, fitted: Fitted, companion: Layout, **kwargs: Any) -> Tensor:
        observer = fitted.observer(self.model, companion)
        with contextlib.suppress(Halt):
            self.run(companion, observe=observer, is_companion=True, **kwargs)
        return observer.states()[0]

    def layer(self, index: int) -> nn.Module:
        """A layer of the backbone: it is looked for by its path, as an adapter may have taken the place of a module."""
        return self.model.get_submodule(anatomy.layer_paths(self.model)[index])

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
            return self._handed_on(features, self._read_batch(features, **kwargs))
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
            ValueError: If the method reads something else than hidden states, or a state inside its last layer, or the
                layers are not found, or would run a second time for their gradients.
        """
        self.check_all_layers()
        with recording(self.model, anatomy.layer_paths(self.model), norm) as record:
            found = self._handed_on(features, self._read_batch(features, **kwargs))
        layers = record.split(found["token_embeddings"])
        return {**found, "token_embeddings": layers[-1], "all_layer_embeddings": layers}

    def check_all_layers(self) -> None:
        """Refuse to read every layer's states where they would not be read alike.

        Raises:
            ValueError: If the method reads something else than hidden states, or a state inside its last layer.
        """
        if self.readout == "before_mlp":
            raise ValueError(
                f'{type(self).__name__} with readout="before_mlp" reads a state inside its last layer, and the other '
                'layers would be read behind their feed-forward parts. Use readout="layer" to read every layer.'
            )
        if not self.reads_hidden_states:
            raise ValueError(
                f"The configuration has output_hidden_states=True, and {type(self).__name__} does not read hidden "
                "states of one layer alone, so it has none of each to hand on. Set "
                "model[0].model.config.output_hidden_states = False, or use CausalTransformer."
            )

    def _read_batch(self, features: dict[str, Any], **kwargs: Any) -> TokenVectors:
        """What the method reads, of states that went through the final norm, or did not."""
        with contextlib.nullcontext() if self.final_norm else anatomy.without_final_norm(self.model):
            layout = Layout.of(features)
            layout = replace(layout, beside=self._seen(layout, features, **kwargs))
            return joined(self._read_parts(layout, **kwargs))

    def _read_parts(self, layout: Layout, **kwargs: Any) -> list[TokenVectors]:
        """What the method reads, part by part."""
        return [self._read(layout.part(part), **kwargs) for part in self.parts(layout)]

    def parts(self, layout: Layout) -> Sequence[Tensor]:
        """The rows of a layout that run together; the result does not depend on it."""
        return in_parts(len(layout.input_ids), self.rows_per_text if self.deterministic else self._part_size(layout))

    def _part_size(self, layout: Layout) -> int:
        """How many rows of a layout may run at a time.

        On an accelerator, the batch that was asked for. On a CPU, about as many tokens as its caches hold the
        activations of: larger batches are slower, and padded further.
        """
        batch, length = layout.input_ids.shape
        if layout.input_ids.device.type != "cpu":
            return batch
        return max(1, self.CPU_TOKENS * torch.get_num_threads() // length)

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        """The method. Here: the last hidden states of the tokens that ``pool_over`` and ``rows`` name."""
        selected = self.selected(layout.on_host)
        if self.rows == "last":
            selected = last_of(selected)
        return picked(self.run(layout, **kwargs), layout.input_ids, selected)

    @property
    def copies_read(self) -> tuple[int, int]:
        """The first and the last of the copies of a text whose tokens are read."""
        return 0, 0

    def selected(self, layout: Layout) -> Tensor:
        """(B, N): the tokens that ``pool_over`` names, of the copies that are read."""
        if self.pool_over == "whole":
            # The slots of token prepending hold no token.
            return layout.attention_mask.bool() & (layout.copy_index >= NOT_TEXT)
        first_copy, last_copy = self.copies_read
        copies = (layout.copy_index >= first_copy) & (layout.copy_index <= last_copy)
        if self.pool_over == "text":
            return copies
        reached = copies.cummax(dim=1).values
        if first_copy == 0:
            reached = reached | (layout.text_starts == self._leading())[:, None]
        return reached & layout.attention_mask.bool() & (layout.copy_index >= NOT_TEXT)

    def _leading(self) -> int:
        """How many special tokens stand before everything else in a layout."""
        return len(special_tokens(self._tokenizer)[0])

    def _handed_on(self, features: dict[str, Any], vectors: TokenVectors) -> dict[str, Any]:
        """The features with what was read of a batch."""
        states, mask = without_empty(vectors.states, vectors.mask, Layout.of(features).text_length == 0)
        laid_out = {name for of in ("", *self._companions) for name in feature_names(of)}
        rest = {name: value for name, value in features.items() if name not in laid_out}
        if self.deterministic:
            rest[ONE_BY_ONE] = True
        found = {"token_embeddings": states, "attention_mask": mask.long(), "input_ids": vectors.ids}
        return {**rest, **vectors.extra, **found}

    # Chunks of a text, of which :func:`st_reba.encode_chunks` makes vectors

    @property
    def no_chunks(self) -> str:
        """Why chunks of a text have no vectors in one pass over it, as a sentence about the module; empty: they have."""
        instead = "Encode each chunk as a text of its own, or use another recipe."
        if self.no_words:
            return f"{self.no_words}: a chunk has no vector in it. {instead}"
        if self.pool_over == "whole":
            return f'has pool_over="whole", the prompt read with the text: use pool_over="text". {instead}'
        if self.pool_over == "all" and self._template.literals[-1]:
            return (
                f"is read to the end of its prompt, {self._template.literals[-1]!r}, behind the text, where no chunk "
                f'stands: use pool_over="text" with rows="all". {instead}'
            )
        return ""

    def handing_on_all(self) -> Self:
        """The same module on the same weights, which hands on every token that ``pool_over`` names."""
        twin = copy.copy(self)
        twin.rows = "all"
        return twin

    def leading_handed_on(self, layout: Layout) -> Tensor:
        """(B,): how many tokens :meth:`forward` hands on before those of the text."""
        if self.pool_over == "text" or self.copies > 1:
            return torch.zeros_like(layout.text_length)
        return (layout.text_starts == self._leading()).long() * self._leading()

    def read_chunk(self, vectors: TokenVectors) -> TokenVectors:
        """What is pooled of chunks, from what :meth:`handing_on_all` gives of their tokens."""
        return vectors

    # On disk

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as ST's ``Transformer.load`` does.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json. May be left out for a directory.
            *args: As for ST's ``Transformer.load``.
            **kwargs: As for ST's ``Transformer.load``.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none that a saved module
                has, a change is none that is registered, or weights are missing.
        """
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        for fitted in module._fitted:
            cast(Fitted, fitted).load(cls.finder(model_name_or_path, subfolder, *args, **kwargs), cls.__name__)
        return module

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. What version 0.1 did not write is as it was then."""
        config = super().load_config(*args, **kwargs)
        saved = config.get("changes", [])
        if not isinstance(saved, list) or not all(isinstance(settings, dict) for settings in saved):
            raise ValueError(f"changes is {saved!r} in the saved settings: it is a list of objects, each with a key.")
        if saved:
            # Here, because nothing is loaded yet.
            config["changes"] = [from_settings(settings) for settings in saved]
        return {"tokenization": "pieces", **config} if "pool_over" in config else config

    def get_config_dict(self) -> dict[str, Any]:
        config = super().get_config_dict()
        config = {key: value for key, value in config.items() if key not in ("changes", "unpad_inputs")}
        if config.get("readout") == "layer":
            del config["readout"]
        added = [change.settings() for change in self.added_changes]
        return {**config, "changes": added} if added else config

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and note in ST's own configuration that st_reba is needed to load.

        Raises:
            ValueError: If the backbone was quantised in a way that it cannot be saved in.
        """
        backbone.check_it_can_be_saved(self.model)
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        for fitted in self._fitted:
            cast(Fitted, fitted).save(Path(output_path))
        note_requirement(Path(output_path))
