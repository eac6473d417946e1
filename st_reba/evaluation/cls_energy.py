"""How much of what attention gathers lies in CLS (JTCSE, Equation 6)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sentence_transformers.base import BaseModel
from torch import Tensor
from transformers import PreTrainedModel

from ..lm.backbone import without_autocast
from ..modules.twin_tower import check_family, encoder_layers
from .evaluator import TabulatedEvaluator


class CLSEnergyEvaluator(TabulatedEvaluator):
    r"""The CLS energy weight of an encoder, or of two towers, on plain texts.

    .. math:: E_{CLS} = \frac{\lVert h_{cls} \rVert_2}{\lVert H \rVert_F}

    with H the context tensor of a layer, the values as its attention has weighed them, of all tokens but CLS and
    padding, and :math:`h_{cls}` its row for CLS (JTCSE, Equation 6). The mean over layers, towers and texts is the
    metric ``cls_energy``. The paper finds it higher where sentence embeddings are better.

    It falls with the length of the text, since H has a row for each token: compare models on the same texts and
    tokenizer.

    Args:
        texts: What is read; those without tokens are left out.
        name: Prefix of the metrics.
        batch_size: Texts at a time.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.

    Raises:
        ValueError: If there are no texts.
    """

    metric = "cls_energy"
    file = "cls_energy"

    def __init__(self, texts: Sequence[str], *, name: str = "", batch_size: int = 32, write_csv: bool = True) -> None:
        super().__init__(name=name, batch_size=batch_size, write_csv=write_csv)
        self.texts = [text for text in texts if text.strip()]
        if not self.texts:
            raise ValueError(f"CLSEnergyEvaluator needs texts, and the {len(texts)} given are empty.")

    def metrics_of(self, model: Any) -> dict[str, float]:
        return {"cls_energy": float(self.shares(model).mean())}

    def shares(self, model: BaseModel) -> Tensor:
        """(N,): the energy weight in each text; their mean is the metric, and they can be resampled.

        Args:
            model: Its first module is a :class:`st_reba.TwinTower`, or ST's ``Transformer`` with a BERT-like encoder.

        Raises:
            ValueError: If the model is not of BERT's build.
        """
        head: Any = model[0]
        towers = getattr(head, "towers", (head.model,))
        for tower in towers:
            check_family(tower.config, "The model", called="CLSEnergyEvaluator")
        # train() would put all modules in one mode: a layer that was frozen by eval() would drop out again.
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.inference_mode(), without_autocast(model.device):
                starts = range(0, len(self.texts), self.batch_size)
                batches = [self.texts[start : start + self.batch_size] for start in starts]
                return torch.cat([self._of_batch(model, towers, batch) for batch in batches])
        finally:
            for module, training in modes:
                module.training = training

    def _of_batch(self, model: Any, towers: Sequence[PreTrainedModel], texts: list[str]) -> Tensor:
        features = model.preprocess(texts)
        inputs = {name: features[name].to(model.device) for name in ("input_ids", "attention_mask")}
        # The weighted values (B, N, D) of each layer.
        contexts: list[Tensor] = []
        with ExitStack() as hooks:
            for tower in towers:
                for layer in encoder_layers(tower):
                    hook = layer.attention.self.register_forward_hook(
                        lambda module, given, output: contexts.append(output[0])
                    )
                    hooks.callback(hook.remove)
                tower(**inputs)
        return torch.stack([_energy(context, inputs["attention_mask"]) for context in contexts]).mean(dim=0).cpu()


def _energy(context: Tensor, mask: Tensor) -> Tensor:
    """(B,) of a context tensor (B, N, D), whose first token is CLS, and a mask (B, N)."""
    norms = context.float().norm(dim=-1) * mask
    return norms[:, 0] / norms[:, 1:].norm(dim=-1).clamp_min(torch.finfo(norms.dtype).tiny)
