"""What all modules share: settings, and texts that are laid out for a causal language model.

Longer than other files, because the settings of all modules are checked and explained here, once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import PreTrainedTokenizerBase

from ..hub import card
from ..lm import backbone
from ..text.layout import Layout
from ..text.layouts import Frame, Tokenization, frames, lay_out, room
from ..text.templates import PREPEND, Preset, Template, normalized
from ..text.templates import PoolOver as PoolOver
from ..text.templates import Rows as Rows
from ..text.tokens import Span, special_tokens, tokenized
from .changes import Change, Prepend
from .checks import DETERMINISTIC, FINAL_NORM, NORMALIZE_TEXT, POOL_OVER, READOUT, check_length, chosen
from .checks import NO_LIMIT as _NO_LIMIT
from .reader import LayoutReader
from .readout import Reading


class CausalModule(LayoutReader):
    """Base of the modules that replace ST's ``Transformer`` at the head of a pipeline.

    A subclass chooses a template and overrides :meth:`_read`: which states of which tokens it hands on. What follows in
    the pipeline (``Pooling``, ``Normalize``, ``Dense``) is ST's own.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or those of a GGUF file (see
            :func:`st_reba.lm.gguf.as_directory`); or a loaded ST ``Transformer``, whose weights and tokenizer are then
            shared, not copied. What is set up here, such as how the backbone attends, is set on a view of it: the
            other stays as it is, and none of its settings is taken over.
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
        own_changes: What the method's own settings change. It is saved by these settings, and not under ``changes``.
        unfit_changes: Why the method does not go together with a change, in a sentence; None where it does.
        **transformer_kwargs: As for ST's ``Transformer``: ``model_kwargs``, ``max_seq_length`` and so on.

    Raises:
        ValueError: If the model is not causal, or its checkpoint lacks weights, or ``template`` does not fit into its
            positions, or it cannot be changed as ``changes`` or ``bidirectional_layers`` say, or it cannot stop after
            ``output_layer``, or before its final norm.
    """

    config_keys: list[str] = [
        *Transformer.config_keys,
        "pool_over",
        "bidirectional_layers",
        "output_layer",
        "final_norm",
        "readout",
        "normalize_text",
        "tokenization",
        "deterministic",
        "changes",
    ]

    #: ``pool_over`` where neither the caller nor a preset says.
    POOL_OVER: ClassVar[PoolOver] = "text"
    #: The same of ``final_norm``.
    FINAL_NORM: ClassVar[bool] = True
    #: Whether a text has one vector, or one for each prompt, and none for each of its tokens.
    ONE_VECTOR: ClassVar[bool] = False
    #: Whether every layer is read, so that it means nothing at which one a prompt's authors read it.
    EVERY_LAYER: ClassVar[bool] = False

    #: Whether the texts of a batch may have prompts of their own.
    PROMPTS_MAY_DIFFER: ClassVar[bool] = True

    #: Whether the method places the same token ids of a text in several places, so that only pieces will do.
    REPEATS_TEXT: ClassVar[bool] = False

    #: How much each part of a vector counts where :class:`st_reba.PartwiseWhitening` stands behind; one: it is whole.
    SHARES: ClassVar[tuple[float, ...]] = (1.0,)

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
        readout: Literal["layer", "before_mlp"] = "layer",
        normalize_text: bool | None = None,
        tokenization: Tokenization | None = None,
        deterministic: bool = False,
        changes: Sequence[Change | Mapping[str, Any]] = (),
        own_changes: Sequence[Change] = (),
        unfit_changes: Callable[[Change], str | None] = lambda change: None,
        **transformer_kwargs: Any,
    ) -> None:
        preset = self._heeded(Preset(str(template)) if preset is None else preset)
        pool_over = POOL_OVER.check(chosen(pool_over, preset.pool_over, self.POOL_OVER))
        final_norm = FINAL_NORM.check(chosen(final_norm, preset.final_norm, self.FINAL_NORM))
        normalize_text = NORMALIZE_TEXT.check(chosen(normalize_text, preset.normalize_text, False))
        READOUT.check(readout)
        DETERMINISTIC.check(deterministic)
        self._check_tokenization(tokenization)
        super().__init__(
            model_name_or_path,
            changes=changes,
            own_changes=own_changes,
            bidirectional_layers=bidirectional_layers,
            output_layer=output_layer,
            usual_output_layer=preset.output_layer,
            final_norm=final_norm,
            readout=readout,
            unfit_changes=unfit_changes,
            transformer_kwargs=transformer_kwargs,
        )
        self.pool_over = pool_over
        self.normalize_text = normalize_text
        self.deterministic = deterministic
        self.tokenization = tokenization or ("pieces" if self.REPEATS_TEXT else "whole")
        self._template = self._laid_out(template)
        self._companions = {
            change.key: self._laid_out(change.companion) for change in self.changes if change.companion is not None
        }
        self._warned_empty = False

    def check(self) -> None:
        """Refuse a layout that leaves no room for text.

        Raises:
            ValueError: If it does.
        """
        super().check()
        self._room()

    def _laid_out(self, template: Template) -> Template:
        """A template with what the module's changes need in it.

        Raises:
            ValueError: If it has a slot that none of them fills.
        """
        if PREPEND in str(template) and not any(isinstance(change, Prepend) for change in self.changes):
            raise ValueError(
                f"The template {str(template)!r} has {PREPEND}, and nothing is prepended: give changes=[Prepend()], or "
                f"leave {PREPEND} out."
            )
        for change in self.changes:
            template = change.laid_out(template)
        return template

    def _leading(self) -> int:
        return len(special_tokens(self._tokenizer)[0])

    def _check_tokenization(self, tokenization: Tokenization | None) -> None:
        if tokenization not in (None, "whole", "pieces"):
            raise ValueError(f'tokenization={tokenization!r}: use "whole" or "pieces".')
        if self.REPEATS_TEXT and tokenization == "whole":
            raise ValueError(
                f'tokenization="whole": {type(self).__name__} places the same tokens of a text in several places, so '
                'they are tokenised on their own; use "pieces", or leave it out.'
            )

    def _heeded(self, preset: Preset) -> Preset:
        """What this module takes from a preset."""
        return replace(preset, output_layer=None, final_norm=None) if self.EVERY_LAYER else preset

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

    @property
    def whole_cost(self) -> str:
        """The same with what its changes cost, but those that the method is about."""
        others = [change.cost for change in self.changes if change not in self.own_changes]
        return " ".join(filter(None, [self.cost, *others]))

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
        # Modules that share the tokenizer keep their own length.
        self.processor = copy.copy(self.processor)
        if self.processor is not self._tokenizer:
            self.processor.tokenizer = copy.copy(self._tokenizer)
        self._tokenizer.model_max_length = _NO_LIMIT if value is None else value

    def _limit(self, *limits: int | None) -> int | None:
        """The lowest of these and the tokenizer's own, or None if there is none."""
        limit = min(limit for limit in (self._tokenizer.model_max_length, *limits, _NO_LIMIT) if limit is not None)
        return None if limit >= _NO_LIMIT else int(limit)

    def _templates(self) -> list[Template]:
        """One for each layout that the method reads a text in."""
        return [self._template]

    def _frames(self, prompt: str | None = None) -> list[Frame]:
        """What stands around a text in each of these layouts, and then in those of the changes' companions."""
        return frames([*self._templates(), *self._companions.values()], self._tokenizer, prompt or "")

    def _positions(self) -> int | None:
        """Tokens that a layout may have; None: no limit."""
        return backbone.positions(self.model)

    def _room(self, prompt: str | None = None) -> int | None:
        """Tokens one copy may have beside everything else in the layout, by the model's positions."""
        around, available = self._frames(prompt), self._positions()
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
            and those of the changes' companions, ``input_ids_of_steer`` and so on.

        Raises:
            ValueError: If an input is neither, or the prompt leaves no room for text, or the tokenizer has a token
                that the model has no embedding for.
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
        companions = dict(zip(self._companions, layouts[1:], strict=True))
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
            [*self._templates(), *self._companions.values()],
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
        return [tokens.ids for tokens in tokenized(self._tokenizer, self._texts(texts))]

    def token_offsets(self, text: str, prompt: str | None = None) -> list[tuple[int, int]]:
        """Where each token of a text lies in it, (first character, one past the last), truncated as when embedded.

        With ``normalize_text``, a mark that was added lies one past the text's end.

        Args:
            text: The text.
            prompt: What stands before it: the tokens at its beginning may depend on it.

        Raises:
            ValueError: If the tokenizer does not say where its tokens lie, and they do not spell the text.
        """
        return self._located(self.lay_out([text], prompt).spans[0])

    def own_offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Where each of the text's own tokens lies in it, whole, without what stands around it or is added to it.

        Raises:
            ValueError: If the tokenizer does not say where its tokens lie, and they do not spell the text.
        """
        found = []
        for text, tokens in zip(texts, tokenized(self._tokenizer, self._texts(texts)), strict=True):
            inside = [(first, min(last, len(text))) for first, last in self._located(tokens.spans)]
            found.append([(first, last) for first, last in inside if first < last])
        return found

    def _located(self, spans: list[Span] | None) -> list[Span]:
        if spans is None:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not say where its tokens lie: use a fast tokenizer."
            )
        return spans

    # Chunks of a text, of which :func:`st_reba.encode_chunks` makes vectors

    @property
    def unfit_for_chunks(self) -> str | None:
        """Why chunks of a text have no vectors in one pass over it, in a sentence without subject; None: they have."""
        instead = "Encode each chunk as a text of its own, or use another recipe."
        if self.ONE_VECTOR:
            return f"gives a text as a whole its vector, and its tokens none: a chunk has none either. {instead}"
        if self.pool_over == "whole":
            return f'has pool_over="whole", the prompt read with the text: use pool_over="text". {instead}'
        if self.pool_over == "all" and self._template.literals[-1]:
            return (
                f"is read to the end of its prompt, {self._template.literals[-1]!r}, behind the text, where no chunk "
                f'stands: use pool_over="text" with rows="all". {instead}'
            )
        return None

    def handing_on_all(self) -> Self:
        """The same module on the same weights, which hands on every token that ``pool_over`` names."""
        twin = copy.copy(self)
        twin.rows = "all"
        return twin

    def leading_handed_on(self, layout: Layout) -> torch.Tensor:
        """(B,): how many tokens :meth:`forward` hands on before those of the text."""
        if self.pool_over == "text" or self.copies > 1:
            return torch.zeros_like(layout.text_lengths)
        return (layout.text_starts == self._leading()).long() * self._leading()

    def read_chunk(self, tokens: Reading) -> Reading:
        """What is pooled of chunks, from what :meth:`handing_on_all` gives of their tokens."""
        return tokens

    def _asked_length(self, processing_kwargs: Any = None, task: str | None = None) -> int | None:
        """Tokens of one copy that a call asks for; else, in ST 6, those of its task; else those that the module has."""
        of_task = getattr(self, f"{task}_length", None) if task in ("query", "document") else None
        own: dict[str, Any] = dict(self.processing_kwargs)
        of_call = {} if of_task is None else {"max_length": of_task}
        asked = {**own.get("text", {}), **of_call, **(processing_kwargs or {}).get("text", {})}
        if unknown := sorted(set(asked) - {"max_length", "truncation", "padding"}):
            raise ValueError(f'processing_kwargs["text"] has {unknown}: only max_length means something here.')
        length = asked.get("max_length")
        check_length(length, "max_length")
        return cast("int | None", length)

    # On disk

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. What version 0.1 did not write is as it was then."""
        config = super().load_config(*args, **kwargs)
        return {"tokenization": "pieces", **config} if "pool_over" in config else config

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
