"""The Hub's HTTP API on loopback: what the unmodified huggingface_hub calls to create, upload, list and download.

Answers, headers and error codes are those that the client acts on. All files, also weights, are told to be small ones,
which are a part of their commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import uvicorn
import yaml
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

ROOT = Path(__file__).parents[2]
REPO = "/{namespace}/{name}"
MODEL = "/api/models/{namespace}/{name}"


def refused(status: int, message: str, code: str | None = None, commit: str | None = None) -> HTTPException:
    """An answer that is an error, as the Hub words it."""
    given = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
    return HTTPException(status, message, {name: value for name, value in given.items() if value})


def etag(content: bytes) -> str:
    """Git's own hash."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    parent: str | None
    message: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        return etag(repr(self).encode())


@dataclass
class Repository:
    """One repository, of a model or a data set. References are git's: ``refs/heads/main``, ``refs/pr/1``."""

    id: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("refs/heads/main", "initial commit", {".gitattributes": b"* -text\n"})

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a full reference or a commit's hash names."""
        revision = unquote(revision)
        commit = self.references.get(revision) or self.references.get(f"refs/heads/{revision}") or revision
        if commit not in self.commits:
            raise refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(revision)].files

    def commit(
        self, reference: str, message: str, added: dict[str, bytes], base: str | None = None, gone: Container[str] = ()
    ) -> str:
        """Move a reference on by one commit, all of it or nothing."""
        parent = base or self.references.get(reference)
        before = self.commits[parent].files.items() if parent else ()
        commit = Commit(parent, message, {**{path: content for path, content in before if path not in gone}, **added})
        self.commits[commit.sha] = commit
        self.references[reference] = commit.sha
        return commit.sha


def listed(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """A file, or a folder, as a tree lists it."""
    if path not in files:
        return {"type": "directory", "path": path, "oid": etag(path.encode())}
    return {"type": "file", "path": path, "size": len(files[path]), "oid": etag(files[path])}


def make_app(hub: RunningHub) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.post("/api/validate-yaml")
    async def validate_yaml(request: Request) -> Any:
        return {"errors": [], "warnings": []}

    @app.post("/api/repos/create")
    async def create(request: Request) -> Any:
        names, asked = hub.names(request), await request.json()
        repo_id = f"{asked.get('organization') or names[0]}/{asked['name']}"
        body = {"url": f"{hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in hub.repositories:
            return JSONResponse({**body, "error": "You already created this model repo"}, 409)
        # Older clients say "private", newer ones "visibility".
        private = asked.get("private") is True or asked.get("visibility") == "private"
        hub.repositories[repo_id] = Repository(repo_id, private)
        return body

    @app.get("/api/{kind}/{name}")
    def without_namespace() -> Any:
        raise refused(404, "Repository not found", "RepoNotFound")

    @app.get(MODEL + "/commits/{revision}")
    def commits(request: Request, revision: str) -> Any:
        sha = hub.repository(request).resolve(revision)
        return [{"id": sha, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "Last", "message": ""}]

    @app.get(MODEL)
    @app.get(MODEL + "/revision/{revision}")
    def information(request: Request, revision: str = "main") -> Any:
        repository = hub.repository(request)
        files = repository.files(revision)
        found = re.match(rb"---\n(.*?)\n---", files.get("README.md", b""), re.S)
        return {
            "id": repository.id, "modelId": repository.id, "sha": repository.resolve(revision),
            "private": repository.private, "tags": [], "cardData": yaml.safe_load(found[1]) if found else {},
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }  # fmt: skip

    @app.get(MODEL + "/tree/{revision}")
    @app.get(MODEL + "/tree/{revision}/{folder:path}")
    def tree(request: Request, revision: str, folder: str = "", recursive: bool = False) -> Any:
        """The files and folders in a folder, or all that is below it."""
        repository = hub.repository(request)
        files, inside = repository.files(revision), f"{unquote(folder)}/" if folder else ""
        below = [path for path in files if path.startswith(inside)]
        if folder and not below:
            raise refused(404, f"{folder} does not exist", "EntryNotFound", repository.resolve(revision))
        if recursive:
            return [listed(path, files) for path in below]
        first = dict.fromkeys(inside + path[len(inside) :].split("/")[0] for path in below)
        return [listed(path, files) for path in first]

    @app.post(MODEL + "/paths-info/{revision}")
    async def paths_info(request: Request, revision: str) -> Any:
        files, asked = hub.repository(request).files(revision), (await request.form()).getlist("paths")
        return [listed(str(path), files) for path in asked if any(f"{file}/".startswith(f"{path}/") for file in files)]

    @app.api_route(REPO + "/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(request: Request, revision: str, path: str) -> Response:
        repository = hub.repository(request)
        commit, path = repository.resolve(revision), unquote(path)
        content = repository.commits[commit].files.get(path)
        if content is None:
            raise refused(404, "Entry not found", "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(content)}"'}
        return Response(content, headers=headers, media_type="application/octet-stream")

    @app.post(MODEL + "/branch/{branch}")
    async def branch(request: Request, branch: str) -> Any:
        repository = hub.repository(request, writes=True)
        reference = f"refs/heads/{unquote(branch)}"
        if reference in repository.references:
            raise refused(409, f"Reference already exists: {reference}")
        repository.references[reference] = repository.resolve("main")
        return {}

    @app.post(MODEL + "/preupload/{revision}")
    async def preupload(request: Request, revision: str) -> Any:
        files = hub.repository(request, writes=True).files(revision)
        paths = [file["path"] for file in (await request.json())["files"]]
        there = {path: etag(files[path]) if path in files else None for path in paths}
        regular = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": path, "oid": oid, **regular} for path, oid in there.items()]}

    @app.post(MODEL + "/commit/{revision}")
    async def commit(request: Request, revision: str, create_pr: bool = False) -> Any:
        repository = hub.repository(request, writes=True)
        head, *lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        values = [line["value"] for line in lines if "deleted" not in line["key"]]
        added = {value["path"]: base64.b64decode(value["content"]) for value in values}
        url, answer, reference = f"{hub.endpoint}/{repository.id}", {}, f"refs/heads/{unquote(revision)}"
        if create_pr:
            reference, answer = "refs/pr/1", {"pullRequestUrl": f"{url}/discussions/1"}
        deleted = {line["value"]["path"] for line in lines if "deleted" in line["key"]}
        sha = repository.commit(reference, head["value"]["summary"], added, repository.resolve(revision), deleted)
        return {"success": True, "commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "hookOutput": "", **answer}

    return app


class RunningHub:
    """The server, on 127.0.0.1 and a free port.

    Attributes:
        users: Each user's namespaces by the user's token, their own first.
        repositories: By their ids.
        endpoint: For ``HF_ENDPOINT``.
    """

    def __init__(self, users: dict[str, tuple[str, ...]]) -> None:
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._app = make_app(self)

    def put(self, repo_id: str, files: dict[str, bytes], **settings: bool) -> None:
        """A repository with these files, without a client."""
        self.repositories[repo_id] = Repository(repo_id, **settings)
        self.repositories[repo_id].commit("refs/heads/main", "Add files", files)

    def names(self, request: Request) -> tuple[str, ...]:
        """The namespaces of who asks; none of whoever has not said who they are."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.users:
            raise refused(401, "Invalid credentials in Authorization header")
        return self.users.get(token, ())

    def repository(self, request: Request, *, writes: bool = False) -> Repository:
        """What is asked for, to read it or to write to it."""
        names, namespace = self.names(request), request.path_params["namespace"]
        repository = self.repositories.get(f"{namespace}/{request.path_params['name'].removesuffix('.git')}")
        if not names and (writes or repository is None or repository.private):
            # Whoever has not said who they are might be allowed to see it.
            raise refused(401, "Invalid username or password.", "RepoNotFound")
        if repository is None or (repository.private and namespace not in names):
            raise refused(404, "Repository not found", "RepoNotFound")
        if writes and namespace not in names:
            raise refused(403, f"You don't have write access to {repository.id}")
        return repository

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Of a machine of its own whose Hub this is: another cache, no token but one that is given."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(home / "planted"), os.environ.get("PYTHONPATH", "")]),
            "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }  # fmt: skip

    def __enter__(self) -> RunningHub:
        how: dict[str, Any] = {"log_level": "error", "lifespan": "off", "interface": "asgi3"}
        self._server = uvicorn.Server(uvicorn.Config(self._serve, **how))
        given = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=given, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "The loopback Hub did not start."
            time.sleep(0.01)
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=30)

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        # Revisions contain slashes ("refs/pr/1"), which only the path as it was sent keeps apart from its own.
        sent = scope["raw_path"].decode("ascii")
        # What is asked of data sets is asked of models as well.
        path = re.sub("^/api/datasets/", "/api/models/", sent).removeprefix("/datasets")
        await self._app({**scope, "path": path}, receive, send)
