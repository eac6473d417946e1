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
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

import records
from real.cosines import cosines_of, places
from real.models import MODELS
from real.sets import PARTS, Sets
from runs import device, now, options, parser
from st_reba.data.tables import read_pairs
from st_reba.train import DistilTraining, train_distil
from st_reba.train.distil import REPORT, TEACHER, shares, split, teacher_vectors

#: The best recipe of this model on the development part, at the price of two passes at most.
RECIPE = "early-late"
MODEL = "SmolLM2-135M-Instruct"
#: Texts of a corpus at most.
MOST = 5000


#: The encoder that is a student.
EMBEDDER = "all-MiniLM-L6-v2"
#: One step that moves nothing.
UNTRAINED: dict[str, Any] = {"arguments": {"max_steps": 1, "learning_rate": 1e-12}}
#: By what tables call a student, its settings of :class:`DistilTraining`.
STUDENTS: dict[str, dict[str, Any]] = {
    "one plain pass, linear map alone": UNTRAINED,
    "one plain pass, MSE": {},
    "PromptEOL, linear map alone": {"student": "prompteol", **UNTRAINED},
    "PromptEOL, MSE": {"student": "prompteol"},
    "static, linear map alone": {"student": "static", **UNTRAINED},
    "static, MSE": {"student": "static", "arguments": {"learning_rate": 1e-2, "num_train_epochs": 10}},
    f"{EMBEDDER}, MSE": {"student": EMBEDDER, "arguments": {"learning_rate": 5e-5}},
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


def measure(title: str, name: str, given: argparse.Namespace) -> Iterator[records.Record]:
    """Distil once, and the rows of it."""
    models = given.out / "models"
    own = dict(STUDENTS[title])
    if is_encoder := own.get("student") == EMBEDDER:
        own["student"] = str(given.embedder or MODELS[EMBEDDER].located(models))
    settings = DistilTraining(
        model=str(given.path or MODELS[MODEL].located(models)), recipe=RECIPE, held_out=given.held_out,
        texts=str(corpus(name, given.data, given.out)), model_kwargs={"dtype": given.precision}, **own,
    )  # fmt: skip
    run, kept = given.out / f"{title}, {name}", given.out / TEACHER
    run.mkdir(parents=True, exist_ok=True)
    if not (run / TEACHER).exists():
        kept.mkdir(parents=True, exist_ok=True)
        (run / TEACHER).symlink_to(kept.resolve())
    start = now(device())
    if not (run / REPORT).is_file():
        train_distil(settings, run, progress=False)
    seconds = round(now(device()) - start)
    agreement, neighbours = json.loads((run / REPORT).read_text(encoding="utf-8"))["trained"].values()
    trained = SentenceTransformer(str(run / "model"))
    if own.get("student") != "static" and not is_encoder:
        trained.to(getattr(torch, given.precision))
    texts, _ = split(settings)
    for part in given.sets:
        pairs = Sets(given.data).pairs("en", part)
        different, columns = places(pairs)
        vectors, _ = teacher_vectors(settings, texts, different, kept, progress=False)
        embedded = trained.encode(different, batch_size=32, show_progress_bar=False)
        cosines = {"teacher": cosines_of(vectors.numpy(), *columns), "student": cosines_of(embedded, *columns)}
        row: records.Record = {
            "model": MODEL, "precision": given.precision, "set": f"STS-B en {part}", "teacher": RECIPE, "corpus": name,
            "texts": len(texts), **records.today(),
        }  # fmt: skip
        scores, names = shares(cosines, pairs.scores), ("score", "low", "high")
        yield {**row, "student": f"the teacher: {RECIPE}", **dict(zip(names, scores["teacher"], strict=True))}
        row |= dict(zip(names, scores["student"], strict=True))
        row |= dict(zip(("share", "share_low", "share_high"), scores["share"], strict=True))
        more = {"agreement": agreement, "neighbours": neighbours, "seconds": seconds, "dimensions": embedded.shape[1]}
        yield {**row, "student": title, **more}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/distil", threads=1)
    made.add_argument("--path", type=Path, help="the language model, where it is there already")
    made.add_argument("--embedder", type=Path, help="the encoder, where it is there already")
    made.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    made.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    made.add_argument("--sets", nargs="+", choices=PARTS, default=list(PARTS), help="of STS-B, to score on")
    made.add_argument("--held-out", type=int, default=500)
    given = options(made, arguments)
    for name in given.corpora:
        for title in given.students:
            there = records.there("distil", given.results, student=title, corpus=name)
            if {f"STS-B en {part}" for part in given.sets} <= {row["set"] for row in there}:
                continue
            rows = list(measure(title, name, given))
            records.rewrite("distil", rows, given.results)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
