"""BeLLM: the last layers attend both ways.

Xianming Li, Jing Li: BeLLM: Backward Dependency Enhanced Large Language Model for Sentence Embeddings. NAACL 2024.
"""

from __future__ import annotations

from typing import Any

from ..settings import check
from .base import ModelSource
from .causal import CausalTransformer


class BidirectionalLastLayer(CausalTransformer):
    r"""The last m layers attend to later tokens too, padding apart.

    .. math:: H = \mathrm{layers}_{>L-m}^{\leftrightarrow}(\mathrm{layers}_{\le L-m}^{\rightarrow}(x))

    (BeLLM, section 3.) With m = 1 use ``Pooling("mean")``: the last token sees all others in any case. The ``avg`` of
    the authors' training command is the mean over every token: ``pool_over="whole"``.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        bidirectional_layers: Number of layers, m >= 1, or a share of the layers.
        template: Text with one slot, or a name.
        **settings: As for :class:`CausalModule`. ``pool_over`` None: ``"all"``.
    """

    method = "Bidirectional last layer"
    equation = r"e_i = v_i, \quad \text{the last } m \text{ layers without the causal mask}"
    citation = (
        "Xianming Li, Jing Li: BeLLM: Backward Dependency Enhanced Large Language Model for Sentence Embeddings. "
        "NAACL 2024."
    )
    defaults = {"pool_over": "all"}

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        bidirectional_layers: int | float = 1,
        template: str = "representative-word",
        **settings: Any,
    ) -> None:
        advice = "give 1 or more, or use CausalTransformer for none."
        check("bidirectional_layers", bidirectional_layers, bidirectional_layers != 0, advice)
        super().__init__(model_name_or_path, bidirectional_layers=bidirectional_layers, template=template, **settings)
