"""What a Hub keeps: users, and repositories with commits, branches, tags and pull requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

#: A repository's first commit, as the Hub makes it.
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


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
    def etag(self) -> str:
        """The content's own hash in large file storage, and git's of all else."""
        size = len(self.content)
        return self.sha256 if self.lfs else hashlib.sha1(b"blob %d\0" % size + self.content).hexdigest()


def goes_to_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf", ".npy"))


@dataclass(frozen=True)
class Commit:
    parent: str | None
    message: str
    files: dict[str, File]

    @property
    def sha(self) -> str:
        listing = [f"{path} {file.etag}" for path, file in sorted(self.files.items())]
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

    def commit(self, reference: str, message: str, added: dict[str, File], base: str | None = None) -> str:
        """Move a reference on by one commit, all of it or nothing."""
        parent = base or self.references.get(reference)
        before = self.commits[parent].files if parent else {}
        commit = Commit(parent, message, {**before, **added})
        self.commits[commit.sha] = commit
        self.references[reference] = commit.sha
        self.objects.update({file.sha256: file.content for file in added.values() if file.lfs})
        return commit.sha


@dataclass
class Storage:
    """All of a Hub's state; it outlives the server. Users by their tokens."""

    users: dict[str, User] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)

    def create(self, repo_id: str, **settings: Any) -> Repository:
        self.repositories[repo_id] = Repository(repo_id, **settings)
        return self.repositories[repo_id]

    def put(self, repo_id: str, files: dict[str, bytes], **settings: Any) -> Repository:
        """A repository with these files, without a client."""
        repository = self.create(repo_id, **settings)
        added = {path: File(content, goes_to_lfs(path)) for path, content in files.items()}
        repository.commit("refs/heads/main", "Add files", added)
        return repository
