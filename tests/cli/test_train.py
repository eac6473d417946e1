"""``st-reba train``: what is printed, also where a run is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import typed

pytest.importorskip("peft")

TRAIN = "train bellm --config bellm.yaml --out out"


@pytest.fixture(autouse=True)
def runs(desk):
    Path("nli.tsv").write_text("a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n", encoding="utf-8")


def config(arguments: str = "learning_rate: 1e-3") -> None:
    given = f"arguments: {{per_device_train_batch_size: 2, {arguments}}}"
    Path("bellm.yaml").write_text(f"model: lm\ntriplets: nli.tsv\nrank: 2\n{given}\n")


def test_a_run_and_what_is_there_already():
    config()
    shown = typed(TRAIN)
    assert "Wrote out/model. Load it with: import st_reba; from sentence_transformers import Sentence" in shown
    assert "Wrote out/adapter" in shown
    assert "out/model exists and is not an empty" in typed(TRAIN, expect=1)


def test_the_other_methods(encoder_paths):
    for name, line in (
        ("freeze", "model: lm\npairs: pairs.tsv\nstage: cosines"),
        ("jtcse", f"model: {encoder_paths()[0]}\ntexts: texts.txt"),
    ):
        Path("run.yaml").write_text(f"{line}\narguments: {{max_steps: 1, per_device_train_batch_size: 2}}\n")
        assert f"Wrote {name}/model." in typed(f"train {name} --config run.yaml --out {name}")


def test_a_run_that_diverges():
    config("learning_rate: 1e300, num_train_epochs: 9")
    assert "Error: Training diverged at step" in typed(TRAIN, expect=1)
    assert not Path("out/model").exists()


def test_an_interrupted_run_says_how_to_go_on(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    config()
    monkeypatch.setattr("st_reba.train.bellm.fit", interrupt)
    assert "Stopped. The same command resumes from the last checkpoint in out." in typed(TRAIN, expect=130)
