"""Every recipe with its controls and intervals on public evaluation sets, which are not part of this repository.

    python benchmarks/real_data.py --data DIR --out build/real      # hours on a CPU; RESULTS.md says what was run
    python benchmarks/real_data.py --data DIR --out build/real --sets slpwc stsb-zh --model PATH-OR-ID

``DIR`` holds SLPWC_v1.csv and WSD_v1.csv (word sense, from the ReBA paper's authors), stsb_{zh,en}_test.tsv (text,
text, score), tnews_{train,test}.tsv and thucnews_titles.tsv (title, class). A set whose file is missing is named and
left out. Nothing is tuned on them; whitening and all-but-the-top are fitted on plain texts of stsb_{zh,en}_train.tsv
and tnews_train.tsv where those lie there, on the package's own where not. For each set a Markdown table, a CSV and the
report's page are written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset, DatasetDict
from mteb import AbsTask, TaskMetadata
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering
from transformers.utils import logging

from st_reba import CausalTransformer
from st_reba.columns import word_sense_column
from st_reba.compare import Recipes, assemble, compare, compare_tasks
from st_reba.data import DEMO_MODEL, read_pairs
from st_reba.evaluation import OddOneOutEvaluator
from st_reba.recipes import default_recipes
from st_reba.report import write_report
from st_reba.results import RANDOM, Comparison


def word_sense(recipes: Recipes, data: Path, name: str) -> Comparison:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        questions = OddOneOutEvaluator.from_csv(data / name, on_missing_word="skip")
    return assemble(recipes, [word_sense_column(recipes, questions)])


def pairs(recipes: Recipes, data: Path, name: str) -> Comparison:
    return compare(recipes, read_pairs(data / name))


def rows(path: Path) -> Dataset:
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    classes = sorted({label for _, label in lines})
    return Dataset.from_dict(
        {"text": [text for text, _ in lines], "label": [classes.index(label) for _, label in lines]}
    )


def metadata(name: str, kind: str, metric: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="Titles of news.", dataset={"path": f"local/{name}", "revision": "1"}, type=kind,
        category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["cmn-Hans"], main_score=metric,
    )  # fmt: skip


class TNews(AbsTaskClassification):
    """Logistic regression on mteb's few training titles a class, ten times."""

    metadata = metadata("TNews", "Classification", "accuracy")

    def __init__(self, data: Path) -> None:
        super().__init__()
        self.dataset = DatasetDict(train=rows(data / "tnews_train.tsv"), test=rows(data / "tnews_test.tsv"))
        self.data_loaded = True

    def _calculate_scores(self, y_test: Sequence[int], y_pred: Sequence[int]) -> dict[str, float]:
        # A lazy column, which each of many metrics would read from the file again.
        return super()._calculate_scores(list(y_test), y_pred)


class THUCNews(AbsTaskClustering):
    metadata = metadata("THUCNews", "Clustering", "v_measure")
    # mteb's own fraction, 4%, is meant for larger sets.
    max_fraction_of_documents_to_embed = 1.0

    def __init__(self, data: Path) -> None:
        super().__init__()
        titles = rows(data / "thucnews_titles.tsv").rename_columns({"text": "sentences", "label": "labels"})
        self.dataset = DatasetDict(test=titles)
        self.data_loaded = True


def task(recipes: Recipes, data: Path, make: Callable[[Path], AbsTask]) -> Comparison:
    return compare_tasks(recipes, [make(data)], model="measured")


class Measured(NamedTuple):
    """A set: how it is scored, and the training part whose plain texts whitening and all-but-the-top are fitted on."""

    run: Callable[..., Comparison]
    given: object
    files: tuple[str, ...]
    fit: str | None = None
    texts_a_row: int = 1


SETS = {
    "slpwc": Measured(word_sense, "SLPWC_v1.csv", ("SLPWC_v1.csv",)),
    "stsb-zh": Measured(pairs, "stsb_zh_test.tsv", ("stsb_zh_test.tsv",), "stsb_zh_train.tsv", 2),
    "stsb-en": Measured(pairs, "stsb_en_test.tsv", ("stsb_en_test.tsv",), "stsb_en_train.tsv", 2),
    "wsd": Measured(word_sense, "WSD_v1.csv", ("WSD_v1.csv",)),
    "tnews": Measured(task, TNews, ("tnews_train.tsv", "tnews_test.tsv"), "tnews_train.tsv"),
    # Its titles are all test; those of TNews are of the same kind.
    "thucnews": Measured(task, THUCNews, ("thucnews_titles.tsv",), "tnews_train.tsv"),
}

FIT_TEXTS = 3000


def fit_texts(measured: Measured, data: Path) -> list[str] | None:
    """Plain texts, without their labels; None for the package's own."""
    if measured.fit is None or not (data / measured.fit).is_file():
        return None
    lines = (data / measured.fit).read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines for text in line.split("\t")[: measured.texts_a_row]]
    return list(dict.fromkeys(texts))[:FIT_TEXTS]


def markdown(found: Comparison) -> str:
    """The first task's scores with intervals, and those of each recipe's control; = cannot be told from the best."""
    scored = found.tasks[0]
    controls = {result.name: result for result in found.results if result.control}
    best = found.best()
    lines = [f"| recipe | pooling | {scored.name}, {scored.metric} | on random weights |", "|---|---|---|---|"]
    for result in found.results:
        if result.recipe.startswith(f"{RANDOM}, ") or scored.name not in result.scores:
            continue
        score = result.scores[scored.name]
        shown = f"{scored.show(score.value)} {scored.show_interval(score)}"
        shown = f"**{shown}**" if result is best else f"{shown} =" if score.tied else shown
        control = controls.get(f"{RANDOM}, {result.name}")
        below = "" if control is None else scored.show(control.scores[scored.name].value)
        lines.append(f"| {result.recipe} | {result.pooling} | {shown} | {below} |")
    return "\n".join([*lines, "", " ".join(found.verdict), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, required=True, help="directory for tables and reports")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.disable_progress_bar()
    for name in options.sets:
        measured = SETS[name]
        if missing := [file for file in measured.files if not (options.data / file).is_file()]:
            print(f"{name} is left out: {', '.join(missing)} is not in {options.data}.", flush=True)
            continue
        backbone = CausalTransformer(options.model, model_kwargs={"dtype": "float32"})
        backbone.to(options.device)
        start = time.perf_counter()
        recipes = Recipes(backbone, default_recipes(fit_texts=fit_texts(measured, options.data)))
        found = measured.run(recipes, options.data, measured.given)
        command = shlex.join(["python", "benchmarks/real_data.py", "--sets", name])
        shown = "the demo LM" if options.model == str(DEMO_MODEL) else options.model
        found = replace(found, model=shown, data=name, command=command)
        write_report(found, options.out / name)
        (options.out / f"{name}.md").write_text(markdown(found), encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s, {torch.get_num_threads()} threads\n", flush=True)
        print(markdown(found), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
