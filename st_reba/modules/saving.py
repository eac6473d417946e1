"""Where the parts of a saved model lie, and what all modules write besides their own settings and weights."""

from __future__ import annotations

import json
from pathlib import Path

from ..hub.saved_files import ModulesFile, checked, read_json
from ..version import REQUIREMENT


def note_requirement(directory: Path) -> None:
    """Note in the configuration that ST has written, if it has, that st_reba is needed to load the model.

    Args:
        directory: Of the module: the model's own, or one right below it.
    """
    for root in (directory, directory.parent):
        path = root / "config_sentence_transformers.json"
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            config["requirements"] = {**config.get("requirements", {}), **REQUIREMENT}
            path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            return


def backbone_of(name_or_path: str) -> str:
    """The language model of a saved model that has it in a directory of its own; anything else as it is.

    Args:
        name_or_path: A directory, or a Hub id.

    Raises:
        ValueError: If its ``modules.json`` is malformed, or leads out of the model.
    """
    root = Path(name_or_path)
    if (root / "config.json").is_file() or not (root / "modules.json").is_file():
        return name_or_path
    modules = checked(ModulesFile, read_json(root / "modules.json"), root / "modules.json").root
    inner = root / modules[0].path
    return str(inner) if (inner / "config.json").is_file() else name_or_path
