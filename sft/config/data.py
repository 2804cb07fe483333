"""Keys of the data: files, tokenizer, supervision, and packing."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from sft.config.long import LongConfig
from sft.config.section import UNREPORTED, Name, Path, Positive, Section, Word
from sft.config.teacher import TeacherConfig
from sft.files import object_store

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_OURS = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that every template gets


@dataclass(frozen=True)
class NamedDataset:
    """A dataset that `datasets.load_dataset` takes: its name on the Hugging Face hub, or a local folder."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: tuple[tuple[str, str], ...] | None = None  # (key of a row, column); None: all columns as they are

    def __str__(self) -> str:
        """The name in reports: HuggingFaceH4/ultrachat_200k train_sft[:10%]"""
        return " ".join(part for part in (self.name, self.config, self.split) if part)


Input = str | NamedDataset  # a data file, or a dataset by name


class RowsConfig(Section):
    files: Annotated[list[Path], Field(min_length=1)] | None = None
    """Files of this source, or one file."""
    dataset: Path | None = None
    """In place of files: a dataset on the Hugging Face hub, or a folder that `datasets` can load."""
    config: Path | None = None
    """Configuration of the dataset, if it has several."""
    split: Path | None = None
    """Split of the dataset, or parts of splits, such as "train_sft[:10%]"; null: train."""
    revision: Path | None = None
    """Commit, tag or branch of a dataset on the hub; null: main.  Only a commit never changes."""
    columns: Annotated[dict[Word, Path], Field(min_length=1)] | None = None
    """For each key of a row the column that holds it: {messages: conversation}.  Other columns are not read.  null:
    columns have the names of the keys."""

    @field_validator("files", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, files: object) -> object:
        return [files] if isinstance(files, str) else files

    @property
    def inputs(self) -> list[Input]:
        """The files, or the dataset."""
        if self.dataset is None:
            return list(self.files or [])
        columns = None if self.columns is None else tuple(self.columns.items())
        return [NamedDataset(self.dataset, self.config, self.split or "train", self.revision, columns)]

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.files is not None and self.dataset is not None:
            yield "dataset", "clashes with files; give one of them"
        elif self.files is None and self.dataset is None:
            yield "files", "is missing; give files, or dataset with the name of a dataset"
        elif self.dataset is None:
            for name in ("config", "split", "revision", "columns"):
                if getattr(self, name) is not None:
                    yield name, "belongs to a dataset, but dataset is not given; remove it"


class SourceConfig(RowsConfig):
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Relative share of the tokens of an epoch, which contains every sample and is as short as the shares allow."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Passes over this source per epoch; 2.5: two passes and half a pass.  Not together with weights."""


class DataConfig(Section):
    train: Annotated[list[Path], Field(min_length=1)] | Annotated[dict[Word, SourceConfig], Field(min_length=1)]
    """Training files (JSONL, JSON or parquet, docs/start/data.md), or named sources: {chat: {files: a.jsonl}, code:
    {dataset: OWNER/NAME, split: train}}."""
    eval: list[Path] | dict[Name, Path | list[Path] | RowsConfig] | None = None
    """Held-out files, packed like training data; null: none.  Two sets: {chat: a.jsonl, code: {dataset:
    OWNER/NAME}}."""
    long: LongConfig = Field(LongConfig(), json_schema_extra=UNREPORTED)
    """Questions about long texts, for `sft eval --long` and in a run."""
    tokenizer: Path | None = None
    """byte (built in), or a folder or hub name with a tokenizer; null: that of model.hf, or byte without model.hf."""
    add_tokens: list[str] = []
    """Tokens that the model does not have yet: they get the next ids, and rows of embedding and output weight.  Texts
    of the data may contain them (docs/start/data.md, Add tokens)."""
    add_special_tokens: list[str] = []
    """The same for control tokens, after those of add_tokens: only templates write them; in texts they stay text."""
    chat_template: Path | None = None
    """Jinja file that replaces the chat template of the tokenizer."""
    chat_template_kwargs: dict[Variable, bool | int | float | str] = {}
    """Additional variables of the chat template (true, false, numbers, texts), such as {enable_thinking: false}."""
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")] = "2026-01-01"
    """Date, YYYY-MM-DD, that a chat template gets if it asks for today's, so that tokens are the same on every day."""
    on_omitted: Literal["report", "error"] = "report"
    """If the chat template leaves out a text of a chat: report (count and list the text), or error."""
    supervise: Literal["assistant", "last", "after_last_user", "all"] = "assistant"
    """Supervised tokens: all assistant turns, the last one, those after the last user message, or every token
    (docs/concepts/masks.md).  A message may choose itself: "train": false, "weight": 0.5."""
    turns: Literal["chat", "each"] = "chat"
    """chat: a chat is rendered once.  each: it is rendered up to every supervised assistant turn, and each rendering
    trains its last turn, with its thinking.  Common beginnings are stored and computed once
    (docs/concepts/trees.md)."""
    supervise_inserted: bool = True
    """Also supervise text that the template itself writes into an assistant's turn after the prompt, such as an empty
    <think></think> or harmony's <|channel|>final<|message|>.  false: do not, as sft 0.1."""
    final_end: Annotated[str, StringConstraints(min_length=1)] | Literal["auto"] | None = "auto"
    """Token that is appended after the last answer if the template writes none (GLM).  auto: the token that ends the
    template's own turns and is in generation_config.json; null: none."""
    assistant_control_tokens: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Control tokens that assistant texts of the data may contain, in addition to those that the template writes inside
    its turns: ["[THINK]", "[/THINK]"].  All other control tokens in texts are tokenised as text."""
    seq_length: Positive
    """Tokens of a pack before context parallelism; also the maximum length of a sample."""
    doc_multiple: Positive = 32
    """Documents are padded to a multiple of this number, which must be divisible by 2 * cp.  32 suffices for cp 16."""
    over_long: Literal["error", "drop", "cut_turns", "windows"] = "error"
    """If a sample exceeds seq_length: error, drop the sample, keep its first turns (cut_turns), or split it into
    samples (windows)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """If a row is unusable: stop with an error, or skip the row, but at most a tenth of a file."""
    pad_to_seq_length: bool = False
    """Pad every pack to seq_length, so that all microbatches have the same shape."""
    shuffle: bool = True
    """Shuffle the samples anew in every epoch."""
    num_workers: Positive | Literal["auto"] = Field("auto", json_schema_extra=UNREPORTED)
    """Number of processes that tokenise, without influence on the result; auto: one per core, at most 32."""
    cache_dir: Path | None = Field(None, json_schema_extra=UNREPORTED)
    """Folder of tokenised data; null: run.dir/cache."""
    cache_remote: Path | None = Field(None, json_schema_extra=UNREPORTED)
    """Place in an object store to which tokenised data are copied, and from which cache_dir gets those that it lacks:
    s3://BUCKET/PATH."""
    teacher: TeacherConfig = TeacherConfig()
    """Distributions of a teacher for supervised tokens, beside their labels (docs/how-to/score.md)."""
    plan: Path | None = None
    """Plan file of `sft data plan --write`; null: a plan is computed from the data, run.seed and sizes."""

    @property
    def new_tokens(self) -> list[str]:
        """The tokens of add_tokens and add_special_tokens, in the order in which they get ids."""
        return [*self.add_tokens, *self.add_special_tokens]

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The named sources; empty if `train` is a list of files."""
        return self.train if isinstance(self.train, dict) else {}

    @property
    def train_keys(self) -> dict[str, list[str]]:
        """Training files by key: {"data.train": [...]}, or {"data.train.chat.files": [...], ...}."""
        if isinstance(self.train, list):
            return {"data.train": self.train}
        return {f"data.train.{name}.files": source.files for name, source in self.train.items() if source.files}

    @property
    def train_files(self) -> list[Input]:
        """The files and datasets of all sources, in their order."""
        if isinstance(self.train, list):
            return list(self.train)
        return [file for source in self.train.values() for file in source.inputs]

    @property
    def train_names(self) -> list[str] | None:
        """The name of the source of each element of `train_files`; None if `train` is a list of files."""
        return [name for name, source in self.sources.items() for _ in source.inputs] or None

    @property
    def eval_sets(self) -> dict[str, list[Input]]:
        """Files and datasets of each held-out set; a set without a name is called eval."""
        if self.eval is None or isinstance(self.eval, list):
            return {"eval": list(self.eval)} if self.eval else {}
        return {name: self._inputs(rows) for name, rows in self.eval.items()}

    @staticmethod
    def _inputs(rows: str | list[str] | RowsConfig) -> list[Input]:
        if isinstance(rows, RowsConfig):
            return rows.inputs
        return [rows] if isinstance(rows, str) else list(rows)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.cache_remote is not None and (reason := object_store.refusal(self.cache_remote)):
            yield "cache_remote", reason
        try:
            date.fromisoformat(self.date)
        except ValueError:
            yield "date", "is a day that no calendar has; give a day such as 2026-01-01"
        for key in ("add_tokens", "add_special_tokens"):
            if "" in getattr(self, key):
                yield key, "names an empty token; remove it"
        for token in dict.fromkeys(token for token in self.new_tokens if self.new_tokens.count(token) > 1):
            key = "add_special_tokens" if token in self.add_special_tokens else "add_tokens"
            yield key, f"names {token!r} more than once in add_tokens and add_special_tokens; name it once"
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        counted = [name for name, source in self.sources.items() if source.epochs is not None]
        for name in self.sources:
            if weighted and name in counted:
                why = f"clashes with the weight of {weighted[0]}; give weights to all sources, or epochs to all sources"
                yield f"train.{name}.epochs", why
            elif (weighted or counted) and name not in weighted + counted:
                key, other = ("weight", weighted[0]) if weighted else ("epochs", counted[0])
                why = f"is missing, but {other} has {key}; give {key.removesuffix('s')}s to all sources, or to none"
                yield f"train.{name}.{key}", why
        if self.turns == "each" and self.supervise != "assistant":
            yield "turns", (
                f"trains every assistant turn by itself, which clashes with supervise = {self.supervise}; use "
                "supervise = assistant, or turns = chat"
            )
        if taken := [
            name for name in self.chat_template_kwargs if name in _OURS or name.endswith(("_token", "_tokens"))
        ]:
            why = f"sets {', '.join(taken)}, but a template gets this from the chat or the tokenizer; remove it"
            yield "chat_template_kwargs", why
        if empty := [name for name, files in self.eval_sets.items() if not files]:
            yield "eval", f"has no file for {', '.join(empty)}; give a file, or remove the set"
        if "train" in self.eval_sets:
            yield "eval", "has a set named train, which is the name of the training data; choose another name"
