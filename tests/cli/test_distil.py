from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
from sentence_transformers import SentenceTransformer
from typer.main import get_command

from st_reba.data.demo import demo_sentences
from st_reba_cli import app

from . import typed

run = partial(typed, "distil")

pytest.importorskip("peft")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(demo_sentences("en")[:60]), encoding="utf-8")
    return path


def test_it_says_what_the_student_reaches(roomy_path, texts, tmp_path):
    config = tmp_path / "distil.yaml"
    config.write_text(
        f"recipe: echo-2\nmodel: {roomy_path}\ntexts: {texts}\nstudent: static\nheld_out: 12\n"
        "arguments: {num_train_epochs: 1}\n"
        f"evaluation: {tmp_path / 'pairs.tsv'}\n"
    )
    (tmp_path / "pairs.tsv").write_text("a cat\ta dog\t3\nrain\tsnow\t4\na cat\train\t0\nice\tdogs\t1\n")
    shown = run("--config", config, "--out", tmp_path / "out")
    assert "Before training, on 12 texts that were held out: cosines in the teacher's order up to 0." in shown
    assert "On the labelled pairs the teacher has " in shown
    assert f'Load it with: import st_reba; SentenceTransformer("{tmp_path / "out" / "model"}")' in shown
    assert SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu").encode("a cat").any()


def test_few_texts_need_fewer_that_are_held_out(roomy_path, texts, tmp_path):
    given = ("--recipe", "echo-2", "--model", roomy_path, "--texts", texts, "--student", "static", "--epochs", 1)
    refused = run(*given, "--out", tmp_path / "out", expect=1)
    assert "texts.txt has 60 different texts, and 500 are held out: give at least 532" in refused
    assert "lower held_out (--held-out) to 28 or less" in refused
    assert "on 28 texts that were held out" in run(*given, "--held-out", 28, "--out", tmp_path / "out")


@pytest.mark.parametrize("student", ["prompteol", "./prompteol"])
def test_a_recipe_is_called_by_its_key_and_a_folder_by_a_path(
    student, roomy_path, encoder_paths, texts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(encoder_paths()[0], "prompteol")
    given = ("--recipe", "echo-2", "--model", roomy_path, "--texts", texts, "--held-out", 12, "--epochs", 1)
    shown = run(*given, "--student", student, "--out", "out")
    [module, *_] = json.loads((tmp_path / "out" / "model" / "modules.json").read_text())
    assert module["type"].startswith("st_reba." if student == "prompteol" else "sentence_transformers.")
    told = "prompteol is the recipe of that key. The directory prompteol, which is here too, is ./prompteol."
    assert (told in shown) == (student == "prompteol")


def test_beside_a_config_every_option_is_refused(tmp_path):
    (tmp_path / "distil.yaml").write_text("recipe: echo-2\nmodel: m\ntexts: t.txt\n")
    every = [option.opts[0] for option in get_command(app).commands["distil"].params]
    options = [option for option in every if option not in ("--out", "--config")]
    given = [f"{option}=4" for option in options]
    refused = run(*given, "--config", tmp_path / "distil.yaml", "--out", tmp_path / "out", expect=1)
    assert f"{', '.join(options)}: with --config all of it stands in the file." in refused


def test_an_interrupted_run_says_how_to_go_on(roomy_path, texts, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("st_reba.train.train_distil", interrupt)
    given = ("--recipe", "echo-2", "--model", roomy_path, "--texts", texts, "--output", tmp_path / "out")
    assert "Stopped. The same command goes on" in run(*given, expect=130)
