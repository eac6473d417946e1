"""A language model that is asked, at the end of a prompt, which token comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Module, Transformer
from torch import Tensor
from torch.nn.functional import linear

from .causal_transformer import CausalTransformer
from .lm_head import check_plain, head_blocks
from .saved_settings import hub_arguments
from .stored import check_magnitudes


class HeadedModule(CausalTransformer):
    """Base of the modules that read the language model's head, too.

    A backbone has no head. Where the head is tied to the input embeddings, they are it; else it is read from the
    language model's checkpoint, and saved beside the backbone, in ``lm_head.safetensors``.

    Args:
        model_name_or_path: As for :class:`CausalTransformer`. A shared one is asked where it was loaded from.
        template: As for :class:`CausalTransformer`: the state of its last token is read.
        **transformer_kwargs: As for :class:`CausalModule`.

    Raises:
        ValueError: If there is no head, or it has a bias, or what else :class:`CausalTransformer` refuses.
    """

    FILE: ClassVar[str] = "lm_head.safetensors"

    #: (V, D), or the rows that are read; None: it is the input embeddings.
    head: Tensor | None

    def __init__(self, model_name_or_path: str | Transformer, *, template: str, **transformer_kwargs: Any) -> None:
        where = hub_arguments(transformer_kwargs.get("model_kwargs"))
        settings = {name: transformer_kwargs.pop(name, value) for name, value in _AT_ITS_END.items()}
        if settings != _AT_ITS_END:
            raise ValueError(
                f'{type(self).__name__} reads the last token of its prompt: pool_over="all" and rows="last" are all '
                "it can do; leave them out."
            )
        super().__init__(model_name_or_path, template=template, **settings, **transformer_kwargs)
        check_plain(self.model.config)
        # Another module may have kept the rows of other tokens.
        shares = isinstance(model_name_or_path, HeadedModule) and model_name_or_path._rows() == self._rows()
        head = cast(HeadedModule, model_name_or_path).head if shares else self._found(where)
        self.register_buffer("head", head, persistent=False)

    def _rows(self) -> Sequence[int] | None:
        """The tokens whose rows are read; None: all, which need not be kept where they are the input embeddings."""
        return None

    def _found(self, where: Mapping[str, Any]) -> Tensor | None:
        """The head, in the backbone's precision, from where it was saved or from the language model."""
        rows = self._rows()
        file = self._file(where)
        if file is not None:
            kept = load_file(file)
            weight = kept.get("weight")
            count = None if rows is None else len(rows)
            if weight is None or weight.ndim != 2 or weight.shape[1] != self._width or count not in (None, len(weight)):
                raise ValueError(f"{file} has no head of this model: save the model again.")
            check_magnitudes({"weight": weight}, type(self).__name__)
        elif rows is None and self._is_tied:
            return None
        else:
            asked = {"cache_folder" if name == "cache_dir" else name: value for name, value in where.items()}
            blocks = head_blocks(self, **asked)
            weight = torch.cat(list(blocks)) if rows is None else _picked(blocks, rows)
        return weight.to(self.model.device, self.model.dtype)

    def _file(self, where: Mapping[str, Any]) -> str | None:
        """Where it was saved, if it was."""
        path = self.model.config.name_or_path
        asked = {"cache_folder" if name == "cache_dir" else name: value for name, value in where.items()}
        return Module.load_file_path(path, self.FILE, **asked) if path else None

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self.model.config.get_text_config(decoder=True), "tie_word_embeddings", False))

    @property
    def _width(self) -> int:
        return int(CausalTransformer.get_embedding_dimension(self))

    @property
    def head_weight(self) -> Tensor:
        """(V, D), or the rows that are read."""
        return cast(Tensor, self.model.get_input_embeddings().weight) if self.head is None else self.head

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits as the language model has them, of products with its head."""
        config = self.model.config.get_text_config(decoder=True)
        # Of Cohere, of Granite, and of Gemma 2.
        logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def logits(self, states: Tensor) -> Tensor:
        """(B, V), or of the rows that are read: of states (B, D), in float32."""
        return self.scaled(linear(states.to(self.head_weight), self.head_weight).float())

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and the head where it is not the backbone's own."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        if self.head is not None:
            weight = self.head.detach().cpu().contiguous()
            save_file({"weight": weight}, str(Path(output_path) / self.FILE), metadata={"format": "pt"})


_AT_ITS_END: dict[str, Any] = {"pool_over": "all", "rows": "last"}


def _picked(blocks: Any, rows: Sequence[int]) -> Tensor:
    """Some rows of a head that comes in blocks."""
    found: dict[int, Tensor] = {}
    first = 0
    for block in blocks:
        found |= {row: block[row - first].clone() for row in rows if first <= row < first + len(block)}
        first += len(block)
    return torch.stack([found[row] for row in rows])
