"""PromptReps: weights of words by which to find a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from ..settings import check, check_int
from ..text.tokens import STOP_WORDS, lower_case_tokens, word_token_ids
from .base import CausalModule, ModelSource
from .causal import CausalTransformer
from .lm_head import own_head, scale_logits

#: Number of tokens with a weight for a text that has no words except stop words.
WORDLESS = 10


class PromptRepsModule(CausalTransformer):
    r"""Weights of the vocabulary's tokens for a text, each from its probability as the one word by which to find it.

    .. math:: w_t = \log(1 + \max(0, W_t v_N)), \quad t \in T(x)

    with the last state :math:`v_N` of a prompt that asks for one word, the rows :math:`W_t` of the language model's
    head, and the tokens T(x) of the text's words, in lower case and without stop words; of these, the ``top_k`` with
    the highest weights. ``expansion`` adds that many other tokens of the vocabulary. All other weights are 0. A text
    without words, or with stop words alone, has the ten tokens of the whole vocabulary with the highest weights.

    The module is a complete ``SparseEncoder``: a text's ``sentence_embedding`` is (V,), compared by dot product. The
    pass is that of :class:`CausalTransformer` with the same template, whose vector is the dense half::

        from sentence_transformers import SparseEncoder
        model = SparseEncoder(modules=[PromptRepsModule(path)], prompts={"query": "Query: ", "document": "Passage: "})

    Args:
        model_name_or_path: As for :class:`CausalModule`. The head must be tied, or in the checkpoint.
        template: Text with one ``{text}``, at whose end a quotation mark opens; or the name of a template.
        top_k: Largest number of tokens of the text's words that have a weight.
        expansion: Number of further tokens with a weight: beginnings of words, of lower-case letters alone.
        stop_words: Words that have no weight. None: about a hundred English ones.
        **settings: As for :class:`CausalModule`.

    Raises:
        ValueError: If a setting is out of range, or there is no head.
    """

    FILE: ClassVar[str] = "lm_head.safetensors"
    #: Head, (V, D); None if it is the input embeddings.
    head: Tensor | None

    config_keys = [*CausalModule.config_keys, "template", "top_k", "expansion", "stop_words"]
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
    has_token_vectors = False
    fixed = {"pool_over": "all", "rows": "last"}

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        template: str = "promptreps",
        top_k: int = 128,
        expansion: int = 0,
        stop_words: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        are_words = isinstance(stop_words, (list, tuple)) and all(isinstance(word, str) for word in stop_words)
        check("stop_words", stop_words, stop_words is None or are_words, "give a list of words, or None for English.")
        self.top_k, self.expansion = check_int("top_k", top_k, 1), check_int("expansion", expansion, 0)
        super().__init__(model_name_or_path, template=template, **settings)
        head = own_head(self.model, self.FILE, settings.get("model_kwargs"), model_name_or_path)
        self.register_buffer("head", head, persistent=False)
        self.stop_words = None if stop_words is None else list(stop_words)
        may_be_added = torch.zeros(len(self.head_weight), dtype=torch.bool)
        if expansion:
            may_be_added[lower_case_tokens(self._tokenizer, len(may_be_added))] = True
        self.register_buffer("_may_be_added", may_be_added, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """Head in the backbone's precision, (V, D)."""
        return cast(Tensor, self.lm.embeddings.weight) if self.head is None else self.head

    def get_embedding_dimension(self) -> int:
        """Return V."""
        return len(self.head_weight)

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay out texts, and find the tokens of their words.

        Returns:
            Features as of :meth:`CausalModule.preprocess`, and ``word_ids`` (B, w), padded with -1. The words are those
            of the whole text, even if it is truncated.
        """
        features = super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if features:
            texts = [self.split_input(given, prompt or "")[1] for given in inputs]
            stop_words = STOP_WORDS if self.stop_words is None else self.stop_words
            ids = word_token_ids(self._tokenizer, texts, frozenset(stop_words))
            rows = [torch.tensor(of_text, dtype=torch.long) for of_text in ids]
            features["word_ids"] = pad_sequence(rows, batch_first=True, padding_value=-1)
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Weight tokens.

        Args:
            features: Result of :meth:`preprocess`.
            **kwargs: Ignored.

        Returns:
            The features with ``sentence_embedding`` (B, V), float32, nearly all 0, and with the prompt's last state as
            ``token_embeddings`` (B, 1, D). A text without tokens has zeros.
        """
        features = super().forward(features, **kwargs)
        word_ids = features.pop("word_ids")
        states = features["token_embeddings"][:, 0]
        return {**features, "sentence_embedding": self._weights(states, word_ids.to(states.device))}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and the head if it is not the input embeddings."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        if self.head is not None:
            save_file({"weight": self.head.detach().cpu().contiguous()}, Path(output_path, self.FILE), {"format": "pt"})

    def _weights(self, states: Tensor, word_ids: Tensor) -> Tensor:
        """Return weights (B, V), given states (B, D) and the tokens of the texts' words, (B, w)."""
        states = states.float()
        weights = states.new_zeros(len(states), len(self.head_weight))
        real = (word_ids >= 0) & (word_ids < weights.shape[1])
        ids = word_ids.where(real, 0)
        # These are few rows of the head, so that they can be multiplied in full precision.
        logits = torch.einsum("bwd,bd->bw", self.head_weight[ids].float(), states)
        weights.scatter_add_(1, ids, _highest(self._weight(logits).masked_fill(~real, 0), self.top_k))
        is_wordless = ~real.any(dim=1, keepdim=True)
        if self.expansion or bool(is_wordless.any()):
            every = self._weight(linear(states.to(self.head_weight), self.head_weight).float())
            weights = torch.where(is_wordless, _highest(every, WORDLESS), weights)
            is_in_text = torch.zeros_like(every).scatter_add_(1, ids, real.to(every.dtype)) > 0
            others = every.masked_fill(is_in_text | ~self._may_be_added, 0)
            weights = torch.maximum(weights, _highest(others, self.expansion))
        return weights

    def _weight(self, logits: Tensor) -> Tensor:
        return torch.log1p(torch.relu(scale_logits(logits, self.model.config)))


def _highest(weights: Tensor, count: int) -> Tensor:
    """Return weights with zeros in place of all but the ``count`` highest of each row."""
    values, indices = weights.topk(min(count, weights.shape[1]), dim=1)
    return torch.zeros_like(weights).scatter(1, indices, values)
