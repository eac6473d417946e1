"""What a Hub keeps: users, and repositories with commits, branches, tags and pull requests."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

#: A repository's first commit, as the Hub makes it.
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"

_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npy", ".parquet")
_LFS_BYTES = 10 * 2**20


@dataclass(frozen=True)
class User:
    name: str
    organizations: tuple[str, ...] = ()

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.name, *self.organizations)


@dataclass(frozen=True)
class File:
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        size = len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()

    @property
    def blob_id(self) -> str:
        """Git's: of the pointer, where the content lies in large file storage."""
        stored = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id


def goes_to_lfs(path: str, size: int) -> bool:
    return path.endswith(_LFS_SUFFIXES) or size > _LFS_BYTES


@dataclass(frozen=True)
class Commit:
    parent: str | None
    message: str
    files: dict[str, File]

    @property
    def sha(self) -> str:
        listing = [f"{path} {file.blob_id}" for path, file in sorted(self.files.items())]
        return hashlib.sha1("\n".join([str(self.parent), self.message, *listing]).encode()).hexdigest()


@dataclass
class Repository:
    """One model repository. References are git's: ``refs/heads/main``, ``refs/tags/v1``, ``refs/pr/1``."""

    id: str
    private: bool = False
    gated: bool = False
    #: Whether large file storage takes no more.
    full: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    #: Uploaded content by SHA-256, whether or not a commit refers to it.
    objects: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("refs/heads/main", "initial commit", {".gitattributes": File(_ATTRIBUTES, lfs=False)})

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a tag, a full reference or a commit's hash names."""
        for reference in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if reference in self.references:
                return self.references[reference]
        return revision if revision in self.commits else None

    def files(self, revision: str = "main") -> dict[str, File]:
        commit = self.resolve(revision)
        if commit is None:
            raise KeyError(revision)
        return self.commits[commit].files

    def commit(
        self, reference: str, message: str, added: dict[str, File], deleted: Iterable[str] = (), base: str | None = None
    ) -> str:
        """Move a reference on by one commit, all of it or nothing."""
        parent = base or self.references.get(reference)
        before = self.commits[parent].files if parent else {}
        kept = {path: file for path, file in before.items() if not _under(path, deleted)}
        commit = Commit(parent, message, {**kept, **added})
        self.commits[commit.sha] = commit
        self.references[reference] = commit.sha
        self.objects.update({file.sha256: file.content for file in added.values() if file.lfs})
        return commit.sha

    def open_pull_request(
        self, message: str, added: dict[str, File], deleted: Iterable[str], base: str
    ) -> tuple[int, str]:
        number = 1 + sum(reference.startswith("refs/pr/") for reference in self.references)
        return number, self.commit(f"refs/pr/{number}", message, added, deleted, base=base)


def _under(path: str, deleted: Iterable[str]) -> bool:
    return any(path == name or (name.endswith("/") and path.startswith(name)) for name in deleted)


@dataclass
class Storage:
    """All of a Hub's state; it outlives the server."""

    users: dict[str, User] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: What the URLs of large files are signed with: whoever has one needs no token.
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    def create(self, repo_id: str, **settings: Any) -> Repository:
        self.repositories[repo_id] = Repository(repo_id, **settings)
        return self.repositories[repo_id]

    def put(self, repo_id: str, files: dict[str, bytes], **settings: Any) -> Repository:
        """A repository with these files, without a client."""
        repository = self.create(repo_id, **settings)
        added = {path: File(content, goes_to_lfs(path, len(content))) for path, content in files.items()}
        repository.commit("refs/heads/main", "Add files", added)
        return repository
