"""A desk: a directory with models, texts and tables, where a command is typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from st_reba import CausalTransformer
from st_reba.data.demo import demo_pairs, demo_questions

from ..backbones import DEMO_MODEL, TEXTS, own
from ..compare import samples
from ..conftest import pipeline


@pytest.fixture(scope="session")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "saved"
    pipeline(CausalTransformer(backbone_path())).save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def desk(saved, backbone_path, shallow_path, roomy_path, quick, tmp_path, monkeypatch):
    """The current directory. Of its models ``lm`` is a tiny Llama, ``shallow`` one of one layer, ``roomy`` one that
    has room for long prompts, ``demo`` one that was trained, and ``saved`` a SentenceTransformer of ours."""
    monkeypatch.chdir(tmp_path)
    models = {"lm": backbone_path(), "shallow": shallow_path, "roomy": roomy_path, "demo": DEMO_MODEL, "saved": saved}
    for name, path in models.items():
        Path(name).symlink_to(path)
    for name in ("empty", "full", "packed", "MODEL"):
        Path(name).mkdir()
    shutil.copytree(saved, "damaged")
    (own(Path("damaged")) / "model.safetensors").write_bytes(b"\x08\0\0\0")
    shutil.copytree(backbone_path(), "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("full/notes.txt").touch()
    Path("packed/q4.gguf").write_bytes(b"GGUF")
    Path("MODEL/config.json").write_text('{"num_hidden_layers": 4}')
    # The key with its type, a 32-bit number, and its value.
    Path("GGUF").write_bytes(b"GGUF" + b"smol.block_count" + bytes([4, 0, 0, 0, 30, 0, 0, 0]))
    Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"a cat {n}\ta dog {n * 7}\t{n % 5}\n" for n in range(20)), encoding="utf-8")
    Path("ending.txt").write_text("{text} and its use in one word is:\n", encoding="utf-8")
    Path("zh.tsv").write_bytes(b"".join(demo_pairs("zh").read_bytes().splitlines(keepends=True)[:20]))
    Path("words.csv").write_bytes(demo_questions("en").read_bytes())
    Path("q.jsonl").write_text("".join(f'{{"_id": "q{n}", "text": "which cat is {n}?"}}\n' for n in range(6)))
    Path("c.csv").write_text("_id,title,text\n" + "".join(f'd{n},Cats,"a cat, {n}"\n' for n in range(9)))
    Path("r.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(6)))
    samples.real().save(Path("c.json"))
    return tmp_path


def written(desk: Path) -> set[str]:
    """Where something lies below a desk."""
    return {path.relative_to(desk).as_posix() for path in desk.rglob("*")}
