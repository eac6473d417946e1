"""Run all code blocks of README.md and the documentation, in order, page by page.

Tiny models and small numbers replace those of the pages: :data:`STANDS_FOR`. A block that cannot run here is marked
with a reason right above it: ``<!-- not run: it needs the Hub -->``; :data:`NOT_RUN` is the number of such blocks.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, ReBAModule
from st_reba.data.demo import demo_sentences
from st_reba.hub.push import check_saved_model
from st_reba.recipes import lookup
from st_reba.train import BeLLMTraining, FreezeTraining, JTCSETraining, read_settings

from .backbones import language_model
from .cli import typed
from .conftest import PROMPTS, pipeline
from .script.installed import Running, Script

ROOT = Path(__file__).parents[1]
METHODS = ROOT / "docs" / "methods"
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted(METHODS.glob("*.md"))]
PAGES = [ROOT / "README.md", *DOCS]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)

#: Blocks that are not run.
NOT_RUN = 34

#: What stands for a name or a number of the pages. The tiny language model has 3 layers, and 32 values a token.
STANDS_FOR = {
    "st-reba build --recipe echo-topic": "st-reba build --model Qwen/Qwen3-0.6B --recipe echo-topic",
    "echo-topic --out my-model": "echo-topic --out from-pypi",
    "st_reba.demo_model()": '"HuggingFaceTB/SmolLM2-135M-Instruct"',
    "Qwen/Qwen3-0.6B": "{model}",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "{model}",
    "princeton-nlp/unsup-simcse-bert-base-uncased": "{encoder}",
    "path-or-id-of-an-encoder": "{encoder}",
    "another-of-the-same-shape": "{other encoder}",
    "sentence-transformers/all-nli:triplet": "nli.tsv",
    'SentenceTransformer("org/name")': 'SentenceTransformer("my-model")',
    "dimension=128": "dimension=8",
    "--dimensions 128": "--dimensions 8",
    "[256, 512]": "[8, 16]",
    # The tiny one was trained on no conversations.
    "chat = [": 'model[0].processor.chat_template = tokenizer.chat_template = "{{ messages }}"\nchat = [',
    "@20": "@2",
    "layers: [12, 18, 24]": "layers: [1, 2, 3]",
}

#: Paragraphs of each method, in this order; its equation follows the first one.
FORM = ["**When.**", "$$", "**Differences.**", "**Paper.**"]

#: The settings of each trained method, by the data that they ask for.
TRAININGS = {"triplets": BeLLMTraining, "pairs": FreezeTraining, "texts": JTCSETraining}


class Block(NamedTuple):
    language: str
    code: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    # What sphinx makes something of is none.
    return [Block(match["language"], match["code"], match["reason"]) for match in found if match["language"][:1] != "{"]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Save a tiny causal language model with its head and many positions, for long prompts."""
    directory = tmp_path_factory.mktemp("causal")
    language_model(directory, max_position_embeddings=640, tie_word_embeddings=True)
    return str(directory)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """Save the model that pages call ``my-model``, built as in README."""
    made = pipeline(ReBAModule(model, repetitions=2, rows="last", deterministic=True), "lasttoken")
    made.prompts = dict(PROMPTS)
    directory = tmp_path_factory.mktemp("saved") / "my-model"
    made.save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def desk(tmp_path, monkeypatch, quick) -> Iterator[Path]:
    """Make a directory with the data that pages name."""
    texts = [text[:24].strip() for text in demo_sentences("en")[:24]]
    pairs = [(first, second, place % 6) for place, (first, second) in enumerate(zip(texts, texts[8:], strict=False))]
    written = {
        "texts.txt": "\n".join(texts),
        "pairs.tsv": "".join(f"{first}\t{second}\t{score}\n" for first, second, score in pairs),
        "intents.tsv": "".join(f"{text}\t{place % 3}\n" for place, text in enumerate(texts)),
        "nli.tsv": "".join(f"{a}\t{b}\t{c}\n" for a, b, c in zip(texts, texts[8:], texts[16:], strict=False)),
        "scifact/corpus.jsonl": "".join(f'{{"_id": "{n}", "text": "{text}"}}\n' for n, text in enumerate(texts)),
        "scifact/queries.jsonl": '{"_id": "a", "text": "a bank"}\n{"_id": "b", "text": "an apple"}\n',
        "scifact/qrels.tsv": "query-id\tcorpus-id\tscore\na\t0\t1\nb\t1\t1\n",
    }
    (tmp_path / "scifact").mkdir()
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # On how many texts decides nothing here.
    monkeypatch.setattr("st_reba.data.demo.demo_sentences", lambda *given: demo_sentences(*given)[:60])
    registered = list(lookup._registered)
    yield tmp_path
    # Methods that a page writes are its own.
    lookup._registered[:] = registered
    lookup._by_key.cache_clear()
    lookup._by_name.cache_clear()
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


class Reader:
    """Reader that runs the blocks of a page."""

    def __init__(self, page: Path, script: Script, capsys) -> None:
        self._page, self._script, self._capsys = page, script, capsys
        self._server: Running | None = None
        self.names: dict[str, Any] = {}

    def python(self, code: str, literal: bool) -> None:
        if name := re.match(r"# (\w+\.py)\n", code):
            Path(name[1]).write_text(code, encoding="utf-8")
            return
        self._capsys.readouterr()
        exec(compile(code, named(self._page), "exec"), self.names)
        shown = self._capsys.readouterr().out
        for said in re.findall(r"^print\(.*\)  # (.+)$", code, flags=re.MULTILINE):
            # Another model has other numbers.
            assert (said in shown) if literal else (without_numbers(said) in without_numbers(shown))

    def bash(self, code: str, literal: bool) -> None:
        for line in code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                getattr(self, f"_{words[0].replace('-', '_')}")(*words[1:])

    def yaml(self, code: str, literal: bool) -> None:
        """Check the settings of a training, reduced to one short step."""
        given = yaml.safe_load(code)
        for key in given.keys() & TRAININGS.keys():
            arguments = {**given.get("arguments", {}), "max_steps": 1, "per_device_train_batch_size": 2}
            Path("settings.yaml").write_text(yaml.safe_dump({**given, "arguments": arguments}), encoding="utf-8")
            read_settings(Path("settings.yaml"), TRAININGS[key])

    def _st_reba(self, command: str, *given: str) -> None:
        words = [command, *given]
        if command == "compare" and "--saved" not in words:
            # All of it where something comes out.
            words += [] if "--out" in words else ["--dry-run"]
            words += [] if "--model" in words else ["--model", self.names["path"]]
        elif "--out" in words:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        elif command == "serve":
            self.close()
            self._server = self._script.start(*words, "--port", "0", cwd=Path.cwd())
            self._server.until("at http://")
            return
        elif command == "verify":
            words[1] = self._server.output.split(" at ", 1)[1].split()[0]
        elif command == "push":
            # To a Hub it is pushed in tests/hub.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("st_reba.hub.push.push", lambda directory, *to, **how: check_saved_model(directory))
                typed(shlex.join(words))
            return
        done = self._script.run(*words, cwd=Path.cwd())
        assert done.code == 0, done.output

    def close(self) -> None:
        """Stop the page's server."""
        if self._server is not None:
            self._server.kill(signal.SIGTERM)
            assert self._server.wait().code == 0

    def _pip(self, *words: str) -> None:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        for extras in re.findall(r"st-reba\[(.*?)\]", " ".join(words)):
            assert set(extras.split(",")) <= known.keys()

    _uv = _pip


def without_numbers(text: str) -> str:
    return re.sub(r" *-?\d+\.\d+(e-\d+)?", "0.0", text)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_runs(page, model, encoder_paths, saved, desk, script, capsys, request):
    reader = Reader(page, script, capsys)
    request.addfinalizer(reader.close)
    texts = (desk / "texts.txt").read_text(encoding="utf-8").splitlines()
    paths = dict(zip(("{model}", "{encoder}", "{other encoder}"), (model, *encoder_paths()), strict=True))
    reader.names |= {"path": model, "texts": texts, "others": texts[::-1]}
    for language, code, reason in blocks(page):
        if reason or language not in ("python", "bash", "yaml"):
            continue
        meant = code
        for name, other in STANDS_FOR.items():
            meant = meant.replace(name, paths.get(other, other))
        written = re.search(r"--(out|save-best) my-model\b", meant)
        if "my-model" in meant and not written and not Path("my-model").exists():
            shutil.copytree(saved, "my-model")
        getattr(reader, language)(meant, literal=meant == code)


def test_blocks_are_run_known_and_no_wider_than_a_page_and_what_stands_for_something_is_needed():
    every = [block for page in PAGES for block in blocks(page)]
    assert sum(block.reason is not None for block in every) == NOT_RUN
    assert [name for name in STANDS_FOR if not any(name in block.code for block in every)] == []
    assert {block.language for block in every} <= {"python", "bash", "yaml", "text", "json", "nginx", ""}
    lines = [line for block in every if block.language != "text" for line in block.code.splitlines()]
    assert [line for line in lines if len(line) > 110] == []


def test_no_page_links_to_a_repository_whose_address_is_not_known():
    ours = re.compile(r"https?://\S*/st[-_]reba\b")
    assert [named(page) for page in PAGES if ours.search(page.read_text(encoding="utf-8"))] == []


def test_sentence_transformers_reads_a_causal_checkpoint_as_clients_says():
    model = str(ROOT / "tests" / "demo_lm")
    host = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": torch.float32})
    host.tokenizer.pad_token = host.tokenizer.eos_token
    assert "reads a causal checkpoint at its last token" in (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert host[1].get_config_dict()["pooling_mode"] == "lasttoken"
    classical = CausalTransformer(model, pool_over="all", model_kwargs={"dtype": torch.float32})
    ours = pipeline(classical, "lasttoken")
    assert np.allclose(ours.encode(["A short text."]), host.encode(["A short text."]), atol=1e-5)


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_a_page_ends_with_where_to_go_next_and_a_method_has_the_form_of_all(page):
    text = page.read_text(encoding="utf-8")
    *_, last = re.split(r"^## ", text, flags=re.MULTILINE)
    assert re.match(r"Next\n.*\]\([^)]*\.md\b[^)]*\)", last, re.DOTALL)
    if page.parent == METHODS:
        marks = [mark for mark, _ in groupby(re.findall(r"^(?:\*\*\w+\.\*\*(?=[ \n])|\$\$)", text, re.MULTILINE))]
        assert marks == FORM * (len(marks) // len(FORM)) != []
