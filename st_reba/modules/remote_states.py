"""A backbone whose language model runs elsewhere, such as in llama.cpp.

:class:`RemoteStates` stands where a transformers model stands, so that every module, template, pooling and filter works
on it as it is. A subclass gives it a configuration (``hidden_size``, ``num_hidden_layers``, ``vocab_size``,
``max_position_embeddings``) and one method, :meth:`RemoteStates.token_states`: token ids in, states out. It is put at
the head of a module by an ST ``Transformer`` that has it as its ``model``: see :mod:`st_reba.modules.llama_cpp`, which
also registers its configuration with ``AutoConfig`` and ``AutoModel``, so that saved models load by themselves.

Where only last hidden states can be had, ``layers`` stays empty: what reads inner layers is then refused. What changes
states, or looks at attention, is refused in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..lm.llama_cpp import END
from ..lm.run import is_looked_at

INSTEAD = (
    "Use what reads states as they are: CausalTransformer, EchoModule, MetaEOLModule, TopicModule (classical, "
    "prompteol, echo-2, meta-eol, topic, echo-topic), or load the model in transformers."
)


class _Layer(nn.Module):
    """The place of a layer: it is given what enters it and gives what leaves it, so that both can be looked at."""

    def forward(self, entering: Tensor, leaving: Tensor, expected: Tensor) -> Tensor:
        """``leaving``, unless something has replaced what enters."""
        check_unchanged(entering, expected)
        return leaving


class RemoteStates(PreTrainedModel):
    """A causal language model that runs elsewhere, and whose states are looked at and not changed.

    Attributes:
        layers: Places of its layers; none where their states cannot be had.
        norm: What makes the last hidden states of those of the last layer; None: :meth:`token_states` gives them.
    """

    #: Whether its forward is given how long each row is, as padding need not be run: see :func:`st_reba.lm.run.run`.
    takes_lengths = True

    _supports_sdpa = True
    main_input_name = "input_ids"

    layers: nn.ModuleList
    norm: nn.Module | None

    def __init__(self, config: Any, *, has_layers: bool, norm: nn.Module | None = None) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_Layer() for _ in range(config.num_hidden_layers if has_layers else 0))
        self.norm = norm
        # ST and the rest of the package ask a model's parameters where it is, and how precise.
        self.place = nn.Parameter(torch.zeros(0), requires_grad=False)

    def token_states(self, rows: Sequence[list[int]], layers: Collection[int]) -> Sequence[Mapping[int, Tensor]]:
        """The states of every token.

        Args:
            rows: The token ids of each text, one or more each.
            layers: After which layers, counted from 1; 0: what enters the first; :data:`END`: last hidden states.

        Returns:
            For each row, the states (n, D) after each of these layers, in float32, on the CPU.
        """
        raise NotImplementedError

    def forward(self, input_ids: Tensor | None = None, lengths: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        """Last hidden states.

        Args:
            input_ids: (B, N), padded on the right.
            lengths: (B,), how many of a row are real: the rest is not run, and its states are zero. None: all.
            **kwargs: What modules ask of any backbone; embeddings, caches and masks of their own are refused.

        Raises:
            ValueError: If something else than token ids is given, or a state is changed.
        """
        given = {"inputs_embeds", "cache", "past_key_values", "position_ids", "attention_mask"} & {
            name for name, value in kwargs.items() if value is not None
        }
        if input_ids is None or given:
            raise ValueError(
                f"{type(self).__name__} runs elsewhere and reads token ids alone, not {', '.join(sorted(given))}. "
                + INSTEAD
            )
        counts = [input_ids.shape[1]] * len(input_ids) if lengths is None else lengths.tolist()
        rows = [row[: max(1, count)] for row, count in zip(input_ids.tolist(), counts, strict=True)]
        # What nobody looks at is not fetched.
        looked_at = [index for index, layer in enumerate(self.layers, start=1) if is_looked_at(layer)]
        wanted = {*looked_at, *(index - 1 for index in looked_at)}
        wanted.add(len(self.layers) if self.norm is not None else END)
        found = self.token_states(rows, sorted(wanted))
        length = input_ids.shape[1]
        states = {layer: _padded([row[layer] for row in found], length).to(input_ids.device) for layer in wanted}
        for index in looked_at:
            entering, leaving = states[index - 1], states[index]
            check_unchanged(self.layers[index - 1](entering, leaving, entering), leaving)
        last = self.norm(states[len(self.layers)]) if self.norm is not None else states[END]
        return BaseModelOutput(last_hidden_state=last)

    def check_changes(self, changes: Sequence[object]) -> None:
        """Refuse what changes the model while it reads.

        Raises:
            ValueError: If there is anything.
        """
        if changes:
            raise ValueError(
                f"{type(self).__name__} runs elsewhere, so nothing in it can be changed: {changes[0]}. {INSTEAD}"
            )

    def get_input_embeddings(self) -> nn.Module:
        """What enters the first layer; of the weight, only how many rows it has."""
        return _InputEmbeddings(self)


class _InputEmbeddings(nn.Module):
    """Input embeddings that are elsewhere: ``weight`` has as many rows as there are token ids, and takes no memory."""

    def __init__(self, model: RemoteStates) -> None:
        super().__init__()
        self.weight = torch.zeros(1, 1).expand(model.config.vocab_size, 1)
        # Not a child: the model is not a part of its embeddings.
        self._states = model.token_states

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
        found = torch.stack([row[0] for row in self._states(rows, [0])])
        return found.view(*input_ids.shape, -1).to(input_ids.device)


def check_unchanged(states: Tensor, expected: Tensor) -> None:
    """Refuse states that something has put others in place of: what runs elsewhere would not know.

    Raises:
        ValueError: If they are not the very same.
    """
    if states is not expected:
        raise ValueError(
            "The language model runs elsewhere: its states can be looked at, and not changed, as this method does. "
            + INSTEAD
        )


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """(B, N, D), zeros behind each row's end."""
    padded = pad_sequence(list(rows), batch_first=True)
    return nn.functional.pad(padded, (0, 0, 0, length - padded.shape[1]))
