"""What all modules write besides their own settings and weights."""

from __future__ import annotations

import json
from pathlib import Path

from ..version import REQUIREMENT


def note_requirement(directory: Path) -> None:
    """Note in the configuration that ST has written there, if it has, that st_reba is needed to load the model."""
    path = directory / "config_sentence_transformers.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config["requirements"] = {**config.get("requirements", {}), **REQUIREMENT}
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
