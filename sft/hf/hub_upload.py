"""Publishes a folder as one commit of a model repository on the Hugging Face hub: hf://OWNER/NAME or ...@BRANCH

A repository that does not exist is created, private.  The files are sent first, where no reader sees them; then one
commit adds them all to a branch that has no files.  So a branch has the whole folder or nothing of it.  If a transfer
was interrupted, the hub knows the files that arrived, and the same command sends the rest.

huggingface_hub sends the files, and repeats a request that fails.  A commit is repeated here, because its answer may be
lost: it names the commit that it follows, so it cannot be made twice.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sft.errors import CheckpointError, ConfigError, SftError, StorageError, first_few
from sft.files.file_digest import entry_of
from sft.hf import hub_errors

SCHEME = "hf://"
_URL = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_HUB = ".gitattributes"  # the only file of a new repository
_COMMITS = 4  # attempts
_SECRETS = re.compile(r"\?\S*")  # the query of a URL to a file store has a signature


@dataclass(frozen=True)
class EmptyBranch:
    """A branch without files.  head: its commit; the files are added only if it is still the newest"""

    url: str
    repo: str
    name: str
    head: str


def open_branch(url: str) -> EmptyBranch:
    """The branch that a URL names.  Creates the repository, private, and the branch if they do not exist.

    Raises ConfigError if the URL, the token or the network cannot be used, and CheckpointError if the branch has files.
    """
    if (match := _URL.fullmatch(url)) is None or _COMMIT.fullmatch(branch := match[2] or "main"):
        raise ConfigError(f"{url} must be hf://OWNER/NAME or hf://OWNER/NAME@BRANCH.")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    repo = match[1]
    if get_token() is None:
        raise ConfigError(
            f"{url} cannot be written: there is no token.  Set HF_TOKEN to a token that may write, or run `hf auth "
            "login`."
        )
    api = HfApi()
    with _explained(url, ConfigError):
        try:
            refs = api.list_repo_refs(repo)
        except RepositoryNotFoundError:
            api.create_repo(repo, private=True)
            refs = api.list_repo_refs(repo)
        api.auth_check(repo, write=True)
        if any(tag.name == branch for tag in refs.tags):
            raise ConfigError(f"{url}: {branch} is a tag, which has no new commits.  Name a branch.")
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        if branch not in heads:  # the first commit of a repository has no model yet
            heads[branch] = api.list_repo_commits(repo)[-1].commit_id
            api.create_branch(repo, branch=branch, revision=heads[branch])
        files = sorted({entry.path for entry in api.list_repo_tree(repo, revision=heads[branch])} - {_OF_HUB})
    if files:
        raise CheckpointError(
            f"{url} holds {', '.join(first_few(files))}; nothing was written.  Remove them, or name another branch "
            f"(hf://{repo}@BRANCH) or another repository."
        )
    return EmptyBranch(url, repo, branch, heads[branch])


def publish(branch: EmptyBranch, folder: Path, names: Sequence[str], message: str) -> None:
    """Add files of `folder` to the branch, by one commit.

    Raises ConfigError if the hub refuses them, and StorageError if it does not answer; then the branch has no file.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in names]
    with _explained(branch.url, StorageError):
        for attempt in range(1, _COMMITS + 1):
            try:
                api.create_commit(
                    branch.repo, files, commit_message=message, revision=branch.name, parent_commit=branch.head
                )
                return
            except Exception as error:  # the HTTP library and the storage back ends raise their own classes of errors
                is_last = attempt == _COMMITS or not _is_unreachable(error)
                if _holds(branch, folder, names):  # only the answer was lost
                    return
                if is_last:
                    raise
            time.sleep(2**attempt)


def _holds(branch: EmptyBranch, folder: Path, names: Sequence[str]) -> bool:
    """Whether the branch has these files now, with the same content; False if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils.sha import git_hash

    try:
        entries = [*HfApi().list_repo_tree(branch.repo, recursive=True, revision=branch.name)]
    except Exception:  # as above
        return False
    stored = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    return stored.keys() >= {*names} and all(
        (
            entry_of(folder / name).sha256 == lfs.sha256
            if (lfs := stored[name].lfs)
            else git_hash((folder / name).read_bytes()) == stored[name].blob_id
        )
        for name in names
    )


@contextmanager
def _explained(url: str, unreachable: type[SftError]) -> Iterator[None]:
    """Turns every other error into one paragraph without secrets, and keeps huggingface_hub from printing them.

    unreachable: the class of the error if the hub does not answer
    """
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a warning about a repeated request has its URL, whose query is a secret
    try:
        with hub_errors.without_progress_bars():
            yield
    except SftError:
        raise
    except Exception as error:
        kind = unreachable if _is_unreachable(error) else ConfigError
        raise kind(f"{url} cannot be written: {_reason(error)}") from None
    finally:
        logging.set_verbosity(verbosity)


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    hub = hub_errors.endpoint()
    answer = next((e for e in _chain(error) if isinstance(e, errors.HfHubHTTPError)), None)
    status = answer.response.status_code if answer is not None else None
    answered = f"{status}: {_SECRETS.sub('', answer.server_message or 'no reason given')}" if answer is not None else ""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set.  Unset it, or export to a folder."
    if isinstance(error, errors.HFValidationError):
        return f"the hub has no such names.  {str(error).splitlines()[0]}"
    if _is_unreachable(error):
        cause = answered or _SECRETS.sub("", hub_errors.first_line([*_chain(error)][-1]))
        return (
            f"{hub} cannot be reached, or the connection broke off ({cause}).  Start the command again when this is "
            "mended: files that arrived are not sent again."
        )
    if status in (409, 412):
        return f"another program changed the repository meanwhile ({answered}); nothing was published."
    if status in (401, 403, 404):
        return (
            f"{hub} refuses it to the account of your token ({answered}).  Correct OWNER, or set HF_TOKEN to a token "
            "that may write there."
        )
    return f"{hub} refused it ({answered or _SECRETS.sub('', hub_errors.first_line(error))})."


def _is_unreachable(error: Exception) -> bool:
    """Whether another try may succeed.  hf_xet raises ConnectionError for refusals, too: "client error (403 ..."."""
    return any(
        hub_errors.is_unreachable(e) or (isinstance(e, ConnectionError) and "client error" not in str(e))
        for e in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[Exception]:
    """An error and those that caused it."""
    while isinstance(error, Exception):
        yield error
        error = error.__cause__
