"""Fixtures and settings of all tests."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The models are tiny; and a process that has had threads cannot be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel

    from st_reba import CausalTransformer

ROOT = Path(__file__).parents[1]

#: ``make test-long``: many examples, new ones in each run.
LONG = os.environ.get("ST_REBA_TESTS") == "long"

# The environments of some programs, for tests/clients, do without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    unhurried: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    # The same few examples in every run: a test fails because of a change, and not by chance.
    settings.register_profile("usual", derandomize=True, database=None, max_examples=10, **unhurried)
    settings.register_profile("long", print_blob=True, max_examples=100, **unhurried)
    settings.load_profile("long" if LONG else "usual")


def long(*values: Any) -> Any:
    """Return a parameter, or a row of them, for ``make test-long`` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def pytest_configure() -> None:
    # Nearly all that is imported stays.
    gc.disable()


def pytest_collection_finish() -> None:
    # No later collection has to look at it. And a test makes thousands of objects, few of them in cycles.
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def work_tree() -> dict[str, tuple[int, int]]:
    """Return the size and modification time of every file of the repository that ``.gitignore`` does not name."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split())]
    is_ignored = re.compile("|".join(map(fnmatch.translate, ignored))).match
    files = {}
    for directory, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not is_ignored(name)]
        for path in (Path(directory, name) for name in names if not is_ignored(name)):
            status = path.lstat()
            files[path.relative_to(ROOT).as_posix()] = (status.st_size, status.st_mtime_ns)
    return files


@pytest.fixture(scope="session", autouse=True)
def the_work_tree_stays_as_it_was():
    before = work_tree()
    yield
    assert work_tree().items() ^ before.items() == set(), "a test has written to the repository"


@pytest.fixture(scope="session", autouse=True)
def what_others_do_for_every_model_is_done_once():
    """Cache installed versions and compiled templates.

    sentence-transformers reads versions and compiles the template of the card for each pipeline, and mteb reads
    versions for each score. That takes most of the time of a pipeline with three tiny layers.
    """
    import jinja2
    from sentence_transformers.util import environment

    repeated = ((environment, "check_package_availability"), (jinja2.Environment, "compile"))
    with pytest.MonkeyPatch.context() as patched:
        for module, name in repeated:
            patched.setattr(module, name, functools.cache(getattr(module, name)))
        patched.setattr(metadata, "distribution", functools.cache(metadata.distribution))
        version = vars(metadata.Distribution)["version"].fget
        patched.setattr(metadata.Distribution, "version", property(functools.cache(version)))
        yield


@pytest.fixture(scope="module")
def quick():
    """Time each recipe once, on a batch of four texts, in all comparisons of a module."""
    with pytest.MonkeyPatch.context() as patched:
        time_once(patched)
        yield


def time_once(patched: pytest.MonkeyPatch) -> None:
    for name, value in (("TIMED_ROUNDS", 1), ("TIMED_TEXTS", 4), ("_MEASURED_SECONDS", 0.0)):
        patched.setattr(f"st_reba.compare.cost.{name}", value)


@pytest.fixture
def memory():
    """Return the file system of ``memory://``, empty before and after a test."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    for each in (filesystem.store, filesystem.pseudo_dirs):
        each.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture(scope="session")
def backbone_path(tmp_path_factory):
    """Return ``backbone_path(architecture, tokenizer_kind)``, a directory with a tiny model, made once."""
    from . import backbones

    @functools.cache
    def made(name: str, kind: str) -> str:
        return backbones.save(backbones.backbone(name), tmp_path_factory.mktemp(f"{name}-{kind}"), kind)

    return lambda name="llama", kind="bytes": made(name, kind)


@pytest.fixture(scope="session")
def shared(backbone_path):
    """Return ``shared(architecture, tokenizer_kind)``, a loaded module whose backbone other modules share.

    Tests must not train, cast or move it, nor change its tokenizer or configuration. Sharing a backbone is ten times as
    fast as loading one.
    """
    from st_reba import CausalTransformer

    @functools.cache
    def made(name: str, kind: str) -> CausalTransformer:
        return CausalTransformer(backbone_path(name, kind))

    weights = {}

    def get(name: str = "llama", kind: str = "bytes") -> CausalTransformer:
        module = made(name, kind)
        if module not in weights:
            weights[module] = {key: value.clone() for key, value in module.state_dict().items()}
        return module

    yield get
    for module, before in weights.items():
        for key, value in module.state_dict().items():
            assert value.dtype == before[key].dtype, f"a test has cast what others share: {key}"
            assert value.equal(before[key]), f"a test has trained what others share: {key}"


@pytest.fixture(scope="session")
def shallow_path(tmp_path_factory):
    """Return the path of a tiny Llama of one layer, for tests that do not depend on the vectors."""
    from . import backbones

    return backbones.save(backbones.backbone("llama", num_hidden_layers=1), tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="session")
def roomy_path(tmp_path_factory):
    """Return the path of a tiny Llama with many positions, for long prompts."""
    from . import backbones

    model = backbones.backbone("llama", max_position_embeddings=2048)
    return backbones.save(model, tmp_path_factory.mktemp("roomy"), model_max_length=2048)


@pytest.fixture(scope="session")
def roomy(roomy_path):
    """Return a loaded module of it, which tests leave as it is."""
    from st_reba import CausalTransformer

    return CausalTransformer(roomy_path)


@pytest.fixture(scope="session")
def demo_path(tmp_path_factory):
    """Return the path of the first two layers of the demo model, in its bfloat16, for what needs trained weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .backbones import DEMO_MODEL

    directory = tmp_path_factory.mktemp("demo")
    for part in (
        AutoModelForCausalLM.from_pretrained(DEMO_MODEL, num_hidden_layers=2), AutoTokenizer.from_pretrained(DEMO_MODEL)
    ):  # fmt: skip
        part.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def encoder_paths(tmp_path_factory):
    """Return ``encoder_paths(family)``, directories of two tiny encoders of one shape and tokenizer, made once."""
    from . import backbones

    tokenizer = backbones.tokenizer("bert")

    @functools.cache
    def paths(name: str = "bert", **settings) -> tuple[str, ...]:
        directories = tuple(str(tmp_path_factory.mktemp(f"{name}-tower")) for _ in range(2))
        for seed, path in enumerate(directories):
            backbones.encoder(name, seed, **settings).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return directories

    return paths


@pytest.fixture(scope="session")
def eager(backbone_path):
    """Return ``eager(architecture)``, the same weights with the architecture's eager attention, for the oracles."""
    import torch
    from transformers import AutoModel

    @functools.cache
    def made(name: str) -> PreTrainedModel:
        path = backbone_path(name)
        return AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()

    return lambda name="llama": made(name)


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    """Return the installed command, see :mod:`tests.script.installed`. All pytest workers share one environment."""
    from .script.installed import Script, make

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    return Script(make(shared), tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def token_ids(backbone_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbone_path())
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def pipeline(module, pooling: str = "mean", *behind, **settings) -> SentenceTransformer:
    """Return a model of a module, a pooling, and what stands behind it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    parts = [module, Pooling(module.get_embedding_dimension(), pooling), *behind]
    return SentenceTransformer(modules=parts, device="cpu", **settings)


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def fail(*args, **kwargs):
        raise error

    return fail


@contextlib.contextmanager
def forward_passes() -> Iterator[list[PreTrainedModel]]:
    """Record the language model of each forward pass within the block."""
    import torch
    from transformers import PreTrainedModel

    passes: list[PreTrainedModel] = []

    def note(module, args) -> None:
        if isinstance(module, PreTrainedModel):
            passes.append(module)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield passes
    finally:
        hook.remove()


def reloaded(model, directory: Path, **settings) -> SentenceTransformer:
    """Save a model, and load it again."""
    from sentence_transformers import SentenceTransformer

    model.save_pretrained(str(directory))
    return SentenceTransformer(str(directory), device="cpu", **settings)


def change(path: Path, *, remove: str = "", **settings) -> None:
    """Change settings in a JSON file, the rest of which stays."""
    old = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key != remove}
    path.write_text(json.dumps({**old, **settings}), encoding="utf-8")


def relative_error(value, expected) -> float:
    import torch

    value, expected = torch.as_tensor(value), torch.as_tensor(expected)
    assert value.shape == expected.shape
    return float((value - expected).norm() / expected.norm())


#: What a retrieval model is saved with: text in front of queries, and other text in front of documents.
PROMPTS = {"query": "Find what answers: ", "document": "文本："}


@pytest.fixture(scope="session")
def prompted_path(backbone_path, tmp_path_factory):
    """Return the path of a saved ReBA model with mean pooling and :data:`PROMPTS`, for client programs."""
    from st_reba import ReBAModule

    model = pipeline(ReBAModule(backbone_path(), repetitions=2))
    model.prompts = dict(PROMPTS)
    directory = tmp_path_factory.mktemp("prompted")
    model.save_pretrained(str(directory))
    return str(directory)
