"""The repository that ``push`` writes to: what is there, what is missing, and what became of it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_convert.errors import CannotError, HubError
from mla_convert.hub_errors import status_of
from mla_convert.hub_writing import Hub
from mla_convert.push_files import README, PushFile

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

_MAX_README = 4 << 20
#: A pull request of an earlier run with the same files is looked for among so many.
_RECENT_PULLS = 10


@dataclass(frozen=True, slots=True)
class Head:
    """A repository at the revision to push to. ``commit`` and ``files`` are empty where there is nothing yet."""

    exists: bool
    private: bool | None
    commit: str | None
    files: Mapping[str, RepoFile]


@dataclass(frozen=True, slots=True)
class Landed:
    """Where the files are now."""

    commit: str
    pull_request: int | None = None


class Target:
    """One repository at one revision."""

    def __init__(self, hub: Hub, repo_id: str, revision: str) -> None:
        self.hub, self.api, self.repo_id, self.revision = hub, hub.api, repo_id, revision

    def head(self) -> Head:
        """The repository at the revision; asks only."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        def look() -> Head:
            try:
                info = self.api.model_info(self.repo_id, revision=self.revision)
            except RevisionNotFoundError:
                private = bool(self.api.model_info(self.repo_id).private)
                return Head(True, private, None, {})
            except RepositoryNotFoundError as error:
                # To somebody without a token the Hub says 401 of what does not exist, too.
                if isinstance(error, GatedRepoError) or (status_of(error) == 401 and self.hub.has_token):
                    raise
                return Head(False, None, None, {})
            return Head(True, bool(info.private), info.sha, self._tree(info.sha) if info.sha else {})

        return self.hub.call(f"read {self.repo_id}", look, repo_id=self.repo_id)

    def _tree(self, commit: str) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        listed = self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
        return {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}

    def prepare(self, head: Head, *, private: bool | None, create_pr: bool) -> Head:
        """Create what is missing: the repository, the branch."""
        repo_id, revision = self.repo_id, self.revision
        if not head.exists:
            self.hub.call(
                f"create {repo_id}",
                lambda: self.api.create_repo(repo_id, private=private, exist_ok=True),
                repo_id=repo_id,
            )
            head = self.head()
            if not head.exists:
                raise HubError(
                    f"{repo_id} is taken by a repository that this token cannot see",
                    hint="choose another name, or log in with a token that may see it",
                )
        if head.commit is None and revision != "main":
            if create_pr or re.fullmatch(r"refs/.*|[0-9a-f]{40}", revision):
                raise HubError(
                    f"{repo_id} has no revision {revision}",
                    hint="name a branch that is there, or leave out --create-pr to have it created",
                )
            self.hub.call(
                f"create the branch {revision}",
                lambda: self.api.create_branch(repo_id, branch=revision, exist_ok=True),
                repo_id=repo_id,
            )
            head = self.head()
        return head

    def download_readme(self, head: Head) -> bytes:
        """The README that is there, small enough to be amended."""
        from huggingface_hub import hf_hub_download

        if head.files[README].size > _MAX_README:
            raise CannotError(f"README.md of {self.repo_id} is too large to be amended", hint="use --no-card")

        def fetch() -> bytes:
            with tempfile.TemporaryDirectory(prefix="mla-convert-") as folder:
                found = hf_hub_download(
                    self.repo_id,
                    README,
                    revision=head.commit,
                    cache_dir=folder,
                    endpoint=self.hub.endpoint,
                    token=self.api.token,
                )
                return Path(found).read_bytes()

        return self.hub.call(f"read README.md of {self.repo_id}", fetch, repo_id=self.repo_id)

    def pull_requests(self) -> dict[int, str]:
        """The commit of every pull request, by number."""
        refs = self.hub.call(
            f"list the pull requests of {self.repo_id}",
            lambda: self.api.list_repo_refs(self.repo_id, include_pull_requests=True),
            repo_id=self.repo_id,
        )
        pulls = {ref.ref.rpartition("/")[2]: ref.target_commit for ref in refs.pull_requests or []}
        return {int(number): commit for number, commit in pulls.items() if number.isdigit()}

    def first_with(self, files: Mapping[str, PushFile], pulls: Mapping[int, str]) -> Landed | None:
        """The newest of these pull requests that has all files."""
        for number, commit in sorted(pulls.items(), reverse=True)[:_RECENT_PULLS]:
            tree = self.tree_at(commit)
            if not differences(files, tree):
                return Landed(commit, number)
        return None

    def open_pull_request(self, files: Mapping[str, PushFile]) -> Landed | None:
        """A pull request that is open and has these files already: an earlier run's."""
        found = self.first_with(files, self.pull_requests())
        if found is None or found.pull_request is None:
            return None
        number = found.pull_request
        details = self.hub.call(
            f"read pull request {number}",
            lambda: self.api.get_discussion_details(self.repo_id, number),
            repo_id=self.repo_id,
        )
        return found if details.status in ("open", "draft") else None

    def tree_at(self, commit: str) -> dict[str, RepoFile]:
        """Every file of a commit."""
        return self.hub.call(
            f"list the files of {self.repo_id}", lambda: self._tree(commit), repo_id=self.repo_id
        )


def same(file: PushFile, remote: RepoFile | None) -> bool:
    """Does the Hub hold these bytes under this name?"""
    if remote is None or remote.size != file.size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == file.sha256)
    return remote.blob_id == file.git_oid()


def differences(files: Mapping[str, PushFile], tree: Mapping[str, RepoFile]) -> list[str]:
    """A line for each file that the tree does not hold as it should be."""
    return [
        f"{name} is {'missing' if name not in tree else 'not what was sent'}"
        for name, file in files.items()
        if not same(file, tree.get(name))
    ]
