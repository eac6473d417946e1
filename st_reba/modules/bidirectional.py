"""BeLLM's bidirectional last layer."""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch import nn

from .causal_module import PoolOver
from .causal_transformer import CausalTransformer


class BidirectionalLastLayer(CausalTransformer):
    r"""The last m layers attend to later tokens too, padding apart; the layers below stay as they are.

    .. math:: H = \mathrm{layers}_{>L-m}^{\leftrightarrow}(\mathrm{layers}_{\le L-m}^{\rightarrow}(x))

    (BeLLM, section 3.) The sentence is read at the end of a prompt that asks for one word, so by default everything
    from the text to the end of the template is handed on. With m = 1 use ``Pooling("mean")``: the last token sees all
    others in any case, so ``Pooling("lasttoken")`` gives what :class:`CausalTransformer` gives. The ``avg`` of the
    authors' training command is the mean over every token, the template's head included: ``pool_over="whole"``.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        bidirectional_layers: m >= 1.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`; see :class:`CausalTransformer`.
        pool_over: ``"all"``, ``"whole"`` or ``"text"``; see :class:`CausalModule`. None: ``"all"``.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If m is out of range, or the architecture cannot attend both ways, or the model is not causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    method = "Bidirectional last layer"
    equation = r"e_i = v_i, \quad \text{the last } m \text{ layers without the causal mask}"
    citation = (
        "Xianming Li, Jing Li: BeLLM: Backward Dependency Enhanced Large Language Model for Sentence Embeddings. "
        "NAACL 2024."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        bidirectional_layers: int = 1,
        template: str = "representative-word",
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        if bidirectional_layers == 0:
            raise ValueError("bidirectional_layers=0: give 1 or more, or use CausalTransformer for none.")
        super().__init__(
            model_name_or_path,
            bidirectional_layers=bidirectional_layers,
            template=template,
            pool_over="all" if pool_over is None else pool_over,
            **transformer_kwargs,
        )
