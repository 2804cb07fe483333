"""Writes the error message for a model that cannot be read from the hub: why, and what would work."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sft.errors import ConfigError


@contextmanager
def translated(name: str, repo: str, revision: str | None) -> Iterator[None]:
    """A context manager that turns every error except a ConfigError into a ConfigError about the hub name `name`.  It
    also disables the progress bars of huggingface_hub."""
    try:
        with without_progress_bars():
            yield
    except ConfigError:
        raise
    except Exception as error:  # HTTP library, TLS, proxies and storage back ends raise their own classes of errors
        raise ConfigError(f"{name}: {_paragraph(error, repo, revision)}") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """A context manager that disables the progress bars of huggingface_hub, because our console shows the progress."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_enabled = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_enabled:
            enable_progress_bars()


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer, or reported a temporary failure (HTTP status 429, or 500 and above)."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    # Compares names of classes, because the HTTP library is httpx or httpx2, depending on huggingface_hub.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "TransportError" in kinds and "ProxyError" not in kinds


def first_line(error: BaseException) -> str:
    """Class and first line of an error, such as "ConnectError: [Errno 111] Connection refused"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _paragraph(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors, get_token

    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    account = "the account of your token (HF_TOKEN, or `hf auth login`)" if get_token() else "anyone without a token"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the model is gated, and {account} has no access to it.  Ask for access at {endpoint()}/{repo}, then set "
            "HF_TOKEN to a token of the account that got it."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{endpoint()} has no revision {revision} of {repo}.  {repo} without @ is the newest commit."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no such folder in {Path.cwd()}, and {endpoint()} shows no such model to {account}.  Correct the "
            "name, or set HF_TOKEN if the model is private."
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            f"{endpoint()} refuses access ({error.response.status_code}: {error.server_message or 'no reason given'}) "
            f"to {account}.  Renew the token, or unset HF_TOKEN for a public model."
        )
    broken = next((e for e in (error, cause) if is_unreachable(e) or "Consistency check failed" in str(e)), None)
    if isinstance(error, errors.LocalEntryNotFoundError) and broken is None:
        is_partial = isinstance(error, errors.IncompleteSnapshotError)
        has = "has only a part of" if is_partial else "does not have"
        return (
            f"there is no such folder in {Path.cwd()}, and the cache {constants.HF_HUB_CACHE} {has} this model.  "
            f"Nothing was asked of the hub, because HF_HUB_OFFLINE is set.  Unset it, or download the model where the "
            f"network can be reached: `hf download {repo}{f' --revision {revision}' if revision else ''}`."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of the cache {constants.HF_HUB_CACHE} is full.  Free some space, or set HF_HOME to a folder on "
            "another disk."
        )
    if broken is not None:
        return (
            f"there is no such folder in {Path.cwd()}, and {endpoint()} cannot be reached, or the connection broke "
            f"off ({first_line(broken)}).  Correct the path; or start again: files that are complete are kept.  On a "
            f"machine without a network, set HF_HUB_OFFLINE=1 and copy the cache ({constants.HF_HUB_CACHE}) of a "
            "machine that has the model."
        )
    return f"{endpoint()} or the cache {constants.HF_HUB_CACHE} failed: {first_line(error)}."
