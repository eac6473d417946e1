"""A GGUF file is a model like any other: converted once, kept, and equal to what transformers reads from it."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

import st_reba
import st_reba_cli as cli
from st_reba import CausalTransformer, ReBAModule, TwinTower
from st_reba.encode import Encoder, encode_file
from st_reba.lm import gguf
from st_reba.lm.gguf import is_gguf
from st_reba.modules.lm_head import head_blocks
from st_reba.train.bellm import BeLLMTraining, build_bellm

from .. import ggufs, processes
from ..backbones import TEXTS
from ..conftest import long, paired, pipeline
from ..hub import RunningHub, Storage, User

SCRIPTS = Path(__file__).parents[1] / "hub"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """``files(type)``: a file whose matrices are stored as that, in a directory of its own."""
    made = {}

    def file(kind: str = "Q8_0") -> Path:
        if kind not in made:
            made[kind] = ggufs.write(tmp_path_factory.mktemp(kind) / "tiny.gguf", kind)
        return made[kind]

    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where converted files are kept: a place of the test's own, empty."""
    place = tmp_path / "assets"
    monkeypatch.setattr(gguf, "cached_assets_path", partial(huggingface_hub.cached_assets_path, assets_dir=place))
    return place / "st_reba" / "gguf"


@pytest.fixture(scope="module")
def common_place(tmp_path_factory):
    return tmp_path_factory.mktemp("assets")


@pytest.fixture
def common(common_place, monkeypatch):
    """The same for tests of what is read, which may find there what others have converted."""
    monkeypatch.setattr(
        gguf, "cached_assets_path", partial(huggingface_hub.cached_assets_path, assets_dir=common_place)
    )


@pytest.fixture
def conversions(monkeypatch):
    """The precisions that files are converted to from here on."""
    asked = []
    convert = gguf._convert

    def counted(file, entry, dtype):
        asked.append(str(dtype).removeprefix("torch."))
        return convert(file, entry, dtype)

    monkeypatch.setattr(gguf, "_convert", counted)
    return asked


def directly(file: Path, dtype=torch.float32) -> Transformer:
    """The module that reads what transformers itself makes of a file."""
    model = AutoModel.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    module = CausalTransformer(str(gguf.converted(file)))
    module.model = model.eval()
    module.processor = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return module


class TestEqual:
    @pytest.mark.parametrize(
        ("kind", "dtype"), paired(["F16", "Q4_0", long("F32"), long("Q8_0")], ["float32", "bfloat16"])
    )
    def test_to_what_transformers_reads(self, files, common, kind, dtype):
        model = pipeline(CausalTransformer(str(files(kind)), model_kwargs={"dtype": dtype}))
        expected = pipeline(directly(files(kind), getattr(torch, dtype)))
        assert model[0].model.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(
            model.encode(TEXTS, convert_to_tensor=True).float(), expected.encode(TEXTS, convert_to_tensor=True).float()
        )

    def test_to_the_model_that_was_written(self, files, common, tmp_path):
        """Nothing is lost in a file of full precision; the oracle never was one."""
        ggufs.original().save_pretrained(tmp_path / "original")
        ggufs.tokenizer().save_pretrained(tmp_path / "original")
        embeddings = [
            pipeline(ReBAModule(str(path), repetitions=2)).encode(TEXTS)
            for path in (files("F32"), tmp_path / "original")
        ]
        np.testing.assert_allclose(*embeddings, rtol=1e-5, atol=1e-6)

    def test_quantised_is_close_to_it(self, files, common):
        """Q8_0 is read as such: near the original, and not the original."""
        exact, rounded = (pipeline(CausalTransformer(str(files(kind)))).encode(TEXTS) for kind in ("F32", "Q8_0"))
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 0.1

    def test_its_head_is_its_own(self, files, common):
        expected = ggufs.original().lm_head.weight.detach()
        for head in (str(files("F32")), CausalTransformer(str(files("F32")))):
            torch.testing.assert_close(torch.cat(list(head_blocks(head))), expected)

    def test_nothing_beside_it_is_read(self, files, common, tmp_path):
        """Configuration and tokenizer come from the file, whatever lies beside it."""
        file = tmp_path / "tiny.gguf"
        file.write_bytes(files().read_bytes())
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}')
        module = CausalTransformer(str(file))
        assert module.model.config.model_type == "llama"
        assert module.tokenizer.eos_token == ggufs.tokenizer().eos_token


def test_every_module_takes_a_file(files, common):
    classes = {name: getattr(st_reba, name) for name in st_reba.modules.__all__}
    causal = {name: kind for name, kind in classes.items() if issubclass(kind, st_reba.modules.CausalModule)}
    assert {"ReBAModule", "EchoModule", "RefinedThoughtModule", "InputEmbeddings", "LayerStates"} <= set(causal)
    # Its answers are to be tokens, and this vocabulary has them not.
    del causal["RerankModule"]
    for name, kind in causal.items():
        assert kind(str(files())).model.config.hidden_size == ggufs.BLOCK, name


def test_what_is_saved_is_an_ordinary_directory(files, common, tmp_path):
    model = pipeline(ReBAModule(str(files()), repetitions=2))
    model.save_pretrained(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "0_ReBAModule" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not list((tmp_path / "saved").rglob("*.gguf"))
    assert "gguf_file" not in (tmp_path / "saved" / "0_ReBAModule" / "sentence_bert_config.json").read_text()
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(loaded.encode(TEXTS), model.encode(TEXTS))
    assert "`tiny`" in (tmp_path / "saved" / "README.md").read_text()


class TestNames:
    def test_as_transformers_names_it(self, files, common):
        file = files()
        asked = {"gguf_file": file.name}
        plain = CausalTransformer(str(file))
        for arguments in (
            {"model_kwargs": asked},
            # What it takes where st_reba does not help.
            {"model_kwargs": asked, "config_kwargs": dict(asked), "processor_kwargs": dict(asked)},
            {"model_kwargs": {**asked, "subfolder": file.parent.name}},
        ):
            base = file.parent.parent if "subfolder" in arguments["model_kwargs"] else file.parent
            named = CausalTransformer(str(base), **arguments)
            assert named.model.config.name_or_path == plain.model.config.name_or_path
            assert asked == {"gguf_file": file.name}

    def test_without_a_suffix(self, files, cache, tmp_path):
        """Ollama's store names files by their hash."""
        blob = tmp_path / "sha256-0123"
        blob.write_bytes(files().read_bytes())
        assert is_gguf(str(blob))
        assert CausalTransformer(str(blob)).model.config.model_type == "llama"

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("org/repo/model.gguf", True), ("org/repo/Q4/model.GGUF", True), ("org/repo:Q4_K_M", True),
            ("missing.gguf", True), ("org/repo", False), ("repo", False), ("C:/models/repo", False), ("/a/b", False),
        ],
    )  # fmt: skip
    def test_what_is_one(self, name, expected):
        assert is_gguf(name) is expected

    def test_by_its_older_argument(self, files, common):
        assert CausalTransformer(str(files().parent), model_args={"gguf_file": "tiny.gguf"}).model is not None

    def test_other_models_are_left_alone(self, backbone_path, tmp_path):
        arguments = {"model_kwargs": {"dtype": "float32", "revision": "main"}}
        assert gguf.as_directory(backbone_path(), arguments) == (backbone_path(), arguments)
        directory = tmp_path / "odd.gguf"
        directory.mkdir()
        assert gguf.as_directory(str(directory)) == (str(directory), {})


class TestKept:
    def test_converted_once(self, files, cache, conversions, tmp_path):
        renamed = tmp_path / "other-name.gguf"
        renamed.write_bytes(files().read_bytes())
        for name in (files(), files(), renamed):
            CausalTransformer(str(name))
        assert conversions == ["float32"]
        assert [path.name for path in cache.glob("*/*/*")] == ["tiny"]

    def test_by_content(self, files, cache, conversions, tmp_path):
        """Another file of the same name, size and time is another model."""
        file = tmp_path / "model.gguf"
        embeddings, sizes = [], set()
        for seed in range(2):
            ggufs.write(file, seed=seed)
            os.utime(file, (0, 0))
            sizes.add(file.stat().st_size)
            embeddings.append(pipeline(CausalTransformer(str(file))).encode(TEXTS))
        assert len(sizes) == 1
        assert len(conversions) == 2
        assert not np.array_equal(*embeddings)

    def test_by_versions(self, files, cache, conversions, monkeypatch):
        gguf.converted(files())
        monkeypatch.setattr(gguf.transformers, "__version__", "5.99")
        gguf.converted(files())
        assert len(conversions) == 2

    def test_half_precision_takes_half_the_room(self, files, cache, conversions):
        half = gguf.converted(files(), torch.bfloat16)
        whole = gguf.converted(files(), "auto")
        sizes = [(path / "model.safetensors").stat().st_size for path in (half, whole)]
        assert sizes[0] < 0.6 * sizes[1]
        assert conversions == ["bfloat16", "float32"]
        # From float32 both are the same numbers, and need no conversion.
        assert gguf.converted(files(), "float16") == whole
        assert conversions == ["bfloat16", "float32"]

    def test_half_precision_gives_what_the_file_gives(self, files, cache):
        model = CausalTransformer(str(files()), model_kwargs={"torch_dtype": torch.bfloat16})
        direct = AutoModel.from_pretrained(files().parent, gguf_file="tiny.gguf", dtype=torch.bfloat16)
        for name, weight in direct.state_dict().items():
            assert torch.equal(model.model.state_dict()[name], weight), name

    def test_threads_at_once(self, files, cache, conversions):
        with ThreadPoolExecutor(4) as pool:
            found = set(pool.map(gguf.converted, [files()] * 4))
        assert len(found) == 1
        assert len(conversions) == 1

    def test_a_killed_conversion_leaves_nothing(self, files, cache, tmp_path):
        """Killed when all but the last step is done, while another process waits for it."""
        script = (
            "import functools, pathlib, sys, time\n"
            "from st_reba.lm import gguf\n"
            "gguf.cached_assets_path = functools.partial(gguf.cached_assets_path, assets_dir=sys.argv[3])\n"
            "def stall(*_):\n"
            "    pathlib.Path(sys.argv[2]).touch()\n"
            "    time.sleep(600)\n"
            "gguf._check_tokenizer = stall\n"
            "gguf.converted(pathlib.Path(sys.argv[1]))\n"
        )
        mark = tmp_path / "stalled"
        printed = tmp_path / "printed"
        process = processes.start("-c", script, files(), mark, cache.parent.parent, out=printed)
        try:
            while not mark.exists():
                assert process.poll() is None, printed.read_text()
                time.sleep(0.05)
            assert list(cache.glob("*/.*/whole/tiny/model.safetensors"))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(gguf.converted, files())
                time.sleep(0.5)
                assert not waiting.done()
                process.kill()
                directory = waiting.result(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert (directory / "model.safetensors").is_file()
        assert [path.name for path in cache.glob("*/.*")] == []

    def test_a_failed_conversion_leaves_nothing(self, files, cache, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(gguf, "_check_tokenizer", full)
        with pytest.raises(OSError, match=r"no room left on the disk .* or choose another HF_ASSETS_CACHE\."):
            gguf.converted(files())
        assert [path for path in cache.glob("*/*") if path.is_dir()] == []


class TestRefused:
    def test_without_the_reader(self, files, cache, monkeypatch):
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ImportError, match=r'A GGUF file needs gguf: pip install "st-reba\[gguf\]"\.'):
            ReBAModule(str(files()))

    @pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
    def test_cut_off(self, files, cache, tmp_path, share):
        content = files().read_bytes()
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"cut\.gguf cannot be read as a GGUF file by transformers"):
            ReBAModule(str(cut))
        assert [path for path in cache.glob("*/*") if path.is_dir()] == []

    def test_no_gguf_at_all(self, cache, tmp_path):
        pointer = tmp_path / "model.gguf"
        pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(
            ValueError, match=r"model\.gguf is not a GGUF file: it does not begin with GGUF\. .*lfs pull"
        ):
            ReBAModule(str(pointer))

    def test_an_architecture_that_transformers_does_not_read(self, cache, tmp_path):
        file = ggufs.write(tmp_path / "clip.gguf", architecture="clip")
        with pytest.raises(ValueError, match=r"clip.* not supported yet.*as its authors publish it"):
            ReBAModule(str(file))

    def test_a_part_of_a_model(self, cache, tmp_path):
        """transformers would fill in random weights."""
        file = ggufs.write(tmp_path / "tiny-00001-of-00002.gguf", leave_out="blk.1.attn_q.weight")
        with pytest.raises(ValueError, match=r"lacks 1 weights, such as model\.layers\.1.* one part of several"):
            ReBAModule(str(file))

    @pytest.mark.parametrize(
        ("says", "message"),
        [
            (
                {"num_hidden_layers": 5000},
                r"asks for 5000 \(llama\.block_count\), and has 21 tensors: at most 21 can be",
            ),
            ({"num_hidden_layers": 10**6}, r"asks for 1000000 \(llama\.block_count\)"),
            ({"num_hidden_layers": 20}, r"describes a larger model than its checkpoint holds"),
            (
                {"intermediate_size": 10**7},
                r"describes a larger model than its checkpoint holds: .* shape \(10000000, 32\)",
            ),
            ({"hidden_size": 10**6}, r"describes a larger model than its checkpoint holds"),
            ({"vocab_size": 10**7}, r"describes a larger model than its checkpoint holds"),
        ],
    )
    def test_a_header_that_asks_for_more_than_the_file_holds(self, says, message, cache, tmp_path):
        """Before memory is taken for it."""
        file = ggufs.write(tmp_path / "tiny.gguf", says=says)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=rf"tiny\.gguf {message}"):
            ReBAModule(str(file))
        # In kilobytes, with what the conversion itself takes.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
        assert [path for path in cache.glob("*/*") if path.is_dir()] == []

    def test_a_tokenizer_that_changes_when_saved(self, files, cache, monkeypatch):
        loaded = gguf.AutoTokenizer.from_pretrained

        def changed(path, **kwargs):
            tokenizer = loaded(path, **kwargs)
            if not kwargs:
                tokenizer.add_tokens(["ello"])
            return tokenizer

        monkeypatch.setattr(gguf.AutoTokenizer, "from_pretrained", changed)
        with pytest.raises(ValueError, match="does not read this file's tokenizer, .* back as it wrote it"):
            gguf.converted(files())
        assert [path for path in cache.glob("*/*") if path.is_dir()] == []

    @pytest.mark.parametrize("name", ["missing.gguf", "some/missing.gguf", "/nowhere/at/all/missing.gguf"])
    def test_no_such_file(self, cache, name):
        with pytest.raises(FileNotFoundError, match=r"there is no such file\. Check the path"):
            ReBAModule(name)

    def test_no_such_file_in_a_directory(self, files, cache):
        with pytest.raises(OSError, match=r"missing\.gguf"):
            ReBAModule(str(files().parent), model_kwargs={"gguf_file": "missing.gguf"})

    def test_encoders(self, files, common):
        with pytest.raises(ValueError, match=r"tiny\.gguf is a GGUF file: .*TwinTower.*config\.json and safetensors"):
            TwinTower(str(files()))


@pytest.mark.usefixtures("quick_commands")
class TestCommands:
    @pytest.fixture
    def run(self, common, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        Path("texts.txt").write_text("\n".join(TEXTS))
        Path("pairs.tsv").write_text("".join(f"{a}\t{b}\t{len(a)}\n" for a, b in pairwise(TEXTS)))

        def run(*arguments) -> str:
            result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})
            assert result.exit_code == 0, result.output
            return result.output

        return run

    def test_build(self, run, files):
        run("build", "--model", files(), "--out", "built")
        model = SentenceTransformer("built", device="cpu")
        expected = ReBAModule(str(files()), repetitions=2)
        np.testing.assert_array_equal(model.encode(TEXTS), pipeline(expected).encode(TEXTS, normalize_embeddings=True))

    def test_compare(self, run, files):
        assert "tiny.gguf on 4 pairs of pairs.tsv" in run(
            "compare", "--model", files(), "--data", "pairs.tsv", "--device", "cpu", "--no-controls"
        )

    def test_layers(self, run, files):
        assert "of 2." in run("layers", "--model", files(), "--data", "pairs.tsv", "--device", "cpu")

    def test_encode_names_the_line_that_builds_a_model(self, files, tmp_path):
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
        with pytest.raises(ValueError, match=rf"st-reba build --model {files()} "):
            encode_file(Encoder(str(files())), tmp_path / "texts.txt", tmp_path / "a.npy")
        assert not (tmp_path / "a.npy").exists()


def test_a_model_to_train(files, common):
    """BeLLM's adapter names its backbone, which is then a directory."""
    model = build_bellm(BeLLMTraining(model=str(files()), triplets="unused"))
    assert Path(model[0].model.config.name_or_path).is_dir()


class TestHub:
    @pytest.fixture(scope="class")
    def outcomes(self, files, tmp_path_factory):
        """What a machine with the real client gets, online and then without a network."""
        content = files().read_bytes()
        storage = Storage({"hf_owner": User("owner", ("org",))})
        storage.put(
            "org/tiny-gguf", {"README.md": b"# Tiny\n", "tiny-Q8_0.gguf": content, "more/tiny-Q8_0_L.gguf": content}
        )
        storage.put("org/parts", {"a-Q8_0.gguf": content, "b-Q8_0.gguf": content})
        storage.put("org/gated", {"tiny-Q8_0.gguf": content}, gated=True)
        place = tmp_path_factory.mktemp("gguf-hub")
        (place / "texts.json").write_text(json.dumps(TEXTS))
        cases = {
            "file": ["org/tiny-gguf/tiny-Q8_0.gguf", {}],
            "file in a folder": ["org/tiny-gguf/more/tiny-Q8_0_L.gguf", {}],
            "gguf_file": ["org/tiny-gguf", {"gguf_file": "tiny-Q8_0.gguf", "revision": "main"}],
            "tag": ["org/tiny-gguf:q8_0", {}],
            "no such tag": ["org/tiny-gguf:Q2_K", {}],
            "two of a tag": ["org/parts:Q8_0", {}],
            "no such file": ["org/tiny-gguf/other.gguf", {}],
            "no such repository": ["org/other/tiny.gguf", {}],
            "gated": ["org/gated/tiny-Q8_0.gguf", {}],
            "gated, its owner": ["org/gated/tiny-Q8_0.gguf", {"token": "hf_owner"}],
            "file, from the cache": ["org/tiny-gguf/tiny-Q8_0.gguf", {"local_files_only": True}],
            "tag, from the cache": ["org/tiny-gguf:Q8_0", {"local_files_only": True}],
            "another file, from the cache": [
                "org/parts/a-Q8_0.gguf",
                {"local_files_only": True, "revision": "no-such"},
            ],
        }
        hub = RunningHub(storage)
        hub.start()
        try:
            return self.load(hub, place, cases), place / "home"
        finally:
            hub.stop()

    @staticmethod
    def load(hub, place: Path, cases):
        """In a process of its own: the client reads where the Hub is when it is imported."""
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")},
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent.parent), os.environ.get("PYTHONPATH", "")]),
            "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        printed = place / "printed"
        done = processes.run(
            SCRIPTS / "load_gguf.py", place, json.dumps(cases), out=printed, env=environment, with_st=False
        )
        assert done.returncode == 0, done.stdout
        return json.loads((place / "loaded.json").read_text())

    def test_every_spelling(self, outcomes, files, common):
        """In one test: two workers would each start the process."""
        found, home = outcomes
        expected = pipeline(ReBAModule(str(files()), repetitions=2)).encode(TEXTS)
        given = [outcome["embeddings"] for outcome in found.values() if "embeddings" in outcome]
        assert len(given) == 7
        for embeddings in given:
            np.testing.assert_allclose(embeddings, expected, rtol=1e-5, atol=1e-6)
        # Kept below the client's home: one for all spellings of one content.
        assert len(list(home.glob("assets/st_reba/gguf/*/float32-*/*"))) == 1
        for name, message in {
            "no such tag": "one file with Q2_K in its name is needed, and the repository has none. Give the file",
            "two of a tag": "the repository has a-Q8_0.gguf, b-Q8_0.gguf. Give the file: org/parts/NAME.gguf.",
            "no such file": "org/tiny-gguf/other.gguf: there is no such file here, and the Hub does not give it",
            "no such repository": "org/other/tiny.gguf: there is no such file here, and the Hub does not give it",
            "another file, from the cache": "org/parts/a-Q8_0.gguf: there is no such file here, and the Hub",
            "gated": "org/gated/tiny-Q8_0.gguf: there is no such file here, and the Hub does not give it",
        }.items():
            assert message in found[name]["message"]
