"""Base of all methods: a causal language model as a sentence-transformers module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..lm.attention.hooks import Bidirectional
from ..lm.model import LanguageModel, resolve_output_layer
from ..lm.passes import Hook
from ..lm.views import depth
from ..settings import NO_LIMIT, check, check_choice, check_flag, check_int, check_tokens, first_not_none
from ..text.chat import Chat, is_conversation, read_as
from ..text.layout import FEATURES, NOT_TEXT, Layout
from ..text.layouter import TextLayouter
from ..text.presets import PoolOver as PoolOver
from ..text.presets import Preset, agreed, normalized
from ..text.presets import Rows as Rows
from ..text.presets import preset as preset_of
from ..text.templates import PREPEND, Template
from .transformer import ModelSource as ModelSource
from .transformer import SafeTransformer
from .vectors import ONE_BY_ONE, TokenVectors, last_position, last_token_mask


class CausalModule(SafeTransformer):
    """Base of the modules that replace ``Transformer`` at the head of a pipeline.

    A method is a template and :meth:`read`: it runs the model over layouts, and returns the vectors of their tokens.
    What it reads or changes in a pass, it gives :meth:`run` as hooks. ``Pooling`` and ``Normalize`` follow.

    Args:
        model_name_or_path: Path or Hub id of a decoder-only model or of a GGUF file; or a loaded ``Transformer`` or
            language model, whose weights are shared. That one stays as it is.
        template: Text with ``{text}`` slots, or the name of a template, which brings the settings of its authors; or a
            :class:`~st_reba.text.presets.Preset` of both. A list makes one layout each; :meth:`read` gets them all.
        pool_over: Tokens that are returned. ``"text"``: those of the copy that is read. ``"all"``: from there to the
            end of the layout, and the special tokens before the text if nothing else precedes it. ``"whole"``: all,
            with prompt and template. None: ``"text"``.
        rows: ``"all"`` returns every token, ``"last"`` the last of them. None: ``"all"``.
        output_layer: Layer after which the model ends, counted from 1, or from the top if negative; or a share of the
            layers. Those above it do not run, and are not saved. None: the last.
        final_norm: Whether states go through the model's final norm. None: True.
        bidirectional_layers: Number of last layers that attend to later tokens too, or a share of the layers.
        normalize_text: Whether texts are changed as the prompts of PromptEOL expect it. None: False.
        tokenization: ``"whole"``: prompt, template and text are one string; a token with characters of the text and of
            what is around it counts as text. ``"pieces"``: each is tokenized on its own. None: the whole, where the
            template has one copy.
        deterministic: Whether each text runs alone. Its vector is then the same to the bit in any batch, which costs
            what batches save.
        prefix_caching: Whether tokens that precede every text of a batch, the prompt and the template's beginning, run
            once, and their keys and values are kept.
        chat: What is read of a conversation: its last message, ``"turn"``, with the turns before as its prompt, or all
            of it, ``"conversation"``.
        **transformer_kwargs: As for sentence-transformers' ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, the model is not causal, its checkpoint lacks weights, or the template
            leaves no room for text.
    """

    config_keys: list[str] = [
        *SafeTransformer.config_keys,
        *("pool_over", "output_layer", "final_norm", "bidirectional_layers", "normalize_text", "tokenization"),
        *("deterministic", "prefix_caching", "chat"),
    ]

    #: Name, equation and paper of the method, and its cost in a sentence, for the model card.
    method: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    cost: ClassVar[str] = ""

    #: Whether tokens have vectors of their own.
    has_token_vectors: ClassVar[bool] = True
    #: Weights of the parts of a vector, where it is made of several.
    part_weights: tuple[float, ...] = (1.0,)
    #: Copies of the text whose tokens are returned.
    copies_read: range = range(1)
    #: Whether templates may have several copies of the text.
    repeats_text: ClassVar[bool] = False
    #: Whether templates have a slot of token prepending.
    prepends: ClassVar[bool] = False
    #: Settings of a template's authors that have another default here, and those that have one value alone.
    defaults: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    #: Whether the output layer and norm of a template's authors are left out, because every layer is read.
    reads_all_layers: ClassVar[bool] = False
    #: Whether each layout ends in the end-of-sequence token.
    ends_in_eos: ClassVar[bool] = False
    #: Number of tokens that the method adds to a layout in a pass.
    further_tokens: ClassVar[int] = 0
    #: Number of tokens that a thread of a CPU runs at a time: activations of more do not fit its caches.
    TOKENS_PER_THREAD: ClassVar[int] = 1024
    #: Number of tokens of a text above which a warning asks for ``max_seq_length``.
    LONG_TEXT: ClassVar[int] = 8192
    #: Bytes that a pass keeps for each pair of a returned position and any other, and the most that it may keep.
    BYTES_PER_PAIR: ClassVar[int] = 0
    PASS_BYTES: ClassVar[int] = 2**30

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        template: str | Preset | Sequence[str | Preset] = "{text}",
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        output_layer: int | float | None = None,
        final_norm: bool | None = None,
        bidirectional_layers: int | float = 0,
        normalize_text: bool | None = None,
        tokenization: Literal["whole", "pieces"] | None = None,
        deterministic: bool = False,
        prefix_caching: bool = True,
        chat: Chat = "turn",
        **transformer_kwargs: Any,
    ) -> None:
        given: Sequence[Any] = template if template and isinstance(template, (list, tuple)) else [template]
        presets = [item if isinstance(item, Preset) else preset_of(item) for item in given]
        preset = agreed(presets)
        self._templates = tuple(Template.parse(item.template) for item in presets)
        self.template = str(self._templates[0])
        repeats = any(parsed.copies > 1 for parsed in self._templates)
        text = " and ".join(map(str, self._templates))
        advice = f"{type(self).__name__} reads one copy of the text; use EchoModule for a template with several."
        check("template", text, self.repeats_text or not repeats, advice)
        advice = f"nothing is prepended, so leave {PREPEND} out, or use TokenPrependingModule."
        check("template", text, self.prepends or PREPEND not in text, advice)
        if self.reads_all_layers:
            preset = replace(preset, output_layer=None, final_norm=None)

        def chosen(name: str, value: Any, default: Any = None) -> Any:
            only = self.fixed.get(name, value)
            check(name, value, value in (None, only), f"{type(self).__name__} has {only!r} alone; leave it out.")
            return first_not_none(value, only, getattr(preset, name), self.defaults.get(name), default)

        pool_over = chosen("pool_over", pool_over, "text")
        self.pool_over: PoolOver = check_choice("pool_over", pool_over, "text", "all", "whole")
        self.rows: Rows = check_choice("rows", chosen("rows", rows, "all"), "all", "last")
        self.final_norm = check_flag("final_norm", chosen("final_norm", final_norm, True))
        self.normalize_text = check_flag("normalize_text", chosen("normalize_text", normalize_text, False))
        tokenization = first_not_none(tokenization, "pieces" if repeats else "whole")
        self.tokenization = check_choice("tokenization", tokenization, "whole", "pieces")
        advice = "the same tokens are put into several slots, so they are tokenized on their own; leave it out."
        check("tokenization", tokenization, tokenization == "pieces" or not repeats, advice)
        self.chat: Chat = check_choice("chat", chat, "turn", "conversation")
        self.deterministic = check_flag("deterministic", deterministic)
        self.prefix_caching = check_flag("prefix_caching", prefix_caching)

        super().__init__(model_name_or_path, **transformer_kwargs)
        #: Number of layers of the whole model.
        self.whole_depth = depth(self.model)
        default = chosen("output_layer", None)
        if isinstance(default, int):
            # The authors' models are deeper than some.
            default = max(default, -self.whole_depth)
        self.output_layer = resolve_output_layer(self.whole_depth, first_not_none(output_layer, default))
        # A model that runs elsewhere names it. Multimodal models have an attribute "language_model".
        kind: type[LanguageModel] = getattr(self.model, "language_model_class", LanguageModel)
        self._lm = kind(self.model, self.output_layer)
        self.model = self._lm.model
        self.model.config.use_cache = False
        # Weights of removed layers may be missing.
        self.missing_weights.check(self.model)
        layers = depth(self.model)
        if isinstance(bidirectional_layers, float) and 0 < bidirectional_layers <= 1:
            bidirectional_layers = max(1, int(bidirectional_layers * layers))
        self.bidirectional_layers = check_int("bidirectional_layers", bidirectional_layers, 0, layers)
        if self.bidirectional_layers:
            self.lm.resolve_both_ways(self.bidirectional_layers)
        self._warned_empty = False
        length = (transformer_kwargs.get("processor_kwargs") or {}).get("model_max_length")
        is_limited = first_not_none(transformer_kwargs.get("max_seq_length"), length) is not None
        self._warns_long = getattr(model_name_or_path, "_warns_long", True) and not is_limited
        # Raises if there is no room for a text.
        self.max_tokens()

    @property
    def lm(self) -> LanguageModel:
        """Language model that runs the passes, up to the output layer."""
        # torch.compile puts another object in the model's place.
        return self._lm if self._lm.model is self.model else self._lm.on(self.model)

    # Texts in

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens of one copy of a text; longer texts are truncated. None for no limit."""
        return self.max_tokens()

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        check_tokens("max_seq_length", value)
        # Modules that share the tokenizer keep their own length.
        self.processor = copy.copy(self._tokenizer)
        self._tokenizer.model_max_length = NO_LIMIT if value is None else value
        self._warns_long = False

    def get_embedding_dimension(self) -> int:
        return len(self.part_weights) * int(super().get_embedding_dimension())

    @property
    def modalities(self) -> list[Any]:
        return ["text", "message"] if getattr(self.tokenizer, "chat_template", None) else ["text"]

    @property
    def layouter(self) -> TextLayouter:
        """Templates with the tokenizer that the module has now."""
        positions = self.lm.positions
        if positions is not None:
            positions -= self.further_tokens
        whole = self.tokenization == "whole"
        return TextLayouter(self._tokenizer, self._templates, whole=whole, positions=positions, end=self.ends_in_eos)

    def max_tokens(self, prompt: str = "", length: int | None = None) -> int | None:
        """Return the number of tokens that one copy of a text may have; None for no limit.

        Args:
            prompt: Prompt before the text.
            length: ``max_length`` of a call.

        Raises:
            ValueError: If the prompt leaves no room for text.
        """
        limits = (self._tokenizer.model_max_length, length, self.layouter.room(prompt))
        limit = min(limit for limit in limits if limit is not None)
        return None if limit >= NO_LIMIT else int(limit)

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay out texts.

        Args:
            inputs: B texts: strings, or ``{"prompt": str, "text": str}``, or conversations, lists of
                ``{"role": str, "content": str}``.
            prompt: Text before each text, or in the template's ``{prompt}``: it is seen, and neither repeated nor
                pooled. A text's own prompt follows it, or replaces it in ``{prompt}``.
            processing_kwargs: ``{"text": {"max_length": n}}`` truncates to n tokens a copy in this call.
            **kwargs: Of what sentence-transformers passes, ``task`` chooses ``query_length`` or ``document_length``.

        Returns:
            Features of a :class:`~st_reba.text.layout.Layout` for each template.

        Raises:
            ValueError: If an input is none of these, or the prompt leaves no room for text.
        """
        if not inputs:
            return {}
        asked: dict[str, Any] = dict(self.processing_kwargs.get("text", {}))
        of_task = getattr(self, f"{kwargs.get('task')}_length", None)
        if of_task is not None:
            asked["max_length"] = of_task
        asked |= (processing_kwargs or {}).get("text", {})
        if unknown := sorted(set(asked) - {"max_length", "truncation", "padding"}):
            raise ValueError(f'processing_kwargs["text"] has {unknown}: use max_length alone.')
        length = check_tokens("max_length", asked.get("max_length"))
        layouts = self.lay_out(inputs, prompt or "", length)
        if self._warns_long and length is None:
            self._warn_if_long(layouts)
        if not self._warned_empty and bool(_is_empty(layouts).any()):
            self._warned_empty = True
            warnings.warn("A text without tokens is embedded as a zero vector. This warning comes once.", stacklevel=2)
        return {name: part for number, layout in enumerate(layouts) for name, part in layout.features(number).items()}

    def _warn_if_long(self, layouts: Sequence[Layout]) -> None:
        """Warn about a text that runs for minutes, the first time."""
        longest = max(int((layout.copy_index == 0).sum(dim=1).max()) for layout in layouts)
        if longest > self.LONG_TEXT:
            self._warns_long = False
            warnings.warn(
                f"A text of {longest:,} tokens is read as a whole, because max_seq_length is not set: on a CPU, that "
                f"takes minutes. Set max_seq_length={self.LONG_TEXT} or less to read its beginning, or a larger number "
                "to read all of it without this warning, which comes once.",
                stacklevel=3,
            )

    def lay_out(self, inputs: Sequence[Any], prompt: str = "", length: int | None = None) -> list[Layout]:
        """Return a layout of B inputs for each template.

        Args:
            inputs: As for :meth:`preprocess`, at least one.
            prompt: As for :meth:`preprocess`.
            length: Number of tokens that one copy of a text may have, besides other limits; None for no limit.
        """
        pairs = [self.split_input(given, prompt, index) for index, given in enumerate(inputs)]
        texts = [normalized(text) if self.normalize_text else text for _, text in pairs]
        layouter = self.layouter
        limit = min(layouter.tokenizer.model_max_length, NO_LIMIT if length is None else length)
        layouts = layouter(texts, [own_prompt for own_prompt, _ in pairs], limit)
        for layout in layouts:
            self.lm.check_ids(layout)
        return layouts

    def split_input(self, given: Any, prompt: str, index: int = 0) -> tuple[str, str]:
        """Return the prompt of an input, and its text.

        Args:
            given: As for :meth:`preprocess`.
            prompt: Prompt of all inputs.
            index: Number of the input in its batch, which sentence-transformers sorts, for an error message.

        Raises:
            ValueError: If it is none of the inputs that :meth:`preprocess` takes.
        """
        if isinstance(given, str):
            return prompt, given
        has_slot = any(template.takes_prompt for template in self._templates)
        if is_conversation(given):
            own, text = read_as(self._tokenizer, given, self.chat)
            if own and has_slot:
                raise ValueError(
                    f"Input {index} of its batch is a conversation, and the template {self.template!r} has a slot "
                    'where its earlier turns would be: use chat="conversation", which reads all of it as the text.'
                )
        elif isinstance(given, Mapping) and all(isinstance(given.get(name), str) for name in ("prompt", "text")):
            own, text = given["prompt"], given["text"]
        else:
            column = " Give a column as a list: list(column)." if hasattr(given, "to_numpy") else ""
            raise ValueError(
                f"Input {index} of its batch is a {type(given).__name__}: {type(self).__name__} embeds strings, "
                '{"prompt": ..., "text": ...} with two strings, or conversations, lists of {"role": ..., '
                f'"content": ...}}.{column}'
            )
        return (own or prompt if has_slot else prompt + own), text

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
        return self.lm.run(layout, *self.own_hooks(layout), *hooks, final_norm=self.final_norm, **inputs)

    def run_layers(self, layout: Layout, *hooks: Hook) -> list[Tensor]:
        """Run the language model once, and return what enters the first layer and what each layer returns.

        The last of these is the result of :meth:`run`. No other goes through the final norm.
        """
        return self.lm.run_layers(layout, *self.own_hooks(layout), *hooks, final_norm=self.final_norm)

    def own_hooks(self, layout: Layout) -> tuple[Hook, ...]:
        """Return the hooks of every pass of this module."""
        if not self.bidirectional_layers:
            return ()
        layers = depth(self.model)
        return (Bidirectional(range(layers - self.bidirectional_layers, layers), layout.attention_mask),)

    @property
    def reads_prefix(self) -> bool:
        """Whether the method reads or changes what precedes a text, so that it cannot be cached."""
        return self.pool_over == "whole" or self.bidirectional_layers > 0

    @property
    def caches_prefixes(self) -> bool:
        """Whether tokens that precede every text of a batch run once, where the model can continue them."""
        # On an accelerator no fused kernel gives weights behind a past.
        may = self.lm.device.type == "cpu" or not self.BYTES_PER_PAIR
        return may and self.prefix_caching and not (self.deterministic or self.reads_prefix)

    # Vectors out

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the method over a batch, a part at a time.

        Args:
            features: Result of :meth:`preprocess`.
            **kwargs: Ignored.

        Returns:
            The features with ``token_embeddings`` (B, n, D), and ``attention_mask`` and ``input_ids`` (B, n) to match.
            A text without tokens in any layout has one zero vector.
        """
        count = sum(name.startswith("copy_index") for name in features)
        given = [Layout.from_features(features, number) for number in range(count)]
        # Special tokens alone are not worth it.
        least = len(self.layouter.before)
        layouts = self.lm.behind_prefix(*given, least=least) if self.caches_prefixes else given
        parts = self.parts(layouts)
        if len(parts) == 1:
            # Concatenating would copy the vectors.
            vectors = self.read(*layouts)
        else:
            read = [self.read(*(layout.part(rows) for layout in layouts)) for rows in parts]
            vectors = TokenVectors.concatenate(read, parts)
        vectors = vectors.with_zeros(_is_empty(given))
        others = {name: value for name, value in features.items() if not name.startswith(FEATURES)}
        if self.deterministic:
            others[ONE_BY_ONE] = True
        return {**others, **vectors.extra, **vectors.features()}

    def parts(self, layouts: Sequence[Layout]) -> list[Tensor]:
        """Return the rows that run together. The result does not depend on it."""
        count, length = max((layout.input_ids.shape for layout in layouts), key=lambda shape: shape[1])
        size = 1 if self.deterministic else count
        if self.lm.device.type == "cpu":
            size = min(size, max(1, self.TOKENS_PER_THREAD * torch.get_num_threads() // length))
        if self.BYTES_PER_PAIR:
            columns = self.selected(layouts[0]).any(dim=0).nonzero().flatten().tolist() or [0]
            pairs = (columns[-1] + 1 - columns[0]) * length
            size = min(size, max(1, self.PASS_BYTES // (self.BYTES_PER_PAIR * pairs)))
        # Rows of about one length together: sentence-transformers' trainer does not sort them.
        order = layouts[0].lengths.argsort(descending=True, stable=True) if size < count else torch.arange(count)
        return list(order.chunk(ceil(count / size)))

    def read(self, layout: Layout) -> TokenVectors:
        """Return the vectors of a batch: the method. Here, the last hidden states of the selected tokens.

        Args:
            layout: B rows. A method with several templates takes a layout for each.
        """
        selected = self.selected(layout)
        hooks = self.lm.feed_forward_at(last_position(selected), selected.shape[1]) if self.rows == "last" else []
        return TokenVectors.pick(self.run(layout, *hooks), layout, selected)

    def selected(self, layout: Layout, *, every: bool = False) -> Tensor:
        """Return the tokens that ``pool_over`` and ``rows`` name, (B, N), boolean.

        Args:
            layout: B rows.
            every: Whether ``rows`` is ignored.
        """
        # The slot of token prepending holds no token.
        real = layout.attention_mask & (layout.copy_index >= NOT_TEXT)
        copies = (layout.copy_index >= self.copies_read[0]) & (layout.copy_index <= self.copies_read[-1])
        selected = real if self.pool_over == "whole" else copies
        if self.pool_over == "all":
            reached = copies.cummax(dim=1).values
            if self.copies_read[0] == 0 and layout.past is None:
                starts = (layout.copy_index >= 0).int().argmax(dim=1)
                reached = reached | (starts == len(self.layouter.before))[:, None]
            selected = reached & real
        return last_token_mask(selected) if self.rows == "last" and not every else selected


def _is_empty(layouts: Sequence[Layout]) -> Tensor:
    """Return whether each text has no token in any layout, (B,)."""
    return torch.stack([layout.is_empty for layout in layouts]).all(dim=0)
