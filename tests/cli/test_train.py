from __future__ import annotations

from functools import partial

import pytest
from sentence_transformers import SentenceTransformer

from st_reba import BidirectionalLastLayer, TwinTower

from ..backbones import TEXTS
from . import typed

run = partial(typed, "train")

pytest.importorskip("peft")


@pytest.fixture
def config(backbone_path, tmp_path):
    """Writes a config for the triplets in ``rows``."""

    def write(
        more: str = "",
        rows: str = "a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n",
        arguments: str = "learning_rate: 2e-4",
    ) -> str:
        (tmp_path / "nli.tsv").write_text(rows, encoding="utf-8")
        path = tmp_path / "bellm.yaml"
        given = f"arguments: {{per_device_train_batch_size: 2, {arguments}}}\n"
        path.write_text(f"model: {backbone_path()}\ntriplets: {tmp_path / 'nli.tsv'}\n{more}{given}")
        return str(path)

    return write


def test_bellm(config, tmp_path):
    out = tmp_path / "run"
    shown = run("bellm", "--config", config("rank: 2\n", arguments="learning_rate: 1e-3"), "--out", str(out))
    assert f'Load it with: import st_reba; SentenceTransformer("{out / "model"}")' in shown
    assert f"Wrote {out / 'adapter'}" in shown
    loaded = SentenceTransformer(str(out / "model"), device="cpu")
    assert isinstance(loaded[0], BidirectionalLastLayer)
    assert loaded.encode(TEXTS).shape == (5, 32)
    assert "model exists and is not an empty" in run("bellm", "--config", config(), "--out", str(out), expect=1)


@pytest.mark.parametrize(
    ("more", "rows", "message"),
    [
        ("rnak: 2\n", "a\tb\tc\n", "bellm.yaml: the key 'rnak' is unknown. Keys: "),
        (
            "model_kwargs: {dtpye: bfloat16}\n",
            "a\tb\tc\n",
            "model_kwargs: transformers knows no 'dtpye'. The nearest is dtype.",
        ),
        ("temperature: 0\n", "a\tb\tc\n", "bellm.yaml: temperature: 0 was given: input should be greater than 0."),
        (
            "",
            "a\tb\tc\na\tb\n",
            "nli.tsv, line 2: 2 columns where 3 are expected. A row is anchor, positive,",
        ),
        ("template: x\n", "a\tb\tc\n", "The template 'x' has no {text}"),
    ],
)
def test_refusals_leave_nothing_behind(more, rows, message, config, tmp_path):
    assert message in run("bellm", "--config", config(more, rows), "--out", str(tmp_path / "run"), expect=1)
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges(config, tmp_path):
    diverging = config(arguments="learning_rate: 1e300, num_train_epochs: 9")
    shown = run("bellm", "--config", diverging, "--out", str(tmp_path / "run"), expect=1)
    assert "Error: Training diverged at step" in shown
    assert not (tmp_path / "run/model").exists()


def test_an_interrupted_run_says_how_to_go_on(config, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("st_reba.train.bellm.fit", interrupt)
    shown = run("bellm", "--config", config(), "--out", str(tmp_path / "run"), expect=130)
    assert "Stopped. The same command goes on from the last checkpoint" in shown


class TestFreeze:
    @pytest.fixture
    def config(self, backbone_path, tmp_path):
        def write(more: str = "", rows: str = "a man\ta person\t4.5\nice\twater\t3\nup\tdown\t0.5\n") -> str:
            (tmp_path / "pairs.tsv").write_text(rows, encoding="utf-8")
            path = tmp_path / "freeze.yaml"
            path.write_text(f"model: {backbone_path()}\npairs: {tmp_path / 'pairs.tsv'}\n{more}")
            return str(path)

        return write

    def test_trains(self, config, tmp_path):
        out = tmp_path / "run"
        arguments = "arguments: {num_train_epochs: 2, per_device_train_batch_size: 3}\n"
        more = f"bottlenecks: [4, 8]\npretraining_epochs: 1\n{arguments}"
        shown = run("freeze", "--config", config(more), "--out", str(out))
        assert f'Load it with: import st_reba; SentenceTransformer("{out / "model"}")' in shown
        loaded = SentenceTransformer(str(out / "model"), device="cpu")
        assert loaded.encode(TEXTS).shape == (5, 16)

    @pytest.mark.parametrize(
        ("more", "rows", "message"),
        [
            ("bottleneck: 4\n", "a\tb\t1\nc\td\t2\n", "freeze.yaml: the key 'bottleneck' is unknown. Keys: "),
            ("bottlenecks: 4\n", "a\tb\t1\nc\td\t2\n", "bottlenecks: 4 was given: input should be a valid list"),
            ("", "a\tb\t1\nc\td\n", "pairs.tsv, line 2: 2 columns where 3 are expected."),
            ("", "a\tb\t1\nc\td\t7\n", "pairs.tsv, pair 2: the score 7 is not from 0 to 5."),
        ],
    )
    def test_refusals_leave_nothing_behind(self, more, rows, message, config, tmp_path):
        assert message in run("freeze", "--config", config(more, rows), "--out", str(tmp_path / "run"), expect=1)
        assert not (tmp_path / "run").exists()


def test_jtcse(encoder_paths, tmp_path):
    first, second = encoder_paths()
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    config, out = tmp_path / "jtcse.yaml", tmp_path / "run"
    config.write_text(
        f"model: {first}\nsecond_model: {second}\ntexts: {tmp_path / 'texts.txt'}\ncross_every: 4\n"
        "arguments: {per_device_train_batch_size: 2}\n"
    )
    shown = run("jtcse", "--config", str(config), "--out", str(out))
    assert f'Load it with: import st_reba; SentenceTransformer("{out / "model"}")' in shown
    loaded = SentenceTransformer(str(out / "model"), device="cpu")
    assert isinstance(loaded[0], TwinTower)
    assert loaded[0].cross_layers == [4]
    config.write_text(f"model: {first}\ntexts: {tmp_path / 'texts.txt'}\ncross_every: 9\n")
    shown = run("jtcse", "--config", str(config), "--out", str(tmp_path / "other"), expect=1)
    assert "cross_every=9: give a number of layers from 1 to 4" in shown
    assert not (tmp_path / "other").exists()
