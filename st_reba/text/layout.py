"""How often a text stands in the input, and which copy each token belongs to.

Nothing here knows a model or a method: every readout of every method is a question about ``Layout.copy_index``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .tokens import Span

NOT_TEXT = -1

#: The ``copy_index`` of a slot of token prepending; that of a text's second block is one less, and so on.
PREPENDED = -2

# What a layout is made of, and what stands there in padding.
_PADDING = {"input_ids": 0, "attention_mask": 0, "copy_index": NOT_TEXT}


# What the host keeps of a layout that lies on an accelerator.
_AT_HOME = "layout_at_home"


def feature_names(of: str = "") -> list[str]:
    """What the parts of a layout are called among a module's features, and last what the host keeps of it, if anything.

    Args:
        of: The key of the change whose companion it is; empty: the module's own layout.
    """
    # "*_input_ids" is how ST's trainer tells the columns of a data set apart.
    return [f"{name}_of_{of}" if of else name for name in (*_PADDING, _AT_HOME)]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The same values on a device that the host need not wait for."""
    return values.to(device, non_blocking=True)


@dataclass(frozen=True)
class Layout:
    """A batch of B token sequences, N long, padded on the right.

    Attributes:
        input_ids: (B, N). Padding is id 0: a causal model's real tokens never see it, so any id will do.
        attention_mask: (B, N), 1 for real tokens.
        copy_index: (B, N), the copy a token belongs to (0 .. k-1), or -1 for all that is not text: special tokens,
            literals, the prompt, padding. -2 and less: the slots of token prepending, whose id means nothing.
        beside: What changes saw of the same texts in layouts of their own, (B, ...), by the keys of the changes.
        at_home: The same layout as the tokenizer left it, in the host's memory, where this one is on an accelerator.
        spans: For each text and each token of one copy, the characters of the text that the token holds any part of;
            None for a text where the tokenizer does not say. A layout that is made of others has none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    copy_index: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    at_home: Layout | None = field(default=None, kw_only=True, repr=False)
    spans: Sequence[list[Span] | None] = field(default=(), kw_only=True, repr=False)

    @classmethod
    def of(cls, features: Mapping[str, Any], change: str = "") -> Layout:
        """That of a module's features, or that of a change's companion."""
        *names, at_home = feature_names(change)
        return cls(*(features[name] for name in names), at_home=features.get(at_home))

    def features(self, change: str = "") -> dict[str, Any]:
        """As features of a module: its own, or those of a change's companion."""
        *names, at_home = feature_names(change)
        features: dict[str, Any] = dict(zip(names, self._tensors, strict=True))
        return features if self.at_home is None else {**features, at_home: self.at_home}

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.attention_mask, self.copy_index

    @cached_property
    def on_host(self) -> Layout:
        """The same layout where asking for a number makes nobody wait, as it does on an accelerator.

        It is copied from there only where nothing fits that came with the features: as where a batch was scattered over
        several devices.
        """
        if self.input_ids.device.type == "cpu":
            return self
        if self.at_home is not None and self.at_home.input_ids.shape == self.input_ids.shape:
            return self.at_home
        return Layout(*(part.cpu() for part in self._tensors))

    def placed(self, device: torch.device) -> Layout:
        """This layout, which is in the host's memory, on the device of a model."""
        if self.input_ids.device == device:
            return self
        return Layout(*(sent(part, device) for part in self._tensors), beside=self.beside, at_home=self)

    @property
    def ends(self) -> Tensor:
        """(B,) the position of each row's last token; 0 in a row without tokens."""
        return (self.attention_mask.sum(dim=1) - 1).clamp(min=0)

    @property
    def text_length(self) -> Tensor:
        """(B,) tokens in one copy of each text; 0 for an empty text."""
        return (self.copy_index == 0).sum(dim=1)

    @property
    def text_start(self) -> int:
        """Position of the first text token, the same in every row where all have one prompt."""
        is_text = (self.on_host.copy_index >= 0).any(dim=0)
        return int(is_text.int().argmax())

    @property
    def text_starts(self) -> Tensor:
        """(B,) the position of each text's first token; 0 for an empty text."""
        return (self.copy_index >= 0).int().argmax(dim=1)

    @property
    def longest_text(self) -> int:
        """Tokens in one copy of the longest text; 1 where all are empty."""
        return max(1, int(self.on_host.text_length.max()))

    def part(self, texts: slice | Tensor) -> Layout:
        """The same layout for some of the texts, without the columns that only the others needed.

        ``texts`` are their indices, at least one, in the host's memory.
        """
        host = self.on_host
        longest = max(1, int(host.attention_mask[texts].sum(dim=1).max()))
        parts = (part[texts, :longest] for part in self._tensors)
        at_home = None if host is self else host.part(texts)
        return Layout(*parts, beside={key: values[texts] for key, values in self.beside.items()}, at_home=at_home)

    @classmethod
    def interleaved(cls, layouts: Sequence[Layout]) -> Layout:
        """P layouts of the same B texts as one of B * P rows, those of a text together."""
        longest = max(layout.input_ids.shape[1] for layout in layouts)
        woven = []
        for name, padding in _PADDING.items():
            parts = [layout.features()[name] for layout in layouts]
            padded = [pad(part, (0, longest - part.shape[1]), value=padding) for part in parts]
            woven.append(torch.stack(padded, dim=1).flatten(0, 1))
        return cls(*woven)
