"""Reranking: a language model that says which of two statements holds of a query and a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from torch import nn

from ..text.templates import SLOT, around_slots
from ..text.tokens import tokenized
from .causal_transformer import CausalTransformer
from .lm_head import Head, at_its_end, scaled

QUERY, DOCUMENT = "{query}", "{document}"

#: A choice between two statements. Which words ask for a verdict ("yes", "true", "right") moves it, as Zhu et al. find;
#: the letters of a multiple-choice question take no side.
CHOICE = (
    "Query: {query}\nDocument: {document}\nWhich of the two statements holds?\nA. The document answers the query.\n"
    "B. The document does not answer the query.\nAnswer:"
)
#: What may follow it: that the document is relevant, and that it is not.
CHOICES = (" A", " B")


class RerankModule(CausalTransformer):
    r"""The two logits by which a language model chooses between two statements of a query and a document.

    .. math:: s(q, d) = (W_{\text{A}} - W_{\text{B}}) v_N

    with the last state :math:`v_N` of a prompt that holds both texts and ends in a two-way choice, and the rows of the
    language model's head for the tokens of its two answers, in float32. :func:`cross_encoder` makes a ``CrossEncoder``
    of sentence-transformers of it, whose ``LogitScore`` takes the difference. A long document is cut, and neither the
    query before it nor what stands behind it.

    Args:
        model_name_or_path: A decoder-only language model's path or Hub id, or a loaded ``Transformer`` to share, whose
            head is tied or in the checkpoint that it came from.
        template: Text with one ``{query}`` and, behind it, one ``{document}``, and something behind that.
        choices: What may follow it: that the document is relevant, and that it is not. Each adds one token.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``; ``max_seq_length`` counts tokens of
            the document.

    Raises:
        ValueError: If the template or the choices are not that, or there is no head.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    FILE: ClassVar[str] = "choices.safetensors"

    config_keys = [*(key for key in CausalTransformer.config_keys if key not in ("pool_over", "rows")), "choices"]
    method = "Reranking"
    equation = r"s(q, d) = (W_A - W_B) v_N"
    citation: ClassVar[str] = (
        "Yuhan Zhu, Xiangyu Zeng, Chenting Wang, Xinhao Li, Yicheng Xu, Ziang Yan, Yi Wang, Limin Wang: FreeRet: MLLMs "
        "as Training-Free Retrievers. arXiv:2509.24621, 2025."
    )
    cost = "One pass over the query, the document and the question for each pair of a query and a document."

    def __init__(
        self,
        model_name_or_path: str | nn.Module,
        *,
        template: str = CHOICE,
        choices: Sequence[str] = CHOICES,
        **transformer_kwargs: Any,
    ) -> None:
        self._before, self._between, behind = around_slots(template, QUERY, DOCUMENT, "what asks for the answer")
        listed = list(choices) if isinstance(choices, Sequence) and not isinstance(choices, str) else []
        if len(listed) != 2 or not all(isinstance(each, str) for each in listed):
            raise ValueError(
                f"choices={choices!r}: give two answers, that the document is relevant and that it is not."
            )
        settings = at_its_end(transformer_kwargs, type(self))
        super().__init__(model_name_or_path, template=SLOT + behind, **settings)
        self.template = template
        self.choices = listed
        self.head = Head(
            self.model, self.FILE, transformer_kwargs.get("model_kwargs"), self._rows(behind), model_name_or_path
        )

    def _rows(self, behind: str) -> list[int]:
        """The tokens that the choices add behind the end of the prompt."""
        asked = tokenized(self._tokenizer, [behind, *(behind + choice for choice in self.choices)])
        ends = [tokens.ids[len(asked[0].ids) :] for tokens in asked[1:]]
        alike = all(tokens.ids[: len(asked[0].ids)] == asked[0].ids for tokens in asked[1:])
        if not alike or [len(end) for end in ends] != [1, 1] or ends[0] == ends[1]:
            raise ValueError(
                f"choices={self.choices!r}: behind {behind[-20:]!r} each is to add one token, another than the other; "
                f"they add {ends}. Give answers that this tokenizer knows as one token, with the blank before them."
            )
        return [end[0] for end in ends]

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Lay pairs out.

        Args:
            inputs: B pairs of a query and a document.
            prompt: Literal text at the front, such as a description of the task.
            processing_kwargs: As for :meth:`CausalModule.preprocess`; ``max_length`` is the document's.
            **kwargs: What ST passes to every module.

        Returns:
            As :meth:`CausalModule.preprocess`.

        Raises:
            ValueError: If an input is no pair of strings, or a query leaves no room for a document.
        """
        pairs = []
        for index, given in enumerate(inputs):
            if not isinstance(given, (list, tuple)) or [type(each) for each in given] != [str, str]:
                raise ValueError(f"Input {index} is {given!r:.80}: give pairs of a query and a document, two strings.")
            pairs.append({"prompt": f"{self._before}{given[0]}{self._between}", "text": given[1]})
        return super().preprocess(pairs, prompt, processing_kwargs, **kwargs)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Ask which statement holds.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: For the backbone's forward.

        Returns:
            The features with ``choice_logits`` (B, 1, 2), float32. A document without tokens has two zeros.
        """
        found = super().forward(features, **kwargs)
        states = found["token_embeddings"].float()
        # The difference of two like numbers: not in half precision.
        logits = scaled(states @ self.head.of(self.model).float().T, self.model.config)
        return {**found, "choice_logits": logits}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and the two rows of the head."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        self.head.save(output_path)


def cross_encoder(module: RerankModule, **kwargs: Any) -> CrossEncoder:
    """A ``CrossEncoder`` that ranks documents by the difference of the two logits.

    Args:
        module: What asks.
        **kwargs: For ``CrossEncoder``, such as ``device``.
    """
    score = LogitScore(true_token_id=0, false_token_id=1, module_input_name="choice_logits")
    # A sigmoid would make all confident answers 1.
    return CrossEncoder(modules=[module, score], activation_fn=nn.Identity(), **kwargs)
