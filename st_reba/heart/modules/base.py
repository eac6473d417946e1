"""Base of all methods: a causal language model as a sentence-transformers module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from st_reba.hub.compat import share  # sentence-transformers' own attributes, in the one file for that
from st_reba.text.chat import is_conversation, read_as
from st_reba.text.templates import agreed, normalized
from st_reba.text.templates import preset as preset_of

from ..lm.attention import Bidirectional
from ..lm.model import depth, open_language_model, resolve_output_layer
from ..lm.passes import Capture, Hook
from ..lm.prefixes import PrefixCache
from ..settings import check_choice, check_int, first_not_none
from ..text.layout import NOT_TEXT, Layout
from ..text.layouter import TextLayouter
from ..text.templates import Template
from .vectors import ONE_BY_ONE, TokenVectors, last_of, last_position

#: Value of ``max_seq_length`` that transformers and sentence-transformers use for no limit.
NO_LIMIT = int(1e30)

PoolOver = Literal["text", "all", "whole"]
Rows = Literal["all", "last"]


class CausalModule(Transformer):
    """Base of the modules that replace ``Transformer`` at the head of a pipeline.

    A method is a template and :meth:`read`: it runs the model over layouts, and returns the vectors of their tokens.
    What it needs to see or change in a pass, it gives :meth:`run` as hooks. ``Pooling`` and ``Normalize`` follow.

    Args:
        model_name_or_path: Path or Hub id of a decoder-only model, or a loaded ``Transformer``, whose weights are
            shared. That one stays as it is.
        template: Text with ``{text}`` slots, or the name of a template, which brings the settings of its authors. A
            list makes one layout each; :meth:`read` gets them all.
        pool_over: Tokens that are returned. ``"text"``: those of the copy that is read. ``"all"``: from there to the
            end of the layout. ``"whole"``: all. None: ``"text"``.
        rows: ``"all"`` returns every token, ``"last"`` the last of them. None: ``"all"``.
        output_layer: Layer after which the model ends, counted from 1, or from the top if negative; or a share of the
            layers. None: the last.
        final_norm: Whether states go through the final norm. None: True.
        bidirectional_layers: Number of last layers that attend both ways, or a share of the layers.
        normalize_text: Whether texts are changed as the prompts of PromptEOL expect it. None: False.
        tokenization: ``"whole"``: prompt, template and text are one string. ``"pieces"``: each is tokenized on its own.
            None: the whole, where the template has one copy.
        deterministic: Whether each text runs alone, so that its vector does not depend on its batch by rounding.
        prefix_caching: Whether tokens that precede every text of a batch are run once and kept.
        chat: What is read of a conversation: its last message, ``"turn"``, or all of it, ``"conversation"``.
        **transformer_kwargs: As for ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, the model is not causal, or the template leaves no room for text.
    """

    config_keys: list[str] = [
        *(key for key in Transformer.config_keys if key != "unpad_inputs"),
        "pool_over", "rows", "output_layer", "final_norm", "bidirectional_layers", "normalize_text", "tokenization",
        "deterministic", "prefix_caching", "chat",
    ]  # fmt: skip
    save_in_root = False

    #: Equation of the method, for the model card.
    equation: ClassVar[str] = ""
    #: Whether tokens have vectors of their own.
    has_token_vectors: ClassVar[bool] = True
    #: Whether templates may have several copies of the text.
    repeats_text: ClassVar[bool] = False
    #: Whether each layout ends in the end-of-sequence token.
    ends_in_eos: ClassVar[bool] = False
    #: Pooling modes that do not fit the method, each with what to use instead.
    incompatible_poolings: ClassVar[Mapping[str, str]] = {}
    #: Weight of each part of a vector, for :class:`PartwiseWhitening` and :class:`StandardizedSum`.
    part_weights: ClassVar[tuple[float, ...]] = (1.0,)
    #: Number of tokens that a thread of a CPU runs at a time: more do not fit its caches.
    TOKENS_PER_THREAD: ClassVar[int] = 1024
    #: Bytes that the method keeps for each pair of tokens of a row, and the most that it may keep in a pass.
    BYTES_PER_PAIR: ClassVar[int] = 0
    PASS_BYTES: ClassVar[int] = 2**30

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        template: str | Sequence[str] = "{text}",
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        output_layer: int | float | None = None,
        final_norm: bool | None = None,
        bidirectional_layers: int | float = 0,
        normalize_text: bool | None = None,
        tokenization: Literal["whole", "pieces"] | None = None,
        deterministic: bool = False,
        prefix_caching: bool = True,
        chat: Literal["turn", "conversation"] = "turn",
        **transformer_kwargs: Any,
    ) -> None:
        names = [template] if isinstance(template, str) else list(template)
        templates, preset = [Template.parse(name) for name in names], agreed([preset_of(name) for name in names])
        if not self.repeats_text and any(own.copies > 1 for own in templates):
            raise ValueError(
                f"template={template!r} repeats the text, and {type(self).__name__} reads one copy: use EchoModule, or "
                "a template with one {text}."
            )
        pool_over = check_choice(
            "pool_over", first_not_none(pool_over, preset.pool_over, "text"), "text", "all", "whole"
        )
        rows = check_choice("rows", first_not_none(rows, preset.rows, "all"), "all", "last")
        usual = "whole" if all(own.copies == 1 for own in templates) else "pieces"
        tokenization = check_choice("tokenization", tokenization or usual, *{"pieces", usual})
        check_choice("chat", chat, "turn", "conversation")
        self._load(model_name_or_path, **transformer_kwargs)
        #: Number of layers of the whole model; those above ``output_layer`` do not run, and are not saved.
        self.whole_depth = depth(self.model)
        output_layer = resolve_output_layer(self.whole_depth, first_not_none(output_layer, preset.output_layer))
        #: Language model that runs the passes.
        self.lm = open_language_model(self.model, output_layer)
        self.model = self.lm.model
        self.model.config.use_cache = False
        self.template = str(templates[0])
        self.pool_over, self.rows, self.tokenization, self.chat = pool_over, rows, tokenization, chat
        self.output_layer = output_layer
        self.final_norm: bool = first_not_none(final_norm, preset.final_norm, True)
        self.normalize_text: bool = first_not_none(normalize_text, preset.normalize_text, False)
        if isinstance(bidirectional_layers, float) and 0 < bidirectional_layers < 1:
            bidirectional_layers = max(1, int(bidirectional_layers * depth(self.model)))
        self.bidirectional_layers = check_int("bidirectional_layers", bidirectional_layers, 0, depth(self.model))
        if self.bidirectional_layers:
            self.lm.resolve(range(-self.bidirectional_layers, 0), "made bidirectional")
        self.deterministic, self.prefix_caching = deterministic, prefix_caching
        self.prefixes = PrefixCache()
        self.layouter = TextLayouter(
            self.tokenizer, templates, whole=tokenization == "whole", positions=self.lm.positions, end=self.ends_in_eos
        )
        self.layouter.room()
        self._warned_empty = False

    def _load(self, source: str | Transformer, **kwargs: Any) -> None:
        """Load a checkpoint, or share the weights of a loaded ``Transformer``."""
        if not isinstance(source, Transformer):
            super().__init__(source, **{**kwargs, "unpad_inputs": False})
            return
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a model that is already loaded: leave them out.")
        nn.Module.__init__(self)
        share(source, self)
        self.processor = copy.copy(source.processor)
        self.model = source.model

    # Texts in

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens of one copy of a text; longer texts are truncated. None for no limit."""
        limit = min(first_not_none(own, NO_LIMIT) for own in (self.tokenizer.model_max_length, self.layouter.room()))
        return None if limit >= NO_LIMIT else int(limit)

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        self.tokenizer.model_max_length = NO_LIMIT if value is None else value

    @property
    def modalities(self) -> list[Any]:
        return ["text", "message"] if self.tokenizer.chat_template else ["text"]

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay out texts.

        Args:
            inputs: B texts: strings, or ``{"prompt": str, "text": str}``, or conversations.
            prompt: Text before each text: it is seen, and neither repeated nor pooled.
            processing_kwargs: ``{"text": {"max_length": n}}`` truncates to n tokens a copy in this call.
            **kwargs: Of what sentence-transformers passes, ``task`` chooses ``query_length`` or ``document_length``.

        Returns:
            Features of a :class:`~st_reba.text.layout.Layout` for each template.
        """
        if not inputs:
            return {}
        prompts, texts = zip(*(self._split(own, prompt or "") for own in inputs), strict=True)
        texts = [normalized(text) if self.normalize_text else text for text in texts]
        of_task = getattr(self, f"{kwargs.get('task')}_length", None)
        asked = {**self.processing_kwargs.get("text", {}), **(processing_kwargs or {}).get("text", {})}
        limit = min(first_not_none(asked.get("max_length"), of_task, NO_LIMIT), self.tokenizer.model_max_length)
        layouts = self.layouter(texts, prompts, limit)
        for layout in layouts:
            self.lm.check_ids(layout)
        if not self._warned_empty and bool(layouts[0].is_empty.any()):
            self._warned_empty = True
            warnings.warn("A text without tokens is embedded as a zero vector. This warning comes once.", stacklevel=2)
        return {name: part for number, own in enumerate(layouts) for name, part in own.features(number).items()}

    def _split(self, given: Any, prompt: str) -> tuple[str, str]:
        """Return the prompt of an input, and its text."""
        if isinstance(given, str):
            return prompt, given
        if is_conversation(given):
            own, text = read_as(self.tokenizer, given, self.chat)
        elif isinstance(given, Mapping) and all(isinstance(given.get(name), str) for name in ("prompt", "text")):
            own, text = given["prompt"], given["text"]
        else:
            raise ValueError(
                f"{type(self).__name__} was given a {type(given).__name__}: it embeds strings, "
                '{"prompt": ..., "text": ...} with two strings, or conversations.'
            )
        return (own or prompt if self.layouter.templates[0].takes_prompt else prompt + own), text

    # Passes

    def run(self, layout: Layout, *hooks: Hook, **inputs: Any) -> Tensor:
        """Run the language model once.

        Args:
            layout: B rows of N tokens.
            *hooks: What the method reads or changes in the pass.
            **inputs: Arguments of the model's forward, such as ``inputs_embeds`` in place of the layout's tokens.

        Returns:
            Last hidden states, (B, N, D), before the final norm if ``final_norm`` is False.
        """
        hooks = (*self._own_hooks(layout), *hooks)
        if self.final_norm:
            return self.lm.run(layout, *hooks, **inputs)
        [states] = self.lm.states_at(layout, self.lm.layers[-1:], "after", None, *hooks, **inputs)
        return states

    def states_at(
        self, layout: Layout, modules: Sequence[nn.Module], side: Literal["before", "after"], positions: Tensor | None
    ) -> list[Tensor]:
        """Run the language model until all of these modules were called, and return their states.

        Args:
            layout: B rows of N tokens.
            modules: Modules of the language model.
            side: ``"before"`` for their inputs, ``"after"`` for their outputs.
            positions: (B,), the position of each row that is returned; None for all.

        Returns:
            For each module, (B, D), or (B, N, D) where all positions are returned.
        """
        return self.lm.states_at(layout, modules, side, positions, *self._own_hooks(layout))

    def _own_hooks(self, layout: Layout) -> tuple[Hook, ...]:
        """Return the hooks of every pass of this module."""
        count, run = self.bidirectional_layers, depth(self.model)
        return (Bidirectional(range(run - count, run), layout.attention_mask),) if count else ()

    def run_layers(self, layout: Layout, *hooks: Hook) -> list[Tensor]:
        """Run the language model once, and return what enters the first layer and what each layer returns."""
        first, rest = Capture(self.lm.layers[:1], "before"), Capture(self.lm.layers, "after")
        last = self.run(layout, *hooks, first, rest)
        return [*first.states, *rest.states[:-1], last]

    @property
    def reads_prefix(self) -> bool:
        """Whether the method reads or changes what precedes a text, so that it cannot be cached."""
        return self.pool_over == "whole" or self.bidirectional_layers > 0

    def _behind_prefix(self, layout: Layout) -> Layout:
        """Return the layout behind its cached prefix, where it may have one."""
        if self.training:
            self.prefixes.clear()
        may = self.prefix_caching and self.lm.continues_past and not (self.deterministic or self.reads_prefix)
        if not may or self.training or torch.is_grad_enabled() or hasattr(self.model, "peft_config"):
            return layout
        return self.prefixes.split(self.model, layout, least=len(self.layouter.before))

    # Vectors out

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the method over a batch, a part at a time.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: Ignored.

        Returns:
            The features with ``token_embeddings`` (B, n, D), and ``attention_mask`` and ``input_ids`` (B, n) to match.
            A text without tokens has one zero vector.
        """
        given = [Layout.from_features(features, number) for number in range(len(self.layouter.templates))]
        layouts = [self._behind_prefix(layout) for layout in given]
        parts = self._parts(layouts)
        read = [self.read(*(layout.part(rows) for layout in layouts)) for rows in parts]
        vectors = TokenVectors.joined(read, parts).with_zeros(given[0].is_empty)
        used = {name for number, layout in enumerate(given) for name in layout.features(number)}
        return {
            **{name: value for name, value in features.items() if name not in used},
            **({ONE_BY_ONE: True} if self.deterministic else {}),
            "token_embeddings": vectors.states,
            "attention_mask": vectors.mask.long(),
            "input_ids": vectors.ids,
        }

    def _parts(self, layouts: Sequence[Layout]) -> list[Tensor]:
        """Return the rows that run together. The result does not depend on it."""
        count, length = max((layout.input_ids.shape for layout in layouts), key=lambda shape: shape[1])
        on_cpu, size = self.lm.device.type == "cpu", 1 if self.deterministic else count
        if on_cpu:
            size = min(size, max(1, self.TOKENS_PER_THREAD * torch.get_num_threads() // length))
        if self.BYTES_PER_PAIR:
            size = min(size, max(1, self.PASS_BYTES // (self.BYTES_PER_PAIR * length**2)))
        # Rows of about one length together: sentence-transformers' trainer does not sort them.
        order = layouts[0].lengths.argsort(descending=True, stable=True) if size < count else torch.arange(count)
        return list(order.chunk(ceil(count / size)))

    def read(self, *layouts: Layout) -> TokenVectors:
        """Return the vectors of a batch: the method. Here, the last hidden states of the selected tokens.

        Args:
            *layouts: One for each template.
        """
        [layout] = layouts
        selected = self.selected(layout)
        hooks = self.lm.feed_forward_at(last_position(selected), selected.shape[1]) if self.rows == "last" else []
        return TokenVectors.pick(self.run(layout, *hooks), layout, selected)

    @property
    def copies_read(self) -> range:
        """Copies of the text whose tokens are returned."""
        return range(1)

    def selected(self, layout: Layout) -> Tensor:
        """Return the tokens that ``pool_over`` and ``rows`` name, (B, N), boolean."""
        real = layout.attention_mask & (layout.copy_index >= NOT_TEXT)
        copies = (layout.copy_index >= self.copies_read[0]) & (layout.copy_index <= self.copies_read[-1])
        if self.pool_over == "text":
            selected = copies
        elif self.pool_over == "whole":
            selected = real
        else:
            reached = copies.cummax(dim=1).values
            if self.copies_read[0] == 0 and layout.past is None:
                # Special tokens are returned too, where nothing else precedes the text.
                starts = (layout.copy_index >= 0).int().argmax(dim=1)
                reached = reached | (starts == len(self.layouter.before))[:, None]
            selected = reached & real
        return last_of(selected) if self.rows == "last" else selected

    # Pipeline and disk

    def on_model_ready(self, model: Any) -> None:
        """Warn about pooling that does not fit the method. sentence-transformers calls it on a complete pipeline."""
        for part in model.children():
            mode = getattr(part, "pooling_mode", None) if isinstance(part, Pooling) else None
            for own in (mode,) if isinstance(mode, str) else mode or ():
                if own in self.incompatible_poolings:
                    advice = self.incompatible_poolings[own]
                    warnings.warn(f'{type(self).__name__} is followed by Pooling("{own}"): {advice}', stacklevel=2)

    def extra_repr(self) -> str:
        own = [key for key in self.config_keys if key not in Transformer.config_keys]
        return ", ".join(f"{key}={getattr(self, key)!r}" for key in own)
