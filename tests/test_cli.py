from __future__ import annotations

import json
import re

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_reba import __version__, cli

from .backbones import TEXTS

runner = CliRunner()


def run(*arguments: str, expect: int = 0) -> str:
    result = runner.invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    assert result.exit_code == expect, result.output
    return re.sub(r"\s+", " ", result.output)


def test_version():
    assert __version__ in run("--version")


def test_help_names_the_commands():
    output = run(expect=2)
    assert "compare" in output
    assert "build" in output


class TestCompare:
    def test_with_no_arguments(self, monkeypatch):
        """The offline default: the demo LM, the demo texts, word sense."""
        shown = []
        monkeypatch.setattr(cli.compare, "compare", lambda *args, **kwargs: shown.append(args) or real(*args, **kwargs))
        output = run("compare")
        (backbone, pairs, questions), *_ = shown
        assert backbone.model.config.hidden_size == 256
        assert (len(pairs), len(questions)) == (130, 40)
        for expected in (
            "the demo LM on 130 pairs of demo texts",
            "Odd one",
            "ReBA-3",
            "Bag of input embeddings",
            "1.00x",
        ):
            assert expected in output
        assert "Best: " in output or "No recipe beats the control" in output

    def test_on_the_users_own(self, backbone_path, tmp_path):
        data = tmp_path / "pairs.tsv"
        data.write_text("a cat\ta dog\t2\nthe bank\tthe river\t1\na mouse\ta mouse!\t5\n")
        output = run("compare", "--model", backbone_path(), "--data", data, "--max-seq-length", 9, "--device", "cpu")
        assert "on 3 pairs of" in output
        assert "Odd one" not in output

    def test_malformed_data(self, tmp_path):
        data = tmp_path / "pairs.tsv"
        data.write_text("a\tb\t1\nc\td\n")
        assert "pairs.tsv, line 2: 2 fields" in run("compare", "--data", data, expect=1)

    def test_a_file_that_is_not_there(self, tmp_path):
        assert "no.tsv" in run("compare", "--data", tmp_path / "no.tsv", expect=1)

    def test_a_model_that_is_not_there(self):
        assert "Error: " in run("compare", "--model", "no/such-model", expect=1)


real = cli.compare.compare


class TestBuild:
    def build(self, backbone_path, out, *options, expect=0):
        return run("build", "--model", backbone_path(), "--out", out, *options, expect=expect)

    @pytest.mark.parametrize(
        ("options", "kind", "settings"),
        [
            ((), "ReBAModule", {"repetitions": 2, "rows": "all", "layers": "all"}),
            (("--pooling", "last", "--repetitions", 3, "--layers=-1,0"), "ReBAModule",
             {"repetitions": 3, "rows": "last", "layers": [-1, 0]}),
            (("--method", "echo", "--template", "springer"), "EchoModule", {"repetitions": 2}),
            (("--method", "classical", "--pooling", "weightedmean", "--no-normalize"), "CausalTransformer",
             {"template": "{text}"}),
        ],
    )  # fmt: skip
    def test_a_ready_directory(self, options, kind, settings, backbone_path, tmp_path):
        out = tmp_path / "deep" / "model"
        self.build(backbone_path, out, *options, "--max-seq-length", 20)
        model = SentenceTransformer(str(out), device="cpu")
        assert type(model[0]).__name__ == kind
        assert {name: getattr(model[0], name) for name in settings} == settings
        assert model.max_seq_length == 20
        lengths = np.linalg.norm(model.encode(TEXTS), axis=1)
        assert np.allclose(lengths, 1) == ("--no-normalize" not in options)
        assert json.loads((out / "modules.json").read_text())[0]["type"] == f"st_reba.modules.{kind}"
        assert "import st_reba" in (out / "README.md").read_text()
        assert [path.name for path in out.parent.iterdir()] == ["model"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--repetitions", 0), "repetitions=0: give a whole number from 1"),
            (("--layers", "top"), "--layers 'top': use \"all\" or indices separated by commas"),
            (("--layers", "9"), "9 is out of range"),
            (("--template", "{text}"), "--template is for --method classical or echo"),
            (("--method", "classical", "--repetitions", 2), "--repetitions is for --method echo or reba"),
            (("--method", "echo", "--layers=-1"), "--layers is for --method reba"),
        ],
    )
    def test_refusals_leave_nothing_behind(self, options, message, backbone_path, tmp_path):
        assert message in self.build(backbone_path, tmp_path / "model", *options, expect=1)
        assert not list(tmp_path.iterdir())

    def test_a_directory_with_something_in_it_is_left_alone(self, backbone_path, tmp_path):
        (tmp_path / "model").mkdir()
        self.build(backbone_path, tmp_path / "model")
        before = sorted(path.name for path in (tmp_path / "model").iterdir())
        output = self.build(backbone_path, tmp_path / "model", expect=1)
        assert "exists and is not an empty directory: choose another --out" in output
        assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before

    def test_a_build_that_fails_half_way_leaves_nothing(self, backbone_path, tmp_path, monkeypatch):
        def fail(self, path, *args, **kwargs):
            raise OSError("no space left on device")

        monkeypatch.setattr(SentenceTransformer, "save_pretrained", fail)
        assert "no space left on device" in self.build(backbone_path, tmp_path / "model", expect=1)
        assert not list(tmp_path.iterdir())
