"""The passes: what is run over a list of texts, and the variants that come out of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import batch_to_device
from torch import Tensor

from st_reba.lm.all_layers import recording
from st_reba.lm.decoder import inspect, layer_places
from st_reba.modules import (
    BidirectionalLastLayer,
    CausalModule,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    InputEmbeddings,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.readers.layers import LayerReader
from st_reba.readers.words import find_words, pool_words
from st_reba.text.layout import Layout

#: From B texts (and their words, where words are asked for) to (B, D) or (B, layers, D) by variant.
Run = Callable[[Sequence[str], "Sequence[str] | None"], dict[str, Tensor]]

_POOLINGS = {"mean": "mean", "last": "lasttoken"}


@dataclass(frozen=True)
class Pass:
    """One way to run a model.

    Attributes:
        name: As files call it.
        make: From a loaded backbone and a language to what is run.
        words: Whether it has word embeddings.
        languages: Those that it is for.
    """

    name: str
    make: Callable[[CausalModule, str], Run]
    words: bool = False
    languages: tuple[str, ...] = ("en", "zh")


def repeated(backbone: CausalModule, language: str, copies: int = 2, layers: bool = True) -> Run:
    """Classical, Echo and ReBA out of one pass, after every layer; ReBA also with the weights of each row divided by
    their sum. ReBA's weights are those of all layers, whichever layer's states they weigh."""
    module = ReBAModule(backbone, repetitions=copies).eval()
    places = layer_places(module.model)
    norm = inspect(module.model).norm
    pools = {name: Pooling(module.get_embedding_dimension(), mode) for name, mode in _POOLINGS.items()}

    def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, Tensor]:
        whole = Layout.of(batch_to_device(module.preprocess(list(texts)), module.model.device))
        parts = []
        for part in module.parts(whole):
            layout = whole.part(part)
            own = None if words is None else find_words(module, list(texts)[part], list(words)[part])
            found: dict[str, list[Tensor]] = {}
            with recording(module.model, places, norm) as record:
                for copy, sums in enumerate(module.copy_sums(layout), start=1):
                    normalised = sums.sums / sums.totals.clamp(min=torch.finfo(sums.sums.dtype).tiny)
                    readings = {
                        "Classical" if copy == 1 else f"Echo-{copy}": sums.states,
                        f"ReBA-{copy}": sums.sums,
                        f"ReBA-{copy}, normalised": normalised,
                    }
                    for name, states in readings.items():
                        for layer, vectors in enumerate(record.split(states)):
                            if not layers and layer < len(record._widths) - 1:
                                continue
                            if own is not None:
                                found.setdefault(name, []).append(pool_words(vectors, own))
                                continue
                            for pooling, pool in pools.items():
                                features = {"token_embeddings": vectors.float(), "attention_mask": sums.mask.long()}
                                key = f"{name}, {pooling}"
                                found.setdefault(key, []).append(pool(features)["sentence_embedding"])
            parts.append({key: torch.stack(several, dim=1) for key, several in found.items()})
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return joined if layers else {key: vectors[:, -1] for key, vectors in joined.items()}

    return run


def every_layer(name: str, build: Callable[[CausalModule, str], CausalModule], poolings: Sequence[str]) -> Pass:
    """A recipe whose states are read after every layer."""

    def make(backbone: CausalModule, language: str) -> Run:
        reader = LayerReader(_pooled(build(backbone, language), poolings))

        def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, Tensor]:
            layers = reader.embeddings(list(texts)).float().transpose(0, 1)
            parts = layers.chunk(len(poolings), dim=2)
            return {f"{name}, {pooling}": part for pooling, part in zip(poolings, parts, strict=True)}

        return run

    return Pass(name, make)


def own_end(
    name: str,
    build: Callable[[CausalModule, str], CausalModule],
    poolings: Sequence[str],
    languages: tuple[str, ...] = ("en", "zh"),
) -> Pass:
    """A recipe as it is."""

    def make(backbone: CausalModule, language: str) -> Run:
        model = _pooled(build(backbone, language), poolings)

        def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, Tensor]:
            vectors = model.encode(
                list(texts), batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
            ).float()
            parts = vectors.chunk(len(poolings), dim=1)
            return {f"{name}, {pooling}": part for pooling, part in zip(poolings, parts, strict=True)}

        return run

    return Pass(name, make, languages=languages)


def _pooled(module: CausalModule, poolings: Sequence[str]) -> SentenceTransformer:
    modes = tuple(_POOLINGS[pooling] for pooling in poolings)
    pooling = Pooling(module.get_embedding_dimension(), modes)
    return SentenceTransformer(modules=[module, pooling], device=str(module.model.device))


def _in(language: str, template: str) -> str:
    """A template in the language of the texts."""
    return template if language == "en" else f"{template}-zh"


def _prompt(template: str, **kwargs: Any) -> Callable[[CausalModule, str], CausalModule]:
    return lambda backbone, language: CausalTransformer(backbone, template=_in(language, template), **kwargs)


def _in_language(build: Callable[..., CausalModule], template: str) -> Callable[..., CausalModule]:
    return lambda backbone, language: build(backbone, template=_in(language, template))


def _thought(passes: int) -> Callable[[CausalModule, str], CausalModule]:
    return lambda backbone, language: RefinedThoughtModule(backbone, iterations=passes)


def _ignoring_language(build: Callable[..., CausalModule], **kwargs: Any) -> Callable[..., CausalModule]:
    return lambda backbone, language: build(backbone, **kwargs)


MEAN, LAST, BOTH = ("mean",), ("last",), ("mean", "last")

PASSES = {
    each.name: each
    for each in (
        Pass("repeated", repeated, words=True),
        own_end("Bag of input embeddings", _ignoring_language(InputEmbeddings), MEAN),
        every_layer("PromptEOL", _prompt("prompteol"), LAST),
        own_end("PromptEOL, English", _ignoring_language(CausalTransformer, template="prompteol"), LAST, ("zh",)),
        own_end("Early and late", _in_language(EarlyLateModule, "prompteol"), MEAN),
        every_layer("Echo, Springer's prompt", _ignoring_language(EchoModule, template="springer"), BOTH),
        every_layer("Pretended CoT", _prompt("pretended-cot"), LAST),
        every_layer("Knowledge", _prompt("knowledge"), LAST),
        own_end("Bidirectional", _ignoring_language(CausalTransformer, bidirectional_layers=1), MEAN),
        own_end("Echo-2, bidirectional", _ignoring_language(EchoModule, repetitions=2, bidirectional_layers=1), BOTH),
        own_end("ReBA-2, bidirectional", _ignoring_language(ReBAModule, repetitions=2, bidirectional_layers=1), BOTH),
        own_end("Bidirectional, prompt", _ignoring_language(BidirectionalLastLayer), LAST),
        *(own_end(f"RT-{passes}", _thought(passes), LAST) for passes in (1, 2, 4, 8)),
        own_end("KV re-routing", _ignoring_language(KVReroutingModule), BOTH),
        own_end("Token prepending", _ignoring_language(TokenPrependingModule), LAST),
        own_end("Token prepending, blocks", _ignoring_language(HierarchicalTokenPrependingModule), MEAN),
        own_end("Value aggregation", _ignoring_language(ValueAggregationModule), LAST),
        own_end("Contrastive prompting", _ignoring_language(ContrastivePromptingModule), LAST),
        own_end("CK", _ignoring_language(MetaEOLModule, templates="ck"), MEAN),
        own_end("MetaEOL", _ignoring_language(MetaEOLModule), MEAN),
        Pass("three copies", lambda backbone, language: repeated(backbone, language, copies=3, layers=False)),
    )
}
