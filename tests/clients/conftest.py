"""Programs that embed with sentence-transformers models, each the real one, given one of ours.

They are left out of a plain ``pytest``; ``make test-clients`` installs them and runs this directory.
"""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import subprocess
import sys

import pytest
from sentence_transformers import SentenceTransformer

FRESH = """
import sys
{imports}
path = sys.argv[1]
try:
    {plain}
    print("plainly: loaded")
except ValueError as error:
    print("plainly:", error)
{trusting}
print("with trust: loaded")
"""


@pytest.fixture(scope="session")
def own(prompted_path):
    """The model that the clients load, as sentence-transformers loads it."""
    return SentenceTransformer(prompted_path, device="cpu")


@pytest.fixture(scope="session")
def check_without_the_import(prompted_path):
    """``check(imports, plain, trusting)``: what a program is told that does not import st_reba.

    ``plain`` is code that loads the model at ``path``, ``trusting`` the same with ``trust_remote_code=True``.
    """

    def check(imports: str, plain: str, trusting: str) -> None:
        code = FRESH.format(imports=imports, plain=plain, trusting=trusting)
        done = subprocess.run(
            [sys.executable, "-c", code, prompted_path], capture_output=True, text=True, env=os.environ, timeout=300
        )
        assert done.returncode == 0, done.stderr
        plainly = done.stdout.partition("plainly: ")[2]
        assert "trust_remote_code=True" in plainly
        assert "st_reba.modules.ReBAModule" in plainly
        assert done.stdout.endswith("with trust: loaded\n")

    return check
