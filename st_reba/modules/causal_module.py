"""What all methods share: a causal language model as a sentence-transformers module.

Five sections: settings, text in, the pass, vectors out, on disk. A method chooses a template and which states it reads.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, TypeVar

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from ..lm import anatomy, backbone
from ..lm.attention import setup
from ..lm.attention.observers import Observer
from ..lm.prefixes import Ids, KeptPrefixes, Prefixes, behind, shared_ids
from ..lm.run import Halt, PassChange, current, run
from ..settings import NO_LIMIT, Setting, choice, flag, optional, tokens, whole
from ..text.chat import Chat, is_conversation, read_as
from ..text.layout import NOT_TEXT, Layout
from ..text.layouts import Frame, Tokenization, frames, lay_out, room
from ..text.templates import PREPEND, Preset, Template, normalized
from ..text.templates import PoolOver as PoolOver
from ..text.templates import Rows as Rows
from ..text.templates import preset as preset_of
from ..text.tokens import Tokens, special_tokens, tokenized
from .changes import AttendBothWays, Change, Prepend
from .checkpoints import SafeTransformer, modes_of
from .remote_states import RemoteStates
from .token_vectors import ONE_BY_ONE, TokenVectors, in_parts, joined, last_of, last_position, picked, without_empty

_Value = TypeVar("_Value")
_Change = TypeVar("_Change", bound=Change)

#: The most copies any module takes, far above what helps: a configuration that asks for more is a mistake or an attack.
MAX_COPIES = 1024

POOL_OVER: Setting[PoolOver] = choice("pool_over", "text", "all", "whole")
BIDIRECTIONAL_LAYERS = whole(
    "bidirectional_layers", 0, says="give the number of last layers that attend both ways, 0 or more."
)
FINAL_NORM = flag("final_norm")
NORMALIZE_TEXT = flag("normalize_text")
TOKENIZATION: Setting[Tokenization | None] = optional(choice("tokenization", "whole", "pieces"))
DETERMINISTIC = flag("deterministic")
PREFIX_CACHING = flag("prefix_caching")
CHAT: Setting[Chat] = choice("chat", "turn", "conversation")
_SAVED = (
    POOL_OVER, BIDIRECTIONAL_LAYERS, FINAL_NORM, NORMALIZE_TEXT, TOKENIZATION, DETERMINISTIC, PREFIX_CACHING,
    CHAT,
)  # fmt: skip
# Those that several methods have.
ROWS: Setting[Rows] = choice("rows", "all", "last", says='use "all" for every token, or "last" for the last alone.')


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
        template: What stands around and between the copies of a text: a text with ``{text}`` for each, or a name in
            :data:`st_reba.TEMPLATES`. Where it has one ``{prompt}``, the prompt stands there and not at the front. A
            class whose method repeats the text says so: ``repeats_text``.
        preset: How the template's authors read it: what it says of ``pool_over``, ``rows``, ``output_layer``,
            ``final_norm`` and ``normalize_text`` holds where the argument is None. An ``output_layer`` that is a
            fraction is a share of the model's layers. None: as the template's name says.
        pool_over: Which tokens are handed on. ``"text"``: those of the copy or copies that are read. ``"all"``: from
            there to the end of the layout, literals and special tokens included; where nothing but special tokens
            precedes that copy, those too, so that the result is what ST's ``Transformer`` gives. ``"whole"``: the whole
            layout, all that stands before the text included, the ``prompt`` and special tokens as well. None:
            ``"text"``.
        rows: ``"all"`` hands on every token that is read, ``"last"`` the last alone. None: ``"all"``.
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
        deterministic: Whether each text runs alone, whatever its batch: then its embedding is the same to the bit, in
            every precision, on one machine with one number of threads. It costs what a batch saves. Otherwise batches
            differ by rounding: 1e-6 in float32, 1e-2 in bfloat16. What st_reba puts behind ``Pooling`` keeps to it;
            ST's ``Dense`` does not.
        prefix_caching: Whether what stands before all texts of a batch, a template's literals and ST's ``prompt``, is
            run once, and its keys and values kept for the batches to come; the results differ by rounding, 1e-6 in
            float32. False, or in training, with ``deterministic``, where a method or a change reads or changes what
            stands there (:attr:`reads_behind_prefixes`), with an adapter, and in architectures that do not reuse a
            cache: each text runs behind its whole prompt. The keys and values of the last
            :attr:`~st_reba.lm.prefixes.KeptPrefixes.MOST` prefixes are kept, 46 kB a token for a model of 135M
            parameters in float32, 0.5 MB for one of 7B in half precision without shared heads; they are neither saved
            nor copied.
        chat: What is read of a conversation, a list of ``{"role": ..., "content": ...}``, which the tokenizer's chat
            template writes. ``"turn"``: its last message is the text, and what the template writes before that stands
            there, is seen and is not pooled. ``"conversation"``: all of it is the text.
        **transformer_kwargs: As for ST's ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on.

    Raises:
        ValueError: If the model is not causal, or its checkpoint lacks weights, or ``template`` does not fit into its
            positions, or it cannot be changed as ``bidirectional_layers`` says, or it cannot stop after
            ``output_layer``, or before its final norm.
    """

    # What a method's class says of itself

    #: The method's name, its equation and its paper, for the model card. A module may set an equation of its own.
    method: ClassVar[str]
    equation: str
    citation: ClassVar[str] = ""

    #: What is saved of a module, besides what ST saves of it.
    config_keys = [*SafeTransformer.config_keys, *(setting.name for setting in _SAVED), "output_layer"]

    #: Whether the method places the same token ids of a text in several places, so that only pieces will do.
    repeats_text: bool = False

    #: Whether what was read of a text is combined at once; chunks of a text are combined one by one.
    combines: bool = True

    #: Why a token has no vector of its own, as a sentence about the module goes on; empty: it has one.
    no_words: str = ""

    #: Modes of ST's ``Pooling`` behind which the method is not itself, and what to use instead, in a sentence.
    unfit_poolings: Mapping[str, str] = {}

    #: What the method changes while the model reads: set with the method's settings, before this class's constructor,
    #: and then as it is made to the backbone.
    changes: Sequence[Change] = ()

    #: How much each part of a vector counts where :class:`st_reba.PartwiseWhitening` or
    #: :class:`st_reba.StandardizedSum` stands behind; one: it is whole.
    shares: tuple[float, ...] = (1.0,)

    #: Whether every token that is read is handed on, or the last alone.
    rows: Rows = "all"

    #: How many rows of a layout a text has.
    rows_per_text: int = 1

    #: Tokens a thread runs at a time on a CPU.
    CPU_TOKENS: ClassVar[int] = 1024

    # Settings

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str | Template = "{text}",
        preset: Preset | None = None,
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        bidirectional_layers: int = 0,
        output_layer: int | None = None,
        final_norm: bool | None = None,
        normalize_text: bool | None = None,
        tokenization: Tokenization | None = None,
        deterministic: bool = False,
        prefix_caching: bool = True,
        chat: Chat = "turn",
        **transformer_kwargs: Any,
    ) -> None:
        self._template = self._parsed(template)
        self.template = str(self._template)
        #: How often the text stands in the input.
        self.copies = self._template.copies
        preset = preset or preset_of(str(template))
        self.rows = ROWS.check(chosen(rows, preset.rows, "all"))
        self.pool_over = POOL_OVER.check(chosen(pool_over, preset.pool_over, "text"))
        self.final_norm = FINAL_NORM.check(chosen(final_norm, preset.final_norm, True))
        self.normalize_text = NORMALIZE_TEXT.check(chosen(normalize_text, preset.normalize_text, False))
        self.deterministic = DETERMINISTIC.check(deterministic)
        self.prefix_caching = PREFIX_CACHING.check(prefix_caching)
        self.chat = CHAT.check(chat)
        self._kept_prefixes = KeptPrefixes()
        self.tokenization = TOKENIZATION.check(tokenization) or ("pieces" if self.repeats_text else "whole")
        if self.repeats_text and self.tokenization == "whole":
            raise ValueError(
                f'tokenization="whole": {type(self).__name__} places the same tokens of a text in several places, so '
                'they are tokenised on their own; use "pieces", or leave it out.'
            )
        self.bidirectional_layers = BIDIRECTIONAL_LAYERS.check(bidirectional_layers)
        if bidirectional_layers:
            self.changes = [AttendBothWays(bidirectional_layers), *self.changes]
        # Refused here, before anything is loaded, where a template has a slot that nothing fills.
        self._templates_with_slots()
        super().__init__(model_name_or_path, **transformer_kwargs)
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        #: Layers of the whole model; those above the output layer are not run.
        self.whole_depth = backbone.depth(self.model)
        self._shorten(output_layer, preset.output_layer)
        self.changes = [change.on(self.model, self.whole_depth) for change in self.changes]
        self._warned_empty = False
        # Who reads, for a refusal.
        said = ", ".join(map(str, self.changes))
        self._reader = f"{type(self).__name__} with {said}" if said else type(self).__name__
        # Refused here, and not at the first text, where template and changes leave no room for one.
        self._room()

    def _parsed(self, template: str | Template) -> Template:
        """The template of this text or name.

        Raises:
            ValueError: If it repeats the text, and the method reads one copy.
        """
        parsed = template if isinstance(template, Template) else Template.parse(template)
        if parsed.copies > 1 and not self.repeats_text:
            raise ValueError(
                f"The template {str(parsed)!r} has {parsed.copies} slots: {type(self).__name__} reads one copy. "
                "Use EchoModule for templates that repeat the text."
            )
        return parsed

    def _shorten(self, output_layer: int | None, usual: float | None) -> None:
        """End the model after a layer, or else as usual, and set it up."""
        depth = self.whole_depth
        if isinstance(self.model, RemoteStates):
            self.model.check_changes(self.changes)
        if output_layer is None and usual is not None:
            # A share of the layers, or a layer from the top; below the first, the first.
            output_layer = max(1, round(usual * depth)) if isinstance(usual, float) else max(usual, -depth)
        self.output_layer = None if output_layer is None else backbone.resolve_layer(self.model, output_layer)
        if self.output_layer is not None:
            self.model = anatomy.shortened(self.model, self.output_layer)
        # Of layers that are left out, none is needed.
        self.check_weights()
        if not self.final_norm:
            # Refused here where it is not found.
            anatomy.final_norm(self.model)
        setup.prepare(self.model)

    def change(self, kind: type[_Change]) -> _Change:
        """The change of this kind, which the module makes, with the settings that it has on this model."""
        return next(change for change in self.changes if isinstance(change, kind))

    def _templates_with_slots(self) -> list[Template]:
        """The method's own, and those of the changes' companions behind them.

        Raises:
            ValueError: If one has a slot that no change fills.
        """
        companions = [change.companion for change in self.changes if change.companion is not None]
        prepends = any(isinstance(change, Prepend) for change in self.changes)
        found = [*self.layouts(), *companions]
        for template in found:
            if PREPEND in str(template) and not prepends:
                raise ValueError(
                    f"The template {str(template)!r} has {PREPEND}, and nothing is prepended: use "
                    f"TokenPrependingModule, or leave {PREPEND} out."
                )
        return found

    @property
    def reads_behind_prefixes(self) -> bool:
        """Whether the method reads and changes nothing of what stands before a text, so that it need be run but once.

        A method that does says False. Of changes, see :attr:`~st_reba.modules.changes.Change.spares_prefixes`.
        """
        return self.pool_over != "whole" and all(change.spares_prefixes for change in self.changes)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what stands before texts is run once, and kept, when no gradient is wanted."""
        # An adapter may be switched without a weight's being another.
        wanted = self.prefix_caching and not self.deterministic and not hasattr(self.model, "peft_config")
        return wanted and self.reads_behind_prefixes and setup.reads_behind_prefixes(self.model)

    @property
    def cost(self) -> str:
        """What an embedding costs beside the classical one, in a sentence, for the model card."""
        if self.copies == 1:
            return "One pass over the text, as for the classical embedding."
        return f"One pass over {self.copies} copies of the text: about {self.copies} times the classical embedding."

    def on_model_ready(self, model: Any) -> None:
        """Called by ST when the pipeline is complete: give it our model card, and look at its pooling.

        A warning comes if what pools this module's tokens reads others than the method is about.
        """
        super().on_model_ready(model)
        for part in model.children():
            modes = modes_of(part) if isinstance(part, Pooling) else frozenset()
            for mode in sorted(self.unfit_poolings.keys() & modes):
                warnings.warn(
                    f'{type(self).__name__} stands before Pooling("{mode}"): {self.unfit_poolings[mode]}', stacklevel=2
                )
            if modes and self.trained_poolings and modes != self.trained_poolings:
                warnings.warn(
                    f"{self.model.config.name_or_path} was trained as an embedder that is pooled by "
                    f"{' and '.join(sorted(self.trained_poolings))}, as its 1_Pooling/config.json says, and is pooled "
                    f"by {' and '.join(sorted(modes))} here. Embeddings may be much worse: use the model as it is "
                    "saved, SentenceTransformer(...), or its own pooling.",
                    stacklevel=2,
                )

    # Text in

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

    @property
    def modalities(self) -> list[Any]:
        """What the module takes, whatever else the backbone could: texts, and conversations with a chat template."""
        return ["text", "message"] if self._tokenizer.chat_template else ["text"]

    def _limit(self, *limits: int | None) -> int | None:
        """The lowest of these and the tokenizer's own, or None if there is none."""
        limit = min(limit for limit in (self._tokenizer.model_max_length, *limits, NO_LIMIT) if limit is not None)
        return None if limit >= NO_LIMIT else int(limit)

    def layouts(self) -> list[Template]:
        """One template for each layout that the method reads a text in."""
        return [self._template]

    def frames(self, prompt: str | None = None) -> list[Frame]:
        """What stands around a text in each of these layouts, and then in those of the changes' companions."""
        return frames(self._templates_with_slots(), self._tokenizer, prompt or "")

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
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay texts out.

        Args:
            inputs: B texts: strings, or ``{"prompt": str, "text": str}`` for a text with a prompt of its own, or
                conversations, lists of ``{"role": str, "content": str}``: see the setting ``chat``.
            prompt: Literal text at the front of each layout: context, never repeated, never pooled. A prompt of the
                text's own comes after it. In a template with ``{prompt}`` it stands there, and a prompt of the text's
                own in its place.
            processing_kwargs: ``{"text": {"max_length": n}}`` truncates to n tokens a copy for this call.
            **kwargs: What ST passes to every module. Of it ``task``, ``"query"`` or ``"document"``, truncates to ST's
                ``query_length`` or ``document_length``, where the module was given one.

        Returns:
            ``input_ids``, ``attention_mask`` and ``copy_index``, each (B, N): see :class:`st_reba.text.layout.Layout`;
            and those of the changes' companions, ``input_ids_of_steer`` and so on.

        Raises:
            ValueError: If an input is none of these, or the prompt leaves no room for text, or the tokenizer has a
                token that the model has no embedding for.
        """
        if not inputs:
            return {}
        prompts, texts = self._split(inputs, prompt or "")
        layouts = self._lay_out(self._texts(texts), prompts, self._asked_length(processing_kwargs, kwargs.get("task")))
        if not self._warned_empty and bool((layouts[0].text_lengths == 0).any()):
            self._warned_empty = True
            warnings.warn(
                "A text without tokens (empty, or nothing the tokenizer knows) is embedded as a zero vector. "
                "This warning comes once.",
                stacklevel=2,
            )
        for layout in layouts:
            self._check_ids(layout)
        keys = [change.key for change in self.changes if change.companion is not None]
        companions = dict(zip(keys, layouts[1:], strict=True))
        return replace(layouts[0], companions=companions).features()

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
            self._templates_with_slots(),
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
        in_a_slot = any(template.takes_prompt for template in self.layouts())
        for index, given in enumerate(inputs):
            if is_conversation(given):
                given = dict(zip(("prompt", "text"), read_as(self._tokenizer, given, self.chat), strict=True))
                if given["prompt"] and in_a_slot:
                    raise ValueError(
                        f"Input {index} is a conversation, and the template {self.template!r} has a slot where its "
                        'earlier turns would stand: use chat="conversation", which reads all of it as the text.'
                    )
            parts = {"prompt": "", "text": given} if isinstance(given, str) else given
            if not isinstance(parts, dict) or not all(isinstance(parts.get(name), str) for name in ("prompt", "text")):
                raise ValueError(
                    f"Input {index} is a {type(given).__name__}: {type(self).__name__} embeds strings, "
                    '{"prompt": ..., "text": ...} with two strings, or conversations, lists of '
                    '{"role": ..., "content": ...}.'
                    + (" Give a column as a list: list(column)." if hasattr(given, "to_numpy") else "")
                )
            prompts.append(parts["prompt"] or prompt if in_a_slot else prompt + parts["prompt"])
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
        length = asked.get("max_length")
        return None if length is None else tokens("max_length").check(length)

    def max_tokens(self, prompt: str | None = None, processing_kwargs: Any = None) -> int | None:
        """Tokens of one copy of a text in a call with these arguments of :meth:`preprocess`; None: no limit."""
        return self._limit(self._room(prompt), self._asked_length(processing_kwargs))

    def tokenized(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, whole, without special tokens."""
        return tokenized(self._tokenizer, self._texts(texts))

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, whole, without special tokens."""
        return [found.ids for found in self.tokenized(texts)]

    # The pass

    def run(
        self,
        layout: Layout,
        *,
        inputs: Callable[[], Mapping[str, Any]] | None = None,
        change: Sequence[PassChange] = (),
        observe: Observer | None = None,
        is_companion: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """One pass of the language model, the one way to run it: see :func:`st_reba.lm.run.run`.

        Args:
            layout: B texts.
            inputs: Makes what the backbone is given, in the pass, in place of the layout's ``input_ids``.
            change: What is changed besides the module's ``changes``.
            observe: Looks on at attention.
            is_companion: Whether the layout is that of a change's companion: changes that have one are then not made.
            **kwargs: For the backbone's forward.

        Returns:
            Last hidden states (B, N, D).

        Raises:
            ValueError: If states are changed or anything is looked at, and the backbone is trained with gradient
                checkpointing.
        """

        # A word of ST's, for modules that are one for queries and another for documents: no backbone knows it.
        kwargs.pop("task", None)
        made = [own.effect(self.model, layout) for own in self.changes if own.companion is None or not is_companion]
        return run(
            self.model,
            layout,
            changes=[*made, *change],
            observe=observe,
            inputs=inputs,
            reader=self._reader,
            **kwargs,
        )

    def _seen(self, change: Change, layout: Layout, **kwargs: Any) -> Tensor:
        """What a change sees of the texts in a layout of their own."""
        companion, prefixes = self.behind_prefixes(layout.companions[change.key], 1, **kwargs)
        found = []
        size = 1 if self.deterministic else CausalModule._part_size(self, companion)
        for rows in in_parts(len(companion.input_ids), size):
            part = companion.part(rows)
            observer = change.observer(self.model, part)
            with contextlib.suppress(Halt), behind(prefixes, rows):
                self.run(part, change=[observer.as_change()], is_companion=True, **kwargs)
            found += observer.states()
        return torch.cat(found)

    def behind_prefixes(self, layout: Layout, count: int, **kwargs: Any) -> tuple[Layout, Prefixes | None]:
        """A layout of ``count`` rows a text without what stands before all texts, and that; or the whole of it."""
        if self.model.training:
            self._kept_prefixes.clear()
        # What a caller gives the backbone besides is about all of a row.
        if torch.is_grad_enabled() or self.model.training or kwargs.keys() - {"task"}:
            return layout, None
        ids = self.prefixes_of(layout, count)
        if ids is None:
            return layout, None
        prefixes = self._kept_prefixes.get(self.model, ids)
        return prefixes.rest_of(layout), prefixes

    def prefixes_of(self, layout: Layout, count: int) -> Ids | None:
        """The tokens before all texts of a layout of ``count`` rows each that are run once; None: all run with each."""
        ids = shared_ids(layout, count)
        if ids is None or max(map(len, ids)) <= self._leading() or not self.keeps_prefixes:
            return None
        return ids

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
            A text without tokens has one zero vector.
        """
        return self._handed_on(features, Layout.of(features), **kwargs)

    def _handed_on(self, features: dict[str, Any], layout: Layout, **kwargs: Any) -> dict[str, Any]:
        """The features with what is read of a batch in place of its layout."""
        with contextlib.nullcontext() if self.final_norm else anatomy.without_final_norm(self.model):
            seen = {own.key: self._seen(own, layout, **kwargs) for own in self.changes if own.companion is not None}
            states, mask, ids, extra = self._read_parts(replace(layout, seen=seen), **kwargs)
        states, mask = without_empty(states, mask, layout.text_lengths == 0)
        laid_out = layout.features()
        rest = {name: value for name, value in features.items() if name not in laid_out}
        if self.deterministic:
            rest[ONE_BY_ONE] = True
        return {**rest, **extra, "token_embeddings": states, "attention_mask": mask.long(), "input_ids": ids}

    def _read_parts(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        """What the method reads, part by part."""
        layout, prefixes = self.behind_prefixes(layout, self.rows_per_text, **kwargs)
        parts, read = self.parts(layout), []
        for part in parts:
            with behind(prefixes, part):
                vectors = self._read(layout if len(parts) == 1 else layout.part(part), **kwargs)
            read.append(self.combined(vectors) if self.combines else vectors)
        return joined(read, parts)

    def combined(self, vectors: TokenVectors) -> TokenVectors:
        """What is handed on of what was read of texts, or of chunks of them. Here: all of it."""
        return vectors

    def parts(self, layout: Layout) -> Sequence[Tensor]:
        """The rows of a layout that run together, (rows,) each; the result does not depend on it."""
        count = len(layout.input_ids)
        parts = in_parts(count, self.rows_per_text if self.deterministic else self._part_size(layout))
        if self.deterministic or len(parts) == 1:
            return parts
        # Those of nearly one length, so that little is padded. ST's encode has sorted them, its trainer has not.
        order = layout.lengths.argsort(descending=True, stable=True)
        return [order[part] for part in parts]

    def _part_size(self, layout: Layout) -> int:
        """How many rows of a layout may run at a time.

        On an accelerator, the batch that was asked for. On a CPU, about as many tokens as its caches hold the
        activations of: larger batches are slower, and padded further.
        """
        batch, length = layout.input_ids.shape
        if backbone.device(self.model).type != "cpu":
            return batch
        return max(1, self.CPU_TOKENS * torch.get_num_threads() // length)

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        """The method. Here: the last hidden states of the tokens that ``pool_over`` and ``rows`` name."""
        selected, change = self.selected(layout), []
        if self.rows == "last":
            selected = last_of(selected)
            # Hooks are not called again where a layer is run again for its gradients.
            if not backbone.is_checkpointing(self.model):
                change = [anatomy.feed_forward_at(self.model, last_position(selected), layout.input_ids.shape[1])]
        return picked(self.run(layout, change=change, **kwargs), layout.input_ids, selected)

    @property
    def copies_read(self) -> tuple[int, int]:
        """The first and the last of the copies of a text whose tokens are read."""
        return 0, 0

    def selected(self, layout: Layout) -> Tensor:
        """(B, N): the tokens that ``pool_over`` names, of the copies that are read."""
        if self.pool_over == "whole":
            # The slots of token prepending hold no token.
            return layout.attention_mask & (layout.copy_index >= NOT_TEXT)
        first_copy, last_copy = self.copies_read
        copies = (layout.copy_index >= first_copy) & (layout.copy_index <= last_copy)
        if self.pool_over == "text":
            return copies
        reached = copies.cummax(dim=1).values
        # Nothing but special tokens precedes it, unless a prefix does.
        if first_copy == 0 and current().before is None:
            reached = reached | (layout.text_starts == self._leading())[:, None]
        return reached & layout.attention_mask & (layout.copy_index >= NOT_TEXT)

    def _leading(self) -> int:
        """How many special tokens stand before everything else in a layout."""
        return len(special_tokens(self._tokenizer)[0])

    # Chunks of a text, of which :func:`st_reba.encode_chunks` makes vectors

    @property
    def no_chunks(self) -> str:
        """Why chunks of a text have no vectors, as a sentence about the module goes on; empty: they have."""
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

    # On disk

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. What version 0.1 did not write is as it was then."""
        config = super().load_config(*args, **kwargs)
        return {"tokenization": "pieces", **config} if "pool_over" in config else config

    def get_config_dict(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config_dict()
        # Settings that came later are written only where they are not what every model had before.
        for name, usual in ((PREFIX_CACHING.name, True), (CHAT.name, "turn")):
            if config.get(name) == usual:
                del config[name]
        return config

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and note in ST's own configuration that st_reba is needed to load.

        Raises:
            ValueError: If the backbone was quantised in a way that it cannot be saved in.
        """
        backbone.check_it_can_be_saved(self.model)
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
