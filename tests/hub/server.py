"""The Hub's HTTP API over a :class:`Storage`, served from a thread: what huggingface_hub calls to create, upload, list
and download.

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
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import uvicorn
import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .storage import File, Repository, Storage, User, goes_to_lfs

ROOT = Path(__file__).parents[2]
REPO = "/{namespace}/{name}"
MODEL = "/api/models/{namespace}/{name}"


class RefusedError(Exception):
    """An answer that is an error, as the Hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None) -> None:
        self.status, self.message = status, message
        given = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}
        self.headers = {name: value for name, value in given.items() if value}


class Access:
    """Who asks, and what they may see and change."""

    def __init__(self, storage: Storage, request: Request) -> None:
        self._storage, self._request = storage, request
        authorization = request.headers.get("authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        if token is not None and token not in storage.users:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        self.user: User | None = storage.users[token] if token else None

    def signed_in(self) -> User:
        if self.user is None:
            raise RefusedError(401, "Invalid username or password.")
        return self.user

    def may_write(self, namespace: str) -> bool:
        return self.user is not None and namespace in self.user.namespaces

    def readable(self) -> Repository:
        name = "{namespace}/{name}".format(**self._request.path_params).removesuffix(".git")
        repository = self._storage.repositories.get(name)
        if repository is None or (repository.private and not self.may_write(repository.namespace)):
            # Whoever has not said who they are might be allowed to see it.
            if self.user is None:
                raise RefusedError(401, "Invalid username or password.", "RepoNotFound")
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self) -> Repository:
        self.signed_in()
        repository = self.readable()
        if not self.may_write(repository.namespace):
            raise RefusedError(403, f"You don't have write access to {repository.id}")
        return repository

    def contents(self) -> Repository:
        """A gated repository can be seen by all, and downloaded from by its own."""
        repository = self.readable()
        if repository.gated and not self.may_write(repository.namespace):
            raise RefusedError(403 if self.user else 401, f"Access to model {repository.id} is restricted", "GatedRepo")
        return repository


def commit_of(repository: Repository, revision: str) -> str:
    commit = repository.resolve(unquote(revision))
    if commit is None:
        raise RefusedError(404, f"Invalid rev id: {unquote(revision)}", "RevisionNotFound")
    return commit


def make_app(storage: Storage, endpoint: str, files_endpoint: str) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusedError)
    def refuse(request: Request, refused: RefusedError) -> Response:
        return JSONResponse({"error": refused.message}, refused.status, headers=refused.headers)

    @app.post("/api/validate-yaml")
    async def validate_yaml(request: Request) -> Any:
        return {"errors": [], "warnings": []}

    @app.post("/api/repos/create")
    async def create(request: Request) -> Any:
        access, asked = Access(storage, request), await request.json()
        namespace = asked.get("organization") or access.signed_in().name
        repo_id = f"{namespace}/{asked['name']}"
        if access.signed_in() and not access.may_write(namespace):
            raise RefusedError(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
        body = {"url": f"{endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in storage.repositories:
            return JSONResponse({**body, "error": "You already created this model repo"}, 409)
        # Older clients say "private", newer ones "visibility".
        storage.create(repo_id, private=asked.get("private") is True or asked.get("visibility") == "private")
        return body

    @app.get(MODEL)
    @app.get(MODEL + "/revision/{revision}")
    def information(request: Request, revision: str = "main") -> Any:
        repository = Access(storage, request).readable()
        commit = commit_of(repository, revision)
        files = repository.commits[commit].files
        found = re.match(r"---\n(.*?)\n---", files["README.md"].content.decode() if "README.md" in files else "", re.S)
        return {
            "id": repository.id, "modelId": repository.id, "author": repository.namespace, "sha": commit,
            "private": repository.private, "gated": "auto" if repository.gated else False, "disabled": False,
            "tags": [], "cardData": yaml.safe_load(found[1]) if found else {}, "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }  # fmt: skip

    @app.get(MODEL + "/tree/{revision}")
    @app.get(MODEL + "/tree/{revision}/{folder}")
    def tree(request: Request, revision: str, folder: str = "") -> Any:
        """All files below a folder."""
        repository = Access(storage, request).readable()
        commit = commit_of(repository, revision)
        below = {path: file for path, file in repository.commits[commit].files.items() if path.startswith(folder)}
        if folder and not below:
            raise RefusedError(404, f"{folder} does not exist on {revision}", "EntryNotFound", commit)
        return [
            {"type": "file", "path": path, "size": len(file.content), "oid": file.etag} for path, file in below.items()
        ]

    @app.api_route(REPO + "/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(request: Request, revision: str, path: str) -> Response:
        repository = Access(storage, request).contents()
        commit = commit_of(repository, revision)
        file = repository.commits[commit].files.get(unquote(path))
        if file is None:
            raise RefusedError(404, "Entry not found", "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"'}
        if not file.lfs:
            return Response(file.content, headers=headers, media_type="application/octet-stream")
        linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        location = {"Location": f"{files_endpoint}/large/{repository.id}/{file.sha256}"}
        return Response(status_code=302, headers={**headers, **linked, **location})

    @app.post(MODEL + "/branch/{branch}")
    async def branch(request: Request, branch: str) -> Any:
        repository = Access(storage, request).writable()
        reference = f"refs/heads/{unquote(branch)}"
        if reference in repository.references:
            raise RefusedError(409, f"Reference already exists: {reference}")
        repository.references[reference] = commit_of(repository, (await request.json()).get("startingPoint", "main"))
        return {}

    @app.post(MODEL + "/preupload/{revision}")
    async def preupload(request: Request, revision: str) -> Any:
        repository = Access(storage, request).writable()
        files = repository.commits[commit_of(repository, revision)].files
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if goes_to_lfs(file["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": files[file["path"]].etag if file["path"] in files else None,
                }
                for file in (await request.json())["files"]
            ]
        }

    @app.post(MODEL + "/commit/{revision}")
    async def commit(request: Request, revision: str, create_pr: bool = False) -> Any:
        repository = Access(storage, request).writable()
        base = commit_of(repository, revision)
        head, *lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        added = {}
        for line in lines:
            value, is_large = line["value"], line["key"] == "lfsFile"
            content = repository.objects[value["oid"]] if is_large else base64.b64decode(value["content"])
            added[value["path"]] = File(content, is_large)
        url, answer = f"{endpoint}/{repository.id}", {}
        reference = f"refs/heads/{unquote(revision)}"
        if create_pr:
            number = 1 + sum(reference.startswith("refs/pr/") for reference in repository.references)
            reference, answer = f"refs/pr/{number}", {"pullRequestUrl": f"{url}/discussions/{number}"}
        sha = repository.commit(reference, head["value"]["summary"], added, base)
        return {"success": True, "commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "hookOutput": "", **answer}

    @app.post(REPO + "/info/lfs/objects/batch")
    async def batch(request: Request) -> Any:
        repository = Access(storage, request).writable()
        objects = []
        for wanted in (await request.json())["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in repository.objects:
                place = {"href": f"{files_endpoint}/large/{repository.id}/{wanted['oid']}"}
                entry["actions"] = {"upload": place, "verify": place}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    # The addresses of large files need no token: on the real Hub they are signed.
    @app.put("/large/{namespace}/{name}/{oid}")
    async def upload(request: Request, namespace: str, name: str, oid: str) -> Any:
        repository, content = storage.repositories[f"{namespace}/{name}"], await request.body()
        if repository.full:
            raise RefusedError(403, "Storage limit reached")
        if hashlib.sha256(content).hexdigest() != oid:
            raise RefusedError(400, "The content is not what its hash says")
        repository.objects[oid] = content
        return {}

    @app.api_route("/large/{namespace}/{name}/{oid}", methods=["GET", "HEAD", "POST"])
    def download(namespace: str, name: str, oid: str) -> Response:
        """The content; or, asked by POST whether the upload is complete, that it is."""
        return Response(storage.repositories[f"{namespace}/{name}"].objects[oid], headers={"ETag": f'"{oid}"'})

    return app


class RunningHub:
    """The server, on 127.0.0.1 and a free port that it keeps; it stops, and starts again with what it had.

    Attributes:
        storage: What it serves.
        endpoint: For ``HF_ENDPOINT``.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        # Large files come from another host than the Hub, as on the real one: clients then send it no token.
        self._app = make_app(storage, self.endpoint, f"http://localhost:{self.port}")
        self._breaking_point: tuple[str, str] | None = None

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
        await self._app({**scope, "path": scope["raw_path"].decode("ascii")}, receive, send)
