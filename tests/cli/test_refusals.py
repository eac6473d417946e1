"""What each command refuses: a sentence with what to do, exit code 1, and nothing is written.

What needs no model is refused before anything large is imported: see :mod:`.test_start`.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from st_reba import CausalTransformer
from st_reba.data.demo import demo_questions
from st_reba_cli import app

from ..backbones import TEXTS, own
from ..compare import samples
from ..conftest import pipeline

pytestmark = pytest.mark.usefixtures("quick_commands")

#: What every line of a command begins with. ``lm`` is a language model, ``saved`` a model of st_reba's.
LINES = {
    "build": "build --model lm --out out",
    "compare": "compare --model lm --device cpu",
    "distil": "distil --out out",
    "encode": "encode saved texts.txt --out a.npy --device cpu",
    "export": "export --model lm",
    "layers": "layers --model lm --data pairs.tsv --out out --device cpu",
    "push": "push",
    "search": "search --model lm --device cpu",
    "serve": "serve",
    "train": "train freeze --out out",
    "verify": "verify http://127.0.0.1:9",
}

OF_RETRIEVAL = "Retrieval takes --queries, --corpus and --qrels, all three, in place of --data."
OF_DEMO = "--language and --demo choose among the demo texts: leave them out with data of your own."
TAKEN = "full exists and is not an empty directory: choose another"
NO_FILE = "there is no such file. Check the name."
NO_MODEL = "there is no such directory. Check the path, or give a Hub id (org/name)."
NOTHING = "empty is a directory without a table in it (nothing): give a file"
SAVED = "--saved shows what was found before, beside --against if that is given; leave"

#: By command, options behind its line, and what is said.
REFUSALS: dict[str, dict[str, str]] = {
    "build": {
        "--out full": f"{TAKEN} --out",
        "--rerank --sparse": "--sparse: --rerank reads a query and a document together; leave it out.",
        "--rerank --recipe reba-2 --pooling mean": "--recipe, --pooling: --rerank reads a query and a document",
        "--rerank --query-prompt q --prompt-language zh": "--query-prompt, --prompt-language: --rerank reads a query",
        "--rerank --method echo --repetitions 2 --layers all --no-normalize": "--method, --repetitions, --layers, "
        "--no-normalize: --rerank reads a query and a document together; leave them out.",
        "--rerank --chunk-length 8 --fit-texts x": "--chunk-length, --fit-texts: --rerank reads",
        "--rerank --template {text}": "one {query}, behind it one {document}",
        "--sparse --pooling mean --no-normalize": "--pooling, --no-normalize: --sparse reads the end of a prompt",
        "--sparse --recipe reba-2": "--sparse with reba-2: the head is asked at the end of a prompt",
        "--sparse --recipe prompteol@2": "--sparse with prompteol@2: the head is asked",
        "--expansion 3 --top-k 2": "--expansion, --top-k: without --sparse no token of the vocabulary is weighed",
        "--multi-vector --pooling mean": "so nothing is pooled: leave --pooling out",
        "--dimensions 8": "--dimensions is for --multi-vector: give that, too",
        "--keep-punctuation": "--skip-punctuation is for --multi-vector",
        "--multi-vector --recipe classical+whitened": "whitened stands around the pooling, and nothing is pooled. Give "
        "classical.",
        "--multi-vector --recipe early-late": "Give another recipe, such as echo-2",
        "--multi-vector --recipe prompteol": "PromptEOL does not read every token. Give one of cl",
        "--multi-vector --fit-texts texts.txt": "--fit-texts is for what is fitted on texts, such as",
        "--multi-vector --recipe echo-2 --dimensions 33": "to keep, a whole number from 1 to 32",
        "--template {text}: --prompt-language zh": "--template and --prompt-language both say which prompt is read",
        "--recipe reba-2 --method reba": "--recipe and --method say the same thing: give one of them",
        "--method rabe": "There is no --method rabe: give one of classical, ",
        "--method [red]x[/blue]": "There is no --method [red]x[/blue]",
        "--recipe rt-3": "There is no recipe 'rt-3'. Near it: rt-",
        "--recipe reba-2+whiten": "Near it: reba-2+whitened. ",
        "--recipe 'Random weights, ReBA-2'": "is a control, to be compared with: it is no model to be built",
        "--recipe metaeol --prompt-language zh": "metaeol cannot ask in Chinese",
        "--recipe prompteol-zh --prompt-language en": "--prompt-language en: prompteol-zh cannot ask in English",
        "--repetitions 0": "repetitions=0: give a whole number from 1",
        "--layers top": "--layers 'top': use \"all\" or indices separated by commas",
        "--layers 9": "9 is out of range",
        "--template {text}": "--template is for --method classical, echo, ",
        "--method classical --repetitions 2": "--repetitions is for --method echo, reba or echo-layers; Classical has",
        "--method metaeol --template {text}": "MetaEOL has none",
        "--method echo --layers=-1": "--layers is for --method reba",
        "--method echo --chunk-length 8": "Echo-2 has none",
        "--method early-late --pooling max": "--pooling max: Early and late, partwise whitened is pooled by mean; use",
        "--method early-late --fit-texts no.txt": f"no.txt: {NO_FILE}",
        "--method echo --fit-texts texts.txt": "or --recipe echo-2+whitened; Echo-2 is not.",
    },
    "compare": {
        "--out full": f"{TAKEN} --out",
        "--save-best full": f"{TAKEN} --save-best",
        "--words full": "--words full is a directory: give a file.",
        "--words no.csv": f"--words no.csv: {NO_FILE}",
        "--data no.tsv": f"no.tsv: {NO_FILE}",
        "--data empty": NOTHING,
        "--fit-texts no.txt": f"no.txt: {NO_FILE}",
        "--fit-texts empty": NOTHING,
        "--data short.tsv": "short.tsv, line 2: 2 columns where 3 are expected",
        "--model no/such-model": "no/such-model: there is no such directory, and it cannot be had from the Hub",
        "--mteb STSB --data x.tsv": "--mteb brings its own texts: leave --data and --words out",
        "--mteb STSB --words words.csv": "--mteb brings its own texts",
        "--mteb STSB --dry-run": "--dry-run counts the texts of --data",
        "--mteb STSB --language zh": "--language chooses among the demo texts: leave it out with --mteb",
        "--mteb-results out": "--mteb-results is for --mteb",
        "--language zh --data x.tsv": OF_DEMO,
        "--demo retrieval --data x.tsv": OF_DEMO,
        "--queries q.jsonl --qrels r.tsv": OF_RETRIEVAL,
        "--columns a,b,c": "--columns is for --data",
        "--data pairs.tsv --columns a,b": "--columns a,b: give sentence1=...,sentence2=...,score=...",
        "--query-prompt find:": "--query-prompt and --document-prompt are for retrieval",
        "--repetitions 2": "--repetitions is for --recipes all: the few have at most two copies of a text",
        "--repetitions 2 --recipes reba-2,classical": "--repetitions is for --recipes all",
        "--fit-texts texts.txt --recipes reba-2 --no-controls": "--fit-texts is for recipes that are fitted on texts",
        "--words words.csv --recipes early-late --no-controls": "--words asks for the embeddings of words, and none of",
        "--recipes reba-2,rebba-2": "There is no recipe 'rebba-2'. Near it: reba-2",
        "--recipes reba-2 --recipes rebba-2": "There is no recipe 'rebba-2'. Near it: reba-2",
        "--recipes tf-idf": "'tf-idf' is a control, to be compared with: it is no model to be built.",
        "--recipes classical,echo-2 --prompt-language zh": "--prompt-language zh: classical, echo-2 cannot ask in "
        "Chinese; leave it out, or give a recipe that can",
        "--data texts.txt --save-best best": "--save-best needs labels, and plain texts have none",
        "--against pairs.tsv": "pairs.tsv is no comparison that st_reba",
        # Model and device stand in the line already.
        "--saved c.json --out new --save-best best": f"--model, --out, --save-best, --device: {SAVED} them out.",
        "--saved c.json --dtype fastest": f"--model, --dtype, --device: {SAVED}",
        "--saved c.json --no-controls --no-random": f"--model, --no-controls, --no-random, --device: {SAVED}",
    },
    "distil": {
        "": "--recipe, --model, --texts missing: give a recipe, its model and texts; or --config.",
        "--config no.yaml": f"--config no.yaml: {NO_FILE}",
        "--recipe a --config x.yaml": "--recipe: with --config all of it stands in the file",
        "--recipe echo-2 --model ./no --texts texts.txt": f"./no: {NO_MODEL}",
        "--recipe echo-2 --model lm --texts no.txt": f"no.txt: {NO_FILE}",
        "--recipe echo-2 --model lm --texts texts.txt --data no.tsv": f"no.tsv: {NO_FILE}",
        "--recipe ehco --model lm --texts texts.txt": "There is no recipe 'ehco'. Near it: echo",
        "--recipe echo-2 --model lm --texts texts.txt --student ./no": f"./no: {NO_MODEL}",
        "--recipe echo-2 --model lm --texts texts.txt --student no/such-model": "no/such-model: there is no such dir",
    },
    "encode": {
        "--workers 2": "--workers is for --engine ray",
        "--device cpu,cuda:0": "give one or more of one kind",
        "--device 'cpu, cpu:x'": f"--device cpu:x: PyTorch {torch.__version__} cannot use it here (",
        "--column body": 'plain text has no column "body"',
        "--keep text": "An .npy holds vectors alone",
        "--out full": "full exists: choose another --out, or replace it with --overwrite.",
        "--prompt-name passage": 'prompt_name="passage": the model has "query", "document"',
        "--engine ray --device mps": 'device "mps": on a Ray cluster give',
    },
    "export": {
        "": "What is exported is one of --static, --plain: give one of them, with a directory.",
        "--static a --plain b": "What is exported is one of --static, --plain",
        "--static a --pieces": "--pieces says how --plain tokenises: give both, or neither.",
        "--plain b --layer 0 --dimensions 3 --fit-texts x --dtype auto": "--layer, --dimensions, --fit-texts, --dtype: "
        "for --static alone",
        "--static full": f"{TAKEN} --static",
        "--static a --fit-texts no.txt": f"no.txt: {NO_FILE}",
        "--static a --model ./no": f"./no: {NO_MODEL}",
    },
    "layers": {
        "--out full": f"{TAKEN} --out",
        "--template 'no slot'": "The template 'no slot' has no {text}",
        "--data no.tsv": f"no.tsv: {NO_FILE}",
        "--data empty": NOTHING,
        "--data texts.txt": "Layers are scored by labels",
        "--queries q.jsonl": OF_RETRIEVAL,
    },
    "push": {
        "saved name": '"name": a repository is "org/name"',
        "saved a/b/c": 'is "org/name" or "user/name".',
        "no org/name": "no: there is no such directory. Give one that",
    },
    "search": {
        "--out full": f"{TAKEN} --out",
        "--save-best full": f"{TAKEN} --save-best",
        "--language zh --data x.tsv": OF_DEMO,
        "--data texts.txt": "A search chooses by labels",
        "--data empty": NOTHING,
        "--columns a,b": "--columns is for --data",
    },
    "serve": {
        "": "There is no model to serve: give MODEL, --rerank, or both.",
        "./no": f"./no: {NO_MODEL}",
        "saved --name ''": "--name is empty: give a name, or leave it out.",
        "saved --rerank-name ''": "--rerank-name is empty",
        "saved --api-key a,,b": "An API key is empty (--api-key, ST_REBA_API_KEY)",
        "saved --api-key schlüssel": "other characters than printable ASCII",
    },
    "train": {
        "--config no.yaml": f"--config no.yaml: {NO_FILE}",
        "--config full": "--config full is a directory: give a file.",
    },
    "verify": {
        "--model ./no": f"./no: {NO_MODEL}",
        "--model saved --timeout 1": "http://127.0.0.1:9",
    },
}  # fmt: skip


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "900"})
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def saved(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "saved"
    pipeline(CausalTransformer(backbone_path())).save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def desk(saved, backbone_path, tmp_path, monkeypatch):
    """The current directory, with what the lines name."""
    monkeypatch.chdir(tmp_path)
    Path("lm").symlink_to(backbone_path())
    Path("saved").symlink_to(saved)
    for name in ("empty", "full"):
        Path(name).mkdir()
    Path("full/notes.txt").touch()
    Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"a cat {n}\ta dog {n * 7}\t{n % 5}\n" for n in range(20)), encoding="utf-8")
    Path("short.tsv").write_text("a\tb\t1\nc\td\n", encoding="utf-8")
    Path("words.csv").write_bytes(demo_questions("en").read_bytes())
    samples.real().save(Path("c.json"))
    return tmp_path


def written(desk):
    return {path.relative_to(desk) for path in desk.rglob("*")}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, options, message) for command, table in REFUSALS.items() for options, message in table.items()],
)
def test_a_refusal(command, options, message, desk):
    before = written(desk)
    code, said = run(*shlex.split(f"{LINES[command]} {options}"))
    assert message in said
    assert code == 1
    assert written(desk) == before
    assert "Traceback" not in said


def test_every_command_has_refusals():
    assert REFUSALS.keys() == LINES.keys() == get_command(app).commands.keys()


#: A line of each command that loads a language model, or a saved model, whose name is MODEL.
LOADING = {
    "build": "build --model MODEL --out out",
    "compare": "compare --model MODEL --data pairs.tsv",
    "encode": "encode MODEL texts.txt --out a.npy",
    "layers": "layers --model MODEL --data pairs.tsv --out out",
    "train": "train freeze --config freeze.yaml --out out",
}


def load(command: str, model: object, *options: str) -> str:
    Path("freeze.yaml").write_text(f"model: '{model}'\npairs: pairs.tsv\n", encoding="utf-8")
    code, said = run(*LOADING[command].replace("MODEL", str(model)).split(), *options)
    assert code == 1
    assert not Path("out").exists()
    return said


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.parametrize(
    ("model", "message"),
    {
        "packed": "The model packed is a directory with a GGUF file: give the file, packed/q4.gguf.",
        "empty": "The model empty is an empty directory: give one that a model was saved to.",
        "full": "The model full is a directory without a model (none of config.json, modules.json,",
        "texts.txt": "The model texts.txt is a file: give the directory",
        "./no": f"The model ./no: {NO_MODEL}",
        "no/such-model": "no/such-model: there is no such directory, and ",
    }.items(),
)
def test_a_model(command, model, message, desk):
    Path("packed").mkdir()
    Path("packed/q4.gguf").write_bytes(b"GGUF")
    *read, error = load(command, model).strip().splitlines()
    assert message in error
    # Before that, what was read of the data where only the Hub could tell.
    assert len(read) == (model == "no/such-model" and command in ("compare", "layers"))


@pytest.mark.parametrize("command", ["compare", "encode", "build"])
def test_damaged_weights(command, desk):
    shutil.copytree("saved", "damaged")
    (own(Path("damaged")) / "model.safetensors").write_bytes(b"\x08\0\0\0")
    said = load(command, "damaged")
    assert f"{own(Path('damaged')) / 'model.safetensors'}: these weights are damaged or cut short (" in said


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.mark.parametrize("command", ["compare", "layers", "encode"])
@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", pytest.param("cuda:7", marks=NO_CUDA)])
def test_a_device(command, device, desk):
    said = load(command, "saved" if command == "encode" else "lm", "--device", device)
    assert f"--device {device}: PyTorch {torch.__version__} cannot use it here (" in said
    assert "Give cpu, or one that is there" in said


def test_a_language_model_without_modules(desk):
    """It is not embedded by what sentence-transformers would guess; the line to type is there."""
    Path("a model").symlink_to(Path("lm").resolve())
    code, said = run("encode", "a model", "texts.txt", "--out", "a.npy")
    assert code == 1
    assert "a model has no modules.json: it is not a saved SentenceTransformer" in said
    assert "st-reba build --model 'a model' --method reba --pooling mean --out my-model" in said


#: Words that are no command line: click's own sentences.
USAGE = {
    "nonsense": "No such command",
    "compare --nonsense": "No such option",
    "compare --recipes classical echo-2": "echo-2: an option takes one value. Write several recipes or tasks with",
    "compare LCQMC STSB": "LCQMC STSB: an option takes one value.",
    "compare --mteb": "requires an argument",
    "layers --batch-size 0": "Invalid value",
    "build --model lm --out out --dtype fastest": "'fastest' is not one of 'auto', 'float32', 'bfloat16', 'float16'",
    "build --model lm --out out --pooling middle": "'middle' is not one of 'mean', 'last'",
    "encode saved texts.txt --out a.npy --engine spark": "'spark' is not one of 'local', 'ray'",
    "train reba --config c.yaml --out out": "'reba' is not one of 'bellm', 'freeze', 'jtcse'",
    "push saved org/name more": "Got unexpected extra argument",
}


@pytest.mark.parametrize("line", USAGE)
def test_usage(line, desk):
    before = written(desk)
    code, said = run(*line.split())
    assert (code, written(desk)) == (2, before)
    assert USAGE[line] in " ".join(said.split())
