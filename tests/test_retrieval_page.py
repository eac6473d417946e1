"""What docs/retrieval.md says to type about words and order does what it says, on the demo language model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from st_reba import cli

from .backbones import DEMO_MODEL

PAGE = Path(__file__).parents[1] / "docs" / "retrieval.md"
SECTIONS = (
    "Sparse: the words to find it by",
    "Hybrid: vectors and words",
    "The state before the last feed-forward part",
    "Order: the same model as a reranker",
)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_runs_as_it_stands(heading, tmp_path, monkeypatch, capsys):
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [section] = [each for each in sections if each.startswith(f"{heading}\n")]
    found = re.findall(r"^```(python|bash)\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    assert found
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for language, code in found:
        if language == "python":
            code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(DEMO_MODEL))
            exec(compile(code, PAGE.name, "exec"), names)
            assert capsys.readouterr().out
            continue
        for line in code.splitlines():
            command, *words = shlex.split(line)
            assert command == "st-reba"
            words[words.index("--model") + 1] = str(DEMO_MODEL)
            result = CliRunner().invoke(cli.app, words)
            assert result.exit_code == 0, result.output
