"""A desk: a directory with models, texts and tables, where a command is typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from st_reba import CausalTransformer
from st_reba.data.demo import demo_pairs, demo_questions

from ..backbones import TEXTS, own
from ..compare import samples
from ..conftest import pipeline


@pytest.fixture(scope="session")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "saved"
    pipeline(CausalTransformer(backbone_path())).save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def desk(saved, backbone_path, shallow_path, roomy_path, demo_path, quick, tmp_path, monkeypatch):
    """The current directory. Of its models ``lm`` is a tiny Llama, ``shallow`` one of one layer, ``roomy`` one that
    has room for long prompts, ``demo`` one that was trained, and ``saved`` a SentenceTransformer of ours."""
    monkeypatch.chdir(tmp_path)
    models = {"lm": backbone_path(), "shallow": shallow_path, "roomy": roomy_path, "demo": demo_path, "saved": saved}
    for name, path in models.items():
        Path(name).symlink_to(path)
    Path("full").mkdir()
    shutil.copytree(saved, "damaged")
    (own(Path("damaged")) / "model.safetensors").write_bytes(b"\x08\0\0\0")
    Path("full/notes.txt").touch()
    Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"a cat {n}\ta dog {n * 7}\t{n % 5}\n" for n in range(20)), encoding="utf-8")
    Path("zh.tsv").write_bytes(b"".join(demo_pairs("zh").read_bytes().splitlines(keepends=True)[:20]))
    Path("words.csv").write_bytes(demo_questions("en").read_bytes())
    Path("beir/qrels").mkdir(parents=True)
    queries, documents, judged = (
        "".join(line.format(n) for n in range(count))
        for line, count in (
            ('{{"_id": "q{0}", "text": "which cat is {0}?"}}\n', 6),
            ('{{"_id": "d{0}", "text": "a cat, {0}"}}\n', 9),
            ("q{0}\td{0}\t1\n", 6),
        )
    )
    Path("beir/queries.jsonl").write_text(queries)
    Path("beir/corpus.jsonl").write_text(documents)
    Path("beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    samples.real().save(Path("c.json"))
    return tmp_path


def written(desk: Path) -> set[str]:
    """Where something lies below a desk."""
    return {path.relative_to(desk).as_posix() for path in desk.rglob("*")}
