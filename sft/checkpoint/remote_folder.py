"""The place in an object store to which a run copies its checkpoints (checkpoint.remote).

A store has no rename, so a checkpoint counts as complete as long as it has its manifest.  The manifest is written after
all other files, and removed before any of them:

    s3://bucket/runs/a/
        run.lock                                   names the run that is alive (sft/run/remote_lock.py)
        latest_checkpointed_iteration.txt          the newest step, as in run.dir/checkpoints
        iter_0000100/__0_0.distcp, ...             the files of a checkpoint
        iter_0000100/manifest.json                 complete
        iter_0000200/manifest.given-up.json        no longer used, because the run was resumed from an earlier step
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from sft.checkpoint import folders, held_out_pass, manifest
from sft.config import CheckpointConfig
from sft.errors import CheckpointError
from sft.files.file_digest import Entry
from sft.files.object_store import DamagedError, ObjectStore

GIVEN_UP = "manifest.given-up.json"
_COMPLETE = re.compile(rf"(iter_\d{{7,}})/{re.escape(manifest.NAME)}")


class RemoteFolder:
    """The checkpoints of a run in an object store.  No method is collective."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url

    def path(self, step: int) -> str:
        """The URL of a checkpoint."""
        return f"{self.url}/{folders.name_of(step)}"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, lowest first."""
        matches = (_COMPLETE.fullmatch(stored.name) for stored in self._store.objects())
        return sorted(int(match[1][5:]) for match in matches if match)

    def newest(self) -> int | None:
        """The step from which a run would continue: the newest up to the pointer, as in `folders.candidates`."""
        steps, pointer = self.steps(), self._store.read(folders.POINTER)
        text = pointer[0].decode("ascii", "replace").strip() if pointer else ""
        up_to_pointer = [step for step in steps if re.fullmatch(r"\d{1,18}", text) and step <= int(text)]
        return max(up_to_pointer or steps, default=None)

    def newer(self, folder: Path) -> int | None:
        """The step of the newest checkpoint; None if `folder` has a checkpoint of this or a later step."""
        newest, own = self.newest(), folders.candidates(folder)
        return None if newest is None or (own and int(own[0].name[5:]) >= newest) else newest

    def refuse_never(self, config: CheckpointConfig) -> None:
        """Raise CheckpointError if checkpoint.resume is never, and there is a checkpoint."""
        if config.resume == "never" and self.newest() is not None:
            raise CheckpointError(
                f"checkpoint.resume = never, but checkpoint.remote = {self.url} holds checkpoints of an earlier run.  "
                "Choose another checkpoint.remote, or resume with checkpoint.resume=auto."
            )

    def is_complete(self, step: int) -> bool:
        return self._store.read(self._name(step, manifest.NAME)) is not None

    def read_manifest(self, step: int, folder: Path) -> None:
        """Write the manifest of a complete checkpoint into the folder, and the record of its held-out pass."""
        content = self._store.read(self._name(step, manifest.NAME))
        if content is None:
            raise CheckpointError(f"{self.path(step)} is being replaced by another run.")
        (folder / manifest.NAME).write_bytes(content[0])
        if (passed := self._store.read(self._name(step, held_out_pass.NAME))) is not None:
            (folder / held_out_pass.NAME).write_bytes(passed[0])

    def add_pass(self, step: int, folder: Path) -> None:
        """Write the record of a held-out pass, which `folder` has got after the checkpoint was copied."""
        self._store.write(self._name(step, held_out_pass.NAME), (folder / held_out_pass.NAME).read_bytes())

    def receive(self, step: int, names: Collection[str], entries: Mapping[str, Entry], folder: Path) -> None:
        """Read files of a checkpoint into the folder.  Raises CheckpointError if one differs from its entry."""
        for name in names:
            try:
                self._store.download(self._name(step, name), folder / name, entries[name])
            except DamagedError as error:
                raise CheckpointError(
                    f"{error}  Remove {self.path(step)}/{manifest.NAME}, and the run continues from the checkpoint "
                    "before it."
                ) from error

    def begin(self, step: int, files: Collection[str]) -> dict[str, int]:
        """Take the manifest away, so that the checkpoint is incomplete, and remove files of an earlier save of this
        step that are not among `files`.  Returns the names and sizes of the files that are there."""
        self._store.remove([self._name(step, manifest.NAME)])
        prefix = f"{folders.name_of(step)}/"
        there = {stored.name.removeprefix(prefix): stored.num_bytes for stored in self._store.objects(prefix)}
        self._store.remove([prefix + name for name in there if name not in files])
        return {name: num_bytes for name, num_bytes in there.items() if name in files}

    def send(self, step: int, folder: Path, entries: Mapping[str, Entry], arrived: Mapping[str, int]) -> int:
        """Send files of the checkpoint in `folder`, except those that arrived before.  Returns the bytes sent.

        arrived: the result of `begin`
        """
        return self._store.send(folder, entries, arrived, f"{folders.name_of(step)}/")

    def publish(self, step: int, folder: Path, *, give_up_after: int | None) -> None:
        """Write the manifest, then the pointer.

        give_up_after: the step from which the run resumed; checkpoints of later steps, except this one, are given up
        """
        for later in self.steps() if give_up_after is not None else []:
            if give_up_after < later != step:  # type: ignore[operator]
                self._give_up(later)
        self._store.write(self._name(step, manifest.NAME), (folder / manifest.NAME).read_bytes())
        self._store.write(folders.POINTER, str(step).encode())

    def remove_old(
        self, step: int, *, keep_last: int | None, keep_every: int | None, keep_steps: Collection[int | None]
    ) -> None:
        """Remove old checkpoints after that of `step` was copied, by the rules of `folders.remove_old`."""
        steps = self.steps() if keep_last is not None else []
        for old in folders.retired(steps, step, keep_last=keep_last or 0, keep_every=keep_every, keep_steps=keep_steps):
            self._store.remove([self._name(old, manifest.NAME)])
            self._store.remove([stored.name for stored in self._store.objects(f"{folders.name_of(old)}/")])

    def _give_up(self, step: int) -> None:
        if (content := self._store.read(self._name(step, manifest.NAME))) is not None:
            self._store.write(self._name(step, GIVEN_UP), content[0])
            self._store.remove([self._name(step, manifest.NAME)])

    @staticmethod
    def _name(step: int, name: str) -> str:
        return f"{folders.name_of(step)}/{name}"
