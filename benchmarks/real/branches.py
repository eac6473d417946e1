"""Many endings behind one text: the text is run once, and every ending attends to it and to itself alone.

Endings that begin alike share what they begin with, as branches of a tree share a stem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

#: So many tokens of endings are run together: more would spend its time on attention among endings.
NODES = 320

Ids = Sequence[int]
States = tuple[torch.Tensor, ...]


@dataclass
class Tree:
    """Endings that share their beginnings.

    Attributes:
        ids: The token of each node; a node stands behind its parent.
        parents: The parent of each node; -1 for the text before it.
        ends: The last node of each ending.
    """

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, ending: Ids) -> None:
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.ids, strict=True))
        }
        node = -1
        for token in ending:
            below = children.get((node, token))
            if below is None:
                below = len(self.ids)
                self.ids.append(token)
                self.parents.append(node)
            node = below
        self.ends.append(node)

    def seen(self) -> torch.Tensor:
        """(nodes, nodes): which nodes each of them attends to, itself and those that it stands behind."""
        seen = torch.eye(len(self.ids), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def planted(endings: Sequence[Ids], nodes: int = NODES) -> list[tuple[list[int], Tree]]:
    """Trees of at most so many nodes, each with the places of its endings among all."""
    trees: list[tuple[list[int], Tree]] = []
    for place in sorted(range(len(endings)), key=lambda number: tuple(endings[number])):
        if not trees or len(trees[-1][1].ids) + len(endings[place]) > nodes:
            trees.append(([], Tree()))
        places, tree = trees[-1]
        places.append(place)
        tree.add(endings[place])
    return trees


@dataclass(frozen=True)
class Read:
    """What a text leaves behind.

    Attributes:
        body: States of the tokens between the beginning and the endings, (layers + 1, tokens, D).
        last: States of each ending's last token, (endings, kept layers, D).
        total: The last layer's states, summed over each ending's tokens, (endings, D).
    """

    body: torch.Tensor
    last: torch.Tensor
    total: torch.Tensor


class Branches:
    """A model that runs texts behind one beginning, and endings behind each text.

    Args:
        model: A decoder without its head, whose attention takes a mask with four dimensions.
        beginning: Token ids before every text, special ones included. They are run once.
        endings: Token ids of each ending.
        layers: Which hidden states of an ending's last token are kept, as transformers counts them.
        nodes: Tokens of endings that are run together.
    """

    def __init__(
        self, model: PreTrainedModel, beginning: Ids, endings: Sequence[Ids], layers: Sequence[int], nodes: int = NODES
    ) -> None:
        self.model = model
        self.count = len(endings)
        self.layers = layers
        self.trees = [(places, tree, tree.seen()) for places, tree in planted(endings, nodes)]
        self.cache = DynamicCache()
        model(input_ids=torch.tensor([list(beginning)]), past_key_values=self.cache, use_cache=True)

    def read(self, text: Ids) -> Read:
        """Run a text, and every ending behind it.

        Args:
            text: Token ids of all that stands between the beginning and the endings.
        """
        body = torch.cat(self._run(torch.tensor([list(text)])))
        last: list[torch.Tensor] = [torch.empty(0)] * self.count
        total: list[torch.Tensor] = [torch.empty(0)] * self.count
        before = self.cache.get_seq_length()
        for places, tree, seen in self.trees:
            mask = torch.cat([torch.ones(len(tree.ids), before, dtype=torch.bool), seen], dim=1)[None, None]
            positions = (before + seen.sum(dim=1) - 1)[None]
            states = self._run(torch.tensor([tree.ids]), attention_mask=self._masks(mask), position_ids=positions)
            self.cache.crop(-len(tree.ids))
            kept = torch.stack([states[layer][0] for layer in self.layers], dim=1)
            sums = seen.float() @ states[-1][0].float()
            for place, end in zip(places, tree.ends, strict=True):
                last[place], total[place] = kept[end], sums[end]
        self.cache.crop(-len(text))
        return Read(body, torch.stack(last), torch.stack(total))

    def _run(self, ids: torch.Tensor, **given: Any) -> States:
        """Run tokens behind what the cache holds; their hidden states, each (1, tokens, D)."""
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, output_hidden_states=True, **given)
        return out.hidden_states

    def _masks(self, mask: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """A mask for each kind of layer, where a model has several; texts here are shorter than any window."""
        kinds = getattr(self.model.config, "layer_types", None)
        return dict.fromkeys(kinds, mask) if kinds else mask
