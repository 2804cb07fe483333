"""Exports to the Hugging Face hub: equal to an export to a folder, whole or absent at every moment, and refusals."""

import os
import shutil
import signal
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path

import pytest
from huggingface_hub.utils import http_backoff

from sft.cli import main
from sft.console import QUIET
from sft.hf import hub_upload
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import adapters, hf
from tests.unit.fixtures.hub import Hub, serving, use
from tests.unit.fixtures.hub_writes import SIGNATURE, Writes

TOKEN, REPO = "hf_5ecretTokenOfTheTest", "org/model"
URL = f"hf://{REPO}"
Files = dict[str, bytes]


class Site:
    """A hub that can be written, a checkpoint, and what its export to a folder has."""

    def __init__(self, path: Path, hub: Hub) -> None:
        self.path, self.hub = path, hub
        self.writes = hub.writes = Writes(path / "hub")
        hub.tokens = {TOKEN}
        import_hf(hf.save(path / "model", "llama"), path / "checkpoint", QUIET)
        self.wanted = self.local("checkpoint")

    def local(self, source: str, *options: str) -> Files:
        """The files of the export to a folder, which is kept: path/export-SOURCE"""
        target = self.path / f"export-{source}"
        assert main(["export", str(self.path / source), str(target), "--quiet", *options]) == 0
        return {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}

    def export(self, url: str = URL, source: str = "checkpoint", *options: str) -> int:
        return main(["export", str(self.path / source), url, *options])

    def content(self, branch: str = "main", repo: str = REPO) -> Files:
        return self.writes.content(self.hub, repo, branch)

    def send(self) -> None:
        """What an export does after the conversion."""
        hub_upload.publish(hub_upload.open_branch(URL), self.path / "export-checkpoint", sorted(self.wanted), "Export")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in ("staging", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "staging"))
    monkeypatch.setattr("tempfile.tempdir", None)
    with serving() as hub:
        use(monkeypatch, hub, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield Site(tmp_path, hub)


def test_models_and_adapters_are_those_of_a_folder(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A new repository is private.  A full branch is refused, and another branch of it has only its own export."""
    assert site.export() == 0
    assert site.content() == site.wanted and "model.safetensors" in site.wanted
    assert site.writes.visible == {REPO: "private"} and len(site.hub.commits[REPO]) == 2

    assert site.export() == 2
    assert "hf://org/model holds README.md, config.json, " in capsys.readouterr().err
    adapters.trained(site.path / "lora", site.path / "model")
    wanted = site.local("lora", "--no-merged")
    assert site.export(f"{URL}@lora", "lora", "--no-merged") == 0
    assert site.content("lora") == wanted and "adapter_config.json" in wanted
    assert site.content() == site.wanted and not [*(site.path / "staging").iterdir()]

    site.writes.create(site.hub, "org/open", "public")
    assert site.export("hf://org/open") == 0
    assert site.content(repo="org/open") == site.wanted and site.writes.visible["org/open"] == "public"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.grid)], ids=["a", "each"])
def test_a_transfer_that_ends_at_any_request_publishes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    """The same command then sends what is missing, and a repository has all files or none after every request."""
    site.send()
    num_requests = site.writes.num_requests
    assert num_requests > 10 and site.content() == site.wanted
    large = [path for path in site.hub.asked if path.startswith("PUT lfs/")]
    assert len(large) == len({*large}) and any(path.count("/") == 2 for path in large)  # in parts
    monkeypatch.setattr(hub_upload, "_COMMITS", 2)
    monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", 1)
    faults = ("cut", "lost", "503")
    for last in range(1, num_requests + 1):
        for fault in faults if every else [faults[last % 3]]:
            site.hub.commits.clear()
            site.writes = site.hub.writes = Writes(site.path / f"hub-{last}-{fault}")
            site.writes.before = lambda number, *_: fault if number >= last else None  # noqa: B023
            try:
                site.send()
            except (hub_upload.ConfigError, hub_upload.StorageError) as error:
                assert "cannot be written: http://127.0.0.1" in str(error) and SIGNATURE not in str(error)
            assert site.content() in ({}, site.wanted)
            site.writes.before = lambda *_: None
            num_sent = len(site.writes.objects)
            site.hub.asked.clear()
            if not site.content():
                site.send()
            assert site.content() == site.wanted and len(site.hub.commits[REPO]) == 2
            sent_again = {path.split("/")[1] for path in site.hub.asked if path.startswith("PUT lfs/")}
            assert len(sent_again) == len(site.writes.objects) - num_sent


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_of_another_program_are_not_taken_for_ours(site: Site, name: str) -> None:
    """It publishes the same names meanwhile; a file, stored in LFS or not, differs in its last byte."""
    ours, theirs = site.path / "export-checkpoint", site.path / "theirs"
    shutil.copytree(ours, theirs)
    (theirs / name).write_bytes(site.wanted[name][:-1] + b"?")
    branch = hub_upload.open_branch(URL)
    hub_upload.publish(branch, theirs, sorted(site.wanted), "Theirs")
    with pytest.raises(hub_upload.ConfigError, match="another program changed the repository meanwhile"):
        hub_upload.publish(branch, ours, sorted(site.wanted), "Ours")
    assert site.content() == site.wanted | {name: (theirs / name).read_bytes()}


def test_faults_that_pass_are_no_faults(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the hub made the commit and its answer was lost."""
    getLogger("huggingface_hub").addHandler(caplog.handler)
    for fault in ("503", "cut", "lost"):
        site.hub.commits.clear()
        site.writes = site.hub.writes = Writes(site.path / f"hub-{fault}")
        kinds: set[str] = set()

        def once(number: int, method: str, path: str) -> str | None:
            """The first request of each kind that sends something fails."""
            kind = "lfs" if path.startswith("lfs/") else path.split("/")[-2]
            is_first = kind in ("lfs", "objects", "preupload", "commit") and kind not in kinds
            kinds.add(kind)
            return fault if is_first else None  # noqa: B023

        site.writes.before = once
        assert site.export() == 0
        assert site.content() == site.wanted and {"lfs", "objects", "preupload", "commit"} < kinds
        assert len(site.hub.commits[REPO]) == 2
    getLogger("huggingface_hub").removeHandler(caplog.handler)
    assert TOKEN not in caplog.text and SIGNATURE not in caplog.text


@pytest.mark.parametrize("moment", ["PUT lfs/", "POST api/models/org/model/commit/"])
def test_a_kill_leaves_the_branch_empty(site: Site, moment: str) -> None:
    child = os.fork()
    if child == 0:
        site.writes.before = lambda *_: None
        os._exit(100 + site.export())

    def kill(number: int, method: str, path: str) -> str | None:
        if f"{method} {path}".startswith(moment):
            os.kill(child, signal.SIGKILL)
            return "cut"
        return None

    site.writes.before = kill
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not site.content() and site.hub.commits[REPO]
    site.writes.before = lambda *_: None
    assert site.export() == 0 and site.content() == site.wanted


def test_refusals_are_one_paragraph_without_secrets(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, url: str = URL, code: int = 2) -> None:
        assert site.export(url) == code
        err = capsys.readouterr().err
        assert words in err, err
        assert err.count("Error: hf://") == 1 and "Traceback" not in err and TOKEN not in err and SIGNATURE not in err
        assert not site.content()

    for url in ("hf://org", "hf://datasets/org/a", f"{URL}@{'0' * 40}", "hf://org/a b"):
        refused("must be hf://OWNER/NAME or hf://OWNER/NAME@BRANCH", url)
    refused("the hub has no such names.  Cannot have -- or .. in repo_id: 'org/a--b'.", "hf://org/a--b")
    site.hub.refuse = {"api/repos/create": (403, "", "you may not create a model under org")}
    refused("refuses it to the account of your token (403: you may not create a model under org).  Correct OWNER")
    site.hub.refuse = {}
    assert not site.hub.commits  # nothing was created

    site.writes.create(site.hub, REPO, "public")
    site.writes.readers = {TOKEN}
    refused("refuses it to the account of your token (403: you must use a write token)")
    site.writes.readers = set()
    site.writes.tags["v1"] = "0" * 40
    refused(f"{URL}@v1: v1 is a tag, which has no new commits.  Name a branch.", f"{URL}@v1")
    answers: dict[str, tuple[str, str, int]] = {
        "/preupload/": ("503", "cannot be reached, or the connection broke off (503: no reason given)", 1),
        "lfs/": ("403", "refuses it to the account of your token (403: no reason given)", 2),
        "/commit/": ("400", "refused it (400: no reason given)", 2),
        "/refs": ("cut", "cannot be reached, or the connection broke off (RemoteProtocolError: ", 2),
    }
    for part, (fault, words, code) in answers.items():
        site.writes.before = lambda number, method, path: fault if part in path else None  # noqa: B023
        refused(words, code=code)

    def change(number: int, method: str, path: str) -> None:
        if "/commit/" in path:
            commit, folder = site.hub.commits[REPO][0]
            site.writes.branches[REPO, "main"] = site.hub.add(REPO, folder)

    site.writes.before = change
    refused("another program changed the repository meanwhile (412: A commit has happened since); nothing was publis")

    def fail(*_: object, **__: object) -> None:  # hf_xet, which needs another server
        raise ConnectionError("Network error: http://cas/a?" + SIGNATURE)

    with monkeypatch.context() as without_server:
        without_server.setattr("huggingface_hub.HfApi.create_commit", fail)
        refused("the connection broke off (ConnectionError: Network error: http://cas/a).  Start the command", code=1)

    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    refused("refuses it to the account of your token (401: Invalid credentials in Authorization header)")
    monkeypatch.delenv("HF_TOKEN")
    refused("there is no token.  Set HF_TOKEN to a token that may write, or run `hf auth login`.")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE is set.  Unset it, or export to a folder.")
    shutil.rmtree(site.path / "checkpoint")
    assert site.export("hf://org/other") == 2
    assert "the path has no checkpoint" in capsys.readouterr().err
    assert "org/other" not in site.hub.commits
