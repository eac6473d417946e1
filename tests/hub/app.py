"""The Hub's HTTP API over a :class:`Storage`: what huggingface_hub calls to create, upload, list and download.

Answers, headers and error codes are those that the client acts on. Large files are uploaded through Git LFS: the client
must be told not to use Xet (``HF_HUB_DISABLE_XET=1``), since it asks no server whether it may.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from typing import Any
from urllib.parse import unquote

import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .storage import File, Repository, Storage, User, goes_to_lfs

REPO = "/{namespace}/{name}"
MODEL = "/api/models/{namespace}/{name}"


class RefusedError(Exception):
    """An answer that is an error, as the Hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None) -> None:
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message}
        if code:
            self.headers["X-Error-Code"] = code
        if commit:
            self.headers["X-Repo-Commit"] = commit


class Access:
    """Who asks, and what they may see and change."""

    def __init__(self, storage: Storage, request: Request) -> None:
        self._storage = storage
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

    def readable(self, request: Request) -> Repository:
        repository = self._storage.repositories.get("{namespace}/{name}".format(**request.path_params))
        if repository is None or (repository.private and not self.may_write(repository.namespace)):
            # Whoever has not said who they are might be allowed to see it.
            if self.user is None:
                raise RefusedError(401, "Invalid username or password.", "RepoNotFound")
            raise RefusedError(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, request: Request) -> Repository:
        self.signed_in()
        repository = self.readable(request)
        if not self.may_write(repository.namespace):
            raise RefusedError(403, f"You don't have write access to {repository.id}")
        return repository

    def contents(self, request: Request) -> Repository:
        """A gated repository can be seen by all, and downloaded from by its own."""
        repository = self.readable(request)
        if repository.gated and not self.may_write(repository.namespace):
            raise RefusedError(403 if self.user else 401, f"Access to model {repository.id} is restricted", "GatedRepo")
        return repository


def make_app(storage: Storage, endpoint: str, files_endpoint: str) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.exception_handler(RefusedError)
    def refuse(request: Request, refused: RefusedError) -> Response:
        return JSONResponse({"error": refused.message}, refused.status, headers=refused.headers)

    _add_accounts(app, storage, endpoint)
    _add_reading(app, storage, files_endpoint)
    _add_references(app, storage)
    _add_commits(app, storage, endpoint)
    _add_large_files(app, storage, files_endpoint)
    return app


def _add_accounts(app: FastAPI, storage: Storage, endpoint: str) -> None:
    @app.get("/api/whoami-v2")
    def whoami(request: Request) -> Any:
        user = Access(storage, request).signed_in()
        return {"type": "user", "name": user.name, "orgs": [{"name": name} for name in user.organizations]}

    @app.post("/api/validate-yaml")
    async def validate_yaml(request: Request) -> Any:
        errors = _metadata_errors((await request.json())["content"])
        body = {"errors": [{"message": message} for message in errors], "warnings": []}
        return JSONResponse(body, 400 if errors else 200)

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


def _metadata_errors(card: str) -> list[str]:
    """What the Hub finds wrong in a card's front matter, the fields that it reads."""
    found = re.match(r"\s*---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) if found else {}
    except yaml.YAMLError as error:
        return [f"YAML metadata is invalid: {error}"]
    if not isinstance(metadata, dict):
        return ["YAML metadata must be a mapping"]
    errors = []
    for name in ("license", "library_name", "pipeline_tag"):
        if not isinstance(metadata.get(name, ""), str):
            errors.append(f'"{name}" must be a string')
    for name in ("tags", "metrics", "datasets"):
        if not all(isinstance(item, str) for item in metadata.get(name, [])):
            errors.append(f'"{name}" must be a list of strings')
    base = metadata.get("base_model", [])
    if not all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in ([base] if isinstance(base, str) else base)):
        errors.append('"base_model" must be ids of models on the Hub')
    for index in metadata.get("model-index", []):
        for result in index.get("results", []):
            if not {"task", "dataset", "metrics"} <= set(result):
                errors.append('"model-index" must give task, dataset and metrics')
    return errors


def _commit_of(repository: Repository, revision: str) -> str:
    commit = repository.resolve(unquote(revision))
    if commit is None:
        raise RefusedError(404, f"Invalid rev id: {unquote(revision)}", "RevisionNotFound")
    return commit


def _listing(path: str, file: File) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(file.content), "oid": file.blob_id}
    if file.lfs:
        entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": len(file.pointer)}
    return entry


def _add_reading(app: FastAPI, storage: Storage, files_endpoint: str) -> None:
    def information(request: Request, revision: str) -> Any:
        repository = Access(storage, request).readable(request)
        commit = _commit_of(repository, revision)
        files = repository.commits[commit].files
        card = _metadata(files)
        return {
            "id": repository.id, "modelId": repository.id, "author": repository.namespace, "sha": commit,
            "private": repository.private, "gated": "auto" if repository.gated else False, "disabled": False,
            "tags": card.get("tags", []), "library_name": card.get("library_name"),
            "pipeline_tag": card.get("pipeline_tag"), "cardData": card, "downloads": 0, "likes": 0,
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }  # fmt: skip

    @app.get(MODEL)
    def model(request: Request) -> Any:
        return information(request, "main")

    @app.get(MODEL + "/revision/{revision}")
    def model_at(request: Request, revision: str) -> Any:
        return information(request, revision)

    @app.get(MODEL + "/tree/{revision}")
    @app.get(MODEL + "/tree/{revision}/{folder}")
    def tree(request: Request, revision: str, folder: str = "", recursive: bool = False) -> Any:
        repository = Access(storage, request).readable(request)
        commit = _commit_of(repository, revision)
        prefix = f"{unquote(folder)}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, file in sorted(repository.commits[commit].files.items()):
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                directory = prefix + "/".join(parts[:depth])
                name = hashlib.sha1(directory.encode()).hexdigest()
                entries[directory] = {"type": "directory", "path": directory, "oid": name, "size": 0}
            if recursive or len(parts) == 1:
                entries[path] = _listing(path, file)
        if prefix and not entries:
            raise RefusedError(404, f"{unquote(folder)} does not exist on {unquote(revision)}", "EntryNotFound", commit)
        return list(entries.values())

    @app.api_route(REPO + "/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(request: Request, revision: str, path: str) -> Response:
        repository = Access(storage, request).contents(request)
        commit = _commit_of(repository, revision)
        file = repository.commits[commit].files.get(unquote(path))
        if file is None:
            raise RefusedError(404, "Entry not found", "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if not file.lfs:
            return _part(request, file.content, headers)
        linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        location = {"Location": files_endpoint + _signed(storage, repository.id, file.sha256)}
        return Response(status_code=302, headers={**headers, **linked, **location})


def _metadata(files: dict[str, File]) -> dict[str, Any]:
    card = files["README.md"].content.decode() if "README.md" in files else ""
    found = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    return yaml.safe_load(found[1]) or {} if found else {}


def _part(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """All of it, or the range of bytes that was asked for."""
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Response(content, headers=headers, media_type="application/octet-stream")
    size = len(content)
    first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
    last = min(int(asked[2]), size - 1) if asked[1] and asked[2] else size - 1
    if first > last:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
    return Response(content[first : last + 1], 206, headers=headers, media_type="application/octet-stream")


def _add_references(app: FastAPI, storage: Storage) -> None:
    @app.get(MODEL + "/refs")
    def refs(request: Request) -> Any:
        repository = Access(storage, request).readable(request)
        kinds = {"branches": "heads", "tags": "tags", "converts": "convert", "pullRequests": "pr"}
        return {
            name: [
                {"name": reference.removeprefix(f"refs/{kind}/"), "ref": reference, "targetCommit": commit}
                for reference, commit in repository.references.items()
                if reference.startswith(f"refs/{kind}/")
            ]
            for name, kind in kinds.items()
        }

    def point(request: Request, reference: str, revision: str) -> Any:
        repository = Access(storage, request).writable(request)
        commit = _commit_of(repository, revision)
        if reference in repository.references:
            raise RefusedError(409, f"Reference already exists: {reference}")
        repository.references[reference] = commit
        return {}

    @app.post(MODEL + "/branch/{branch}")
    async def branch(request: Request, branch: str) -> Any:
        asked = await request.json()
        return point(request, f"refs/heads/{unquote(branch)}", asked.get("startingPoint", "main"))

    @app.post(MODEL + "/tag/{revision}")
    async def tag(request: Request, revision: str) -> Any:
        return point(request, f"refs/tags/{(await request.json())['tag']}", revision)


def _add_commits(app: FastAPI, storage: Storage, endpoint: str) -> None:
    @app.post(MODEL + "/preupload/{revision}")
    async def preupload(request: Request, revision: str) -> Any:
        repository = Access(storage, request).writable(request)
        files = repository.commits[_commit_of(repository, revision)].files
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if goes_to_lfs(file["path"], file["size"]) else "regular",
                    "shouldIgnore": False,
                    "oid": files[file["path"]].etag if file["path"] in files else None,
                }
                for file in (await request.json())["files"]
            ]
        }

    @app.post(MODEL + "/commit/{revision}")
    async def commit(request: Request, revision: str, create_pr: bool = False) -> Any:
        repository = Access(storage, request).writable(request)
        base = _commit_of(repository, revision)
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        header = lines[0]["value"]
        if header.get("parentCommit", base) != base:
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        added = {
            line["value"]["path"]: _content(repository, line) for line in lines if line["key"] in ("file", "lfsFile")
        }
        deleted = [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]
        deleted += [line["value"]["path"].rstrip("/") + "/" for line in lines if line["key"] == "deletedFolder"]
        url = f"{endpoint}/{repository.id}"
        if create_pr:
            number, sha = repository.open_pull_request(header["summary"], added, deleted, base)
            answer = {"pullRequestUrl": f"{url}/discussions/{number}"}
        else:
            reference = f"refs/heads/{unquote(revision)}"
            if reference not in repository.references:
                raise RefusedError(404, f"{unquote(revision)} is not a branch", "RevisionNotFound")
            sha, answer = repository.commit(reference, header["summary"], added, deleted), {}
        return {"success": True, "commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "hookOutput": "", **answer}


def _content(repository: Repository, line: dict[str, Any]) -> File:
    value = line["value"]
    if line["key"] == "file":
        return File(base64.b64decode(value["content"]), lfs=False)
    if value["oid"] not in repository.objects:
        raise RefusedError(400, f"{value['path']} was not uploaded to large file storage")
    return File(repository.objects[value["oid"]], lfs=True)


def _signature(storage: Storage, repo_id: str, oid: str) -> str:
    return hmac.new(storage.secret.encode(), f"{repo_id} {oid}".encode(), "sha256").hexdigest()


def _signed(storage: Storage, repo_id: str, oid: str) -> str:
    return f"/large/{repo_id}/{oid}?signature={_signature(storage, repo_id, oid)}"


def _add_large_files(app: FastAPI, storage: Storage, files_endpoint: str) -> None:
    def signed_for(namespace: str, name: str, oid: str, signature: str) -> Repository:
        repo_id = f"{namespace}/{name}"
        if not hmac.compare_digest(signature, _signature(storage, repo_id, oid)):
            raise RefusedError(403, "SignatureDoesNotMatch")
        return storage.repositories[repo_id]

    @app.post(REPO + "/info/lfs/objects/batch")
    async def batch(request: Request, name: str) -> Any:
        request.path_params["name"] = name.removesuffix(".git")
        repository = Access(storage, request).writable(request)
        objects = []
        for wanted in (await request.json())["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in repository.objects:
                place = files_endpoint + _signed(storage, repository.id, wanted["oid"])
                entry["actions"] = {"upload": {"href": place}, "verify": {"href": place}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    @app.put("/large/{namespace}/{name}/{oid}")
    async def upload(request: Request, namespace: str, name: str, oid: str, signature: str) -> Any:
        repository = signed_for(namespace, name, oid, signature)
        content = await request.body()
        if repository.full:
            raise RefusedError(403, "Storage limit reached")
        if hashlib.sha256(content).hexdigest() != oid:
            raise RefusedError(400, "The content is not what its hash says")
        repository.objects[oid] = content
        return {}

    @app.post("/large/{namespace}/{name}/{oid}")
    async def verify(request: Request, namespace: str, name: str, oid: str, signature: str) -> Any:
        content = signed_for(namespace, name, oid, signature).objects.get(oid)
        if content is None or len(content) != (await request.json())["size"]:
            raise RefusedError(404, "Object does not exist")
        return {}

    @app.api_route("/large/{namespace}/{name}/{oid}", methods=["GET", "HEAD"])
    def download(request: Request, namespace: str, name: str, oid: str, signature: str) -> Response:
        content = signed_for(namespace, name, oid, signature).objects[oid]
        return _part(request, content, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})
