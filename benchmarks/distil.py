"""A recipe distilled into students that cost less: how much of the teacher's quality each reaches.

    python benchmarks/distil.py --data DIR                                    # every student, on every corpus
    python benchmarks/distil.py --data DIR --corpora "generic sentences" --students "one plain pass, MSE"

Writes ``benchmarks/results/distil.csv``. ``DIR`` holds generic_sentences_en.txt, plain texts, and
stsb_en_{train,dev,test}.tsv, of whose training part the texts alone are a second corpus. Teacher and student are scored
on the pairs of dev, by which to choose, and of test. Runs lie below ``--out``: one that was stopped goes on, and one
whose rows are in the file is not run again.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from devices import device, now
from real.cosines import cosines_of
from real.models import MODELS
from real.texts import Sets
from st_reba.data.tables import read_pairs
from st_reba.train import DistilTraining, train_distil
from st_reba.train.distil import REPORT, TEACHER, shares, split, teacher_vectors

#: The best recipe of this model on the development part, at the price of two passes at most.
RECIPE = "early-late"
MODEL = "SmolLM2-135M-Instruct"
#: Texts of a corpus at most.
MOST = 5000
PARTS = ("dev", "test")


@dataclass(frozen=True)
class Student:
    """A student.

    Attributes:
        title: As tables show it.
        settings: Of :class:`DistilTraining`.
        embedder: The model of :data:`MODELS` that it is, if it is one.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    embedder: str = ""


#: One step that moves nothing.
UNTRAINED: dict[str, Any] = {"arguments": {"max_steps": 1, "learning_rate": 1e-12}}
STUDENTS = {
    each.title: each
    for each in (
        Student("one plain pass, linear map alone", UNTRAINED),
        Student("one plain pass, MSE"),
        Student("PromptEOL, linear map alone", {"student": "prompteol", **UNTRAINED}),
        Student("PromptEOL, MSE", {"student": "prompteol"}),
        Student("static, linear map alone", {"student": "static", **UNTRAINED}),
        Student("static, MSE", {"student": "static", "arguments": {"learning_rate": 1e-2, "num_train_epochs": 10}}),
        Student("all-MiniLM-L6-v2, MSE", {"arguments": {"learning_rate": 5e-5}}, "all-MiniLM-L6-v2"),
    )
}
CORPORA = ("generic sentences", "STS-B's training texts")


def corpus(name: str, data: Path, out: Path) -> Path:
    """A file of texts, one a line."""
    if name == CORPORA[0]:
        return data / "generic_sentences_en.txt"
    texts = read_pairs(data / "stsb_en_train.tsv").texts()
    file = out / "stsb_en_train.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(random.Random(0).sample(texts, min(MOST, len(texts)))) + "\n", encoding="utf-8")
    return file


def measure(student: Student, name: str, options: argparse.Namespace) -> list[records.Record]:
    """Distil once, and the rows of it."""
    models = options.out / "models"
    path = str(options.path or MODELS[MODEL].located(models))
    own = {} if not student.embedder else {
        "student": str(options.embedder or MODELS[student.embedder].located(models))
    }  # fmt: skip
    settings = DistilTraining(
        model=path, recipe=RECIPE, texts=str(corpus(name, options.data, options.out)), held_out=options.held_out,
        model_kwargs={"dtype": options.precision}, **{**student.settings, **own},
    )  # fmt: skip
    run = options.out / f"{student.title}, {name}"
    kept = options.out / TEACHER
    run.mkdir(parents=True, exist_ok=True)
    if not (run / TEACHER).exists():
        kept.mkdir(parents=True, exist_ok=True)
        (run / TEACHER).symlink_to(kept.resolve())
    start = now(device())
    if not (run / REPORT).is_file():
        train_distil(settings, run, progress=False)
    seconds = round(now(device()) - start)
    reached = json.loads((run / REPORT).read_text(encoding="utf-8"))
    trained = SentenceTransformer(str(run / "model"))
    if student.settings.get("student") != "static" and not student.embedder:
        trained.to(getattr(torch, options.precision))
    texts, _ = split(settings)
    found: list[records.Record] = []
    for part in options.sets:
        pairs = Sets(options.data).pairs("en", part)
        different = pairs.texts()
        place = {text: index for index, text in enumerate(different)}
        columns = [np.array([place[text] for text in side]) for side in (pairs.first, pairs.second)]
        vectors, _ = teacher_vectors(settings, texts, different, kept, progress=False)
        embedded = trained.encode(different, batch_size=32, show_progress_bar=False)
        cosines = {"teacher": cosines_of(vectors.numpy(), *columns), "student": cosines_of(embedded, *columns)}
        scores = shares(cosines, pairs.scores)
        shared: records.Record = {
            "model": MODEL, "precision": options.precision, "set": f"STS-B en {part}", "teacher": RECIPE,
            "corpus": name, "texts": len(texts), "date": date.today().isoformat(), "versions": records.versions(),
        }  # fmt: skip
        named = dict(zip(("score", "low", "high"), scores["teacher"], strict=True))
        found.append({**shared, **named, "student": f"the teacher: {RECIPE}"})
        row = {**shared, **dict(zip(("score", "low", "high"), scores["student"], strict=True))}
        row |= dict(zip(("share", "share_low", "share_high"), scores["share"], strict=True))
        agreed, neighbours = reached["trained"].values()
        row |= {"student": student.title, "agreement": agreed, "neighbours": neighbours, "seconds": seconds,
                "dimensions": embedded.shape[1]}  # fmt: skip
        found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, default=Path("build/distil"), help="directory of the runs")
    parser.add_argument("--path", type=Path, help="the language model, where it is there already")
    parser.add_argument("--embedder", type=Path, help="the encoder, where it is there already")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--sets", nargs="+", choices=PARTS, default=list(PARTS), help="of STS-B, to score on")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in options.corpora:
        for student in map(STUDENTS.__getitem__, options.students):
            there = records.read("distil", options.results) if (options.results / "distil.csv").is_file() else []
            scored = {row["set"] for row in there if row["student"] == student.title and row["corpus"] == name}
            if scored >= {f"STS-B en {part}" for part in options.sets}:
                continue
            rows = measure(student, name, options)
            records.rewrite("distil", rows, options.results)
            for row in rows:
                print(row, flush=True)


if __name__ == "__main__":
    main()
