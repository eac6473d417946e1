"""A text in terms of several aspects, read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from ..lm.prefixes import Ids, Prefixes, behind
from ..modules import CausalModule, CausalTransformer
from ..modules.changes import EarlyExit
from ..text.layout import Layout
from ..text.templates import PROMPT, in_terms_of


def encode_aspects(
    model: SentenceTransformer,
    texts: Sequence[str],
    aspects: Sequence[str],
    *,
    batch_size: int = 32,
    normalize_embeddings: bool = False,
    show_progress_bar: bool = False,
) -> np.ndarray:
    r"""An embedding of each text in terms of each aspect.

    ``result[:, a]`` is ``model.encode(texts, prompt=aspects[a])`` but for rounding, 1e-6 in float32. Where the model's
    template has the aspect behind the text, as ``ponte`` has it, and its last token is read, each text is run once: the
    keys and values of its tokens are kept while the aspects behind it are run, which are a few tokens each. In any
    other model the texts are encoded anew for each aspect.

    Args:
        model: Best one whose first module has a template with ``{prompt}``. In another one the aspect stands where any
            prompt does.
        texts: T of them.
        aspects: A of them, such as ``"its topic"``.
        batch_size: Texts at a time, each in terms of all aspects.
        normalize_embeddings: Scale vectors to length 1, after the model's ``truncate_dim``.
        show_progress_bar: Whether to show one.

    Returns:
        (T, A, D), float32.

    Raises:
        ValueError: If there is no text, or no aspect, or an aspect is blank or the template has no room for it, or
            ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give a whole number from 1.")
    texts, aspects = [*texts], [*aspects]
    if not texts or not aspects or not all(isinstance(aspect, str) and aspect.strip() for aspect in aspects):
        raise ValueError(
            f"{len(texts)} texts and the aspects {aspects!r} were given: give at least one text, and at least one "
            'aspect in words, such as ["its topic", "its sentiment"].'
        )
    module = model[0]
    if not (isinstance(module, CausalModule) and _reads_texts_once(module)):
        of_aspects = [
            model.encode(
                texts,
                prompt=aspect,
                batch_size=batch_size,
                normalize_embeddings=normalize_embeddings,
                show_progress_bar=show_progress_bar,
            )
            for aspect in aspects
        ]
        return np.stack(of_aspects, axis=1)
    model.eval()
    # Longest first, as in encode.
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    vectors: list[Tensor] = []
    with torch.inference_mode(), tqdm(total=len(texts), desc="Texts", disable=not show_progress_bar) as progress:
        for start in range(0, len(texts), batch_size):
            batch = [texts[index] for index in order[start : start + batch_size]]
            found = _embedded(model, module, batch, aspects)[..., : model.truncate_dim]
            vectors.append(normalize(found, dim=-1) if normalize_embeddings else found)
            progress.update(len(batch))
    return torch.cat(vectors)[torch.tensor(order).argsort()].float().numpy()


def _reads_texts_once(module: CausalModule) -> bool:
    """Whether all that is read of a text stands behind it, and behind the aspect."""
    once = type(module) is CausalTransformer and PROMPT in module._template.literals[-1]
    at_its_end = module.pool_over == "all" and module.rows == "last"
    unchanged = all(isinstance(change, EarlyExit) for change in module.changes)
    return once and at_its_end and unchanged and module.keeps_prefixes


def _embedded(model: SentenceTransformer, module: CausalModule, texts: list[str], aspects: list[str]) -> Tensor:
    """(T, A, D): the embeddings of a batch, in the CPU's memory."""
    layout = Layout.of(module.preprocess([in_terms_of(text, aspect) for aspect in aspects for text in texts]))
    ids = _shared_ids(layout, len(texts))
    kept = Prefixes.of(module.model, ids) if any(ids) else None
    rest = layout if kept is None else kept.rest_of(layout)
    found, parts = [], module.parts(rest)
    for part in parts:
        with behind(kept, part):
            features = module(rest.part(part).features())
        for later in list(model.children())[1:]:
            features = later(features)
        found.append(features["sentence_embedding"].cpu())
    rows = torch.cat(found)[torch.cat([*parts]).argsort()]
    return rows.unflatten(0, (len(aspects), len(texts))).transpose(0, 1)


def _shared_ids(layout: Layout, count: int) -> Ids:
    """The tokens with which the rows of a text begin in terms of whatever, up to the text's last token, which stays.

    Args:
        layout: A * T rows; rows t, T + t, 2T + t ... are of text t.
        count: T.
    """
    ids = layout.input_ids.unflatten(0, (-1, count))
    alike = (ids == ids[:1]).all(dim=0).long().cumprod(dim=1).sum(dim=1)
    last = torch.where(layout.copy_index == 0, torch.arange(layout.input_ids.shape[1]), 0).amax(dim=1)
    # Of a text without tokens nothing is read: one token is enough, and one is left in each row.
    last = torch.where(layout.text_lengths == 0, layout.ends.clamp(max=1), last)
    lengths = torch.minimum(alike, last.unflatten(0, (-1, count)).amin(dim=0)).tolist()
    return tuple(tuple(row[:length]) for row, length in zip(ids[0].tolist(), lengths, strict=True))
