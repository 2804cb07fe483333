"""Keys of the data: which files, what becomes of them, and how they are packed."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from sft.config.section import UNREPORTED, Name, Path, Positive, Section, Word

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_OURS = {"messages", "tools", "documents", "add_generation_prompt"}  # what every template is given


class SourceConfig(Section):
    files: list[Path] = Field(min_length=1)
    """Files of this source.  A single path is a list of one."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of an epoch's tokens, beside those of all sources; the epoch is as long as no sample needs be left out."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """How often an epoch sees this source: 2.5 is twice, and half of it a third time.  Instead of weights."""


class DataConfig(Section):
    train: Annotated[list[Path], Field(min_length=1)] | Annotated[dict[Word, SourceConfig], Field(min_length=1)]
    """Training files: JSONL, JSON or parquet with a `messages` column; or named sources: {chat: {files: a.jsonl}}."""
    eval: list[Path] | dict[Name, Path | list[Path]] = []
    """Held-out files, evaluated through the same packed path; {chat: a.jsonl, code: [b.jsonl, c.jsonl]} apart."""
    tokenizer: Path = "byte"
    """byte (built in, no file) or a Hugging Face tokenizer folder."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own chat template."""
    chat_template_kwargs: dict[Variable, bool | int | float | str] = {}
    """Further variables for the chat template, true, false, a number or text each: {enable_thinking: false}."""
    on_omitted: Literal["report", "error"] = "report"
    """A text of a chat that the template leaves out: count and list it, or stop with its row and message."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """What is learned: the assistant's turns, its last turn only, or every token.  See docs/masks.md."""
    seq_length: Positive
    """Capacity of a pack in tokens, before context parallelism; also the longest sample."""
    doc_multiple: Positive = 32
    """Documents are padded to a multiple of this; must be divisible by 2 * cp.  32 serves cp up to 16."""
    over_long: Literal["error", "drop", "cut_turns", "windows"] = "error"
    """A sample longer than seq_length: stop, leave it out, keep its first turns, or make several of it.  Counted."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: stop with its name, or leave it out and list it, a tenth of a file at most."""
    pad_to_seq_length: bool = False
    """Fill every pack to seq_length, so that all microbatches have one shape."""
    shuffle: bool = True
    """Draw a new order of the samples every epoch."""
    num_workers: Positive | Literal["auto"] = Field("auto", json_schema_extra=UNREPORTED)
    """Processes that tokenise; auto means one per core, 32 at most.  The result does not depend on it."""
    cache_dir: Path | None = Field(None, json_schema_extra=UNREPORTED)
    """Where tokenised data is kept; null means run.dir/cache."""
    plan: Path | None = None
    """Plan to follow, written by `sft data plan --write`; null makes one from the data, seed and sizes."""

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The named sources; none where `train` is a list of files."""
        return self.train if isinstance(self.train, dict) else {}

    @property
    def train_keys(self) -> dict[str, list[str]]:
        """Training files by the key that names them: data.train, or data.train.chat.files and so on."""
        if isinstance(self.train, list):
            return {"data.train": self.train}
        return {f"data.train.{name}.files": source.files for name, source in self.train.items()}

    @property
    def train_files(self) -> list[str]:
        """Files of all sources, in their order."""
        return [file for files in self.train_keys.values() for file in files]

    @property
    def train_names(self) -> list[str] | None:
        """Of each of these files the source it belongs to; None where sources have no names."""
        return [name for name, source in self.sources.items() for _ in source.files] or None

    @property
    def eval_sets(self) -> dict[str, list[str]]:
        """Files of each held-out set; a set without a name is called eval."""
        if isinstance(self.eval, list):
            return {"eval": self.eval} if self.eval else {}
        return {name: [files] if isinstance(files, str) else files for name, files in self.eval.items()}

    def conflicts(self) -> Iterator[tuple[str, str]]:
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        counted = [name for name, source in self.sources.items() if source.epochs is not None]
        for name in self.sources:
            if weighted and name in counted:
                why = f"cannot be with the weight of {weighted[0]}; give weights to all sources, or epochs to all"
                yield f"train.{name}.epochs", why
            elif (weighted or counted) and name not in weighted + counted:
                key, other = ("weight", weighted[0]) if weighted else ("epochs", counted[0])
                why = f"stands beside the {key} of {other}; give {key.removesuffix('s')}s to all sources, or to none"
                yield f"train.{name}.{key}", why
        if taken := [
            name for name in self.chat_template_kwargs if name in _OURS or name.endswith(("_token", "_tokens"))
        ]:
            why = f"gives {', '.join(taken)}, which a template gets from the chat or the tokenizer; leave it out"
            yield "chat_template_kwargs", why
        if empty := [name for name, files in self.eval_sets.items() if not files]:
            yield "eval", f"names {', '.join(empty)} without a file; give it one, or leave it out"
        if "train" in self.eval_sets:
            yield "eval", "names a set train, which is what the training data are called; choose another name"
