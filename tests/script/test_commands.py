"""Every command as it is typed after an installation, with what it wrote looked at."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pydantic import BaseModel, create_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from typer.main import get_command

from st_reba import BidirectionalLastLayer, CausalTransformer, LayerwiseAutoencoder, ReBAModule, TwinTower
from st_reba.compare.choice import Halves
from st_reba.compare.results import Comparison
from st_reba.data.tables import read_data, read_pairs
from st_reba.encode import place_of
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import find
from st_reba_cli import app
from st_reba_cli.results import SCHEMAS, Built, EncodedFile, Pushed, Verified

from ..conftest import pipeline
from ..hub.server import RunningHub
from .installed import Script

TEXTS = [
    "a cat sat", "the dog ran", "ice and snow", "it is warm", "a red car", "the old train", "we like tea", "they eat",
    "a blue bird", "the river", "stones are hard", "he sings",
]  # fmt: skip


@pytest.fixture
def desk(tmp_path, roomy_path, encoder_paths, monkeypatch) -> None:
    """A directory with models, texts, pairs and configurations; it is the current one."""
    monkeypatch.chdir(tmp_path)
    first, second = encoder_paths()
    for name, path in {"lm": roomy_path, "first": first, "second": second}.items():
        Path(name).symlink_to(path)
    pipeline(ReBAModule("lm")).save_pretrained("saved", create_model_card=False)
    # A search halves them, and no text may be in both halves.
    pairs = [f"{TEXTS[n % 12]} {n}\t{TEXTS[5 * n % 11]} {n}\t{n % 5}" for n in range(66)]
    triplets = [f"{a}\t{b}\t{c}" for a, b, c in zip(TEXTS, TEXTS[1:], TEXTS[2:], strict=False)]
    # One text is alone in its class.
    sorts = ["said\tsort", *(f"{TEXTS[n % 12]} {n}\tsort {n % 3}" for n in range(140)), "only this\talone"]
    tables = {"texts.txt": TEXTS, "pairs.tsv": pairs, "sorts.tsv": sorts, "nli.tsv": triplets}
    for name, rows in tables.items():
        Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    configs: dict[str, dict[str, Any]] = {
        "bellm": {"model": "lm", "triplets": "nli.tsv", "rank": 2},
        "freeze": {"model": "lm", "pairs": "pairs.tsv", "bottlenecks": [8, 8]},
        "jtcse": {"model": "first", "second_model": "second", "texts": "texts.txt"},
    }
    for name, settings in configs.items():
        settings["arguments"] = {"max_steps": 1, "per_device_train_batch_size": 2}
        Path(f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML.


def typed(script: Script, line: str) -> str:
    """What a command says that has to end well."""
    done = script.run(*shlex.split(line), cwd=Path.cwd())
    assert (done.code, "Traceback" in done.output) == (0, False), done.output
    return done.lines


def json_in(told: str, schema: str, kind: type[BaseModel]) -> Any:
    """The object in what a command printed, on whichever stream."""
    found, _ = json.JSONDecoder().raw_decode(told, told.index('{\n "schema"'))
    assert found.pop("schema") == f"st-reba/{schema}/1"
    return kind.model_validate(found, strict=True)


def loaded(name: str) -> SentenceTransformer:
    return SentenceTransformer(name, device="cpu")


def encoded(name: str) -> np.ndarray:
    """What a saved model gives for the texts, loaded here; or what was encoded."""
    vectors: np.ndarray = np.load(name) if name.endswith(".npy") else loaded(name).encode(TEXTS)
    assert np.isfinite(vectors).all()
    return vectors


def same(first: str, second: str | np.ndarray) -> bool:
    return np.allclose(encoded(first), encoded(second) if isinstance(second, str) else second, atol=1e-5)


def files_of(name: str) -> dict[Path, bytes]:
    return {path.relative_to(name): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}


def wrote(name: str, *files: str) -> bool:
    return {*files} <= {path.name for path in Path(name).iterdir()}


LOAD = "Load it with: import st_reba; SentenceTransformer"
ON = "--model lm --data pairs.tsv --device cpu --dtype float32"
OF_CLASSES = "--model lm --data sorts.tsv --columns said,sort --device cpu --dtype float32"
ENCODE = "encode saved texts.txt --dtype float32 --out"

#: What is typed, what is said in the end, and what then holds.
CASES: dict[str, tuple[list[str], str, Callable[[], object]]] = {
    "build": (
        ["build --model lm --out built --pooling mean"], f'{LOAD}("built")',
        lambda: same("built", pipeline(ReBAModule("lm")).encode(TEXTS, normalize_embeddings=True))),
    "compare": (
        [f"compare {ON} --recipes classical --out report --save-best best --no-controls",
         "compare --saved report/comparison.json --against report/comparison.json"], "lm on 66 pairs of pairs.tsv",
        lambda: wrote("report", "report.html", "results.csv", "comparison.json") and encoded("best").any()),
    "encode": ([f"{ENCODE} a.npy"], "Wrote 12 vectors to a.npy.", lambda: same("a.npy", "saved")),
    "encode, chunks": (
        [f"{ENCODE} b.parquet --chunk-tokens 3"], "the chunks of 12 texts", lambda: Path("b.parquet").is_file()),
    "encode, on Ray": ([f"{ENCODE} a.npy --engine ray --device cpu"], "Wrote 12", lambda: same("a.npy", "saved")),
    "export, plain": (
        ["build --model lm --recipe classical --out built", "export --model built --plain plain"], "engine that has",
        lambda: "st_reba" not in Path("plain/modules.json").read_text() and same("plain", "built")),
    "export, static": (
        ["export --model lm --static table --fit-texts texts.txt --dimensions 8"], "Wrote table. Load it with",
        lambda: isinstance(loaded("table")[0], StaticEmbedding) and encoded("table").shape == (12, 8)),
    "train, bellm": (
        ["train bellm --config bellm.yaml --out run"], "Wrote run/adapter",
        lambda: isinstance(loaded("run/model")[0], BidirectionalLastLayer) and encoded("run/model").any()),
    "train, freeze": (
        ["train freeze --config freeze.yaml --out run"], f'{LOAD}("run/model")',
        lambda: any(isinstance(module, LayerwiseAutoencoder) for module in loaded("run/model"))),
    "train, jtcse": (
        ["train jtcse --config jtcse.yaml --out run"], f'{LOAD}("run/model")',
        lambda: isinstance(loaded("run/model")[0], TwinTower)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_command(name, script, desk):
    if "Ray" in name and find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-clients has it")
    lines, said, holds = CASES[name]
    for line in lines:
        told = typed(script, line)
    assert said in told
    assert holds()


def test_the_printed_command_builds_what_was_scored(script, desk):
    """And what ``--save-best`` writes: layer, words, shares, and statistics of the half that it was chosen on.

    The labels are those of the second wording after a lower layer, so that there is something to choose.
    """
    texts = [f"{TEXTS[n % 12]} {n}" for n in range(140)]
    topic = find("topic")
    own = replace(topic, layer=2, wording=topic.row.wordings[1], fit_texts=tuple(texts))
    vectors = own.model(CausalTransformer("lm")).encode(texts, normalize_embeddings=True)
    scores = (vectors[:70] * vectors[70:]).sum(axis=1)
    rows = [f"{first}\t{second}\t{score}" for first, second, score in zip(texts, texts[70:], scores, strict=False)]
    Path("labelled.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    given = "--model lm --data labelled.tsv --device cpu --dtype float32 --recipes topic,classical --no-controls"
    typed(script, f"compare {given} --out report --save-best best")
    found = Comparison.load(Path("report/comparison.json"))
    assert found.build
    assert "--template" in found.build
    assert "--recipe topic@2" in found.build
    assert "--fit-texts labelled.tsv --fit-half 1" in found.build
    typed(script, found.build.removeprefix("st-reba "))
    second = Halves.of(read_pairs("labelled.tsv")).parts[1]
    scored = np.array(found.items.values[found.use][found.items.first :])
    for name in ("best", "my-topic"):
        first, other = (loaded(name).encode(side) for side in (second.first, second.second))
        np.testing.assert_allclose((first * other).sum(axis=1), scored, atol=1e-6)
    files, built = files_of("best"), files_of("my-topic")
    assert files.keys() == built.keys()
    # The card of the first has the comparison.
    assert [str(path) for path in files if files[path] != built[path]] == ["README.md"]


def test_the_printed_command_builds_what_was_scored_by_classes(script, desk):
    """From a table whose columns have names of their own; a text that is alone in its class is not fitted on."""
    shown = typed(script, f"compare {OF_CLASSES} --recipes topic --no-controls --out report --save-best best")
    assert "140 texts in 3 classes; left out, for no other text has their label: 1; columns: said as text" in shown
    assert "lm on 140 texts of sorts.tsv" in shown
    found = Comparison.load(Path("report/comparison.json"))
    assert [task.name for task in found.tasks] == ["Classes", "Clusters"]
    assert "--fit-texts sorts.tsv --fit-half 1 --columns said,sort" in found.build
    typed(script, found.build.removeprefix("st-reba "))
    second = task_of(Halves.of(read_data("sorts.tsv", "said,sort")).parts[1])
    scored = np.mean(found.items.values[found.use][found.items.first :])
    for name in ("best", "my-topic"):
        assert second(loaded(name))["knn_accuracy"] == pytest.approx(scored)
    files, built = files_of("best"), files_of("my-topic")
    assert [str(path) for path in files if files[path] != built.get(path)] == ["README.md"]


def test_serve_and_verify(script, desk):
    serving = script.start("serve", "saved", "--port", "0", "--dtype", "float32", cwd=Path.cwd())
    try:
        printed = serving.until("at http://")
        assert printed.startswith("Loading saved; the address follows")
        url = printed.split(" at ", 1)[1].split()[0]
        told = script.run("verify", url, "--model", "saved", "--dtype", "float32", "--json", cwd=Path.cwd()).output
        assert f"Equal: {url}" in told
        assert json_in(told, "verify", Verified).equal
    finally:
        serving.kill(signal.SIGTERM)
    assert serving.wait().code == 0
    assert "every request was answered" in serving.output


def test_a_killed_run_to_a_url_goes_on(script, desk):
    """Killed (SIGKILL) half-way: the place of the output stays empty until all is there."""
    many = Path("many.txt")
    many.write_text("".join(f"{number} {'a word and ' * (number % 17)}\n" for number in range(3000)))
    line = ["encode", "saved", many, "--dtype", "float32", "--batch-size", "4", "--chunk-size", "16", "--out"]
    url = f"file://{Path.cwd()}/away/v.npy"
    running = script.start(*line, url, cwd=Path.cwd())
    work = Path(f"{place_of(url).work}.partial")
    deadline = time.monotonic() + 60
    while len(list(work.glob("parts/part-*"))) < 3:
        assert time.monotonic() < deadline, running.output
        time.sleep(0.01)
    running.kill()
    assert running.wait().code == -signal.SIGKILL
    assert not Path("away").exists()
    done = script.run(*line, url, "--json", cwd=Path.cwd())
    told = json_in(done.output, "encode", EncodedFile)
    assert (told.path, told.rows) == (url, 3000)
    assert told.resumed >= 48
    assert [path.name for path in Path("away").iterdir()] == ["v.npy"]
    assert not work.exists()
    script.run(*line, "here.npy", cwd=Path.cwd())
    assert Path("away/v.npy").read_bytes() == Path("here.npy").read_bytes()


def test_push(script, desk):
    """To a Hub on this machine, whose address the client reads where it is imported."""
    hub = RunningHub({"hf_owner": ("somebody", "org")})
    hub.start()
    env = {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(Path("home").absolute()), "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_owner", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1,localhost",
    }  # fmt: skip
    try:
        done = script.run_alone("push", "saved", "org/name", "--json", cwd=Path.cwd(), env=env)
    finally:
        hub.stop()
    assert done.code == 0, done.output
    assert 'SentenceTransformer("org/name")' in json_in(done.output, "push", Pushed).load
    assert "modules.json" in hub.repositories["org/name"].files("main")


#: What ``compare`` prints, as ``Comparison.load`` reads it.
Compared = create_model("Compared", answer=str, build=str, results=list[Any], tasks=list[Any])
JSON = {
    "build": "build --model lm --recipe echo-2 --out m",
    "encode": "encode saved texts.txt --out v.npy",
    "compare": "compare --model lm --data pairs.tsv --recipes classical --no-choose --no-random",
    "forecast": "compare --model lm --data pairs.tsv --dry-run",
}


@pytest.mark.parametrize("schema", JSON)
def test_json_follows_its_schema(schema, script, desk):
    told = script.run(*JSON[schema].split(), "--json", cwd=Path.cwd()).output
    name = schema.partition(" ")[0]
    json_in(told, name, SCHEMAS.get(name, Compared))


def test_json_stands_alone_on_stdout(script, desk):
    done = subprocess.run(
        [script.path, *shlex.split(JSON["build"]), "--json"], env=script.environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert Built.model_validate(json.loads(done.stdout)).path == "m"
    assert "Load it with" in done.stderr


@pytest.mark.parametrize("command", [None, *cast(Any, get_command(app)).commands])
def test_help_cuts_no_name_and_fits_a_screen(command, script, tmp_path):
    words = [] if command is None else [command]
    short, whole = (script.run(*words, how, cwd=tmp_path, env={"COLUMNS": "80"}) for how in ("--help", "--help-all"))
    assert (short.code, whole.code) == (0, 0)
    group: Any = get_command(app)
    asked = group if command is None else group.commands[command]
    for name in (
        name for parameter in asked.params if parameter.param_type_name == "option" for name in parameter.opts
    ):
        assert re.search(rf"^ .*{name}[ ,\n]", whole.output, re.MULTILINE), name
    # What is cut to fit a line ends so; the first line of all has it as a sign for more arguments.
    assert not any(line.endswith("...") for line in short.output.splitlines()[1:])
    assert len(short.output.splitlines()) <= 50
    assert max(map(len, short.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("st-reba bu", {"build"}),
        ("st-reba build --fit-h", {"--fit-half"}),
        ("st-reba build --recipe echo-t", {"echo-topic"}),
        ("st-reba build --recipe classical+white", {"classical+whitened"}),
        ("st-reba compare --recipes few,promptr", {"few,promptreps"}),
        ("st-reba build --template pretended-cot-", {"pretended-cot-zh"}),
        ("st-reba encode ", {"saved", "lm", "first", "second"}),
        ("st-reba build --method value", {"value-aggregation"}),
    ],
)
def test_a_shell_completes(line, found, script, desk):
    words = line.split(" ")
    env = {"_ST_REBA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    assert set(script.run(cwd=Path.cwd(), env=env).output.split()) == found


def test_completion_help_and_recipes_import_nothing_large(script, tmp_path):
    """So that they take a fifth of a second, and not seconds."""
    for words in ([], ["--help"], ["build", "--help-all"], ["recipes"], ["recipes", "topic"]):
        completing = {"_ST_REBA_COMPLETE": "complete_bash", "COMP_WORDS": "st-reba build --recipe e", "COMP_CWORD": "3"}
        env = {"PYTHONPROFILEIMPORTTIME": "1", **(completing if not words else {})}
        done = script.run_alone(*words, cwd=tmp_path, env=env)
        assert done.code == 0, done.output
        assert not re.search(r"\| +(torch|transformers|numpy)$", done.output, re.MULTILINE)


def test_every_command_has_a_case(script, tmp_path):
    """Alone: an interpreter that has nothing imported, as a shell starts it."""
    said = script.run_alone("--help", cwd=tmp_path).output
    assert all(f" {command} " in said for command in get_command(app).commands)
    cases = {name.partition(",")[0] for name in CASES} | {"serve", "verify", "push", "recipes"}
    assert cases == get_command(app).commands.keys()
