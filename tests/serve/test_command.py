"""What ``st-reba serve`` refuses."""

from __future__ import annotations

import socket
import sys

import pytest
from typer.testing import CliRunner

from st_reba_cli import app


def said(*arguments):
    ends = CliRunner().invoke(app, ["serve", *arguments])
    assert ends.exit_code == 1, ends.output
    return " ".join(ends.output.split())


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_package_is_missing(saved, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert f'Serving needs {missing}: pip install "st-reba[serve]".' in said(saved)


def test_what_cannot_be(saved, reranker_path, backbone_path):
    assert "There is no model to serve: give MODEL, --rerank, or both." in said()
    assert "--name is empty" in said(saved, "--name", "")
    assert "An API key is empty" in said(saved, "--api-key", "a,,b")
    for key in ("Schlüssel", "good,密钥", "two\nlines"):
        assert "An API key (--api-key, ST_REBA_API_KEY) has other characters than printable ASCII" in said(
            "no-such-model/here", "--api-key", key
        )
    assert "give it as --rerank" in said(reranker_path, "--port", "0")
    assert "give it as MODEL" in said("--rerank", saved, "--port", "0")
    assert "st-reba build" in said(backbone_path(), "--port", "0")
    assert "--host 203.0.113.1 --port 0 cannot be used" in said(saved, "--host", "203.0.113.1", "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port} cannot be used" in said(saved, "--port", port)
