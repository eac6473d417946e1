"""States of texts on the disk: a frozen model reads each text once, whatever is trained on what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from ..evaluation.embedded import Embedded, TensorCache
from ..lm.backbone import device
from ..lm.fingerprint import fingerprint
from ..modules import LayerStates


class StatesCache(Embedded):
    """What :class:`st_reba.modules.LayerStates` reads of texts, kept in float16 in a directory.

    A file holds the states of some texts that were added together. Its name tells the model and its settings from
    others, so that one directory serves many models: see :class:`st_reba.evaluation.embedded.TensorCache`.

    A text takes 2 L D bytes: 48 KiB with GPT-2 medium. A state is stored with a scale of its own, a power of two, since
    the residual stream of some models leaves the range of float16; what is read back is within 2^-11 of the largest
    number in the state.

    Args:
        directory: Where the files of all models lie.
        module: The model whose states they are.
        chunk_size: Texts that are kept as one file.
        batch_size: Texts that the model reads at a time.
        on_texts: Called with the number of texts whenever some more are known.
    """

    def __init__(
        self,
        directory: str | Path,
        module: LayerStates,
        *,
        chunk_size: int = 256,
        batch_size: int = 64,
        on_texts: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.module, self._batch_size = module, batch_size
        # How the module lays a text out goes in with what it is.
        layout = {name: part.tolist() for name, part in module.preprocess(["a"]).items()}
        key = [
            fingerprint(module.model, module.tokenizer, module.max_seq_length), module.pool_over,
            module.bidirectional_layers, module.normalize_text, module.tokenization, layout,
        ]  # fmt: skip
        cache = TensorCache(Path(directory))

        def kept(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            found = cache.get([key, texts], lambda: self._read(texts))
            on_texts(len(texts))
            return found

        super().__init__(kept, chunk_size)

    def states(self, texts: Sequence[str]) -> Tensor:
        """The states of texts, (B, L, D), float32, on the CPU; those that were not added are read first.

        Raises:
            ValueError: If a state is not finite, so that nothing could be learnt from it.
        """
        return self.of("states", texts).float() * self.of("scales", texts)[..., None]

    @torch.inference_mode()
    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        batches = []
        for first in range(0, len(texts), self._batch_size):
            batch = texts[first : first + self._batch_size]
            features = batch_to_device(self.module.eval().preprocess(batch), device(self.module.model))
            batches.append(self.module(features)["layer_states"].float().cpu())
            if not batches[-1].isfinite().all():
                bad = next(text for text, own in zip(batch, batches[-1], strict=True) if not own.isfinite().all())
                raise ValueError(
                    f"The states of {bad!r} are not finite: the model overflows in {self.module.model.dtype}. Load it "
                    "in float32 or bfloat16."
                )
        states = torch.cat(batches)
        scales = torch.exp2(torch.frexp(states.abs().amax(dim=-1)).exponent.float())
        return {"states": (states / scales[..., None]).half(), "scales": scales}


class ModelOnStates(SentenceTransformer):
    """What stands behind :class:`st_reba.modules.LayerStates` in a pipeline, as a model of its own.

    It trains and encodes like any other, and takes the states of texts from a cache.
    """

    _cache: StatesCache

    @classmethod
    def of(cls, module: nn.Module, cache: StatesCache) -> ModelOnStates:
        """Return the model of one module, which takes ``layer_states``."""
        model = cls(modules=[module])
        model._cache = cache
        return model

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """``layer_states`` (B, L, D), and ``input_ids``, by which ST's trainer knows a column of texts: (B,) numbers.

        Raises:
            ValueError: If there is a prompt: the cache holds texts as its module lays them out, without one.
        """
        if prompt:
            raise ValueError(f"prompt={prompt!r}: cached states have none. Put it into the template of LayerStates.")
        return {"input_ids": torch.arange(len(inputs)), "layer_states": self._cache.states(inputs)}
