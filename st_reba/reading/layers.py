"""Embeddings after each layer of a language model, from one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sentence_transformers.base import BaseModel
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ..lm.passes import Hook
from ..modules import AttentionPoolingModule, CausalTransformer, EchoModule, InputEmbeddings
from ..text.layout import Layout


def reads_one_layer(module: type[nn.Module]) -> bool:
    """Return whether the embeddings of a class of modules depend on the states of one layer alone."""
    reads_more = issubclass(module, (AttentionPoolingModule, InputEmbeddings))
    return issubclass(module, (CausalTransformer, EchoModule)) and not reads_more


class LayerReader:
    r"""Reader of a model's embeddings after each layer of its backbone.

    .. math:: v^{(l)} = \mathrm{norm}(h^{(l)}), \quad l = 0, \dots, L

    where :math:`h^{(l)}` is the residual stream after layer l and norm is the backbone's final norm, or the identity if
    the module has no final norm. This is the embedding of a model without its layers above l (the degradation
    experiment of the BeLLM paper, section 3.1), without running it L times. Layer 0 is the input of the first layer:
    the input embeddings, plus position embeddings in some architectures. Layer L is the embedding of the model. The
    module selects the tokens (copy, ``pool_over``, padding) as always, and the later modules of the pipeline follow.

    The states of all layers are in memory for one batch at a time, L + 1 times (B, N, D).

    Args:
        model: A model whose first module is a ``CausalTransformer`` or an ``EchoModule``. It is set to inference mode,
            as by ``encode``.

    Attributes:
        count: Number of layers with the input embeddings, L + 1.

    Raises:
        ValueError: If the first module is another one, or the backbone's earlier layers cannot be read like its last.
    """

    def __init__(self, model: BaseModel) -> None:
        module: Any = model[0]
        if not reads_one_layer(type(module)):
            raise ValueError(
                f"The model's first module is {type(module).__name__}, whose embedding depends on more than the states "
                "of one layer. Use a model with CausalTransformer or EchoModule."
            )
        self.model = model.eval()
        self.count = len(module.lm.layers) + 1
        self._final_norm = module.lm.final_norm if module.final_norm else nn.Identity()

    @torch.inference_mode()
    def features(self, texts: Sequence[str], prompt: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the output of the first module for one batch after each layer.

        Args:
            texts: B strings, at least one.
            prompt: Prompt, as for ``encode``.

        Yields:
            ``token_embeddings`` (B, n, D) and ``attention_mask`` (B, n) for each of L + 1 layers, from layer 0.
        """
        self.model.eval()
        inputs = batch_to_device(self.model.preprocess(list(texts), prompt=prompt), self.model.device)
        # The method selects, moves and sums states: it does the same to all layers at once where they are one tensor.
        module: Any = copy.copy(self.model[0])
        widths: list[int] = []

        def side_by_side(layout: Layout, *hooks: Hook) -> Tensor:
            *below, last = module.run_layers(layout, *hooks)
            layers = [*(self._final_norm(states).to(last.device) for states in below), last]
            widths[:] = [states.shape[-1] for states in layers]
            return torch.cat(layers, dim=-1)

        module.run = side_by_side
        output = module(inputs)
        # The last layer is the module's output itself, equal to that of encode to the bit.
        for states in output["token_embeddings"].split(widths, dim=-1):
            yield {**output, "token_embeddings": states.contiguous()}

    @torch.inference_mode()
    def embeddings(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """Return the embeddings of one batch after each layer, (L + 1, B, D), on the CPU."""
        embeddings = []
        for features in self.features(texts, prompt):
            for module in list(self.model.children())[1:]:
                features = module(features)
            embeddings.append(features["sentence_embedding"].cpu())
        return torch.stack(embeddings)
