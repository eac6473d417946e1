from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_reba.data.demo import demo_sentences
from st_reba_cli import app

pytest.importorskip("peft")


def run(*arguments: object, expect: int = 0) -> str:
    result = CliRunner().invoke(app, ["distil", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return " ".join(result.output.split())


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


def test_an_interrupted_run_says_how_to_go_on(roomy_path, texts, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("st_reba_cli.running.distil.train_distil", interrupt)
    given = ("--recipe", "echo-2", "--model", roomy_path, "--texts", texts, "--output", tmp_path / "out")
    assert "Stopped. The same command goes on" in run(*given, expect=130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--recipe, --model, --texts missing: give a recipe, its model and texts; or --config."),
        (("--recipe", "a", "--config", "x.yaml"), "--recipe: with --config all of it stands in the file"),
        (("--config", "no.yaml"), "no.yaml: there is no such file"),
        (("--recipe", "echo-2", "--model", "./no", "--texts", "x.txt"), "./no: there is no such directory"),
    ],
)
def test_refusals(arguments, message, tmp_path):
    assert message in run(*arguments, "--out", tmp_path / "out", expect=1)
    assert not (tmp_path / "out").exists()
