"""PromptReps: the words by which a text can be found, as a language model would name them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from ..settings import Setting, whole
from ..text.words import STOP_WORDS, lower_case_tokens, word_token_ids
from .causal_transformer import CausalTransformer
from .lm_head import Head, at_its_end, scaled

#: How many tokens a text has of whose own words none is left.
WORDLESS = 10

TOP_K = whole("top_k", 1, says="give a number of tokens, 1 or more.")
EXPANSION = whole("expansion", 0, says="give a number of tokens, 0 or more.")
WORDS: Setting[Sequence[str] | None] = Setting(
    "stop_words",
    lambda words: (
        words is None
        or (isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(word, str) for word in words))
    ),
    "give a list of words, or None for the English ones.",
)


class PromptRepsModule(CausalTransformer):
    r"""A text's weights of the vocabulary's tokens: how likely each is the one word by which to find it.

    .. math:: w_t = \log(1 + \max(0, W_t v_N)), \quad t \in T(x)

    with the last state :math:`v_N` of a prompt that asks for one word, the rows :math:`W_t` of the language model's
    head, and the tokens T(x) of the text's own words, lower case and without stop words; of these the ``top_k`` with
    the highest weights. ``expansion`` adds that many other tokens of the vocabulary. All others are 0. A text whose
    words are all stop words, or that has none, has the ten tokens of the whole vocabulary with the highest weights.

    It is all of a ``SparseEncoder`` of sentence-transformers: a text's ``sentence_embedding`` is (V,), compared by the
    dot product. The pass is that of :class:`CausalTransformer` with the same template, whose vector is the dense half::

        from sentence_transformers import SparseEncoder
        model = SparseEncoder(modules=[PromptRepsModule(path)], prompts={"query": "Query: ", "document": "Passage: "})

    Args:
        model_name_or_path: A decoder-only language model's path or Hub id, or a loaded ``Transformer`` to share, whose
            head is tied or in the checkpoint that it came from.
        template: Text with one ``{text}``, at whose end a quotation mark opens; or a name in
            :data:`st_reba.TEMPLATES`.
        top_k: How many tokens of the text's words count, at most.
        expansion: How many tokens are added that are not of the text's words; 0: none. They are lower-case beginnings
            of words, of letters alone.
        stop_words: Words that do not count. None: some hundred English ones.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or there is no head.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    FILE: ClassVar[str] = "lm_head.safetensors"

    config_keys = [
        *(key for key in CausalTransformer.config_keys if key not in ("pool_over", "rows")),
        *("top_k", "expansion", "stop_words"),
    ]
    no_words = "weighs tokens of the vocabulary"
    method = "PromptReps"
    equation = r"w_t = \log(1 + \max(0, W_t v_N)), \quad t \in T(x)"
    citation: ClassVar[str] = (
        "Shengyao Zhuang, Xueguang Ma, Bevan Koopman, Jimmy Lin, Guido Zuccon: PromptReps: Prompting Large Language "
        "Models to Generate Dense and Sparse Representations for Zero-Shot Document Retrieval. EMNLP 2024."
    )
    cost = (
        "One pass over the text and the template around it, and a product of its last state with the head: the "
        "classical embedding of a text so much longer."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = "promptreps",
        top_k: int = 128,
        expansion: int = 0,
        stop_words: Sequence[str] | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        TOP_K.check(top_k)
        EXPANSION.check(expansion)
        WORDS.check(stop_words)
        settings = at_its_end(transformer_kwargs, type(self))
        super().__init__(model_name_or_path, template=template, **settings)
        self.head = Head(self.model, self.FILE, transformer_kwargs.get("model_kwargs"), source=model_name_or_path)
        self.top_k = top_k
        self.expansion = expansion
        self.stop_words = None if stop_words is None else list(stop_words)
        may_be_added = torch.zeros(len(self.head_weight), dtype=torch.bool)
        if expansion:
            may_be_added[lower_case_tokens(self._tokenizer, len(may_be_added))] = True
        self.register_buffer("_may_be_added", may_be_added, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the head, in the backbone's precision."""
        return self.head.of(self.model)

    def get_embedding_dimension(self) -> int:
        """V: the head's rows."""
        return len(self.head_weight)

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay texts out, as :meth:`CausalModule.preprocess`, and see which tokens their words have.

        Returns:
            What that returns, and ``word_ids`` (B, w), -1 where a text has fewer. The words are those of the whole
            text, however much of it is cut.
        """
        features = super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if features:
            _, texts = self._split(inputs, prompt or "")
            stop_words = STOP_WORDS if self.stop_words is None else self.stop_words
            ids = word_token_ids(self._tokenizer, texts, frozenset(stop_words))
            rows = [torch.tensor(own, dtype=torch.long) for own in ids]
            features["word_ids"] = pad_sequence(rows, batch_first=True, padding_value=-1)
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Weigh tokens.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: For the backbone's forward.

        Returns:
            The features with ``sentence_embedding`` (B, V), float32, nearly all 0, and with the prompt's last state as
            ``token_embeddings`` (B, 1, D). A text without tokens has zeros.
        """
        found = super().forward(features, **kwargs)
        word_ids = found.pop("word_ids")
        states = found["token_embeddings"][:, 0]
        return {**found, "sentence_embedding": self._weights(states, word_ids.to(states.device))}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and the head where it is not the backbone's own."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        self.head.save(output_path)

    def _weights(self, states: Tensor, word_ids: Tensor) -> Tensor:
        """(B, V), of states (B, D) and the tokens of texts' words, (B, w)."""
        states = states.float()
        weights = states.new_zeros(len(states), len(self.head_weight))
        real = (word_ids >= 0) & (word_ids < weights.shape[1])
        own = word_ids.where(real, 0)
        # Of the head's rows few are needed, and these can be multiplied in full precision.
        rows = self.head_weight[own].float()
        of_words = self._weighed(torch.einsum("bwd,bd->bw", rows, states)).masked_fill(~real, 0)
        weights.scatter_add_(1, own, _highest(of_words, self.top_k))
        wordless = ~real.any(dim=1, keepdim=True)
        if self.expansion or bool(wordless.any()):
            every = self._weighed(linear(states.to(self.head_weight), self.head_weight).float())
            weights = torch.where(wordless, _highest(every, WORDLESS), weights)
            is_own = torch.zeros_like(every).scatter_add_(1, own, real.to(every.dtype)) > 0
            others = every.masked_fill(is_own | ~self._may_be_added, 0)
            weights = torch.maximum(weights, _highest(others, self.expansion))
        return weights

    def _weighed(self, logits: Tensor) -> Tensor:
        return torch.log1p(torch.relu(scaled(logits, self.model.config)))


def _highest(weights: Tensor, count: int) -> Tensor:
    """The same with zeros in place of all but the highest of each row."""
    if weights.shape[1] <= count:
        return weights
    values, indices = weights.topk(count, dim=1)
    return torch.zeros_like(weights).scatter(1, indices, values)
