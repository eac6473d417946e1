"""The command as it is typed after an installation, with what it wrote looked at.

Every command is run so by tests/test_pages.py. What a command prints and refuses is in tests/cli, where it runs in the
test's own process.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import st_reba
from st_reba import CausalTransformer, ReBAModule
from st_reba.compare.results import Comparison
from st_reba.recipes import find

from .. import processes
from ..conftest import pipeline
from .installed import Script

TEXTS = [
    "a cat sat", "the dog ran", "ice and snow", "it is warm", "a red car", "the old train", "we like tea", "they eat",
    "a blue bird", "the river", "stones are hard", "he sings",
]  # fmt: skip


@pytest.fixture
def desk(tmp_path, roomy_path, monkeypatch) -> None:
    """A directory with models and texts; it is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("lm").symlink_to(roomy_path)
    pipeline(ReBAModule("lm")).save_pretrained("saved", create_model_card=False)
    Path("texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")


def typed(script: Script, line: str) -> str:
    """What a command says that has to end well."""
    done = script.run(*shlex.split(line), cwd=Path.cwd())
    assert (done.code, "Traceback" in done.output) == (0, False), done.output
    return done.lines


def loaded(name: str) -> SentenceTransformer:
    return SentenceTransformer(name, device="cpu")


def test_encode_on_ray(script, desk):
    pytest.importorskip("ray", reason="Ray is not installed; make test-clients has it")
    told = typed(script, "encode saved texts.txt --out a.npy --engine ray --device cpu")
    assert "Wrote 12 vectors of 12 texts to a.npy." in told
    np.testing.assert_allclose(np.load("a.npy"), loaded("saved").encode(TEXTS), atol=1e-5)


def test_build_tells_what_it_wrote_on_stdout_and_all_else_on_stderr(script, desk):
    """In an interpreter that has nothing imported, as a shell starts it."""
    line = [script.path, *shlex.split("build --model lm --recipe reba-2 --out m --json")]
    done = subprocess.run(line, env=script.environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "schema": "st-reba/build/1", "path": "m", "family": "SentenceTransformer", "recipe": "reba-2",
        "load": 'import st_reba; from sentence_transformers import SentenceTransformer; SentenceTransformer("m")',
    }  # fmt: skip
    assert "Load it with" in done.stderr
    expected = pipeline(ReBAModule("lm")).encode(TEXTS, normalize_embeddings=True)
    assert np.allclose(loaded("m").encode(TEXTS), expected, atol=1e-5)


def test_the_printed_command_builds_what_was_scored(script, desk):
    """And what ``--save-best`` writes: layer, words, shares, and statistics of all texts.

    The labels are those of the second wording after a lower layer, so that there is something to choose; the columns
    have names of their own.
    """
    texts = [f"{TEXTS[n % 12]} {n}" for n in range(140)]
    topic = find("topic")
    own = replace(topic, layer=2, wording=topic.row.wordings[1], fit_texts=tuple(texts))
    vectors = st_reba.build("lm", own, device="cpu").encode(texts)
    scores = (vectors[:70] * vectors[70:]).sum(axis=1)
    rows = [f"{first}\t{second}\t{score}" for first, second, score in zip(texts, texts[70:], scores, strict=False)]
    Path("labelled.tsv").write_text("\n".join(["q1\tq2\tlike", *rows]) + "\n", encoding="utf-8")
    given = "--model lm --data labelled.tsv --columns q1,q2,like --device cpu --recipes topic,classical --no-controls"
    told = typed(script, f"compare {given} --out report --save-best best")
    assert "lm on 70 pairs of labelled.tsv" in told
    found = Comparison.load(Path("report/comparison.json"))
    assert found.choice().chosen == {found.choice().read_at: 10}
    assert "--template" in found.build
    assert "--recipe topic@2" in found.build
    assert "--fit-texts labelled.tsv --columns q1,q2,like" in found.build
    typed(script, found.build.removeprefix("st-reba "))
    for name in ("best", "my-topic"):
        cosines = [(first * other).sum(axis=1) for first, other in [np.split(loaded(name).encode(texts), 2)]]
        np.testing.assert_allclose(cosines[0], scores, atol=1e-5)
    files, built = (
        {path.relative_to(name): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
        for name in ("best", "my-topic")
    )
    assert files.keys() == built.keys()
    # The card of the first has the comparison.
    assert [str(path) for path in files if files[path] != built[path]] == ["README.md"]


def test_a_shell_completes(script, desk):
    for line, found in (
        ("st-reba bu", {"build"}), ("st-reba build --fit-t", {"--fit-texts"}),
        ("st-reba build --recipe echo-t", {"echo-topic"}),
        ("st-reba build --recipe classical+white", {"classical+whitened"}),
    ):  # fmt: skip
        env = {"_ST_REBA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        assert set(script.run(cwd=Path.cwd(), env=env).output.split()) == found


def test_a_saved_model_without_the_import(roomy_path, tmp_path):
    """The error is sentence-transformers', so the first lines of code on the model's card have the import."""
    pipeline(CausalTransformer(roomy_path)).save_pretrained(str(tmp_path / "saved"))
    code = 'from sentence_transformers import SentenceTransformer; SentenceTransformer("saved")'
    done = processes.run("-c", code, out=tmp_path / "printed", cwd=tmp_path)
    assert "st_reba.modules.CausalTransformer" in done.stdout
    assert "trust_remote_code=True" in done.stdout
    card = Path(tmp_path, "saved", "README.md").read_text(encoding="utf-8")
    first, loading = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[0].splitlines()[:2]
    assert first.startswith("import st_reba")
    assert loading == "from sentence_transformers import SentenceTransformer"
