"""GGUF files, as of llama.cpp and Ollama, converted to ordinary model directories, once.

transformers takes many seconds to read weights, configuration and tokenizer out of a GGUF file. The result is kept as a
directory that later loads read like any other model's.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import cached_assets_path, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..files import atomic_directory
from ..fingerprint import digest_of_file
from ..optional import require
from .sizes import MAX_EXPERTS, MAX_LAYERS, SizeError, check_size

SUFFIX = ".gguf"
#: First bytes of every GGUF file. Those of Ollama have no suffix.
MAGIC = b"GGUF"

#: ``org/repo/file.gguf``, where the file may be in folders.
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/((?:[^/\\]+/)*[^/\\]+\.gguf)", re.IGNORECASE)
#: ``org/repo:TAG``, as for llama.cpp's -hf.
HUB_TAG = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")

# Arguments of transformers' from_pretrained that say where on the Hub a file is.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
# Arguments about the file, which do not concern the directory.
_FILE_OPTIONS = ("gguf_file", "subfolder", "revision")

_HALF = ("float16", "bfloat16")
#: Number of the format of what is kept. Older formats are not found.
_FORMAT = 1

# Texts on which tokenizers differ: letters, digits, blanks, line breaks, another script, bytes.
_PROBES = ("Hello, world! It's 12345.", "  two  blanks\n\ttab", "我爱自然语言处理。", "Zwölf 🥊 <s> </s>")


def is_gguf(name: str) -> bool:
    """Return whether a model's name means a GGUF file, here or on the Hub, which is not asked.

    Args:
        name: A path or a Hub reference: see :func:`as_directory`.
    """
    path = Path(name)
    if path.is_dir():
        return False
    if path.is_file():
        return path.suffix.lower() == SUFFIX or begins_as_gguf(path)
    return name.lower().endswith(SUFFIX) or HUB_TAG.fullmatch(name) is not None


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file has the first bytes of a GGUF file."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def as_directory(name: str, arguments: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the ordinary model directory of a GGUF file; any other model as it is.

    The file is named by its path (``"dir/model.gguf"``; the suffix may be missing, as in Ollama's store); on the Hub by
    ``"org/repo/model.gguf"`` or, as for llama.cpp, ``"org/repo:Q4_K_M"``; or, as in transformers, by
    ``model_kwargs={"gguf_file": "model.gguf"}`` with a directory or a Hub id.

    The first call for a file converts it, which takes a while, and keeps the result in Hugging Face's cache
    (``HF_HOME/assets/st_reba/gguf``, or ``HF_ASSETS_CACHE``), by the file's SHA-256 and the versions of its readers.
    Weights are kept in float32, or in float16 or bfloat16 if ``model_kwargs`` ask for that ``dtype`` and there is no
    float32.

    Args:
        name: A path or Hub id, or one of the above.
        arguments: Arguments of ``Transformer``: ``model_kwargs`` and so on.

    Returns:
        The directory, and the arguments without those about the file; both unchanged for any other model.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If the packages that read GGUF are not installed.
        ValueError: If the file is damaged, or transformers cannot read it.
        OSError: If the disk has no room for the directory.
    """
    arguments = arguments or {}
    # The second is a former name.
    options = arguments.get("model_kwargs") or arguments.get("model_args") or {}
    if options.get("gguf_file") is None and not is_gguf(name):
        return name, arguments
    directory = converted(located(name, options), options.get("dtype", options.get("torch_dtype")))
    left = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, dict):
            left[key] = {option: given for option, given in value.items() if option not in _FILE_OPTIONS}
    return str(directory), left


def converted(file: Path, dtype: torch.dtype | str | None = None) -> Path:
    """Return the directory of a GGUF file, made if need be.

    Args:
        file: File on this machine.
        dtype: Dtype in which the model will be loaded; any but float16 and bfloat16 takes float32.

    Raises:
        ImportError, ValueError, OSError: As for :func:`as_directory`.
    """
    require("accelerate", "gguf", "A GGUF file")
    asked = str(dtype).removeprefix("torch.")
    # transformers rounds float32 to half precision as it would round the file.
    precisions = (asked, "float32") if asked in _HALF else ("float32",)
    return kept(file, digest_of(file), precisions, lambda source: _read(source, getattr(torch, precisions[0]), file))


def kept(
    file: Path, digest: str, kinds: Sequence[str], read: Callable[[Path], PreTrainedModel | PreTrainedConfig]
) -> Path:
    """Return the directory that is kept of a GGUF file, of one of these kinds; make the first if there is none.

    Args:
        file: File on this machine.
        digest: Result of :func:`digest_of` for it.
        kinds: Names of what may be kept.
        read: Returns what is saved with the file's tokenizer, given the file in a directory of its own.

    Raises:
        ImportError, ValueError, OSError: As for :func:`as_directory`.
    """
    place = cached_assets_path("st_reba", "gguf", digest)
    readers = f"transformers{transformers.__version__}-gguf{version('gguf')}-{_FORMAT}"
    entries = [place / f"{kind}-{readers}" for kind in kinds]
    if not any(entry.is_dir() for entry in entries):
        # Another process or thread may be converting it.
        with FileLock(place / "lock"):
            if not any(entry.is_dir() for entry in entries):
                for left in filter(Path.is_dir, place.glob(".*")):
                    # A conversion that was killed leaves its directory and the lock of it.
                    shutil.rmtree(left)
                with atomic_directory(entries[0], "HF_ASSETS_CACHE") as scratch:
                    _convert(file, scratch / file.stem, read)
    # An entry has one directory, named like the file for the model card.
    return next(directory for entry in entries for directory in entry.glob("*"))


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a GGUF file.

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
    return digest_of_file(file)


# Finding the file


def located(name: str, options: dict[str, Any]) -> Path:
    """Return the path of the file on this machine, fetched if need be."""
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
        problem = f"{repo_id}/{path}: there is no such file here,"
        raise FileNotFoundError(f"{problem} and the Hub does not give it: {error}") from error


def _tagged(repo_id: str, tag: str, hub: dict[str, Any]) -> Path:
    """Return the one file of a repository whose name has a tag, such as Q4_K_M, as a part of its own."""
    patterns = [f"*{spelled}*{SUFFIX}" for spelled in dict.fromkeys((tag, tag.upper(), tag.lower()))]
    root = Path(snapshot_download(repo_id, allow_patterns=patterns, **hub))
    part = re.compile(rf"(?:^|[-._]){re.escape(tag)}(?=[-.])", re.IGNORECASE)
    paths = [path for path in sorted(root.rglob(f"*{SUFFIX}")) if part.search(path.name)]
    if len(paths) != 1:
        names = ", ".join(path.relative_to(root).as_posix() for path in paths) or "none"
        problem = f"{repo_id}:{tag}: one file with {tag} in its name is needed, and the repository has {names}."
        raise FileNotFoundError(f"{problem} Give the file: {repo_id}/NAME{SUFFIX}.")
    return paths[0]


# The conversion


def _convert(file: Path, out: Path, read: Callable[[Path], PreTrainedModel | PreTrainedConfig]) -> None:
    """Save what is read of a file, and its tokenizer."""
    with tqdm(desc=f"Converting {file.name}, once", bar_format="{desc}"), tempfile.TemporaryDirectory() as alone:
        # transformers would read a tokenizer next to it, too.
        source = Path(alone) / f"model{SUFFIX}"
        try:
            source.symlink_to(file.resolve())
        except OSError:  # Windows lets only some users do that.
            shutil.copyfile(file, source)
        try:
            saved = read(source)
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=source.name)
        except (ImportError, MemoryError, SizeError):
            raise
        # On third-party bytes, transformers and gguf raise errors of any type.
        except Exception as error:
            message = str(error).strip().splitlines()
            raise ValueError(
                f"{file} cannot be read as a GGUF file by transformers {transformers.__version__}: "
                f"{message[0] if message else type(error).__name__}. A file that was cut off must be fetched again; "
                "for an architecture or a type of weights that is not supported, give the model as its authors "
                "publish it (config.json and safetensors)."
            ) from error
        saved.save_pretrained(out)
        tokenizer.save_pretrained(out)
        _check_tokenizer(tokenizer, out, file)


def _stored(source: Path, file: Path) -> int:
    """Return the number of values in a file, if its header asks for no more layers than it has tensors for.

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
    # Several tensors may claim one place.
    if sum(int(tensor.n_bytes) for tensor in reader.tensors) > source.stat().st_size:
        raise SizeError(f"{file} describes more bytes of tensors than it has: it is damaged. Fetch it again.")
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _read(source: Path, dtype: torch.dtype, file: Path) -> PreTrainedModel:
    """Read the model in a file, with its weights unpacked and no record of how they were packed."""
    stored, place = _stored(source, file), {"gguf_file": source.name}
    config = AutoConfig.from_pretrained(source.parent, **place)
    check_size(config, stored, file, AutoModelForCausalLM)
    # Later versions of transformers leave weights packed where they have kernels for them.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpacked = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, config=config, dtype=dtype, output_loading_info=True, **place, **unpacked
    )
    read, report = loaded
    if missing := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        problem = f"it lacks {len(missing)} weights, such as {missing[0]}."
        raise ValueError(f"{problem} Is it one part of several? Then merge them first: `llama-gguf-split --merge`")
    # save_pretrained refuses a model that was read with a quantizer: its weights go to one that was not.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


def _check_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, saved: Path, file: Path) -> None:
    """Raise if the saved tokenizer is another one when it is loaded."""
    again = AutoTokenizer.from_pretrained(saved)
    for text in _PROBES:
        if again(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise ValueError(
                f"{file}: transformers {transformers.__version__} does not read this file's tokenizer, "
                f"{type(tokenizer).__name__}, back as it wrote it, so its model cannot be kept. Give the model as its "
                "authors publish it (config.json, tokenizer.json and safetensors)."
            )
