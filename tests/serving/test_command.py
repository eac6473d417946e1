"""What ``st-reba serve`` refuses, and its page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from st_reba.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def said(*arguments):
    ends = CliRunner().invoke(app, ["serve", *arguments])
    assert ends.exit_code == 1, ends.output
    return " ".join(ends.output.split())


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_package_is_missing(saved, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert f'Serving needs {missing}: pip install "st-reba[serve]".' in said(saved)


def test_what_cannot_be(saved, reranker_path, backbone_path):
    assert "There is no model to serve: give MODEL, --rerank, or both." in said()
    assert "--name is empty" in said(saved, "--name", "")
    assert "An API key is empty" in said(saved, "--api-key", "a,,b")
    assert "give it as --rerank" in said(reranker_path, "--port", "0")
    assert "give it as MODEL" in said("--rerank", saved, "--port", "0")
    assert "st-reba build" in said(backbone_path(), "--port", "0")
    assert "--host 203.0.113.1 --port 0 cannot be used" in said(saved, "--host", "203.0.113.1", "--port", "0")


def test_the_pages_code_runs(capsys, backbone_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    code = blocks[0].replace("HuggingFaceTB/SmolLM2-135M-Instruct", backbone_path())
    exec(compile(code, str(PAGE), "exec"), {})
    number, tokens = map(int, capsys.readouterr().out.split())
    assert number == 2
    assert tokens > 2
