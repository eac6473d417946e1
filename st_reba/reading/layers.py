"""What a model would embed after each layer of its language model, from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sentence_transformers.base import BaseModel
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ..lm.anatomy import final_norm, layer_paths
from ..lm.run import recording
from ..modules import AttentionPoolingModule, CausalTransformer, EchoModule, InputEmbeddings


def reads_one_layer(module: type[nn.Module]) -> bool:
    """Whether what modules of a class embed is one reading of one layer's states, so that each layer can be read so."""
    reads_otherwise = issubclass(module, (AttentionPoolingModule, InputEmbeddings))
    return issubclass(module, (CausalTransformer, EchoModule)) and not reads_otherwise


class LayerReader:
    r"""Reads a model after each layer of its backbone, as its own module reads the last one.

    .. math:: v^{(l)} = \mathrm{norm}(h^{(l)}), \quad l = 0, \dots, L

    where :math:`h^{(l)}` is the residual stream after layer l and norm is the backbone's final norm, or nothing if the
    module reads without it: what is left of a model whose layers above l were removed (the degradation experiment of
    the BeLLM paper, section 3.1), without running it L times. Layer 0 is what enters the first layer: the input
    embeddings, with those of the positions where an architecture adds them. Layer L is what the model embeds. Which
    tokens are read (copy, ``pool_over``, padding) is the module's choice, and the later modules of the pipeline are
    applied as they are.

    A batch's states of all layers are held at once, L + 1 times (B, N, D), and nothing from one batch to the next.

    Args:
        model: A model whose first module is a ``CausalTransformer`` or an ``EchoModule``. It is set to inference, as
            by ``encode``.

    Attributes:
        count: How many readings there are, L + 1.

    Raises:
        ValueError: If the first module is another one, or the backbone's earlier layers cannot be read like its last.
    """

    def __init__(self, model: BaseModel) -> None:
        module: Any = model[0]
        if not reads_one_layer(type(module)):
            raise ValueError(
                f"The model's first module is {type(module).__name__}, whose embedding is not one reading of one "
                "layer's states. Use a model with CausalTransformer or EchoModule to look at it layer by layer."
            )
        self.model = model.eval()
        self.count = len(layer_paths(module.model)) + 1
        self._final_norm = final_norm(module.model) if module.final_norm else nn.Identity()

    @torch.inference_mode()
    def features(self, texts: Sequence[str], prompt: str | None = None) -> Iterator[dict[str, Any]]:
        """What the first module hands on for one batch, after each layer in turn.

        Args:
            texts: B strings, at least one.
            prompt: As for ``encode``.

        Yields:
            L + 1 times ``token_embeddings`` (B, n, D) and ``attention_mask`` (B, n), layer 0 first.
        """
        self.model.eval()
        inputs = batch_to_device(self.model.preprocess(list(texts), prompt=prompt), self.model.device)
        module: Any = self.model[0]
        with recording(module.model, layer_paths(module.model), self._final_norm) as record:
            found = module(inputs)
        # The last is the module's own reading, not a repetition of it: what encode gives, to the bit.
        for states in record.split(found["token_embeddings"]):
            yield {**found, "token_embeddings": states}

    @torch.inference_mode()
    def embeddings(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """What the whole pipeline gives for one batch after each layer: (L + 1, B, D), on the CPU."""
        embedded = []
        for features in self.features(texts, prompt):
            for module in list(self.model.children())[1:]:
                features = module(features)
            embedded.append(features["sentence_embedding"].cpu())
        return torch.stack(embedded)
