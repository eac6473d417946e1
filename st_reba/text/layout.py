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

#: The ``copy_index`` of a slot of token prepending.
PREPENDED = -2

# What a layout is made of, as its features are called, and what stands there in padding.
_PADDING = {"input_ids": 0, "attention_mask": 0, "copy_index": NOT_TEXT}
# "*_input_ids" is how ST's trainer tells the columns of a data set apart.
_OF_A_COMPANION = "input_ids_of_"


@dataclass(frozen=True)
class Layout:
    """A batch of B token sequences, N long, padded on the right. It is in the CPU's memory, wherever the model is.

    Attributes:
        input_ids: (B, N). Padding is id 0: a causal model's real tokens never see it, so any id will do.
        attention_mask: (B, N), boolean, the real tokens.
        copy_index: (B, N), the copy a token belongs to (0 .. k-1), or -1 for all that is not text: special tokens,
            literals, the prompt, padding. -2: a slot of token prepending, whose id means nothing.
        companions: The same texts as changes read them besides, by the changes' keys.
        seen: What changes saw in the passes over their companions, (B, ...), by the changes' keys, on their devices.
        spans: For each text and each token of one copy, the characters of the text that the token holds any part of;
            None for a text where the tokenizer does not say. A layout that is made of others has none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    copy_index: Tensor
    companions: Mapping[str, Layout] = field(default_factory=dict, kw_only=True)
    seen: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    spans: Sequence[list[Span] | None] = field(default=(), kw_only=True, repr=False)

    @classmethod
    def of(cls, features: Mapping[str, Any]) -> Layout:
        """That of a module's features. ST's ``encode`` sends these to the model's device; they are fetched back.

        On an accelerator this is the one time that the CPU waits for it, before a batch runs.
        """
        keys = [name.removeprefix(_OF_A_COMPANION) for name in features if name.startswith(_OF_A_COMPANION)]
        companions = {key: cls.of({name: features[f"{name}_of_{key}"] for name in _PADDING}) for key in keys}
        input_ids, attention_mask, copy_index = (features[name].cpu() for name in _PADDING)
        return cls(input_ids, attention_mask.bool(), copy_index, companions=companions)

    def features(self) -> dict[str, Tensor]:
        """As features of a module, companions included; ``attention_mask`` is of whole numbers, as ST has it."""
        found = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask.long(),
            "copy_index": self.copy_index,
        }
        for key, companion in self.companions.items():
            found |= {f"{name}_of_{key}": values for name, values in companion.features().items()}
        return found

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) real tokens of each row."""
        return self.attention_mask.sum(dim=1)

    @cached_property
    def ends(self) -> Tensor:
        """(B,) the position of each row's last token; 0 in a row without tokens."""
        return (self.lengths - 1).clamp(min=0)

    @cached_property
    def text_lengths(self) -> Tensor:
        """(B,) tokens in one copy of each text; 0 for an empty text."""
        return (self.copy_index == 0).sum(dim=1)

    @cached_property
    def text_starts(self) -> Tensor:
        """(B,) the position of each text's first token; 0 for an empty text."""
        return (self.copy_index >= 0).int().argmax(dim=1)

    @cached_property
    def text_start(self) -> int:
        """Position of the first text token, the same in every row that has a text.

        Raises:
            ValueError: If texts begin at different places.
        """
        starts = self.text_starts[self.text_lengths > 0].unique().tolist()
        if len(starts) > 1:
            raise ValueError(
                "The texts of a batch stand behind prompts of different lengths, and the same stretch of all of them "
                "is to be read. Encode the texts of one prompt at a time, with encode(prompt=...), or use "
                "CausalTransformer."
            )
        return int(starts[0]) if starts else 0

    @cached_property
    def longest_text(self) -> int:
        """Tokens in one copy of the longest text; 1 where all are empty."""
        return max(1, int(self.text_lengths.max()))

    def part(self, texts: slice | Tensor) -> Layout:
        """The same layout for some of the rows, at least one, without the columns that only the others needed.

        It keeps what was seen of the companions, and not the companions, which may have fewer rows.
        """
        longest = max(1, int(self.lengths[texts].max()))
        parts = (part[texts, :longest] for part in (self.input_ids, self.attention_mask, self.copy_index))
        return Layout(*parts, seen={key: values[texts] for key, values in self.seen.items()})

    @classmethod
    def interleaved(cls, layouts: Sequence[Layout]) -> Layout:
        """P layouts of the same B texts as one of B * P rows, those of a text together."""
        longest = max(layout.input_ids.shape[1] for layout in layouts)
        woven = []
        for name, padding in _PADDING.items():
            parts = [layout.features()[name] for layout in layouts]
            padded = [pad(part, (0, longest - part.shape[1]), value=padding) for part in parts]
            woven.append(torch.stack(padded, dim=1).flatten(0, 1))
        return cls.of(dict(zip(_PADDING, woven, strict=True)))
