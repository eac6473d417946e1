"""Each block of docs/clients.md, run as it is pasted behind the page's first one.

A block whose program lies in another environment is skipped in this one: see :data:`APART`.
"""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ..backbones import DEMO_MODEL

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEFORE, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
#: LangChain has an environment of its own, which has none of the others.
APART = "langchain_huggingface"
#: Its requirements exclude those of the others.
BY_HAND = "semantic_router"


def programs(block: str) -> list[str]:
    return re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: programs(block)[0])
def test_a_block(block, prompted_path, tmp_path, monkeypatch):
    if (find_spec(APART) is not None) != (APART in programs(block)):
        pytest.skip("this program is in another environment")
    if BY_HAND in programs(block):
        pytest.importorskip(BY_HAND)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(prompted_path, "my-model")
    names: dict[str, object] = {}
    for code in (BEFORE, block):
        code = code.replace("Qwen/Qwen3-0.6B", str(DEMO_MODEL)).replace("dimension=128", "dimension=8")
        names["expected"] = names.pop("nearest", None)
        exec(compile(code, "docs/clients.md", "exec"), names)
    if "nearest" in block:
        assert names["nearest"] == names["expected"]
    if "StaticModel" in block:
        assert np.allclose(names["vectors"], names["table"].encode(names["texts"]), atol=1e-5)
    if "BERTopic" in block:
        assert len(names["numbers"]) == 6
