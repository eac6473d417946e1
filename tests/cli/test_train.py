"""``st-reba train`` and ``distil``: what is printed, also where a run is stopped; each method is in tests/script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from st_reba.data.demo import demo_sentences

from . import typed

pytest.importorskip("peft")

DISTIL = "distil --recipe echo-2 --model roomy --texts many.txt --held-out 12 --epochs 1 --out out"
TRAIN = "train bellm --config bellm.yaml --out out"


@pytest.fixture(autouse=True)
def runs(desk):
    Path("many.txt").write_text("\n".join(demo_sentences("en")[:60]), encoding="utf-8")
    Path("nli.tsv").write_text("a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n", encoding="utf-8")


def config(arguments: str = "learning_rate: 1e-3") -> None:
    given = f"arguments: {{per_device_train_batch_size: 2, {arguments}}}"
    Path("bellm.yaml").write_text(f"model: lm\ntriplets: nli.tsv\nrank: 2\n{given}\n")


def test_a_run_and_what_is_there_already():
    config()
    shown = typed(TRAIN)
    assert 'Wrote out/model. Load it with: import st_reba; SentenceTransformer("out/model")' in shown
    assert "Wrote out/adapter" in shown
    assert "out/model exists and is not an empty" in typed(TRAIN, expect=1)


def test_a_run_that_diverges():
    config("learning_rate: 1e300, num_train_epochs: 9")
    assert "Error: Training diverged at step" in typed(TRAIN, expect=1)
    assert not Path("out/model").exists()


@pytest.mark.parametrize(
    ("line", "place"), [(TRAIN, "st_reba.train.bellm.fit_as_set"), (DISTIL, "st_reba.train.train_distil")]
)
def test_an_interrupted_run_says_how_to_go_on(line, place, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    config()
    monkeypatch.setattr(place, interrupt)
    assert "Stopped. The same command goes on from the last checkpoint in out." in typed(line, expect=130)


def test_what_a_student_reaches():
    Path("pairs.tsv").write_text("a cat\ta dog\t3\nrain\tsnow\t4\na cat\train\t0\nice\tdogs\t1\n")
    Path("distil.yaml").write_text(
        "recipe: echo-2\nmodel: roomy\ntexts: many.txt\nstudent: static\nheld_out: 12\nevaluation: pairs.tsv\n"
        "arguments: {num_train_epochs: 1}\n"
    )
    shown = typed("distil --config distil.yaml --out out")
    assert "Before training, on 12 texts that were held out: cosines in the teacher's order up to 0." in shown
    assert "On the labelled pairs the teacher has " in shown


@pytest.mark.parametrize("student", ["prompteol", "./prompteol"])
def test_a_recipe_is_called_by_its_key_and_a_folder_by_a_path(student, encoder_paths):
    shutil.copytree(encoder_paths()[0], "prompteol")
    shown = typed(f"{DISTIL} --student {student}")
    [module, *_] = json.loads(Path("out/model/modules.json").read_text())
    assert module["type"].startswith("st_reba." if student == "prompteol" else "sentence_transformers.")
    told = "prompteol is the recipe of that key. The directory prompteol, which is here too, is ./prompteol."
    assert (told in shown) == (student == "prompteol")
