"""GGUF files, as llama.cpp and Ollama keep them, turned into ordinary model directories, once.

transformers reads weights, configuration and tokenizer out of a GGUF file, and needs many seconds for that. What it
read is therefore kept as a directory that any later load reads like any other model's.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import cached_assets_path, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..files import atomic_directory
from ..optional import require
from .sizes import MAX_EXPERTS, MAX_LAYERS, SizeError, check_size

SUFFIX = ".gguf"
#: What every GGUF file begins with; those of Ollama have no suffix.
MAGIC = b"GGUF"

#: ``org/repo/file.gguf``, where the file may lie in folders.
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/((?:[^/\\]+/)*[^/\\]+\.gguf)", re.IGNORECASE)
#: ``org/repo:TAG``, as for llama.cpp's -hf.
HUB_TAG = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")

# What says where on the Hub a file lies, among the arguments of transformers' from_pretrained.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
# What holds for the file and no longer for the directory.
_SPENT = ("gguf_file", "subfolder", "revision")

_HALF = ("float16", "bfloat16")
#: Changes with what a conversion writes, so that older ones are not found any more.
_FORMAT = 1

# Letters, digits, blanks, line breaks, another script, bytes: where tokenizers differ.
_PROBES = ("Hello, world! It's 12345.", "  two  blanks\n\ttab", "我爱自然语言处理。", "Zwölf 🥊 <s> </s>")


def is_gguf(name: str) -> bool:
    """Whether a model's name means a GGUF file, here or on the Hub; nothing is asked of the Hub.

    Args:
        name: A path or a Hub reference: see :func:`st_reba.lm.gguf.as_directory`.
    """
    path = Path(name)
    if path.is_dir():
        return False
    if path.is_file():
        return path.suffix.lower() == SUFFIX or begins_as_gguf(path)
    return name.lower().endswith(SUFFIX) or HUB_TAG.fullmatch(name) is not None


def begins_as_gguf(path: Path) -> bool:
    """Whether a file has the first bytes of a GGUF file."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def as_directory(name: str, arguments: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The ordinary model that a GGUF file holds, for what loads a model; any other model as it is.

    The file is named by its path (``"dir/model.gguf"``; the suffix may be missing, as in Ollama's store); on the Hub by
    ``"org/repo/model.gguf"`` or, as for llama.cpp, ``"org/repo:Q4_K_M"``; or, as in transformers, by
    ``model_kwargs={"gguf_file": "model.gguf"}`` beside a directory or a Hub id.

    The first call for a file converts it, which takes a while, and keeps the result below Hugging Face's cache
    (``HF_HOME/assets/st_reba/gguf``, or ``HF_ASSETS_CACHE``), under the file's SHA-256 and the versions of what read
    it. Weights are kept in float32, or in float16 or bfloat16 if ``model_kwargs`` ask for that ``dtype`` and there is
    no float32.

    Args:
        name: A path or Hub id, or one of the above.
        arguments: Of ST's ``Transformer``: ``model_kwargs`` and so on.

    Returns:
        The directory, and the arguments without what was about the file; both unchanged for any other model.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If the packages that read GGUF are not installed.
        ValueError: If the file is damaged, or holds what transformers cannot read.
        OSError: If the disk has no room for the directory.
    """
    arguments = arguments or {}
    # The second is an older name for it.
    options = arguments.get("model_kwargs") or arguments.get("model_args") or {}
    if options.get("gguf_file") is None and not is_gguf(name):
        return name, arguments
    directory = converted(located(name, options), options.get("dtype", options.get("torch_dtype")))
    left = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, dict):
            left[key] = {option: given for option, given in value.items() if option not in _SPENT}
    return str(directory), left


def converted(file: Path, dtype: torch.dtype | str | None = None) -> Path:
    """The directory that a GGUF file is kept as; it is made if need be.

    Args:
        file: On this machine.
        dtype: What the model will be loaded in; anything but float16 and bfloat16 takes float32.

    Raises:
        ImportError, ValueError, OSError: As for :func:`as_directory`.
    """
    require("accelerate", "gguf", "A GGUF file")
    place = cached_assets_path("st_reba", "gguf", digest_of(file))
    asked = str(dtype).removeprefix("torch.")
    # From float32, transformers rounds as it would from the file: what is kept so serves half precision, too.
    precisions = (asked, "float32") if asked in _HALF else ("float32",)
    entries = [place / f"{precision}-{_read_by()}" for precision in precisions]
    if not any(entry.is_dir() for entry in entries):
        # Another process, or thread, may be at it.
        with FileLock(place / "lock"):
            if not any(entry.is_dir() for entry in entries):
                _convert(file, entries[0], getattr(torch, precisions[0]))
    # In the entry is one directory, of the file's name, which a model card shows.
    return next(directory for entry in entries for directory in entry.glob("*"))


def digest_of(file: Path) -> str:
    """The SHA-256 of a GGUF file, by which what is read out of it is kept.

    Raises:
        ImportError: If the package that reads GGUF is not installed.
        ValueError: If it is another file.
    """
    require("gguf", "gguf", "A GGUF file")
    if not begins_as_gguf(file):
        raise ValueError(
            f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}. If it is a few lines of text, Git "
            "has left a pointer there: fetch the file itself with `git lfs pull`."
        )
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def without_weights(file: Path, digest: str, config: PreTrainedConfig) -> Path:
    """The directory that a GGUF file's tokenizer and a configuration are kept as; it is made if need be.

    Args:
        file: On this machine.
        digest: What :func:`digest_of` gives for it.
        config: What the model is loaded by.

    Raises:
        ImportError, ValueError, OSError: As for :func:`as_directory`.
    """
    place = cached_assets_path("st_reba", "gguf", digest)
    entry = place / f"{config.model_type}-{_read_by()}"
    if not entry.is_dir():
        with FileLock(place / "lock"):
            if not entry.is_dir():
                with _alone(file) as source, _explained(file):
                    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
                with atomic_directory(entry, "HF_ASSETS_CACHE") as scratch:
                    tokenizer.save_pretrained(scratch / file.stem)
                    config.save_pretrained(scratch / file.stem)
                    _check_tokenizer(tokenizer, scratch / file.stem, file)
    return next(entry.glob("*"))


def _read_by() -> str:
    """What read a file, which is read again by others."""
    return f"transformers{transformers.__version__}-gguf{version('gguf')}-{_FORMAT}"


# Where the file is


def located(name: str, options: dict[str, Any]) -> Path:
    """The file on this machine, from the Hub if need be."""
    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    file = Path(name)
    if (asked := options.get("gguf_file")) is not None:
        path = "/".join(filter(None, (options.get("subfolder"), asked)))
        if not file.is_dir():
            return _from_hub(name, path, hub)
        file = file / path
    elif tagged := HUB_TAG.fullmatch(name):
        return _tagged(tagged[1], tagged[2], hub)
    elif not file.is_file() and (on_hub := HUB_FILE.fullmatch(name)):
        return _from_hub(on_hub[1], on_hub[2], hub)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: there is no such file. Check the path; a file on the Hub is named org/repo/model{SUFFIX}."
        )
    return file


def _from_hub(repo_id: str, path: str, hub: dict[str, Any]) -> Path:
    try:
        return Path(hf_hub_download(repo_id, path, **hub))
    except OSError as error:
        raise FileNotFoundError(
            f"{repo_id}/{path}: there is no such file here, and the Hub does not give it: {error}"
        ) from error


def _tagged(repo_id: str, tag: str, hub: dict[str, Any]) -> Path:
    """The one file of a repository whose name has a tag, such as Q4_K_M, as a part of its own."""
    patterns = [f"*{spelled}*{SUFFIX}" for spelled in dict.fromkeys((tag, tag.upper(), tag.lower()))]
    root = Path(snapshot_download(repo_id, allow_patterns=patterns, **hub))
    own_part = re.compile(rf"(?:^|[-._]){re.escape(tag)}(?=[-.])", re.IGNORECASE)
    found = [path for path in sorted(root.rglob(f"*{SUFFIX}")) if own_part.search(path.name)]
    if len(found) != 1:
        names = ", ".join(path.relative_to(root).as_posix() for path in found) or "none"
        raise FileNotFoundError(
            f"{repo_id}:{tag}: one file with {tag} in its name is needed, and the repository has {names}. Give the "
            f"file: {repo_id}/NAME{SUFFIX}."
        )
    return found[0]


# The conversion


def _convert(file: Path, entry: Path, dtype: torch.dtype) -> None:
    """Convert a file, whoever holds the lock of its place; all of the directory appears at once."""
    for left in entry.parent.glob(".*"):
        # A conversion that was killed leaves its directory and the lock of it.
        if left.is_dir():
            shutil.rmtree(left)
    with tqdm(desc=f"Converting {file.name}, once", bar_format="{desc} ({elapsed})"):
        with _alone(file) as source, _explained(file):
            stored = _stored(source, file)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = _read(source, dtype, stored, file)
        with atomic_directory(entry, "HF_ASSETS_CACHE") as scratch:
            out = scratch / file.stem
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            _check_tokenizer(tokenizer, out, file)


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """The file in a directory of its own: what lies beside it, such as another tokenizer, would be read, too."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / f"model{SUFFIX}"
        try:
            source.symlink_to(file.resolve())
        except OSError:  # Windows lets only some users do that.
            shutil.copyfile(file, source)
        yield source


def _stored(source: Path, file: Path) -> int:
    """How many numbers a file holds, if its header asks for no more layers than a model has, and than it has tensors.

    Raises:
        SizeError: If it asks for more.
    """
    import gguf

    reader = gguf.GGUFReader(str(source))
    tensors = len(reader.tensors)
    most = {"block_count": min(MAX_LAYERS, tensors), "expert_count": MAX_EXPERTS}
    for key, field in reader.fields.items():
        allowed = most.get(key.rpartition(".")[2])
        asked = None if allowed is None else field.contents()
        if allowed is not None and isinstance(asked, int) and asked > allowed:
            raise SizeError(
                f"{file} asks for {asked} ({key}), and has {tensors} tensors: at most {allowed} can be. Fetch it anew."
            )
    # Several may be said to lie in one place.
    if sum(int(tensor.n_bytes) for tensor in reader.tensors) > source.stat().st_size:
        raise SizeError(f"{file} describes more bytes of tensors than it has: it is damaged. Fetch it again.")
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _read(source: Path, dtype: torch.dtype, stored: int, file: Path) -> PreTrainedModel:
    """The model in a file, with its weights unpacked and nothing about how they were packed."""
    place = {"gguf_file": source.name}
    config = AutoConfig.from_pretrained(source.parent, **place)
    check_size(config, stored, file, AutoModelForCausalLM)
    # Newer transformers would leave weights packed where it has kernels for them.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpacked = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, config=config, dtype=dtype, output_loading_info=True, **place, **unpacked
    )
    read, report = loaded
    if lacking := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        raise ValueError(
            f"it lacks {len(lacking)} weights, such as {lacking[0]}. Is it one part of several? Then merge them first: "
            "`llama-gguf-split --merge`"
        )
    # save_pretrained refuses what was read with a quantizer; a model that never met one takes its weights.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What foreign bytes make transformers and gguf raise, which may be anything, as a sentence."""
    try:
        yield
    except (ImportError, MemoryError, SizeError):
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        raise ValueError(
            f"{file} cannot be read as a GGUF file by transformers {transformers.__version__}: "
            f"{said[0] if said else type(error).__name__}. A file that was cut off must be fetched again; for an "
            "architecture or a type of weights that is not supported, give the model as its authors publish it "
            "(config.json and safetensors)."
        ) from error


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, saved: Path, file: Path) -> None:
    """See that the tokenizer is still the same when it is loaded."""
    again = AutoTokenizer.from_pretrained(saved)
    for text in _PROBES:
        if again(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise ValueError(
                f"{file}: transformers {transformers.__version__} does not read this file's tokenizer, "
                f"{type(tokenizer).__name__}, back as it wrote it, so its model cannot be kept. Give the model as its "
                "authors publish it (config.json, tokenizer.json and safetensors)."
            )
