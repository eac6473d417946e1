"""The passes: what is run over a list of texts, and the variants that come out of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from runs import pooled
from st_reba.compare.sweep import names, of_copies
from st_reba.lm.anatomy import final_norm, layer_paths
from st_reba.lm.run import recording
from st_reba.modules import CausalModule, ReBAModule, RefinedThoughtModule
from st_reba.reading.layers import LayerReader
from st_reba.reading.words import find_words, pool_words
from st_reba.recipes import find
from st_reba.recipes.recipe import POOLINGS
from st_reba.text.layout import Layout

#: From B texts (and their words, where words are asked for) to (B, D) or (B, layers, D) by variant.
Run = Callable[[Sequence[str], "Sequence[str] | None"], dict[str, Tensor]]


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
    norm = final_norm(module.model)
    pools = {name: Pooling(module.get_embedding_dimension(), mode) for name, mode in POOLINGS.items()}

    def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, Tensor]:
        whole = Layout.of(module.preprocess(list(texts)))
        parts = []
        indices = module.parts(whole)
        for part in indices:
            layout = whole.part(part)
            rows = part.tolist()
            own = None if words is None else find_words(module, [texts[i] for i in rows], [words[i] for i in rows])
            found: dict[str, list[Tensor]] = {}
            with recording(module.model, layer_paths(module.model), norm) as record:
                for copy, reading, sums, totals in of_copies(module, layout):
                    normalised = sums / totals.clamp(min=torch.finfo(sums.dtype).tiny)
                    plain, look_back = names(copy)
                    readings = {plain: reading.states, look_back: sums, f"{look_back}, normalised": normalised}
                    for name, states in readings.items():
                        for layer, vectors in enumerate(record.split(states)):
                            if not layers and layer < len(record.widths) - 1:
                                continue
                            if own is not None:
                                found.setdefault(name, []).append(pool_words(vectors, own))
                                continue
                            for pooling, pool in pools.items():
                                features = {"token_embeddings": vectors.float(), "attention_mask": reading.mask.long()}
                                key = f"{name}, {pooling}"
                                found.setdefault(key, []).append(pool(features)["sentence_embedding"])
            parts.append({key: torch.stack(several, dim=1) for key, several in found.items()})
        order = torch.cat([*indices]).argsort()
        joined = {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}
        return joined if layers else {key: vectors[:, -1] for key, vectors in joined.items()}

    return run


def every_layer(name: str, build: Callable[[CausalModule, str], CausalModule], poolings: Sequence[str]) -> Pass:
    """A recipe whose states are read after every layer."""

    def make(backbone: CausalModule, language: str) -> Run:
        reader = LayerReader(pooled(build(backbone, language), *poolings))

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
        model = pooled(build(backbone, language), *poolings)

        def run(texts: Sequence[str], words: Sequence[str] | None) -> dict[str, Tensor]:
            vectors = model.encode(
                list(texts), batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
            ).float()
            parts = vectors.chunk(len(poolings), dim=1)
            return {f"{name}, {pooling}": part for pooling, part in zip(poolings, parts, strict=True)}

        return run

    return Pass(name, make, languages=languages)


def recipe(
    key: str,
    poolings: Sequence[str] = (),
    *,
    name: str = "",
    of_each_layer: bool = False,
    translated: bool = False,
    languages: tuple[str, ...] = ("en", "zh"),
) -> Pass:
    """A row of the recipes.

    Args:
        key: Its key.
        poolings: Under which; the row's own if empty.
        name: What files call it, where that is not the row's name.
        of_each_layer: Whether it is read after every layer, too.
        translated: Whether its prompt is in the language of the texts.
        languages: Those that it is for.
    """
    row = find(key).row

    def build(backbone: CausalModule, language: str) -> CausalModule:
        prompt = row.settings.get("template", "prompteol")
        own = {"template": f"{prompt}-zh"} if translated and language == "zh" else {}
        return row.module(backbone, **{**row.settings, **own})

    poolings = poolings or row.poolings
    if of_each_layer:
        return every_layer(name or row.name, build, poolings)
    return own_end(name or row.name, build, poolings, languages)


#: By what directories of kept vectors are called.
PASSES = {
    each.name: each
    for each in (
        Pass("repeated", repeated, words=True),
        recipe("bag-of-input-embeddings"),
        recipe("prompteol", translated=True, of_each_layer=True),
        recipe("prompteol", name="PromptEOL, English", languages=("zh",)),
        recipe("early-late", translated=True),
        recipe("topic", translated=True),
        recipe("echo-topic", translated=True),
        recipe("echo-springer", of_each_layer=True),
        recipe("pretended-cot", translated=True, of_each_layer=True),
        recipe("knowledge", translated=True, of_each_layer=True),
        recipe("bidirectional", ("mean",)),
        recipe("no-sink"),
        recipe("echo-2-bidirectional"),
        recipe("reba-2-bidirectional"),
        recipe("bidirectional-prompt"),
        # One pass of Refined Thought is no recipe: it is what further ones are held against.
        own_end("RT-1", lambda backbone, language: RefinedThoughtModule(backbone, iterations=1), ("last",)),
        *map(
            recipe,
            (
                "rt-2", "rt-4", "rt-8", "kv-rerouting", "token-prepending", "token-prepending-blocks",
                "value-aggregation", "contrastive-prompting", "ck", "metaeol",
            ),
        ),
        Pass("three copies", lambda backbone, language: repeated(backbone, language, copies=3, layers=False)),
    )
}  # fmt: skip
