"""Run a program that loads models by their paths, but does not import st_reba.

``python -m st_reba.run PROGRAM [ARGS]`` runs a script or an installed program in this process, and ``python -m
st_reba.run -m MODULE [ARGS]`` runs a module. Signals and exit status are those of the program.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    """Run the program in ``sys.argv``. Python has already imported st_reba, as the package of this module."""
    match sys.argv[1:]:
        case ["-m", name, *_]:
            del sys.argv[:2]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [name, *_] if not name.startswith("-"):
            # This Python's programs come first.
            path = name if Path(name).is_file() else shutil.which(name, path=sysconfig.get_path("scripts"))
            path = path or shutil.which(name)
            if path is None:
                sys.exit(f"There is no program {name}: give a script, an installed program, or -m and a module.")
            sys.argv = [path, *sys.argv[2:]]
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(path).resolve().parent)
            runpy.run_path(path, run_name="__main__")
        case _:
            sys.exit("usage: python -m st_reba.run PROGRAM [ARGS], or -m MODULE [ARGS]")


if __name__ == "__main__":
    main()
