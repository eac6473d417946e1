"""How much of what attention gathers lies in CLS (JTCSE, Equation 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sentence_transformers.base import BaseModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..lm.backbone import without_autocast
from ..modules.twin_tower import check_family, encoder_layers
from .evaluator import Evaluator


class CLSEnergyEvaluator(Evaluator):
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

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model.

        Args:
            model: Its first module is a :class:`st_reba.TwinTower`, or ST's ``Transformer`` with a BERT-like encoder.
            output_path: Where to append to ``cls_energy[_<name>]_results.csv``.
            epoch: As in ST.
            steps: As in ST.

        Raises:
            ValueError: If the model is not of BERT's build.
        """
        metrics = {"cls_energy": float(self.shares(model).mean())}
        return self.noted(model, metrics, output_path, epoch, steps)

    def shares(self, model: BaseModel) -> Tensor:
        """(N,): the energy weight in each text; their mean is the metric, and they can be resampled."""
        head: Any = model[0]
        towers = getattr(head, "towers", (head.model,))
        for tower in towers:
            check_family(tower.config, "The model", called="CLSEnergyEvaluator")
        # train() would put all modules in one mode: a layer that was frozen by eval() would drop out again.
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.inference_mode(), without_autocast(model.device):
                return torch.cat([self._of_batch(model, towers, batch) for batch in self._batches()])
        finally:
            for module, training in modes:
                module.training = training

    def _batches(self) -> list[list[str]]:
        return [self.texts[start : start + self.batch_size] for start in range(0, len(self.texts), self.batch_size)]

    def _of_batch(self, model: Any, towers: Sequence[PreTrainedModel], texts: list[str]) -> Tensor:
        features = model.preprocess(texts)
        inputs = {name: features[name].to(model.device) for name in ("input_ids", "attention_mask")}
        energies = []
        for tower in towers:
            with watching_contexts(tower) as contexts:
                tower(**inputs)
            energies += [_energy(context, inputs["attention_mask"]) for context in contexts]
        return torch.stack(energies).mean(dim=0).cpu()


def _energy(context: Tensor, mask: Tensor) -> Tensor:
    """(B,) of a context tensor (B, N, D), whose first token is CLS, and a mask (B, N)."""
    norms = context.float().norm(dim=-1) * mask
    return norms[:, 0] / norms[:, 1:].norm(dim=-1).clamp_min(torch.finfo(norms.dtype).tiny)


@contextmanager
def watching_contexts(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the context tensors of each layer, the weighted values (B, N, D), of what runs inside."""
    contexts: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: tuple[Tensor, ...]) -> None:
        contexts.append(output[0])

    with ExitStack() as hooks:
        for layer in encoder_layers(model):
            hooks.callback(layer.attention.self.register_forward_hook(keep).remove)
        yield contexts
