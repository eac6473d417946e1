"""What the pages of the documentation tell one to type does what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from st_reba import cli
from st_reba.data.demo import demo_sentences
from st_reba.hub import compat

DOCS = Path(__file__).parents[1] / "docs"

#: Headings of a page, each with what its section needs besides a language model.
SECTIONS = [
    ("retrieval.md", "Late interaction: a vector for each token", compat.MULTI_VECTOR_IS_THERE),
    ("retrieval.md", "Late chunking: chunks that know their document", True),
    ("engines.md", "What an engine can carry", True),
    ("retrieval.md", "A static model: no language model at all", True),
]


def blocks(page: str, heading: str) -> list[tuple[str, str]]:
    """The code of a section, each with its language, as it stands there."""
    section = re.split(r"^## ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    [found] = [part for part in section if part.startswith(f"{heading}\n")]
    return re.findall(r"^```(python|bash)\n(.*?)^```$", found, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("page", "heading", "can"), SECTIONS, ids=[heading for _, heading, _ in SECTIONS])
def test_a_section_runs_as_it_stands(page, heading, can, roomy_path, tmp_path, monkeypatch, capsys):
    """One block after another; any language model stands for the one that a command names."""
    if not can:
        pytest.skip("this version of sentence-transformers lacks what the section is about")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(demo_sentences()), encoding="utf-8")
    names: dict[str, Any] = {}
    found = blocks(page, heading)
    assert {language for language, _ in found} == {"python", "bash"}
    for language, code in found:
        if language == "bash":
            for line in code.replace("\\\n", " ").splitlines():
                command, *words = shlex.split(line)
                assert command == "st-reba"
                if "--model" in words and not Path(words[words.index("--model") + 1]).is_dir():
                    words[words.index("--model") + 1] = roomy_path
                # The tiny model's vectors have 32 values.
                words = ["8" if word in ("128", "256") else word for word in words]
                result = CliRunner().invoke(cli.app, words)
                assert result.exit_code == 0, result.output
            continue
        capsys.readouterr()
        # The tiny model's vectors have 32 values.
        code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", roomy_path).replace("dimension=128", "dimension=8")
        code = code.replace("dimension=64", "dimension=8").replace("64)", "8)")
        exec(compile(code, page, "exec"), names)
        told = re.findall(r"^print\(.*\)  # (.+)$", code, flags=re.MULTILINE)
        for said in told:
            assert said in re.sub(r"torch\.Size\(\[(.*?)\]\)", r"(\1)", capsys.readouterr().out)
