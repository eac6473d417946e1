"""The Hub's HTTP API on loopback: what the unmodified huggingface_hub calls to create, upload, list and download.

Answers, headers and error codes are those that the client acts on. Large files are uploaded through Git LFS: the client
must be told not to use Xet (``HF_HUB_DISABLE_XET=1``), since it asks no server whether it may.
"""

from __future__ import annotations

import asyncio
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
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

ROOT = Path(__file__).parents[2]
REPO = "/{namespace}/{name}"
MODEL = "/api/models/{namespace}/{name}"


class RefusedError(Exception):
    """An answer that is an error, as the Hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None) -> None:
        self.status, self.message = status, message
        given = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.headers = {name: value for name, value in given.items() if value}


def is_large(path: str) -> bool:
    """Whether a file goes to large file storage."""
    return path.endswith((".safetensors", ".bin", ".gguf", ".npy", ".parquet"))


def etag(path: str, content: bytes) -> str:
    """The content's own hash in large file storage, and git's of all else."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    parent: str | None
    message: str
    files: dict[str, bytes]

    @property
    def sha(self) -> str:
        listing = [f"{path} {etag(path, content)}" for path, content in sorted(self.files.items())]
        return hashlib.sha1("\n".join([str(self.parent), self.message, *listing]).encode()).hexdigest()


@dataclass
class Repository:
    """One repository, of a model or a data set. References are git's: ``refs/heads/main``, ``refs/pr/1``."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    #: Uploaded content by SHA-256, whether or not a commit refers to it.
    objects: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("refs/heads/main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a full reference or a commit's hash names."""
        revision = unquote(revision)
        commit = self.references.get(revision) or self.references.get(f"refs/heads/{revision}") or revision
        if commit not in self.commits:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
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
        self.objects.update({etag(path, content): content for path, content in added.items() if is_large(path)})
        return commit.sha


def listed(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """A file, or a folder, as a tree lists it."""
    if path not in files:
        return {"type": "directory", "path": path, "oid": etag("", path.encode())}
    return {"type": "file", "path": path, "size": len(files[path]), "oid": etag(path, files[path])}


def make_app(hub: RunningHub, files_endpoint: str) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusedError)
    def refuse(request: Request, refused: RefusedError) -> Response:
        return JSONResponse({"error": refused.message}, refused.status, headers=refused.headers)

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

    @app.get(MODEL)
    @app.get(MODEL + "/revision/{revision}")
    def information(request: Request, revision: str = "main") -> Any:
        repository = hub.repository(request)
        files = repository.files(revision)
        found = re.match(rb"---\n(.*?)\n---", files.get("README.md", b""), re.S)
        return {
            "id": repository.id, "modelId": repository.id, "sha": repository.resolve(revision),
            "private": repository.private, "gated": "auto" if repository.gated else False, "disabled": False,
            "tags": [], "cardData": yaml.safe_load(found[1]) if found else {}, "downloads": 0, "likes": 0,
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
            raise RefusedError(404, f"{folder} does not exist", "EntryNotFound", repository.resolve(revision))
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
        repository = hub.repository(request, to="download")
        commit, path = repository.resolve(revision), unquote(path)
        content = repository.commits[commit].files.get(path)
        if content is None:
            raise RefusedError(404, "Entry not found", "EntryNotFound", commit)
        mark = etag(path, content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{mark}"'}
        if not is_large(path):
            return Response(content, headers=headers, media_type="application/octet-stream")
        linked = {"X-Linked-Etag": f'"{mark}"', "X-Linked-Size": str(len(content))}
        location = {"Location": f"{files_endpoint}/large/{repository.id}/{mark}"}
        return Response(status_code=302, headers={**headers, **linked, **location})

    @app.post(MODEL + "/branch/{branch}")
    async def branch(request: Request, branch: str) -> Any:
        repository = hub.repository(request, to="write")
        reference = f"refs/heads/{unquote(branch)}"
        if reference in repository.references:
            raise RefusedError(409, f"Reference already exists: {reference}")
        repository.references[reference] = repository.resolve("main")
        return {}

    @app.post(MODEL + "/preupload/{revision}")
    async def preupload(request: Request, revision: str) -> Any:
        files = hub.repository(request, to="write").files(revision)
        found = []
        for path in [file["path"] for file in (await request.json())["files"]]:
            mode, there = "lfs" if is_large(path) else "regular", etag(path, files[path]) if path in files else None
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": there})
        return {"files": found}

    @app.post(MODEL + "/commit/{revision}")
    async def commit(request: Request, revision: str, create_pr: bool = False) -> Any:
        repository = hub.repository(request, to="write")
        head, *lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        values = {line["value"]["path"]: line["value"] for line in lines if "deleted" not in line["key"]}
        added = {
            path: repository.objects[value["oid"]] if is_large(path) else base64.b64decode(value["content"])
            for path, value in values.items()
        }
        url, answer, reference = f"{hub.endpoint}/{repository.id}", {}, f"refs/heads/{unquote(revision)}"
        if create_pr:
            reference, answer = "refs/pr/1", {"pullRequestUrl": f"{url}/discussions/1"}
        deleted = {line["value"]["path"] for line in lines if "deleted" in line["key"]}
        sha = repository.commit(reference, head["value"]["summary"], added, repository.resolve(revision), deleted)
        return {"success": True, "commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "hookOutput": "", **answer}

    @app.post(REPO + "/info/lfs/objects/batch")
    async def batch(request: Request) -> Any:
        repository, objects = hub.repository(request, to="write"), (await request.json())["objects"]
        for wanted in objects:
            if wanted["oid"] not in repository.objects:
                place = {"href": f"{files_endpoint}/large/{repository.id}/{wanted['oid']}"}
                wanted["actions"] = {"upload": place, "verify": place}
        return {"transfer": "basic", "objects": objects}

    # The addresses of large files need no token: on the real Hub they are signed.
    @app.put("/large/{namespace}/{name}/{oid}")
    async def upload(request: Request, namespace: str, name: str, oid: str) -> Any:
        hub.repositories[f"{namespace}/{name}"].objects[oid] = await request.body()
        return {}

    @app.api_route("/large/{namespace}/{name}/{oid}", methods=["GET", "HEAD", "POST"])
    def download(namespace: str, name: str, oid: str) -> Response:
        """The content; or, asked by POST whether the upload is complete, that it is."""
        return Response(hub.repositories[f"{namespace}/{name}"].objects[oid], headers={"ETag": f'"{oid}"'})

    return app


class RunningHub:
    """The server, on 127.0.0.1 and a free port that it keeps; it stops, and starts again with what it had.

    Attributes:
        users: Each user's namespaces by the user's token, their own first.
        repositories: By their ids.
        endpoint: For ``HF_ENDPOINT``.
    """

    def __init__(self, users: dict[str, tuple[str, ...]]) -> None:
        self.users = users
        self.repositories: dict[str, Repository] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        # Large files come from another host than the Hub, as on the real one: clients then send it no token.
        self._app = make_app(self, f"http://localhost:{self.port}")
        self._breaking_point: tuple[str, str] | None = None

    def put(self, repo_id: str, files: dict[str, bytes], **settings: bool) -> None:
        """A repository with these files, without a client."""
        self.repositories[repo_id] = Repository(repo_id, **settings)
        self.repositories[repo_id].commit("refs/heads/main", "Add files", files)

    def names(self, request: Request) -> tuple[str, ...]:
        """The namespaces of who asks; none of whoever has not said who they are."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.users:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.users.get(token, ())

    def repository(self, request: Request, to: str = "see") -> Repository:
        """What is asked for, to see it, to download from it or to write to it.

        A gated repository can be seen by all, and downloaded from by its own.
        """
        names, namespace = self.names(request), request.path_params["namespace"]
        repository = self.repositories.get(f"{namespace}/{request.path_params['name'].removesuffix('.git')}")
        if not names and (to == "write" or repository is None or repository.private):
            # Whoever has not said who they are might be allowed to see it.
            raise RefusedError(401, "Invalid username or password.", "RepoNotFound")
        if repository is None or (repository.private and namespace not in names):
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        if to == "write" and namespace not in names:
            raise RefusedError(403, f"You don't have write access to {repository.id}")
        if to == "download" and repository.gated and namespace not in names:
            raise RefusedError(403 if names else 401, f"Access to model {repository.id} is restricted", "GatedRepo")
        return repository

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Of a machine of its own whose Hub this is: another cache, no token but one that is given."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(home / "planted"), os.environ.get("PYTHONPATH", "")]),
            "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }  # fmt: skip

    def start(self) -> None:
        config = uvicorn.Config(
            self._serve, host="127.0.0.1", port=self.port, log_level="error", lifespan="off", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("The loopback Hub did not start.")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=30)

    def break_at(self, method: str, path: str) -> None:
        """Let the next request of this kind be the last: its connection closes without an answer, and so does all."""
        self._breaking_point = (method, path)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    async def _serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == self._breaking_point:
            self._breaking_point = None
            # A connection that is closed before all was read is reset, which the client sees as another error.
            while (await receive()).get("more_body", False):
                pass
            self._server.should_exit = self._server.force_exit = True
            for server in self._server.servers:
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(3600)
        # Revisions contain slashes ("refs/pr/1"), which only the path as it was sent keeps apart from its own.
        sent = scope["raw_path"].decode("ascii")
        # What is asked of data sets is asked of models as well.
        path = re.sub("^/api/datasets/", "/api/models/", sent).removeprefix("/datasets")
        await self._app({**scope, "path": path}, receive, send)
