"""Tests of the programs and notebooks in examples/."""

from __future__ import annotations

import io
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import st_reba
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import read_data, read_pairs
from st_reba.serve.app import Server
from st_reba.serve.models import Embedder

from .backbones import CHAT_TEMPLATE, DEMO_MODEL, TEXTS, save_talking
from .conftest import long
from .serve.conftest import serving

EXAMPLES = Path(__file__).parents[1] / "examples"

TRIPLETS = "a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n"
PAIRS = "a man\ta person\t4.5\nice\twater\t3\nup\tdown\t0.5\n"
CONDITIONS = (
    "sentence1,sentence2,condition,label\na man sits,two men stand,the number of people,1\n"
    "a man sits,two men stand,the sex of the people,5\nice melts,fire burns,the temperature,2\n"
)
SHORT = "--batch-size 2 --max-steps 2"

#: A program, what it is given, what it says, and the modules of what it saves.
RUNS = {
    "llama2_zh_reba": ("--base {demo} --out {out}", "it gives the same embeddings", "st_reba.modules.ReBAModule"),
    "train_bellm": (f"--base {{base}} --triplets nli.tsv --out {{out}} {SHORT}", "reloaded, it gives (3, 32)", None),
    "train_csts": (
        f"--base {{base}} --train csts.csv --dev csts.csv --out {{out}} {SHORT}", "After: {'pearson_cosine': ", None
    ),
    "train_freeze": (
        f"--base {{base}} --pairs pairs.tsv --out {{out}} {SHORT}",
        "its embeddings are (2, 32)",
        "st_reba.modules.LayerwiseAutoencoder",
    ),
    "train_jtcse": (
        f"--base {{tower}} --second {{other}} --texts texts.txt --out {{out}} {SHORT}",
        "reloaded, they give (3, 32)",
        "st_reba.modules.TwinTower",
    ),
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in this process, which saves the imports, and return its output."""
    monkeypatch.chdir(tmp_path)
    written = {"nli.tsv": TRIPLETS, "pairs.tsv": PAIRS, "csts.csv": CONDITIONS, "texts.txt": "\n".join(TEXTS)}
    for name, text in written.items():
        Path(name).write_text(text, encoding="utf-8")

    def shown(script: str, arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return shown


def test_a_chat_recalls_what_was_said(run, monkeypatch):
    save_talking(Path("talking"), max_position_embeddings=2048)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ice is cold\nfire is hot\nice is cold\n\nnot read\n"))
    shown = run("chat.py", "--model talking --recalled 1 --max-new-tokens 3")
    assert [line for line in shown.splitlines() if line.startswith("(")] == [
        "(recalls: )", "(recalls: ice is cold)", "(recalls: ice is cold)"
    ]  # fmt: skip


@pytest.mark.parametrize("is_tiny", [True, long(False)])
def test_an_agent_recalls_what_it_was_told_by_the_server(is_tiny, run, tmp_path, monkeypatch):
    chat = pytest.importorskip("st_reba.serve.chat")
    path = save_talking(tmp_path / "lm", max_position_embeddings=2048) if is_tiny else DEMO_MODEL
    lm = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path, chat_template=CHAT_TEMPLATE)
    embedder = Embedder("my-model", st_reba.build(lm, "echo-2", tokenizer=tokenizer))
    said = "the bank raised its rates\nrain is expected in the north\nthe bank raised its rates\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    with serving(Server(embedder, chat=chat.Chat(embedder))) as url:
        shown = run("memory_server.py", f"--url {url}/v1 --recalled 1")
    assert [line for line in shown.splitlines() if line.startswith("(recalls")] == [
        "(recalls: )", "(recalls: the bank raised its rates)", "(recalls: the bank raised its rates)"
    ]  # fmt: skip
    assert len(shown) > 200


@pytest.mark.parametrize("name", RUNS)
def test_an_example(name, run, tmp_path, backbone_path, encoder_paths):
    arguments, said, module = RUNS[name]
    tower, other = encoder_paths()
    places = {"base": backbone_path(), "demo": DEMO_MODEL, "tower": tower, "other": other}
    assert said in run(f"{name}.py", arguments.format(out=tmp_path / "out", **places))
    [listed] = [path for path in (tmp_path / "out" / "modules.json", tmp_path / "out" / "model" / "modules.json")
                if path.is_file()]  # fmt: skip
    assert module is None or module in listed.read_text()
    if name == "train_jtcse":
        given = f"--teacher {listed.parent} --student {tower} --texts texts.txt --out one {SHORT}"
        assert "its mean cosine to the two is" in run("distill_jtcse.py", given)
        # The student is nothing of ours.
        assert "st_reba" not in (tmp_path / "one" / "modules.json").read_text()


def cells(name: str) -> dict[str, Any]:
    """Run a notebook's cells in order without a kernel, and return their names."""
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    return names


@pytest.fixture
def small(monkeypatch, roomy_path):
    """Give the notebooks a tiny model and few texts; their scores are not checked."""
    monkeypatch.setenv("TOUR_MODEL", roomy_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr("st_reba.data.demo.demo_sentences", lambda language: demo_sentences(language)[:60])


@pytest.mark.usefixtures("small")
def test_retrieval_with_vectors_of_texts_and_of_tokens(monkeypatch):
    def few(path):
        """Read the queries with the relevant documents alone."""
        data = read_data(path).part(range(20))
        relevant = {each for some in data.relevant.values() for each in some}
        return replace(data, documents={key: data.documents[key] for key in data.documents if key in relevant})

    monkeypatch.setattr("st_reba.data.tables.read_data", few)
    names = cells("retrieval")
    assert set(names["found"]) == {"one vector", "a vector a token", "fused"}
    assert all(0 <= score.ndcg.value <= 1 for score in names["found"].values())


@pytest.mark.usefixtures("small")
def test_chat_and_memory_from_one_model():
    names = cells("memory")
    assert names["copied"] == 0
    assert len(names["recalled"]) == len(names["questions"])


@pytest.mark.usefixtures("small")
def test_the_tour(monkeypatch):
    """Run the cells; `make notebook` also starts a kernel."""
    monkeypatch.setattr("st_reba.data.tables.read_pairs", lambda path: read_pairs(path).part(range(12)))
    names = cells("tour")
    assert len(names["recipes"]) == 5
    assert names["words"].shape == (3, 32)
    assert names["loaded"].encode(names["texts"]) == pytest.approx(names["spread"].encode(names["texts"]), abs=1e-5)


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_has_kept_tells_nothing_of_a_machine(notebook):
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert "execution" not in cell["metadata"]
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr"
            assert "site-packages" not in json.dumps(output)
